// P and dS of 64 keys and a block of queries, in registers. The score function and the masks are of Queries
// (mha/interval_queries.cuh or flex/listed_queries.cuh).
#pragma once
#include "mha/backward_cta.cuh"

// Numbers of the thread's queries in columns 8 j and up.
__device__ __forceinline__ float2 of_columns(const float (&rows)[kBlockRows], int j) {
    return reinterpret_cast<const float2*>(rows)[4 * j + lane_index() % 4];
}
template <class Plan>
__device__ __forceinline__ float2 weights_of_columns(const Plan& smem, u32 stage, int j) {
#if !FLEX
    if constexpr (kWeights) return of_columns(smem.weights[stage], j);
#endif
    return {1.0f, 1.0f};
}

// A number of each of a thread's queries, by columns: in registers from here on, or where it is in shared
// memory.
template <bool kInRegisters>
class RowNumbers {
  public:
    __device__ __forceinline__ explicit RowNumbers(const float (&rows)[kBlockRows]) : rows(rows) {
        if constexpr (kInRegisters) {  // the loads stay where they are written
            const u32 from = smem_address(rows) + 4 * first_query_of_thread();
#pragma unroll
            for (int j = 0; j < kBlockRows / 8; ++j) pairs[j] = load_shared_pair(from + 32 * j);
        }
    }
    __device__ __forceinline__ float2 operator[](int j) const {
        if constexpr (kInRegisters) return pairs[j];
        return of_columns(rows, j);
    }

  private:
    const float (&rows)[kBlockRows];
    float2 pairs[kInRegisters ? kBlockRows / 8 : 1];
};

// From scores and lse: P^T in 16 bits, times its weights, and in place of the scores the factors of dS^T in
// float32; in columns 8 kFirst to 8 kEnd - 1.
template <bool kMasked, int kFirst, int kEnd, class Plan, class Pairs>
__device__ __forceinline__ void exponentials(const Queries<Plan>& queries, const Plan& smem, u32 stage,
                                             const Pairs& lses, Scores& s, Packed& p) {
    const typename Queries<Plan>::Function function(queries);
#pragma unroll
    for (int j = kFirst; j < kEnd; ++j) {
        const float2 lse = lses[j];
        float2 reference = {0.0f, 0.0f};
#if FLEX
        if constexpr (kMasked && ScoreMod::kIsThere) reference = of_columns(smem.references[stage], j);
#endif
        float e[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int i = 4 * j + c;
            const float2 one = function.template exponential<kMasked>(i, s[i], (c & 1) ? lse.y : lse.x,
                                                                      (c & 1) ? reference.y : reference.x);
            e[c] = one.x;
            if constexpr (kMasked) e[c] = queries.seen >> i & 1 ? one.x : 0.0f;
            // The derivative may be no number where nothing is left of P.
            s[i] = !kHasDerivative ? e[c] : kFlex && e[c] == 0.0f ? 0.0f : e[c] * one.y;
        }
        const float2 weights = weights_of_columns(smem, stage, j);
#pragma unroll
        for (int r = 0; r < 2; ++r)
            p[2 * j + r] = kWeights ? pack_16bit<kDtype>(e[2 * r] * weights.x, e[2 * r + 1] * weights.y)
                                    : pack_16bit<kDtype>(e[2 * r], e[2 * r + 1]);
    }
}
// The same, and what masks hide is 0 in P. In the factors too with FLEX.
template <int kFirst = 0, int kEnd = kBlockRows / 8, class Plan, class Pairs>
__device__ __forceinline__ void find_p(const Queries<Plan>& queries, bool masked, const Plan& smem, u32 stage,
                                       const Pairs& lse, Scores& s, Packed& p) {
#if FLEX
    if (masked) {
        exponentials<true, kFirst, kEnd>(queries, smem, stage, lse, s, p);
    } else {
        exponentials<false, kFirst, kEnd>(queries, smem, stage, lse, s, p);
    }
#else
    exponentials<false, kFirst, kEnd>(queries, smem, stage, lse, s, p);
    // After the exponentials, behind a branch across which ptxas moves none: that would cost registers.
    if (masked) queries.template hide<kFirst, kEnd>(p);
#endif
}

// dS^T of columns 8 j and up, from its factors and dP^T. kZeros: 0 where the factor is 0, since dP may be NaN
// there.
template <bool kZeros, class Plan>
__device__ __forceinline__ void find_ds_of_columns(const Plan& smem, u32 stage, int j, const float* factors,
                                                   const float* dp, Packed& ds) {
    const float2 delta = of_columns(smem.delta[stage], j), weights = weights_of_columns(smem, stage, j);
    float value[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const float one = dp[c], weighted = kWeights ? one * ((c & 1) ? weights.y : weights.x) : one;
        value[c] = factors[c] * (weighted - ((c & 1) ? delta.y : delta.x));
        if (kZeros && factors[c] == 0.0f) value[c] = 0.0f;
    }
    ds[2 * j] = pack_16bit<kDtype>(value[0], value[1]);
    ds[2 * j + 1] = pack_16bit<kDtype>(value[2], value[3]);
}
template <bool kZeros, class Plan>
__device__ __forceinline__ void find_ds(const Plan& smem, u32 stage, const Scores& factors, const Scores& dp,
                                        Packed& ds) {
#pragma unroll
    for (int j = 0; j < kBlockRows / 8; ++j)
        find_ds_of_columns<kZeros>(smem, stage, j, factors + 4 * j, dp + 4 * j, ds);
}

// P^T from column 8 kFirst on, and all of dS^T. Nothing stands between them, so that the compiler computes dS
// while exponentials wait for the unit that all warps share. dS is 0 where masks hide a pair: dP may be NaN
// there.
template <int kFirst, class Plan, class Pairs>
__device__ __forceinline__ void find_late_p_and_ds(const Queries<Plan>& queries, bool masked,
                                                   const Plan& smem, u32 stage, const Pairs& lse, Scores& s,
                                                   const Scores& dp, Packed& p, Packed& ds) {
    constexpr int kEnd = kBlockRows / 8;
#if FLEX
    if (masked) {
        exponentials<true, kFirst, kEnd>(queries, smem, stage, lse, s, p);
        find_ds<true>(smem, stage, s, dp, ds);
    } else {
        exponentials<false, kFirst, kEnd>(queries, smem, stage, lse, s, p);
        find_ds<false>(smem, stage, s, dp, ds);
    }
#else
    exponentials<false, kFirst, kEnd>(queries, smem, stage, lse, s, p);
    find_ds<false>(smem, stage, s, dp, ds);
    if (masked) {
        queries.template hide<kFirst, kEnd>(p);
        queries.hide(ds);
    }
#endif
}
