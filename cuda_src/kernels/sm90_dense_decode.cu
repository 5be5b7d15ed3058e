// Dense MLA decoding over a paged cache, one split-KV piece after another (Hopper, sm_90a).
//
//   S = sm_scale Q K^T (masked by length and causality),  P = softmax(S),  O = P V,  V = first 512 columns of K
//
//   q [b, s_q, h_q, D_QK], k_cache [num_blocks, page_block_size, h_kv, D_QK] in bf16 or fp16, block_table [b, *] int32,
//   cache_seqlens [b] int32; out [b, s_q, h_q, 512] in q's type, lse [b, h_q, s_q] float32, natural log, +inf for a row
//   with nothing to attend. Pieces of a split request go to o_accum / lse_accum_log2 (base 2, -inf when empty).
//
// Grid: x = tiles of 64 query rows (the rows of one KV head are its (token, head) pairs, token-major), y = KV heads,
// z = parts of the plan (sched/plan.cuh). Neighbouring CTAs share a part, so they read the same K lines from L2.
//
// Roles (512 threads; the launch gives 128 registers each, setmaxnreg moves them)
//   QK0, QK1  warpgroups 0, 1, 96 registers    even / odd blocks: S = Q K^T, online softmax, P to shared memory
//   PV0, PV1  warpgroups 2, 3, 160 registers   O[:, 0:256] / O[:, 256:512] += P V, rescale, epilogue
// Warp 0 of each QK warpgroup also loads the K blocks of its stage by TMA, and the one of QK0 walks the plan for all.
//
// Per 64-token block the tensor core is busy 36 x 32 (QK) + 2 x 8 x 64 (PV) = 2176 cycles; the softmax of one block runs
// under the QK of the next and the PV of the one before.
//
// Barrier             count     arrives, after what                                 waits, before what               parity
// bar_item_full[4]    1         warp 0 of QK0: smem.items[n] written                all: read it                     0
// bar_item_free[4]    16        lane 0 of each warp: done with the item             warp 0 of QK0: overwrite it      1
// bar_k_full[s][5]    1 + bytes warp 0 of QKs; the unit's bytes land                QKs: S += Q K^T of the unit      0
// bar_p_full[s]       128       QKs: P and scale written, fence_proxy_async done    PV0, PV1: rescale, O += P V      0
// bar_v_free[s][h]    4         lane 0 of each warp of PVh: its PV of the block done producer: refill half h         1
// bar_sum_full        256       QK0, QK1: row sums and maxima of the item written   PV0, PV1: epilogue               0
// bar_sum_free        256       PV0, PV1: they have read them                       QK0, QK1: write the next item's  1
// NB_MAX + 4 s + w    64        warp w of QKs: running maximum of its rows written  warp w of the other QK           -
// NB_Q                256       QK0, QK1: last QK of the item done / Q landed       both                             -
// NB_QK_DONE + s      128       QKs: its S is complete                              QKs: P overwrites the RoPE chunk -
//
// Block n of the part (over all its items) uses stage n % 2 with phase (n / 2) & 1.
// P of a block lies where its RoPE chunk was: S is complete before P is written, and the chunk is refilled after PV.
//
// Lazy maximum: probabilities are 2^(S - m_ref) with a reference that follows the row maximum only when that exceeds it
// by more than 8 (a factor of 256), so O is rescaled rarely and P stays within 16-bit range. Exact in the end, since
// numerator and denominator carry the same factor. The idea is FlashAttention-4's conditional rescaling.
//
// Tail: the last box of a request is shifted so that its valid tokens are the last ones of the page read; rows before
// the page's first are out of range and arrive as zeros. Tokens past the length are never in shared memory.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/swizzle128.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "sched/plan.cuh"

