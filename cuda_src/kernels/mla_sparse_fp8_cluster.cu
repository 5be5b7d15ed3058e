// Sparse MLA decoding over FP8 caches for an even number of tiles of 64 heads: two CTAs share the columns of
// every row (sm_90a).
//
// Operation, arrays, formats, plan, splits and MAX_LOGITS are those of mla_sparse_fp8.cu. There the CTA of
// each tile of 64 heads gathers and converts whole rows. Here a cluster of two CTAs has a pair of tiles. CTA
// r has columns 256 r to 256 r + 255 of V and half r of RoPE; in MODEL1, where RoPE is part of V, it has 256
// of the 512 columns. Every value is then loaded, converted and stored once:
//
//   S = Q K^T  each CTA computes it over its columns, for both tiles. CTA r is the owner of tile r and adds
//              what the other CTA sends.
//   P          the owner computes it and sends it to the other CTA
//   O = P V    each CTA computes its 256 columns, for both tiles
//
// Grid: x = query tokens x pairs of tiles x 2, z = partitions of the plan (mla/plan.cuh).
//
// Roles (512 threads; the launch gives 128 registers to each, setmaxnreg redistributes them)
//   owner     warpgroup 0,     208 registers  the CTA's own tile: S, online softmax, P, O
//   helper    warpgroup 1,     208            the other CTA's tile: partial S, O; warp 0 walks the plan
//   producer  warpgroups 2, 3,  48            gather and dequantise rows into the ring of K; each of the
//                                             eight warps has a group of eight rows of a block
//
// Schedule, per 64-token block j: owner and helper each have 18 x 32 cycles of Q K^T (MODEL1 16 x 32) and
// 8 x 64 of P V
//   producer  | rows of block j + 3 (MODEL1: j + 4), when both P V(j) have left their stage
//   owner     | softmax(j), send P(j) | P V(j), S(j + 1) on top of the partial scores | softmax(j + 1) ...
//   helper    | S(j + 2)              | P V(j), send the partial scores of S(j + 2)   | S(j + 3) ...
// Q K^T runs ahead across work tiles, so that partial scores are on their way during an epilogue. A warp
// exchanges data only with the same warp of the other CTA. A lane has the same place in both fragments, so
// data is sent in the order of registers, and no warp waits for the three others.
//
// Barrier              count  arrives, after what                   waits, before what                 parity
// bar_work_full[8]     1      warp 0 of the helper: work[n]         all: read it                       0
//                             written
// bar_work_free[8]     16     lane 0 of each warp: done with the    warp 0 of the helper: overwrite    1
//                             work tile                             it
// bar_k_full[s]        8      producer: lane 0 of each warp, its    owner, helper: S = Q K^T           0
//                             rows stored, fenced
// bar_k_free[s]        64     owner, helper: P V of the warp        producer: refill                   1
//                             complete
// and for each of the four warps
// bar_partial_full     1      owner: bytes announced; bytes of the  owner: S on top of them            0
//                             other helper landed
// bar_partial_free     1      the other owner: they are read        helper: send the next, exit        1
// bar_p_full           1      helper: bytes announced; bytes of     helper: rescale, O += P V          0
//                             the other owner landed
// bar_p_free           1      the other helper: they are read       owner: send the next, exit         1
// bar_ends_full        1      helper: bytes announced; bytes of     helper: epilogue                   0
//                             the other owner landed
// bar_ends_free        1      the other helper: rows of the work    owner: send the next, exit         1
//                             tile stored
// NB_OWNER, NB_HELPER  128    that warpgroup: Q of the work tile    the same: S = Q K^T                -
//                             copied, fenced
//                             that warpgroup: last Q K^T complete   the same: copy the next Q
//
// An arrival in the other CTA can overtake earlier loads from shared memory
// (docs/kernels/mla_sparse_fp8.md). "Read" in this table therefore means that a product has used the
// values.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/rescale.cuh"
#include "mla/chunks.cuh"
#include "mla/fp8_rows.cuh"
#include "mla/masks.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "mla/publisher.cuh"
#include "mla/queries.cuh"
#include "mla/selection.cuh"
#include "mla/softmax.cuh"
#include "mla/splits.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"
#include "ptx/wgmma.cuh"

