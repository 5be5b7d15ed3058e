// Numbers of arrays whose float dtype the host names with a code (FLOAT_DTYPES in rawmla/kernels/common.py):
// 0 float32, 1 bfloat16, 2 float16, 3 float64.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

__device__ __forceinline__ float load_float(const void* array, int dtype, i64 place) {
    if (dtype == 0) return static_cast<const float*>(array)[place];
    if (dtype == 3) return static_cast<float>(static_cast<const double*>(array)[place]);
    const u32 bits = static_cast<const u16*>(array)[place];
    return dtype == 1 ? unpack_16bit<Dtype::kBf16>(bits).x : unpack_16bit<Dtype::kF16>(bits).x;
}

__device__ __forceinline__ void store_float(void* array, int dtype, i64 place, double x) {
    const float rounded = static_cast<float>(x);
    if (dtype == 0) {
        static_cast<float*>(array)[place] = rounded;
    } else if (dtype == 3) {
        static_cast<double*>(array)[place] = x;
    } else {
        const u32 packed =
            dtype == 1 ? pack_16bit<Dtype::kBf16>(rounded, 0.0f) : pack_16bit<Dtype::kF16>(rounded, 0.0f);
        static_cast<u16*>(array)[place] = static_cast<u16>(packed);
    }
}
