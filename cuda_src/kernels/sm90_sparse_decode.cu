// Sparse MLA decoding over a paged cache: every query token attends tokens of its own choice (Hopper, sm_90a).
//
//   S = sm_scale Q K^T,  P = softmax(S),  O = P V,  K = the cache rows that the token's indices name, V = their first 512 columns
//
//   q [b, s_q, h_q, D_QK] bf16, indices [b, s_q, topk] int32 (physical slots; < 0 or past the cache: skipped), and the same of
//   an extra cache, attended in the same softmax; out [b, s_q, h_q, 512] bf16, lse [b, h_q, s_q] float32, natural log, +inf for
//   a row with nothing to attend. Pieces of a split request go to scratch (sched/pieces.cuh) for mla_combine.
//
// Cache rows by FORMAT
//   0 V3.2    656 bytes: 512 e4m3, 4 float32 scales (one per 128), 64 bf16 (RoPE)                                  D_QK 576
//   1 MODEL1  576 bytes: 448 e4m3, 64 bf16 (RoPE); behind a block's rows 8 bytes a token: 7 e8m0 (one per 64)      D_QK 512
//   2 bf16    D_QK bf16                                                                                         D_QK 576, 512
// FP8 values times their scale are rounded to bf16 once.
//
// Grid: x = query tokens x tiles of 64 heads (tiles of a token are neighbours and read the same rows at the same time, from L2),
// z = parts of the plan (sched/plan.cuh), whose blocks are 64 indices: first those of the cache, then those of the extra one.
//
// Roles (512 threads; the launch gives 128 registers each, setmaxnreg moves them)
//   QK        warpgroup 0,  80 registers   S = Q K^T, online softmax, P; loads Q
//   PV0, PV1  warpgroups 1, 2, 160         O[:, 0:256] and O[:, 256:512] += P V, rescale, epilogue
//   producer  warpgroup 3, 112             gathers and dequantises rows into K's ring; its warp 0 walks the plan
//
// Schedule, per 64-token block j: the tensor core has 36 x 32 = 1152 cycles of QK and 2 x 8 x 64 = 1024 of PV
//   producer      | copy block j + 1 to the stage that PV(j - 1) has left, then convert it there; prefetch block j + 2 to L2
//   QK            | QK(j), softmax(j), store P(j)       | QK(j + 1) ...
//   PV0, PV1      | PV(j - 1)                           | PV(j) ...
// With two stages a block takes half of the time that a stage is in use (QK, softmax, PV) and being filled, or as long as the
// producer does for one; with FP8 rows it is the producer (docs/kernels/sparse_decode.md has the cycles).
//
// Barrier             count     arrives, after what                                 waits, before what               parity
// bar_item_full[8]    1         producer warp 0: items[n] written                   all: read it                     0
// bar_item_free[8]    16        lane 0 of each warp: done with the item             producer warp 0: overwrite it    1
// bar_k_full[s]       4, 132    producer: lane 0 of each warp, its rows stored      QK: S = Q K^T                    0
//                               (bf16: also every thread's copies landed)
// bar_k_free[s]       8         PV0, PV1: lane 0 of each warp, its PV is complete   producer: refill                 1
// bar_p_full          32        QK: P and scale stored, fenced                      PV0, PV1: rescale, O += P V      0
// bar_p_free          64        PV0, PV1: scale read, PV of the warp is complete    QK: store the next P             1
// bar_sum_full        128       QK: row sums and maxima of the item written         PV0, PV1: epilogue               0
// bar_sum_free        256       PV0, PV1: the item's rows are stored                QK: write the next item's        1
// NB_QK               128       QK: done with the item's Q / the next Q landed      QK: both                         -
//
// A row that no valid index names is zeros in shared memory, and its scores are masked: nothing of the cache is read for it.
#include "attention/items.cuh"
#include "attention/output.cuh"
#include "attention/softmax.cuh"
#include "common/division.cuh"
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/swizzle128.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"
#include "ptx/wgmma.cuh"
#include "sched/pieces.cuh"
#include "sched/plan.cuh"

