// Dense MLA decoding over a paged cache (Hopper, sm_90a). A CTA does one work tile of the split-KV plan after
// another.
//
//   S = sm_scale Q K^T, masked by length and causality;  P = softmax(S);  O = P V;  V = columns 0-511 of K
//
//   q [b, s_q, h_q, D_QK], k_cache [num_blocks, page_block_size, h_kv, D_QK] in bf16 or fp16
//   block_table [b, *] int32, cache_seqlens [b] int32
//   -> out [b, s_q, h_q, 512] in q's type, lse [b, h_q, s_q] float32, natural log
// A row with nothing to attend has lse +inf. The splits of a request that was cut go to scratch
// (mla/splits.cuh); mla_combine merges them.
//
// Grid: x = tiles of 64 query rows, y = KV heads, z = partitions of the plan (mla/plan.cuh). The rows of a KV
// head are its (token, head) pairs, token by token. Neighbouring CTAs share a partition, so they read the
// same K from L2.
//
// Roles (384 threads; the launch gives 168 registers each, setmaxnreg moves them)
//   QK    warpgroup 0, 176 registers   S = Q K^T with 7 of Q's chunks in registers, online softmax, P
//   PV0   warpgroup 1, 168 registers   O[:, 0:256] += P V, rescale, epilogue; warp 0 walks the plan
//   PV1   warpgroup 2, 160 registers   O[:, 256:512] += P V, rescale, epilogue
//
// Loads. PV0 and PV1 refill by TMA the columns of a K block that they are the last to read: 0-255 and
// 256-511. PV1 also refills the RoPE chunk, while it waits for P; if a warp of QK did, all of QK would wait
// for that warp. Boxes arrive in the order in which they are asked for. Where memory is the limit, Q K^T
// waits for the RoPE chunk alone, so PV1 asks for it before its own half. With CLUSTER 2, CTAs 2i and 2i + 1
// along x walk the same blocks. CTA 0 loads the left half of V's columns for both, CTA 1 the right one. That
// halves the traffic from L2 and the power it takes.
//
// Schedule, per 64-token block j (tensor cycles): the tensor core alternates between one QK and one PV
// product
//   tensor  | QK(j), 36 x 32 = 1152     | PV(j-1), 2 x 4 x 128 = 1024 | QK(j+1)                   | PV(j) ...
//   QK      | issue QK(j), store P(j-1) | softmax(j)                  | issue QK(j+1), store P(j) |
//   PV0, 1  | refill, wait for P(j-1)   | rescale O, PV(j-1)          | refill, wait for P(j)     |
// P(j-1) is announced when all but the last chunk of QK(j) is done: PV then runs beside the softmax, not
// beside QK. QK takes the RoPE chunk first. Its buffer is free after a few wgmmas and has almost a whole
// period for the refill. A K block is in use from QK(j) to the end of PV(j), 4352 of its ring's 3 x 2176
// cycles; the rest hides the load.
//
// Barrier          count     arrives, after what                           waits, before what          parity
// bar_work_full[8] 1         warp 0 of PV0: smem.work[n] written           all: read it                0
// bar_work_free[8] 12        lane 0 of each warp: done with the work tile  warp 0 of PV0: overwrite it 1
// bar_k_full[s][h] 1 + bytes warp 0 of PVh arms it; half h has landed      QK: S += Q K^T of the half  0
// bar_peer_free[s] 1         PVh of the CTA that does not load half h      PVh of the other: refill    0
// bar_rope_full    1 + bytes warp 0 of PV1 arms it; RoPE has landed        QK: S = Q K^T of it         0
// bar_rope_free    4         QK: lane 0 of each warp, Q K^T of it done     warp 0 of PV1: refill RoPE  0
// bar_p_full       32        QK: P and scale stored and fenced; announced  PV0, PV1: rescale, O += P V 0
//                            as above
// bar_p_free       64        PV0, PV1: scale read, PV of the warp done     QK: store the next P        1
// bar_sum_full     128       QK: row sums and maxima of the work tile      PV0, PV1: epilogue          0
// bar_sum_free     256       PV0, PV1: the work tile's rows are stored     QK: write the next ones     1
// bar_looked_up    1         warp 0 of PV0: the first kLookahead sources,  warp 0 of PV1: first refill 0
//                            and whether RoPE is prefetched
// NB_QK            128       QK: done with the tile's Q; next Q landed     QK: both                    -
// NB_V_FREE + h    128       PVh: its PV of the block is done              warp 0 of PVh: refill       -
//
// Warp 0 of PV0 makes the first loads of all. Block n of the partition, counted over all its work tiles, uses
// K stage n % 3 with phase (n / 3) & 1, and row scales n % 2. RoPE and P have one buffer each. The first load
// of a stage does not ask the peer, so the phase of bar_peer_free is n / 3 - 1.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragments.cuh"
#include "layout/rescale.cuh"
#include "mla/chunks.cuh"
#include "mla/dense.cuh"
#include "mla/masks.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "mla/publisher.cuh"
#include "mla/queries.cuh"
#include "mla/softmax.cuh"
#include "mla/splits.cuh"
#include "mla/store_p.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

