// Gradients of multi-head attention: dK and dV of a tile of keys, and what it adds to dQ. With P and dS of a
// block of 64 query tokens, dV += P^T dO, dK += dS^T Q and dQ += dS K, where P = exp(S - lse), dS = P (dO V^T
// - delta). With FLEX, functions of the user's and lists of blocks. docs/kernels/mha_backward.md and
// flex_backward.md have the schedule; rawmla/kernels/mha_backward.py and, with FLEX, flex_backward.py choose
// the variant.
//
// Roles of a CTA, which owns kTileKeys keys of a KV head and walks the blocks of queries that see them, for
// all query heads of the group:
//   warpgroup 0, warp 0   copies K and V once, then Q, dO and the rows' lse, delta and weights
//   warpgroup 0, warp 1   adds dQ to global memory
//   warpgroup 0, warp 2   clears rows of K, Q and dO that are not the request's, or see no key
//   warpgroup 0, warp 3   waits for the tile's turn to add to dQ, and gives it to the next, in a fixed order
//   warpgroups 1, 2       consumers: S^T = K Q^T, dP^T = V dO^T, dV and dK in registers; dS to shared memory
//   warpgroup 3           dQ = dS K, but for kDqByConsumers
// S^T and dP^T have keys on their rows: P^T and dS^T are then A operands as they stand. Consumers have 64 of
// 128 keys each. With kDqByConsumers they have the registers of warpgroup 3, and each computes half of the
// columns of dQ. Where dK and dV leave them no registers (kByProduct) they share 64: consumer 0 has S, P and
// dV, consumer 1 dP, dS and dK. Gradients that nobody needs have no products; roles that are left without one
// return at once.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/swizzled_tile.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "mha/key_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#if FLEX
#include "mha/query_lists.cuh"
#endif

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimQK = D_QK, kDimV = D_V;
constexpr bool kSoftcap = SOFTCAP, kAlibi = ALIBI, kWeights = WEIGHTS;
constexpr bool kFlex = FLEX;
constexpr bool kNeedsDq = NEEDS_DQ, kNeedsDk = NEEDS_DK, kNeedsDv = NEEDS_DV, kNeedsDs = kNeedsDq || kNeedsDk;
static_assert(kNeedsDs || kNeedsDv);
// Whether dS has another factor than P.
#if FLEX
constexpr bool kTwoFactors = !ScoreMod::kDerivativeIsOne;
#else
constexpr bool kTwoFactors = kSoftcap || kWeights;
#endif
constexpr int kConsumers = 2;
constexpr bool kByProduct = BY_PRODUCT, kDqByConsumers = DQ_BY_CONSUMERS;
static_assert(!(kByProduct && kDqByConsumers) && !(kDqByConsumers && kTwoFactors));
constexpr int kTileKeys = kByProduct ? 64 : 64 * kConsumers;
constexpr int kStages = 2, kDsStages = kByProduct || kDqByConsumers ? 1 : 2;
constexpr int kChunksQK = ceil_div(kDimQK, 64), kChunksV = ceil_div(kDimV, 64);
constexpr int kWarpgroups = kConsumers + (kDqByConsumers ? 1 : 2), kThreads = 128 * kWarpgroups;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
// Whether consumers share products, and factors of dS go from one to the other. For dV alone there is one.
constexpr bool kHandsFactors = kByProduct && kNeedsDs;
// Threads that read lse, delta and weights: consumers, and the warp that clears rows by lse.
constexpr int kReadingConsumers = kByProduct && !kNeedsDs ? 1 : kConsumers;
#if FLEX
constexpr int kReaders = 128 * kReadingConsumers + (kTrims ? 32 : 0);
#else
constexpr int kReaders = 128 * kReadingConsumers;
#endif
// Named barriers: of the warpgroup of dQ; of the consumers, one each.
constexpr int NB_DQ = 1, NB_KEYS = 2;
#if !FLEX
// Whether consumers ask which block comes next while its scores are computed, where ptxas, as NVRTC 12.6 to
// 13.5 have it, finds registers to know it.
constexpr bool kLooksAhead = !kByProduct && !kDqByConsumers && !(kSoftcap && kDtype == Dtype::kBf16);
#endif
// With ALiBi consumer 0 of kByProduct, which has the scores, needs what the others can spare.
constexpr bool kScoresNeedMore = kByProduct && kAlibi;
constexpr int kRegisters = kDqByConsumers ? 240 : 208, kReducerRegisters = kDqByConsumers ? 0 : 64;
constexpr int kProducerRegisters = kScoresNeedMore || kDqByConsumers ? 24 : 32;
constexpr int kScoreRegisters = kScoresNeedMore ? 216 : kRegisters;
static_assert(kScoreRegisters + kRegisters + kReducerRegisters + kProducerRegisters <=
                  65536 / kThreads / 8 * 8 * kWarpgroups,
              "setmaxnreg would wait for ever: a CTA shares what its threads have at launch");

using KeyRows = SwizzledTile<kTileKeys>;     // of K and V
using BlockRows = SwizzledTile<kBlockRows>;  // of Q, dO and dS
// dQ of a block goes to global memory in parts: chunks of 64 columns, or the halves of the two consumers.
// Each part always has the same place here.
constexpr int kDqParts = kDqByConsumers ? kConsumers : kChunksQK, kPlaces = DQ_PLACES;
constexpr int kColumnBytes = kBlockRows * 4, kPartBytes = kChunksQK * 64 / kDqParts * kColumnBytes;
constexpr u32 kUses = kDqParts / kPlaces;  // of a place in a block
static_assert(kDqParts % kPlaces == 0 && !(kDqByConsumers && kUses > 1));

struct SharedMemoryPlan {
    unsigned char k[kChunksQK * KeyRows::kBytes];
    unsigned char v[kChunksV * KeyRows::kBytes];
    unsigned char q[kStages][kChunksQK * BlockRows::kBytes];
    unsigned char dout[kStages][kChunksV * BlockRows::kBytes];
    unsigned char ds[kDsStages][kTileKeys / 64 * BlockRows::kBytes];  // [query][64 keys]
    unsigned char dq[kPlaces][kPartBytes];                            // as the accumulators of 128 threads
    uint4 factors[kByProduct ? 4 * 128 : 1];                          // of dS, from one consumer to the other
    float lse[kStages][kBlockRows], delta[kStages][kBlockRows];
#if FLEX
    float references[kStages][kBlockRows];
#else
    float weights[kStages][kBlockRows];
#endif
    KeyTile tile;
#if FLEX
    QueryStep told[kToldSteps];
    int trimmed[kStages];  // whether the block has rows that see no key, or that have references
#else
    int told_block[kStages], told_member[kStages];  // which stages have, for consumers
#endif
    u64 bar_kv, bar_kv_landed;
    u64 bar_q_landed[kStages], bar_dout_landed[kStages];  // that are to be trimmed
    u64 bar_q_full[kStages];                              // with lse, and weights or references
    u64 bar_dout_full[kStages];                           // with delta
    u64 bar_free[kStages];                                // all of these
#if FLEX
    u64 bar_told[kToldSteps];
#endif
    u64 bar_ds_full[kDsStages], bar_ds_free[kDsStages];
    u64 bar_dq_full[kPlaces], bar_dq_free[kPlaces];
    // Of every second block. From keep_turns to add_dq: its turn has come; and back: what was added to it has
    // arrived.
    u64 bar_turn[2], bar_added[2];
    u64 bar_factors_full, bar_factors_free;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    mbarrier_init(smem_address(&smem.bar_kv), 1);
    mbarrier_init(smem_address(&smem.bar_kv_landed), 1);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(smem_address(&smem.bar_q_landed[i]), 1);
        mbarrier_init(smem_address(&smem.bar_dout_landed[i]), 1);
        mbarrier_init(smem_address(&smem.bar_q_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_dout_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_free[i]), kReaders);
    }
