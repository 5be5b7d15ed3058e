// Gradients of captured arrays with the same bits in every call: sums of integers, which do not depend on the
// order. CapturedCell is one integer, in units that follow from the largest number: a pass before has to find
// it. CapturedDigits needs no such pass, but six times the memory, and two additions for each number.
#pragma once
#include "common/types.cuh"

struct alignas(16) CapturedCell {
    u64 units;   // of 2^-units_exponent, in two's complement
    float rest;  // sum of what is not finite
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

// Sums of float32, of any exponent, as numbers with 12 digits of base 2^24: digit i counts 2^(24 i - 149),
// and may be of either sign and larger than the base. 2^39 numbers can be added before one overflows. 32
// elements lie together, so that those of one digit that neighbours add to are neighbours too.
constexpr int kDigits = 12, kDigitBits = 24, kElementsTogether = 32;

struct alignas(128) CapturedDigits {
    u64 digits[kDigits][kElementsTogether];  // in two's complement
    float rest[kElementsTogether];           // sums of what is not finite
};

// The two digits, `first` and the next, that a finite number has.
struct TwoDigits {
    int first;
    i64 low, high;

    __device__ __forceinline__ explicit TwoDigits(u32 bits) {
        const int exponent = static_cast<int>(bits >> 23 & 0xff);
        const u64 mantissa = (bits & 0x7fffff) | (exponent ? 0x800000 : 0);
        const int behind_lowest = exponent ? exponent - 1 : 0;
        first = behind_lowest / kDigitBits;
        const u64 shifted = mantissa << (behind_lowest - first * kDigitBits);
        low = static_cast<i64>(shifted & ((1 << kDigitBits) - 1));
        high = static_cast<i64>(shifted >> kDigitBits);
        if (bits >> 31) low = -low, high = -high;
    }
};
// The sum of element `place` of 32, but for what is not finite.
__device__ __forceinline__ double sum_of_digits(const CapturedDigits& sums, int place) {
    double sum = 0.0;
#pragma unroll
    for (int i = kDigits - 1; i >= 0; --i)
        sum +=
            static_cast<double>(static_cast<i64>(sums.digits[i][place])) * power_of_two(kDigitBits * i - 149);
    return sum;
}