static_assert(CLUSTER == 1 || (CLUSTER == 2 && BOX_ROWS == 64),
              "CLUSTER must be 1, or 2 with boxes of 64 rows");
constexpr int kStages = 3;
constexpr int kClusterSize = CLUSTER;  // CTAs along grid x that share one copy of K
constexpr int kQRegisterChunks = 7;    // chunks 0 to 6 of Q live in registers
constexpr int kQSharedChunks = kQChunks - kQRegisterChunks;
constexpr int kSourceStages = 8;
constexpr int kLookahead = 5;           // blocks between a page's lookup and PV of the block in hand
constexpr int kMaxPrefetchBlocks = 64;  // of a partition whose RoPE chunks are prefetched to L2
static_assert(kLookahead + 1 < kWorkStages && kLookahead + 1 < kSourceStages,
              "rings must hold what is looked up ahead, and the blocks in hand");

constexpr int kThreads = 384;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kRegistersQK = 176;
constexpr int kRegistersPV0 = 168;
constexpr int kRegistersPV1 = 160;
static_assert(kRegistersQK + kRegistersPV0 + kRegistersPV1 <= 65536 / kThreads / 8 * 8 * 3,
              "more registers than the launch gives");

enum NamedBarrier : int { NB_QK = 1, NB_V_FREE = 2 };

// Where a block's boxes lie in the cache. Lane j of the warp describes box j % kBoxes.
struct BoxSource {
    int page;
    int row;  // first row of the box inside its page, negative for a shifted one
};
constexpr int kNoBlock = -(1 << 30);

struct WalkerState {
    u32 work;              // of the next block to look up
    int block;             // in that work tile
    bool prefetches_rope;  // of the partition; PV1 reads it too
};

struct SharedMemoryPlan {
    alignas(1024) unsigned char k[kStages][kVChunks * Chunk::kBytes];  // 196,608 B
    unsigned char q[2 * Chunk::kBytes];  //  16,384 B, the chunks not in registers
    unsigned char rope[Chunk::kBytes];   //   8,192 B, chunk 8 of the block in hand
    unsigned char p[Chunk::kBytes];      //   8,192 B
    float row_scale[2][kBlockM];         // factor on O before the block's PV
    float row_sum[kBlockM];              // of the work tile
    float row_max[kBlockM];              // m_ref at the work tile's end, base 2
    u64 bar_work_full[kWorkStages];
    u64 bar_work_free[kWorkStages];
    u64 bar_k_full[kStages][2];
    u64 bar_peer_free[kStages];
    u64 bar_rope_full;
    u64 bar_rope_free;
    u64 bar_p_full;
    u64 bar_p_free;
    u64 bar_sum_full;
    u64 bar_sum_free;
    u64 bar_looked_up;
    WorkTile work[kWorkStages];
    BoxSource sources[kSourceStages][kBoxes];
    PublisherState publisher;
    WalkerState walker;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= kMaxSharedBytes, "more shared memory than a CTA may have");

