// Warpgroup matrix multiply-accumulate, B from shared memory, A from shared memory (ss) or registers (rs), float32
// accumulators.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". All four warps of a warpgroup issue, converged.
//
// Accumulator register i of thread t (warp w = t / 32 % 4, lane l = t % 32) of m64nN holds
//   row = 16 w + l / 4 + 8 ((i >> 1) & 1),   column = 8 (i >> 2) + 2 (l % 4) + (i & 1).
// Element i of 8 of an A fragment (64 x 16, two elements per register) has the same row and column.
#pragma once
#include "common/types.cuh"

// Before the first wgmma of a batch and after ordinary code touched its accumulators.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of accumulators across a fence or a wait.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&acc)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// d (+)= A B^T: A 64 x 16 and B 64 x 16, both K-major.
template <Dtype kDtype>
__device__ __forceinline__ void wgmma_m64n64k16_ss(float (&d)[32], u64 desc_a, u64 desc_b, bool accumulate) {
#define RAWMLA_WGMMA(TYPE)                                                                                \
    asm volatile(                                                                                         \
        "{\n"                                                                                             \
        ".reg .pred p;\n"                                                                                 \
        "setp.ne.b32 p, %34, 0;\n"                                                                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                       \
        " {"                                                                                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                  \
        "}, %32, %33, p, 1, 1, 0, 0;\n"                                                                   \
        "}\n"                                                                                             \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),      \
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                                           \
        : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)))
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_WGMMA("bf16");
    } else {
        RAWMLA_WGMMA("f16");
    }
#undef RAWMLA_WGMMA
}

// d (+)= A B^T: A 64 x 16 in registers, which must not change before the wait; B 64 x 16 K-major.
template <Dtype kDtype>
__device__ __forceinline__ void wgmma_m64n64k16_rs(float (&d)[32], const u32 (&a)[4], u64 desc_b,
                                                   bool accumulate) {
#define RAWMLA_WGMMA(TYPE)                                                                                \
    asm volatile(                                                                                         \
        "{\n"                                                                                             \
        ".reg .pred p;\n"                                                                                 \
        "setp.ne.b32 p, %37, 0;\n"                                                                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                       \
        " {"                                                                                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                  \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"                                                     \
        "}\n"                                                                                             \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),        \
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),      \
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),      \
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(static_cast<int>(accumulate)))
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_WGMMA("bf16");
    } else {
        RAWMLA_WGMMA("f16");
    }
#undef RAWMLA_WGMMA
}

// d (+)= A B^T: A 64 x 16, K-major, or MN-major (its transpose's rows contiguous); B 16 x 16 K-major.
template <Dtype kDtype, bool kMnMajorA = false>
__device__ __forceinline__ void wgmma_m64n16k16_ss(float (&d)[8], u64 desc_a, u64 desc_b, bool accumulate) {
#define RAWMLA_WGMMA(TYPE)                                                                               \
    asm volatile(                                                                                        \
        "{\n"                                                                                            \
        ".reg .pred p;\n"                                                                                \
        "setp.ne.b32 p, %10, 0;\n"                                                                       \
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                                      \
        " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, 0;\n"                                  \
        "}\n"                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
        : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)), "n"(kMnMajorA ? 1 : 0))
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_WGMMA("bf16");
    } else {
        RAWMLA_WGMMA("f16");
    }
#undef RAWMLA_WGMMA
}

// The same, A in registers, which must not change before the wait.
template <Dtype kDtype>
__device__ __forceinline__ void wgmma_m64n16k16_rs(float (&d)[8], const u32 (&a)[4], u64 desc_b,
                                                   bool accumulate) {
#define RAWMLA_WGMMA(TYPE)                                                                               \
    asm volatile(                                                                                        \
        "{\n"                                                                                            \
        ".reg .pred p;\n"                                                                                \
        "setp.ne.b32 p, %13, 0;\n"                                                                       \
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                                      \
        " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n"                      \
        "}\n"                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(static_cast<int>(accumulate)))
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_WGMMA("bf16");
    } else {
        RAWMLA_WGMMA("f16");
    }
#undef RAWMLA_WGMMA
}

// d (+)= A B: A 64 x 16 K-major, B 16 x 256 with its columns contiguous (MN-major).
template <Dtype kDtype>
__device__ __forceinline__ void wgmma_m64n256k16_ss_bt(float (&d)[128], u64 desc_a, u64 desc_b,
                                                       bool accumulate) {
#define RAWMLA_WGMMA(TYPE)                                                                                  \
    asm volatile(                                                                                           \
        "{\n"                                                                                               \
        ".reg .pred p;\n"                                                                                   \
        "setp.ne.b32 p, %130, 0;\n"                                                                         \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                        \
        " {"                                                                                                \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                  \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                  \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"    \
        "}, %128, %129, p, 1, 1, 0, 1;\n"                                                                   \
        "}\n"                                                                                               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),   \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),          \
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),        \
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),        \
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),        \
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),        \
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),        \
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),        \
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),        \
          "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),        \
          "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),        \
          "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),        \
          "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]),        \
          "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]),  \
          "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), \
          "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), \
          "+f"(d[127])                                                                                      \
        : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)))
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_WGMMA("bf16");
    } else {
        RAWMLA_WGMMA("f16");
    }
