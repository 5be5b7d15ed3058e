// Division by a number that the host knows (rawmla/kernels/division.py): n / d = n * magic >> shift, exact
// for 0 <= n < 2^31 and 1 <= d < 2^31, with shift = 31 + ceil(log2 d) and magic = ceil(2^shift / d) (Granlund
// and Montgomery, PLDI 1994).
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ int divide(int n, u32 magic, int shift) {
    return static_cast<int>(static_cast<u64>(static_cast<u32>(n)) * magic >> shift);
}

// The same of a multiple of d, whose odd part d >> shift has this inverse modulo 2^32. 0 <= n / d < 2^31.
__device__ __forceinline__ int divide_exactly(i64 n, u32 inverse, int shift) {
    return static_cast<int>(static_cast<u32>(n >> shift) * inverse);
}
