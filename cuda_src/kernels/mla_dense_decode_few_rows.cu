// Dense MLA decoding with up to 16 query rows for a KV head. Operation, arrays, plan and splits are those of
// mla_dense_decode.cu.
//
//   S^T = sm_scale K Q^T, masked by length and causality;  P = softmax(S);  O^T = V^T P^T
//   V = columns 0-511 of K
//
// Tokens are the rows of both products. A block then takes 68 wgmmas of 20 cycles; with Q as rows it would
// take 2,176 cycles. Memory is the limit, and one warpgroup has time for all of the work. A block is loaded
// as a whole, RoPE with the rest, and its stage is free as soon as P V is done.
//
// Grid: x = 1, y = KV heads, z = partitions of the plan (mla/plan.cuh).
//
// Roles (160 threads)
//   math      warpgroup 0   S^T, softmax, P, O^T, epilogue; loads the work tile's Q
//   producer  warp 4        walks the plan, looks up pages, loads K
//
// Barrier          count     arrives, after what                           waits, before what          parity
// bar_work_full[8] 1         producer: work[n] written                     all: read it                0
// bar_work_free[8] 5         lane 0 of each warp: done with the work tile  producer: overwrite it      1
// bar_k_full[s]    1 + bytes producer arms it; the block has landed        math: S^T                   0
// bar_k_free[s]    4         lane 0 of each warp of math: V^T P^T done     producer: refill            1
// NB_MATH          128       math: Q landed; maxima, sums, O written       math: use them              -
// NB_VOTE          128       math: whether a score outgrew its reference;  math: follow it; overwrite  -
//                            P of the block before and O staged read       P, Q and the staged O
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/transposed.cuh"
#include "mla/chunks.cuh"
#include "mla/dense.cuh"
#include "mla/masks.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "mla/publisher.cuh"
#include "mla/queries.cuh"
#include "mla/splits.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/vector.cuh"
#include "ptx/wgmma.cuh"

constexpr int kTileRows = 16;
constexpr int kThreadRows = kTileRows / 4;  // of Q that a thread has in a product
constexpr int kAccumulators = kTileRows / 2;
constexpr int kStages = 2;
constexpr int kThreads = 160;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
using QTile = SwizzledTile<kTileRows>;  // 64 columns of Q or P
constexpr int kStagedCols = kDimV + 4;  // so that heads lie in different banks

enum NamedBarrier : int { NB_MATH = 1, NB_VOTE = 2 };

struct SharedMemoryPlan {
    alignas(1024) unsigned char k[kStages][kQChunks * Chunk::kBytes];  // 147,456 B
    unsigned char q[kQChunks][QTile::kBytes];                          //  18,432 B
    unsigned char p[QTile::kBytes];                                    //   2,048 B
    float o[kTileRows][kStagedCols];                                   //  33,024 B, at a work tile's end
    float warp_max[4][kTileRows];
    float warp_sum[4][kTileRows];
    float row_max[kTileRows];  // m_ref at the work tile's end, base 2
    u64 bar_k_full[kStages];
    u64 bar_k_free[kStages];
    u64 bar_work_full[kWorkStages];
    u64 bar_work_free[kWorkStages];
    WorkTile work[kWorkStages];
    PublisherState publisher;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= kMaxSharedBytes, "more shared memory than a CTA may have");

// ---- Math -------------------------------------------------------------------------------------------------

// Starts copying the Q of a request; rows past the last are zeros. Eight lanes a row.
__device__ __forceinline__ void start_load_q(const Params& params, SharedMemoryPlan& smem, int req) {
    const int unit = threadIdx.x % 8;
    const int tile_row = threadIdx.x / 8;
    const RowIndex row(params, tile_row);
    const u16* src = row.valid ? q_address(params, req, row.token, row.head, unit) : params.q;
    const u16* rope = row.valid ? q_rope_address(params, req, row.token, row.head, unit) : params.q_rope;
    const u32 dst = smem_address(smem.q[0]) + Chunk::offset(tile_row, unit);
#pragma unroll
    for (int chunk = 0; chunk < kQChunks - 1; ++chunk) {
        cp_async_16_or_zeros(dst + chunk * QTile::kBytes, row.valid ? src + chunk * Chunk::kCols : src,
                             row.valid);
    }
    cp_async_16_or_zeros(dst + (kQChunks - 1) * QTile::kBytes, rope, row.valid);
}

