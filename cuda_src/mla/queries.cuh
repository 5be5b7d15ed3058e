// Where Q lies. It may be two arrays: the columns before RoPE, and the 64 columns of RoPE.
//
// Strides are in units of 16 bytes, and so are offsets, which fit 32 bits. `unit` counts them in a row. One
// sum before the address is formed takes the fewest registers, and mla_sparse_fp8_cluster.cu has none to
// spare.
#pragma once
#include "common/types.cuh"

// Of the columns before RoPE.
template <class Params>
__device__ __forceinline__ const u16* q_address(const Params& params, u32 req, u32 token, u32 head,
                                                u32 unit) {
    const u32 units = req * params.q_stride_b + token * params.q_stride_s + head * params.q_stride_h + unit;
    return params.q + static_cast<u64>(units) * 8;
}
template <class Params>
__device__ __forceinline__ const u16* q_rope_address(const Params& params, u32 req, u32 token, u32 head,
                                                     u32 unit) {
    const u32 units =
        req * params.q_rope_stride_b + token * params.q_rope_stride_s + head * params.q_rope_stride_h + unit;
    return params.q_rope + static_cast<u64>(units) * 8;
}