// Loads chunks [first, first + count) of a block to `dst`, in both CTAs of a cluster if kMulticast; the
// caller has armed the barriers. A converged warp calls.
template <int kFirstChunk, int kCount, bool kMulticast>
__device__ __forceinline__ void load_chunks(const Params& params, u32 dst, u32 bar, BoxSource source,
                                            int lane_idx) {
    const int kv_head = blockIdx.y;
    if constexpr (kBoxes == 1) {
        if (elect_one_sync()) {
            static_assert(kCount == 1 || kCount == kVChunks / 2);
            const TensorMap* map = kCount == 1 ? &params.k_map_one : &params.k_map_half;
            if constexpr (kMulticast) {
                tma_load_5d_multicast(dst, map, bar, (1 << kClusterSize) - 1, 0, source.row, kFirstChunk,
                                      kv_head, source.page);
            } else {
                tma_load_5d(dst, map, bar, 0, source.row, kFirstChunk, kv_head, source.page);
            }
        }
    } else if (lane_idx < kBoxes) {
#pragma unroll 1
        for (int chunk = 0; chunk < kCount; ++chunk) {
            tma_load_5d(dst + (chunk * Chunk::kRows + lane_idx * BOX_ROWS) * Chunk::kRowBytes,
                        &params.k_map_one, bar, 0, source.row, kFirstChunk + chunk, kv_head, source.page);
        }
    }
    __syncwarp();
}

// What warp 0 of PV0 does for all: it walks the plan's work tiles and their blocks, and looks up where each
// block lies. Work tiles and sources go to rings in shared memory ahead of their use. Its state between calls
// is there too (smem.publisher, smem.walker): next to 128 accumulators there are no registers for it. A
// converged warp calls.
struct Walker {
    __device__ __forceinline__ void start(const Params& params, SharedMemoryPlan& smem, int lane_idx) {
        touch_requests(params.cache_seqlens, params.num_splits, params.b, lane_idx);
        const PlanRow plan = read_plan_row(params.sched_meta, blockIdx.z, params.object_layout, params.b);
        // The first work tile nearly always begins where the partition does, so its pages are asked for now.
        const i64 token = static_cast<i64>(plan.begin_block) * kBlockTokens + lane_idx % kBoxes * BOX_ROWS;
        const int* entry = nullptr;
        int page = 0;
        if (token >= 0 && token < params.max_seqlen) {
            entry = page_entry(params, plan.begin_req, static_cast<int>(token));
            page = load_global(entry);
        }
        if (lane_idx == 0) {
            smem.publisher.start(plan);
            smem.walker.work = 0;
            smem.walker.block = 0;
            // Beside the load of a block, a prefetch of its RoPE chunk helps; presumably it overtakes the
            // boxes that the chunk's own load waits behind. In long partitions some SMs then get ahead of
            // others, and the call takes longer.
            smem.walker.prefetches_rope = kHasRope && gridDim.x <= kClusterSize &&
                                          plan.begin_req == plan.end_req &&
                                          plan.end_block - plan.begin_block <= kMaxPrefetchBlocks;
        }
        __syncwarp();
        publish_work<kDtype, RowIndex>(params, smem, 1, LaneKept{lane_idx});
        look_up(params, smem, 0, lane_idx, entry, page);
    }
    // Waits for the pages looked up so far.
    __device__ __forceinline__ void wait_page() {
        cp_async_wait_all();
        __syncwarp();
    }
    // Notes where block `n` lies. Its page is asked for, or known if its entry is `known_entry`. Blocks are
    // looked up in order.
    __device__ __forceinline__ void look_up(const Params& params, SharedMemoryPlan& smem, u32 n, int lane_idx,
                                            const int* known_entry = nullptr, int known_page = 0) {
        const WorkTile& work = smem.work[smem.walker.work % kWorkStages];
        const int block = smem.walker.block;
        BoxSource& source = smem.sources[n % kSourceStages][lane_idx % kBoxes];
        int row = kNoBlock;
        if (work.req >= 0) {
            const int first_token = (work.first_block + block) * kBlockTokens + lane_idx % kBoxes * BOX_ROWS;
            const int tokens = min_int(work.seqlen - first_token, BOX_ROWS);
            row = params.page_block_size;  // wholly out of range: zeros
            if (tokens > 0) {
                row = first_token - page_in_table(params, first_token) * params.page_block_size + tokens -
                      BOX_ROWS;
                const int* entry = page_entry(params, work.req, first_token);
                if (lane_idx < kBoxes) {
                    if (entry == known_entry) {
                        source.page = known_page;
                    } else {
                        cp_async_4(smem_address(&source.page), entry);
                    }
                }
            } else if (lane_idx < kBoxes) {
                source.page = 0;
            }
            const bool last = block + 1 == work.num_blocks;
            __syncwarp();
            if (lane_idx == 0) {
                smem.walker.block = last ? 0 : block + 1;
                if (last) smem.walker.work += 1;
            }
        }
        if (lane_idx < kBoxes) source.row = row;
        __syncwarp();
    }
};