enum class Format : int { kV32 = 0, kModel1 = 1, kBf16 = 2 };
constexpr Format kFormat = static_cast<Format>(FORMAT);
static_assert(FORMAT >= 0 && FORMAT <= 2, "FORMAT must be 0 (V3.2), 1 (MODEL1) or 2 (bf16)");
static_assert(D_QK == 576 || (D_QK == 512 && kFormat != Format::kV32),
              "D_QK must be 576 or 512, V3.2's is 576");
static_assert(D_QK == 512 || kFormat != Format::kModel1, "MODEL1's D_QK is 512");
static_assert(LOAD_BYTES == 16 || (LOAD_BYTES == 8 && kFormat != Format::kBf16),
              "LOAD_BYTES is what addresses of rows are multiples of: 16, or 8 in FP8 caches");

constexpr Dtype kDtype = Dtype::kBf16;
constexpr bool kFp8 = kFormat != Format::kBf16;
constexpr int kStages = 2;
constexpr int kChunks = D_QK / kChunkCols;
constexpr int kStageBytes = kChunks * kChunkBytes;
constexpr int kFp8Values = kFormat == Format::kV32 ? 512 : 448;
constexpr int kRopeChunk = kChunks - 1;
constexpr int kRopeOffset = kFormat == Format::kV32 ? 528 : 448;  // bytes into an FP8 row
constexpr int kScaleOffset = 512;                                 // of V3.2
constexpr int kModel1RowBytes = 576, kModel1ScaleBytes = 8;
constexpr int kQuarterRows = 4;  // of a warp's 16, that one instruction serves

constexpr int kThreads = 512;
constexpr int kRegistersQK = 80;
constexpr int kRegistersPV = 160;
constexpr int kRegistersProducer = 112;
static_assert(kRegistersQK + 2 * kRegistersPV + kRegistersProducer <= 65536 / 128, "more than there are");

struct Params {
    const u16* q;
    const unsigned char* cache[2];  // the cache, the extra cache
    const int* indices[2];
    const int* lengths[2];  // topk_length, extra_topk_length or null
    const float* attn_sink;
    const int* sched_meta;
    const int* num_splits;
    u16* out;
    float* lse;     // [b, h_q, s_q]
    void* o_accum;  // pieces: sched/pieces.cuh
    float* lse_accum_log2;
    float* o_scale_log2;
    i64 block_stride[2], token_stride[2];          // bytes
    i64 index_stride_b[2], index_stride_s[2];      // elements
    i64 q_stride_b, q_stride_s, q_stride_h;        // elements
    i64 out_stride_b, out_stride_s, out_stride_h;  // elements
    int topk[2];
    u32 cache_slots[2];  // at most 2^31
    int page_block_size[2];
    u32 page_magic[2];  // division by page_block_size: common/division.cuh
    int page_shift[2];
    int b, s_q, h_q;
    int head_tiles;
    int num_slots;
    int object_layout;
    float sm_scale_log2;

    __device__ __forceinline__ TokenCounts tokens() const {
        return {lengths[0], lengths[1], topk[0], topk[1]};
    }
};

enum NamedBarrier : int { NB_QK = 1 };

struct PublisherState {
    PlanRow plan;
    WorkItems items;  // the next one to publish
    u32 published;    // kNoMoreItems once the end mark is
};
constexpr u32 kNoMoreItems = 1u << 31;

struct SharedMemoryPlan {
    alignas(1024) unsigned char k[kStages][kStageBytes];  // 147,456 B (D_QK 576)
    unsigned char q[kStageBytes];                         //  73,728 B
    unsigned char p[kChunkBytes];                         //   8,192 B
    float row_scale[kBlockM];                             // factor on O before the block's PV
    float row_sum[kBlockM];                               // of the item
    float row_max[kBlockM];                               // m_ref at the item's end, base 2
    alignas(8) u16 valid[kStages][4];                     // a bit for each row of the stage
    u64 bar_k_full[kStages];
    u64 bar_k_free[kStages];
    u64 bar_p_full;
    u64 bar_p_free;
    u64 bar_sum_full;
    u64 bar_sum_free;
    u64 bar_item_full[kItemSlots];
    u64 bar_item_free[kItemSlots];
    WorkItem items[kItemSlots];
    PublisherState publisher;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= 232448, "more shared memory than a CTA may have");

// A row of the CTA's tile as (token, head) of the request.
struct RowIndex {
    int token, head;
    bool valid;

