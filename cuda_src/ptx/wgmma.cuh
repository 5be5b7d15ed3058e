// Warpgroup matrix multiply-accumulate: d (+)= A B^T with A 64 x 16 and B N x 16 of a 16-bit type, in
// float32. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". All four warps of a warpgroup issue,
// converged.
//
//   wgmma_ss<kDtype, kMajorA, kMajorB>(d, desc_a, desc_b, accumulate)   A and B in shared memory
//   wgmma_rs<kDtype, kMajorB>(d, a, desc_b, accumulate)                   A in registers
//
// N is twice the length of d: any multiple of 8 up to 256. An operand in shared memory is K-major (its 16
// columns are contiguous) or MN-major (its rows are: it is stored transposed). Registers of A and d must not
// be touched before the wait.
//
// Accumulator i of thread t (warp w = t / 32 % 4, lane l = t % 32) holds
//   row = 16 w + l / 4 + 8 ((i >> 1) & 1),   column = 8 (i >> 2) + 2 (l % 4) + (i & 1).
// Element i of 8 of an A fragment (64 x 16, two elements per register) has the same row and column.
#pragma once
#include "common/types.cuh"

// How an operand lies in shared memory.
enum class Major : int { kK = 0, kMn = 1 };

// Before the first wgmma of a batch and after ordinary code touched its accumulators.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending of the warp's committed groups are not complete.
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

// Accumulators kFirst to kFirst + kCount - 1 of d: 2 kCount columns of a product wider than one wgmma.
template <int kFirst, int kCount, int kAll>
__device__ __forceinline__ float (&wgmma_columns(float (&d)[kAll])) [kCount] {
    static_assert(kFirst + kCount <= kAll);
    return *reinterpret_cast<float (*)[kCount]>(d + kFirst);
}