#pragma unroll
    for (int i = 0; i < kDsStages; ++i) {
        mbarrier_init(smem_address(&smem.bar_ds_full[i]), 2 * kTileKeys);
        mbarrier_init(smem_address(&smem.bar_ds_free[i]), kDqByConsumers ? 128 * kConsumers : 1);
    }
#if FLEX
#pragma unroll
    for (int i = 0; i < kToldSteps; ++i) mbarrier_init(smem_address(&smem.bar_told[i]), 1);
#endif
    mbarrier_init(smem_address(&smem.bar_factors_full), 128);
    mbarrier_init(smem_address(&smem.bar_factors_free), 128);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
        mbarrier_init(smem_address(&smem.bar_dq_full[i]), 128);
        mbarrier_init(smem_address(&smem.bar_dq_free[i]), 1);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        mbarrier_init(smem_address(&smem.bar_turn[i]), 1);
        mbarrier_init(smem_address(&smem.bar_added[i]), 1);
    }
    mbarrier_init_fence();
}

// A block of queries as all roles count them; Q and dO have kStages stages, dS may have fewer.
struct Step {
    u32 number = 0;

    __device__ __forceinline__ Step before() const { return {number - 1}; }

    template <int kCount = kStages>
    __device__ __forceinline__ u32 stage() const {
        return number % kCount;
    }
    template <int kCount = kStages>
    __device__ __forceinline__ u32 parity() const {
        return number / kCount & 1;
    }
    template <int kCount = kStages>
    __device__ __forceinline__ u32 free_parity() const {
        return parity<kCount>() ^ 1;
    }
};

#if FLEX
__device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    load_listed<KeyRows, BlockRows, true, kNeedsDq>(params, smem, tile);
}
__device__ __forceinline__ void trim(const Params&, SharedMemoryPlan& smem, const KeyTile&) {
    if constexpr (kTrims) trim_listed<BlockRows>(smem);
}
#else
// Whether rows of K are to be cleared: those behind the request's, and those that no query sees.
__device__ __forceinline__ bool trims_keys(const KeyTile& tile) {
    return tile.first_key < tile.first_seen_key || tile.first_key + kTileKeys > tile.k_len;
}

// Clears all but rows `first` to `end - 1` of tiles side by side. A warp.
template <class Tiles>
__device__ __forceinline__ void clear_rows(unsigned char* tiles, int chunks, int first, int end) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
        uint4* units = reinterpret_cast<uint4*>(tiles + chunk * Tiles::kBytes);
        for (int i = lane_index(); i < 8 * first; i += 32) units[i] = make_uint4(0, 0, 0, 0);
        for (int i = 8 * end + lane_index(); i < 8 * Tiles::kRows; i += 32) units[i] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    __syncwarp();
}

// The warp that trims.
__device__ __forceinline__ void trim(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    if (trims_keys(tile)) {
        mbarrier_wait_parity(smem_address(&smem.bar_kv_landed), 0);
        clear_rows<KeyRows>(smem.k, kChunksQK, max_int(tile.first_seen_key - tile.first_key, 0),
                            min_int(tile.k_len - tile.first_key, kTileKeys));
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_kv));
    }
    Step step;
    u32 landed = 0;  // parities of the stages
    for (BlockWalk walk(params, tile); walk.is_there(); walk.advance(), ++step.number) {
        const int block = walk.block;
        if (!tile.trims(block)) continue;
        const u32 stage = step.stage(), parity = landed >> stage & 1;
        landed ^= 1 << stage;
        mbarrier_wait_parity(smem_address(&smem.bar_q_landed[stage]), parity);
        clear_rows<BlockRows>(smem.q[stage], kChunksQK, tile.first_row(block), tile.end_row(block));
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_q_full[stage]));
        mbarrier_wait_parity(smem_address(&smem.bar_dout_landed[stage]), parity);
        clear_rows<BlockRows>(smem.dout[stage], kChunksV, tile.first_row(block), tile.end_row(block));
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_dout_full[stage]));
    }
}

// One thread.
__device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    const int batch_k = params.cu_seqlens_k == nullptr ? tile.request : 0;
    const int batch_q = params.cu_seqlens_q == nullptr ? tile.request : 0;
    const u32 kv = smem_address(trims_keys(tile) ? &smem.bar_kv_landed : &smem.bar_kv);
    mbarrier_arrive_expect_tx(kv, sizeof(smem.k) + sizeof(smem.v));
#pragma unroll
    for (int chunk = 0; chunk < kChunksQK; ++chunk)
        tma_load_4d(smem_address(smem.k) + chunk * KeyRows::kBytes, &params.k_map, kv, 64 * chunk,
                    tile.k_begin + tile.first_key, tile.kv_head, batch_k);
#pragma unroll
    for (int chunk = 0; chunk < kChunksV; ++chunk)
        tma_load_4d(smem_address(smem.v) + chunk * KeyRows::kBytes, &params.v_map, kv, 64 * chunk,
                    tile.k_begin + tile.first_key, tile.kv_head, batch_k);
    Step step;
    for (BlockWalk walk(params, tile); walk.is_there(); walk.advance(), ++step.number) {
        const int block = walk.block, head = tile.kv_head * params.group + walk.member;
        const u32 stage = step.stage();
        const int token = tile.q_begin + block * kBlockRows;
        const i64 row = (head * params.blocks + tile.first_row_block + block) * kBlockRows;
        const bool trims = tile.trims(block);
        const u32 q_full = smem_address((trims ? smem.bar_q_landed : smem.bar_q_full) + stage);
        mbarrier_wait_parity(smem_address(&smem.bar_free[stage]), step.free_parity());
        smem.told_block[stage] = block, smem.told_member[stage] = walk.member;
        mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + (kWeights ? 2 : 1) * sizeof(smem.lse[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk)
            tma_load_4d(smem_address(smem.q[stage]) + chunk * BlockRows::kBytes, &params.q_map, q_full,
                        64 * chunk, token, head, batch_q);
        bulk_load(smem_address(smem.lse[stage]), params.lse + row, sizeof(smem.lse[0]), q_full);
        if constexpr (kWeights)
            bulk_load(smem_address(smem.weights[stage]), params.weights + row, sizeof(smem.weights[0]),
                      q_full);
        const u32 dout_full = smem_address((trims ? smem.bar_dout_landed : smem.bar_dout_full) + stage);
        mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]) + sizeof(smem.delta[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; ++chunk)
            tma_load_4d(smem_address(smem.dout[stage]) + chunk * BlockRows::kBytes, &params.dout_map,
                        dout_full, 64 * chunk, token, head, batch_q);
        bulk_load(smem_address(smem.delta[stage]), params.delta + row, sizeof(smem.delta[0]), dout_full);
    }
}

