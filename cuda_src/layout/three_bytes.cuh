// Sixteen float32 of a thread as three bytes each: sign, exponent and 15 bits of the fraction, in twelve words.
//
// Of four floats, words 3 i to 3 i + 2 have the upper bytes of the first three, and in their lowest bytes those of the fourth. Infinite
// stays infinite and NaN stays NaN.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ void pack_three_bytes(const float* f, u32 (&words)[12]) {
    // What is cut off is half a unit on average; so that half is added before.
    constexpr float kHalfUnit = 1.0f + 1.0f / 65536;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 fourth = __float_as_uint(f[4 * i + 3] * kHalfUnit);
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            // Byte k + 1 of the fourth below the upper bytes
            words[3 * i + k] = __byte_perm(__float_as_uint(f[4 * i + k] * kHalfUnit), fourth, 0x3215 + k);
        }
    }
}

// From three vectors of 16 bytes in shared memory, kDistance bytes apart. All in one piece of assembly, or wgmmas that accumulate on the
// floats are serialised.
template <int kDistance>
__device__ __forceinline__ void load_three_bytes(float* f, u32 src) {
    u32 bits[16];
#define RAWMLA_CUT(TO, FROM) "and.b32 " TO ", " FROM ", 0xffffff00;\n"
#define RAWMLA_FOUR(W0, W1, W2, F0, F1, F2, F3) \
    RAWMLA_CUT(F0, W0)                          \
    RAWMLA_CUT(F1, W1)                          \
    RAWMLA_CUT(F2, W2)                          \
    "prmt.b32 low, " W0 ", " W1 ", 0x0400;\nprmt.b32 low, low, " W2 ", 0x4210;\n" RAWMLA_CUT(F3, "low")
    asm volatile(
        "{\n"
        ".reg .b32 low, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3;\n"
        "ld.shared.v4.b32 {a0, a1, a2, a3}, [%16];\n"
        "ld.shared.v4.b32 {b0, b1, b2, b3}, [%16 + %17];\n"
        "ld.shared.v4.b32 {c0, c1, c2, c3}, [%16 + 2 * %17];\n"    //
        RAWMLA_FOUR("a0", "a1", "a2", "%0", "%1", "%2", "%3")      //
        RAWMLA_FOUR("a3", "b0", "b1", "%4", "%5", "%6", "%7")      //
        RAWMLA_FOUR("b2", "b3", "c0", "%8", "%9", "%10", "%11")    //
        RAWMLA_FOUR("c1", "c2", "c3", "%12", "%13", "%14", "%15")  //
        "}\n"
        : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3]), "=r"(bits[4]), "=r"(bits[5]),
          "=r"(bits[6]), "=r"(bits[7]), "=r"(bits[8]), "=r"(bits[9]), "=r"(bits[10]), "=r"(bits[11]),
          "=r"(bits[12]), "=r"(bits[13]), "=r"(bits[14]), "=r"(bits[15])
        : "r"(src), "n"(kDistance)
        : "memory");
#undef RAWMLA_FOUR
#undef RAWMLA_CUT
#pragma unroll
    for (int i = 0; i < 16; ++i) f[i] = __uint_as_float(bits[i]);
}
