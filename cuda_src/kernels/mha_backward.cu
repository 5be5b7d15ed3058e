// Gradients of multi-head attention: dK and dV of a tile of keys, and what it adds to dQ. With P and dS of a
// block of 64 query tokens, dV += P^T dO, dK += dS^T Q and dQ += dS K, where P = exp(S - lse), dS = P (dO V^T
// - delta). With FLEX, score and mask functions of the user's and lists of blocks.
// docs/kernels/mha_backward.md and flex_backward.md have the reasons; rawmla/kernels/mha_backward_variants.py
// chooses the variant. kernels/mha_backward_by_product.cu has the head dimensions whose dK and dV leave a
// consumer too few registers.
//
// Grid: a CTA for each tile of 128 keys of a KV head. It walks the blocks of queries that see the keys, last
// first, each for all query heads of the group.
//
// Roles                          registers
//   warpgroup 0, warp 0          24    copies K and V once, then Q, dO and the rows' lse, delta and weights
//   warpgroup 0, warp 1          24    adds dQ to global memory
//   warpgroup 0, warp 2          24    clears rows of K, Q and dO that are not the request's, or see no key
//   warpgroup 0, warp 3          24    waits for the tile's turn to add to dQ, and passes it on (fixed order)
//   warpgroups 1, 2: consumers   240   64 keys each: S^T, dP^T, dV and dK; dQ
//
// A step of a consumer. Products overlap what stands beside them:
//   S^T = K Q^T                       loads lse
//   dP^T = V dO^T                     FLEX: the mask function; hands over dQ of the step before; half of
//                                     P = exp(S - lse), packed too
//                                     the other half, and between its exponentials dS = P (dP - delta), in
//                                     float32 until it is packed; to shared memory
//   dV += P^T dO                      fence; both consumers have stored dS
//   dQ = dS K, dK += dS^T Q           stores dQ in shared memory
// dQ of a block: d_qk up to 96 all columns by one consumer, the other in the next step; else half the columns
// each. But for kWide, its fence and arrival wait for the next step, when the stores have long landed.
// With 64 columns at most, K and V of a consumer stay in registers as A operands.
//
// D_QK 192 with D_V 128 in bfloat16 (kWide) has no registers for that: P^T goes through shared memory too, dP
// takes the registers of S, and P is kept as float16 times 2^14 meanwhile.
//   S^T      | P to shared memory | dV, dP | dS, to shared memory | dQ in two passes, dK with the last
//
// Barriers         arrivals     full: signalled by                    free: signalled by
//   k, v           1            TMA; of K also warp 2 after clearing
//                  32           of K, dense with 64 columns at most: all lanes of warp 2
//   q, dout        1            TMA, or warp 2 after clearing         consumers; of Q with FLEX 32 threads
//                                                                     of warp 2 too, which read lse
//   landed         1            TMA, to warp 2, where it clears rows
//   step           1            FLEX: the loading thread, to those that add dQ
//   dq             128          consumer: part stored                 warp 1: part read
//   ds_free        256                                                kWide: consumers, dQ computed
//   turn, added    1            warp 3: turn; warp 1: added
//   NB_DS          256 (named)  both consumers have stored dS
//   NB_KEYS        128 (named)  a consumer has stored or read P or dS, or cleared rows of K
#include "mha/backward_cta.cuh"
#include "mha/dq_sums.cuh"
#if FLEX
#include "flex/listed_queries.cuh"
#else
#include "mha/interval_queries.cuh"
#endif
#include "mha/backward_scores.cuh"

constexpr int kConsumers = 2, kTileKeys = 64 * kConsumers, kThreads = 128 * (kConsumers + 1);
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kRegisters = 240, kProducerRegisters = 24;
static_assert(kConsumers * kRegisters + kProducerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1),
              "setmaxnreg would wait for ever: a CTA shares what its threads have at launch");
constexpr bool kWide = WIDE;
static_assert(!kWide || (kDtype == Dtype::kBf16 && !kFlex && !kSoftcap && !kWeights),
              "P alone is the factor of dS");
