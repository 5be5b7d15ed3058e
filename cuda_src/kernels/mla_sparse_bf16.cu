// Sparse MLA attention over bf16 rows: decoding from a paged cache, and prefill (sm_90a).
//
//   S = sm_scale Q K^T,  P = softmax(S),  O = P V,  K = the cache rows that the indices name, V = K[:, 0:512]
//
// Arrays, plan, splits and MAX_LOGITS are those of mla_sparse_fp8.cu, but the rows need no conversion. In
// prefill every query token is a request, and a page is one row.
//
// GROUP_TOKENS above 1 (prefill only): a request is a group of this many neighbouring query tokens. The heads
// of all its tokens share a tile, over the union of the rows that the tokens select
// (mla_unite_selections.cu).
//
// Grid: x = query tokens x tiles of 64 heads, z = partitions of the plan (mla/plan.cuh). Two tiles of a token
// are a cluster, so that neighbouring SMs read the same rows at about the same time. They share nothing else.
//
// Roles (512 threads; the launch gives 128 registers to each, setmaxnreg redistributes them)
//   QK        warpgroup 0,        168 registers  S = Q K^T with most of Q in registers, online softmax, P
//   PV0, PV1  warpgroups 1 and 2, 160            O[:, 0:256] and O[:, 256:512] += P V, rescale, epilogue;
//                                                warp 0 of PV1 walks the plan
//   producer  warpgroup 3,         24            copies rows into the ring of K, each of the four warps
//                                                16 rows of a block; loads the next Q there
// Besides the operands of the wgmmas in flight ptxas needs 26 registers. The operands are 128 accumulators in
// PV, and in QK 32 accumulators and the registers of Q. The counts add up to the 4 x 128 that the launch
// gives.
//
// Schedule: as in mla_dense_decode.cu, the tensor core alternates between one Q K^T and one P V, so that the
// softmax always runs during a P V. P(j - 1) is announced when all but the last chunk of Q K^T(j) is
// complete.
//   producer  | Q K^T(j) has read the RoPE buffer: | P V(j - 1) leaves a stage: rows of block j + 2, or, if a
//             | RoPE of block j + 1                | work tile begins there, its Q first
//
// Barrier           count     arrives, after what                        waits, before what            parity
// bar_work_full[4]  1         warp 0 of PV1: work[n] written             all: read it                  0
// bar_work_free[4]  16        lane 0 of each warp: done with the work    warp 0 of PV1: overwrite it   1
//                             tile
// bar_k_full[s][h]  132, 128  producer: copies of half h landed, every   QK: S += Q K^T of the half    0
//                             thread; for half 0 also lane 0 of each
//                             warp, valid written
// bar_k_free[s][i]  8         PV0, PV1: lane 0 of each warp, P V of the  producer: refill the slice;   1
//                             32 tokens of slice i complete              both slices: load the next Q
// bar_rope_full     128       producer: copies of RoPE landed, every     QK: S = Q K^T of RoPE         0
//                             thread
// bar_rope_free     4         QK: lane 0 of each warp, Q K^T of RoPE     producer: refill              1
//                             complete
// bar_p_full        32        QK: P and scale stored, fenced             PV0, PV1: rescale, O += P V   0
// bar_p_free        64        PV0, PV1: scale read, P V of the warp      QK: store the next P          1
//                             complete
// bar_q_full        1         producer: one lane, bytes of Q announced   QK: read Q from the stage     0
//                             (for the first work tile: QK)
// bar_q_free        128       QK: every thread, Q read from the stage    producer: copy rows there     0
// bar_q_rest_full   1         QK: one lane, bytes of the rest of Q       QK: S = Q K^T                 0
//                             announced
// bar_sum_full      128       QK: row sums and maxima of the work tile   PV0, PV1: epilogue            0
//                             written
// bar_sum_free      256       PV0, PV1: rows of the work tile stored     QK: write those of the next   1
// NB_QK             128       QK: last Q K^T of the work tile complete   QK: overwrite Q in smem       -
//                             QK: single step of Q stored, fenced        QK: S = Q K^T
//
// The Q of a work tile passes through the ring of K on its way to the registers of QK. It is loaded to the
// stage of the work tile's first block, before the rows of that block. The Q of the first work tile is loaded
// to the last stage.
//
// Nothing is read for an invalid index. Its row in shared memory is zeros, and its scores are masked.
#define WORK_STAGES 4  // shared memory has no room for more
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/rescale.cuh"
#include "mla/chunks.cuh"
#include "mla/masks.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "mla/publisher.cuh"
#include "mla/selection.cuh"
#include "mla/softmax.cuh"
#include "mla/splits.cuh"
#include "mla/store_p.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

