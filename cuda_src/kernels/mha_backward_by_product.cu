// What mha_backward.cu computes, where dK and dV of a tile leave a consumer no registers for all products:
// head dimensions above 128, and score functions that need many registers. Consumers share products instead
// of keys.
//
// Grid: a CTA for each tile of 64 keys of a KV head. It walks the blocks of queries that see the keys, last
// first, each for all query heads of the group.
//
// Roles                        registers
//   warpgroup 0                32    four warps as in mha_backward.cu
//   warpgroup 1: scores        208   S^T = K Q^T, P, dV += P^T dO. ALiBi, or softcap with weights: 216, and
//                                    24 of warpgroup 0; dV alone: 224
//   warpgroup 2: gradients     208   dP^T = V dO^T, dS, dK += dS^T Q
//   warpgroup 3: dQ            64    dQ = dS K, 64 columns at a time
// The first product of a step runs beside the last one of the step before. Factors of dS go from scores to
// gradients through shared memory in float32, in two halves. Gradients that nobody needs have no products;
// roles that are left without one return at once.
//
// Barriers         arrivals     full: signalled by                    free: signalled by
//   k, v           1            TMA; of K also warp 2 after clearing
//   q, dout        1            TMA, or warp 2 after clearing         scores and gradients; of Q with FLEX 32
//                                                                     threads of warp 2 too, which read lse
//   landed         1            TMA, to warp 2, where it clears rows
//   step           1            FLEX: the loading thread, to those that compute and add dQ
//   factors        128          scores, each half                     gradients, each half
//   ds             128          gradients                             a thread of warpgroup 3
//   dq             128          warpgroup 3: part stored              warp 1: part read
//   turn, added    1            warp 3: turn; warp 1: added
#include "mha/backward_cta.cuh"
#include "mha/dq_sums.cuh"
#if FLEX
#include "flex/listed_queries.cuh"
#else
#include "mha/interval_queries.cuh"
#endif
#include "mha/backward_scores.cuh"

constexpr int kTileKeys = 64, kThreads = 512;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kStages = 2, kPlaces = DQ_PLACES;
constexpr int kReaders = kNeedsDs ? 256 : 128;   // threads that read Q and dO
constexpr int kPartBytes = kBlockRows * 64 * 4;  // of 64 columns of dQ
static_assert(kChunksQK % kPlaces == 0);
// Named barriers: of warpgroup 3; of warpgroup 1.
[[maybe_unused]] constexpr int NB_DQ = 1, NB_KEYS = 2;
// What setmaxnreg gives the roles; together what a CTA has at launch.
constexpr bool kScoresNeedMore = kAlibi || (kSoftcap && kWeights);
constexpr int kRegisters = kNeedsDs ? 208 : 0;
constexpr int kScoreRegisters = !kNeedsDs ? 224 : kScoresNeedMore ? 216 : 208;
constexpr int kReducerRegisters = 64, kProducerRegisters = kScoresNeedMore ? 24 : 32;

static_assert(kScoreRegisters + kRegisters + kReducerRegisters + kProducerRegisters <=
                  65536 / kThreads / 8 * 8 * 4,
              "setmaxnreg would wait for ever: a CTA shares what its threads have at launch");

using KeyRows = SwizzledTile<kTileKeys>;  // of K and V