constexpr Dtype kDtype = Dtype::kBf16;
constexpr bool kV32 = kFormat == CacheFormat::kV32;
constexpr int kStages = kV32 ? 3 : 4;
constexpr int kTiles = 2;
constexpr int kColumns = kDimV / 2;  // columns of V per CTA
constexpr int kChunks = kColumns / Chunk::kCols;
using KTiles = GroupMajorTiles<kChunks>;
constexpr int kStageBytes = kChunks * Chunk::kBytes;
// Half of RoPE has a buffer of its own in V3.2, where RoPE is not part of V.
constexpr int kRopeBytes = kV32 ? HalfChunk::kBytes : 16;

constexpr int kThreads = 512;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kRegistersConsumer = 208;  // owner and helper
constexpr int kRegistersProducer = 48;
static_assert(2 * kRegistersConsumer + 2 * kRegistersProducer <= 65536 / kThreads / 8 * 8 * (kThreads / 128),
              "more registers than the launch gives");

enum NamedBarrier : int { NB_OWNER = 1, NB_HELPER = 2 };

// How many work tiles the publisher is ahead of the one whose P V is computed. Q K^T is two blocks ahead,
// which can be two work tiles, and the Q of one more is being loaded.
constexpr u32 kWorkPublished = 5;

// Bytes that a warp sends at a time.
constexpr int kVectors = 32 * 16;                       // one vector per lane
constexpr int kPartialBytes = 8 * kVectors;             // 32 partial scores per lane
constexpr int kPBytes = 4 * kVectors + 32 * 8;          // packed P and two factors per lane
constexpr int kEndsBytes = 16 * (kMaxLogits ? 12 : 8);  // the row ends of 16 rows

// The end values of the rows of both tiles. The CTA writes those of its own tile, the other CTA sends the
// rest.
struct RowEnds {
    float row_sum[kTiles * kBlockM];                   // of the work tile
    float row_max[kTiles * kBlockM];                   // m_ref at the work tile's end, base 2
    float row_top[kMaxLogits ? kTiles * kBlockM : 1];  // largest scores of the work tile, base 2
};

struct SharedMemoryPlan {
    alignas(1024) unsigned char k[kStages][kStageBytes];  // 98,304 B (D_QK 576), 131,072 (512)
    unsigned char q[kTiles][kStageBytes];                 // 65,536 B
    unsigned char k_rope[kStages][kRopeBytes];            // 12,288 B or none
    unsigned char q_rope[kTiles][kRopeBytes];             //  8,192 B or none
    unsigned char partial[4][kPartialBytes];              // 16,384 B, for the owner
    unsigned char p[4][4 * kVectors];                     //  8,192 B, for the helper
    float2 factors[4][32];                                // on O before P V; sent with P
    RowEnds ends;
    alignas(8) unsigned char valid[kStages][kProducerWarps];  // a bit for each row of the stage
    u64 bar_k_full[kStages];
    u64 bar_k_free[kStages];
    u64 bar_partial_full[4];
    u64 bar_partial_free[4];
    u64 bar_p_full[4];
    u64 bar_p_free[4];
    u64 bar_ends_full[4];
    u64 bar_ends_free[4];
    u64 bar_work_full[kWorkStages];
    u64 bar_work_free[kWorkStages];
    WorkTile work[kWorkStages];
    PublisherState publisher;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= kMaxSharedBytes, "more shared memory than a CTA may have");

// A row of the pair of tiles, as a token and a head of the request.
struct PairRow {
    int token, head;
    bool valid;

