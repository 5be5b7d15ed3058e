// Sparse MLA decoding with up to 16 heads over V3.2 caches: tokens are the rows of both products (sm_90a).
//
//   S^T = sm_scale K Q^T,  P = softmax(S),  O^T = V^T P^T,  K, V and all arrays as in mla_sparse_fp8.cu
//
// With so few heads a tile of 64 heads is three quarters padding. wgmma has 64 rows but can have as few as 8
// columns. So tokens are the rows here, and 16 heads cost 16 columns.
//
// The bytes of the cache are copied to shared memory as they are. The e4m3 values are widened to float16,
// exactly, on their way to registers, from where both products take them. RoPE stays bf16 in shared memory.
// Scales are applied elsewhere:
//   K Q^T    Q is float16, times a power of two. Each group of 128 columns has a partial sum of its own,
//            which is multiplied by the scale of token and group in float32.
//   V^T P^T  P times the scale of token and group is float16, so that there is one P per group. It is in
//            units of a power of two, to stay in the range of float16. A unit grows when a scale gets too
//            large for it, just as the reference of the softmax grows with the scores.
// So K and V are not rounded. P is rounded to 11 bits if it is at least 2^-14 of a unit, else to a multiple
// of 2^-24 units.
//
// Grid and MAX_LOGITS: as in mla_sparse_fp8.cu, with tiles of 16 heads.
//
// Roles (768 threads; the launch gives 80 registers to each, setmaxnreg redistributes them)
//   softmax   warpgroup 0,     88 registers  RoPE's part of S^T, online softmax, P^T; loads Q
//   columns   warpgroups 1-4,  88            128 columns each: their part of S^T, their O^T, rescale,
//                                            epilogue; warp 0 of the last one walks the plan
//   producer  warpgroup 5,     40            copies rows with cp.async, each warp 16 rows of a block
//
// Schedule, per 64-token block j: the tensor core works 4 x 16 x 16 + 4 x 20 = 1104 cycles
//   producer  | rows of block j + 4, as soon as block j has been read
//   columns   | their part of S^T(j + 1); V^T(j) to registers  | V^T P^T(j)
//   softmax   | add up S^T(j), softmax(j), store P(j)          | ...
//
// Barrier           count  arrives, after what                       waits, before what                parity
// bar_work_full[8]  1      the publisher: work[n] written            all: read it                      0
// bar_work_free[8]  24     lane 0 of each warp: done with the work   the publisher: overwrite it       1
//                          tile
// bar_q_full        128    softmax: Q of the work tile stored,       columns: their part of S^T        0
//                          fenced
// bar_raw_full[s]   132    producer: copies landed, every thread;    softmax, columns: read the rows   0
//                          lane 0 of each warp, valid written
// bar_raw_free[s]   20     softmax, columns: lane 0 of each warp,    producer: refill                  1
//                          rows read
// bar_p_full[p]     128    softmax: P and row scales stored,         columns: rescale, O^T += V^T      0
//                          fenced; partial sums read                 P^T; write the partial sums of
//                                                                    the next block
// bar_p_free[p]     16     columns: lane 0 of each warp, V^T P^T     softmax: overwrite P and row      1
//                          complete                                  scales
// bar_sum_full      128    softmax: sums and units of the work tile  columns: epilogue; write the      0
//                          written; partial sums of its last block   first partial sums of the next
//                          read                                      work tile
// bar_sum_free      512    columns: rows of the work tile stored     softmax: write those of the next  1
// NB_SOFTMAX        128    softmax: Q, maxima of warps, sums of      softmax: use them                 -
//                          warps written
// NB_VOTE           128    softmax: whether a score or scale is too  softmax: raise reference and      -
//                          large                                     unit
// NB_PARTIAL_FULL   640    columns: partial sums of S^T written; Q   softmax: add them up; after the   -
//                          read                                      last block overwrite Q
// NB_HALF + h       256    columns of half h: largest magnitudes     the same: scale of the split      -
//                          written
//
// Nothing is read for an invalid index. Its row in shared memory is zeros, and its scores are masked.
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/rescale.cuh"
#include "layout/transposed.cuh"
#include "mla/cache_rows.cuh"
#include "mla/chunks.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "mla/publisher.cuh"
#include "mla/queries.cuh"
#include "mla/selection.cuh"
#include "mla/sink.cuh"
#include "mla/splits.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"
#include "ptx/wgmma.cuh"

