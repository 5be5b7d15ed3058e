// Attention sinks: a score per head that takes part in the softmax of every row and has no value.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

// A head's sink; `dtype`: 0 float32, 1 bf16, 2 float16, 3 float64.
__device__ __forceinline__ float load_sink(const void* attn_sink, int dtype, int head) {
    if (dtype == 0) return static_cast<const float*>(attn_sink)[head];
    if (dtype == 3) return static_cast<float>(static_cast<const double*>(attn_sink)[head]);
    const u32 bits = static_cast<const u16*>(attn_sink)[head];
    return dtype == 1 ? __uint_as_float(bits << 16) : unpack_f16(bits).x;
}

// The sum of a row's probabilities with the head's sink among them, where `m` is their reference in base 2.
__device__ __forceinline__ float add_sink(const void* attn_sink, int dtype, int head, float m, float l) {
    if (attn_sink == nullptr) return l;
    return l + exp2_approx(load_sink(attn_sink, dtype, head) * kLog2E - m);
}
