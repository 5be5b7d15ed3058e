// Attention of few query rows over a cache (Hopper, sm_90a): decoding of grouped queries, and appending of
// new tokens to the cache. docs/kernels/mha_decode.md has the reasons.
//
//   S^T = K Q^T, with softcap and ALiBi, masked;  P = softmax(scale S);  O^T = V^T P^T
//
//   q [b, tokens, heads, D_QK] or segments of one array, caches [blocks, block size, KV heads, D], bf16, fp16
//   or e4m3 -> out [b, tokens, heads, D_V], lse in float32, natural log; the cache gets k_new, rotated, and
//   v_new
//
// Tokens are the rows of both products, so that few queries cost little: memory is the limit. A warpgroup of
// math has its own query rows, and reads all of K and V in shared memory; with an FP8 cache it has its own
// tokens of each block, and all query rows.
//
// Grid: a CTA for each SM, but for a few, in teams which share the line of all blocks of keys
// (mha/decode_line.cuh); or, with is_whole, a CTA for each pair. kernels/mha_decode_combine.cu adds up the
// parts of pairs that were cut.
//
// Roles (128 (MATH_GROUPS + 1) threads)
//   math    MATH_GROUPS warpgroups   load Q; S^T, softmax, P, O^T, results
//   loader  the last warpgroup       looks up pages, loads K and V (mha/decode_loader.cuh)
//
// Barrier       count                arrives, after what                       waits, before what   parity
// bar_k_full[s] 128                  loader: its copies of K have landed       math: S^T            0
// bar_k_free[s] 4 MATH_GROUPS        a lane of each warp of math: S^T done,    loader: refill       1
//                                    FP8: has fragments of its tokens
// bar_v_full[s] 128                  loader: its copies of V have landed       math: O^T            0
// bar_v_free[s] 4 MATH_GROUPS        the same of V                             loader: refill       1
// NB_MATH + wg  128 (named)          warpgroup wg: Q, P, maxima, sums or O     the same: use them   -
//                                    are in shared memory
// NB_VOTE + wg  128 (named)          whether a score outgrew its reference;    follow it; overwrite -
//                                    P of the block before read                P
// NB_MERGE      256 (named)          FP8, three times: both have read Q;       overwrite it by O;   -
//                                    O of warpgroup 1 is there; it was read    add it; load Q
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/swizzled_tile.cuh"
#include "layout/transposed.cuh"
#include "mha/decode_fp8.cuh"
#include "mha/decode_line.cuh"
#include "mha/decode_loader.cuh"
#include "mha/decode_output.cuh"
#include "mha/decode_params.cuh"
#include "mha/decode_rotary.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

constexpr int kThreads = 128 * (kMathGroups + 1);
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= kMaxSharedBytes, "more shared memory than a CTA may have");

enum NamedBarrier : int { NB_MATH = 1, NB_VOTE = 1 + kMathGroups, NB_MERGE = 1 + 2 * kMathGroups };

// A warpgroup of math.
class Math {
  public:
    __device__ __forceinline__ Math(const Params& params, SharedMemoryPlan& smem, int wg, int warp_idx)
        : params(params), smem(smem), wg(wg), warp_idx(warp_idx) {}

    __device__ __forceinline__ void run() {
        for (Walk walk(params, smem.share); walk.next(params);) attend(walk);
    }

  private:
    using Scores = float[kOwnTiles][kAccumulators];

    const Params& params;
    SharedMemoryPlan& smem;
    const int wg, warp_idx;
    const int row_group = kRowGroups == 1 ? 0 : wg;
    const int own_token = kRowGroups == kMathGroups ? 0 : wg * kOwnTokens;  // the first of a block
    u32 number = 0;                                                         // of the next block
    // Each of the thread's rows has these.
    float m[kThreadRows], l[kThreadRows];  // references of the softmax; the thread's share of the sums
    float slope[kThreadRows];              // ALiBi, times log2(e)
    int diagonal[kThreadRows];             // the key that the row's token is aligned to
    float scale_log2, score_scale;         // of the pair's scores: see Params

    __device__ __forceinline__ u32 rows_address() const { return smem_address(smem.rows[wg]); }

