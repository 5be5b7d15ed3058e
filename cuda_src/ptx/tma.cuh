// Tensor memory accelerator: tiled loads of a 5-D tensor. One elected thread issues.
// PTX ISA, "Data Movement and Conversion Instructions: Tensor copy".
#pragma once
#include "common/types.cuh"

// L2 eviction priorities as the createpolicy instruction would encode them.
constexpr u64 kL2EvictFirst = 0x12F0000000000000ull;

__device__ __forceinline__ void tma_prefetch_descriptor(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Counts the box's bytes, out-of-range ones included, on `bar`. Out-of-range elements arrive as zeros.
__device__ __forceinline__ void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2,
                                            int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(kL2EvictFirst)
        : "memory");
}

// Brings a box to L2.
__device__ __forceinline__ void tma_prefetch_5d(const TensorMap* map, int c0, int c1, int c2, int c3,
                                                int c4) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

// The same box to the same place in every CTA of the cluster named in `cta_mask`, counted on each one's own barrier.
__device__ __forceinline__ void tma_load_5d_multicast(u32 dst, const TensorMap* map, u32 bar, u16 cta_mask,
                                                      int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::"
        "cache_hint "
        "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3, %9;" ::"r"(dst),
        "l"(map), "r"(bar), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(kL2EvictFirst)
        : "memory");
}