#undef RAWMLA_WGMMA
}

// The operands of products with 64 accumulators, `o`: in the text, and behind it.
#define RAWMLA_ACCUMULATORS_64                                                         \
    "{"                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
    "}"
#define RAWMLA_OPERANDS_64(O)                                                                       \
    "+f"(O[0]), "+f"(O[1]), "+f"(O[2]), "+f"(O[3]), "+f"(O[4]), "+f"(O[5]), "+f"(O[6]), "+f"(O[7]), \
        "+f"(O[8]), "+f"(O[9]), "+f"(O[10]), "+f"(O[11]), "+f"(O[12]), "+f"(O[13]), "+f"(O[14]),    \
        "+f"(O[15]), "+f"(O[16]), "+f"(O[17]), "+f"(O[18]), "+f"(O[19]), "+f"(O[20]), "+f"(O[21]),  \
        "+f"(O[22]), "+f"(O[23]), "+f"(O[24]), "+f"(O[25]), "+f"(O[26]), "+f"(O[27]), "+f"(O[28]),  \
        "+f"(O[29]), "+f"(O[30]), "+f"(O[31]), "+f"(O[32]), "+f"(O[33]), "+f"(O[34]), "+f"(O[35]),  \
        "+f"(O[36]), "+f"(O[37]), "+f"(O[38]), "+f"(O[39]), "+f"(O[40]), "+f"(O[41]), "+f"(O[42]),  \
        "+f"(O[43]), "+f"(O[44]), "+f"(O[45]), "+f"(O[46]), "+f"(O[47]), "+f"(O[48]), "+f"(O[49]),  \
        "+f"(O[50]), "+f"(O[51]), "+f"(O[52]), "+f"(O[53]), "+f"(O[54]), "+f"(O[55]), "+f"(O[56]),  \
        "+f"(O[57]), "+f"(O[58]), "+f"(O[59]), "+f"(O[60]), "+f"(O[61]), "+f"(O[62]), "+f"(O[63])

// Columns kFirst to kFirst + 63 of d (accumulators; 128 columns of the product) += A B, as above with B 16 x 128: for kernels
// whose launch gives fewer than the 154 registers that n256 needs.
template <Dtype kDtype, int kFirst>
__device__ __forceinline__ void wgmma_m64n128k16_ss_bt(float (&d)[128], u64 desc_a, u64 desc_b,
                                                       bool accumulate) {
    float* o = d + kFirst;
#define RAWMLA_WGMMA(TYPE)                                                                      \
    asm volatile(                                                                               \
        "{\n"                                                                                   \
        ".reg .pred p;\n"                                                                       \
        "setp.ne.b32 p, %66, 0;\n"                                                              \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " RAWMLA_ACCUMULATORS_64 \
        ", %64, %65, p, 1, 1, 0, 1;\n"                                                          \
        "}\n"                                                                                   \
        : RAWMLA_OPERANDS_64(o)                                                                 \
        : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)))
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_WGMMA("bf16");
    } else {
        RAWMLA_WGMMA("f16");
    }
#undef RAWMLA_WGMMA
}

// The same, A in registers, which must not change before the wait.
template <Dtype kDtype, int kFirst>
__device__ __forceinline__ void wgmma_m64n128k16_rs_bt(float (&d)[128], const u32 (&a)[4], u64 desc_b,
                                                       bool accumulate) {
    float* o = d + kFirst;
#define RAWMLA_WGMMA(TYPE)                                                                      \
    asm volatile(                                                                               \
        "{\n"                                                                                   \
        ".reg .pred p;\n"                                                                       \
        "setp.ne.b32 p, %69, 0;\n"                                                              \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " RAWMLA_ACCUMULATORS_64 \
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"                                            \
        "}\n"                                                                                   \
        : RAWMLA_OPERANDS_64(o)                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(static_cast<int>(accumulate)))
    if constexpr (kDtype == Dtype::kBf16) {
        RAWMLA_WGMMA("bf16");
    } else {
        RAWMLA_WGMMA("f16");
    }
#undef RAWMLA_WGMMA
}
#undef RAWMLA_ACCUMULATORS_64
#undef RAWMLA_OPERANDS_64
