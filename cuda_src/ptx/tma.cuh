// Tensor memory accelerator: copies of boxes of a tensor, of 2 to 5 dimensions, between global and shared
// memory, and reductions to global memory. One thread issues. PTX ISA, "Data Movement and Conversion
// Instructions: Tensor copy" and "Bulk copy".
//
// Coordinates are those of the box's first element, the contiguous dimension first. Elements of a box that
// are out of the tensor arrive as zeros and are not stored; their bytes count all the same.
#pragma once
#include "common/types.cuh"

// L2 eviction priorities as the createpolicy instruction would encode them.
constexpr u64 kL2EvictFirst = 0x12F0000000000000ull;
constexpr u64 kL2EvictNormal = 0x1000000000000000ull;

__device__ __forceinline__ void tma_prefetch_descriptor(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// For N = 2 to 5 dimensions:
//
//   tma_load_Nd<kPriority> a box to shared memory, its bytes counted on mbarrier `bar`; evict_first in L2
//                          unless a priority is given
//   tma_load_Nd_multicast  the same to the same place in every CTA of the cluster that `cta_mask` names,
//                          counted on each one's own barrier; evict_first in L2
//   tma_prefetch_Nd        brings a box to L2
//   tma_store_Nd           shared memory to a box: see bulk_commit_group
//
// The coordinates are the last operands of an asm statement: AFTER_n are their numbers after n others.
// clang-format off
#define RAWMLA_PARAMETERS_2 int c0, int c1
#define RAWMLA_PARAMETERS_3 RAWMLA_PARAMETERS_2, int c2
#define RAWMLA_PARAMETERS_4 RAWMLA_PARAMETERS_3, int c3
#define RAWMLA_PARAMETERS_5 RAWMLA_PARAMETERS_4, int c4
#define RAWMLA_COORDINATES_2 "r"(c0), "r"(c1)
#define RAWMLA_COORDINATES_3 RAWMLA_COORDINATES_2, "r"(c2)
#define RAWMLA_COORDINATES_4 RAWMLA_COORDINATES_3, "r"(c3)
#define RAWMLA_COORDINATES_5 RAWMLA_COORDINATES_4, "r"(c4)
#define RAWMLA_TMA(DIMS, AFTER_1, AFTER_2, AFTER_4, AFTER_5)                                                 \
    template <u64 kPriority = kL2EvictFirst>                                                                 \
    __device__ __forceinline__ void tma_load_##DIMS##d(u32 dst, const TensorMap* map, u32 bar,               \
                                             RAWMLA_PARAMETERS_##DIMS) {                                     \
        asm volatile(                                                                                        \
            "cp.async.bulk.tensor." #DIMS "d.shared::cluster.global.mbarrier::complete_tx::bytes"            \
            ".L2::cache_hint [%0], [%1, {" AFTER_4 "}], [%2], %3;" ::"r"(dst), "l"(map), "r"(bar),           \
            "l"(kPriority), RAWMLA_COORDINATES_##DIMS : "memory");                                           \
    }                                                                                                        \
    __device__ __forceinline__ void tma_load_##DIMS##d_multicast(u32 dst, const TensorMap* map, u32 bar,     \
                                                                 u16 cta_mask, RAWMLA_PARAMETERS_##DIMS) {   \
        asm volatile(                                                                                        \
            "cp.async.bulk.tensor." #DIMS "d.shared::cluster.global.mbarrier::complete_tx::bytes"            \
            ".multicast::cluster.L2::cache_hint [%0], [%1, {" AFTER_5 "}], [%2], %3, %4;" ::"r"(dst),        \
            "l"(map), "r"(bar), "h"(cta_mask), "l"(kL2EvictFirst), RAWMLA_COORDINATES_##DIMS : "memory");    \
    }                                                                                                        \
    __device__ __forceinline__ void tma_prefetch_##DIMS##d(const TensorMap* map, RAWMLA_PARAMETERS_##DIMS) { \
        asm volatile(                                                                                        \
            "cp.async.bulk.prefetch.tensor." #DIMS "d.L2.global.tile [%0, {" AFTER_1 "}];" ::"l"(map),       \
            RAWMLA_COORDINATES_##DIMS : "memory");                                                           \
    }                                                                                                        \
    __device__ __forceinline__ void tma_store_##DIMS##d(const TensorMap* map, u32 src,                       \
                                             RAWMLA_PARAMETERS_##DIMS) {                                     \
        asm volatile(                                                                                        \
            "cp.async.bulk.tensor." #DIMS "d.global.shared::cta.bulk_group [%0, {" AFTER_2 "}], [%1];"       \
            ::"l"(map), "r"(src), RAWMLA_COORDINATES_##DIMS : "memory");                                     \
    }
RAWMLA_TMA(2, "%1, %2",             "%2, %3",             "%4, %5",             "%5, %6")
RAWMLA_TMA(3, "%1, %2, %3",         "%2, %3, %4",         "%4, %5, %6",         "%5, %6, %7")
RAWMLA_TMA(4, "%1, %2, %3, %4",     "%2, %3, %4, %5",     "%4, %5, %6, %7",     "%5, %6, %7, %8")
RAWMLA_TMA(5, "%1, %2, %3, %4, %5", "%2, %3, %4, %5, %6", "%4, %5, %6, %7, %8", "%5, %6, %7, %8, %9")
#undef RAWMLA_PARAMETERS_2
#undef RAWMLA_PARAMETERS_3
#undef RAWMLA_PARAMETERS_4
#undef RAWMLA_PARAMETERS_5
#undef RAWMLA_COORDINATES_2
#undef RAWMLA_COORDINATES_3
#undef RAWMLA_COORDINATES_4
#undef RAWMLA_COORDINATES_5
#undef RAWMLA_TMA
// clang-format on

// Copies `bytes` of global memory to shared memory, without a tensor map, and counts them on the barrier.
// Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar)
        : "memory");
}

// Adds `bytes` of float32 in shared memory to as many in global memory, without a tensor map. Each addition
// is atomic; their order is not fixed. Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_reduce_add_f32(float* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
                 "r"(src), "r"(bytes)
                 : "memory");
}

// Completion of stores and reductions, for the thread that issued them. bulk_commit_group makes those since
// the last commit a group. bulk_wait_group_read waits until at most kPending groups still read shared memory,
// bulk_wait_group until at most kPending are not complete. Shared memory that was written with ordinary
// stores needs fence_proxy_async before it is the source of either.
__device__ __forceinline__ void bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
