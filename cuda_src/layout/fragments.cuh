// From matrix fragments to 16-byte accesses. In a fragment (ptx/wgmma.cuh) the four lanes of a quad hold a
// pair each of eight neighbouring columns; in a 16-byte access one lane holds all eight.
#pragma once
#include "common/types.cuh"

// Transposes a 4 x 4 matrix of words held by a quad (row = lane % 4, column = index). All lanes of the warp
// call.
__device__ __forceinline__ void quad_transpose(u32 (&v)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const u32 r0 = __shfl_xor_sync(0xffffffff, odd ? v[0] : v[1], 1);
    const u32 r1 = __shfl_xor_sync(0xffffffff, odd ? v[2] : v[3], 1);
    v[0] = odd ? r0 : v[0];
    v[1] = odd ? v[1] : r0;
    v[2] = odd ? r1 : v[2];
    v[3] = odd ? v[3] : r1;
    const u32 r2 = __shfl_xor_sync(0xffffffff, upper ? v[0] : v[2], 2);
    const u32 r3 = __shfl_xor_sync(0xffffffff, upper ? v[1] : v[3], 2);
    v[0] = upper ? r2 : v[0];
    v[1] = upper ? r3 : v[1];
    v[2] = upper ? v[2] : r2;
    v[3] = upper ? v[3] : r3;
}

// The same of 2 x 2 matrices held by pairs of lanes (row = lane % 2).
__device__ __forceinline__ void pair_transpose(u32 (&v)[2]) {
    const bool odd = threadIdx.x & 1;
    const u32 r = __shfl_xor_sync(0xffffffff, odd ? v[0] : v[1], 1);
    v[0] = odd ? r : v[0];
    v[1] = odd ? v[1] : r;
}

// Stores eight columns of a row of 16-bit elements, of which `count` exist. Eight begin at a multiple of 16
// bytes.
__device__ __forceinline__ void store_columns(u16* dst, const u32 (&pairs)[4], int count) {
    if (count >= 8) {
        *reinterpret_cast<uint4*>(dst) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) dst[i] = static_cast<u16>(pairs[i / 2] >> 16 * (i % 2));
}

// The functions below are single asm statements. Otherwise the compiler would interleave many calls, and run
// out of registers next to 128 accumulators. Their arguments a0 and a1, b0 and b1 and so on are the lane's
// pairs of neighbouring groups of eight columns.

// top[r] becomes the largest magnitude of itself and the pair of row r: a of row 0, b of row 1. The pair is
// reduced first, so that the chain through all columns has one step a pair.
__device__ __forceinline__ void max_magnitudes(float (&top)[2], float a0, float a1, float b0, float b1) {
    asm volatile(
        "{\n"
        ".reg .f32 w, x, y, z;\n"
        "abs.f32 w, %2;\n"
        "abs.f32 x, %3;\n"
        "abs.f32 y, %4;\n"
        "abs.f32 z, %5;\n"
        "max.f32 w, w, x;\n"
        "max.f32 y, y, z;\n"
        "max.f32 %0, %0, w;\n"
        "max.f32 %1, %1, y;\n"
        "}\n"
        : "+f"(top[0]), "+f"(top[1])
        : "f"(a0), "f"(a1), "f"(b0), "f"(b1));
}

// Stores 16 bytes: the pairs of four groups times `factor` in float16, or those of two groups in float32.
__device__ __forceinline__ void store_unit_f16(uint4* dst, float factor, float a0, float a1, float b0,
                                               float b1, float c0, float c1, float d0, float d1) {
    asm volatile(
        "{\n"
        ".reg .f32 x, y;\n"
        ".reg .b32 w0, w1, w2, w3;\n"
#define RAWMLA_PACK(WORD, LOW, HIGH) \
    "mul.f32 x, " LOW ", %1;\nmul.f32 y, " HIGH ", %1;\ncvt.rn.f16x2.f32 " WORD ", y, x;\n"
        RAWMLA_PACK("w0", "%2", "%3") RAWMLA_PACK("w1", "%4", "%5") RAWMLA_PACK("w2", "%6", "%7")
            RAWMLA_PACK("w3", "%8", "%9")
#undef RAWMLA_PACK
                "st.global.v4.b32 [%0], {w0, w1, w2, w3};\n"
                "}\n" ::"l"(dst),
        "f"(factor), "f"(a0), "f"(a1), "f"(b0), "f"(b1), "f"(c0), "f"(c1), "f"(d0), "f"(d1)
        : "memory");
}
__device__ __forceinline__ void store_unit_f32(uint4* dst, float a0, float a1, float b0, float b1) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(a0), "f"(a1), "f"(b0), "f"(b1)
                 : "memory");
}