    __device__ __forceinline__ PairRow(const Params& params, int pair_row) {
        token = blockIdx.x / params.head_tiles;
        head = ((blockIdx.x - token * params.head_tiles) & ~1) * kBlockM + pair_row;
        valid = head < params.h_q;
    }
};

// ---- Products ---------------------------------------------------------------------------------------------

// Starts copying Q of a tile to shared memory, the columns of this CTA. Rows past the last are zeros.
__device__ __forceinline__ void start_load_q(const Params& params, SharedMemoryPlan& smem, int req,
                                             int tile) {
    const int thread = threadIdx.x % 128, unit = thread % 8;
    const int rank = cluster_ctarank();
#pragma unroll 1
    for (int tile_row = thread / 8; tile_row < kBlockM; tile_row += 16) {
        const PairRow row(params, tile * kBlockM + tile_row);
        const int head = row.valid ? row.head : 0;
        const u32 dst = smem_address(smem.q[tile]) + Chunk::offset(tile_row, unit);
        // RoPE: of V3.2 half of it for each CTA, of MODEL1 the last chunk of the second one.
        if (kV32 ? unit < 4 : rank == 1) {
            const int first = kV32 ? rank * (HalfChunk::kCols / 8) : 0;
            cp_async_16_or_zeros(kV32 ? smem_address(smem.q_rope[tile]) + HalfChunk::offset(tile_row, unit)
                                      : dst + (kChunks - 1) * Chunk::kBytes,
                                 q_rope_address(params, req, row.token, head, first + unit), row.valid);
        }
        const u16* src = q_address(params, req, row.token, head, rank * (kColumns / 8) + unit);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            if (kV32 || chunk < kChunks - 1 || rank == 0)
                cp_async_16_or_zeros(dst + chunk * Chunk::kBytes, src + chunk * Chunk::kCols, row.valid);
        }
    }
}

// Waits for the rows of block n, then starts S = Q K^T, or S += Q K^T, over the CTA's columns.
__device__ __forceinline__ void start_scores(SharedMemoryPlan& smem, int tile, u32 n, float (&s)[32],
                                             bool accumulate) {
    const u32 stage = n % kStages;
    mbarrier_wait_parity(smem_address(&smem.bar_k_full[stage]), n / kStages & 1);
    // Hidden from the compiler, which would otherwise keep descriptors in registers between calls
    u32 smem_q = smem_address(smem.q[0]) + tile * kStageBytes;
    asm volatile("" : "+r"(smem_q));
    const u64 desc_q = Chunk::k_major(smem_q);
    const u64 desc_k = KTiles::descriptor(smem_address(smem.k[stage]));
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kChunks; ++i) {
        const u64 a = desc_q + i / 4 * Chunk::kStepTile + i % 4 * Chunk::kStepK;
        const u64 b = desc_k + i / 4 * KTiles::kStepTile + i % 4 * Chunk::kStepK;
        wgmma_ss<kDtype>(s, a, b, accumulate || i > 0);
    }
    if constexpr (kV32) {
        const u64 a = HalfChunk::k_major(smem_address(smem.q_rope[tile]));
        const u64 b = HalfChunk::k_major(smem_address(smem.k_rope[stage]));
        wgmma_ss<kDtype>(s, a, b, true);
        wgmma_ss<kDtype>(s, a + HalfChunk::kStepK, b + HalfChunk::kStepK, true);
    }
    wgmma_commit_group();
}

// Starts O += P V of block n.
__device__ __forceinline__ void start_pv(SharedMemoryPlan& smem, u32 n, float (&o)[128], const u32 (&p)[16]) {
    const u64 desc_v = KTiles::descriptor(smem_address(smem.k[n % kStages]));
    wgmma_pin(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockTokens / 16; ++k) {
        const u32 a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
        const u64 b = desc_v + k * KTiles::kStepMn;
        wgmma_rs<kDtype, Major::kMn>(wgmma_columns<0, 64>(o), a, b, true);
        wgmma_rs<kDtype, Major::kMn>(wgmma_columns<64, 64>(o), a, b + 2 * KTiles::kStepTile, true);
    }
    wgmma_commit_group();
}
// Frees the stage of block n for this warp, whose P V is complete.
__device__ __forceinline__ void release_stage(SharedMemoryPlan& smem, u32 n) {
    if (leads_quad()) mbarrier_arrive(smem_address(&smem.bar_k_free[n % kStages]));
}