// The wrappers are one macro, RAWMLA_WGMMA, per N. The n accumulators are the first n operands of the asm
// statement: RAWMLA_WGMMA_D_n is their text in the instruction, RAWMLA_WGMMA_OUT_n their operands after it.
// clang-format off
#define RAWMLA_WGMMA_D_4    "%0, %1, %2, %3"
#define RAWMLA_WGMMA_D_8    RAWMLA_WGMMA_D_4 ", %4, %5, %6, %7"
#define RAWMLA_WGMMA_D_12   RAWMLA_WGMMA_D_8 ", %8, %9, %10, %11"
#define RAWMLA_WGMMA_D_16   RAWMLA_WGMMA_D_12 ", %12, %13, %14, %15"
#define RAWMLA_WGMMA_D_20   RAWMLA_WGMMA_D_16 ", %16, %17, %18, %19"
#define RAWMLA_WGMMA_D_24   RAWMLA_WGMMA_D_20 ", %20, %21, %22, %23"
#define RAWMLA_WGMMA_D_28   RAWMLA_WGMMA_D_24 ", %24, %25, %26, %27"
#define RAWMLA_WGMMA_D_32   RAWMLA_WGMMA_D_28 ", %28, %29, %30, %31"
#define RAWMLA_WGMMA_D_36   RAWMLA_WGMMA_D_32 ", %32, %33, %34, %35"
#define RAWMLA_WGMMA_D_40   RAWMLA_WGMMA_D_36 ", %36, %37, %38, %39"
#define RAWMLA_WGMMA_D_44   RAWMLA_WGMMA_D_40 ", %40, %41, %42, %43"
#define RAWMLA_WGMMA_D_48   RAWMLA_WGMMA_D_44 ", %44, %45, %46, %47"
#define RAWMLA_WGMMA_D_52   RAWMLA_WGMMA_D_48 ", %48, %49, %50, %51"
#define RAWMLA_WGMMA_D_56   RAWMLA_WGMMA_D_52 ", %52, %53, %54, %55"
#define RAWMLA_WGMMA_D_60   RAWMLA_WGMMA_D_56 ", %56, %57, %58, %59"
#define RAWMLA_WGMMA_D_64   RAWMLA_WGMMA_D_60 ", %60, %61, %62, %63"
#define RAWMLA_WGMMA_D_68   RAWMLA_WGMMA_D_64 ", %64, %65, %66, %67"
#define RAWMLA_WGMMA_D_72   RAWMLA_WGMMA_D_68 ", %68, %69, %70, %71"
#define RAWMLA_WGMMA_D_76   RAWMLA_WGMMA_D_72 ", %72, %73, %74, %75"
#define RAWMLA_WGMMA_D_80   RAWMLA_WGMMA_D_76 ", %76, %77, %78, %79"
#define RAWMLA_WGMMA_D_84   RAWMLA_WGMMA_D_80 ", %80, %81, %82, %83"
#define RAWMLA_WGMMA_D_88   RAWMLA_WGMMA_D_84 ", %84, %85, %86, %87"
#define RAWMLA_WGMMA_D_92   RAWMLA_WGMMA_D_88 ", %88, %89, %90, %91"
#define RAWMLA_WGMMA_D_96   RAWMLA_WGMMA_D_92 ", %92, %93, %94, %95"
#define RAWMLA_WGMMA_D_100  RAWMLA_WGMMA_D_96 ", %96, %97, %98, %99"
#define RAWMLA_WGMMA_D_104  RAWMLA_WGMMA_D_100 ", %100, %101, %102, %103"
#define RAWMLA_WGMMA_D_108  RAWMLA_WGMMA_D_104 ", %104, %105, %106, %107"
#define RAWMLA_WGMMA_D_112  RAWMLA_WGMMA_D_108 ", %108, %109, %110, %111"
#define RAWMLA_WGMMA_D_116  RAWMLA_WGMMA_D_112 ", %112, %113, %114, %115"
#define RAWMLA_WGMMA_D_120  RAWMLA_WGMMA_D_116 ", %116, %117, %118, %119"
#define RAWMLA_WGMMA_D_124  RAWMLA_WGMMA_D_120 ", %120, %121, %122, %123"
#define RAWMLA_WGMMA_D_128  RAWMLA_WGMMA_D_124 ", %124, %125, %126, %127"
#define RAWMLA_WGMMA_OUT_4    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define RAWMLA_WGMMA_OUT_8    RAWMLA_WGMMA_OUT_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define RAWMLA_WGMMA_OUT_12   RAWMLA_WGMMA_OUT_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define RAWMLA_WGMMA_OUT_16   RAWMLA_WGMMA_OUT_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define RAWMLA_WGMMA_OUT_20   RAWMLA_WGMMA_OUT_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define RAWMLA_WGMMA_OUT_24   RAWMLA_WGMMA_OUT_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define RAWMLA_WGMMA_OUT_28   RAWMLA_WGMMA_OUT_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define RAWMLA_WGMMA_OUT_32   RAWMLA_WGMMA_OUT_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define RAWMLA_WGMMA_OUT_36   RAWMLA_WGMMA_OUT_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define RAWMLA_WGMMA_OUT_40   RAWMLA_WGMMA_OUT_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define RAWMLA_WGMMA_OUT_44   RAWMLA_WGMMA_OUT_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define RAWMLA_WGMMA_OUT_48   RAWMLA_WGMMA_OUT_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define RAWMLA_WGMMA_OUT_52   RAWMLA_WGMMA_OUT_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define RAWMLA_WGMMA_OUT_56   RAWMLA_WGMMA_OUT_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define RAWMLA_WGMMA_OUT_60   RAWMLA_WGMMA_OUT_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define RAWMLA_WGMMA_OUT_64   RAWMLA_WGMMA_OUT_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define RAWMLA_WGMMA_OUT_68   RAWMLA_WGMMA_OUT_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define RAWMLA_WGMMA_OUT_72   RAWMLA_WGMMA_OUT_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define RAWMLA_WGMMA_OUT_76   RAWMLA_WGMMA_OUT_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define RAWMLA_WGMMA_OUT_80   RAWMLA_WGMMA_OUT_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define RAWMLA_WGMMA_OUT_84   RAWMLA_WGMMA_OUT_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define RAWMLA_WGMMA_OUT_88   RAWMLA_WGMMA_OUT_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define RAWMLA_WGMMA_OUT_92   RAWMLA_WGMMA_OUT_88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define RAWMLA_WGMMA_OUT_96   RAWMLA_WGMMA_OUT_92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define RAWMLA_WGMMA_OUT_100  RAWMLA_WGMMA_OUT_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define RAWMLA_WGMMA_OUT_104  RAWMLA_WGMMA_OUT_100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define RAWMLA_WGMMA_OUT_108  RAWMLA_WGMMA_OUT_104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define RAWMLA_WGMMA_OUT_112  RAWMLA_WGMMA_OUT_108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define RAWMLA_WGMMA_OUT_116  RAWMLA_WGMMA_OUT_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define RAWMLA_WGMMA_OUT_120  RAWMLA_WGMMA_OUT_116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define RAWMLA_WGMMA_OUT_124  RAWMLA_WGMMA_OUT_120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define RAWMLA_WGMMA_OUT_128  RAWMLA_WGMMA_OUT_124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// %P is the predicate's operand: whether d is added to. Scales of A and B are 1.
#define RAWMLA_WGMMA_TEXT(N, COUNT, TYPE, P, INPUTS, TRANSPOSED)                          \
    "{\n"                                                                                 \
    ".reg .pred p;\n"                                                                     \
    "setp.ne.b32 p, %" #P ", 0;\n"                                                        \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " "                   \
    "{" RAWMLA_WGMMA_D_##COUNT "}, " INPUTS ", p, 1, 1, " TRANSPOSED ";\n"                \
    "}\n"
