// The function of cuda_src/mla/fp8_rows.cuh that is PTX.
__device__ __forceinline__ void store_dequantised(u32 dst, u32 low, u32 high, float factor) {
    const uint2 first = dequantize_e4m3(low, factor), second = dequantize_e4m3(high, factor);
    const uint4 values = {first.x, first.y, second.x, second.y};
    memcpy(emulator::shared(dst, 16), &values, sizeof values);
}