// The block that Q K^T of a warpgroup has reached. It is ahead of P V, and may be in a later work tile.
template <int kBarrier>
struct ScoreWalk {
    int tile;
    WorkTileReader reader;
    int left = 0;  // blocks of the work tile that are left

    __device__ __forceinline__ void load_q(const Params& params, SharedMemoryPlan& smem) {
        if (reader.next(smem)) start_load_q(params, smem, reader.work(smem).req, tile);
    }
    // Returns whether there is another block. Its Q has then landed.
    __device__ __forceinline__ bool next(SharedMemoryPlan& smem) {
        if (left == 0) {
            if (!reader.next(smem)) return false;
            left = warp_uniform(reader.work(smem).num_blocks);
            cp_async_wait_all();
            fence_proxy_async();
            named_barrier_sync(kBarrier, 128);
        }
        return true;
    }
    // Moves on when Q K^T of the block is complete.
    __device__ __forceinline__ void done(const Params& params, SharedMemoryPlan& smem) {
        if (--left > 0) return;
        ++reader.count;
        named_barrier_sync(kBarrier, 128);
        load_q(params, smem);
    }
};

// ---- Owner ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void owner_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const int tile = cluster_ctarank();
    const u32 peer = tile ^ 1;
    const u32 bar_partial_full = smem_address(&smem.bar_partial_full[warp_idx]);
    if (lane_index() == 0) mbarrier_arrive_expect_tx(bar_partial_full, kPartialBytes);
    __syncwarp();
    float o[128], s[32];
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    ScoreWalk<NB_OWNER> walk{tile};
    auto start_scores_of = [&](u32 block) {
        if (!walk.next(smem)) return false;
        mbarrier_wait_parity(bar_partial_full, block & 1);
        const u32 src = smem_address(smem.partial[warp_idx]) + lane_index() * 16;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const uint4 x = load_shared_16(src + j * kVectors);
            s[4 * j] = __uint_as_float(x.x);
            s[4 * j + 1] = __uint_as_float(x.y);
            s[4 * j + 2] = __uint_as_float(x.z);
            s[4 * j + 3] = __uint_as_float(x.w);
        }
        start_scores(smem, tile, block, s, true);
        if (lane_index() == 0) {
            mbarrier_arrive_expect_tx(bar_partial_full, kPartialBytes);
            mbarrier_arrive_remote(smem_address(&smem.bar_partial_free[warp_idx]), peer);
        }
        return true;
    };
    griddepcontrol_wait();  // before Q is read
    walk.load_q(params, smem);
    const bool attends = start_scores_of(0);
    wgmma_wait_group<0>();  // outside the branch, in which some compilers serialise all wgmmas
    if (attends) {
        wgmma_pin(s);
        walk.done(params, smem);
    }
    for (; reader.next(smem); reader.release(smem)) {
        MaximumFirstSoftmax softmax;
#pragma unroll
        for (int j = 0; j < 128; ++j) o[j] = 0.0f;
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            u32 valid_low = 0, valid_high = 0;
            if (leads_quad()) {
                const u32* valid = reinterpret_cast<const u32*>(smem.valid[n % kStages]);
                valid_low = valid[0];
                valid_high = valid[1];
            }
            valid_low = quad_broadcast(valid_low);
            valid_high = quad_broadcast(valid_high);
            if ((valid_low & valid_high) != 0xffffffff) apply_mask(s, KeyBits(valid_low, valid_high));
            u32 p[16], shrink[2];
            softmax.block<kDtype>(s, params.sm_scale_log2, p, shrink);
            const float2 factor =
                make_float2(softmax.shrink_factor(shrink[0]), softmax.shrink_factor(shrink[1]));

            mbarrier_wait_parity(smem_address(&smem.bar_p_free[warp_idx]), ~n & 1);
            const u32 bar = remote_address(smem_address(&smem.bar_p_full[warp_idx]), peer);
            const u32 dst = remote_address(smem_address(smem.p[warp_idx]), peer) + lane_index() * 16;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                store_async_16(dst + j * kVectors, bar, p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]);
            store_async_8(remote_address(smem_address(&smem.factors[warp_idx][lane_index()]), peer), bar,
                          __float_as_uint(factor.x), __float_as_uint(factor.y));

            rescale(o, factor.x, factor.y);
            start_pv(smem, n, o, p);
            if (start_scores_of(n + 1)) {
                wgmma_wait_group<1>();
                wgmma_pin(o);
                release_stage(smem, n);
                wgmma_wait_group<0>();
                wgmma_pin(s);
                walk.done(params, smem);
            } else {
                wgmma_wait_group<0>();
                wgmma_pin(o);
                release_stage(smem, n);
            }
        }
        const int warp_of_pair = tile * 4 + warp_idx;
        softmax.store(smem.ends.row_sum, smem.ends.row_max, warp_of_pair);
        if constexpr (kMaxLogits)
            softmax.maximum.store(smem.ends.row_top, params.sm_scale_log2, warp_of_pair);
        mbarrier_wait_parity(smem_address(&smem.bar_ends_free[warp_idx]), ~reader.count & 1);
        __syncwarp();
        if (leads_quad()) {
            const u32 bar = remote_address(smem_address(&smem.bar_ends_full[warp_idx]), peer);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = warp_of_pair * 16 + lane_index() / 4 + 8 * r;
                auto send = [&](const float& value) {
                    store_async_4(remote_address(smem_address(&value), peer), bar, __float_as_uint(value));
                };
                send(smem.ends.row_sum[row]);
                send(smem.ends.row_max[row]);
                if constexpr (kMaxLogits) send(smem.ends.row_top[row]);
            }
        }
        store_rows<kDtype, PairRow>(params, smem.ends, reader.work(smem), o, warp_of_pair, tile);
    }
    mbarrier_wait_parity(smem_address(&smem.bar_p_free[warp_idx]), ~n & 1);
    mbarrier_wait_parity(smem_address(&smem.bar_ends_free[warp_idx]), ~reader.count & 1);
}