    // Q, in the layout that TMA would give it; zeros where there is no row.
    __device__ __forceinline__ void load_q(const Walk& walk) const {
        const int unit = threadIdx.x % 8;
        const bool segments = params.cu_seqlens_q != nullptr;
#pragma unroll
        for (int own = threadIdx.x % 128 / 8; own < kOwnRows; own += 16) {
            const RowPlace row(params, walk, walk.first_row(row_group) + own);
            const QElement* src = params.q + (segments ? 0 : walk.index * params.q_stride_b) +
                                  (walk.request.q_begin + row.token) * params.q_stride_s +
                                  row.head * params.q_stride_h;
#if !CACHE_FP8
            int position =
                params.rotary_seqlens == nullptr ? walk.request.cached : params.rotary_seqlens[walk.index];
            if (params.rotates_by_token) position += row.token;
#endif
#pragma unroll
            for (int chunk = 0; chunk < kKChunks; ++chunk) {
                uint4 value = make_uint4(0, 0, 0, 0);
#if CACHE_FP8
                if (row.exists) value = q_unit(src + 64 * chunk, unit, params.d_qk - 64 * chunk);
#else
                const int i = 8 * chunk + unit;
                if (row.exists && 8 * i < params.d_qk) value = load_rotated(params, src, i, position);
#endif
                store_shared_16(rows_address() + chunk * Rows::kBytes + Rows::offset(own, unit), value);
            }
        }
    }

    __device__ __forceinline__ void attend(const Walk& walk) {
        load_q(walk);
        fence_proxy_async();
        named_barrier_sync(NB_MATH + wg, 128);
        const Request& request = walk.request;
        const int shift = request.length - request.q_len;  // from a query's number to its diagonal
        scale_log2 = params.scale_log2, score_scale = params.score_scale;
        if constexpr (kFp8) {
            float factor =
                descale(params.k_descale, params.k_descale_stride_b, params.k_descale_stride_h, walk);
            if constexpr (Q_FP8)
                factor *=
                    descale(params.q_descale, params.q_descale_stride_b, params.q_descale_stride_h, walk);
            (kSoftcap ? score_scale : scale_log2) *= factor;
        }
        Output o;
        const i64 slopes = static_cast<i64>(walk.index) * params.alibi_stride_b;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            m[i] = -kInfinity, l[i] = 0.0f;
            const RowPlace row(params, walk, walk.first_row(row_group) + query_of(i));
            diagonal[i] = min_int(row.token, request.q_len - 1) + shift;
            if constexpr (kAlibi)
                slope[i] = !row.exists ? 0.0f : kLog2E * params.alibi_slopes[slopes + row.head];
        }
#pragma unroll
        for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
            for (int j = 0; j < kAccumulators; ++j) o[chunk][j] = 0.0f;
        // Blocks that begin at plain_begin or later and end at plain_end or before are seen by all rows.
        const int leftpad = params.cache_leftpad == nullptr ? 0 : params.cache_leftpad[walk.index];
        const int last_row = walk.first_row(row_group) + kOwnRows - 1;
        const int first = divide(walk.first_row(row_group), params.group_magic, params.group_shift) + shift;
        const int last =
            min_int(divide(last_row, params.group_magic, params.group_shift), request.q_len - 1) + shift;
        const int plain_begin = max_int(leftpad, last - params.window_left);
        const int plain_end = min_int(request.length, first + params.window_right + 1);
#if CACHE_FP8
        if constexpr (kAhead) load_k(0);
#endif
#pragma unroll 1
        for (int i = 0; i < walk.blocks; ++i) {
            const int first_key = (walk.first_block + i) * kBlockTokens + own_token;
            const bool is_plain = first_key >= plain_begin && first_key + kOwnTokens <= plain_end;
            Scores s;
            multiply_k(s);
            scale_and_mask(s, first_key, is_plain, leftpad, request.length);
            follow_maxima(s, o);
            store_probabilities(s);
            multiply_v(o, i + 1 < walk.blocks);
        }
        finish(walk, o);
    }

    __device__ __forceinline__ u32 stage() const { return number % kStages; }
    __device__ __forceinline__ u32 parity() const { return number / kStages & 1; }
    // Descriptor of 16 columns of Q, or of 16 tokens of P.
    __device__ __forceinline__ static u64 rows_at(u32 rows, int step) {
        return Rows::k_major(rows) + step / 4 * Rows::kStepTile + step % 4 * Rows::kStepK;
    }

