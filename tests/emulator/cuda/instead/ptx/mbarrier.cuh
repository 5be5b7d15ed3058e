// In place of cuda_src/ptx/mbarrier.cuh.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) { emulator::mbarrier_init(bar, count); }
__device__ __forceinline__ void mbarrier_init_fence() {}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) { emulator::mbarrier_arrive(bar, 0); }
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    emulator::mbarrier_arrive(bar, bytes);
}
__device__ __forceinline__ void mbarrier_expect_tx(u32 bar, u32 bytes) {
    emulator::mbarrier_expect(bar, bytes);
}
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    emulator::mbarrier_wait(bar, parity);
}
__device__ __forceinline__ bool mbarrier_has_completed(u32 bar, u32 parity) {
    return emulator::mbarrier_has_completed(bar, parity);
}
