// Thread-block clusters: ranks, barriers, and what a CTA does in another one's shared memory.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every CTA of the cluster arrives, then waits. mbarriers that were initialised and fenced
// (mbarrier_init_fence) before are then visible to all. Other writes are not: a release here would wait for
// every store of the thread.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Any thread: one arrival on the mbarrier at the same shared-memory address of CTA `rank`.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 bar, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(bar),
        "r"(rank)
        : "memory");
}

// The same shared-memory address in CTA `rank`.
__device__ __forceinline__ u32 remote_address(u32 smem, u32 rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem), "r"(rank));
    return remote;
}

// Stores 16, 8 or 4 bytes to another CTA's shared memory. They are counted on mbarrier `bar` there, as bytes
// of TMA are. Both addresses come from remote_address.
__device__ __forceinline__ void store_async_16(u32 dst, u32 bar, u32 x, u32 y, u32 z, u32 w) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, "
        "[%1];" ::"r"(dst),
        "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
__device__ __forceinline__ void store_async_8(u32 dst, u32 bar, u32 x, u32 y) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];" ::"r"(dst),
        "r"(bar), "r"(x), "r"(y)
        : "memory");
}
__device__ __forceinline__ void store_async_4(u32 dst, u32 bar, u32 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(dst),
                 "r"(bar), "r"(x)
                 : "memory");
}