// ---- Helper -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void helper_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const int rank = cluster_ctarank();
    const u32 peer = rank ^ 1;
    const int tile = peer;
    const u32 bar_p_full = smem_address(&smem.bar_p_full[warp_idx]);
    const u32 bar_ends_full = smem_address(&smem.bar_ends_full[warp_idx]);
    const bool publishes = warp_idx == 0;
    if (publishes) start_publishing(params, smem);
    if (lane_index() == 0) {
        mbarrier_arrive_expect_tx(bar_p_full, kPBytes);
        mbarrier_arrive_expect_tx(bar_ends_full, kEndsBytes);
    }
    __syncwarp();
    float o[128], s[32];
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    ScoreWalk<NB_HELPER> walk{tile};
    auto start_scores_of = [&](u32 block) {
        if (!walk.next(smem)) return false;
        start_scores(smem, tile, block, s, false);
        return true;
    };
    auto send_scores_of = [&](u32 block) {
        mbarrier_wait_parity(smem_address(&smem.bar_partial_free[warp_idx]), ~block & 1);
        const u32 bar = remote_address(smem_address(&smem.bar_partial_full[warp_idx]), peer);
        const u32 dst = remote_address(smem_address(smem.partial[warp_idx]), peer) + lane_index() * 16;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            store_async_16(dst + j * kVectors, bar, __float_as_uint(s[4 * j]), __float_as_uint(s[4 * j + 1]),
                           __float_as_uint(s[4 * j + 2]), __float_as_uint(s[4 * j + 3]));
        }
        walk.done(params, smem);
    };
    if (publishes) publish_work<kDtype, TileRow<kBlockM>>(params, smem, kWorkPublished);
    griddepcontrol_wait();  // before Q is read
    walk.load_q(params, smem);
