// Attention sinks: a score per head that takes part in the softmax of every row and has no value.
#pragma once
#include "common/float_dtypes.cuh"
#include "common/math.cuh"
#include "common/types.cuh"

// The sum of a row's probabilities with the head's sink among them, where `m` is their reference in base 2.
// `dtype`: common/float_dtypes.cuh.
__device__ __forceinline__ float add_sink(const void* attn_sink, int dtype, int head, float m, float l) {
    if (attn_sink == nullptr) return l;
    return l + exp2_approx(load_float(attn_sink, dtype, head) * kLog2E - m);
}