static_assert(D_QK == 576 || D_QK == 512, "D_QK must be 576 (512 + 64 RoPE) or 512");
static_assert(DTYPE == 0 || DTYPE == 1, "DTYPE must be 0 (bf16) or 1 (fp16)");
static_assert(BOX_ROWS == 64 || BOX_ROWS == 32 || BOX_ROWS == 16, "BOX_ROWS is min(page_block_size, 64): 16, 32 or 64");

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kBlockM = 64;
constexpr int kDimV = 512;
constexpr int kStages = 2;
constexpr int kQChunks = D_QK / kChunkCols;
constexpr int kVChunks = kDimV / kChunkCols;
constexpr int kStageChunks = kVChunks + 1;  // the last one: RoPE, then P
constexpr int kPChunk = kVChunks;
constexpr int kBoxes = kBlockTokens / BOX_ROWS;  // boxes per chunk of a block
constexpr int kUnits = 5;                        // units of a stage with a barrier each: 4 x 2 chunks, RoPE
constexpr int kUsedUnits = D_QK == 576 ? 5 : 4;
constexpr bool kPrefetchL2 = PREFETCH_L2;
constexpr int kItemSlots = 4;
constexpr float kLazyMaxLog2 = 8.0f;

constexpr int kThreads = 512;
constexpr int kRegistersQK = 96;
constexpr int kRegistersPV = 160;
static_assert(2 * kRegistersQK + 2 * kRegistersPV <= 65536 / 128, "more registers than an SM has");

struct Params {
    TensorMap k_map_pair;  // box 64 columns x 64 tokens x 2 chunks
    TensorMap k_map_one;   // box 64 columns x BOX_ROWS tokens x 1 chunk
    const u16* q;
    i64 q_stride_b, q_stride_s, q_stride_h;  // elements
    const int* block_table;
    i64 block_table_stride;
    const int* cache_seqlens;
    const int* sched_meta;
    const int* num_splits;
    u16* out;
    i64 out_stride_b, out_stride_s, out_stride_h;  // elements
    float* lse;                                    // [b, h_q, s_q]
    float* o_accum;                                // [num_slots, s_q * h_q, 512], normalised per piece
    float* lse_accum_log2;                         // [num_slots, s_q * h_q]
    int b, s_q, h_q, heads_per_kv;
    int rows;  // s_q * heads_per_kv, query rows of one KV head
    int page_block_size;
    int num_slots;
    int object_layout;
    int causal;
    float sm_scale_log2;
};

enum NamedBarrier : int { NB_MAX = 1, NB_Q = 9, NB_QK_DONE = 10 };

// Position of the tokens of a block's last, shifted box: see "Tail" above.
struct TailShift {
    int box;    // the partly filled box
    int shift;  // rows of it that hold zeros

    __device__ __forceinline__ explicit TailShift(int tokens)
        : box(min_int(tokens, kBlockTokens) / BOX_ROWS), shift(BOX_ROWS - min_int(tokens, kBlockTokens) % BOX_ROWS) {}

    // Token (relative to the block) in row `row` of the tile; at least kBlockTokens when there is none.
    __device__ __forceinline__ int token(int row) const {
        const int row_box = row / BOX_ROWS;
        if (row_box < box) return row;
        const int token = row - shift;
        return row_box == box && token >= box * BOX_ROWS ? token : kBlockTokens;
    }
};

// Where a block's boxes lie in the cache. Lane j of the warp describes box j % kBoxes.
struct BoxSource {
    int page;
    int row;  // first row of the box inside its page, negative for a shifted one
};
constexpr int kNoBlock = -(1 << 30);

// A walk over the part's blocks of one parity: those of one QK warpgroup.
struct BlockCursor {
    WorkItems items;
    WorkItem item;
    int index;  // next block inside the item

