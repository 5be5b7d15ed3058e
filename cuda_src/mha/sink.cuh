// Attention sinks: a score per head that takes part in the softmax of every row and has no value.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

// The sum of a row's probabilities with the head's sink among them, where `m` is their reference in base 2.
// `dtype` of the sinks: 0 float32, 1 bf16, 2 float16, 3 float64.
__device__ __forceinline__ float add_sink(const void* attn_sink, int dtype, int head, float m, float l) {
    if (attn_sink == nullptr) return l;
    float sink;
    if (dtype == 0) {
        sink = static_cast<const float*>(attn_sink)[head];
    } else if (dtype == 3) {
        sink = static_cast<float>(static_cast<const double*>(attn_sink)[head]);
    } else {
        const u32 bits = static_cast<const u16*>(attn_sink)[head];
        sink = dtype == 1 ? __uint_as_float(bits << 16) : unpack_f16(bits).x;
    }
    return l + exp2_approx(sink * kLog2E - m);
}