constexpr int kStages = STAGES, kPlaces = kConsumers;  // of dQ: a consumer has its own
constexpr int kDsStages = kWide ? 1 : 2;
// Whether lse stays in shared memory, since the score needs the registers.
#if FLEX
constexpr bool kScoreNeedsMore = ScoreMod::kIsThere;
#else
constexpr bool kScoreNeedsMore = kWeights && (kAlibi || kSoftcap);
#endif
[[maybe_unused]] constexpr bool kLseStays = kScoreNeedsMore && kDimQK + kDimV > 192;
constexpr bool kKeysInRegisters = kDimQK <= 64 && kDimV <= 64;
constexpr bool kInTurn = kDimQK <= 96;  // one consumer computes dQ of a block, the other of the next
constexpr int kDqParts = kInTurn ? 1 : kConsumers, kDqColumns = kDimQK / kDqParts;
constexpr int kColumnBytes = 4 * kBlockRows, kPartBytes = kDqColumns * kColumnBytes;
static_assert(kWide || kInTurn || !kNeedsDq || kDqColumns == 64);
// Named barriers: of both consumers; of each.
[[maybe_unused]] constexpr int NB_DS = 1, NB_KEYS = 2;

using KeyRows = SwizzledTile<kTileKeys>;  // of K and V

struct SharedMemoryPlan {
    unsigned char k[kChunksQK * KeyRows::kBytes];
    unsigned char v[kChunksV * KeyRows::kBytes];
    unsigned char q[kStages][kChunksQK * BlockRows::kBytes];
    unsigned char dout[kStages][kChunksV * BlockRows::kBytes];
    // [query][64 keys]; as the accumulators of 128 threads
    unsigned char ds[kDsStages][kNeedsDq || kWide ? kConsumers * BlockRows::kBytes : 16];
    unsigned char dq[kPlaces][kNeedsDq ? kPartBytes : 16];
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
    u64 bar_ds_free;                                      // kWide
    u64 bar_dq_full[kPlaces], bar_dq_free[kPlaces];
    u64 bar_turn[2], bar_added[2];  // of every second block
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    const auto init = [](u64& bar, int arrivals) { mbarrier_init(smem_address(&bar), arrivals); };
    init(smem.bar_k_landed, 1);
    init(smem.bar_k_full, kKeySignals);
    init(smem.bar_v_full, 1);
    init(smem.bar_ds_free, 128 * kConsumers);
#if FLEX
    constexpr int kQReaders = 128 * kConsumers + (kTrims ? 32 : 0);  // warp 2 reads lse
#pragma unroll
    for (int i = 0; i < kPublishedSteps; ++i) init(smem.bar_step[i], 1);
#else
    constexpr int kQReaders = 128 * kConsumers;
#endif
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        init(smem.bar_q_landed[i], 1);
        init(smem.bar_dout_landed[i], 1);
        init(smem.bar_q_full[i], 1);
        init(smem.bar_dout_full[i], 1);
        init(smem.bar_q_free[i], kQReaders);
        init(smem.bar_dout_free[i], 128 * kConsumers);
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

class Consumer {
  public:
    __device__ __forceinline__ Consumer(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile,
                                        int wg, int warp_idx)
        : params(params), smem(smem), tile(tile), wg(wg), warp_idx(warp_idx) {}

    __device__ __forceinline__ void run() {
        Dk dk;
        Dv dv;
        clear(dk);
        clear(dv);
        Queries<SharedMemoryPlan> queries(params, smem, tile, tile.first_key + first_row(), key());
#if FLEX
        // While the lists are read, and Q is copied.
        mbarrier_wait_parity(smem_address(&smem.bar_k_full), 0);
        if (MaskMod::kIsThere) clear_keys_not_finite<kDtype, KeyRows>(smem.k, first_row(), NB_KEYS + wg);
#endif
        const bool begins = queries.begins();
        if (kFlex || begins) {  // what was copied has landed before the CTA ends
            if (!kFlex) mbarrier_wait_parity(smem_address(&smem.bar_k_full), 0);
            if constexpr (kNeedsDs) mbarrier_wait_parity(smem_address(&smem.bar_v_full), 0);
        }
        if (begins) {
            const Operand<kDimQK> keys(*this, smem.k);
            const Operand<kDimV> values(*this, smem.v);
#pragma unroll 1
            do {
#if !FLEX
                if constexpr (kWide) take_wide_block(queries, keys, values, dk, dv);
#endif
                if constexpr (!kWide) take_block(queries, keys, values, dk, dv);
                place.advance();
                ++number;
            } while (queries.advance());
            if constexpr (kNeedsDq && !kWide) hand_over_dq();
        }
        // kWide computes dK and dV beside dQ in any case.
        if (kNeedsDk && (!kWide || params.dk != nullptr))
            store_gradient(params, tile, key(), dk, params.dk, params.dk_stride_b, params.dk_stride_s,
                           params.dk_stride_h, params.d_qk, params.scale);
        if (kNeedsDv && (!kWide || params.dv != nullptr))
            store_gradient(params, tile, key(), dv, params.dv, params.dv_stride_b, params.dv_stride_s,
                           params.dv_stride_h, params.d_v, 1.0f);
    }

