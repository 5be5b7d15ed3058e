// Score and output fragments of transposed products, where tokens (or columns of V) are rows and queries are
// columns: for tiles of few queries. Of 4 n queries a thread has n, i = 0 .. n - 1, and two rows of each:
// lane / 4 and that + 8.
#pragma once
#include "common/types.cuh"
#include "ptx/sync.cuh"

// The thread's query i, and the accumulator of its first row. The second row's comes two after it.
__device__ __forceinline__ int query_of(int i) { return 8 * (i / 2) + lane_index() % 4 * 2 + i % 2; }
__device__ __forceinline__ constexpr int accumulator_of(int i) { return i / 2 * 4 + i % 2; }

// Over the lanes of a warp that have the same queries.
__device__ __forceinline__ float max_over_rows(float value) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, distance));
    return value;
}
__device__ __forceinline__ float sum_over_rows(float value) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
        value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}

// The largest and the sum of what the four warps of a warpgroup have written at index i, for a query or a
// group of columns.
template <int kCount>
__device__ __forceinline__ float max_of_warps(const float (&of_warps)[4][kCount], int i) {
    return fmaxf(fmaxf(of_warps[0][i], of_warps[1][i]), fmaxf(of_warps[2][i], of_warps[3][i]));
}
template <int kCount>
__device__ __forceinline__ float sum_of_warps(const float (&of_warps)[4][kCount], int i) {
    return of_warps[0][i] + of_warps[1][i] + of_warps[2][i] + of_warps[3][i];
}