#pragma unroll 1
    for (int block = 0; block < 2; ++block) {
        if (!start_scores_of(block)) break;
        wgmma_wait_group<0>();
        wgmma_pin(s);
        send_scores_of(block);
    }
    while (reader.next(smem)) {
#pragma unroll
        for (int j = 0; j < 128; ++j) o[j] = 0.0f;
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            mbarrier_wait_parity(bar_p_full, n & 1);
            u32 p[16];
            const u32 src = smem_address(smem.p[warp_idx]) + lane_index() * 16;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint4 x = load_shared_16(src + j * kVectors);
                p[4 * j] = x.x, p[4 * j + 1] = x.y, p[4 * j + 2] = x.z, p[4 * j + 3] = x.w;
            }
            const float2 factor = smem.factors[warp_idx][lane_index()];
            rescale(o, factor.x, factor.y);
            auto multiply = [&]() {
                start_pv(smem, n, o, p);
                if (lane_index() == 0) {
                    mbarrier_arrive_expect_tx(bar_p_full, kPBytes);
                    mbarrier_arrive_remote(smem_address(&smem.bar_p_free[warp_idx]), peer);
                }
            };
            if (start_scores_of(n + 2)) {
                multiply();
                wgmma_wait_group<1>();
                wgmma_pin(s);
                send_scores_of(n + 2);
                wgmma_wait_group<0>();
            } else {
                multiply();
                wgmma_wait_group<0>();
            }
            wgmma_pin(o);
            release_stage(smem, n);
        }
        mbarrier_wait_parity(bar_ends_full, reader.count & 1);
        store_rows<kDtype, PairRow>(params, smem.ends, reader.work(smem), o, tile * 4 + warp_idx, rank);
        __syncwarp();
        if (lane_index() == 0) {
            mbarrier_arrive_expect_tx(bar_ends_full, kEndsBytes);
            mbarrier_arrive_remote(smem_address(&smem.bar_ends_free[warp_idx]), peer);
        }
        reader.release(smem);
        if (publishes) publish_work<kDtype, TileRow<kBlockM>>(params, smem, reader.count + kWorkPublished);
    }
    mbarrier_wait_parity(smem_address(&smem.bar_partial_free[warp_idx]), ~n & 1);
}

// ---- Producer ---------------------------------------------------------------------------------------------

// The share of a thread in the CTA's columns of a row: 16 values of each chunk except RoPE's.
struct Share {
    const unsigned char* src;  // the share's first byte, or null
    u32 values[kChunks][4];
    u32 scales[kV32 ? 2 : 1];  // V3.2: float32, of chunks {0, 1} and {2, 3}; MODEL1: 4 e8m0