    __device__ __forceinline__ RowIndex(const Params& params, int tile_row) {
        token = blockIdx.x / params.head_tiles;
        head = (blockIdx.x - token * params.head_tiles) * kBlockM + tile_row;
        valid = head < params.h_q;
    }
};

// ---- QK ----------------------------------------------------------------------------------------------------------------

// Starts copying the Q of an item to shared memory. Rows past the last are zero.
__device__ __forceinline__ void start_load_q(const Params& params, SharedMemoryPlan& smem, int req) {
    const int thread = threadIdx.x % 128;
    const u16* base = params.q + req * params.q_stride_b;
#pragma unroll 1
    for (int tile_row = thread / 8; tile_row < kBlockM; tile_row += 16) {
        const RowIndex row(params, tile_row);
        const u16* src = base + row.token * params.q_stride_s +
                         (row.valid ? row.head : 0) * params.q_stride_h + thread % 8 * 8;
        const u32 dst = smem_address(smem.q) + swizzle128_offset(tile_row, thread % 8);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            cp_async_16_or_zeros(dst + chunk * kChunkBytes, src + chunk * kChunkCols, row.valid);
        }
    }
}

// -inf where the row's bit is not set.
__device__ __forceinline__ void mask_scores(float (&s)[32], u32 valid_low, u32 valid_high) {
    const int shift = 2 * (lane_index() % 4);
    const u32 low = valid_low >> shift, high = valid_high >> shift;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        const int bit = 8 * (j >> 2) + (j & 1);
        if (!((bit < 32 ? low : high) >> bit % 32 & 1)) s[j] = -kInfinity;
    }
}

__device__ __forceinline__ void qk_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const u64 desc_q = descriptor_k_major(smem_address(smem.q));
    // This lane's 16 bytes of the first 16 columns of P; 16 columns on, the unit's number has another bit 1.
    const u32 smem_p =
        smem_address(smem.p) + swizzle128_offset(warp_idx * 16 + lane_index() % 16, lane_index() / 16);
    ItemReader reader;
    u32 n = 0;  // running number of the block
    if (reader.next(smem)) start_load_q(params, smem, reader.item(smem).req);
    for (; reader.next(smem); reader.release(smem)) {
        cp_async_wait_all();
        fence_proxy_async();
        named_barrier_sync(NB_QK, 128);
        OnlineSoftmax softmax;
        for (int left = warp_uniform(reader.item(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages;
            mbarrier_wait_parity(smem_address(&smem.bar_k_full[stage]), n / kStages & 1);
            if constexpr (!kFp8) fence_proxy_async();  // the rows were copied by cp.async
            u32 valid_low = 0, valid_high = 0;
            if (has_row_scales()) {
                const u32* valid = reinterpret_cast<const u32*>(smem.valid[stage]);
                valid_low = valid[0];
                valid_high = valid[1];
            }
            float s[32];
            const u64 desc_k = descriptor_grouped<kChunks>(smem_address(smem.k[stage]));
            wgmma_pin(s);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4 * kChunks; ++i) {
                const u64 a = desc_q + i / 4 * kStepChunk + i % 4 * kStepKMajor;
                const u64 b = desc_k + i / 4 * kStepChunkGrouped + i % 4 * kStepKMajor;
                wgmma_m64n64k16_ss<kDtype>(s, a, b, i > 0);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(s);

            if (left == 1) {
                // The next item's Q, under the rest of this one
                ItemReader after = reader;
                ++after.count;
                if (after.next(smem)) {
                    named_barrier_sync(NB_QK, 128);
                    start_load_q(params, smem, after.item(smem).req);
                }
            }
            valid_low = __shfl_sync(0xffffffff, valid_low, 0, 4);
            valid_high = __shfl_sync(0xffffffff, valid_high, 0, 4);
            if ((valid_low & valid_high) != 0xffffffff) mask_scores(s, valid_low, valid_high);
            u32 p[16];
            float scale[2];
            softmax.block<kDtype>(s, params.sm_scale_log2, p, scale);

            mbarrier_wait_parity(smem_address(&smem.bar_p_free), ~n & 1);
            if (has_row_scales()) {
                float* row_scale = smem.row_scale + warp_idx * 16 + lane_index() / 4;
                row_scale[0] = scale[0];
                row_scale[8] = scale[1];
            }
#pragma unroll
            for (int group = 0; group < 4; ++group) {  // of 16 tokens
                stmatrix_x4(smem_p ^ (32 * group), p[4 * group], p[4 * group + 1], p[4 * group + 2],
                            p[4 * group + 3]);
            }
            fence_proxy_async();
            __syncwarp();
            if (has_row_scales()) mbarrier_arrive(smem_address(&smem.bar_p_full));
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_free), ~reader.count & 1);
        softmax.store(smem.row_sum, smem.row_max, warp_idx);
        mbarrier_arrive(smem_address(&smem.bar_sum_full));
    }
}