#if CACHE_FP8
    // Fragments of 128 columns. A warp gives its part of a block free when it has the last ones. Where
    // registers have room, the first ones for a product are made while the product before runs.
    static constexpr bool kAhead = kOwnRows * kVChunks <= 32;
    u32 k_fragments[2][4][4], v_fragments[2][kOwnTokens / 32][2][4];

    // Of block `number`, which is waited for first.
    __device__ __forceinline__ void load_k(int columns) {
        if (columns == 0) mbarrier_wait_parity(smem_address(&smem.bar_k_full[stage()]), parity());
        const u32 k = smem_address(smem.k[stage()]) + columns * Keys::kBytes;
#pragma unroll
        for (int half = 0; half < min_int(2, kKChunks - 2 * columns); ++half)
            load_k_fragments(k_fragments[half], k, own_token + 16 * warp_idx, half);
        if (columns == kKTiles - 1) release(smem.bar_k_free[stage()]);
    }
    __device__ __forceinline__ void load_v(int columns) {
        if (columns == 0) mbarrier_wait_parity(smem_address(&smem.bar_v_full[stage()]), parity());
        const u32 v = smem_address(smem.v[stage()]) + columns * Keys::kBytes;
#pragma unroll
        for (int chunk = 0; chunk < min_int(2, kVChunks - 2 * columns); ++chunk)
#pragma unroll
            for (int i = 0; i < kOwnTokens / 32; ++i)
                load_v_fragments(v_fragments[chunk][i], v, own_token + 32 * i, 4 * chunk + warp_idx);
        if (columns == kVTiles - 1) release(smem.bar_v_free[stage()]);
    }

    // S^T = K Q^T of the block.
    __device__ __forceinline__ void multiply_k(Scores& s) {
        static_assert(kOwnTiles == 1, "tokens of a block");
#pragma unroll
        for (int columns = 0; columns < kKTiles; ++columns) {
            if (columns > 0 || !kAhead) load_k(columns);
            wgmma_pin(s[0]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < min_int(8, 4 * kKChunks - 8 * columns); ++step)
                wgmma_rs<kMath>(s[0], k_fragments[step / 4][step % 4],
                                rows_at(rows_address(), 8 * columns + step), columns + step > 0);
            wgmma_commit_group();
            if (kAhead && columns == kKTiles - 1) load_v(0);
            wgmma_wait_group<0>();
            wgmma_pin(s[0]);
        }
    }

    // O^T += V^T P^T of the block, after which `number` is the next one's.
    __device__ __forceinline__ void multiply_v(Output& o, bool has_next) {
        if constexpr (!kAhead) load_v(0);
        fence_proxy_async();  // P
        named_barrier_sync(NB_MATH + wg, 128);
#pragma unroll
        for (int columns = 0; columns < kVTiles; ++columns) {
            const int chunks = min_int(2, kVChunks - 2 * columns);
            if (columns > 0) load_v(columns);
#pragma unroll
            for (int chunk = 0; chunk < chunks; ++chunk) wgmma_pin(o[2 * columns + chunk]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < kOwnTokens / 16; ++step)
#pragma unroll
                for (int chunk = 0; chunk < chunks; ++chunk)
                    wgmma_rs<kMath>(o[2 * columns + chunk], v_fragments[chunk][step / 2][step % 2],
                                    rows_at(smem_address(smem.p[wg]), step), true);
            wgmma_commit_group();
            if (columns == kVTiles - 1) {
                ++number;
                if (kAhead && has_next) load_k(0);
            }
            wgmma_wait_group<0>();
#pragma unroll
            for (int chunk = 0; chunk < chunks; ++chunk) wgmma_pin(o[2 * columns + chunk]);
        }
    }
