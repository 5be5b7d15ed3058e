// In place of cuda_src/ptx/cluster.cuh.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ u32 cluster_ctarank() { return emulator::cluster_rank(); }
__device__ __forceinline__ void cluster_arrive() { emulator::cluster_arrive(); }
__device__ __forceinline__ void cluster_wait() { emulator::cluster_wait(); }
__device__ __forceinline__ void mbarrier_arrive_remote(u32 bar, u32 rank) {
    emulator::mbarrier_arrive_remote(bar, rank);
}
__device__ __forceinline__ u32 remote_address(u32 smem, u32 rank) {
    return emulator::remote_address(smem, rank);
}
__device__ __forceinline__ void store_async_16(u32 dst, u32 bar, u32 x, u32 y, u32 z, u32 w) {
    const u32 values[] = {x, y, z, w};
    emulator::store_remote(dst, bar, values, 16);
}
__device__ __forceinline__ void store_async_8(u32 dst, u32 bar, u32 x, u32 y) {
    const u32 values[] = {x, y};
    emulator::store_remote(dst, bar, values, 8);
}
__device__ __forceinline__ void store_async_4(u32 dst, u32 bar, u32 x) {
    emulator::store_remote(dst, bar, &x, 4);
}
