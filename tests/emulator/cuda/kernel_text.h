// What a kernel's text finds in CUDA C++ without including it: types, special variables, built-in functions.
// Those that the sources use, and what a user's score function may call.
#pragma once
// C's headers alone: g++ takes longer to read <cmath> than many a kernel.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <string.h>

#include "machine.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define gridDim (emulator::grid_size)
#define blockDim (emulator::block_size)

template <class T>
struct alignas(2 * sizeof(T)) EmulatorPair {
    T x, y;
};
template <class T>
struct alignas(4 * sizeof(T)) EmulatorQuad {
    T x, y, z, w;
};
using int2 = EmulatorPair<int>;
using int4 = EmulatorQuad<int>;
using uint2 = EmulatorPair<unsigned>;
using uint4 = EmulatorQuad<unsigned>;
using float2 = EmulatorPair<float>;
using float4 = EmulatorQuad<float>;
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- warps

inline void emulator_all_lanes(unsigned mask) {
    if (mask != 0xffffffff)
        emulator::fail("an exchange among lanes %08x: only whole warps are emulated", mask);
}
template <class T>
T emulator_from_lane(unsigned mask, T value, int lane, const char* instruction) {
    static_assert(sizeof(T) <= 16);
    emulator_all_lanes(mask);
    const emulator::Lanes all = emulator::exchange(&value, sizeof value, instruction);
    memcpy(&value, all[lane & 31], sizeof value);
    return value;
}
// `width`: the warp is cut into segments of so many lanes; what lies in another one is not seen.
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const int first = threadIdx.x % 32 / width * width;
    return emulator_from_lane(mask, value, first + (lane & (width - 1)), "shfl");
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = threadIdx.x % 32, other = lane ^ bits;
    return emulator_from_lane(mask, value, other / width > lane / width ? lane : other, "shfl.bfly");
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const unsigned lane = threadIdx.x % 32;
    return emulator_from_lane(mask, value, lane % width < by ? lane : lane - by, "shfl.up");
}
inline unsigned emulator_ballot(unsigned mask, bool is_true, const char* instruction) {
    emulator_all_lanes(mask);
    const emulator::Lanes all = emulator::exchange(&is_true, 1, instruction);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(all[i][0]) << i;
    return bits;
}
inline unsigned __ballot_sync(unsigned mask, int is_true) { return emulator_ballot(mask, is_true, "vote"); }
inline int __any_sync(unsigned mask, int is_true) { return emulator_ballot(mask, is_true, "vote") != 0; }
inline int __all_sync(unsigned mask, int is_true) { return emulator_ballot(mask, is_true, "vote") == ~0u; }
inline void __syncwarp(unsigned mask = ~0u) { emulator_ballot(mask, true, "__syncwarp"); }
template <class T, class Operation>
T emulator_reduce(unsigned mask, T value, Operation operation) {
    emulator_all_lanes(mask);
    const emulator::Lanes all = emulator::exchange(&value, sizeof value, "redux");
    T result = 0;
    for (int i = 0; i < 32; ++i) {
        memcpy(&value, all[i], sizeof value);
        result = operation(result, value);
    }
    return result;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return emulator_reduce(mask, value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return emulator_reduce(mask, value, [](unsigned a, unsigned b) { return a | b; });
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
    return emulator_reduce(mask, value, [](T a, T b) { return a + b; });
}

// ---- CTAs

inline void __syncthreads() { emulator::named_barrier_sync(0, blockDim.x, false); }
inline int __syncthreads_or(int vote) { return emulator::named_barrier_sync(0, blockDim.x, vote).any; }
inline int __syncthreads_and(int vote) { return emulator::named_barrier_sync(0, blockDim.x, vote).all; }
inline unsigned long long __cvta_generic_to_shared(const void* pointer) {
    return emulator::shared_address(pointer);
}

// ---- memory. Atomic by itself: a thread runs until it waits.

template <class T>
T __ldg(const T* from) {
    return *from;
}
template <class T>
void __stcs(T* to, const T& value) {
    *to = value;
}
template <class T>
T emulator_replace(T* at, T value) {
    const T old = *at;
    *at = value;
    return old;
}
template <class T>
T atomicAdd(T* at, T value) {
    return emulator_replace<T>(at, *at + value);
}
template <class T>
T atomicOr(T* at, T value) {
    return emulator_replace<T>(at, *at | value);
}
template <class T>
T atomicMax(T* at, T value) {
    return emulator_replace<T>(at, *at > value ? *at : value);
}

// ---- arithmetic

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline double __longlong_as_double(long long bits) { return __builtin_bit_cast(double, bits); }
inline long long __double2ll_rn(double x) { return __builtin_llrint(x); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline float __fsub_rn(float a, float b) { return a - b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T>
T max(T a, T b) {
    return a > b ? a : b;
}
template <class T>
T min(T a, T b) {
    return a < b ? a : b;
}