struct SharedMemoryPlan {
    unsigned char k[kChunksQK * KeyRows::kBytes];
    unsigned char v[kChunksV * KeyRows::kBytes];
    unsigned char q[kStages][kChunksQK * BlockRows::kBytes];
    unsigned char dout[kStages][kChunksV * BlockRows::kBytes];
    unsigned char ds[BlockRows::kBytes];    // [query][64 keys]
    unsigned char dq[kPlaces][kPartBytes];  // as the accumulators of 128 threads
    float4 factors[4 * 128];                // of dS, half a block: four of each thread together
    float lse[kStages][kBlockRows], delta[kStages][kBlockRows];
#if FLEX
    float references[kStages][kBlockRows];
    WalkState walk;
    QueryStep steps[kPublishedSteps];
    int trimmed[kStages];  // whether the block has rows that see no key, or that have references
    u64 bar_step[kPublishedSteps];
#else
    float weights[kStages][kBlockRows];
#endif
    KeyTile tile;
    u64 bar_k_landed, bar_k_full, bar_v_full;
    u64 bar_q_landed[kStages], bar_dout_landed[kStages];  // rows are still to be cleared
    u64 bar_q_full[kStages], bar_q_free[kStages];         // with lse, and weights or references
    u64 bar_dout_full[kStages], bar_dout_free[kStages];   // with delta
    u64 bar_factors_full, bar_factors_free;
    u64 bar_ds_full, bar_ds_free;
    u64 bar_dq_full[kPlaces], bar_dq_free[kPlaces];
    u64 bar_turn[2], bar_added[2];  // of every second block
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    const auto init = [](u64& bar, int arrivals) { mbarrier_init(smem_address(&bar), arrivals); };
    init(smem.bar_k_landed, 1);
    init(smem.bar_k_full, kKeySignals);
    init(smem.bar_v_full, 1);
    init(smem.bar_factors_full, 128);
    init(smem.bar_factors_free, 128);
    init(smem.bar_ds_full, 128);
    init(smem.bar_ds_free, 1);
#if FLEX
    constexpr int kQReaders = kReaders + (kTrims ? 32 : 0);  // warp 2 reads lse
#pragma unroll
    for (int i = 0; i < kPublishedSteps; ++i) init(smem.bar_step[i], 1);
#else
    constexpr int kQReaders = kReaders;
#endif
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        init(smem.bar_q_landed[i], 1);
        init(smem.bar_dout_landed[i], 1);
        init(smem.bar_q_full[i], 1);
        init(smem.bar_dout_full[i], 1);
        init(smem.bar_q_free[i], kQReaders);
        init(smem.bar_dout_free[i], kReaders);
    }
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
        init(smem.bar_dq_full[i], 128);
        init(smem.bar_dq_free[i], 1);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        init(smem.bar_turn[i], 1);
        init(smem.bar_added[i], 1);
    }
    mbarrier_init_fence();
}

// Warpgroup 3.
template <class Blocks>
__device__ __forceinline__ void find_dq(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    mbarrier_wait_parity(smem_address(&smem.bar_k_full), 0);
    u32 number = 0;
#pragma unroll 1
    for (Blocks walk(params, smem, tile); walk.is_there(); walk.advance(), ++number) {
        mbarrier_wait_parity(smem_address(&smem.bar_ds_full), number & 1);
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk) {
            const u32 use = number * kChunksQK + chunk, at = chunk % kPlaces;
            float dq[32];
            multiply_ds<KeyRows>(dq, BlockRows::k_major(smem_address(smem.ds)),
                                 KeyRows::mn_major(smem_address(smem.k) + chunk * KeyRows::kBytes));
            wgmma_wait_group<0>();
            wgmma_pin(dq);
            if (chunk == kChunksQK - 1) {
                named_barrier_sync(NB_DQ, 128);  // all warps have read dS
                if (threadIdx.x % 128 == 0) mbarrier_arrive(smem_address(&smem.bar_ds_free));
            }
            mbarrier_wait_parity(smem_address(&smem.bar_dq_free[at]), use / kPlaces & 1 ^ 1);
            store_dq(smem.dq[at], dq);
            fence_proxy_async();
            mbarrier_arrive(smem_address(&smem.bar_dq_full[at]));
        }
    }
}

// A consumer of one product, of scores or of gradients.
class Consumer {
  public:
    __device__ __forceinline__ Consumer(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile,
                                        int warp_idx)
        : params(params), smem(smem), tile(tile), warp_idx(warp_idx) {}

