// The functions of cuda_src/common/math.cuh that are PTX. What is approximate there is exact here.
inline float emulator_ftz(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

__device__ __forceinline__ float exp2_approx(float x) { return emulator_ftz(exp2f(emulator_ftz(x))); }
__device__ __forceinline__ float log2_approx(float x) { return log2f(emulator_ftz(x)); }
__device__ __forceinline__ float tanh_approx(float x) { return tanhf(x); }
__device__ __forceinline__ float reciprocal_approx(float x) { return emulator_ftz(1.0f / emulator_ftz(x)); }
__device__ __forceinline__ float max_or_nan(float a, float b) {
    return a != a || b != b ? kNaN : a > b ? a : b;
}

inline u32 emulator_to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 emulator_to_f16(float x) {
    const _Float16 half = x;
    return x != x ? 0x7fff : __builtin_bit_cast(u16, half);
}
template <Dtype kDtype>
__device__ __forceinline__ u32 pack_16bit(float lo, float hi) {
    if constexpr (kDtype == Dtype::kBf16) return emulator_to_bf16(lo) | emulator_to_bf16(hi) << 16;
    return emulator_to_f16(lo) | emulator_to_f16(hi) << 16;
}
__device__ __forceinline__ float2 unpack_f16(u32 packed) {
    return {__builtin_bit_cast(_Float16, u16(packed)), __builtin_bit_cast(_Float16, u16(packed >> 16))};
}