  private:
    const Params& params;
    SharedMemoryPlan& smem;
    const KeyTile& tile;
    const int wg, warp_idx;
    u32 number = 0;            // of the step
    RingPlace<kStages> place;  // of its Q and dO

    // The consumer's first row of K and V, and the thread's first key.
    __device__ __forceinline__ int first_row() const { return 64 * wg; }
    __device__ __forceinline__ int key() const {
        return tile.first_key + first_row() + warp_idx * 16 + lane_index() / 4;
    }

    // K or V of the consumer's keys as an A operand: in shared memory, or in registers.
    template <int kDim>
    struct Operand {
        const unsigned char* keys;
        const int first_row;
        u32 fragments[kKeysInRegisters ? kDim / 4 : 1];

        __device__ __forceinline__ Operand(const Consumer& self, const unsigned char* keys)
            : keys(keys), first_row(self.first_row()) {
            if constexpr (kKeysInRegisters) {
                const int lane = lane_index(), row = first_row + 16 * self.warp_idx + lane % 16;
#pragma unroll
                for (int k = 0; k < kDim / 16; ++k)
                    ldmatrix_x4(*reinterpret_cast<u32(*)[4]>(fragments + 4 * k),
                                smem_address(keys) + KeyRows::offset(row, 2 * k + lane / 16));
            }
        }
        // S^T or dP^T.
        __device__ __forceinline__ void multiply(Scores& s, const unsigned char* rows) const {
            if constexpr (kKeysInRegisters) {
                const u64 desc_rows = BlockRows::k_major(smem_address(rows));
                wgmma_pin(s);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kDim / 16; ++k) {
                    const u32 fragment[4] = {fragments[4 * k], fragments[4 * k + 1], fragments[4 * k + 2],
                                             fragments[4 * k + 3]};
                    wgmma_rs<kDtype>(s, fragment, desc_rows + k * BlockRows::kStepK, k > 0);
                }
                wgmma_commit_group();
            } else {
                multiply_keys<KeyRows, kDim>(s, keys, first_row, rows);
            }
        }
    };

    __device__ __forceinline__ void wait_for_dout() const {
        mbarrier_wait_parity(smem_address(&smem.bar_dout_full[place.stage]), place.parity);
    }
    __device__ __forceinline__ void free_q() const {
        mbarrier_arrive(smem_address(&smem.bar_q_free[place.stage]));
    }
    __device__ __forceinline__ void free_dout() const {
        mbarrier_arrive(smem_address(&smem.bar_dout_free[place.stage]));
    }