static_assert(LOAD_BYTES == 16 || LOAD_BYTES == 8, "LOAD_BYTES is the alignment of rows in bytes: 16 or 8");

constexpr Dtype kDtype = Dtype::kBf16;
constexpr int kHeads = 16;
constexpr int kStages = 4;
constexpr int kPStages = 2;
constexpr int kGroups = 4;  // of columns that share a scale; one per warpgroup of columns
constexpr int kGroupCols = 128;
using Fp8Row = CacheRow<CacheFormat::kV32>;

constexpr int kThreads = 768;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kProducerWarps = 4;
constexpr int kWarpRows = kBlockTokens / kProducerWarps;
constexpr int kRegistersSoftmax = 88;
constexpr int kRegistersColumns = 88;
constexpr int kRegistersProducer = 40;
static_assert(kRegistersSoftmax + kGroups * kRegistersColumns + kRegistersProducer <=
                  65536 / kThreads / 8 * 8 * (kThreads / 128),
              "more registers than the launch gives");

enum NamedBarrier : int { NB_SOFTMAX = 1, NB_VOTE = 2, NB_PARTIAL_FULL = 3, NB_HALF = 4 };

constexpr int kPartialThreads = 128 + 128 * kGroups;    // that exchange partial sums of S^T
constexpr int kHeadsBytes = kHeads * Chunk::kRowBytes;  // a chunk with one row per head

struct SharedMemoryPlan {
    struct Raw {
        alignas(1024) unsigned char values[kGroups][Chunk::kBytes];  // e4m3
        unsigned char rope[Chunk::kBytes];                           // bf16
    } raw[kStages];                                                  // 163,840 B
    unsigned char q[kGroups][2][kHeadsBytes];                        // 16,384 B: float16
    unsigned char q_rope[kHeadsBytes];                               //  2,048 B: bf16
    unsigned char p[kPStages][kGroups][kHeadsBytes];  // 16,384 B: P^T times the scales of a group, float16
    float4 partial[kGroups][2][128];                  // 16,384 B: partial sums of S^T
    float scale[kStages][kGroups][kBlockTokens];
    float factor[kHeads];                        // that converts scores to base 2
    float row_scale[kPStages][kGroups][kHeads];  // factor on O before V^T P^T
    u32 rescale[kPStages];                       // whether the factor is applied
    float warp_max[4][kHeads];
    float warp_unit[4][kGroups];
    float warp_sum[4][kHeads];
    float row_sum[kHeads];  // of the work tile
    float row_max[kHeads];  // m_ref at the work tile's end, base 2
    float unit[kGroups];    // unit of P and O at the work tile's end
    float warp_top[4 * kGroups][kHeads];
    u16 valid[kStages][kProducerWarps];  // a bit for each row of the stage
    u64 bar_q_full;
    u64 bar_raw_full[kStages];
    u64 bar_raw_free[kStages];
    u64 bar_p_full[kPStages];
    u64 bar_p_free[kPStages];
    u64 bar_sum_full;
    u64 bar_sum_free;
    u64 bar_work_full[kWorkStages];
    u64 bar_work_free[kWorkStages];
    WorkTile work[kWorkStages];
    PublisherState publisher;
    float warp_row_top[kMaxLogits ? 4 : 1][kHeads];
    float row_top[kMaxLogits ? kHeads : 1];  // largest scores of the work tile, base 2
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= kMaxSharedBytes, "more shared memory than a CTA may have");

using RowIndex = TileRow<kHeads>;

// ---- Softmax ----------------------------------------------------------------------------------------------