    __device__ __forceinline__ void start(const PlanRow& plan, int parity) {
        items.start(plan);
        item.num_blocks = 0;
        index = parity;
    }
    // Where the next block lies; the page id is a load in flight. `row` is kNoBlock after the last one.
    __device__ __forceinline__ BoxSource next(const Params& params, const PlanRow& plan, int lane_idx) {
        while (index >= item.num_blocks) {
            index -= item.num_blocks;
            if (!items.next(plan, params.cache_seqlens, params.num_splits, params.num_slots, item)) {
                item.num_blocks = 0;
                return {0, kNoBlock};
            }
        }
        const int first_token = (item.first_block + index) * kBlockTokens + lane_idx % kBoxes * BOX_ROWS;
        index += 2;
        const int tokens = min_int(item.seqlen - first_token, BOX_ROWS);
        if (tokens <= 0) return {0, params.page_block_size};  // wholly out of range: zeros
        const int page_in_table = first_token / params.page_block_size;
        const int first_row = first_token - page_in_table * params.page_block_size;
        return {load_global(params.block_table + item.req * params.block_table_stride + page_in_table),
                first_row + tokens - BOX_ROWS};
    }
};

struct SharedMemoryPlan {
    alignas(1024) unsigned char q[kQChunks * kChunkBytes];           //  73,728 B with D_QK 576
    unsigned char k[kStages][kStageChunks * kChunkBytes];            // 147,456 B
    float row_scale[kStages][kBlockM];                               // factor on O before the block's PV
    float row_max[kBlockM];                                          // m_ref, base 2
    float row_sum[2][kBlockM];                                       // of the item, per QK warpgroup
    float item_max[kBlockM];                                         // m_ref at the item's end
    u64 bar_item_full[kItemSlots];
    u64 bar_item_free[kItemSlots];
    u64 bar_k_full[kStages][kUnits];
    u64 bar_p_full[kStages];
    u64 bar_v_free[kStages][2];
    u64 bar_sum_full;
    u64 bar_sum_free;
    WorkItem items[kItemSlots];
    PlanRow plan;
    WorkItems walk;              // of warp 0 of QK0
    BlockCursor cursor[kStages];  // of warp 0 of QK0 and of QK1
    BoxSource source[kStages][2][kBoxes];
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= 232448, "more shared memory than a CTA may have");

// Loads chunks [first, first + count) of a block into its stage. A converged warp calls.
template <int kFirstChunk, int kCount>
__device__ __forceinline__ void load_unit(const Params& params, u32 stage, u32 bar, BoxSource source, int kv_head,
                                          int lane_idx) {
    if constexpr (kBoxes == 1) {
        if (elect_one_sync()) {
            mbarrier_arrive_expect_tx(bar, kCount * kChunkBytes);
            tma_load_5d(stage + kFirstChunk * kChunkBytes, kCount == 2 ? &params.k_map_pair : &params.k_map_one, bar, 0,
                        source.row, kFirstChunk, kv_head, source.page);
        }
    } else {
        if (lane_idx == 0) mbarrier_arrive_expect_tx(bar, kCount * kChunkBytes);
        if (lane_idx < kBoxes) {
#pragma unroll
            for (int chunk = kFirstChunk; chunk < kFirstChunk + kCount; ++chunk) {
                tma_load_5d(stage + chunk * kChunkBytes + lane_idx * BOX_ROWS * kChunkRowBytes, &params.k_map_one, bar,
                            0, source.row, chunk, kv_head, source.page);
            }
        }
    }
    __syncwarp();
}

__device__ __forceinline__ void prefetch_block(const Params& params, BoxSource source, int kv_head) {
    if constexpr (kBoxes == 1) {
        if (elect_one_sync()) {
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; chunk += 2) {
                tma_prefetch_l2_5d(&params.k_map_pair, 0, source.row, chunk, kv_head, source.page);
            }
            if constexpr (D_QK == 576) {
                tma_prefetch_l2_5d(&params.k_map_one, 0, source.row, kVChunks, kv_head, source.page);
            }
        }
        __syncwarp();
    }
}

// A row of the CTA's tile as (token, head) of the request.
struct RowIndex {
    int token, head;
    bool valid;

    __device__ __forceinline__ RowIndex(const Params& params, int tile_row) {
        const int row = blockIdx.x * kBlockM + tile_row;
        token = row / params.heads_per_kv;
        head = blockIdx.y * params.heads_per_kv + row - token * params.heads_per_kv;
        valid = row < params.rows;
    }
};