// -inf where the query does not attend the token, or a row of K holds no token (mla/dense.cuh).
__device__ __forceinline__ void mask_scores(const Params& params, float (&s)[kAccumulators], int seqlen,
                                            int first_token, int warp_idx) {
    const int tokens = min_int(seqlen - first_token, kBlockTokens);
    const int tail_box =
        tokens / BOX_ROWS;  // the partly filled one, if any: its first tail_shift rows are zeros
    const int tail_shift = BOX_ROWS - tokens % BOX_ROWS;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
        const int query = token_of_row(params, min_int(query_of(i), params.rows - 1));
        const int limit =
            min_int(visible_keys(seqlen, params.s_q, query, params.causal) - first_token, kBlockTokens);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * warp_idx + lane_index() / 4 + 8 * half;  // of K in the tile
            const int box = row / BOX_ROWS;
            const int shift = box == tail_box ? tail_shift : 0;
            const int begin = box > tail_box ? kBlockTokens : box * BOX_ROWS + shift;
            if (row < begin || row >= limit + shift) s[accumulator_of(i) + 2 * half] = -kInfinity;
        }
    }
}

// Stores a work tile's rows from `smem.o`, eight threads a row.
__device__ __forceinline__ void store_work(const Params& params, const SharedMemoryPlan& smem,
                                           const WorkTile& work) {
    const int tile_row = threadIdx.x / 8, eighth = threadIdx.x % 8;
    const RowIndex row(params, tile_row);
    const float* o = smem.o[tile_row];
    const float sum = sum_of_warps(smem.warp_sum, tile_row);
    const float m = smem.row_max[tile_row];
    const float lse_log2 = m + log2_approx(sum);
    if (work.split_idx >= 0) {
        constexpr int kGroups = kGroupsPerUnit<kDtype>;
        constexpr int kHalfUnits = kUnitsPerHalf<kDtype>;
        const i64 accum_row = split_row(params, work.split_idx, row);
#pragma unroll
        for (int half = 0; half < kScaleHalves; ++half) {
            SplitScale scale;
            if constexpr (kFloat16Splits<kDtype>) {
                float top = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = o + half * (kDimV / 2) + 64 * i + 8 * eighth;
#pragma unroll
                    for (int j = 0; j < 8; ++j) top = fmaxf(top, fabsf(x[j]));
                }
#pragma unroll
                for (int distance = 1; distance < 8; distance *= 2)
                    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, distance));
                scale = SplitScale(top);
            }
            if (row.valid && eighth == 0) {
                if (half == 0) params.lse_accum_log2[accum_row] = sum == 0.0f ? -kInfinity : lse_log2;
                params.o_scale_log2[accum_row * kScaleHalves + half] = m + scale.log2();
            }
            if (!row.valid) continue;
            uint4* units = static_cast<uint4*>(params.o_accum) + (accum_row * 2 + half) * kHalfUnits;
#pragma unroll
            for (int unit = eighth; unit < kHalfUnits; unit += 8) {
                const float* x = o + half * (kDimV / 2) + unit / 4 * (8 * kGroups) + unit % 4 * 2;
                if constexpr (kFloat16Splits<kDtype>) {
                    u32 words[4];
#pragma unroll
                    for (int g = 0; g < 4; ++g)
                        words[g] =
                            pack_16bit<Dtype::kF16>(x[8 * g] * scale.factor, x[8 * g + 1] * scale.factor);
                    units[unit] = make_uint4(words[0], words[1], words[2], words[3]);
                } else {
                    units[unit] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                             __float_as_uint(x[8]), __float_as_uint(x[9]));
                }
            }
        }
        return;
    }
    if (!row.valid) return;
    if (eighth == 0) params.lse[lse_index(params, work.req, row)] = sum == 0.0f ? kInfinity : lse_log2 * kLn2;
    const float factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
    u16* out = out_address(params, work.req, row) + 8 * eighth;
