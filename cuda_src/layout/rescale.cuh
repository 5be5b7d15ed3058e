// Rescaling O when references of the softmax have risen (mla/softmax.cuh).
#pragma once
#include "common/types.cuh"
#include "layout/fragment_rows.cuh"

// How far (base 2) a row's largest score may exceed the reference m_ref of its softmax before m_ref follows.
constexpr int kLazyLog2 = 8;
// So large may a probability be, and the sum of a thread's probabilities of a row.
constexpr float kLazySum = 1 << kLazyLog2;

// Beyond this exponent (base 2) LazySoftmax does not take fma(s, scale, -(m scale)): the product that is
// subtracted is rounded by up to 2^-24 of itself, which is an error of the exponent. With a score of -1e9, as
// models fill what they mask, it is up to 64. So references are subtracted first, by __fsub_rn, which is not
// contracted with a product before it. OnlineSoftmax has no registers for it: the scores of MLA, which has no
// functions, are right up to 2^27 in base 2.
constexpr float kFarExponent = 16384.0f;

// Multiplies a fragment's rows by a factor each.
template <int kCount>
__device__ __forceinline__ void multiply_rows(float (&o)[kCount], float factor0, float factor1) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) o[j] *= j & 2 ? factor1 : factor0;
}

// The same, where a factor other than 1 is rare. All lanes of a warp call.
template <int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], float factor0, float factor1) {
    if (__any_sync(0xffffffff, factor0 != 1.0f || factor1 != 1.0f)) multiply_rows(o, factor0, factor1);
}

// The same by factors of 64 rows in shared memory, which the leading lanes read.
template <int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], const float* row_scale, int warp_idx) {
    float scale0 = 1.0f, scale1 = 1.0f;
    if (leads_quad()) {
        const float* first = first_row(row_scale, warp_idx);
        scale0 = first[0];
        scale1 = first[8];
    }
    if (__any_sync(0xffffffff, scale0 != 1.0f || scale1 != 1.0f)) {
        scale0 = quad_broadcast(scale0);
        scale1 = quad_broadcast(scale1);
        multiply_rows(o, scale0, scale1);
    }
}