// QK0 and QK1 together copy the item's 64 query rows; rows past the last arrive as zeros.
__device__ __forceinline__ void load_q(const Params& params, SharedMemoryPlan& smem, int req, int idx_in_pair) {
    const int unit = idx_in_pair % 8;
#pragma unroll 1
    for (int tile_row = idx_in_pair / 8; tile_row < kBlockM; tile_row += 32) {
        const RowIndex row(params, tile_row);
        const u16* src = params.q;  // not read when the row is past the end
        if (row.valid) {
            src += req * params.q_stride_b + row.token * params.q_stride_s + row.head * params.q_stride_h + unit * 8;
        }
        const u32 dst = smem_address(smem.q) + swizzle128_offset(tile_row, unit);
#pragma unroll
        for (int chunk = 0; chunk < kQChunks; ++chunk) {
            cp_async_16(dst + chunk * kChunkBytes, src + chunk * kChunkCols, row.valid);
        }
    }
    cp_async_wait_all();
    fence_proxy_async();
}

// Warp 0 of a QK warpgroup keeps its stage filled. Its state lives in shared memory: registers are short here.
template <int kStage>
struct StageLoader {
    BoxSource in_flight;  // of the block after smem.source[kStage]'s two; the page id is being loaded
    u32 free_parity;

    __device__ __forceinline__ void start(const Params& params, SharedMemoryPlan& smem, int lane_idx) {
        if (lane_idx == 0) smem.cursor[kStage].start(smem.plan, kStage);
        __syncwarp();
        free_parity = 1;
        in_flight = look_ahead(params, smem, lane_idx);
        push(smem, lane_idx);
        in_flight = look_ahead(params, smem, lane_idx);
        push(smem, lane_idx);
        in_flight = look_ahead(params, smem, lane_idx);
        refill(params, smem, lane_idx);
    }
    // Waits until PV is done with the stage and loads the next block into it.
    __device__ __forceinline__ void refill(const Params& params, SharedMemoryPlan& smem, int lane_idx) {
        const int kv_head = blockIdx.y;
        const u32 stage = smem_address(smem.k[kStage]);
        u64* full = smem.bar_k_full[kStage];
        const BoxSource source = smem.source[kStage][0][lane_idx % kBoxes];
        if (source.row == kNoBlock) return;
        mbarrier_wait_parity(smem_address(&smem.bar_v_free[kStage][0]), free_parity);
        load_unit<0, 2>(params, stage, smem_address(full + 0), source, kv_head, lane_idx);
        load_unit<2, 2>(params, stage, smem_address(full + 1), source, kv_head, lane_idx);
        mbarrier_wait_parity(smem_address(&smem.bar_v_free[kStage][1]), free_parity);
        load_unit<4, 2>(params, stage, smem_address(full + 2), source, kv_head, lane_idx);
        load_unit<6, 2>(params, stage, smem_address(full + 3), source, kv_head, lane_idx);
        if constexpr (D_QK == 576) {
            load_unit<8, 1>(params, stage, smem_address(full + 4), source, kv_head, lane_idx);
        }
        free_parity ^= 1;
        push(smem, lane_idx);
        if constexpr (kPrefetchL2) {
            const BoxSource after = smem.source[kStage][0][lane_idx % kBoxes];
            if (after.row != kNoBlock) prefetch_block(params, after, kv_head);
        }
        in_flight = look_ahead(params, smem, lane_idx);
    }

  private:
    __device__ __forceinline__ BoxSource look_ahead(const Params& params, SharedMemoryPlan& smem, int lane_idx) {
        BlockCursor cursor = smem.cursor[kStage];
        const BoxSource next = cursor.next(params, smem.plan, lane_idx);
        __syncwarp();
        if (lane_idx == 0) smem.cursor[kStage] = cursor;
        __syncwarp();
        return next;
    }
    __device__ __forceinline__ void push(SharedMemoryPlan& smem, int lane_idx) {
        if (lane_idx < kBoxes) {
            smem.source[kStage][0][lane_idx] = smem.source[kStage][1][lane_idx];
            smem.source[kStage][1][lane_idx] = in_flight;
        }
        __syncwarp();
    }
};

