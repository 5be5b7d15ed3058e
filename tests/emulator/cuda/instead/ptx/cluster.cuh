// In place of cuda_src/ptx/cluster.cuh: clusters are not emulated.
#pragma once
#include "common/types.cuh"

[[noreturn]] inline void emulator_no_clusters() { emulator::fail("clusters are not emulated"); }

__device__ __forceinline__ u32 cluster_ctarank() { emulator_no_clusters(); }
__device__ __forceinline__ void cluster_arrive() { emulator_no_clusters(); }
__device__ __forceinline__ void cluster_wait() { emulator_no_clusters(); }
__device__ __forceinline__ void mbarrier_arrive_remote(u32 bar, u32 rank) { emulator_no_clusters(); }
__device__ __forceinline__ u32 remote_address(u32 smem, u32 rank) { emulator_no_clusters(); }
__device__ __forceinline__ void store_async_16(u32 dst, u32 bar, u32 x, u32 y, u32 z, u32 w) {
    emulator_no_clusters();
}
__device__ __forceinline__ void store_async_8(u32 dst, u32 bar, u32 x, u32 y) { emulator_no_clusters(); }
__device__ __forceinline__ void store_async_4(u32 dst, u32 bar, u32 x) { emulator_no_clusters(); }