static_assert(D_QK == 576 || D_QK == 512, "D_QK must be 576 (512 + 64 RoPE) or 512");
static_assert(LOAD_BYTES == 16, "LOAD_BYTES is the alignment of rows in bytes: 16");
static_assert(GROUP_TOKENS == 1 || (GROUP_TOKENS <= 8 && MAX_LOGITS), "united selections are of prefill");
constexpr int kGroupTokens = GROUP_TOKENS;

constexpr Dtype kDtype = Dtype::kBf16;
constexpr int kStages = 3;
constexpr int kVChunks = kDimV / Chunk::kCols;
constexpr bool kHasRope = D_QK > kDimV;
// Q is multiplied in steps of 16 columns. The first kQSteps steps are in registers. The last two chunks are
// in shared memory, and at D_QK 576 so is one single step in front of them.
constexpr int kQSteps = D_QK == 576 ? 27 : 24;
constexpr int kQSharedChunks = 2;
constexpr int kQSingleStep = D_QK == 576 ? kQSteps : -1;

constexpr int kStageBytes = kVChunks * Chunk::kBytes;
constexpr int kQStagedChunks = ceil_div(kQSteps, 4);
static_assert(kQStagedChunks * Chunk::kBytes <= kStageBytes, "Q passes through a stage");

constexpr int kQUnitBytes = kBlockM * 16;  // eight columns of the single step
constexpr int kQStepBytes = kQSingleStep < 0 ? 16 : 2 * kQUnitBytes;
constexpr int kRopeBytes = kHasRope ? Chunk::kBytes : 16;

constexpr int kThreads = 512;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kProducerWarps = 4;
constexpr int kWarpRows = kBlockTokens / kProducerWarps;  // rows of a block per warp
constexpr int kRegistersQK = 168;
constexpr int kRegistersPV = 160;
constexpr int kRegistersProducer = 24;
static_assert(kRegistersQK + 2 * kRegistersPV + kRegistersProducer <=
                  65536 / kThreads / 8 * 8 * (kThreads / 128),
              "more registers than the launch gives");

enum NamedBarrier : int { NB_QK = 1 };

struct SharedMemoryPlan {
    alignas(1024) unsigned char k[kStages][kStageBytes];  // 196,608 B
    unsigned char q[kQSharedChunks * Chunk::kBytes];      //  16,384 B (D_QK 576), not in registers
    unsigned char q_step[kQStepBytes];                    //   2,048 B or none: the single step, two units
    unsigned char rope[kRopeBytes];                       //   8,192 B or none: RoPE of the current block
    alignas(1024) unsigned char p[Chunk::kBytes];         //   8,192 B
    unsigned char row_shrink[2][kBlockM];                 // exponent of the factor on O before P V
    float row_sum[kBlockM];                               // row sums of the work tile
    float row_max[kBlockM];                               // m_ref at the work tile's end, base 2
    alignas(8) unsigned short valid[kStages][kProducerWarps];  // a bit for each row of the stage
    u64 bar_k_full[kStages][2];
    u64 bar_k_free[kStages][2];
    u64 bar_rope_full;
    u64 bar_rope_free;
    u64 bar_p_full;
    u64 bar_p_free;
    u64 bar_q_full;
    u64 bar_q_rest_full;
    u64 bar_q_free;
    u64 bar_sum_full;
    u64 bar_sum_free;
    u64 bar_work_full[kWorkStages];
    u64 bar_work_free[kWorkStages];
    WorkTile work[kWorkStages];
    PublisherState publisher;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= kMaxSharedBytes, "more shared memory than a CTA may have");

using RowIndex = TileRow<kBlockM>;