// Warp 0 of QK0 looks up item `n` for everybody; an item with req -1 ends the walk.
__device__ __forceinline__ void publish_item(const Params& params, SharedMemoryPlan& smem, u32 n, int lane_idx) {
    const u32 slot = n % kItemSlots;
    mbarrier_wait_parity(smem_address(&smem.bar_item_free[slot]), ~(n / kItemSlots) & 1);
    if (lane_idx == 0) {
        WorkItem item;
        if (!smem.walk.next(smem.plan, params.cache_seqlens, params.num_splits, params.num_slots, item)) item.req = -1;
        smem.items[slot] = item;
        mbarrier_arrive(smem_address(&smem.bar_item_full[slot]));
    }
    __syncwarp();
}

// A role's view of the published items.
struct ItemReader {
    u32 count = 0;

    // False after the last item.
    __device__ __forceinline__ bool next(SharedMemoryPlan& smem, WorkItem& item) {
        const u32 slot = count % kItemSlots;
        mbarrier_wait_parity(smem_address(&smem.bar_item_full[slot]), count / kItemSlots & 1);
        item = smem.items[slot];
        return item.req >= 0;
    }
    __device__ __forceinline__ void release(SharedMemoryPlan& smem, int lane_idx) {
        __syncwarp();
        if (lane_idx == 0) mbarrier_arrive(smem_address(&smem.bar_item_free[count % kItemSlots]));
        ++count;
    }
};

