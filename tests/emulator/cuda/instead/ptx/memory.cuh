// In place of cuda_src/ptx/memory.cuh.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ u32 smem_address(const void* ptr) { return emulator::shared_address(ptr); }

__device__ __forceinline__ void cp_async_16(u32 dst, const void* src) {
    emulator::copy_async(dst, src, 16, true);
}
__device__ __forceinline__ void cp_async_16_or_zeros(u32 dst, const void* src, bool reads) {
    emulator::copy_async(dst, src, 16, reads);
}
__device__ __forceinline__ void cp_async_8_or_zeros(u32 dst, const void* src, bool reads) {
    emulator::copy_async(dst, src, 8, reads);
}
__device__ __forceinline__ void cp_async_4(u32 dst, const void* src) {
    emulator::copy_async(dst, src, 4, true);
}
__device__ __forceinline__ void cp_async_4_or_zeros(u32 dst, const void* src, bool reads) {
    emulator::copy_async(dst, src, 4, reads);
}
__device__ __forceinline__ void cp_async_wait_all() { emulator::copy_async_wait(); }
__device__ __forceinline__ void cp_async_mbarrier_arrive(u32 bar) { emulator::copy_async_arrive(bar); }

// Row `row` of matrix `matrix` is where lane 8 * matrix + row says.
inline unsigned char* emulator_matrix_row(emulator::Lanes addresses, int matrix, int row) {
    u32 address;
    memcpy(&address, addresses[8 * matrix + row], sizeof address);
    if (address % 16) emulator::fail("ldmatrix or stmatrix: an address that is no multiple of 16");
    return emulator::shared(address, 16);
}
template <int kCount>
inline void emulator_stmatrix(u32 dst, const u32 (&r)[kCount], bool is_transposed) {
    const emulator::Lanes addresses = emulator::exchange(&dst, sizeof dst, "stmatrix");
    const int lane = threadIdx.x % 32;
    for (int matrix = 0; matrix < kCount; ++matrix)
        for (int i = 0; i < 2; ++i) {
            const int major = lane / 4, minor = 2 * (lane % 4) + i;
            const u16 value = r[matrix] >> 16 * i;
            unsigned char* row = emulator_matrix_row(addresses, matrix, is_transposed ? minor : major);
            memcpy(row + 2 * (is_transposed ? major : minor), &value, sizeof value);
        }
}
__device__ __forceinline__ void stmatrix_x4(u32 dst, u32 r0, u32 r1, u32 r2, u32 r3) {
    emulator_stmatrix<4>(dst, {r0, r1, r2, r3}, false);
}
__device__ __forceinline__ void stmatrix_x4_trans(u32 dst, u32 r0, u32 r1, u32 r2, u32 r3) {
    emulator_stmatrix<4>(dst, {r0, r1, r2, r3}, true);
}
__device__ __forceinline__ void stmatrix_x2_trans(u32 dst, u32 r0, u32 r1) {
    emulator_stmatrix<2>(dst, {r0, r1}, true);
}
__device__ __forceinline__ void ldmatrix_x4(u32 (&v)[4], u32 src) {
    const emulator::Lanes addresses = emulator::exchange(&src, sizeof src, "ldmatrix");
    const int lane = threadIdx.x % 32;
    for (int matrix = 0; matrix < 4; ++matrix)
        memcpy(&v[matrix], emulator_matrix_row(addresses, matrix, lane / 4) + 4 * (lane % 4), 4);
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&v)[4], u32 src) {
    const emulator::Lanes addresses = emulator::exchange(&src, sizeof src, "ldmatrix");
    const int lane = threadIdx.x % 32;
    for (int matrix = 0; matrix < 4; ++matrix)
        for (int i = 0; i < 2; ++i)
            memcpy(reinterpret_cast<u16*>(&v[matrix]) + i,
                   emulator_matrix_row(addresses, matrix, 2 * (lane % 4) + i) + 2 * (lane / 4), 2);
}

__device__ __forceinline__ uint4 load_shared_16(u32 src) {
    uint4 value;
    memcpy(&value, emulator::shared(src, 16), sizeof value);
    return value;
}
__device__ __forceinline__ float2 load_shared_pair(u32 src) {
    float2 value;
    memcpy(&value, emulator::shared(src, 8), sizeof value);
    return value;
}
__device__ __forceinline__ u32 load_shared_4(u32 src) {
    u32 value;
    memcpy(&value, emulator::shared(src, 4), sizeof value);
    return value;
}
__device__ __forceinline__ void store_shared_4(u32 dst, u32 value) {
    memcpy(emulator::shared(dst, 4), &value, sizeof value);
}
__device__ __forceinline__ void store_shared_16(u32 dst, const uint4& value) {
    memcpy(emulator::shared(dst, 16), &value, sizeof value);
}

__device__ __forceinline__ int load_global(const int* ptr) { return *ptr; }
__device__ __forceinline__ float load_global(const float* ptr) { return *ptr; }
__device__ __forceinline__ u64 load_global(const u64* ptr) { return *ptr; }

// A loop around this waits for another CTA.
__device__ __forceinline__ int load_acquire(const int* ptr) {
    emulator::spin();
    return *static_cast<const volatile int*>(ptr);
}
__device__ __forceinline__ void add_release(int* ptr, int value) { *ptr += value; }

__device__ __forceinline__ void prefetch_l1(const void* ptr) {}
__device__ __forceinline__ void prefetch_l2(const void* ptr) {}
