// Vector accesses of global memory. The compiler does not move the loads above griddepcontrol.wait. A load
// that is not enabled gives zeros.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ uint4 load_global_16(const void* ptr, bool enabled = true) {
    uint4 value;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
        : "l"(ptr), "r"(static_cast<u32>(enabled))
        : "memory");
    return value;
}
__device__ __forceinline__ uint2 load_global_8(const void* ptr, bool enabled = true) {
    uint2 value;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "@p ld.global.v2.b32 {%0, %1}, [%2];\n"
        "}\n"
        : "=&r"(value.x), "=&r"(value.y)
        : "l"(ptr), "r"(static_cast<u32>(enabled))
        : "memory");
    return value;
}
__device__ __forceinline__ u32 load_global_4(const void* ptr, bool enabled = true) {
    u32 value;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "mov.b32 %0, 0;\n"
        "@p ld.global.b32 %0, [%1];\n"
        "}\n"
        : "=&r"(value)
        : "l"(ptr), "r"(static_cast<u32>(enabled))
        : "memory");
    return value;
}
__device__ __forceinline__ u32 load_global_2(const void* ptr) {
    u16 value;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(value) : "l"(ptr) : "memory");
    return value;
}
__device__ __forceinline__ u32 load_global_1(const void* ptr, bool enabled = true) {
    u32 value;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "mov.b32 %0, 0;\n"
        "@p ld.global.u8 %0, [%1];\n"
        "}\n"
        : "=&r"(value)
        : "l"(ptr), "r"(static_cast<u32>(enabled))
        : "memory");
    return value;
}
__device__ __forceinline__ i64 load_global(const i64* ptr) {
    i64 value;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(ptr) : "memory");
    return value;
}

// A load that is not enabled leaves the value as it is.
__device__ __forceinline__ void load_global_if(float& value, const float* ptr, bool enabled) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p ld.global.f32 %0, [%1];\n"
        "}\n"
        : "+f"(value)
        : "l"(ptr), "r"(static_cast<u32>(enabled))
        : "memory");
}
__device__ __forceinline__ void load_global_if(float4& value, const float4* ptr, bool enabled) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "@p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
        : "l"(ptr), "r"(static_cast<u32>(enabled))
        : "memory");
}

__device__ __forceinline__ void store_global_16(void* ptr, const uint4& value) {
    *reinterpret_cast<uint4*>(ptr) = value;
}
__device__ __forceinline__ void store_global_8(void* ptr, const uint2& value) {
    *reinterpret_cast<uint2*>(ptr) = value;
}
// A store of what need not stay in L2.
__device__ __forceinline__ void stream_global_8(void* ptr, const uint2& value) {
    __stcs(reinterpret_cast<uint2*>(ptr), value);
}