__device__ __forceinline__ u32 next_stage(u32 stage) { return stage == kStages - 1 ? 0 : stage + 1; }

// One thread starts loading kCount chunks of Q, from chunk `first` on. `bar` counts this as one arrival.
// Heads past the last are zeros. The last chunk, RoPE, may be another array.
template <int kCount>
__device__ __forceinline__ void load_q_chunks(const Params& params, u32 dst, u32 bar, int req, int first) {
    const RowIndex row(params, 0);
    mbarrier_arrive_expect_tx(bar, kCount * Chunk::kBytes);
#pragma unroll
    for (int chunk = 0; chunk < kCount; ++chunk) {
        const bool is_rope = first + chunk == D_QK / Chunk::kCols - 1;
        tma_load_5d(dst + chunk * Chunk::kBytes, is_rope ? &params.q_rope_map : &params.q_map, bar, 0,
                    row.head, is_rope ? 0 : first + chunk, row.token, req);
    }
}

// ---- United selections ------------------------------------------------------------------------------------

// Which rows of a block a thread attends with its two tile rows, in a tile of several query tokens.
struct BlockSelection {
    u64 selected[2];  // a bit for each row that the token of tile row r selects
    u64 not_finite;   // a bit for each row with NaN or Inf, for which zeros were loaded

    // The words for the block of the work tile after which left - 1 others follow.
    template <class Params>
    __device__ __forceinline__ static const u64* words(const Params& params, const WorkTile& work, int left) {
        const int block = work.first_block + work.num_blocks - left;
        return params.selected +
               (static_cast<i64>(work.req) * (params.topk[0] / kBlockTokens) + block) * (2 * kGroupTokens);
    }
    // Loads the words for the warp whose tile rows begin at warp_idx * 16.
    __device__ __forceinline__ void load(const u64* words, int warp_idx) {
        constexpr int kHeads = kBlockM / kGroupTokens;
        selected[0] = load_global(words + warp_idx * 16 / kHeads);
        selected[1] = kHeads > 8 ? selected[0] : load_global(words + warp_idx * 2 + 1);
        not_finite = load_global(words + kGroupTokens);
    }
    // A score becomes -inf if the token does not select the row, and NaN if it does and the row is not
    // finite.
    __device__ __forceinline__ void apply(float (&s)[32]) const {
        const int shift = 2 * (lane_index() % 4);
        auto has = [&](u64 words, int j) {
            const int bit = 8 * (j >> 2) + (j & 1);
            return static_cast<u32>(words >> (bit & 32)) >> shift >> bit % 32 & 1;
        };
        if (not_finite != 0) {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                if (has(not_finite, j)) s[j] = kNaN;
        }
#pragma unroll
        for (int j = 0; j < 32; ++j)
            if (!has(selected[j >> 1 & 1], j)) s[j] = -kInfinity;
    }
};

// ---- QK ---------------------------------------------------------------------------------------------------

// Stores the largest scores of the rows of a work tile. Shared memory has no room to hand them to the
// epilogue. This is a template because the Params of decoding have no such arrays.
template <class Params>
__device__ __forceinline__ void store_tops(const Params& params, const WorkTile& work,
                                           const RowMaximum& maximum, int warp_idx) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float top = maximum.of_row(r) * params.sm_scale_log2;
        const RowIndex row(params, warp_idx * 16 + lane_index() / 4 + 8 * r);
        if (!row.valid || lane_index() % 4 != 0) continue;
        if (work.split_idx >= 0) {
            params.max_accum_log2[split_row(params, work.split_idx, row)] = top;
        } else {
            params.max_logits[lse_index(params, work.req, row)] = top * lse_factor(params);
        }
    }
}