    // The first three threads prefetch the values of this CTA. The last one prefetches scales and RoPE,
    // sharing this with the other CTA.
    __device__ __forceinline__ static void prefetch(const Row& row) {
        const ProducerThread thread;
        if (row.data == nullptr) return;
        const int rank = cluster_ctarank();
        const int value = rank * kColumns + min_int(thread.quarter * 128, kColumns - 1);
        prefetch_l2(row.data + (thread.quarter < 3 ? value : Fp8Row::kRowBytes - 1 - (rank == 0 ? 64 : 0)));
    }
    // False for RoPE, which in MODEL1 is the last chunk of the second CTA.
    __device__ __forceinline__ static bool has_values(int chunk) {
        return kV32 || chunk < kChunks - 1 || cluster_ctarank() == 0;
    }
    __device__ __forceinline__ void start(const Row& row) {
        const int rank = cluster_ctarank();
        src = row.data != nullptr ? row.data + rank * kColumns + ProducerThread().quarter * 16 : nullptr;
        if constexpr (kV32) {
            const uint2 x = load_global_8(row.data + Fp8Row::kScalesOffset + rank * 8, src != nullptr);
            scales[0] = x.x, scales[1] = x.y;
        } else {
            scales[0] = load_global_4(row.data + row.scale_distance + rank * 4, src != nullptr);
        }
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
            if (has_values(chunk))
                load_16_or_zeros(values[chunk], src + chunk * Chunk::kCols, src != nullptr);
    }
    __device__ __forceinline__ float scale(int chunk) const {
        if constexpr (kV32) {
            return __uint_as_float(scales[chunk / 2]);
        } else {
            return e8m0_value(scales[0] >> chunk * 8 & 0xff);
        }
    }
    // Copies RoPE, which is already bf16.
    __device__ __forceinline__ void copy_rope(const Params& params, SharedMemoryPlan& smem, u32 stage,
                                              u32 group) const {
        const ProducerThread thread;
        const int rank = cluster_ctarank();
        const bool reads = src != nullptr;
        const unsigned char* rope = (reads ? src - rank * kColumns : params.cache[0]) + Fp8Row::kRopeOffset;
        if constexpr (kV32) {
            const u32 dst =
                smem_address(smem.k_rope[stage]) + HalfChunk::offset(thread.block_row(), thread.quarter);
            copy_16_or_zeros(dst, rope + rank * HalfChunk::kRowBytes, reads);
        } else if (rank == 1) {
            const u32 dst =
                group + (kChunks - 1) * Chunk::kGroupBytes + Chunk::offset(thread.row, thread.quarter);
            copy_16_or_zeros(dst, rope, reads);
            copy_16_or_zeros(dst ^ 64, rope + 64, reads);
        }
    }
    __device__ __forceinline__ void store(const Params& params, SharedMemoryPlan& smem, u32 stage,
                                          u32 group) const {
        copy_rope(params, smem, stage, group);
        const ProducerThread thread;
        const u32 dst = group + Chunk::offset(thread.row, thread.quarter * 2);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            if (!has_values(chunk)) continue;
            const u32(&v)[4] = values[chunk];
            store_dequantised(dst + chunk * Chunk::kGroupBytes, v[0], v[1], scale(chunk));
            store_dequantised((dst ^ 16) + chunk * Chunk::kGroupBytes, v[2], v[3], scale(chunk));
        }
    }
};

// ---- Kernel -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    const int thread = threadIdx.x;
    if (thread == 0) {
        init_work_barriers(smem, kThreads / 32);
        mbarrier_init_fence();
    } else if (thread == 32) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_k_full[stage]), kProducerWarps);
            mbarrier_init(smem_address(&smem.bar_k_free[stage]), 64);
        }
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
            mbarrier_init(smem_address(&smem.bar_partial_full[warp]), 1);
            mbarrier_init(smem_address(&smem.bar_partial_free[warp]), 1);
            mbarrier_init(smem_address(&smem.bar_p_full[warp]), 1);
            mbarrier_init(smem_address(&smem.bar_p_free[warp]), 1);
            mbarrier_init(smem_address(&smem.bar_ends_full[warp]), 1);
            mbarrier_init(smem_address(&smem.bar_ends_free[warp]), 1);
        }
        mbarrier_init_fence();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_fp8_cluster(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    init_barriers(smem);
    cluster_arrive();
    cluster_wait();

    if (wg_idx == 0) {
        setmaxnreg_inc<kRegistersConsumer>();
        owner_warpgroup(params, smem, warp_idx);
    } else if (wg_idx == 1) {
        setmaxnreg_inc<kRegistersConsumer>();
        helper_warpgroup(params, smem, warp_idx);
    } else {
        setmaxnreg_dec<kRegistersProducer>();
        producer_warp<Share>(params, smem);
    }
    // A CTA may exit before the other: it has waited for all data sent to its memory and for every arrival on
    // its barriers.
}