// Stores four groups times `factor`, rounded to a 16-bit type. The lanes of a quad exchange their pairs: lane
// l stores the eight columns of group l to `dst`. All lanes of a warp call; `valid` ones store.
template <Dtype kDtype>
__device__ __forceinline__ void store_four_groups_16bit(u16* dst, bool valid, float factor, float a0,
                                                        float a1, float b0, float b1, float c0, float c1,
                                                        float d0, float d1) {
    // clang-format off
#define RAWMLA_PACK(WORD, LOW, HIGH, TYPE)                                                      \
    "mul.f32 x, " LOW ", %1;\n"                                                                 \
    "mul.f32 y, " HIGH ", %1;\n"                                                                \
    "cvt.rn." TYPE "x2.f32 " WORD ", y, x;\n"
#define RAWMLA_STORE(TYPE)                                                                      \
    asm volatile(                                                                               \
        "{\n"                                                                                   \
        ".reg .pred odd, upper, ok;\n"                                                          \
        ".reg .f32 x, y;\n"                                                                     \
        ".reg .b32 w0, w1, w2, w3, r0, r1;\n"                                                   \
        RAWMLA_PACK("w0", "%2", "%3", TYPE)                                                     \
        RAWMLA_PACK("w1", "%4", "%5", TYPE)                                                     \
        RAWMLA_PACK("w2", "%6", "%7", TYPE)                                                     \
        RAWMLA_PACK("w3", "%8", "%9", TYPE)                                                     \
        "setp.ne.u32 odd, %10, 0;\n"                                                            \
        "setp.ne.u32 upper, %11, 0;\n"                                                          \
        "setp.ne.u32 ok, %12, 0;\n"                                                             \
        "selp.b32 r0, w0, w1, odd;\n"                                                           \
        "selp.b32 r1, w2, w3, odd;\n"                                                           \
        "shfl.sync.bfly.b32 r0, r0, 1, 31, 0xffffffff;\n"                                       \
        "shfl.sync.bfly.b32 r1, r1, 1, 31, 0xffffffff;\n"                                       \
        "@odd mov.b32 w0, r0;\n"                                                                \
        "@!odd mov.b32 w1, r0;\n"                                                               \
        "@odd mov.b32 w2, r1;\n"                                                                \
        "@!odd mov.b32 w3, r1;\n"                                                               \
        "selp.b32 r0, w0, w2, upper;\n"                                                         \
        "selp.b32 r1, w1, w3, upper;\n"                                                         \
        "shfl.sync.bfly.b32 r0, r0, 2, 31, 0xffffffff;\n"                                       \
        "shfl.sync.bfly.b32 r1, r1, 2, 31, 0xffffffff;\n"                                       \
        "@upper mov.b32 w0, r0;\n"                                                              \
        "@upper mov.b32 w1, r1;\n"                                                              \
        "@!upper mov.b32 w2, r0;\n"                                                             \
        "@!upper mov.b32 w3, r1;\n"                                                             \
        "@ok st.global.v4.b32 [%0], {w0, w1, w2, w3};\n"                                        \
        "}\n" ::"l"(dst), "f"(factor), "f"(a0), "f"(a1), "f"(b0), "f"(b1), "f"(c0), "f"(c1),    \
        "f"(d0), "f"(d1), "r"(threadIdx.x & 1), "r"(threadIdx.x & 2), "r"(static_cast<u32>(valid)) \
        : "memory")
    // clang-format on
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_STORE("bf16");
    } else {
        RAWMLA_STORE("f16");
    }
#undef RAWMLA_STORE
#undef RAWMLA_PACK
}