// ---- PV ----------------------------------------------------------------------------------------------------------------

template <int kHalf>
__device__ __forceinline__ void pv_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const u64 desc_p = descriptor_k_major(smem_address(smem.p));
    const u32 smem_v = smem_address(smem.k) + kHalf * 4 * kGroupBytes;
    float o[128];
    ItemReader reader;
    u32 n = 0;  // running number of the block
    for (; reader.next(smem); reader.release(smem)) {
#pragma unroll
        for (int j = 0; j < 128; ++j) o[j] = 0.0f;
        for (int left = warp_uniform(reader.item(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages;
            mbarrier_wait_parity(smem_address(&smem.bar_p_full), n & 1);
            if constexpr (!kFp8) fence_proxy_async();  // the rows were copied by cp.async
            float scale0 = 1.0f, scale1 = 1.0f;
            if (has_row_scales()) {
                const float* row_scale = smem.row_scale + warp_idx * 16 + lane_index() / 4;
                scale0 = row_scale[0];
                scale1 = row_scale[8];
            }
            if (__any_sync(0xffffffff, scale0 != 1.0f || scale1 != 1.0f)) {
                scale0 = __shfl_sync(0xffffffff, scale0, 0, 4);
                scale1 = __shfl_sync(0xffffffff, scale1, 0, 4);
#pragma unroll
                for (int j = 0; j < 128; ++j) o[j] *= j & 2 ? scale1 : scale0;
            }
            const u64 desc_v = descriptor_grouped<kChunks>(smem_v + stage * kStageBytes);
            wgmma_pin(o);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockTokens / 16; ++k) {
                const u64 a = desc_p + k * kStepKMajor, b = desc_v + k * kStepMnMajorGrouped<kChunks>;
                wgmma_m64n128k16_ss_bt<kDtype, 0>(o, a, b, true);
                wgmma_m64n128k16_ss_bt<kDtype, 64>(o, a, b + 2 * kStepChunkGrouped, true);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(o);
            __syncwarp();
            if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_k_free[stage]));
            if (has_row_scales()) mbarrier_arrive(smem_address(&smem.bar_p_free));
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_full), reader.count & 1);
        store_rows<kHalf, kDtype, RowIndex>(params, smem, reader.item(smem), o, warp_idx);
        mbarrier_arrive(smem_address(&smem.bar_sum_free));
    }
}

// ---- Producer ----------------------------------------------------------------------------------------------------------

// Publishes the part's items. One warp, converged, calls. The state stays in shared memory: registers are short.
__device__ __forceinline__ void start_publishing(const Params& params, SharedMemoryPlan& smem) {
    if (lane_index() == 0) {
        PublisherState& state = smem.publisher;
        state.plan = read_plan_row(params.sched_meta, blockIdx.z, params.object_layout, params.b);
        state.items.start(state.plan);
        state.published = 0;
    }
    __syncwarp();
}
// Until there are `count` items, or the end mark.
__device__ __forceinline__ void publish_items(const Params& params, SharedMemoryPlan& smem, u32 count) {
    const PlanRow plan = smem.publisher.plan;
    WorkItems items = smem.publisher.items;
    u32 published = smem.publisher.published;
    while (published < count) {
        WorkItem next;
        if (!items.next(plan, params.tokens(), params.num_splits, params.num_slots, next)) next.req = -1;
        if (next.req >= 0 && next.num_blocks == 0) {
            store_empty<kDtype, RowIndex>(params, next, lane_index());
            continue;
        }
        const u32 slot = published % kItemSlots;
        mbarrier_wait_parity(smem_address(&smem.bar_item_free[slot]), ~(published / kItemSlots) & 1);
        if (lane_index() == 0) {
            smem.items[slot] = next;
            mbarrier_arrive(smem_address(&smem.bar_item_full[slot]));
        }
        published = next.req >= 0 ? published + 1 : kNoMoreItems;
    }
    __syncwarp();
    if (lane_index() == 0) {
        smem.publisher.items = items;
        smem.publisher.published = published;
    }
    __syncwarp();
}

