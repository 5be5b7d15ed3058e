// Scratch for the splits of split requests, which a decode kernel writes and mla_combine merges. For a split with scores
// S (base 2) of a query row:
//
//  o_accum         [max_splits, rows, 512]  numerator, divided by 2^o_scale_log2: float16 for bf16 calls, float32 for fp16
//  lse_accum_log2  [max_splits, rows]       log2 sum_t 2^S_t, -inf where there is no token
//  o_scale_log2    [max_splits, rows, 2]    of columns 0-255 and 256-511: numerator sum_t 2^S_t V_t = o_accum 2^o_scale_log2
//  max_accum_log2  [max_splits, rows]       max_t S_t, in prefill only
//
// rows = s_q * h_q, row = token * h_q + head. A row's columns lie in the order in which a quad of lanes holds them: 16-byte unit
// 4 c + l has columns 8 (n c + g) + 2 l + {0, 1} for g = 0 .. n - 1, with n = 4 groups of eight columns in float16, 2 in float32.
// They come to their own order once, in the merged row, and not in every split.
//
// Float16 halves what a split costs to store and to merge. With a power of two per half row it has 11 bits where bf16, to which the
// result is rounded, has 8; fp16 calls need more than that.
#pragma once
#include "common/types.cuh"

constexpr int kScaleHalves = 2;

template <Dtype kDtype>
constexpr bool kFloat16Splits = kDtype == Dtype::kBf16;
template <Dtype kDtype>
constexpr int kGroupsPerUnit = kFloat16Splits<kDtype> ? 4 : 2;
template <Dtype kDtype>
constexpr int kUnitsPerHalf = 256 / (2 * kGroupsPerUnit<kDtype>);

// Of a row of a request in lse and max_logits.
template <class Params>
__device__ __forceinline__ i64 lse_index(const Params& params, int req, int token, int head) {
    return (static_cast<i64>(req) * params.h_q + head) * params.s_q + token;
}

// From base 2 to the base of lse and max_logits: natural in decoding.
template <class Params>
__device__ __forceinline__ float lse_factor(const Params& params) {
    if constexpr (requires { params.lse_factor; }) {
        return params.lse_factor;
    } else {
        return kLn2;
    }
}

// The power of two that brings a float32 row into float16's range; 1 for float32 splits.
struct SplitScale {
    static constexpr u32 kTopExponent = 14, kBias = 127;
    float factor = 1.0f;

    SplitScale() = default;
    // `top`: the largest magnitude in the row; factor * top is in [2^14, 2^15).
    __device__ __forceinline__ explicit SplitScale(float top) {
        const u32 exponent = __float_as_uint(top) >> 23;
        factor = __uint_as_float(min_int(kTopExponent + 2 * kBias - exponent, 2 * kBias) << 23);
    }
    // Of the number that undoes it.
    __device__ __forceinline__ float log2() const {
        return static_cast<float>(static_cast<int>(kBias) - static_cast<int>(__float_as_uint(factor) >> 23));
    }
};
