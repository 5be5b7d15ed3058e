// Thread-block clusters: ranks, barriers, and arrivals on another CTA's mbarrier.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every CTA of the cluster arrives, then waits, some time later: the others' shared-memory writes from
// before their arrival are visible then.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
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