#define RAWMLA_WGMMA_SS(N, COUNT, TYPE, I1, I2, I3, I4)                                                \
    asm volatile(RAWMLA_WGMMA_TEXT(N, COUNT, TYPE, I2, "%" #COUNT ", %" #I1, "%" #I3 ", %" #I4)        \
                 : RAWMLA_WGMMA_OUT_##COUNT                                                            \
                 : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)),                        \
                   "n"(static_cast<int>(kMajorA)), "n"(static_cast<int>(kMajorB)))
#define RAWMLA_WGMMA_RS(N, COUNT, TYPE, I1, I2, I3, I4, I5, I6)                                        \
    asm volatile(RAWMLA_WGMMA_TEXT(N, COUNT, TYPE, I5,                                                 \
                                   "{%" #COUNT ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4, "%" #I6)      \
                 : RAWMLA_WGMMA_OUT_##COUNT                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b),                            \
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorB)))

// The wrappers of one N with COUNT accumulators; I1 to I6 are the numbers after COUNT.
#define RAWMLA_WGMMA(N, COUNT, I1, I2, I3, I4, I5, I6)                                                       \
    template <Dtype kDtype, Major kMajorA = Major::kK, Major kMajorB = Major::kK>                            \
    __device__ __forceinline__ void wgmma_ss(float (&d)[COUNT], u64 desc_a, u64 desc_b, bool accumulate) {   \
        if constexpr (kDtype == Dtype::kBf16) {                                                              \
            RAWMLA_WGMMA_SS(N, COUNT, "bf16", I1, I2, I3, I4);                                               \
        } else {                                                                                             \
            RAWMLA_WGMMA_SS(N, COUNT, "f16", I1, I2, I3, I4);                                                \
        }                                                                                                    \
    }                                                                                                        \
    template <Dtype kDtype, Major kMajorB = Major::kK>                                                       \
    __device__ __forceinline__ void wgmma_rs(float (&d)[COUNT], const u32 (&a)[4], u64 desc_b,               \
                                             bool accumulate) {                                              \
        if constexpr (kDtype == Dtype::kBf16) {                                                              \
            RAWMLA_WGMMA_RS(N, COUNT, "bf16", I1, I2, I3, I4, I5, I6);                                       \
        } else {                                                                                             \
            RAWMLA_WGMMA_RS(N, COUNT, "f16", I1, I2, I3, I4, I5, I6);                                        \
        }                                                                                                    \
    }
