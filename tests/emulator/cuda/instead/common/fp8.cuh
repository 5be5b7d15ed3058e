// The functions of cuda_src/common/fp8.cuh that are PTX.
inline u32 emulator_max_bf16(u32 a, u32 b) {
    const float x = __uint_as_float(a << 16), y = __uint_as_float(b << 16);
    if (x != x && y != y) return 0x7fff;
    return y != y || x > y || (x == y && !(a >> 15 & 1)) ? a & 0xffff : b & 0xffff;
}
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
    return emulator_max_bf16(a & 0xffff, b & 0xffff) | emulator_max_bf16(a >> 16, b >> 16) << 16;
}

inline u32 emulator_to_e4m3(float x) {
    if (x != x) return 0x7f;
    const u32 sign = signbit(x) ? 0x80 : 0;
    const float magnitude = fminf(fabsf(x), kE4m3Max);
    if (magnitude == 0) return sign;
    int exponent;
    frexpf(magnitude, &exponent);
    const int step = (exponent < -5 ? -5 : exponent) - 4;  // numbers below 2^-6 have its steps
    const int steps = static_cast<int>(nearbyintf(ldexpf(magnitude, -step)));  // 0 to 16
    return sign | ((step + 9) * 8 + steps);
}
__device__ __forceinline__ u32 pack_e4m3(float x, float y, float z, float w) {
    return emulator_to_e4m3(x) | emulator_to_e4m3(y) << 8 | emulator_to_e4m3(z) << 16 |
           emulator_to_e4m3(w) << 24;
}

inline u32 emulator_e4m3_to_f16(u32 code) {
    const u32 magnitude = code & 0x7f;
    if (magnitude == 0x7f) return 0x7fff;
    const float value = magnitude < 8 ? ldexpf(magnitude, -9) : ldexpf(8 + magnitude % 8, magnitude / 8 - 10);
    return emulator_to_f16(value) | (code & 0x80) << 8;
}
__device__ __forceinline__ void e4m3_to_f16(u32 codes, u32& low, u32& high) {
    low = emulator_e4m3_to_f16(codes) | emulator_e4m3_to_f16(codes >> 8) << 16;
    high = emulator_e4m3_to_f16(codes >> 16) | emulator_e4m3_to_f16(codes >> 24) << 16;
}
inline u32 emulator_e5m2_to_f16(u32 code) {
    const u32 half = (code & 0xff) << 8;
    return (half & 0x7fff) > 0x7c00 ? 0x7fff : half;
}
__device__ __forceinline__ void e5m2_to_f16(u32 codes, u32& low, u32& high) {
    low = emulator_e5m2_to_f16(codes) | emulator_e5m2_to_f16(codes >> 8) << 16;
    high = emulator_e5m2_to_f16(codes >> 16) | emulator_e5m2_to_f16(codes >> 24) << 16;
}
