// The rows of a score or output fragment (ptx/wgmma.cuh) and the lanes that share them. A thread has two
// rows, r = 0 and 1: 16 warp + lane / 4 + 8 r of the warpgroup's 64. The four lanes of a quad have the same
// two.
#pragma once
#include "common/types.cuh"
#include "ptx/sync.cuh"

// One lane of a quad, which reads, writes and arrives for the quad's rows. It does all three:
// compute-sanitizer's racecheck does not see that __syncwarp orders what other lanes did before one lane's
// arrival.
__device__ __forceinline__ bool leads_quad() { return lane_index() % 4 == 0; }

__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffff, value, 1);
    value += __shfl_xor_sync(0xffffffff, value, 2);
    return value;
}
// What the leading lane has.
template <class T>
__device__ __forceinline__ T quad_broadcast(T value) {
    return __shfl_sync(0xffffffff, value, 0, 4);
}

// Row 0 of the thread's in an array of 64 rows; row 1 is eight elements behind.
template <class T>
__device__ __forceinline__ T* first_row(T* rows, int warp_idx) {
    return rows + warp_idx * 16 + lane_index() / 4;
}