// A producer thread's place. Of the warp's 16 rows it serves four, one of each four ("quarter"), each together with seven other
// lanes, taking the 16-byte unit `unit` of every 128 bytes.
struct Place {
    int warp_idx, lane_idx;

    __device__ __forceinline__ int unit() const { return lane_idx % 8; }
    // Row of the warp's 16 in a quarter.
    __device__ __forceinline__ int row(int quarter) const { return quarter * kQuarterRows + lane_idx / 8; }
    // Where the warp's rows begin in a stage.
    __device__ __forceinline__ u32 base(u32 stage) const {
        return stage + warp_idx * 2 * kChunks * kGroupBytes;
    }
    // Where a 16-byte unit of the row of a quarter lies, from there, in chunk 0.
    __device__ __forceinline__ u32 offset(int quarter, int unit) const {
        return quarter / 2 * kChunks * kGroupBytes + swizzle128_offset(row(quarter) % kGroupRows, unit);
    }
};

// A thread's four indices in a block.
struct Indices {
    int index[4];
};

// A thread's four rows in a block.
struct Rows {
    const unsigned char* row[4];  // null: none
    int scale_distance[4];        // MODEL1: bytes from a row to its scales

    // Which of the warp's 16 rows there are.
    __device__ __forceinline__ u32 valid(const Place& place) const {
        u32 bits = 0;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            bits |= static_cast<u32>(row[quarter] != nullptr) << place.row(quarter);
        }
        return __reduce_or_sync(0xffffffff, bits);
    }
};

// What one query token of a request selects, block by block: from the cache, then from the extra one.
struct Selection {
    const int* indices[2];
    int count[2];
    int blocks;  // of the cache

    __device__ __forceinline__ Selection(const Params& params, const WorkItem& item) {
        const i64 req = warp_uniform(item.req);
        const i64 token = blockIdx.x / params.head_tiles;
        count[0] = warp_uniform(item.seqlen);
        count[1] = params.tokens().extra(req);
        blocks = ceil_div(count[0], kBlockTokens);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            indices[c] =
                params.indices[c] + req * params.index_stride_b[c] + token * params.index_stride_s[c];
        }
    }
    // -1 past the last.
    __device__ __forceinline__ Indices load(int block, const Place& place) const {
        const bool extra = block >= blocks;
        const int first = (block - (extra ? blocks : 0)) * kBlockTokens + place.warp_idx * 16;
        const int end = extra ? count[1] : count[0];
        const int* src = extra ? indices[1] : indices[0];
        Indices loaded;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const int position = first + place.row(quarter);
            loaded.index[quarter] = -1;
            if (position < end) loaded.index[quarter] = load_global(src + position);
        }
        return loaded;
    }
    __device__ __forceinline__ Rows rows(const Params& params, int block, const Indices& loaded) const {
        const int c = block >= blocks ? 1 : 0;
        const unsigned char* cache = c ? params.cache[1] : params.cache[0];
        const u32 slots = c ? params.cache_slots[1] : params.cache_slots[0];
        const u32 page_size = c ? params.page_block_size[1] : params.page_block_size[0];
        const u32 magic = c ? params.page_magic[1] : params.page_magic[0];
        const int shift = c ? params.page_shift[1] : params.page_shift[0];
        const i64 block_stride = c ? params.block_stride[1] : params.block_stride[0];
        const u32 token_stride = c ? params.token_stride[1] : params.token_stride[0];
        Rows rows;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const u32 index = loaded.index[quarter];
            const u32 page = divide(index, magic, shift);
            const u32 row_in_page = index - page * page_size;
            const unsigned char* row =
                cache + page * block_stride + static_cast<u64>(row_in_page) * token_stride;
            rows.row[quarter] = index < slots ? row : nullptr;
            rows.scale_distance[quarter] =
                page_size * kModel1RowBytes - row_in_page * (kModel1RowBytes - kModel1ScaleBytes);
        }
        return rows;
    }
};