// Tiles that add to a block of dQ before this one: those of keys before it that see the block. They have been
// given out before, so nobody waits for a CTA that has not begun.
__device__ __forceinline__ int turn_of(const Params& params, const KeyTile& tile, int block) {
    const int first_seen = max_int(block * kBlockRows + tile.offset - params.window_left, 0);
    return tile.first_key / kTileKeys - first_seen / kTileKeys;
}
#endif

// The blocks of dQ that the tile adds to.
#if FLEX
struct AddedBlocks {
    const Params& params;
    SharedMemoryPlan& smem;
    const KeyTile& tile;
    u32 number = 0;
    QueryStep step;

    __device__ __forceinline__ AddedBlocks(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile)
        : params(params), smem(smem), tile(tile) {
        find();
    }
    __device__ __forceinline__ bool is_there() const { return !step.is_end(); }
    __device__ __forceinline__ void advance() {
        ++number;
        find();
    }
    __device__ __forceinline__ int place() const { return static_cast<int>(step.place(params)); }
    __device__ __forceinline__ int turn() const { return turn_of<kTileKeys>(params, tile, step); }

  private:
    // Steps are told before anyone computes them: nobody waits here for long.
    __device__ __forceinline__ void find() {
        mbarrier_wait_parity(smem_address(&smem.bar_told[number % kToldSteps]), number / kToldSteps & 1);
        step = smem.told[number % kToldSteps];
    }
};
#else
struct AddedBlocks : BlockWalk {
    __device__ __forceinline__ AddedBlocks(const Params& params, SharedMemoryPlan&, const KeyTile& tile)
        : BlockWalk(params, tile) {}
    __device__ __forceinline__ int place() const {
        return (tile.kv_head * params.group + member) * static_cast<int>(params.blocks) +
               tile.first_row_block + block;
    }
    __device__ __forceinline__ int turn() const { return turn_of(params, tile, block); }
};
#endif

// One thread. In turns it tells keep_turns when what it added to a block has arrived: while it would wait, or
// behind the first part of the next block.
__device__ __forceinline__ void add_dq(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    const bool in_turns = params.turns != nullptr;
    Step step;
    const auto arrived = [&] {  // what was added to the block before
        mbarrier_arrive(smem_address(&smem.bar_added[step.before().stage<2>()]));
    };
#pragma unroll 1
    for (AddedBlocks walk(params, smem, tile); walk.is_there(); walk.advance(), ++step.number) {
        const i64 block = walk.place();
        bool is_owed = in_turns && step.number > 0;
        if (in_turns) {
            const u32 turn = smem_address(&smem.bar_turn[step.stage<2>()]);
            if (is_owed &&
                !(mbarrier_has_completed(turn, step.parity<2>()) &&
                  mbarrier_has_completed(smem_address(&smem.bar_dq_full[0]), step.number * kUses & 1))) {
                bulk_wait_group<0>();
                arrived();
                is_owed = false;
            }
            mbarrier_wait_parity(turn, step.parity<2>());
        }
#pragma unroll
        for (int part = 0; part < kDqParts; ++part) {
            const int at = part % kPlaces;
            mbarrier_wait_parity(smem_address(&smem.bar_dq_full[at]),
                                 step.number * kUses + part / kPlaces & 1);
            bulk_reduce_add_f32(params.dq_accum + (block * kDqParts + part) * (kPartBytes / 4),
                                smem_address(smem.dq[at]), kPartBytes);
            bulk_commit_group();
            bulk_wait_group_read<0>();
            mbarrier_arrive(smem_address(&smem.bar_dq_free[at]));
            if (part == 0 && is_owed) {
                bulk_wait_group<1>();
                arrived();
            }
        }
    }
    bulk_wait_group<0>();
    if (in_turns && step.number > 0) arrived();
}

// One thread, where tiles take turns at a block of dQ, whose counter says how many have added. It asks for
// the turn at the next block while the last one is added to, and gives that one to the next tile when what
// was added has arrived. The thread that adds may be a block behind it.
__device__ __forceinline__ void keep_turns(const Params& params, SharedMemoryPlan& smem,
                                           const KeyTile& tile) {
    if (params.turns == nullptr) return;
    Step step;
    int held = -1;  // the block before, where the turn is to be given, or -1
    const auto give = [&] {
        fence_proxy_async_global();
        add_release(params.turns + held, 1);
        held = -1;
    };
    const auto added = [&] { return smem_address(&smem.bar_added[step.before().stage<2>()]); };
#pragma unroll 1
    for (AddedBlocks walk(params, smem, tile); walk.is_there(); walk.advance(), ++step.number) {
        const int block = walk.place(), turn = walk.turn();
        // More may have added than turns count: a list may name a block twice.
        while (load_acquire(params.turns + block) < turn)
            if (held >= 0 && mbarrier_has_completed(added(), step.before().parity<2>())) give();
        fence_proxy_async_global();
        mbarrier_arrive(smem_address(&smem.bar_turn[step.stage<2>()]));
        if (held >= 0) {
            mbarrier_wait_parity(added(), step.before().parity<2>());
            give();
        }
        held = block;
    }
    if (held < 0) return;
    mbarrier_wait_parity(added(), step.before().parity<2>());
    give();
}

// Columns of dQ = dS K: dS of all keys of the tile, and K from the columns on that are wanted.
template <int kCount>
__device__ __forceinline__ void issue_ds_k(float (&dq)[kCount], u64 desc_ds, u64 desc_k) {
    wgmma_pin(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k)
        wgmma_ss<kDtype, Major::kK, Major::kMn>(
            dq, desc_ds + k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK,
            desc_k + k * KeyRows::kStepMn, k > 0);
    wgmma_commit_group();
}