#else
    // S^T = K Q^T of a block.
    __device__ __forceinline__ void multiply_k(Scores& s) const {
        mbarrier_wait_parity(smem_address(&smem.bar_k_full[stage()]), parity());
        fence_proxy_async();  // the rows were written by cp.async
        const u64 desc_k = Keys::k_major(smem_address(smem.k[stage()]));
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) wgmma_pin(s[tile]);
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile)
#pragma unroll
            for (int step = 0; step < D_QK / 16; ++step)
                wgmma_ss<kMath>(s[tile],
                                desc_k + tile * (64 * Keys::kRowBytes >> 4) + step / 4 * Keys::kStepTile +
                                    step % 4 * Keys::kStepK,
                                rows_at(rows_address(), step), step > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) wgmma_pin(s[tile]);
        release(smem.bar_k_free[stage()]);
    }

    // O^T += V^T P^T of the block.
    __device__ __forceinline__ void multiply_v(Output& o, bool) {
        mbarrier_wait_parity(smem_address(&smem.bar_v_full[stage()]), parity());
        fence_proxy_async();  // P, and V, whose rows were written by cp.async
        named_barrier_sync(NB_MATH + wg, 128);
        const u64 desc_v = Keys::mn_major(smem_address(smem.v[stage()]));
#pragma unroll
        for (int chunk = 0; chunk < kVChunks; ++chunk) wgmma_pin(o[chunk]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockTokens / 16; ++step)
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk)
                wgmma_ss<kMath, Major::kMn>(o[chunk], desc_v + chunk * Keys::kStepTile + step * Keys::kStepMn,
                                            rows_at(smem_address(smem.p[wg]), step), true);
        wgmma_commit_group();
        wgmma_wait_group<0>();
#pragma unroll
        for (int chunk = 0; chunk < kVChunks; ++chunk) wgmma_pin(o[chunk]);
        release(smem.bar_v_free[stage()]);
        ++number;
    }