// Loads Q of a work tile to shared memory. A row is multiplied by a power of two. It is float16 for the
// groups, and bf16 for RoPE. Rows past the last are zeros. Eight lanes share a row.
//
// Column 32 t + 4 s + 2 h + e of a group is stored as column 16 s + 8 h + 2 t + e. That is the order in which
// `Keys` has the columns of K.
__device__ __forceinline__ void load_q(const Params& params, SharedMemoryPlan& smem, int req) {
    const int thread = threadIdx.x % 128;
    const int eighth = thread % 8, tile_row = thread / 8;
    const RowIndex row(params, tile_row);
    const int head = row.valid ? row.head : 0;
    const u16* src = q_address(params, req, row.token, head, eighth);
    const u16* rope = q_rope_address(params, req, row.token, head, eighth);
    uint4 v[9];  // eight columns of each 64
    u32 top = 0;
#pragma unroll
    for (int c = 0; c < 9; ++c) v[c] = load_global_16(c < 8 ? src + c * Chunk::kCols : rope, row.valid);
#pragma unroll
    for (int c = 0; c < 9; ++c) {
        top = max_bf16x2(max_bf16x2(top, abs_bf16x2(v[c].x)), abs_bf16x2(v[c].y));
        top = max_bf16x2(max_bf16x2(top, abs_bf16x2(v[c].z)), abs_bf16x2(v[c].w));
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
        top = max_bf16x2(top, __shfl_xor_sync(0xffffffff, top, distance));
    // The largest element is scaled to [2^14, 2^15). Elements down to 2^-28 of it are exact in float16
    constexpr int kBias = 127, kTopExponent = 14, kInfinite = 255;
    const int exponent = (max_bf16x2(top, top >> 16) & 0x7fff) >> 7;
    const int power = exponent == 0 ? kBias : min_int(kTopExponent + 2 * kBias - exponent, 2 * kBias - 1);
    const float factor = __uint_as_float(power << 23);
    if (eighth == 0) {
        const float inverse = __uint_as_float((2 * kBias - power) << 23);
        smem.factor[tile_row] = exponent == kInfinite ? kNaN : inverse * params.sm_scale_log2;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        const u32 words[4] = {v[c].x, v[c].y, v[c].z, v[c].w};
        const int column = c % 2 * 64 + eighth * 8;  // column of the group
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int step = (column % 32 + 2 * k) / 4;
            const u32 offset = Chunk::offset(tile_row, step % 4 * 2 + k % 2) + column / 32 * 4;
            *reinterpret_cast<u32*>(&smem.q[c / 2][step / 4][offset]) =
                pack_16bit<Dtype::kF16>(bf16_low(words[k]) * factor, bf16_high(words[k]) * factor);
        }
    }
    const u32 words[4] = {v[8].x, v[8].y, v[8].z, v[8].w};
    u32 scaled[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        scaled[k] = pack_16bit<kDtype>(bf16_low(words[k]) * factor, bf16_high(words[k]) * factor);
    *reinterpret_cast<uint4*>(&smem.q_rope[Chunk::offset(tile_row, eighth)]) =
        make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
}

// A unit grows when a scale is more than this many units. P is at most 2^8, and 2^8 x 128 is below 65504, the
// largest float16.
constexpr float kLazyUnits = 128.0f;
constexpr float kInverseOfLeast = 0x1p126f;  // inverse of the least unit, with which a work tile begins

// The inverse of the power of two at or below a scale, limited to the normal range of float.
__device__ __forceinline__ float inverse_unit(float scale) {
    const int exponent = __float_as_uint(scale) >> 23;
    return __uint_as_float(max_int(254 - max_int(exponent, 1), 1) << 23);
}

// A thread has tokens 16 warp_idx + lane / 4 and 8 more than that.
__device__ __forceinline__ void softmax_warpgroup(const Params& params, SharedMemoryPlan& smem,
                                                  int warp_idx) {
    const int lane_idx = lane_index();
    const int token = 16 * warp_idx + lane_idx / 4;
    const bool writes_heads = lane_idx < 4;
    // Where the lane stores 16 bytes of P^T: head 8 (lane / 16) + lane % 8, tokens of half lane / 8 % 2 of
    // the warp
    const u32 smem_p = smem_address(smem.p[0][0]) + lane_idx / 16 * Chunk::kGroupBytes +
                       Chunk::offset(lane_idx % 8, 2 * warp_idx + lane_idx / 8 % 2);
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    for (; reader.next(smem); reader.release(smem)) {
        load_q(params, smem, reader.work(smem).req);
        fence_proxy_async();
        mbarrier_arrive(smem_address(&smem.bar_q_full));
        named_barrier_sync(NB_SOFTMAX, 128);
        float m[4], l[4];        // m_ref, and the sum over the tokens of this thread
        float largest[4];        // largest score of this thread
        float inverse[kGroups];  // inverses of the units
#pragma unroll
        for (int i = 0; i < 4; ++i) m[i] = largest[i] = -kInfinity, l[i] = 0.0f, inverse[i] = kInverseOfLeast;
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages, p_stage = n % kPStages;
            mbarrier_wait_parity(smem_address(&smem.bar_raw_full[stage]), n / kStages & 1);
            fence_proxy_async();  // the rows were copied by cp.async
            float s[8];
            wgmma_pin(s);
            wgmma_fence();
            const u64 desc_q = Chunk::k_major(smem_address(smem.q_rope));
            const u64 desc_k = Chunk::k_major(smem_address(smem.raw[stage].rope));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                wgmma_ss<kDtype>(s, desc_k + i * Chunk::kStepK, desc_q + i * Chunk::kStepK, i > 0);
            wgmma_commit_group();
            float scale[kGroups][2];
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                scale[g][0] = smem.scale[stage][g][token];
                scale[g][1] = smem.scale[stage][g][token + 8];
            }
            const u32 valid = smem.valid[stage][warp_idx] >> (lane_idx / 4);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            __syncwarp();
            if (lane_idx == 0) mbarrier_arrive(smem_address(&smem.bar_raw_free[stage]));
            named_barrier_sync(NB_PARTIAL_FULL, kPartialThreads);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float4 partial = smem.partial[g][k][threadIdx.x];
                    s[4 * k] += partial.x, s[4 * k + 1] += partial.y, s[4 * k + 2] += partial.z,
                        s[4 * k + 3] += partial.w;
                }
            }

            bool outgrown = false;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = accumulator_of(i);
                const float factor = smem.factor[query_of(i)];
                s[j] = valid & 1 ? s[j] * factor : -kInfinity;
                s[j + 2] = valid & 1 << 8 ? s[j + 2] * factor : -kInfinity;
                outgrown |= fmaxf(s[j], s[j + 2]) > m[i] + kLazyLog2;
                if constexpr (kMaxLogits) largest[i] = max_or_nan(largest[i], max_or_nan(s[j], s[j + 2]));
            }
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                outgrown |= fmaxf(fabsf(scale[g][0]), fabsf(scale[g][1])) * inverse[g] > kLazyUnits;
            mbarrier_wait_parity(smem_address(&smem.bar_p_free[p_stage]), ~(n / kPStages) & 1);
            const bool follows = named_barrier_any(NB_VOTE, 128, outgrown);
            if (warp_idx == 0 && lane_idx == 0) smem.rescale[p_stage] = follows;
            if (follows) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float top = max_over_rows(fmaxf(s[accumulator_of(i)], s[accumulator_of(i) + 2]));
                    const float top_scale = max_over_rows(fmaxf(fabsf(scale[i][0]), fabsf(scale[i][1])));
                    if (writes_heads) smem.warp_max[warp_idx][query_of(i)] = top;
                    if (lane_idx == 0) smem.warp_unit[warp_idx][i] = top_scale;
                }
                named_barrier_sync(NB_SOFTMAX, 128);
                // Each head and each group is updated separately. While m_ref is -inf, O is zero and needs no
                // rescaling.
                float change[kGroups];
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    const float top = max_of_warps(smem.warp_unit, g);
                    const float before = inverse[g];
                    if (top * before > kLazyUnits) inverse[g] = inverse_unit(top);
                    change[g] = inverse[g] / before;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int head = query_of(i);
                    const float top = max_of_warps(smem.warp_max, head);
                    const float m_new = top > m[i] + kLazyLog2 ? top : m[i];
                    const float shrink =
                        m_new == m[i] || m[i] == -kInfinity ? 1.0f : exp2_approx(m[i] - m_new);
                    m[i] = m_new;
                    l[i] *= shrink;
                    if (warp_idx == 0 && writes_heads) {
#pragma unroll
                        for (int g = 0; g < kGroups; ++g)
                            smem.row_scale[p_stage][g][head] = shrink * change[g];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = accumulator_of(i);
                const float offset = m[i] == -kInfinity ? 0.0f : m[i];
                s[j] = exp2_approx(s[j] - offset);
                s[j + 2] = exp2_approx(s[j + 2] - offset);
                l[i] += s[j] + s[j + 2];
            }
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const float units[2] = {scale[g][0] * inverse[g], scale[g][1] * inverse[g]};
                u32 p[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    p[k] = pack_16bit<Dtype::kF16>(s[2 * k] * units[k % 2], s[2 * k + 1] * units[k % 2]);
                stmatrix_x4_trans(smem_p + (p_stage * kGroups + g) * kHeadsBytes, p[0], p[1], p[2], p[3]);
            }
            fence_proxy_async();
            mbarrier_arrive(smem_address(&smem.bar_p_full[p_stage]));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            l[i] = sum_over_rows(l[i]);
            if (writes_heads) smem.warp_sum[warp_idx][query_of(i)] = l[i];
            if constexpr (kMaxLogits) {
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    largest[i] = max_or_nan(largest[i], __shfl_xor_sync(0xffffffff, largest[i], distance));
                if (writes_heads) smem.warp_row_top[warp_idx][query_of(i)] = largest[i];
            }
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_free), ~reader.count & 1);
        named_barrier_sync(NB_SOFTMAX, 128);
        if (warp_idx == 0 && writes_heads) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int head = query_of(i);
                smem.row_sum[head] = sum_of_warps(smem.warp_sum, head);
                smem.row_max[head] = m[i];
                if constexpr (kMaxLogits) {
                    smem.row_top[head] =
                        max_or_nan(max_or_nan(smem.warp_row_top[0][head], smem.warp_row_top[1][head]),
                                   max_or_nan(smem.warp_row_top[2][head], smem.warp_row_top[3][head]));
                }
                if (lane_idx == 0) smem.unit[i] = 1.0f / inverse[i];
            }
        }
        mbarrier_arrive(smem_address(&smem.bar_sum_full));
    }
}

