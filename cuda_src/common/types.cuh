// Fixed-width types and small helpers: NVRTC brings no standard headers.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// 16-bit element type of q, the cache and the output. Values of the -D define DTYPE.
enum class Dtype : int { kBf16 = 0, kF16 = 1 };

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float kNaN = __builtin_bit_cast(float, 0x7fffffffu);
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.44269504088896341f;

// Shared memory that a CTA may have on sm_90, in bytes.
constexpr int kMaxSharedBytes = 232448;

// A CUtensorMap as the driver encodes it. Lives in a kernel's __grid_constant__ parameter.
struct alignas(64) TensorMap {
    u64 words[16];
};

template <typename T>
__device__ __forceinline__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

__device__ __forceinline__ constexpr int min_int(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ constexpr int max_int(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ constexpr int clamp_int(int x, int least, int most) {
    return max_int(min_int(x, most), least);
}