    // S^T, P^T and dV.
    __device__ __forceinline__ void run_scores() {
        Dv dv;
        clear(dv);
        Queries<SharedMemoryPlan> queries(params, smem, tile, tile.first_key, key());
        const bool begins = queries.begins();
        // Also without a block: what was copied has landed before the CTA ends.
        if (kFlex || begins) mbarrier_wait_parity(smem_address(&smem.bar_k_full), 0);
        if (begins) {
#if FLEX
            if (MaskMod::kIsThere) clear_keys_not_finite<kDtype, KeyRows>(smem.k, 0, NB_KEYS);
#endif
            Scores s;
            issue_scores(s);
            bool has_next;
#pragma unroll 1
            do {
                Packed p;
                queries.look(place.stage);
                queries.find_seen(RowNumbers<false>(smem.lse[place.stage]));
                wgmma_wait_group<1>();
                wgmma_pin(dv);
                free_before(smem.bar_dout_free);
                wgmma_wait_group<0>();
                wgmma_pin(s);
                find_half<0>(queries, s, p);
                find_half<1>(queries, s, p);
                free(smem.bar_q_free);
                if constexpr (kNeedsDv) {
                    mbarrier_wait_parity(smem_address(&smem.bar_dout_full[place.stage]), place.parity);
                    multiply(dv, p, smem.dout[place.stage]);
                }
                has_next = queries.advance();
                advance();
                if (has_next) issue_scores(s);
            } while (has_next);
            wgmma_wait_group<0>();
            wgmma_pin(dv);
        }
        if constexpr (kNeedsDv)
            store_gradient(params, tile, key(), dv, params.dv, params.dv_stride_b, params.dv_stride_s,
                           params.dv_stride_h, params.d_v, 1.0f);
    }

    // dP^T, dS^T and dK.
    __device__ __forceinline__ void run_gradients() {
        Dk dk;
        clear(dk);
        Queries<SharedMemoryPlan> queries(params, smem, tile, tile.first_key, key());
        const bool begins = queries.begins();
        if (kFlex || begins) mbarrier_wait_parity(smem_address(&smem.bar_v_full), 0);
        if (begins) {
            Scores dp;
            issue_dp(dp);
            bool has_next;
#pragma unroll 1
            do {
                Packed ds;
                wgmma_wait_group<1>();
                wgmma_pin(dk);
                free_before(smem.bar_q_free);
                wgmma_wait_group<0>();
                wgmma_pin(dp);
                mbarrier_wait_parity(smem_address(&smem.bar_q_full[place.stage]), place.parity);
                queries.look(place.stage);
                take_factors(dp, ds);
#if !FLEX
                if (queries.is_masked()) queries.hide(ds);
#endif
                free(smem.bar_dout_free);
                if constexpr (kNeedsDq) {
                    mbarrier_wait_parity(smem_address(&smem.bar_ds_free), number & 1 ^ 1);
                    store_transposed(smem.ds, ds, warp_idx);
                    fence_proxy_async();
                    mbarrier_arrive(smem_address(&smem.bar_ds_full));
                }
                if constexpr (kNeedsDk) multiply(dk, ds, smem.q[place.stage]);
                has_next = queries.advance();
                advance();
                if (has_next) issue_dp(dp);
            } while (has_next);
            wgmma_wait_group<0>();
            wgmma_pin(dk);
        }
        if constexpr (kNeedsDk)
            store_gradient(params, tile, key(), dk, params.dk, params.dk_stride_b, params.dk_stride_s,
                           params.dk_stride_h, params.d_qk, params.scale);
    }

  private:
    const Params& params;
    SharedMemoryPlan& smem;
    const KeyTile& tile;
    const int warp_idx;
    u32 number = 0;            // of the step
    RingPlace<kStages> place;  // of its Q and dO

    // The thread's first key.
    __device__ __forceinline__ int key() const { return tile.first_key + warp_idx * 16 + lane_index() / 4; }