// Loads one half of block n into its stage, which this CTA has finished with. After the partition's last
// block it does nothing. In a cluster, CTA 0 loads the left half for both and CTA 1 the right one, when the
// other has finished with the stage too. Whoever loads the right half prefetches the RoPE chunk beside it,
// where that pays.
template <int kHalf>
__device__ __forceinline__ void load_half(const Params& params, SharedMemoryPlan& smem, u32 n, int lane_idx) {
    const BoxSource source = smem.sources[n % kSourceStages][lane_idx % kBoxes];
    if (warp_uniform(source.row) == kNoBlock) return;
    const u32 stage = n % kStages;
    const u32 dst = smem_address(smem.k[stage]) + 4 * kHalf * Chunk::kBytes;
    const u32 bar = smem_address(&smem.bar_k_full[stage][kHalf]);
    if (lane_idx == 0) mbarrier_arrive_expect_tx(bar, 4 * Chunk::kBytes);
    if (kHalf == 1 && smem.walker.prefetches_rope && lane_idx < kBoxes &&
        (kClusterSize == 1 || cluster_ctarank() == kHalf)) {
        tma_prefetch_5d(&params.k_map_one, 0, source.row, kVChunks, blockIdx.y, source.page);
    }
    __syncwarp();
    if constexpr (kClusterSize == 1) {
        load_chunks<4 * kHalf, 4, false>(params, dst, bar, source, lane_idx);
    } else {
        const u32 bar_peer_free = smem_address(&smem.bar_peer_free[stage]);
        const bool reused = n >= kStages;
        if (cluster_ctarank() == kHalf) {
            if (reused) mbarrier_wait_parity(bar_peer_free, ~(n / kStages) & 1);
            load_chunks<4 * kHalf, 4, true>(params, dst, bar, source, lane_idx);
        } else if (reused && lane_idx == 0) {
            mbarrier_arrive_remote(bar_peer_free, kHalf);
        }
    }
}
__device__ __forceinline__ void load_rope(const Params& params, SharedMemoryPlan& smem, u32 n, int lane_idx) {
    const BoxSource source = smem.sources[n % kSourceStages][lane_idx % kBoxes];
    if (warp_uniform(source.row) == kNoBlock) return;
    const u32 bar = smem_address(&smem.bar_rope_full);
    if (lane_idx == 0) mbarrier_arrive_expect_tx(bar, Chunk::kBytes);
    __syncwarp();
    load_chunks<kVChunks, 1, false>(params, smem_address(smem.rope), bar, source, lane_idx);
}
// Loads the RoPE chunk of block n + 1 when Q K^T of block n, if there is one, has finished with the buffer.
__device__ __forceinline__ void refill_rope(const Params& params, SharedMemoryPlan& smem, u32 n,
                                            int lane_idx) {
    if (warp_uniform(smem.sources[n % kSourceStages][0].row) == kNoBlock) return;
    mbarrier_wait_parity(smem_address(&smem.bar_rope_free), n & 1);
    load_rope(params, smem, n + 1, lane_idx);
}