__device__ __forceinline__ void qk_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const u64 desc_q = Chunk::k_major(smem_address(smem.q));
    const u64 desc_q_step = descriptor_unswizzled(smem_address(smem.q_step), kQUnitBytes);
    const u64 desc_rope = Chunk::k_major(smem_address(smem.rope));
    const u32 smem_k = smem_address(smem.k);
    WorkTileReader reader;
    // The number of the block modulo 6, from which stages and parities of barriers follow. They are not kept,
    // because registers are scarce.
    u32 n = 0;
    u32 q[kQSteps][4];
    // Loads the last chunks of Q to shared memory and the staged ones to registers, after Q K^T of the work
    // tile before is complete in all warps
    auto load_q = [&](u32 in_stage, const WorkTileReader& owner) {
        const int lane_idx = lane_index();
        if (warp_idx == 0 && lane_idx == 0) {
            load_q_chunks<kQSharedChunks>(params, smem_address(smem.q), smem_address(&smem.bar_q_rest_full),
                                          owner.work(smem).req, D_QK / Chunk::kCols - kQSharedChunks);
        }
        __syncwarp();
        mbarrier_wait_parity(smem_address(&smem.bar_q_full), owner.count & 1);
        const u32 src =
            smem_k + in_stage * kStageBytes + Chunk::offset(warp_idx * 16 + lane_idx % 16, lane_idx / 16);
        auto place = [&](int step) { return (src ^ (step % 4 * 32)) + step / 4 * Chunk::kBytes; };
        if constexpr (kQSingleStep >= 0) {
            u32 single[4];
            ldmatrix_x4(single, place(kQSingleStep));
            const u32 dst = smem_address(smem.q_step) + lane_idx / 16 * kQUnitBytes +
                            (warp_idx * 16 + lane_idx % 16) * 16;
            stmatrix_x4(dst, single[0], single[1], single[2], single[3]);
            fence_proxy_async();
        }
#pragma unroll
        for (int step = 0; step < kQSteps; ++step) ldmatrix_x4(q[step], place(step));
        mbarrier_arrive(smem_address(&smem.bar_q_free));
    };
    griddepcontrol_wait();  // before Q is read
    if (reader.next(smem)) {
        if (warp_idx == 0 && lane_index() == 0) {
            load_q_chunks<kQStagedChunks>(params, smem_k + (kStages - 1) * kStageBytes,
                                          smem_address(&smem.bar_q_full), reader.work(smem).req, 0);
        }
        __syncwarp();
        load_q(kStages - 1, reader);
    }
    for (; reader.next(smem); reader.release(smem)) {
        mbarrier_wait_parity(smem_address(&smem.bar_q_rest_full), reader.count & 1);
        named_barrier_sync(NB_QK, 128);

        MaximumFirstSoftmax softmax;
        u32 p[16] = {};  // P of the previous block, packed as A fragments
        auto wait_p_free = [&]() {
            mbarrier_wait_parity(smem_address(&smem.bar_p_free), n & 1);  // P V of block n - 2 is complete
        };
        auto store_p = [&]() {
            const int lane_idx = lane_index();
            const u32 dst =
                smem_address(smem.p) + Chunk::offset(warp_idx * 16 + lane_idx % 16, lane_idx / 16);
            store_probabilities<Chunk::kBytes>(dst, p);
        };
        auto announce_p = [&]() {
            __syncwarp();
            if (leads_quad()) mbarrier_arrive(smem_address(&smem.bar_p_full));
        };
        bool p_pending = false;  // P of the previous block is still in registers
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left) {
            // S = Q K^T; the stores of P hide between the chunks
            const u32 stage = n % kStages, k_parity = n / kStages;
            u64* full = smem.bar_k_full[stage];
            const u64 desc_k = Chunk::k_major(smem_k + stage * kStageBytes);
            float s[32];
            wgmma_pin(s);
            if constexpr (kHasRope) {
                mbarrier_wait_parity(smem_address(&smem.bar_rope_full), n & 1);
                fence_proxy_async();  // the rows were copied by cp.async
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    wgmma_ss<kDtype>(s, desc_q + (kQSharedChunks - 1) * Chunk::kStepTile + k * Chunk::kStepK,
                                     desc_rope + k * Chunk::kStepK, k > 0);
                }
                wgmma_commit_group();
            }
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk) {
                if (chunk % 4 == 0) {
                    mbarrier_wait_parity(smem_address(full + chunk / 4), k_parity);
                    fence_proxy_async();
                }
                if (chunk == kVChunks - 1) wgmma_commit_group();
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const u64 b = desc_k + chunk * Chunk::kStepTile + k * Chunk::kStepK;
                    const int step = 4 * chunk + k;
                    if (step < kQSteps) {
                        wgmma_rs<kDtype>(s, q[min_int(step, kQSteps - 1)], b, kHasRope || step > 0);
                    } else if (step == kQSingleStep) {
                        wgmma_ss<kDtype>(s, desc_q_step, b, true);
                    } else {
                        const int first = kVChunks - kQSharedChunks + kHasRope;  // in smem.q
                        const u64 a = desc_q + (chunk - first) * Chunk::kStepTile + k * Chunk::kStepK;
                        wgmma_ss<kDtype>(s, a, b, true);
                    }
                }
                if (p_pending) {
                    if (chunk == 3) wait_p_free();
                    if (chunk == 4) store_p();
                    if (chunk == 5) fence_proxy_async();
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
            u32 valid_low = 0, valid_high = 0;
            BlockSelection selection;
            if constexpr (kGroupTokens > 1) {
                // The words were prefetched to L1 during the previous block, and the last wgmmas hide the
                // load.
                const u64* words = BlockSelection::words(params, reader.work(smem), left);
                selection.load(words, warp_idx);
                if (left > 1) prefetch_l1(words + 2 * kGroupTokens);
            } else {
                if (leads_quad()) {
                    const u32* valid = reinterpret_cast<const u32*>(smem.valid[stage]);
                    valid_low = valid[0];
                    valid_high = valid[1];
                }
                valid_low = quad_broadcast(valid_low);
                valid_high = quad_broadcast(valid_high);
            }
            wgmma_wait_group<0>();
            wgmma_pin(s);

            if (left == 1) {
                WorkTileReader after = reader;
                ++after.count;
                if (after.next(smem)) {
                    named_barrier_sync(NB_QK, 128);
                    load_q(next_stage(stage), after);
                }
            }
            if (kGroupTokens > 1) {
                selection.apply(s);
            } else if ((valid_low & valid_high) != 0xffffffff) {
                apply_mask(s, KeyBits(valid_low, valid_high));
            }

            u32 shrink[2];
            softmax.block<kDtype>(s, params.sm_scale_log2, p, shrink);
            if (leads_quad()) {
                unsigned char* row_shrink = first_row(smem.row_shrink[n % 2], warp_idx);
                row_shrink[0] = shrink[0];
                row_shrink[8] = shrink[1];
            }
            p_pending = true;
            n = n == 2 * kStages - 1 ? 0 : n + 1;
        }
        wait_p_free();
        store_p();
        fence_proxy_async();
        announce_p();

        if constexpr (kMaxLogits) store_tops(params, reader.work(smem), softmax.maximum, warp_idx);
        mbarrier_wait_parity(smem_address(&smem.bar_sum_free), ~reader.count & 1);
        softmax.store(smem.row_sum, smem.row_max, warp_idx);
        mbarrier_arrive(smem_address(&smem.bar_sum_full));
    }
}