    __device__ __forceinline__ void advance() {
        place.advance();
        ++number;
    }
    // Gives back a stage of Q or dO: of this step, or of the one before.
    __device__ __forceinline__ void free(u64 (&bars)[kStages]) const {
        mbarrier_arrive(smem_address(&bars[place.stage]));
    }
    __device__ __forceinline__ void free_before(u64 (&bars)[kStages]) const {
        if (number > 0) mbarrier_arrive(smem_address(&bars[place.stage ^ 1]));
    }
    __device__ __forceinline__ void issue_scores(Scores& s) const {
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[place.stage]), place.parity);
        multiply_keys<KeyRows, kDimQK>(s, smem.k, 0, smem.q[place.stage]);
    }
    __device__ __forceinline__ void issue_dp(Scores& dp) const {
        mbarrier_wait_parity(smem_address(&smem.bar_dout_full[place.stage]), place.parity);
        multiply_keys<KeyRows, kDimV>(dp, smem.v, 0, smem.dout[place.stage]);
    }
    // P^T of half the columns, and their factors of dS^T to the other consumer: uses 2 n and 2 n + 1 of their
    // place. By quarters, whose registers are free before the next.
    template <int kHalf>
    __device__ __forceinline__ void find_half(const Queries<SharedMemoryPlan>& queries, Scores& s,
                                              Packed& p) const {
        if constexpr (kNeedsDs) mbarrier_wait_parity(smem_address(&smem.bar_factors_free), kHalf ^ 1);
        find_quarter<4 * kHalf>(queries, s, p);
        find_quarter<4 * kHalf + 2>(queries, s, p);
        if constexpr (kNeedsDs) mbarrier_arrive(smem_address(&smem.bar_factors_full));
    }
    template <int kFirst>
    __device__ __forceinline__ void find_quarter(const Queries<SharedMemoryPlan>& queries, Scores& s,
                                                 Packed& p) const {
        find_p<kFirst, kFirst + 2>(queries, queries.is_masked(), smem, place.stage,
                                   RowNumbers<false>(smem.lse[place.stage]), s, p);
        if constexpr (kNeedsDs) {
#pragma unroll
            for (int j = kFirst; j < kFirst + 2; ++j)
                smem.factors[128 * (j % 4) + threadIdx.x % 128] =
                    make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
        }
        asm volatile("" ::: "memory");  // the compiler may not begin the next quarter before
    }
    __device__ __forceinline__ void take_factors(const Scores& dp, Packed& ds) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mbarrier_wait_parity(smem_address(&smem.bar_factors_full), half);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float4 four = smem.factors[128 * j + threadIdx.x % 128];
                const float factors[4] = {four.x, four.y, four.z, four.w};
                // With FLEX only scores know what a mask hides.
                find_ds_of_columns<kFlex>(smem, place.stage, 4 * half + j, factors, dp + 4 * (4 * half + j),
                                          ds);
            }
            mbarrier_arrive(smem_address(&smem.bar_factors_free));
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mha_backward_by_product(const __grid_constant__ Params params) {
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

    using Blocks = AddedBlocks<KeyRows, SharedMemoryPlan>;
    const bool has_blocks = kFlex || tile.blocks() > 0;
    if (wg_idx == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (!has_blocks) return;  // nobody waits for what would be copied
        if (warp_idx == 0) {
            if (elect_one_sync()) load<KeyRows>(params, smem, tile);
        } else if (warp_idx == 1) {
            if (kNeedsDq && elect_one_sync())
                add_dq<kChunksQK, kPlaces, kPartBytes, Blocks>(params, smem, tile);
        } else if (warp_idx == 2) {
            trim<KeyRows>(params, smem, tile);
        } else if (kNeedsDq && elect_one_sync()) {
            keep_turns<Blocks>(params, smem, tile);
        }
    } else if (wg_idx == 3) {
        setmaxnreg_dec<kReducerRegisters>();
        if constexpr (kNeedsDq) {
            if (has_blocks) find_dq<Blocks>(params, smem, tile);
        }
    } else if (wg_idx == 1) {
        setmaxnreg_inc<kScoreRegisters>();
        Consumer(params, smem, tile, warp_idx).run_scores();
    } else if constexpr (kNeedsDs) {
        setmaxnreg_inc<kRegisters>();
        Consumer(params, smem, tile, warp_idx).run_gradients();
    }
}