// Stands in for query rows past the last. They are zeros because a tensor core that multiplies zeros takes
// less power, and power limits the clock.
__device__ alignas(16) const u16 kZeroRow[D_QK] = {};

__device__ __forceinline__ const u16* q_of(const Params& params, int req, const RowIndex& row, int unit) {
    return row.valid ? q_address(params, req, row.token, row.head, unit) : kZeroRow + unit * 8;
}
// Of the last chunk.
__device__ __forceinline__ const u16* q_rope_of(const Params& params, int req, const RowIndex& row,
                                                int unit) {
    return row.valid ? q_rope_address(params, req, row.token, row.head, unit) : kZeroRow + unit * 8;
}

// Starts loading the Q of a work tile. The first chunks go to registers, 16 bytes at a time, because A
// operands in registers cost no reads of shared memory; the rest goes to shared memory. Rows past the last
// are zeros.
__device__ __forceinline__ void start_load_q(const Params& params, SharedMemoryPlan& smem, int req,
                                             u32 (&q)[kQRegisterChunks * 4][4], int warp_idx) {
    const int lane_idx = lane_index();
    const int thread = warp_idx * 32 + lane_idx;
#pragma unroll 1
    for (int tile_row = thread / 8; tile_row < kBlockM; tile_row += 16) {
        const RowIndex row(params, tile_row);
        const u16* src = q_of(params, req, row, kQRegisterChunks * 8 + thread % 8);
        const u32 dst = smem_address(smem.q) + Chunk::offset(tile_row, thread % 8);
#pragma unroll
        for (int chunk = 0; chunk < kQSharedChunks - 1; ++chunk) {
            cp_async_16(dst + chunk * Chunk::kBytes, src + chunk * Chunk::kCols);
        }
        cp_async_16(dst + (kQSharedChunks - 1) * Chunk::kBytes, q_rope_of(params, req, row, thread % 8));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowIndex row(params, warp_idx * 16 + lane_index() / 4 + 8 * r);
        const uint4* src = reinterpret_cast<const uint4*>(q_of(params, req, row, lane_index() % 4));
#pragma unroll
        for (int i = 0; i < kQRegisterChunks * 2; ++i) {
            const uint4 value = src[4 * i];
            q[2 * i + r][0] = value.x;
            q[2 * i + r][1] = value.y;
            q[2 * i + r][2] = value.z;
            q[2 * i + r][3] = value.w;
        }
    }
}
// Waits for it and turns the registers into A fragments: of four 16-byte units in a quad, lane i takes the
// i-th pairs.
__device__ __forceinline__ void finish_load_q(u32 (&q)[kQRegisterChunks * 4][4]) {
#pragma unroll
    for (int i = 0; i < kQRegisterChunks * 2; ++i) {
        quad_transpose(q[2 * i]);
        quad_transpose(q[2 * i + 1]);
        const u32 first[4] = {q[2 * i][0], q[2 * i + 1][0], q[2 * i][1], q[2 * i + 1][1]};
        const u32 second[4] = {q[2 * i][2], q[2 * i + 1][2], q[2 * i][3], q[2 * i + 1][3]};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            q[2 * i][j] = first[j];
            q[2 * i + 1][j] = second[j];
        }
    }
    cp_async_wait_all();
    fence_proxy_async();
    named_barrier_sync(NB_QK, 128);
}