template <int kStage>
__device__ __forceinline__ void qk_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx, int lane_idx) {
    const int m_block = blockIdx.x;
    const u32 stage = smem_address(smem.k[kStage]);
    const u32 smem_p = stage + kPChunk * kChunkBytes;
    const u64 desc_q = descriptor_k_major(smem_address(smem.q));
    const u64 desc_k = descriptor_k_major(stage);
    const int row0 = warp_idx * 16 + lane_idx / 4;  // this thread's rows of the tile: row0 and row0 + 8

    StageLoader<kStage> loader;
    if (warp_idx == 0) {
        if (kStage == 0) publish_item(params, smem, 0, lane_idx);
        loader.start(params, smem, lane_idx);
    }
    ItemReader reader;
    WorkItem item;
    int first = kStage;  // this warpgroup's first block of the item
    u32 k_parity = 0;
    u32 sum_free_parity = 1;
    for (; reader.next(smem, item); reader.release(smem, lane_idx)) {
        if (kStage == 0 && warp_idx == 0) publish_item(params, smem, reader.count + 1, lane_idx);
        if (item.num_blocks == 0) continue;
        named_barrier_sync(NB_Q, 256);
        load_q(params, smem, item.req, kStage * 128 + warp_idx * 32 + lane_idx);
        named_barrier_sync(NB_Q, 256);

        float m[2] = {-kInfinity, -kInfinity};  // m_ref when this warpgroup last saw it
        float l[2] = {0.0f, 0.0f};              // this thread's share of the row sums, relative to m
        int i = first;
        for (; i < item.num_blocks; i += 2) {
            // S = Q K^T as the units of K arrive
            float s[32];
            wgmma_pin(s);
#pragma unroll
            for (int unit = 0; unit < kUsedUnits; ++unit) {
                mbarrier_wait_parity(smem_address(&smem.bar_k_full[kStage][unit]), k_parity);
                wgmma_fence();
#pragma unroll
                for (int chunk = 2 * unit; chunk < min_int(2 * unit + 2, kQChunks); ++chunk) {
#pragma unroll
                    for (int k = 0; k < kChunkCols / 16; ++k) {
                        const u64 step = chunk * kStepChunk + k * kStepKMajor;
                        wgmma_m64n64k16_ss<kDtype>(s, desc_q + step, desc_k + step, chunk + k > 0);
                    }
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(s);
            k_parity ^= 1;

            // Mask the last blocks
            const int first_token = (item.first_block + i) * kBlockTokens;
            const int tile_token = m_block * kBlockM / params.heads_per_kv;
            const int full_limit = params.causal ? item.seqlen - params.s_q + tile_token + 1 : item.seqlen;
            if (first_token + kBlockTokens > full_limit) {
                const TailShift tail(item.seqlen - first_token);
                // Opaque, or the compiler keeps row and column numbers in registers for the rare block that needs them.
                int column = 2 * (lane_idx % 4);
                int row = m_block * kBlockM + row0;
                asm volatile("" : "+r"(column), "+r"(row));
                int limit[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int token = (row + 8 * r) / params.heads_per_kv;
                    limit[r] = (params.causal ? item.seqlen - params.s_q + token + 1 : item.seqlen) - first_token;
                    limit[r] = min_int(limit[r], kBlockTokens);
                }
#pragma unroll
                for (int j = 0; j < 32; ++j) {
                    const int token = tail.token(8 * (j >> 2) + column + (j & 1));
                    if (token >= limit[(j >> 1) & 1]) s[j] = -kInfinity;
                }
            }

            // Row maximum, and the reference it may move
            float row_max[2] = {-kInfinity, -kInfinity};
#pragma unroll
            for (int j = 0; j < 32; ++j) row_max[(j >> 1) & 1] = fmaxf(row_max[(j >> 1) & 1], s[j]);
            if (i > 0) {
                named_barrier_sync(NB_MAX + 4 * (1 - kStage) + warp_idx, 64);
            }
            float m_prev[2], offset[2], scale[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                m_prev[r] = i > 0 ? smem.row_max[row0 + 8 * r] : -kInfinity;
                row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffff, row_max[r], 1));
                row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffff, row_max[r], 2)) * params.sm_scale_log2;
                const float m_new = row_max[r] > m_prev[r] + kLazyMaxLog2 ? row_max[r] : m_prev[r];
                scale[r] = m_new == m_prev[r] ? 1.0f : exp2_approx(m_prev[r] - m_new);
                // this thread's sum may lag one block behind: m is as of its previous block
                l[r] *= m_new == m[r] ? 1.0f : exp2_approx(m[r] - m_new);
                m[r] = m_new;
                offset[r] = m_new == -kInfinity ? 0.0f : m_new;
            }
            if (lane_idx % 4 == 0) {
                smem.row_max[row0] = m[0];
                smem.row_max[row0 + 8] = m[1];
                smem.row_scale[kStage][row0] = scale[0];
                smem.row_scale[kStage][row0 + 8] = scale[1];
            }
            __syncwarp();
            named_barrier_arrive(NB_MAX + 4 * kStage + warp_idx, 64);

            // P = 2^(S - m_ref), to shared memory as A of the PV product
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                s[j] = exp2_approx(fmaf(s[j], params.sm_scale_log2, -offset[(j >> 1) & 1]));
                l[(j >> 1) & 1] += s[j];
            }
            named_barrier_sync(NB_QK_DONE + kStage, 128);
            const int p_row = warp_idx * 16 + lane_idx % 16;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                stmatrix_x4(smem_p + swizzle128_offset(p_row, 2 * j + lane_idx / 16),
                            pack_16bit<kDtype>(s[8 * j], s[8 * j + 1]), pack_16bit<kDtype>(s[8 * j + 2], s[8 * j + 3]),
                            pack_16bit<kDtype>(s[8 * j + 4], s[8 * j + 5]),
                            pack_16bit<kDtype>(s[8 * j + 6], s[8 * j + 7]));
            }
            fence_proxy_async();
            mbarrier_arrive(smem_address(&smem.bar_p_full[kStage]));
            if (warp_idx == 0) loader.refill(params, smem, lane_idx);
        }
        first = i - item.num_blocks;

        // The item's row sums. The warpgroup without the last block takes the final maximum from the other.
        const bool computed_last = i - 2 == item.num_blocks - 1;
        if (!computed_last) named_barrier_sync(NB_MAX + 4 * (1 - kStage) + warp_idx, 64);
        mbarrier_wait_parity(smem_address(&smem.bar_sum_free), sum_free_parity);
        sum_free_parity ^= 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float m_final = smem.row_max[row0 + 8 * r];
            l[r] *= m_final == m[r] ? 1.0f : exp2_approx(m[r] - m_final);
            l[r] += __shfl_xor_sync(0xffffffff, l[r], 1);
            l[r] += __shfl_xor_sync(0xffffffff, l[r], 2);
            if (lane_idx % 4 == 0) {
                smem.row_sum[kStage][row0 + 8 * r] = l[r];
                if (computed_last) smem.item_max[row0 + 8 * r] = m_final;
            }
        }
        mbarrier_arrive(smem_address(&smem.bar_sum_full));
    }
}