// ---- Columns ----------------------------------------------------------------------------------------------

// K as operands in registers: 16 bytes of each of the two tokens of a thread, which are row lane / 4 of the
// warp and row lane / 4 + 8. These are four steps of 16 columns.
struct Keys {
    u32 fragments[4][4];

    // `src`: the address of the 16 bytes of the first token.
    __device__ __forceinline__ void load(u32 src) {
        const uint4 x = load_shared_16(src), y = load_shared_16(src + Chunk::kGroupBytes);
        const u32 first[4] = {x.x, x.y, x.z, x.w}, second[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            e4m3_to_f16(first[step], fragments[step][0], fragments[step][2]);
            e4m3_to_f16(second[step], fragments[step][1], fragments[step][3]);
        }
    }
};

// V^T of a block as operands in registers: two tiles of 64 columns for each 16 tokens. A warp has 32 columns
// of the group, and a thread the four columns from 4 (lane / 4) on. The first two of them are rows lane / 4
// and lane / 4 + 8 of the first tile, the other two are the same rows of the second tile.
struct Values {
    static constexpr int kSteps = kBlockTokens / 16;
    u32 fragments[kSteps][2][4];

    // `src`: the address of the four columns for token 2 (lane % 4).
    __device__ __forceinline__ void load(u32 src) {
        const u32 next_token = (src ^ 16) + Chunk::kRowBytes;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // tokens 2 (lane % 4) + {0, 1} + 8 half
                const u32 x = load_shared_4(src + (2 * k + half) * Chunk::kGroupBytes);
                const u32 y = load_shared_4(next_token + (2 * k + half) * Chunk::kGroupBytes);
                u32(&first)[4] = fragments[k][0], (&second)[4] = fragments[k][1];
                e4m3_to_f16(__byte_perm(x, y, 0x5140), first[2 * half], first[2 * half + 1]);
                e4m3_to_f16(__byte_perm(x, y, 0x7362), second[2 * half], second[2 * half + 1]);
            }
        }
    }
};