#pragma unroll
    for (int i = 0; i < kDimV / 64; ++i) {
        const float* x = o + 64 * i + 8 * eighth;
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = pack_16bit<kDtype>(x[2 * j] * factor, x[2 * j + 1] * factor);
        *reinterpret_cast<uint4*>(out + 64 * i) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// A thread has tokens 16 warp + lane / 4 and 8 more than that in S^T. In O^T it has the columns of these
// numbers in each 64, and rows query_of(i) of Q in both (layout/transposed.cuh).
__device__ __forceinline__ void math_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const int lane_idx = lane_index();
    const bool writes_rows = lane_idx < 4;
    const u64 desc_q = Chunk::k_major(smem_address(smem.q[0]));
    const u64 desc_p = Chunk::k_major(smem_address(smem.p));
    // This lane's 16 bytes of P: rows 8 (lane / 16) + lane % 8, tokens of the warp's half lane / 8 % 2
    const u32 smem_p = smem_address(smem.p) + lane_idx / 16 * Chunk::kGroupBytes +
                       Chunk::offset(lane_idx % 8, 2 * warp_idx + lane_idx / 8 % 2);
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    // The partition's first request nearly always has tokens, so that the first work tile is its: load its Q
    // now.
    int req = read_plan_row(params.sched_meta, blockIdx.z, params.object_layout, params.b).begin_req;
    start_load_q(params, smem, req);
    for (; reader.next(smem); reader.release(smem)) {
        if (reader.work(smem).req != req) {
            req = reader.work(smem).req;
            cp_async_wait_all();  // before the same shared memory is copied to again
            start_load_q(params, smem, req);
        }
        cp_async_wait_all();
        fence_proxy_async();
        named_barrier_sync(NB_MATH, 128);

        float m[kThreadRows], l[kThreadRows];  // m_ref, and this thread's share of the sums
        float o[kVChunks][kAccumulators];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) m[i] = -kInfinity, l[i] = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kVChunks; ++tile) {
#pragma unroll
            for (int j = 0; j < kAccumulators; ++j) o[tile][j] = 0.0f;
        }
        // Tokens from the block's first on that every row of the tile sees.
        int visible = warp_uniform(reader.work(smem).seqlen - reader.work(smem).first_block * kBlockTokens);
        if (params.causal) visible += 1 - params.s_q;
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages;
            const u32 smem_k = smem_address(smem.k[stage]);
            mbarrier_wait_parity(smem_address(&smem.bar_k_full[stage]), n / kStages & 1);
            float s[kAccumulators];
            const u64 desc_k = Chunk::k_major(smem_k);
            wgmma_pin(s);
            wgmma_fence();
