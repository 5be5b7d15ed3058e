// Conversions between bf16 and the numbers of quantised caches: e4m3 values, e8m0 scales.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

constexpr float kE4m3Max = 448.0f;

// The two bf16 of a word as float.
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

// Per half, the larger number; a NaN counts only against another NaN.
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
    u32 larger;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
__device__ __forceinline__ u32 abs_bf16x2(u32 pair) { return pair & 0x7fff7fff; }

// Four floats as e4m3, x in the lowest byte: to nearest even, saturating at 448, NaN to 0x7f.
__device__ __forceinline__ u32 pack_e4m3(float x, float y, float z, float w) {
    u32 packed;
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi};\n"
        "}\n"
        : "=r"(packed)
        : "f"(x), "f"(y), "f"(z), "f"(w));
    return packed;
}

// Four e4m3 as float16, exactly: the lower two bytes, the upper two.
__device__ __forceinline__ void e4m3_to_f16(u32 codes, u32& low, u32& high) {
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "mov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\n"
        "cvt.rn.f16x2.e4m3x2 %1, hi;\n"
        "}\n"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

// The same of e5m2.
__device__ __forceinline__ void e5m2_to_f16(u32 codes, u32& low, u32& high) {
    asm("{\n"
        ".reg .b16 lo, hi;\n"
        "mov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e5m2x2 %0, lo;\n"
        "cvt.rn.f16x2.e5m2x2 %1, hi;\n"
        "}\n"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

// Four e4m3 times a scale, each product rounded to float and then to bf16. The lowest byte comes in the low
// half of the first word.
__device__ __forceinline__ uint2 dequantize_e4m3(u32 codes, float scale) {
    u32 low, high;
    e4m3_to_f16(codes, low, high);
    const float2 first = unpack_f16(low), second = unpack_f16(high);
    return make_uint2(pack_16bit<Dtype::kBf16>(first.x * scale, first.y * scale),
                      pack_16bit<Dtype::kBf16>(second.x * scale, second.y * scale));
}

// 2^(code - 127); 255 is NaN.
__device__ __forceinline__ float e8m0_value(u32 code) {
    constexpr u32 kTwoToMinus127 = 0x00400000, kCodeNaN = 255;
    if (code == kCodeNaN) return kNaN;
    return __uint_as_float(code == 0 ? kTwoToMinus127 : code << 23);
}