// The warpgroup of dQ.
__device__ __forceinline__ void multiply_dq(const Params& params, SharedMemoryPlan& smem,
                                            const KeyTile& tile) {
    Step step;
    mbarrier_wait_parity(smem_address(&smem.bar_kv), 0);
#if FLEX
#pragma unroll 1
    for (;; ++step.number) {
#else
    const int blocks = tile.blocks() * params.group;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i, ++step.number) {
#endif
        const u32 stage = step.stage<kDsStages>();
        mbarrier_wait_parity(smem_address(&smem.bar_ds_full[stage]), step.parity<kDsStages>());
#if FLEX
        if (smem.told[step.number % kToldSteps].is_end()) break;
#endif
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk) {
            const int at = chunk % kPlaces;
            float dq[32];
            const u64 desc_ds = BlockRows::k_major(smem_address(smem.ds[stage]));
            const u64 desc_k = KeyRows::mn_major(smem_address(smem.k) + chunk * KeyRows::kBytes);
            issue_ds_k(dq, desc_ds, desc_k);
            wgmma_wait_group<0>();
            wgmma_pin(dq);
            if (chunk == kChunksQK - 1) {
                named_barrier_sync(NB_DQ, 128);  // all warps have read dS
                if (threadIdx.x % 128 == 0) mbarrier_arrive(smem_address(&smem.bar_ds_free[stage]));
            }
            mbarrier_wait_parity(smem_address(&smem.bar_dq_free[at]),
                                 step.number * kUses + chunk / kPlaces & 1 ^ 1);
            float4* dst = reinterpret_cast<float4*>(smem.dq[at]) + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                dst[128 * j] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
            fence_proxy_async();
            mbarrier_arrive(smem_address(&smem.bar_dq_full[at]));
        }
    }
}

struct Consumer {
    const Params& params;
    SharedMemoryPlan& smem;
    const KeyTile& tile;
    const int wg, warp_idx;
    Step step;
    // Of the block `step`, without FLEX.
    int found = 0;  // its number; inverted where some key is not seen by some query
    float slope = 0.0f;

    using Scores = float[kBlockRows / 2];
    using Packed = u32[kBlockRows / 4];
    // What nobody needs takes a register.
    using Dk = float[kNeedsDk ? kDimQK / 2 : 1];
    using Dv = float[kNeedsDv ? kDimV / 2 : 1];

    // 64 keys of the tile: S^T, P^T, dP^T, dS^T, dV and dK.
    __device__ __forceinline__ void run() {
        Dk dk;
        Dv dv;
        clear(dk);
        clear(dv);
        if (begins(true)) {
            Scores s;
            issue_scores(s);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            for_each_block([&](bool masked, float slope, int block, bool has_next) -> bool {
#if !FLEX
                if constexpr (kDqByConsumers) {
                    take_block_with_dq(slope, block, has_next, s, dk, dv);
                    return has_next;
                }
#endif
                if (masked) {
                    return take_block<true>(slope, block, has_next, s, dk, dv);
                }
                return take_block<false>(slope, block, has_next, s, dk, dv);
            });
        }
        if constexpr (kFlex && kNeedsDq) hand_over_end();
        store_dk(dk);
        store_dv(dv);
    }
    // kByProduct, or where dV alone is needed: S^T, P^T and dV.
    __device__ __forceinline__ void run_scores() {
        Dv dv;
        clear(dv);
        if (begins(true)) {
            Scores s;
            issue_scores(s);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            for_each_block([&](bool masked, float slope, int block, bool has_next) -> bool {
                if (masked) {
                    return take_scores<true>(slope, block, has_next, s, dv);
                }
                return take_scores<false>(slope, block, has_next, s, dv);
            });
        }
        store_dv(dv);
    }
    // kByProduct: dP^T, dS^T and dK.
    __device__ __forceinline__ void run_gradients() {
        Dk dk;
        clear(dk);
        if (begins(false)) {
            Scores s;
            issue_dp(s);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            for_each_block([&](bool masked, float, int block, bool has_next) -> bool {
                if (masked && !kFlex) {  // it asks for zeros, not for masks
                    return take_gradients<true>(block, has_next, s, dk);
                }
                return take_gradients<false>(block, has_next, s, dk);
            });
        }
        if constexpr (kFlex && kNeedsDq) hand_over_end();
        store_dk(dk);
    }

  private:
    // The consumer's first row of K and V.
    __device__ __forceinline__ int first_row() const { return kByProduct ? 0 : 64 * wg; }

    // Waits for K and V; whether there is a block. `with_scores`: the consumer has S^T.
    __device__ __forceinline__ bool begins(bool with_scores) const {
        if (!kFlex && tile.blocks() == 0) return false;
        mbarrier_wait_parity(smem_address(&smem.bar_kv), 0);
#if FLEX
        if (MaskMod::kIsThere && with_scores)
            clear_keys_not_finite<kDtype, KeyRows>(smem.k, first_row(), NB_KEYS + wg);
#endif
        return follows(true);
    }
    // Whether there is a block `step`.
    __device__ __forceinline__ bool follows([[maybe_unused]] bool has_next) const {
#if FLEX
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[step.stage()]), step.parity());
        return !told().is_end();
#else
        return has_next;
#endif
    }
#if FLEX
    // Whether rows of a block may have references: only a score function makes them, and a block with such a
    // row counts as masked.
    template <bool kMasked>
    __device__ __forceinline__ static constexpr bool has_references() {
        return kMasked && ScoreMod::kIsThere;
    }
    // What the copying thread wrote about the block `step`. `follows` has waited for it.
    __device__ __forceinline__ const QueryStep& told() const { return smem.told[step.number % kToldSteps]; }

    template <class Take>
    __device__ __forceinline__ void for_each_block(Take take) {
        const bool is_cut = tile.first_key + kTileKeys > tile.k_len;
        bool masked;
        do {
            masked = is_cut;
            if constexpr (kTrims) masked |= smem.trimmed[step.stage()] != 0;
            if constexpr (MaskMod::kIsThere) masked |= told().partial != 0;
        } while (take(warp_uniform(masked) != 0, 0.0f, 0, true));
    }

    // The functions of the call, at the thread's keys and the queries of a block. kMasked: some query may not
    // see some key.
    template <bool kMasked>
    struct Mask {
        const Consumer& self;
        int b, h, first_query, partial;
        int keys[2];

        __device__ __forceinline__ Mask(const Consumer& self, int) : self(self) {
            const QueryStep& step = self.told();
            b = step.request;
            h = step.head;
            partial = step.partial;
            first_query = step.block * kBlockRows + first_column();
#pragma unroll
            for (int r = 0; r < 2; ++r) keys[r] = self.key_of(r);
        }
        // Accumulator i, of a row with this lse in base 2 and this reference: P, and the derivative of the
        // score function.
        __device__ __forceinline__ ValueAndDerivative exponential(int i, float s, float lse,
                                                                  float reference) const {
            const Params& params = self.params;
            const int q_len = params.seqlen_q, kv_len = params.seqlen_k, key = keys[(i >> 1) & 1];
            int q_idx = first_query + 8 * (i >> 2) + (i & 1), kv_idx = key;
            if constexpr (kMasked) q_idx = min_int(q_idx, q_len - 1), kv_idx = min_int(key, kv_len - 1);
            ValueAndDerivative score = {s, 1.0f};
            if constexpr (ScoreMod::kIsThere)
                score = params.score_mod.value_and_derivative(s * params.score_scale, b, h, q_idx, kv_idx,
                                                              q_len, kv_len);
            const float above = has_references<kMasked>() ? __fsub_rn(score.value, reference) : score.value;
            float e = exp2_approx(fmaf(above, params.softmax_scale_log2, -lse));
            if constexpr (kMasked) {
                bool seen = key < kv_len && lse != kInfinity;
                if constexpr (MaskMod::kIsThere)
                    seen &= !partial | params.mask_mod(b, h, q_idx, kv_idx, q_len, kv_len);
                e = seen ? e : 0.0f;
            }
            return {e, score.derivative};
        }
    };
