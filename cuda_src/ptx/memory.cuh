// Copies between global and shared memory without TMA, and ldmatrix and stmatrix.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ u32 smem_address(const void* ptr) {
    return static_cast<u32>(__cvta_generic_to_shared(ptr));
}

// 16 bytes global -> shared.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// 16 bytes global -> shared, or 16 zeros and nothing read.
__device__ __forceinline__ void cp_async_16_or_zeros(u32 dst, const void* src, bool reads) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(reads ? 16 : 0)
                 : "memory");
}
// 8 bytes global -> shared, or 8 zeros and nothing read.
__device__ __forceinline__ void cp_async_8_or_zeros(u32 dst, const void* src, bool reads) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(reads ? 8 : 0)
                 : "memory");
}
// 4 bytes global -> shared.
__device__ __forceinline__ void cp_async_4(u32 dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
// 4 bytes global -> shared, or zeros and nothing read.
__device__ __forceinline__ void cp_async_4_or_zeros(u32 dst, const void* src, bool reads) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(reads ? 4 : 0)
                 : "memory");
}
// The issuing thread: all its cp.async have landed.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// One arrival of the issuing thread on an mbarrier, when all its cp.async have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// A warp stores four 8x8 matrices of 16-bit elements; lane i gives the address of row i%8 of matrix i/8.
__device__ __forceinline__ void stmatrix_x4(u32 dst, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// A warp loads four such matrices.
__device__ __forceinline__ void ldmatrix_x4(u32 (&v)[4], u32 src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(src)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&v)[4], u32 src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(src)
                 : "memory");
}

// What stmatrix_x4 stores, transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 dst, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// The same of two matrices, whose rows the first 16 lanes give.
__device__ __forceinline__ void stmatrix_x2_trans(u32 dst, u32 r0, u32 r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(dst), "r"(r0), "r"(r1)
                 : "memory");
}

// 16 bytes of shared memory, a pair of floats, and 4 bytes.
__device__ __forceinline__ uint4 load_shared_16(u32 src) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(src)
                 : "memory");
    return value;
}
__device__ __forceinline__ float2 load_shared_pair(u32 src) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(src) : "memory");
    return value;
}
__device__ __forceinline__ u32 load_shared_4(u32 src) {
    u32 value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(src) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared_16(u32 dst, const uint4& value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}
__device__ __forceinline__ void store_shared_4(u32 dst, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(value) : "memory");
}

// Loads that must not move above griddepcontrol.wait and must not use the non-coherent path.
__device__ __forceinline__ int load_global(const int* ptr) {
    int value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
    return value;
}
__device__ __forceinline__ float load_global(const float* ptr) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(ptr) : "memory");
    return value;
}
__device__ __forceinline__ u64 load_global(const u64* ptr) {
    u64 value;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(ptr) : "memory");
    return value;
}

// One CTA tells another that what it did before is done: by adding, which the other sees by loading.
__device__ __forceinline__ int load_acquire(const int* ptr) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(ptr) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(int* ptr, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(ptr), "r"(value) : "memory");
}

// Brings the 128-byte line of an address to L1, or to L2.
__device__ __forceinline__ void prefetch_l1(const void* ptr) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(ptr) : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* ptr) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(ptr) : "memory");
}