// Writes 256 columns of two rows: the output of a whole request, or a float32 piece. `o` is normalised here.
template <int kHalf>
__device__ __forceinline__ void store_rows(const Params& params, const WorkItem& item, float (&o)[2][64],
                                           const float (&sum)[2], const float (&max_log2)[2], int warp_idx,
                                           int lane_idx) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowIndex row(params, warp_idx * 16 + lane_idx / 4 + 8 * r);
        if (!row.valid) continue;
        const float inverse = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
        const float lse_log2 = max_log2[r] + log2_approx(sum[r]);
        const int column = kHalf * (kDimV / 2) + 2 * (lane_idx % 4);
        if (item.slot < 0) {
            u16* out = params.out + item.req * params.out_stride_b + row.token * params.out_stride_s +
                       row.head * params.out_stride_h + column;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                float* pair = &o[j / 16][4 * (j % 16) + 2 * r];
                *reinterpret_cast<u32*>(out + 8 * j) = pack_16bit<kDtype>(pair[0] * inverse, pair[1] * inverse);
            }
            if (kHalf == 0 && lane_idx % 4 == 0) {
                params.lse[(static_cast<i64>(item.req) * params.h_q + row.head) * params.s_q + row.token] =
                    sum[r] == 0.0f ? kInfinity : lse_log2 * kLn2;
            }
        } else {
            const i64 piece_row =
                (static_cast<i64>(item.slot) * params.s_q + row.token) * params.h_q + row.head;
            float* accum = params.o_accum + piece_row * kDimV + column;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                float* pair = &o[j / 16][4 * (j % 16) + 2 * r];
                *reinterpret_cast<float2*>(accum + 8 * j) = make_float2(pair[0] * inverse, pair[1] * inverse);
            }
            if (kHalf == 0 && lane_idx % 4 == 0) {
                params.lse_accum_log2[piece_row] = sum[r] == 0.0f ? -kInfinity : lse_log2;
            }
        }
    }
}

