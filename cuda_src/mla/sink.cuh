// Attention sinks: a score per head that takes part in the softmax of every row and has no value.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "ptx/memory.cuh"

// The factor of an attention sink on a head's output, exp(lse) / (exp(lse) + exp(sink)), with lse given in
// base 2. It is 1 without sinks.
__device__ __forceinline__ float sink_factor(const float* attn_sink, int head, float lse_log2) {
    if (attn_sink == nullptr) return 1.0f;
    return reciprocal_approx(1.0f + exp2_approx(load_global(attn_sink + head) * kLog2E - lse_log2));
}
