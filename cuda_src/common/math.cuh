// Approximate base-2 math, packing to 16-bit types and back.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Relative error 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x. A correctly rounded division calls a subroutine in rare cases. If a loop has such a call, ptxas
// keeps few values in uniform registers in the whole kernel.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger of two, NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// Rounds two floats to nearest even and packs them: `lo` in the low half.
template <Dtype kDtype>
__device__ __forceinline__ u32 pack_16bit(float lo, float hi) {
    u32 packed;
    if constexpr (kDtype == Dtype::kBf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    }
    return packed;
}

// Two float16, the first in the low half.
__device__ __forceinline__ float2 unpack_f16(u32 packed) {
    float2 pair;
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "mov.b32 {lo, hi}, %2;\n"
        "cvt.f32.f16 %0, lo;\n"
        "cvt.f32.f16 %1, hi;\n"
        "}\n"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
    return pair;
}
// What pack_16bit packed.
template <Dtype kDtype>
__device__ __forceinline__ float2 unpack_16bit(u32 packed) {
    if constexpr (kDtype == Dtype::kF16) return unpack_f16(packed);
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}