// Has a thread's rows brought to L2, together with the seven other lanes of each.
__device__ __forceinline__ void prefetch_rows(const Rows& rows, const Place& place) {
    constexpr int kRowBytes = kFormat == Format::kV32 ? 656 : kModel1RowBytes;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const int offset = min_int(place.unit() * 128, kRowBytes - 1);
        const int last =
            kFormat == Format::kModel1 && place.unit() == 7 ? rows.scale_distance[quarter] : offset;
        if (rows.row[quarter] != nullptr && place.unit() * 128 < kRowBytes + 128)
            prefetch_l2(rows.row[quarter] + last);
    }
}

// Dequantising in place. The FP8 values of a row arrive as they are in the cache, behind the others of its group of eight, where
// bf16 chunks will be. They are read to registers before any of them is written, group by group. So a whole block is on its way
// at once, with no memory but its stage.
constexpr int kRawOffset = kRopeChunk * kGroupBytes - kGroupRows * kFp8Values;  // in a group
constexpr int kTileValues = 128;                                                // that eight units hold
constexpr int kTiles = ceil_div(kFp8Values, kTileValues);

// Whether there are 16 values of a tile in a unit; MODEL1's last tile is a half.
__device__ __forceinline__ bool unit_in_tile(int unit, int tile) {
    return (tile + 1) * kTileValues <= kFp8Values || unit < 4;
}

// 16 bytes of the cache to shared memory, or 16 zeros.
__device__ __forceinline__ void copy_16_or_zeros(u32 dst, const unsigned char* src, bool reads) {
    if constexpr (LOAD_BYTES == 16) {
        cp_async_16_or_zeros(dst, src, reads);
    } else {
        cp_async_8_or_zeros(dst, src, reads);
        cp_async_8_or_zeros(dst + 8, src + 8, reads);
    }
}

// The scales of a thread's four rows. V3.2: 4 float32; MODEL1: 8 e8m0 in the first two words.
struct Scales {
    u32 words[4][kFormat == Format::kV32 ? 4 : 2];

    __device__ __forceinline__ void load(const Rows& rows) {
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const unsigned char* row = rows.row[quarter];
            const bool reads = row != nullptr;
            u32(&w)[kFormat == Format::kV32 ? 4 : 2] = words[quarter];
            if constexpr (kFormat == Format::kModel1) {
                const uint2 v = load_global_8(row + rows.scale_distance[quarter], reads);
                w[0] = v.x, w[1] = v.y;
            } else if constexpr (LOAD_BYTES == 16) {
                const uint4 v = load_global_16(row + kScaleOffset, reads);
                w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
            } else {
                const uint2 low = load_global_8(row + kScaleOffset, reads);
                const uint2 high = load_global_8(row + kScaleOffset + 8, reads);
                w[0] = low.x, w[1] = low.y, w[2] = high.x, w[3] = high.y;
            }
        }
    }
    // Of the 16 values of a unit in a tile.
    __device__ __forceinline__ float of(int quarter, int tile, int unit) const {
        if constexpr (kFormat == Format::kV32) {
            return __uint_as_float(words[quarter][tile]);
        } else {
            return e8m0_value(words[quarter][tile / 2] >> (tile % 2 * 16 + unit / 4 * 8) & 0xff);
        }
    }
};

// Starts copying a thread's share of the warp's FP8 rows to a stage: what will be converted, and RoPE, which is bf16 already, to
// its place. Rows that there are none of are zeros. The two groups of eight rows are commit groups of their own.
__device__ __forceinline__ void start_copy_fp8(const Params& params, const Rows& rows, u32 stage,
                                               const Place& place) {
    const u32 base = place.base(stage);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        const bool reads = rows.row[quarter] != nullptr;
        const unsigned char* src = (reads ? rows.row[quarter] : params.cache[0]) + place.unit() * 16;
        const u32 raw = base + quarter / 2 * kChunks * kGroupBytes + kRawOffset +
                        place.row(quarter) % kGroupRows * kFp8Values + place.unit() * 16;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (unit_in_tile(place.unit(), tile)) {
                copy_16_or_zeros(raw + tile * kTileValues, src + tile * kTileValues, reads);
            }
        }
        copy_16_or_zeros(base + kRopeChunk * kGroupBytes + place.offset(quarter, place.unit()),
                         src + kRopeOffset, reads);
        if (quarter % 2 == 1) cp_async_commit_group();
    }
}

