// Moving between the layout of matrix fragments, where the four lanes of a quad hold neighbouring pairs of 16-bit elements
// (or floats) of eight columns, and 16-byte accesses, where one lane holds all eight.
#pragma once
#include "common/types.cuh"

// Transposes a 4 x 4 matrix of words held by a quad (row = lane % 4, column = index). All lanes of the warp call.
__device__ __forceinline__ void quad_transpose(u32 (&v)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const u32 r0 = __shfl_xor_sync(0xffffffff, odd ? v[0] : v[1], 1);
    const u32 r1 = __shfl_xor_sync(0xffffffff, odd ? v[2] : v[3], 1);
    v[0] = odd ? r0 : v[0];
    v[1] = odd ? v[1] : r0;
    v[2] = odd ? r1 : v[2];
    v[3] = odd ? v[3] : r1;
    const u32 r2 = __shfl_xor_sync(0xffffffff, upper ? v[0] : v[2], 2);
    const u32 r3 = __shfl_xor_sync(0xffffffff, upper ? v[1] : v[3], 2);
    v[0] = upper ? r2 : v[0];
    v[1] = upper ? r3 : v[1];
    v[2] = upper ? v[2] : r2;
    v[3] = upper ? v[3] : r3;
}

// In: a pair of floats each of two groups of eight columns, as a fragment holds them. Out: four neighbouring floats, of
// the first group in even lanes and of the second in odd ones. All lanes of the warp call.
__device__ __forceinline__ float4 quad_pairs_to_float4(float2 first, float2 second) {
    const bool odd = threadIdx.x & 1;
    const float x = __shfl_xor_sync(0xffffffff, odd ? first.x : second.x, 1);
    const float y = __shfl_xor_sync(0xffffffff, odd ? first.y : second.y, 1);
    return odd ? make_float4(x, y, second.x, second.y) : make_float4(first.x, first.y, x, y);
}