// Stores the columns of `group`: four columns of each head of a thread.
__device__ __forceinline__ void store_columns(const Params& params, SharedMemoryPlan& smem,
                                              const WorkTile& work, float (&o)[2][8], int group,
                                              int warp_idx) {
    const int lane_idx = lane_index();
    const float unit = smem.unit[group];
#pragma unroll
    for (int j = 0; j < 8; ++j) o[0][j] *= unit, o[1][j] *= unit;
    const int quad = lane_idx / 4, half = group / 2;
    const bool is_split = work.split_idx >= 0;
    if (is_split) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = accumulator_of(i);
            float top = 0.0f;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                top = fmaxf(top, fmaxf(fabsf(o[tile][j]), fabsf(o[tile][j + 2])));
            top = max_over_rows(top);
            if (quad == 0) smem.warp_top[4 * group + warp_idx][query_of(i)] = top;
        }
        named_barrier_sync(NB_HALF + half, 256);
    }
    const bool writes_scalars = warp_idx == 0 && quad == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int j = accumulator_of(i), head = query_of(i);
        const RowIndex row(params, head);
        if (!row.valid) continue;
        const float sum = smem.row_sum[head];
        const float lse_log2 = smem.row_max[head] + log2_approx(sum);
        if (is_split) {
            float top = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; ++w) top = fmaxf(top, smem.warp_top[8 * half + w][head]);
            const SplitScale scale(top);
            const i64 accum_row = split_row(params, work.split_idx, row);
            if (writes_scalars && group % 2 == 0) {
                if (half == 0) {
                    params.lse_accum_log2[accum_row] = sum == 0.0f ? -kInfinity : lse_log2;
                    store_split_top(params, smem, accum_row, head);
                }
                params.o_scale_log2[accum_row * kScaleHalves + half] = smem.row_max[head] + scale.log2();
            }
            // The order of mla/splits.cuh: 32 columns are four units, and a thread has one word in each of
            // two units
            const i64 unit = (accum_row * 2 + half) * kUnitsPerHalf<kDtype> + 4 * (group % 2 * 4 + warp_idx) +
                             2 * (quad % 2);
            u32* words = static_cast<u32*>(params.o_accum) + unit * 4 + quad / 2;
            words[0] = pack_16bit<Dtype::kF16>(o[0][j] * scale.factor, o[0][j + 2] * scale.factor);
            words[4] = pack_16bit<Dtype::kF16>(o[1][j] * scale.factor, o[1][j + 2] * scale.factor);
        } else {
            if (writes_scalars && group == 0) {
                const i64 index = lse_index(params, work.req, row);
                params.lse[index] = sum == 0.0f ? kInfinity : lse_log2 * lse_factor(params);
                store_top(params, smem, index, head);
            }
            float factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
            if (sum != 0.0f) factor *= sink_factor(params.attn_sink, row.head, lse_log2);
            store_global_8(out_address(params, work.req, row) + group * kGroupCols + 32 * warp_idx + 4 * quad,
                           make_uint2(pack_16bit<kDtype>(o[0][j] * factor, o[0][j + 2] * factor),
                                      pack_16bit<kDtype>(o[1][j] * factor, o[1][j + 2] * factor)));
        }
    }
}