#else
    // take(whether some key is not seen by some query, slope, block, whether another block follows), which
    // gives the last again
    template <class Take>
    __device__ __forceinline__ void for_each_block(Take take) {
#pragma unroll 1
        for (int left = warp_uniform(tile.blocks()) * params.group; left > 0; --left) {
            if constexpr (!kLooksAhead) find_block();
            const bool hides = found < 0;
            take(hides, slope, hides ? ~found : found, left > 1);
        }
    }
    // What is told of the block `step`.
    __device__ __forceinline__ void find_block() {
        const u32 stage = step.stage();
        if constexpr (kByProduct) mbarrier_wait_parity(smem_address(&smem.bar_q_full[stage]), step.parity());
        // So ptxas, as NVRTC 12.6 to 13.5 have it, finds registers for every variant.
        const int told = smem.told_block[stage], block = kDqByConsumers ? told : warp_uniform(told);
        found = hides_any(block) ? ~block : block;
        if constexpr (kAlibi) {
            const i64 row = static_cast<i64>(tile.request) * params.alibi_stride_b;
            const int head = tile.kv_head * params.group + smem.told_member[stage];
            slope = __shfl_sync(0xffffffff, params.alibi_slopes[row + head] * kLog2E, 0);
        }
    }
    // Whether some key of the warpgroup is not seen by some query of the block.
    __device__ __forceinline__ bool hides_any(int block) const {
        const int first_key = tile.first_key + first_row(), last_key = first_key + 63;
        const int first_seen_by = block * kBlockRows + tile.offset;  // its first query stands at this key
        return last_key > first_seen_by + params.window_right || last_key >= tile.k_len ||
               first_key < first_seen_by + kBlockRows - 1 - params.window_left;
    }

    // Which accumulators of a block are of a query that does not see the key.
    template <bool kMasked>
    struct Mask {
        int begin[2];  // the first queries that see the thread's two keys, counted from its first column
        u32 seen;      // how many see each

        __device__ __forceinline__ Mask(const Consumer& self, int block) {
            if constexpr (kMasked) {
                const KeyTile& tile = self.tile;
                const int first = block * kBlockRows + first_column(), right = self.params.window_right;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int key = self.key_of(r);
                    begin[r] = key < tile.k_len ? key - tile.offset - right - first : 0x7fffffff;
                }
                seen = static_cast<u32>(self.params.window_left) + static_cast<u32>(right) + 1;
            }
        }
        __device__ __forceinline__ bool hides(int i) const {
            if constexpr (!kMasked) return false;
            return static_cast<u32>(8 * (i >> 2) + (i & 1) - begin[(i >> 1) & 1]) >= seen;
        }
    };
#endif

    template <bool kMasked>
    __device__ __forceinline__ bool take_block(float slope, int block, bool has_next, Scores& s, Dk& dk,
                                               Dv& dv) {
        const u32 stage = step.stage();
        const Mask<kMasked> mask(*this, block);
        Packed p;  // P^T, the factors of dS^T, dS^T
        exponents(mask, slope, block, s, p);
        if constexpr (kTwoFactors) {
            // The factors take the place of P, and dP^T that of their accumulators.
            multiply_dv(dv, p);
            wgmma_wait_group<0>();
            wgmma_pin(dv);
            pack(s, p);
            issue_dp(s);
        } else {
            issue_dp(s);  // while the last exponentials are computed
            multiply_dv(dv, p);
        }
        wgmma_wait_group<0>();
        wgmma_pin(s);
        wgmma_pin(dv);
        // Kept meanwhile, the mask would cost a register.
        gradients(kSoftcap ? Mask<kMasked>(*this, block) : mask, s, p);
        if constexpr (kNeedsDq) {
            wait_for_ds();
            hand_over(p);
        }
        multiply_dk(dk, p);
        return next_product<kNeedsDk>(stage, has_next, s, dk, [&] { issue_scores(s); });
    }