// ---- PV ---------------------------------------------------------------------------------------------------

template <int kHalf>
__device__ __forceinline__ void pv_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const u64 desc_p = Chunk::k_major(smem_address(smem.p));
    const u32 smem_v = smem_address(smem.k) + kHalf * 4 * Chunk::kBytes;
    const bool publishes = kHalf == 1 && warp_idx == 0;
    if (publishes) start_publishing(params, smem);
    float o[128];
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    while (true) {
        if (publishes) publish_work<kDtype, RowIndex>(params, smem, reader.count + kWorkAhead);
        if (!reader.next(smem)) break;
#pragma unroll
        for (int j = 0; j < 128; ++j) o[j] = 0.0f;
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages;
            mbarrier_wait_parity(smem_address(&smem.bar_p_full), n & 1);
            fence_proxy_async();  // the rows were copied by cp.async
            u32 shrink0 = 0, shrink1 = 0;
            if (leads_quad()) {
                const unsigned char* row_shrink = first_row(smem.row_shrink[n % 2], warp_idx);
                shrink0 = row_shrink[0];
                shrink1 = row_shrink[8];
            }
            if (__any_sync(0xffffffff, (shrink0 | shrink1) != 0)) {
                const float scale0 = MaximumFirstSoftmax::shrink_factor(quad_broadcast(shrink0));
                const float scale1 = MaximumFirstSoftmax::shrink_factor(quad_broadcast(shrink1));
                multiply_rows(o, scale0, scale1);
            }
            const u64 desc_v = Chunk::mn_major(smem_v + stage * kStageBytes);
            wgmma_pin(o);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockTokens / 16; ++k) {
                const u64 a = desc_p + k * Chunk::kStepK, b = desc_v + k * Chunk::kStepMn;
                wgmma_ss<kDtype, Major::kK, Major::kMn>(wgmma_columns<0, 64>(o), a, b, true);
                wgmma_ss<kDtype, Major::kK, Major::kMn>(wgmma_columns<64, 64>(o), a, b + 2 * Chunk::kStepTile,
                                                        true);
                if (k == 1) wgmma_commit_group();
            }
            wgmma_commit_group();
            auto leave = [&](int slice) {
                __syncwarp();
                if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_k_free[stage][slice]));
            };
            wgmma_wait_group<1>();
            leave(0);
            wgmma_wait_group<0>();
            wgmma_pin(o);
            leave(1);
            if (leads_quad()) mbarrier_arrive(smem_address(&smem.bar_p_free));
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_full), reader.count & 1);
        store_rows<kDtype, RowIndex>(params, smem, reader.work(smem), o, warp_idx, kHalf);
        mbarrier_arrive(smem_address(&smem.bar_sum_free));
        reader.release(smem);
    }
}