__device__ __forceinline__ void columns_warpgroup(const Params& params, SharedMemoryPlan& smem, int group,
                                                  int warp_idx) {
    const bool publishes = group == kGroups - 1 && warp_idx == 0;
    if (publishes) start_publishing(params, smem);
    float partial[8];  // partial sums of S^T, times the scales
    auto multiply_keys = [&](u32 n) {
        const u32 stage = n % kStages;
        mbarrier_wait_parity(smem_address(&smem.bar_raw_full[stage]), n / kStages & 1);
        const int token = 16 * warp_idx + lane_index() / 4;  // the thread's first
        const u32 src =
            smem_address(smem.raw[stage].values[group]) + Chunk::offset(token, lane_index() % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Keys keys;
            keys.load(half ? src ^ 16 : src);
            const u64 desc_q = Chunk::k_major(smem_address(smem.q[group][half]));
            if (half > 0) wgmma_wait_group<0>();
            wgmma_pin(partial);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma_rs<Dtype::kF16>(partial, keys.fragments[step], desc_q + step * Chunk::kStepK,
                                      half > 0 || step > 0);
            }
            wgmma_commit_group();
        }
        const float scale0 = smem.scale[stage][group][token], scale1 = smem.scale[stage][group][token + 8];
        wgmma_wait_group<0>();
        wgmma_pin(partial);
#pragma unroll
        for (int j = 0; j < 8; ++j) partial[j] *= j & 2 ? scale1 : scale0;
    };
    // Called only after the softmax has read the partial sums of the previous block: its P, or the sums of
    // its work tile, have been announced
    auto store_partial = [&]() {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            smem.partial[group][k][threadIdx.x % 128] =
                make_float4(partial[4 * k], partial[4 * k + 1], partial[4 * k + 2], partial[4 * k + 3]);
        }
        named_barrier_arrive(NB_PARTIAL_FULL, kPartialThreads);
    };
    float o[2][8];
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    while (true) {
        if (publishes) publish_work<kDtype, RowIndex>(params, smem, reader.count + kWorkAhead);
        if (!reader.next(smem)) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) o[0][j] = o[1][j] = 0.0f;
        mbarrier_wait_parity(smem_address(&smem.bar_q_full), reader.count & 1);
        multiply_keys(n);
        store_partial();
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages, p_stage = n % kPStages;
            // During the softmax of this block
            if (left > 1) multiply_keys(n + 1);
            const int column = 32 * warp_idx + lane_index() / 4 * 4;  // the thread's first of the group
            Values values;
            values.load(smem_address(smem.raw[stage].values[group]) +
                        Chunk::offset(lane_index() % 4 * 2, column / 16) + column % 16);
            __syncwarp();
            if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_raw_free[stage]));
            mbarrier_wait_parity(smem_address(&smem.bar_p_full[p_stage]), n / kPStages & 1);
            if (left > 1) store_partial();
            if (smem.rescale[p_stage]) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float change = smem.row_scale[p_stage][group][query_of(i)];
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile) {
                        o[tile][accumulator_of(i)] *= change;
                        o[tile][accumulator_of(i) + 2] *= change;
                    }
                }
            }
            const u64 desc_p = Chunk::k_major(smem_address(smem.p[p_stage][group]));
            wgmma_pin(o[0]);
            wgmma_pin(o[1]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < Values::kSteps; ++k) {
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    wgmma_rs<Dtype::kF16>(o[tile], values.fragments[k][tile], desc_p + k * Chunk::kStepK,
                                          true);
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(o[0]);
            wgmma_pin(o[1]);
            __syncwarp();
            if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_p_free[p_stage]));
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_full), reader.count & 1);
        store_columns(params, smem, reader.work(smem), o, group, warp_idx);
        mbarrier_arrive(smem_address(&smem.bar_sum_free));
        reader.release(smem);
    }
}

