// Caches of e4m3 numbers. K and V are the operands of WGMMA that come from registers: each warpgroup of math
// reads them from shared memory as bytes and makes them float16, which is exact.
//
// K   A lane reads 16 bytes of its row, which are its elements of four steps of 16 columns. So of 64 columns,
//     step s has as its columns 2c + e and 8 + 2c + e (c < 4, e < 2) the columns 16c + 4s + e and
//     16c + 4s + 2 + e, and Q lies in shared memory in that order. Units of a row are permuted so that eight
//     lanes, which read four units of two rows, meet all banks.
// V   Pairs of columns are transposed as 16-bit elements. So of 16 rows of O^T, row i is column 2i, and row
//     i + 8 column 2i + 1.
#pragma once
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "mha/decode_line.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

// Byte offset of 16-byte unit `unit` of row `row` of K.
__device__ __forceinline__ constexpr u32 k_offset(int row, int unit) {
    if constexpr (!kFp8) return Keys::offset(row, unit);
    return row * Keys::kRowBytes + ((unit ^ ((row & 1) << 2 | (row >> 1 & 3))) << 4);
}

// The factor of a pair's array of factors.
__device__ __forceinline__ float descale(const float* factors, i64 stride_b, i64 stride_h, const Walk& walk) {
    return factors == nullptr ? 1.0f : factors[walk.index * stride_b + walk.head * stride_h];
}

#if CACHE_FP8
// Two columns of q as float16. A number beyond its range becomes its largest one.
__device__ __forceinline__ u32 two_columns(const QElement* q) {
#if Q_FP8
    u32 low, high;
    e4m3_to_f16(*reinterpret_cast<const u16*>(q), low, high);
    return low;
#else
    const auto in_range = [](float x) {
        constexpr float kMost = 65504.0f;
        return fabsf(x) < kInfinity ? fminf(fmaxf(x, -kMost), kMost) : x;  // infinity and NaN stay
    };
    const float2 x = unpack_16bit<kDtype>(*reinterpret_cast<const u32*>(q));
    return pack_16bit<Dtype::kF16>(in_range(x.x), in_range(x.y));
#endif
}
// The 16 bytes of Q that `unit` has of 64 columns at q; zeros past column d.
__device__ __forceinline__ uint4 q_unit(const QElement* q, int unit, int d) {
    uint4 value;
    u32* words = &value.x;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int column = 16 * c + 4 * (unit / 2) + 2 * (unit % 2);
        words[c] = column < d ? two_columns(q + column) : 0;
    }
    return value;
}

// A fragments of K of 64 columns: 16 tokens of the warp from `first_row` on.
__device__ __forceinline__ void load_k_fragments(u32 (&a)[4][4], u32 tile, int first_row, int half) {
    const int row = first_row + lane_index() / 4, unit = 4 * half + lane_index() % 4;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
        const uint4 bytes = load_shared_16(tile + k_offset(row + 8 * below, unit));
        const u32* words = &bytes.x;
#pragma unroll
        for (int step = 0; step < 4; ++step) e4m3_to_f16(words[step], a[step][below], a[step][2 + below]);
    }
}

// A fragments of V^T of 32 tokens from `first_token` on: the 16 columns of a unit.
__device__ __forceinline__ void load_v_fragments(u32 (&a)[2][4], u32 tile, int first_token, int unit) {
    u32 pairs[4];
    ldmatrix_x4_trans(pairs, tile + Keys::offset(first_token + lane_index(), unit));
#pragma unroll
    for (int matrix = 0; matrix < 4; ++matrix) {
        const u32 bytes = __byte_perm(pairs[matrix], 0, 0x3120);
        e4m3_to_f16(bytes, a[matrix / 2][matrix % 2 * 2], a[matrix / 2][matrix % 2 * 2 + 1]);
    }
}
#endif