// ---- Producer ---------------------------------------------------------------------------------------------

// Lanes i and i + 16 of a warp find row i of the warp.
struct FoundRow {
    __device__ __forceinline__ int block_row() const {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        return (thread - (kThreads - 32 * kProducerWarps)) / 32 * kWarpRows + thread % kWarpRows;
    }
    // The half of a stage that the rows of the warp are in. Like the row it is computed where it is needed,
    // because registers are scarce.
    __device__ __forceinline__ int slice() const { return warp_uniform(block_row() / (kBlockTokens / 2)); }
};

// Copies kCount chunks of the rows of the warp, from column `first_col` on; eight lanes share a row. `dst` is
// the first of these chunks in the tile.
template <int kCount>
__device__ __forceinline__ void copy_chunks(const Params& params, u32 dst, u64 found, int first_col) {
    const int lane_idx = lane_index();
    dst += Chunk::offset(FoundRow().block_row() / kWarpRows * kWarpRows + lane_idx / 8, lane_idx % 8);
#pragma unroll
    for (int i = 0; i < kWarpRows / 4; ++i) {  // row 4 i + lane / 8 of the warp
        const u64 address = __shfl_sync(0xffffffff, found, 4 * i + lane_idx / 8);
        const bool reads = address != 0;
        const unsigned char* src =
            (reads ? reinterpret_cast<const unsigned char*>(address) : params.cache[0]) + first_col * 2 +
            lane_idx % 8 * 16;
#pragma unroll
        for (int chunk = 0; chunk < kCount; ++chunk) {
            cp_async_16_or_zeros((dst ^ (i % 2 * 64)) + i * (4 * Chunk::kRowBytes) + chunk * Chunk::kBytes,
                                 src + chunk * Chunk::kRowBytes, reads);
        }
    }
}

__device__ __forceinline__ void producer_warp(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    griddepcontrol_wait();  // before indices are read
    griddepcontrol_launch_dependents();
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    u64 before = 0;
    u32 stage = 0, parity = 1;
    auto copy_rope = [&](u32 block, u64 found) {
        mbarrier_wait_parity(smem_address(&smem.bar_rope_free), ~block & 1);
        copy_chunks<1>(params, smem_address(smem.rope), found, kDimV);
        cp_async_mbarrier_arrive(smem_address(&smem.bar_rope_full));
    };
    for (; reader.next(smem); reader.release(smem)) {
        const WorkTile& work = reader.work(smem);
        if (reader.count > 0) {  // QK loads Q of the first work tile
#pragma unroll
            for (int slice = 0; slice < 2; ++slice)
                mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage][slice]), parity);
            if (warp_idx == 0 && lane_index() == 0) {
                fence_proxy_async();  // the stage held rows that cp.async wrote
                load_q_chunks<kQStagedChunks>(params, smem_address(smem.k[stage]),
                                              smem_address(&smem.bar_q_full), work.req, 0);
            }
            __syncwarp();
        }
        auto wait_q_free = [&]() { mbarrier_wait_parity(smem_address(&smem.bar_q_free), reader.count & 1); };
        Selection<FoundRow> selection;
        selection.start(params, work);
