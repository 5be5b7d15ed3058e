// In place of cuda_src/ptx/vector.cuh.
#pragma once
#include "common/types.cuh"

template <class T>
T emulator_load(const void* ptr, bool enabled) {
    T value{};
    if (enabled) memcpy(&value, ptr, sizeof value);
    return value;
}
__device__ __forceinline__ uint4 load_global_16(const void* ptr, bool enabled = true) {
    return emulator_load<uint4>(ptr, enabled);
}
__device__ __forceinline__ uint2 load_global_8(const void* ptr, bool enabled = true) {
    return emulator_load<uint2>(ptr, enabled);
}
__device__ __forceinline__ u32 load_global_4(const void* ptr, bool enabled = true) {
    return emulator_load<u32>(ptr, enabled);
}
__device__ __forceinline__ u32 load_global_2(const void* ptr) { return emulator_load<u16>(ptr, true); }
__device__ __forceinline__ u32 load_global_1(const void* ptr, bool enabled = true) {
    return emulator_load<unsigned char>(ptr, enabled);
}
__device__ __forceinline__ i64 load_global(const i64* ptr) { return *ptr; }
__device__ __forceinline__ void load_global_if(float& value, const float* ptr, bool enabled) {
    if (enabled) value = *ptr;
}
__device__ __forceinline__ void load_global_if(float4& value, const float4* ptr, bool enabled) {
    if (enabled) value = *ptr;
}
__device__ __forceinline__ void store_global_16(void* ptr, const uint4& value) {
    memcpy(ptr, &value, sizeof value);
}
__device__ __forceinline__ void store_global_8(void* ptr, const uint2& value) {
    memcpy(ptr, &value, sizeof value);
}
__device__ __forceinline__ void stream_global_8(void* ptr, const uint2& value) {
    memcpy(ptr, &value, sizeof value);
}