// ---- Producer ---------------------------------------------------------------------------------------------

// A warp has 16 rows of a block. Each of lanes 0 to 15 finds one, and eight lanes copy a row.
struct FoundRow {
    __device__ __forceinline__ int block_row() const {
        return threadIdx.x / 32 % kProducerWarps * kWarpRows + threadIdx.x % kWarpRows;
    }
};
using RowSelection = Selection<FoundRow>;

__device__ __forceinline__ void producer_warp(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const int lane_idx = lane_index();
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    for (; reader.next(smem); reader.release(smem)) {
        const WorkTile& work = reader.work(smem);
        RowSelection selection;
        selection.start(params, work);
#pragma unroll 1
        for (int left = warp_uniform(work.num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages;
            const unsigned char* found = row_address(params, selection);
            const u32 valid = __ballot_sync(0xffffffff, found != nullptr);
            selection.advance(params, work);
            mbarrier_wait_parity(smem_address(&smem.bar_raw_free[stage]), ~(n / kStages) & 1);
            if (lane_idx == 0) smem.valid[stage][warp_idx] = valid;
            const u32 values =
                smem_address(smem.raw[stage].values[0]) + warp_idx * kWarpRows * Chunk::kRowBytes;
            const u32 scales = smem_address(&smem.scale[stage][lane_idx % 4][warp_idx * kWarpRows]);
#pragma unroll
            for (int i = 0; i < kWarpRows; i += 4) {
                const int copied = i + lane_idx / 8;
                const u64 address = __shfl_sync(0xffffffff, reinterpret_cast<u64>(found), copied);
                const bool reads = address != 0;
                const unsigned char* row =
                    reads ? reinterpret_cast<const unsigned char*>(address) : params.cache[0];
                const u32 dst = values + Chunk::offset(copied, lane_idx % 8);
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    copy_16_or_zeros(dst + g * Chunk::kBytes, row + g * kGroupCols + lane_idx % 8 * 16,
                                     reads);
                }
                copy_16_or_zeros(dst + kGroups * Chunk::kBytes, row + Fp8Row::kRopeOffset + lane_idx % 8 * 16,
                                 reads);
                if (lane_idx % 8 < kGroups) {
                    cp_async_4_or_zeros(scales + copied * 4, row + Fp8Row::kScalesOffset + lane_idx % 4 * 4,
                                        reads);
                }
            }
            const u32 bar = smem_address(&smem.bar_raw_full[stage]);
            cp_async_mbarrier_arrive(bar);
            __syncwarp();
            if (lane_idx == 0) mbarrier_arrive(bar);
        }
    }
}

