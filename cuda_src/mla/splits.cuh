// The scratch for the splits of a request, which an attention kernel writes and mla_combine merges. S_t are
// the scores of a row in base 2, and t runs over the tokens of the split:
//
//   o_accum         [max_splits, rows, 512] sum_t 2^S_t V_t / 2^o_scale_log2: float16; float32 in fp16 calls
//   o_scale_log2    [max_splits, rows, 2]   one for columns 0-255, one for columns 256-511
//   lse_accum_log2  [max_splits, rows]      log2 sum_t 2^S_t; -inf without tokens
//   max_accum_log2  [max_splits, rows]      max_t S_t; prefill only
//
// rows = s_q * h_q, row = token * h_q + head. The columns of a row are in the order in which a quad of lanes
// holds them. Let n be the groups of eight columns in a unit of 16 bytes: 4 in float16, 2 in float32. Then
// unit 4 c + l has columns 8 (n c + g) + 2 l + {0, 1} for g = 0 .. n - 1. The merged row is put in order
// once, so that the splits need not be.
//
// Float16 halves the time to store and merge a split. With a power of two per half row it keeps 11 bits, and
// the result is rounded to the 8 bits of bf16. Calls in fp16 need more than 11 bits.
#pragma once
#include "common/types.cuh"

constexpr int kScaleHalves = 2;

template <Dtype kDtype>
constexpr bool kFloat16Splits = kDtype == Dtype::kBf16;
template <Dtype kDtype>
constexpr int kGroupsPerUnit = kFloat16Splits<kDtype> ? 4 : 2;
template <Dtype kDtype>
constexpr int kUnitsPerHalf = 256 / (2 * kGroupsPerUnit<kDtype>);

// Index of a row in lse and max_logits.
template <class Params>
__device__ __forceinline__ i64 lse_index(const Params& params, int req, int token, int head) {
    return (static_cast<i64>(req) * params.h_q + head) * params.s_q + token;
}

// Converts base 2 to the base of lse and max_logits, which is e in decoding.
template <class Params>
__device__ __forceinline__ float lse_factor(const Params& params) {
    if constexpr (requires { params.lse_factor; }) {
        return params.lse_factor;
    } else {
        return kLn2;
    }
}

// The power of two that brings a float32 row into the range of float16. It is 1 for splits in float32.
struct SplitScale {
    static constexpr u32 kTopExponent = 14, kBias = 127;
    float factor = 1.0f;

    SplitScale() = default;
    // `top` is the largest magnitude in the row. factor * top is in [2^14, 2^15).
    __device__ __forceinline__ explicit SplitScale(float top) {
        const u32 exponent = __float_as_uint(top) >> 23;
        factor = __uint_as_float(min_int(kTopExponent + 2 * kBias - exponent, 2 * kBias) << 23);
    }
    // log2 of the inverse.
    __device__ __forceinline__ float log2() const {
        return static_cast<float>(static_cast<int>(kBias) - static_cast<int>(__float_as_uint(factor) >> 23));
    }
};