#if !FLEX
    // kDqByConsumers. P^T takes the consumer's place of dS in shared memory until dV is done: with A operands
    // in registers ptxas finds too few in some variants (C7511). Masks change P and dS where they are packed,
    // behind a branch, across which ptxas moves no exponentials: that would cost registers.
    __device__ __forceinline__ void take_block_with_dq(float slope, int block, bool has_next, Scores& s,
                                                       Dk& dk, Dv& dv) {
        const u32 stage = step.stage();
        const Mask<false> none(*this, block);
        Packed p;  // as in take_block
        exponents(none, slope, block, s, p);
        hide(p);
        wait_for_ds();
        if constexpr (kNeedsDv) {
            store_ds(p, 0);
            fence_proxy_async();
            named_barrier_sync(NB_KEYS + wg, 128);
        }
        mbarrier_wait_parity(smem_address(&smem.bar_dout_full[stage]), step.parity());
        if constexpr (kNeedsDv) multiply_shared(dv, smem.dout[stage]);
        issue_product<kDimV>(s, smem.v, smem.dout[stage]);
        wgmma_wait_group<0>();
        wgmma_pin(s);
        wgmma_pin(dv);
        gradients(none, s, p);
        hide(p);
        if constexpr (kNeedsDv) named_barrier_sync(NB_KEYS + wg, 128);
        hand_over(p);
        if constexpr (kNeedsDq) {
            multiply_dq_and_dk(s, dk);
        } else if constexpr (kNeedsDk) {
            multiply_shared(dk, smem.q[stage]);
            wgmma_wait_group<0>();
            wgmma_pin(dk);
        }
        ++step.number;
        release(stage);
        if (has_next) issue_scores(s);
        wgmma_wait_group<0>();
        wgmma_pin(s);
    }
    // Clears what is of queries that do not see the key. It asks again which block this is, so that no
    // register keeps it meanwhile.
    __device__ __forceinline__ void hide(Packed& p) const {
        const int block = warp_uniform(smem.told_block[step.stage()]);
        if (!hides_any(block)) return;
        const Mask<true> mask(*this, block);
#pragma unroll
        for (int i = 0; i < kBlockRows / 2; ++i)
            if (mask.hides(i)) p[i / 2] &= i % 2 == 0 ? 0xffff0000 : 0x0000ffff;
    }
    // The consumer's half of the columns of dQ, 64 or 32 at a time in the registers of S^T, and dK beside the
    // last of them.
    __device__ __forceinline__ void multiply_dq_and_dk(Scores& s, Dk& dk) const {
        constexpr int kWhole = kChunksQK / 2, kPasses = ceil_div(kChunksQK, 2);
        mbarrier_wait_parity(smem_address(&smem.bar_ds_full[0]), step.parity<1>());
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int whole = 64 * (pass + wg * (kChunksQK - kWhole));
            const int half = wg == 0 ? 64 * kWhole : 32 * kChunksQK;
            if (pass < kWhole) {
                issue_dq(s, whole);
            } else {
                issue_dq(wgmma_columns<0, 16>(s), half);
            }
            if constexpr (kNeedsDk) {
                if (pass == kPasses - 1) multiply_shared(dk, smem.q[step.stage()]);
            }
            wgmma_wait_group<0>();
            if (pass == kPasses - 1) wgmma_pin(dk);
            wgmma_pin(s);
            if (pass == kPasses - 1) mbarrier_arrive(smem_address(&smem.bar_ds_free[0]));
            if (pass == 0) mbarrier_wait_parity(smem_address(&smem.bar_dq_free[wg]), step.free_parity<1>());
            if (pass < kWhole) {
                store_dq(s, whole);
            } else {
                store_dq(wgmma_columns<0, 16>(s), half);
            }
        }
        fence_proxy_async();
        mbarrier_arrive(smem_address(&smem.bar_dq_full[wg]));
    }
    // d += A B, with A, P^T or dS^T, where the consumer stored it.
    template <int kCount>
    __device__ __forceinline__ void multiply_shared(float (&d)[kCount], const unsigned char* b) const {
        u64 desc_ds = BlockRows::mn_major(smem_address(smem.ds[0]) + wg * BlockRows::kBytes);
        asm volatile("" : "+l"(desc_ds));
        const u64 desc_q = BlockRows::mn_major(smem_address(b));
        wgmma_pin(d);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockRows / 16; ++k)
            wgmma_ss<kDtype, Major::kMn, Major::kMn>(d, desc_ds + k * BlockRows::kStepMn,
                                                     desc_q + k * BlockRows::kStepMn, true);
        wgmma_commit_group();
    }
    // dQ of columns `first` and behind.
    template <int kCount>
    __device__ __forceinline__ void issue_dq(float (&dq)[kCount], int first) const {
        u64 desc_ds = BlockRows::k_major(smem_address(smem.ds[0]));
        u64 desc_k = KeyRows::mn_major(smem_address(smem.k) + first / 64 * KeyRows::kBytes + first % 64 * 2);
        // As in issue_product.
        asm volatile("" : "+l"(desc_ds), "+l"(desc_k));
        issue_ds_k(dq, desc_ds, desc_k);
    }
    template <int kCount>
    __device__ __forceinline__ void store_dq(const float (&dq)[kCount], int first) const {
        float4* dst = reinterpret_cast<float4*>(&smem.dq[0][0] + first * kColumnBytes) + threadIdx.x % 128;
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j)
            dst[128 * j] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    }
#endif

    template <bool kMasked>
    __device__ __forceinline__ bool take_scores(float slope, int block, bool has_next, Scores& s, Dv& dv) {
        const u32 stage = step.stage();
        const Mask<kMasked> mask(*this, block);
        Packed p;
        if constexpr (kHandsFactors)
            mbarrier_wait_parity(smem_address(&smem.bar_factors_free), step.free_parity<1>());
        exponents(mask, slope, block, s, p);
        multiply_dv(dv, p);
        return next_product<kNeedsDv>(stage, has_next, s, dv, [&] { issue_scores(s); });
    }

    template <bool kMasked>
    __device__ __forceinline__ bool take_gradients(int block, bool has_next, Scores& s, Dk& dk) {
        const u32 stage = step.stage();
        const Mask<kMasked> mask(*this, block);
        Packed p;  // dS^T
        mbarrier_wait_parity(smem_address(&smem.bar_factors_full), step.parity<1>());
        gradients(mask, s, p);
        mbarrier_arrive(smem_address(&smem.bar_factors_free));
        if constexpr (kNeedsDq) {
            wait_for_ds();
            hand_over(p);
        }
        multiply_dk(dk, p);
        return next_product<kNeedsDk>(stage, has_next, s, dk, [&] { issue_dp(s); });
    }

    // Goes on to the next block: its first product is issued while the last one of this block, which adds to
    // `sums` if there is any, is computed. Whether there is a block.
    template <bool kPending, int kCount, class Issue>
    __device__ __forceinline__ bool next_product(u32 stage, bool has_next, Scores& s, float (&sums)[kCount],
                                                 Issue issue) {
        ++step.number;
        const bool more = follows(has_next);
        if constexpr (kPending) {
            if (more) {
                issue();
                wgmma_wait_group<1>();
            } else {
                wgmma_wait_group<0>();
            }
            wgmma_pin(sums);
            release(stage);
        } else {
            release(stage);
            if (more) issue();
        }
        wgmma_wait_group<0>();
        wgmma_pin(s);
        return more;
    }

    // S^T of the block `step`, which is waited for.
    __device__ __forceinline__ void issue_scores(Scores& s) {
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[step.stage()]), step.parity());
        issue_product<kDimQK>(s, smem.k, smem.q[step.stage()]);
#if !FLEX
        if constexpr (kLooksAhead) find_block();