// ---- Kernel -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    const int thread = threadIdx.x;
    if (thread == 0) {
        init_work_barriers(smem, kThreads / 32);
    } else if (thread == 32) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_raw_full[stage]), kProducerWarps + 32 * kProducerWarps);
            mbarrier_init(smem_address(&smem.bar_raw_free[stage]), 4 + 4 * kGroups);
        }
#pragma unroll
        for (int stage = 0; stage < kPStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_p_full[stage]), 128);
            mbarrier_init(smem_address(&smem.bar_p_free[stage]), 4 * kGroups);
        }
        mbarrier_init(smem_address(&smem.bar_q_full), 128);
        mbarrier_init(smem_address(&smem.bar_sum_full), 128);
        mbarrier_init(smem_address(&smem.bar_sum_free), 128 * kGroups);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_fp8_few_heads(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    init_barriers(smem);
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    if (wg_idx == 0) {
        setmaxnreg_inc<kRegistersSoftmax>();
        softmax_warpgroup(params, smem, warp_idx);
    } else if (wg_idx <= kGroups) {
        setmaxnreg_inc<kRegistersColumns>();
        columns_warpgroup(params, smem, wg_idx - 1, warp_idx);
    } else {
        setmaxnreg_dec<kRegistersProducer>();
        producer_warp(params, smem, warp_idx);
    }
}