template <int kHalf>
__device__ __forceinline__ void pv_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx, int lane_idx) {
    const int row0 = warp_idx * 16 + lane_idx / 4;
    constexpr u32 kStageBytes = kStageChunks * kChunkBytes;
    const u32 smem_k = smem_address(smem.k);

    float o[2][64];  // columns [256 kHalf, + 128) and the 128 after them
    ItemReader reader;
    WorkItem item;
    u32 block = 0;  // running number over all items
    u32 sum_full_parity = 0;
    for (; reader.next(smem, item); reader.release(smem, lane_idx)) {
        float sum[2] = {0.0f, 0.0f};
        float max_log2[2] = {0.0f, 0.0f};
        if (item.num_blocks == 0) {
#pragma unroll
            for (int j = 0; j < 64; ++j) o[0][j] = o[1][j] = 0.0f;
            store_rows<kHalf>(params, item, o, sum, max_log2, warp_idx, lane_idx);
            continue;
        }
        for (int i = 0; i < item.num_blocks; ++i, ++block) {
            const u32 stage = block & 1;
            mbarrier_wait_parity(smem_address(&smem.bar_p_full[stage]), (block >> 1) & 1);
            if (i > 0) {
                const float scale0 = smem.row_scale[stage][row0];
                const float scale1 = smem.row_scale[stage][row0 + 8];
                if (__any_sync(0xffffffff, scale0 != 1.0f || scale1 != 1.0f)) {
#pragma unroll
                    for (int j = 0; j < 64; ++j) {
                        o[0][j] *= j & 2 ? scale1 : scale0;
                        o[1][j] *= j & 2 ? scale1 : scale0;
                    }
                }
            }
            const u32 smem_stage = smem_k + stage * kStageBytes;
            const u64 desc_p = descriptor_k_major(smem_stage + kPChunk * kChunkBytes);
            const u64 desc_v = descriptor_mn_major(smem_stage + kHalf * 4 * kChunkBytes);
            wgmma_pin(o[0]);
            wgmma_pin(o[1]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockTokens / 16; ++k) {
                const u64 a = desc_p + k * kStepKMajor;
                const u64 b = desc_v + k * kStepMnMajor;
                wgmma_m64n128k16_ss_bt<kDtype>(o[0], a, b, i > 0 || k > 0);
                wgmma_m64n128k16_ss_bt<kDtype>(o[1], a, b + 2 * kStepChunk, i > 0 || k > 0);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(o[0]);
            wgmma_pin(o[1]);
            if (lane_idx == 0) mbarrier_arrive(smem_address(&smem.bar_v_free[stage][kHalf]));
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_full), sum_full_parity);
        sum_full_parity ^= 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] = smem.row_sum[0][row0 + 8 * r] + smem.row_sum[1][row0 + 8 * r];
            max_log2[r] = smem.item_max[row0 + 8 * r];
        }
        mbarrier_arrive(smem_address(&smem.bar_sum_free));
        store_rows<kHalf>(params, item, o, sum, max_log2, warp_idx, lane_idx);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_dense_decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    const int lane_idx = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        tma_prefetch_descriptor(&params.k_map_pair);
        tma_prefetch_descriptor(&params.k_map_one);
        for (int slot = 0; slot < kItemSlots; ++slot) {
            mbarrier_init(smem_address(&smem.bar_item_full[slot]), 1);
            mbarrier_init(smem_address(&smem.bar_item_free[slot]), 16);
        }
        for (int stage = 0; stage < kStages; ++stage) {
            for (int unit = 0; unit < kUsedUnits; ++unit) {
                mbarrier_init(smem_address(&smem.bar_k_full[stage][unit]), 1);
            }
            mbarrier_init(smem_address(&smem.bar_p_full[stage]), 128);
            mbarrier_init(smem_address(&smem.bar_v_free[stage][0]), 4);
            mbarrier_init(smem_address(&smem.bar_v_free[stage][1]), 4);
        }
        mbarrier_init(smem_address(&smem.bar_sum_full), 256);
        mbarrier_init(smem_address(&smem.bar_sum_free), 256);
        mbarrier_init_fence();
    }
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        smem.plan = read_plan_row(params.sched_meta, blockIdx.z, params.object_layout, params.b);
        smem.walk.start(smem.plan);
    }
    __syncthreads();

    if (wg_idx == 0) {
        setmaxnreg_dec<kRegistersQK>();
        qk_warpgroup<0>(params, smem, warp_idx, lane_idx);
    } else if (wg_idx == 1) {
        setmaxnreg_dec<kRegistersQK>();
        qk_warpgroup<1>(params, smem, warp_idx, lane_idx);
    } else if (wg_idx == 2) {
        setmaxnreg_inc<kRegistersPV>();
        pv_warpgroup<0>(params, smem, warp_idx, lane_idx);
    } else {
        setmaxnreg_inc<kRegistersPV>();
        pv_warpgroup<1>(params, smem, warp_idx, lane_idx);
    }
}
