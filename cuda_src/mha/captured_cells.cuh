// A gradient of a captured array that is summed in a fixed order: as integers, whose sum does not depend on
// it.
#pragma once
#include "common/types.cuh"

struct alignas(16) CapturedCell {
    u64 units;   // of 2^-units_exponent, in two's complement
    float rest;  // sum of what is not finite
    u32 unused;
};

// The exponent of 2 that makes integers of sums of at most 2^terms_log2 numbers up to the largest, which has
// these bits as a float32: 62 bits, and so that no sum overflows.
__device__ __forceinline__ int units_exponent(u32 largest, int terms_log2) {
    const int behind_largest = static_cast<int>(largest >> 23) - 126;  // exponent of a power of 2 behind it
    return 62 - terms_log2 - behind_largest;
}
__device__ __forceinline__ double power_of_two(int exponent) {
    return __longlong_as_double(static_cast<i64>(exponent + 1023) << 52);
}