    template <class Keys, class Values>
    __device__ __forceinline__ void take_block(Queries<SharedMemoryPlan>& queries, const Keys& keys,
                                               const Values& values, Dk& dk, Dv& dv) {
        // Half of the exponentials wait for dP^T, and dS^T is computed between them.
        constexpr int kColumns = kBlockRows / 8, kFirstLate = kNeedsDs ? kColumns / 2 : kColumns;
        Scores s, dp;
        Packed p, ds;
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[place.stage]), place.parity);
        keys.multiply(s, smem.q[place.stage]);
        queries.look(place.stage);
        const RowNumbers<!kLseStays> lse(smem.lse[place.stage]);
        wait_for_dout();
        if constexpr (kNeedsDs) values.multiply(dp, smem.dout[place.stage]);
        queries.find_seen(lse);
        if constexpr (kNeedsDq) {
            if (number > 0) hand_over_dq();
        }
        wgmma_wait_group<kNeedsDs ? 1 : 0>();
        wgmma_pin(s);
        const bool masked = queries.is_masked();
        find_p<0, kFirstLate>(queries, masked, smem, place.stage, lse, s, p);
        if constexpr (kNeedsDs) {
            wgmma_wait_group<0>();
            wgmma_pin(dp);
            find_late_p_and_ds<kFirstLate>(queries, masked, smem, place.stage, lse, s, dp, p, ds);
        }
        if constexpr (kNeedsDq)
            store_transposed(smem.ds[number % kDsStages] + wg * BlockRows::kBytes, ds, warp_idx);
        if constexpr (kNeedsDv) multiply(dv, p, smem.dout[place.stage]);
        const auto add_dk = [&] {
            if constexpr (kNeedsDk) multiply(dk, ds, smem.q[place.stage]);
        };
        if constexpr (kNeedsDq) {
            fence_proxy_async();
            named_barrier_sync(NB_DS, 128 * kConsumers);
            if (!kInTurn || number % kConsumers == wg) {
                float dq[kDqColumns / 2];
                multiply_ds<KeyRows>(dq, desc_ds(), desc_k(kInTurn ? 0 : wg * kDqColumns));
                wgmma_wait_group<1>();
                wgmma_pin(dv);
                free_dout();
                add_dk();
                wgmma_wait_group<kNeedsDk ? 1 : 0>();
                wgmma_pin(dq);
                const u32 use = kInTurn ? number / kPlaces : number;
                mbarrier_wait_parity(smem_address(&smem.bar_dq_free[wg]), use & 1 ^ 1);
                store_dq(smem.dq[wg], dq);
            } else {
                wgmma_wait_group<0>();
                wgmma_pin(dv);
                free_dout();
                add_dk();
            }
        } else {
            add_dk();
            wgmma_wait_group<kNeedsDk ? 1 : 0>();
            wgmma_pin(dv);
            free_dout();
        }
        wgmma_wait_group<0>();
        wgmma_pin(dk);
        free_q();
    }

    // Of dS, and of columns of K, for dQ.
    __device__ __forceinline__ u64 desc_ds() const {
        return BlockRows::k_major(smem_address(smem.ds[number % kDsStages]));
    }
    __device__ __forceinline__ u64 desc_k(int column) const {
        return KeyRows::mn_major(smem_address(smem.k) + column / 64 * KeyRows::kBytes + column % 64 * 2);
    }
    // dQ of the step before to the thread that adds it, if the consumer has some.
    __device__ __forceinline__ void hand_over_dq() const {
        if (kInTurn && number % kConsumers == wg) return;
        fence_proxy_async();
        mbarrier_arrive(smem_address(&smem.bar_dq_full[wg]));
    }

    // kWide: waits until both consumers have read dS of the step before.
    __device__ __forceinline__ void wait_for_ds() const {
        mbarrier_wait_parity(smem_address(&smem.bar_ds_free), number & 1 ^ 1);
    }

#if !FLEX
    // kWide. P^T takes the consumer's place of dS in shared memory until dV is done. For dS, P is kept in
    // float16, times 2^14 so that it has its full precision down to 2^-28: eight times bfloat16's.
    template <class Keys, class Values>
    __device__ __forceinline__ void take_wide_block(Queries<SharedMemoryPlan>& queries, const Keys& keys,
                                                    const Values& values, Dk& dk, Dv& dv) {
        Scores s;
        Packed p;  // P^T for dV, the factors of dS^T, dS^T
        unsigned char* own = smem.ds[0] + wg * BlockRows::kBytes;
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[place.stage]), place.parity);
        keys.multiply(s, smem.q[place.stage]);
        const RowNumbers<true> lse(smem.lse[place.stage]);
        wgmma_wait_group<0>();
        wgmma_pin(s);
        const bool masked = queries.is_masked();
        find_p(queries, masked, smem, place.stage, lse, s, p);
        if constexpr (kNeedsDq) {
            wait_for_ds();
        } else {
            named_barrier_sync(NB_KEYS + wg, 128);  // dK of the step before has been computed
        }
        if constexpr (kNeedsDv) {
            store_transposed(own, p, warp_idx);
            fence_proxy_async();
            named_barrier_sync(NB_KEYS + wg, 128);
        }
        wait_for_dout();
        if constexpr (kNeedsDv) multiply_stored(dv, own, smem.dout[place.stage]);
