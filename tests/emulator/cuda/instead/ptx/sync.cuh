// In place of cuda_src/ptx/sync.cuh. A forgotten fence_proxy_async goes unnoticed. Kernels run one after the
// other, so there is nothing for griddepcontrol to do.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    emulator::named_barrier_sync(id, threads, false);
}
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool condition) {
    return emulator::named_barrier_sync(id, threads, condition).any;
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    emulator::named_barrier_arrive(id, threads);
}
__device__ __forceinline__ void fence_proxy_async() {}
__device__ __forceinline__ void fence_proxy_async_global() {}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {}
__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }
__device__ __forceinline__ bool elect_one_sync() {
    emulator_ballot(0xffffffff, true, "elect");
    return threadIdx.x % 32 == 0;
}
__device__ __forceinline__ void griddepcontrol_wait() {}
__device__ __forceinline__ void griddepcontrol_launch_dependents() {}