// -inf where the query does not attend the token, or a row of K holds no token: the head of mla/dense.cuh
// says where a request's last tokens lie.
__device__ __forceinline__ void mask_scores(const Params& params, float (&s)[32], int seqlen, int first_token,
                                            int warp_idx) {
    const int lane_idx = lane_index();
    const int tokens = min_int(seqlen - first_token, kBlockTokens);
    const int tail_box =
        tokens / BOX_ROWS;  // the partly filled one, if any: its first tail_shift rows are zeros
    const int tail_shift = BOX_ROWS - tokens % BOX_ROWS;
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowIndex row(params, warp_idx * 16 + lane_idx / 4 + 8 * r);
        limit[r] =
            min_int(visible_keys(seqlen, params.s_q, row.token, params.causal) - first_token, kBlockTokens);
    }
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        const int box = 8 * (j >> 2) / BOX_ROWS;
        const int shift = box == tail_box ? tail_shift : 0;
        const int begin = box > tail_box ? kBlockTokens : box * BOX_ROWS + shift;
        const int row = 8 * (j >> 2) + (j & 1) + 2 * (lane_idx % 4);  // of K in the tile
        if (row < begin || row >= limit[(j >> 1) & 1] + shift) s[j] = -kInfinity;
    }
}

__device__ __forceinline__ void qk_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const u64 desc_q = Chunk::k_major(smem_address(smem.q));
    const u64 desc_rope = Chunk::k_major(smem_address(smem.rope));
    const u32 smem_k = smem_address(smem.k);
    const u32 smem_p =
        smem_address(smem.p) + Chunk::offset(warp_idx * 16 + lane_index() % 16, lane_index() / 16);

    if constexpr (kClusterSize > 1) cluster_wait();
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    u32 stage = 0, k_parity = 0;
    u32 q[kQRegisterChunks * 4][4];
    // The partition's first request nearly always has tokens, so that the first work tile is its: load its Q
    // now.
    int req = read_plan_row(params.sched_meta, blockIdx.z, params.object_layout, params.b).begin_req;