#endif

    // P from scores, in shared memory, and the thread's share of the sums.
    __device__ __forceinline__ void store_probabilities(Scores& s) {
#pragma unroll
        for (int tile = 0; tile < kOwnTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                const int j = accumulator_of(i);
                const float offset = m[i] == -kInfinity ? 0.0f : m[i];
                s[tile][j] = exp2_approx(s[tile][j] - offset);
                s[tile][j + 2] = exp2_approx(s[tile][j + 2] - offset);
                l[i] += s[tile][j] + s[tile][j + 2];
            }
            store_transposed<kMath>(smem_address(smem.p[wg]) + tile * Rows::kBytes, s[tile], warp_idx);
        }
    }

    __device__ __forceinline__ static void release(u64& bar) {
        __syncwarp();
        if (lane_index() == 0) mbarrier_arrive(smem_address(&bar));
    }

    // Scores in base 2; -inf where a row does not see the key.
    __device__ __forceinline__ void scale_and_mask(Scores& s, int first_key, bool is_plain, int leftpad,
                                                   int length) const {
        const int first = first_key + 16 * warp_idx + lane_index() / 4;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const int begin = max_int(leftpad, diagonal[i] - params.window_left);
            const int end = min_int(length, diagonal[i] + params.window_right + 1);
#pragma unroll
            for (int tile = 0; tile < kOwnTiles; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& score = s[tile][accumulator_of(i) + 2 * half];
                    const int key = first + 64 * tile + 8 * half;
                    if constexpr (kSoftcap) score = tanh_approx(score * score_scale);
                    score *= scale_log2;
                    if constexpr (kAlibi) score -= slope[i] * fabsf(static_cast<float>(diagonal[i] - key));
                    if (!is_plain && (key < begin || key >= end)) score = -kInfinity;
                }
        }
    }

    // A row's reference is its largest score so far: its largest probability is 1, which 16 bits hold.
    __device__ __forceinline__ void follow_maxima(const Scores& s, Output& o) {
        float top[kThreadRows];
        bool outgrown = false;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const int j = accumulator_of(i);
            top[i] = -kInfinity;
#pragma unroll
            for (int tile = 0; tile < kOwnTiles; ++tile)
                top[i] = fmaxf(top[i], fmaxf(s[tile][j], s[tile][j + 2]));
            outgrown |= top[i] > m[i];
        }
        if (!named_barrier_any(NB_VOTE + wg, 128, outgrown)) return;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const float of_warp = max_over_rows(top[i]);
            if (lane_index() < 4) smem.of_warps[wg][warp_idx][query_of(i)] = of_warp;
        }
        named_barrier_sync(NB_MATH + wg, 128);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const float next = fmaxf(m[i], max_of_warps(smem.of_warps[wg], query_of(i)));
            // O is still zero while the reference is -inf.
            const float shrink = next == m[i] || m[i] == -kInfinity ? 1.0f : exp2_approx(m[i] - next);
            m[i] = next;
            l[i] *= shrink;
            const int j = accumulator_of(i);
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk) {
                o[chunk][j] *= shrink;
                o[chunk][j + 2] *= shrink;
            }
        }
    }

    __device__ __forceinline__ void finish(const Walk& walk, Output& o) {
        float sum[kThreadRows];
        // All have read the maxima: they have met before the last product.
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const float of_warp = sum_over_rows(l[i]);
            if (lane_index() < 4) smem.of_warps[wg][warp_idx][query_of(i)] = of_warp;
        }
        named_barrier_sync(NB_MATH + wg, 128);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) sum[i] = sum_of_warps(smem.of_warps[wg], query_of(i));
        if constexpr (kRowGroups < kMathGroups) {
            merge(o, sum);
            if (wg > 0) return;
        }
        if (walk.begins() && walk.ends()) {
            store_results(params, walk, row_group, rows_address(), o, m, sum, warp_idx, NB_MATH + wg);
        } else {
            const int part = 2 * blockIdx.x + walk.begins();
            float4* dst = part_of(params, part, row_group);
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
                for (int j = 0; j < kAccumulators; j += 4)
                    dst[(chunk * kAccumulators + j) / 4 * 128] =
                        make_float4(o[chunk][j], o[chunk][j + 1], o[chunk][j + 2], o[chunk][j + 3]);
            if (warp_idx == 0 && lane_index() < 4) {
#pragma unroll
                for (int i = 0; i < kThreadRows; ++i)
                    states_of(params, part, row_group)[query_of(i)] = make_float2(m[i], sum[i]);
            }
        }
        named_barrier_sync(NB_MATH + wg, 128);  // all have read the sums, and O
    }

    // Adds what warpgroup 1 has of its tokens to what warpgroup 0 has. O of warpgroup 1 takes the place of Q.
    __device__ __forceinline__ void merge(Output& o, float (&sum)[kThreadRows]) {
        static_assert(kRowGroups == kMathGroups || 4 * kPartFloats <= sizeof(smem.rows) && kMathGroups == 2 &&
                                                       kOwnTokens * 2 == kBlockTokens);
        float* numbers = reinterpret_cast<float*>(smem.rows) + threadIdx.x % 128;
        named_barrier_sync(NB_MERGE, 256);
        if (wg == 1) {
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
                for (int j = 0; j < kAccumulators; ++j)
                    numbers[(chunk * kAccumulators + j) * 128] = o[chunk][j];
            if (warp_idx == 0 && lane_index() < 4) {
#pragma unroll
                for (int i = 0; i < kThreadRows; ++i)
                    smem.of_warps[1][0][query_of(i)] = m[i], smem.of_warps[1][1][query_of(i)] = sum[i];
            }
        }
        named_barrier_sync(NB_MERGE, 256);
        if (wg == 0) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                const float other = smem.of_warps[1][0][query_of(i)], top = fmaxf(m[i], other);
                const float own_weight = m[i] == top ? 1.0f : exp2_approx(m[i] - top);
                const float weight = other == top ? 1.0f : exp2_approx(other - top);
                m[i] = top;
                sum[i] = own_weight * sum[i] + weight * smem.of_warps[1][1][query_of(i)];
#pragma unroll
                for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int j = accumulator_of(i) + 2 * half;
                        o[chunk][j] =
                            own_weight * o[chunk][j] + weight * numbers[(chunk * kAccumulators + j) * 128];
                    }
            }
        }
        named_barrier_sync(NB_MERGE, 256);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) mha_decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    if (threadIdx.x == 32) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_k_full[stage]), 128);
            mbarrier_init(smem_address(&smem.bar_k_free[stage]), 4 * kMathGroups);
            mbarrier_init(smem_address(&smem.bar_v_full[stage]), 128);
            mbarrier_init(smem_address(&smem.bar_v_free[stage]), 4 * kMathGroups);
        }
        mbarrier_init_fence();
    }
    prefetch_lengths(params);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    auto& counts = reinterpret_cast<i64(&)[kCounts]>(smem.k);  // where nothing is copied yet
    if (wg == 0 && !params.is_whole) count_blocks(params, counts);
    __syncthreads();  // the warpgroup alone would do, but racecheck then reports false hazards
    if (threadIdx.x < 32) {
        const Share share = params.is_whole ? whole_pairs(params, blockIdx.x) : share_of_cta(params, counts);
        if (lane_index() == 0) smem.share = share;
    }
    __syncthreads();

    if (wg < kMathGroups) {
        Math(params, smem, wg, warp_idx).run();
    } else {
        BlockLoader(params, smem).run();
    }
}