#pragma unroll
            for (int chunk = 0; chunk < kQChunks; ++chunk) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    wgmma_ss<kDtype>(s, desc_k + chunk * Chunk::kStepTile + k * Chunk::kStepK,
                                     desc_q + chunk * QTile::kStepTile + k * Chunk::kStepK, chunk + k > 0);
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(s);
#pragma unroll
            for (int j = 0; j < kAccumulators; ++j) s[j] *= params.sm_scale_log2;
            if (visible < kBlockTokens) {
                const WorkTile& work = reader.work(smem);
                mask_scores(params, s, work.seqlen,
                            (work.first_block + work.num_blocks - left) * kBlockTokens, warp_idx);
            }
            visible -= kBlockTokens;

            bool outgrown = false;
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                const int j = accumulator_of(i);
                outgrown |= fmaxf(s[j], s[j + 2]) > m[i];
            }
            if (named_barrier_any(NB_VOTE, 128, outgrown)) {
#pragma unroll
                for (int i = 0; i < kThreadRows; ++i) {
                    const int j = accumulator_of(i);
                    const float top = max_over_rows(fmaxf(s[j], s[j + 2]));
                    if (writes_rows) smem.warp_max[warp_idx][query_of(i)] = top;
                }
                named_barrier_sync(NB_MATH, 128);
#pragma unroll
                for (int i = 0; i < kThreadRows; ++i) {
                    const int row = query_of(i), j = accumulator_of(i);
                    // A row's reference is its largest score so far: its largest probability is 1, which
                    // 16 bits hold. O is still zero while it is -inf.
                    const float m_new = fmaxf(m[i], max_of_warps(smem.warp_max, row));
                    const float shrink =
                        m_new == m[i] || m[i] == -kInfinity ? 1.0f : exp2_approx(m[i] - m_new);
                    m[i] = m_new;
                    l[i] *= shrink;
#pragma unroll
                    for (int tile = 0; tile < kVChunks; ++tile) {
                        o[tile][j] *= shrink;
                        o[tile][j + 2] *= shrink;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                const int j = accumulator_of(i);
                const float offset = m[i] == -kInfinity ? 0.0f : m[i];
                s[j] = exp2_approx(s[j] - offset);
                s[j + 2] = exp2_approx(s[j + 2] - offset);
                l[i] += s[j] + s[j + 2];
            }
#pragma unroll
            for (int j = 0; j < kAccumulators; j += 8) {
                stmatrix_x4_trans(smem_p + j / 4 * Chunk::kGroupBytes, pack_16bit<kDtype>(s[j], s[j + 1]),
                                  pack_16bit<kDtype>(s[j + 2], s[j + 3]),
                                  pack_16bit<kDtype>(s[j + 4], s[j + 5]),
                                  pack_16bit<kDtype>(s[j + 6], s[j + 7]));
            }
            fence_proxy_async();
            named_barrier_sync(NB_MATH, 128);
            if (left == 1) {
                // The next work tile's Q, under the rest of this one
                WorkTileReader after = reader;
                ++after.count;
                if (after.next(smem)) {
                    req = after.work(smem).req;
                    start_load_q(params, smem, req);
                }
            }
            const u64 desc_v = Chunk::mn_major(smem_k);
#pragma unroll
            for (int tile = 0; tile < kVChunks; ++tile) wgmma_pin(o[tile]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockTokens / 16; ++k) {
#pragma unroll
                for (int tile = 0; tile < kVChunks; ++tile) {
                    wgmma_ss<kDtype, Major::kMn>(o[tile],
                                                 desc_v + tile * Chunk::kStepTile + k * Chunk::kStepMn,
                                                 desc_p + k * Chunk::kStepK, true);
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
#pragma unroll
            for (int tile = 0; tile < kVChunks; ++tile) wgmma_pin(o[tile]);
            __syncwarp();
            if (lane_idx == 0) mbarrier_arrive(smem_address(&smem.bar_k_free[stage]));
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const float sum = sum_over_rows(l[i]);
            if (writes_rows) {
                smem.warp_sum[warp_idx][query_of(i)] = sum;
                if (warp_idx == 0) smem.row_max[query_of(i)] = m[i];
            }
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const int j = accumulator_of(i);
#pragma unroll
            for (int tile = 0; tile < kVChunks; ++tile) {
                float* column = smem.o[query_of(i)] + tile * Chunk::kCols + 16 * warp_idx + lane_idx / 4;
                column[0] = o[tile][j];
                column[8] = o[tile][j + 2];
            }
        }
        named_barrier_sync(NB_MATH, 128);
        store_work(params, smem, reader.work(smem));
    }
}

// ---- Producer ---------------------------------------------------------------------------------------------

// Loads a block to its stage. Lane i < kBoxes has where box i lies in the cache.
__device__ __forceinline__ void load_block(const Params& params, SharedMemoryPlan& smem, u32 stage, int page,
                                           int row) {
    const u32 bar = smem_address(&smem.bar_k_full[stage]);
    const u32 dst = smem_address(smem.k[stage]);
    const int lane_idx = lane_index();
    if (lane_idx == 0) mbarrier_arrive_expect_tx(bar, kQChunks * Chunk::kBytes);
    __syncwarp();
    if (lane_idx >= kBoxes) return;
    if constexpr (kBoxes == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            tma_load_5d(dst + half * (kVChunks / 2 * Chunk::kBytes), &params.k_map_half, bar, 0, row,
                        half * (kVChunks / 2), blockIdx.y, page);
        }
        if constexpr (kHasRope) {
            tma_load_5d(dst + kVChunks * Chunk::kBytes, &params.k_map_one, bar, 0, row, kVChunks, blockIdx.y,
                        page);
        }
    } else {
#pragma unroll 1
        for (int chunk = 0; chunk < kQChunks; ++chunk) {
            tma_load_5d(dst + (chunk * Chunk::kRows + lane_idx * BOX_ROWS) * Chunk::kRowBytes,
                        &params.k_map_one, bar, 0, row, chunk, blockIdx.y, page);
        }
    }
}