#pragma unroll 1
    while (true) {
        start_load_q(params, smem, req, q, warp_idx);
        if (!reader.next(smem) || reader.work(smem).req == req) break;
        req = reader.work(smem).req;
        cp_async_wait_all();  // before the same shared memory is copied to again
    }
    for (; reader.next(smem); reader.release(smem)) {
        finish_load_q(q);

        OnlineSoftmax softmax;
        u32 p[16] = {};  // P of the block before, packed as A fragments
        auto wait_p_free = [&]() {
            mbarrier_wait_parity(smem_address(&smem.bar_p_free), n & 1);  // P V of block n - 2 is complete
        };
        auto store_p = [&]() { store_probabilities<Chunk::kBytes, true>(smem_p, p); };
        auto announce_p = [&]() {
            __syncwarp();
            if (leads_quad()) mbarrier_arrive(smem_address(&smem.bar_p_full));
        };
        // Tokens from the block's first on that every row of the tile sees.
        int visible = warp_uniform(reader.work(smem).seqlen - reader.work(smem).first_block * kBlockTokens);
        if (params.causal) visible += token_of_row(params, blockIdx.x * kBlockM) + 1 - params.s_q;
        bool p_pending = false;  // P of the block before is in registers
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            // S = Q K^T; the stores of P hide between the chunks
            u64* full = smem.bar_k_full[stage];
            const u64 desc_k = Chunk::k_major(smem_k + stage * (kVChunks * Chunk::kBytes));
            float s[32];
            wgmma_pin(s);
            if constexpr (kHasRope) {
                mbarrier_wait_parity(smem_address(&smem.bar_rope_full), n & 1);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    wgmma_ss<kDtype>(s, desc_q + Chunk::kStepTile + k * Chunk::kStepK,
                                     desc_rope + k * Chunk::kStepK, k > 0);
                }
                wgmma_commit_group();
            }
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk) {
                if (chunk % 4 == 0) mbarrier_wait_parity(smem_address(full + chunk / 4), k_parity);
                if (chunk == kVChunks - 1) wgmma_commit_group();
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const u64 b = desc_k + chunk * Chunk::kStepTile + k * Chunk::kStepK;
                    if (chunk < kQRegisterChunks) {
                        wgmma_rs<kDtype>(s, q[min_int(chunk, kQRegisterChunks - 1) * 4 + k], b,
                                         kHasRope || chunk + k > 0);
                    } else {
                        wgmma_ss<kDtype>(s, desc_q + k * Chunk::kStepK, b, true);
                    }
                }
                if (p_pending) {
                    if (chunk == 0) wait_p_free();
                    if (chunk == 1) store_p();
                    if (chunk == 2) fence_proxy_async();
                }
                if (kHasRope && chunk == 3) {
                    wgmma_commit_group();
                    wgmma_wait_group<1>();
                    __syncwarp();
                    if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_rope_free));
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (p_pending) announce_p();
            wgmma_wait_group<0>();
            wgmma_pin(s);

            if (left == 1) {
                // The next work tile's Q, under the rest of this one
                WorkTileReader after = reader;
                ++after.count;
                if (after.next(smem)) {
                    named_barrier_sync(NB_QK, 128);
                    start_load_q(params, smem, after.work(smem).req, q, warp_idx);
                }
            }
            if (visible < kBlockTokens) {
                const WorkTile& work = reader.work(smem);
                mask_scores(params, s, work.seqlen,
                            (work.first_block + work.num_blocks - left) * kBlockTokens, warp_idx);
            }
            visible -= kBlockTokens;

            float scale[2];
            softmax.block<kDtype>(s, params.sm_scale_log2, p, scale);
            if (leads_quad()) {
                float* row_scale = first_row(smem.row_scale[n % 2], warp_idx);
                row_scale[0] = scale[0];
                row_scale[8] = scale[1];
            }
            p_pending = true;
            if (++stage == kStages) {
                stage = 0;
                k_parity ^= 1;
            }
        }
        wait_p_free();
        store_p();
        fence_proxy_async();
        announce_p();

        mbarrier_wait_parity(smem_address(&smem.bar_sum_free), ~reader.count & 1);
        softmax.store(smem.row_sum, smem.row_max, warp_idx);
        mbarrier_arrive(smem_address(&smem.bar_sum_full));
    }
}

template <int kHalf>
__device__ __forceinline__ void pv_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const u64 desc_p = Chunk::k_major(smem_address(smem.p));
    const u32 smem_v = smem_address(smem.k) + kHalf * 4 * Chunk::kBytes;
    const bool walks = kHalf == 0 && warp_idx == 0;
    const bool refills_rope = kHasRope && kHalf == 1 && warp_idx == 0;

    Walker walker;
    if (walks) walker.start(params, smem, lane_index());
    if constexpr (kClusterSize > 1) cluster_wait();  // the other CTA's barriers are there
    if (walks) {
#pragma unroll 1
        for (int n = 0; n < kLookahead; ++n) {
            walker.wait_page();
            if (n < kStages) {
                load_half<0>(params, smem, n, lane_index());
                load_half<1>(params, smem, n, lane_index());
                if (kHasRope && n == 0) load_rope(params, smem, 0, lane_index());
            }
            // One work tile at a time, so that the first K is asked for early. Block n + 1 is in work tile n
            // + 1 at the latest.
            publish_work<kDtype, RowIndex, LaneKept>(params, smem, n + 2);
            walker.look_up(params, smem, n + 1, lane_index());
        }
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_looked_up));
    }
    if (kHalf == 1 && warp_idx == 0) mbarrier_wait_parity(smem_address(&smem.bar_looked_up), 0);
    if (refills_rope) refill_rope(params, smem, 0, lane_index());
    float o[128];
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    for (; reader.next(smem); reader.release(smem)) {
        if (walks) publish_work<kDtype, RowIndex, LaneKept>(params, smem, reader.count + 2 + kLookahead);
#pragma unroll
        for (int j = 0; j < 128; ++j) o[j] = 0.0f;
        bool deferred = false;  // PV1's half of the block before is to be refilled, behind the RoPE chunk
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            if (walks) {
                walker.wait_page();
                walker.look_up(params, smem, n + kLookahead + 1, lane_index());
            }
            if (refills_rope && left > 1) refill_rope(params, smem, n + 1, lane_index());
            if (deferred) load_half<kHalf>(params, smem, n - 1 + kStages, lane_index());
            mbarrier_wait_parity(smem_address(&smem.bar_p_full), n & 1);
            rescale(o, smem.row_scale[n % 2], warp_idx);
            const u64 desc_v = Chunk::mn_major(smem_v + n % kStages * (kVChunks * Chunk::kBytes));
            wgmma_pin(o);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockTokens / 16; ++k) {
                wgmma_ss<kDtype, Major::kK, Major::kMn>(o, desc_p + k * Chunk::kStepK,
                                                        desc_v + k * Chunk::kStepMn, true);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(o);
            if (warp_idx == 0) {
                named_barrier_sync(NB_V_FREE + kHalf, 128);
            } else {
                named_barrier_arrive(NB_V_FREE + kHalf, 128);
            }
            if (leads_quad()) mbarrier_arrive(smem_address(&smem.bar_p_free));
            deferred = refills_rope && left > 1;
            if (warp_idx == 0 && !deferred) {
                load_half<kHalf>(params, smem, n + kStages, lane_index());
            }
            if (refills_rope && left == 1) refill_rope(params, smem, n + 1, lane_index());
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_full), reader.count & 1);
        store_rows<kDtype, RowIndex>(params, smem, reader.work(smem), o, warp_idx, kHalf);
        mbarrier_arrive(smem_address(&smem.bar_sum_free));
    }
}