#pragma unroll
        for (int i = 0; i < kBlockRows / 4; ++i)
            p[i] = pack_16bit<Dtype::kF16>(s[2 * i] * kFactorScale, s[2 * i + 1] * kFactorScale);
        values.multiply(s, smem.dout[place.stage]);
        wgmma_wait_group<0>();
        wgmma_pin(s);
        wgmma_pin(dv);
        wide_gradients(s, p);
        if (masked) queries.hide(p);
        free_dout();
        if constexpr (kNeedsDv) named_barrier_sync(NB_KEYS + wg, 128);  // P has been read
        store_transposed(own, p, warp_idx);
        fence_proxy_async();
        if constexpr (kNeedsDq) {
            named_barrier_sync(NB_DS, 128 * kConsumers);
            add_dk_and_find_dq(s, dk);
        } else {
            named_barrier_sync(NB_KEYS + wg, 128);
            multiply_stored(dk, own, smem.q[place.stage]);
            wgmma_wait_group<0>();
            wgmma_pin(dk);
        }
        free_q();
    }
    static constexpr float kFactorScale = 16384.0f;
    // dS^T in place of its factors in float16, times kFactorScale.
    __device__ __forceinline__ void wide_gradients(const Scores& dp, Packed& p) const {
        constexpr float kUnscale = 1.0f / kFactorScale;
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
            const float2 delta = of_columns(smem.delta[place.stage], j);
            const float x = delta.x * -kUnscale, y = delta.y * -kUnscale;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = 4 * j + 2 * r;
                const float2 factors = unpack_16bit<Dtype::kF16>(p[i / 2]);
                p[i / 2] = pack_16bit<kDtype>(factors.x * fmaf(dp[i], kUnscale, x),
                                              factors.y * fmaf(dp[i + 1], kUnscale, y));
            }
        }
    }
    // The consumer's half of the columns of dQ, 64 and 32 of them in the registers of S^T, and dK beside the
    // last.
    __device__ __forceinline__ void add_dk_and_find_dq(Scores& s, Dk& dk) const {
        const int whole = 128 * wg, half = 64 + 32 * wg;  // first columns of both passes
        multiply_ds<KeyRows>(s, desc_ds(), desc_k(whole));
        wgmma_wait_group<0>();
        wgmma_pin(s);
        mbarrier_wait_parity(smem_address(&smem.bar_dq_free[wg]), number & 1 ^ 1);
        store_dq(smem.dq[0] + whole * kColumnBytes, s);
        multiply_ds<KeyRows>(wgmma_columns<0, 16>(s), desc_ds(), desc_k(half));
        if constexpr (kNeedsDk) multiply_stored(dk, smem.ds[0] + wg * BlockRows::kBytes, smem.q[place.stage]);
        wgmma_wait_group<0>();
        wgmma_pin(dk);
        wgmma_pin(s);
        mbarrier_arrive(smem_address(&smem.bar_ds_free));
        store_dq(smem.dq[0] + half * kColumnBytes, wgmma_columns<0, 16>(s));
        fence_proxy_async();
        mbarrier_arrive(smem_address(&smem.bar_dq_full[wg]));
    }
    // D += A B, with A = P^T or dS^T in shared memory.
    template <int kCount>
    __device__ __forceinline__ static void multiply_stored(float (&d)[kCount], const unsigned char* a,
                                                           const unsigned char* b) {
        u64 desc_a = BlockRows::mn_major(smem_address(a));
        asm volatile("" : "+l"(desc_a));
        const u64 desc_b = BlockRows::mn_major(smem_address(b));
        wgmma_pin(d);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockRows / 16; ++k)
            wgmma_ss<kDtype, Major::kMn, Major::kMn>(d, desc_a + k * BlockRows::kStepMn,
                                                     desc_b + k * BlockRows::kStepMn, true);
        wgmma_commit_group();
    }
#endif
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
        using Blocks = AddedBlocks<KeyRows, SharedMemoryPlan>;
        if (warp_idx == 0) {
            if (elect_one_sync()) load<KeyRows>(params, smem, tile);
        } else if (warp_idx == 1) {
            if (kNeedsDq && elect_one_sync())
                add_dq<kDqParts, kPlaces, kPartBytes, Blocks>(params, smem, tile);
        } else if (warp_idx == 2) {
            trim<KeyRows>(params, smem, tile);
        } else if (kNeedsDq && elect_one_sync()) {
            keep_turns<Blocks>(params, smem, tile);
        }
        return;
    }
    setmaxnreg_inc<kRegisters>();
    Consumer(params, smem, tile, wg_idx - 1, warp_idx).run();
}