__device__ __forceinline__ void producer_warp(const Params& params, SharedMemoryPlan& smem) {
    const int lane_idx = lane_index();
    touch_requests(params.cache_seqlens, params.num_splits, params.b, lane_idx);
    // The first work tile nearly always begins where the partition does, so its pages are asked for now.
    const PlanRow plan = read_plan_row(params.sched_meta, blockIdx.z, params.object_layout, params.b);
    const i64 likely = static_cast<i64>(plan.begin_block) * kBlockTokens + lane_idx * BOX_ROWS;
    const int* known_entry = nullptr;
    int known_page = 0;
    if (likely >= 0 && likely < params.max_seqlen) {
        known_entry = page_entry(params, plan.begin_req, static_cast<int>(likely));
        known_page = load_global(known_entry);
    }
    start_publishing(params, smem);
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    for (;; reader.release(smem)) {
        publish_work<kDtype, RowIndex>(params, smem, reader.count + 1);
        if (!reader.next(smem)) break;
        const int req = warp_uniform(reader.work(smem).req);
        const int seqlen = warp_uniform(reader.work(smem).seqlen);
        const int first_token = warp_uniform(reader.work(smem).first_block) * kBlockTokens;
        const int num_blocks = warp_uniform(reader.work(smem).num_blocks);
        constexpr int kKnownBlocks = 32 / kBoxes;  // whose pages the lanes have
        int page = 0, row = 0;
#pragma unroll 1
        for (int block = 0; block < num_blocks; ++block, ++n) {
            if (block % kKnownBlocks == 0) {
                const int token = first_token + block * kBlockTokens + lane_idx * BOX_ROWS;
                const int tokens = min_int(seqlen - token, BOX_ROWS);
                page = 0;
                row = params.page_block_size;  // wholly out of range: zeros
                if (tokens > 0) {
                    const int* entry = page_entry(params, req, token);
                    page = entry == known_entry ? known_page : load_global(entry);
                    row = token - page_in_table(params, token) * params.page_block_size + tokens - BOX_ROWS;
                }
            }
            const int source = block % kKnownBlocks * kBoxes + lane_idx % kBoxes;
            const int box_page = __shfl_sync(0xffffffff, page, source);
            const int box_row = __shfl_sync(0xffffffff, row, source);
            const u32 stage = n % kStages;
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage]), ~(n / kStages) & 1);
            load_block(params, smem, stage, box_page, box_row);
            __syncwarp();
            if (block == 0) publish_work<kDtype, RowIndex>(params, smem, reader.count + kWorkAhead);
        }
    }
}

// ---- Kernel -----------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_decode_few_rows(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (threadIdx.x == 0) {
        init_work_barriers(smem, kThreads / 32);
        mbarrier_init_fence();
    } else if (threadIdx.x == 32) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_k_full[stage]), 1);
            mbarrier_init(smem_address(&smem.bar_k_free[stage]), 4);
        }
        mbarrier_init_fence();
    } else if (threadIdx.x == 128) {
        tma_prefetch_descriptor(&params.k_map_half);
        tma_prefetch_descriptor(&params.k_map_one);
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    if (warp_idx < 4) {
        math_warpgroup(params, smem, warp_idx);
    } else {
        producer_warp(params, smem);
    }
}