// Eight e4m3 times `factor`, rounded to bf16.
__device__ __forceinline__ void store_dequantised(u32 dst, u32 low, u32 high, float factor) {
#define RAWMLA_PAIR(WORD, E4M3)       \
    "cvt.rn.f16x2.e4m3x2 pair, " E4M3 \
    ";\n"                             \
    "mov.b32 {a, b}, pair;\n"         \
    "cvt.f32.f16 x, a;\n"             \
    "cvt.f32.f16 y, b;\n"             \
    "mul.f32 x, x, %3;\n"             \
    "mul.f32 y, y, %3;\n"             \
    "cvt.rn.bf16x2.f32 " WORD ", y, x;\n"
    asm volatile(
        "{\n"
        ".reg .b16 e0, e1, e2, e3, a, b;\n"
        ".reg .b32 pair, w0, w1, w2, w3;\n"
        ".reg .f32 x, y;\n"
        "mov.b32 {e0, e1}, %1;\n"
        "mov.b32 {e2, e3}, %2;\n" RAWMLA_PAIR("w0", "e0") RAWMLA_PAIR("w1", "e1") RAWMLA_PAIR("w2", "e2")
            RAWMLA_PAIR("w3", "e3") "st.shared.v4.b32 [%0], {w0, w1, w2, w3};\n"
                                    "}\n" ::"r"(dst),
        "r"(low), "r"(high), "f"(factor)
        : "memory");
#undef RAWMLA_PAIR
}

// Converts one group of a warp's rows, which have landed.
__device__ __forceinline__ void dequantise_group(int group, const Scales& scales, u32 stage,
                                                 const Place& place) {
    const u32 base = place.base(stage) + group * kChunks * kGroupBytes;
    const u32 raw = base + kRawOffset + place.row(0) * kFp8Values + place.unit() * 16;
    u32 values[2][kTiles][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (unit_in_tile(place.unit(), tile)) {
                load_shared(values[half][tile], raw + half * kQuarterRows * kFp8Values + tile * kTileValues);
            }
        }
    }
    __syncwarp();  // all lanes have read the group before any writes over it
    // A thread's 16 values fill two units. Units 4-7 begin with the second, or they would meet units 0-3 in their banks.
    const bool second_first = place.unit() >= 4;
    const u32 dst = base + place.unit() / 4 * kGroupBytes +
                    swizzle128_offset(place.row(0), place.unit() % 4 * 2 + static_cast<int>(second_first));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        if (!unit_in_tile(place.unit(), tile)) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = scales.of(2 * group + half, tile, place.unit());
            const u32(&v)[4] = values[half][tile];
            // Four rows on, bit 2 of the unit's number turns.
            const u32 unit =
                (dst ^ half * 64) + half * kQuarterRows * kChunkRowBytes + tile * 2 * kGroupBytes;
            store_dequantised(unit, second_first ? v[2] : v[0], second_first ? v[3] : v[1], scale);
            store_dequantised(unit ^ 16, second_first ? v[0] : v[2], second_first ? v[1] : v[3], scale);
        }
    }
}

__device__ __forceinline__ void wait_stage_free(SharedMemoryPlan& smem, u32 n) {
    mbarrier_wait_parity(smem_address(&smem.bar_k_free[n % kStages]), ~(n / kStages) & 1);
}

// The warp's rows of block n are stored, or their copies arrive on the barrier by themselves.
__device__ __forceinline__ void announce_rows(SharedMemoryPlan& smem, u32 n, u32 valid, const Place& place) {
    if (place.lane_idx == 0) {
        smem.valid[n % kStages][place.warp_idx] = valid;
        mbarrier_arrive(smem_address(&smem.bar_k_full[n % kStages]));
    }
}