#endif
    }
    // dP^T of it.
    __device__ __forceinline__ void issue_dp(Scores& s) const {
        mbarrier_wait_parity(smem_address(&smem.bar_dout_full[step.stage()]), step.parity());
        issue_product<kDimV>(s, smem.v, smem.dout[step.stage()]);
    }
    template <int kDim>
    __device__ __forceinline__ void issue_product(Scores& s, const unsigned char* keys,
                                                  const unsigned char* rows) const {
        u64 desc_keys = KeyRows::k_major(smem_address(keys) + first_row() * KeyRows::kRowBytes);
        // Hides that it is the same in all blocks: descriptors of all steps, kept, would cost registers.
        asm volatile("" : "+l"(desc_keys));
        const u64 desc_rows = BlockRows::k_major(smem_address(rows));
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k)
            wgmma_ss<kDtype>(s, desc_keys + k / 4 * KeyRows::kStepTile + k % 4 * KeyRows::kStepK,
                             desc_rows + k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK, k > 0);
        wgmma_commit_group();
    }

    // The thread's two keys.
    __device__ __forceinline__ int key_of(int r) const {
        return tile.first_key + first_row() + warp_idx * 16 + lane_index() / 4 + 8 * r;
    }
    // The thread's first query column; accumulators 4 j to 4 j + 3 are of that 8 j behind it and of the next.
    __device__ __forceinline__ static int first_column() { return 2 * (lane_index() % 4); }
    // Numbers of the rows of a block: element 4 j is those of the two columns of accumulators 4 j to 4 j + 3.
    __device__ __forceinline__ static const float2* of_columns(const float (&rows)[kBlockRows], u32 lane) {
        return reinterpret_cast<const float2*>(rows) + lane % 4;
    }
    __device__ __forceinline__ const float2* weights_of_columns(u32 stage, u32 lane) const {
#if FLEX
        return nullptr;
#else
        return of_columns(smem.weights[stage], lane);
#endif
    }

    // P^T, and the factors of dS^T in place of the scores. kHandsFactors: the factors to the other consumer.
    template <bool kMasked>
    __device__ __forceinline__ void exponents(const Mask<kMasked>& mask, float slope, int block, Scores& s,
                                              Packed& p) const {
        const u32 stage = step.stage();
        // From the thread's first column to the queries that stand at its keys.
        [[maybe_unused]] float distance[2] = {};
        if constexpr (kAlibi) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                distance[r] =
                    static_cast<float>(key_of(r) - tile.offset - block * kBlockRows - first_column());
        }
        const u32 lane = lane_index();
        const float2 *lses = of_columns(smem.lse[stage], lane), *shares = weights_of_columns(stage, lane);
#if FLEX
        const float2* references = of_columns(smem.references[stage], lane);
#endif
        float factors[8];
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
            const float2 lse = lses[4 * j];
#if FLEX
            const float2 reference = has_references<kMasked>() ? references[4 * j] : make_float2(0.0f, 0.0f);
#endif
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int i = 4 * j + c;
#if FLEX
                const ValueAndDerivative one =
                    mask.exponential(i, s[i], (c & 1) ? lse.y : lse.x, (c & 1) ? reference.y : reference.x);
                s[i] = one.value;
                // The derivative may be no number where nothing is left of P.
                factors[4 * (j % 2) + c] = kTwoFactors ? (s[i] == 0.0f ? 0.0f : s[i] * one.derivative) : s[i];
#else
                float score = s[i];
                if constexpr (kSoftcap) score = tanh_approx(score * params.score_scale);
                const float slope_of_cap = kSoftcap ? fmaf(-score, score, 1.0f) : 1.0f;
                if constexpr (kAlibi) {
                    const float bias = slope * fabsf(distance[c >> 1] - static_cast<float>(8 * j + (c & 1)));
                    score = fmaf(score, params.score_factor, -bias);
                }
                const float e =
                    exp2_approx(fmaf(score, params.softmax_scale_log2, -((c & 1) ? lse.y : lse.x)));
                s[i] = mask.hides(i) ? 0.0f : e;
                factors[4 * (j % 2) + c] = kSoftcap ? s[i] * slope_of_cap : s[i];