#pragma unroll 1
        for (int left = warp_uniform(work.num_blocks); left > 0; --left, ++n) {
            const u64 found = reinterpret_cast<u64>(row_address(params, selection));
            selection.advance(params, work);
            if constexpr (kHasRope) {
                // RoPE of block n - 1 is copied together with the rows of block n, when Q K^T(n - 2) has read
                // its RoPE. At the end of a work tile it is copied at once, because the next Q waits for the
                // last Q K^T
                if (n == 0) {
                    copy_rope(0, found);
                } else if (n > 1 && left < work.num_blocks) {
                    copy_rope(n - 1, before);
                }
                before = found;
            }
            const u32 valid = __ballot_sync(0xffffffff, found != 0);
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage][FoundRow().slice()]), parity);
            if (reader.count == 0 ? n == kStages - 1 : left == work.num_blocks) wait_q_free();
            if (lane_index() == 0) {
                smem.valid[stage][warp_idx] = valid;
                mbarrier_arrive(smem_address(&smem.bar_k_full[stage][0]));
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                copy_chunks<4>(params, smem_address(smem.k[stage]) + half * 4 * Chunk::kBytes, found,
                               half * (kDimV / 2));
                cp_async_mbarrier_arrive(smem_address(&smem.bar_k_full[stage][half]));
            }
            stage = next_stage(stage);
            if (stage == 0) parity ^= 1;
        }
        if (kHasRope && n > 1) copy_rope(n - 1, before);
        if (n < kStages && reader.count == 0) wait_q_free();  // it has only one or two blocks
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
            mbarrier_init(smem_address(&smem.bar_k_full[stage][0]), 32 * kProducerWarps + kProducerWarps);
            mbarrier_init(smem_address(&smem.bar_k_full[stage][1]), 32 * kProducerWarps);
#pragma unroll
            for (int slice = 0; slice < 2; ++slice)
                mbarrier_init(smem_address(&smem.bar_k_free[stage][slice]), 8);
        }
    } else if (thread == 64) {
        mbarrier_init(smem_address(&smem.bar_rope_full), 32 * kProducerWarps);
        mbarrier_init(smem_address(&smem.bar_rope_free), 4);
        mbarrier_init(smem_address(&smem.bar_p_full), 32);
        mbarrier_init(smem_address(&smem.bar_p_free), 64);
        mbarrier_init(smem_address(&smem.bar_q_full), 1);
        mbarrier_init(smem_address(&smem.bar_q_rest_full), 1);
        mbarrier_init(smem_address(&smem.bar_q_free), 128);
        mbarrier_init(smem_address(&smem.bar_sum_full), 128);
        mbarrier_init(smem_address(&smem.bar_sum_free), 256);
        mbarrier_init_fence();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_bf16(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    if (threadIdx.x == 96) tma_prefetch_descriptor(&params.q_map);
    if (threadIdx.x == 128) tma_prefetch_descriptor(&params.q_rope_map);
    init_barriers(smem);
    __syncthreads();

    if (wg_idx == 0) {
        setmaxnreg_inc<kRegistersQK>();
        qk_warpgroup(params, smem, warp_idx);
    } else if (wg_idx == 1) {
        setmaxnreg_inc<kRegistersPV>();
        pv_warpgroup<0>(params, smem, warp_idx);
    } else if (wg_idx == 2) {
        setmaxnreg_inc<kRegistersPV>();
        pv_warpgroup<1>(params, smem, warp_idx);
    } else {
        setmaxnreg_dec<kRegistersProducer>();
        producer_warp(params, smem, warp_idx);
    }
}