RAWMLA_WGMMA(8, 4, 5, 6, 7, 8, 9, 10)
RAWMLA_WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
RAWMLA_WGMMA(24, 12, 13, 14, 15, 16, 17, 18)
RAWMLA_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
RAWMLA_WGMMA(40, 20, 21, 22, 23, 24, 25, 26)
RAWMLA_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
RAWMLA_WGMMA(56, 28, 29, 30, 31, 32, 33, 34)
RAWMLA_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
RAWMLA_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
RAWMLA_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
RAWMLA_WGMMA(88, 44, 45, 46, 47, 48, 49, 50)
RAWMLA_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
RAWMLA_WGMMA(104, 52, 53, 54, 55, 56, 57, 58)
RAWMLA_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
RAWMLA_WGMMA(120, 60, 61, 62, 63, 64, 65, 66)
RAWMLA_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
RAWMLA_WGMMA(136, 68, 69, 70, 71, 72, 73, 74)
RAWMLA_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
RAWMLA_WGMMA(152, 76, 77, 78, 79, 80, 81, 82)
RAWMLA_WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
RAWMLA_WGMMA(168, 84, 85, 86, 87, 88, 89, 90)
RAWMLA_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
RAWMLA_WGMMA(184, 92, 93, 94, 95, 96, 97, 98)
RAWMLA_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
RAWMLA_WGMMA(200, 100, 101, 102, 103, 104, 105, 106)
RAWMLA_WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
RAWMLA_WGMMA(216, 108, 109, 110, 111, 112, 113, 114)
RAWMLA_WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
RAWMLA_WGMMA(232, 116, 117, 118, 119, 120, 121, 122)
RAWMLA_WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
RAWMLA_WGMMA(248, 124, 125, 126, 127, 128, 129, 130)
RAWMLA_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on
#undef RAWMLA_WGMMA
#undef RAWMLA_WGMMA_RS
#undef RAWMLA_WGMMA_SS
#undef RAWMLA_WGMMA_TEXT
#undef RAWMLA_WGMMA_D_4
#undef RAWMLA_WGMMA_D_8
#undef RAWMLA_WGMMA_D_12
#undef RAWMLA_WGMMA_D_16
#undef RAWMLA_WGMMA_D_20
#undef RAWMLA_WGMMA_D_24
#undef RAWMLA_WGMMA_D_28
#undef RAWMLA_WGMMA_D_32
#undef RAWMLA_WGMMA_D_36
#undef RAWMLA_WGMMA_D_40
#undef RAWMLA_WGMMA_D_44
#undef RAWMLA_WGMMA_D_48
#undef RAWMLA_WGMMA_D_52
#undef RAWMLA_WGMMA_D_56
#undef RAWMLA_WGMMA_D_60
#undef RAWMLA_WGMMA_D_64
#undef RAWMLA_WGMMA_D_68
#undef RAWMLA_WGMMA_D_72
#undef RAWMLA_WGMMA_D_76
#undef RAWMLA_WGMMA_D_80
#undef RAWMLA_WGMMA_D_84
#undef RAWMLA_WGMMA_D_88
#undef RAWMLA_WGMMA_D_92
#undef RAWMLA_WGMMA_D_96
#undef RAWMLA_WGMMA_D_100
#undef RAWMLA_WGMMA_D_104
#undef RAWMLA_WGMMA_D_108
#undef RAWMLA_WGMMA_D_112
#undef RAWMLA_WGMMA_D_116
#undef RAWMLA_WGMMA_D_120
#undef RAWMLA_WGMMA_D_124
#undef RAWMLA_WGMMA_D_128
#undef RAWMLA_WGMMA_OUT_4
#undef RAWMLA_WGMMA_OUT_8
#undef RAWMLA_WGMMA_OUT_12
#undef RAWMLA_WGMMA_OUT_16
#undef RAWMLA_WGMMA_OUT_20
#undef RAWMLA_WGMMA_OUT_24
#undef RAWMLA_WGMMA_OUT_28
#undef RAWMLA_WGMMA_OUT_32
#undef RAWMLA_WGMMA_OUT_36
#undef RAWMLA_WGMMA_OUT_40
#undef RAWMLA_WGMMA_OUT_44
#undef RAWMLA_WGMMA_OUT_48
#undef RAWMLA_WGMMA_OUT_52
#undef RAWMLA_WGMMA_OUT_56
#undef RAWMLA_WGMMA_OUT_60
#undef RAWMLA_WGMMA_OUT_64
#undef RAWMLA_WGMMA_OUT_68
#undef RAWMLA_WGMMA_OUT_72
#undef RAWMLA_WGMMA_OUT_76
#undef RAWMLA_WGMMA_OUT_80
#undef RAWMLA_WGMMA_OUT_84
#undef RAWMLA_WGMMA_OUT_88
#undef RAWMLA_WGMMA_OUT_92
#undef RAWMLA_WGMMA_OUT_96
#undef RAWMLA_WGMMA_OUT_100
#undef RAWMLA_WGMMA_OUT_104
#undef RAWMLA_WGMMA_OUT_108
#undef RAWMLA_WGMMA_OUT_112
#undef RAWMLA_WGMMA_OUT_116
#undef RAWMLA_WGMMA_OUT_120
#undef RAWMLA_WGMMA_OUT_124
#undef RAWMLA_WGMMA_OUT_128