#endif
            }
            if constexpr (!kHandsFactors) {
                weigh(s, shares, j, p);
#pragma unroll
                for (int c = 0; kNeedsDs && c < 4; ++c) s[4 * j + c] = factors[4 * (j % 2) + c];
            } else if (j % 2 == 1) {
                smem.factors[64 * (j - 1) + threadIdx.x % 128] = make_uint4(
                    pack_16bit<kDtype>(factors[0], factors[1]), pack_16bit<kDtype>(factors[2], factors[3]),
                    pack_16bit<kDtype>(factors[4], factors[5]), pack_16bit<kDtype>(factors[6], factors[7]));
            }
        }
        if constexpr (kHandsFactors) {
            mbarrier_arrive(smem_address(&smem.bar_factors_full));
#pragma unroll
            for (int j = 0; j < kBlockRows / 8; ++j) weigh(s, shares, j, p);
        }
    }
    // P^T from the exponentials, in columns 8 j and behind.
    __device__ __forceinline__ static void weigh(const Scores& s, const float2* shares, int j, Packed& p) {
        const float2 weights = kWeights ? shares[4 * j] : make_float2(1.0f, 1.0f);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float first = s[4 * j + 2 * r], second = s[4 * j + 2 * r + 1];
            p[2 * j + r] = kWeights ? pack_16bit<kDtype>(first * weights.x, second * weights.y)
                                    : pack_16bit<kDtype>(first, second);
        }
    }
    // dS^T in place of its factors, from them and dP^T. kByProduct: they are in shared memory.
    template <bool kMasked>
    __device__ __forceinline__ void gradients(const Mask<kMasked>& mask, const Scores& dp, Packed& p) const {
        const u32 stage = step.stage();
        const u32 lane = lane_index();
        const float2* deltas = of_columns(smem.delta[stage], lane);
        const float2* shares = weights_of_columns(stage, lane);
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
            const float2 delta = deltas[4 * j], weights = kWeights ? shares[4 * j] : make_float2(1.0f, 1.0f);
            if (kByProduct && j % 2 == 0) {
                const uint4 four = smem.factors[64 * j + threadIdx.x % 128];
                p[2 * j] = four.x, p[2 * j + 1] = four.y, p[2 * j + 2] = four.z, p[2 * j + 3] = four.w;
            }
            float ds[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int i = 4 * j + c;
                const float2 factors = unpack_16bit<kDtype>(p[2 * j + c / 2]);
                const float weighted = kWeights ? dp[i] * ((c & 1) ? weights.y : weights.x) : dp[i];
                const float factor = (c & 1) ? factors.y : factors.x;
                const float value = factor * (weighted - ((c & 1) ? delta.y : delta.x));
#if FLEX
                // dP may be NaN where P is 0 because of a mask. It is asked no second time, and which blocks
                // have one is not known to the other consumer of kByProduct.
                ds[c] = (kMasked || kByProduct) && factor == 0.0f ? 0.0f : value;
#else
                ds[c] = mask.hides(i) ? 0.0f : value;
#endif
            }
            p[2 * j] = pack_16bit<kDtype>(ds[0], ds[1]);
            p[2 * j + 1] = pack_16bit<kDtype>(ds[2], ds[3]);
        }
    }
    __device__ __forceinline__ static void pack(const Scores& s, Packed& packed) {
#pragma unroll
        for (int i = 0; i < kBlockRows / 4; ++i) packed[i] = pack_16bit<kDtype>(s[2 * i], s[2 * i + 1]);
    }

    // dV += P^T dO, dO waited for, and dK += dS^T Q, as far as they are needed.
    __device__ __forceinline__ void multiply_dv(Dv& dv, const Packed& p) const {
        if constexpr (kNeedsDv) {
            mbarrier_wait_parity(smem_address(&smem.bar_dout_full[step.stage()]), step.parity());
            multiply(dv, p, smem.dout[step.stage()]);
        }
    }
    __device__ __forceinline__ void multiply_dk(Dk& dk, const Packed& ds) const {
        if constexpr (kNeedsDk) multiply(dk, ds, smem.q[step.stage()]);
    }
    template <int kCount>
    __device__ __forceinline__ static void multiply(float (&d)[kCount], const Packed& a,
                                                    const unsigned char* b) {
        const u64 desc = BlockRows::mn_major(smem_address(b));
        wgmma_pin(d);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockRows / 16; ++k) {
            const u32 fragment[4] = {a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]};
            const u64 desc_k = desc + k * BlockRows::kStepMn;
            if constexpr (kCount <= 96) {
                wgmma_rs<kDtype, Major::kMn>(d, fragment, desc_k, true);
            } else {  // all operands of an instruction must fit in the registers of the launch
                wgmma_rs<kDtype, Major::kMn>(wgmma_columns<0, 64>(d), fragment, desc_k, true);
                wgmma_rs<kDtype, Major::kMn>(wgmma_columns<64, kCount - 64>(d), fragment,
                                             desc_k + 2 * BlockRows::kStepTile, true);
            }
        }
        wgmma_commit_group();
    }

    // Until dS may be written. Without dQ the consumer alone reads what it has written.
    __device__ __forceinline__ void wait_for_ds() const {
        if constexpr (kNeedsDq) {
            mbarrier_wait_parity(smem_address(&smem.bar_ds_free[step.stage<kDsStages>()]),
                                 step.free_parity<kDsStages>());
        } else {
            named_barrier_sync(NB_KEYS + wg, 128);
        }
    }
    // dS to those who compute dQ, or to the consumer.
    __device__ __forceinline__ void hand_over(const Packed& ds) const {
        const u32 stage = step.stage<kDsStages>();
        store_ds(ds, stage);
        fence_proxy_async();
        if constexpr (kNeedsDq) {
            mbarrier_arrive(smem_address(&smem.bar_ds_full[stage]));
        } else {
            named_barrier_sync(NB_KEYS + wg, 128);
        }
    }
    // Tells the warpgroup of dQ that there is no block `step`.
    __device__ __forceinline__ void hand_over_end() const {
        const u32 stage = step.stage<kDsStages>();
        mbarrier_wait_parity(smem_address(&smem.bar_ds_free[stage]), step.free_parity<kDsStages>());
        mbarrier_arrive(smem_address(&smem.bar_ds_full[stage]));
    }
    // As rows of queries.
    __device__ __forceinline__ void store_ds(const Packed& ds, u32 stage) const {
        const u32 dst = smem_address(smem.ds[stage]) + first_row() / 64 * BlockRows::kBytes;
        const int lane = lane_index(), row = lane % 8 + lane / 16 * 8, unit = 2 * warp_idx + lane / 8 % 2;
#pragma unroll
        for (int k = 0; k < kBlockRows / 16; ++k)
            stmatrix_x4_trans(dst + BlockRows::offset(16 * k + row, unit), ds[4 * k], ds[4 * k + 1],
                              ds[4 * k + 2], ds[4 * k + 3]);
    }
    // Behind the last product that reads them: gives back a stage of Q and dO. All threads have read rows.
    __device__ __forceinline__ void release(u32 stage) const {
        mbarrier_arrive(smem_address(&smem.bar_free[stage]));
    }

    template <int kCount>
    __device__ __forceinline__ static void clear(float (&d)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) d[i] = 0.0f;
        wgmma_pin(d);
    }
    __device__ __forceinline__ void store_dk(const Dk& dk) const {
        if constexpr (kNeedsDk)
            store(dk, params.dk, params.dk_stride_b, params.dk_stride_s, params.dk_stride_h, params.d_qk,
                  params.scale);
    }
    __device__ __forceinline__ void store_dv(const Dv& dv) const {
        if constexpr (kNeedsDv)
            store(dv, params.dv, params.dv_stride_b, params.dv_stride_s, params.dv_stride_h, params.d_v,
                  1.0f);
    }
    template <int kCount>
    __device__ __forceinline__ void store(const float (&d)[kCount], void* out, i64 stride_b, i64 stride_s,
                                          i64 stride_h, int columns, float factor) const {
        u16* rows = static_cast<u16*>(out) + tile.kv_head * stride_h;
        if (params.cu_seqlens_k == nullptr) rows += tile.request * stride_b;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = key_of(r);
            if (key >= tile.k_rows) continue;
            u16* row = rows + (tile.k_begin + key) * stride_s + 2 * (lane_index() % 4);
#pragma unroll
            for (int j = 0; j < kCount / 4; ++j) {
                const u32 pair = pack_16bit<kDtype>(d[4 * j + 2 * r] * factor, d[4 * j + 2 * r + 1] * factor);
                const int column = 8 * j + 2 * (lane_index() % 4);
                if (column + 1 < columns) {
                    *reinterpret_cast<u32*>(row + 8 * j) = pair;
                } else if (column < columns) {
                    row[8 * j] = static_cast<u16>(pair);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mha_backward(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    if (threadIdx.x == 0) init_barriers(smem);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x < 32) {
        const KeyTile found = find_key_tile<kTileKeys>(params);
        if (threadIdx.x == 0) smem.tile = found;
    }
    __syncthreads();
    const KeyTile& tile = smem.tile;
    if (tile.request < 0) return;

    if (wg_idx == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (!kFlex && tile.blocks() == 0) return;  // nobody waits for what would be copied
        if (warp_idx == 0) {
            if (elect_one_sync()) load(params, smem, tile);
        } else if (warp_idx == 1) {
            if (kNeedsDq && elect_one_sync()) add_dq(params, smem, tile);
        } else if (warp_idx == 2) {
            trim(params, smem, tile);
        } else if (kNeedsDq && elect_one_sync()) {
            keep_turns(params, smem, tile);
        }
        return;
    }
    if constexpr (!kDqByConsumers) {
        if (wg_idx == kConsumers + 1) {
            setmaxnreg_dec<kReducerRegisters>();
            if (kNeedsDq && (kFlex || tile.blocks() > 0)) multiply_dq(params, smem, tile);
            return;
        }
    }
    Consumer consumer{params, smem, tile, wg_idx - 1, warp_idx};
    if constexpr (!kByProduct && kNeedsDs) {
        setmaxnreg_inc<kRegisters>();
        consumer.run();
    } else if (!kByProduct || wg_idx == 1) {
        setmaxnreg_inc<kScoreRegisters>();
        consumer.run_scores();
    } else if constexpr (kNeedsDs) {
        setmaxnreg_inc<kRegisters>();
        consumer.run_gradients();
    }
}