// Blocks [first, first + count) of an item, of which the first is number n. Indices are loaded two blocks ahead, rows brought
// to L2 one block ahead.
__device__ __forceinline__ void produce_fp8(const Params& params, SharedMemoryPlan& smem,
                                            const Selection& selection, int first, int count, u32 n,
                                            const Place& place) {
    Indices here = selection.load(first, place);
    Indices next = selection.load(first + 1, place);
#pragma unroll 1
    for (int block = first; block < first + count; ++block, ++n) {
        const u32 stage = smem_address(smem.k[n % kStages]);
        const Rows rows = selection.rows(params, block, here);
        const u32 valid = rows.valid(place);
        wait_stage_free(smem, n);
        start_copy_fp8(params, rows, stage, place);
        Scales scales;
        scales.load(rows);
        prefetch_rows(selection.rows(params, block + 1, next), place);
        here = next;
        next = selection.load(block + 2, place);
        cp_async_wait_group<1>();
        __syncwarp();
        dequantise_group(0, scales, stage, place);
        cp_async_wait_group<0>();
        __syncwarp();
        dequantise_group(1, scales, stage, place);
        fence_proxy_async();
        __syncwarp();
        announce_rows(smem, n, valid, place);
    }
}

__device__ __forceinline__ void produce_bf16(const Params& params, SharedMemoryPlan& smem,
                                             const Selection& selection, int first, int count, u32 n,
                                             const Place& place) {
    Indices next = selection.load(first, place);
#pragma unroll 1
    for (int block = first; block < first + count; ++block, ++n) {
        const Rows rows = selection.rows(params, block, next);
        next = selection.load(block + 1, place);
        wait_stage_free(smem, n);
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const bool reads = rows.row[quarter] != nullptr;
            const unsigned char* src = (reads ? rows.row[quarter] : params.cache[0]) + place.unit() * 16;
            const u32 dst =
                place.base(smem_address(smem.k[n % kStages])) + place.offset(quarter, place.unit());
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                cp_async_16_or_zeros(dst + chunk * kGroupBytes, src + chunk * kChunkRowBytes, reads);
            }
        }
        cp_async_mbarrier_arrive(smem_address(&smem.bar_k_full[n % kStages]));
        announce_rows(smem, n, rows.valid(place), place);
    }
}

__device__ __forceinline__ void producer_warpgroup(const Params& params, SharedMemoryPlan& smem,
                                                   int warp_idx) {
    constexpr u32 kAhead = 3;  // items
    if (warp_idx == 0) {
        start_publishing(params, smem);
        publish_items(params, smem, kAhead);
    }
    const Place place{warp_idx, static_cast<int>(threadIdx.x % 32)};
    ItemReader reader;
    u32 n = 0;  // running number of the block
    for (; reader.next(smem); reader.release(smem)) {
        if (warp_idx == 0) publish_items(params, smem, reader.count + kAhead);
        const WorkItem& item = reader.item(smem);
        const int first = warp_uniform(item.first_block), count = warp_uniform(item.num_blocks);
        const Selection selection(params, item);
        if constexpr (kFp8) {
            produce_fp8(params, smem, selection, first, count, n, place);
        } else {
            produce_bf16(params, smem, selection, first, count, n, place);
        }
        n += count;
    }
}

// ---- Kernel ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    const int thread = threadIdx.x;
    if (thread == 0) {
#pragma unroll
        for (int slot = 0; slot < kItemSlots; ++slot) {
            mbarrier_init(smem_address(&smem.bar_item_full[slot]), 1);
            mbarrier_init(smem_address(&smem.bar_item_free[slot]), kThreads / 32);
        }
    } else if (thread == 32) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_k_full[stage]), kFp8 ? 4 : 4 + 128);
            mbarrier_init(smem_address(&smem.bar_k_free[stage]), 8);
        }
        mbarrier_init(smem_address(&smem.bar_p_full), 32);
        mbarrier_init(smem_address(&smem.bar_p_free), 64);
        mbarrier_init(smem_address(&smem.bar_sum_full), 128);
        mbarrier_init(smem_address(&smem.bar_sum_free), 256);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_sparse_decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    init_barriers(smem);
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    if (wg_idx == 0) {
        setmaxnreg_dec<kRegistersQK>();
        qk_warpgroup(params, smem, warp_idx);
    } else if (wg_idx == 1) {
        setmaxnreg_inc<kRegistersPV>();
        pv_warpgroup<0>(params, smem, warp_idx);
    } else if (wg_idx == 2) {
        setmaxnreg_inc<kRegistersPV>();
        pv_warpgroup<1>(params, smem, warp_idx);
    } else {
        setmaxnreg_dec<kRegistersProducer>();
        producer_warpgroup(params, smem, warp_idx);
    }
}