// One thread in each of six warps initialises a few barriers, whose addresses the compiler knows. If lanes
// had an address each, they would be taken one by one, with a fence before each.
__device__ __forceinline__ void init_barriers(const Params& params, SharedMemoryPlan& smem) {
    const int thread = threadIdx.x;
    if (thread == 0) {
#pragma unroll
        for (int stage = 0; stage < kWorkStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_work_full[stage]), 1);
        }
    } else if (thread == 32) {
#pragma unroll
        for (int stage = 0; stage < kWorkStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_work_free[stage]), kThreads / 32);
        }
    } else if (thread == 64) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_k_full[stage][0]), 1);
            mbarrier_init(smem_address(&smem.bar_k_full[stage][1]), 1);
        }
    } else if (thread == 96) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_peer_free[stage]), 1);
        }
        mbarrier_init(smem_address(&smem.bar_rope_full), 1);
        mbarrier_init(smem_address(&smem.bar_rope_free), 4);
        mbarrier_init(smem_address(&smem.bar_looked_up), 1);
    } else if (thread == 128) {
        mbarrier_init(smem_address(&smem.bar_p_full), 32);
        mbarrier_init(smem_address(&smem.bar_p_free), 64);
        mbarrier_init(smem_address(&smem.bar_sum_full), 128);
        mbarrier_init(smem_address(&smem.bar_sum_free), 256);
    } else if (thread == 160) {
        tma_prefetch_descriptor(&params.k_map_half);
        tma_prefetch_descriptor(&params.k_map_one);
    }
    mbarrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_dense_decode(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    init_barriers(params, smem);
    if constexpr (kClusterSize > 1) cluster_arrive();
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    if (wg_idx == 0) {
        setmaxnreg_inc<kRegistersQK>();
        qk_warpgroup(params, smem, warp_idx);
    } else if (wg_idx == 1) {
        setmaxnreg_dec<kRegistersPV0>();
        pv_warpgroup<0>(params, smem, warp_idx);
    } else {
        setmaxnreg_dec<kRegistersPV1>();
        pv_warpgroup<1>(params, smem, warp_idx);
    }
    // A CTA may leave before the other of its cluster: it has waited for every copy into its memory and every
    // arrival on its barriers.
}
