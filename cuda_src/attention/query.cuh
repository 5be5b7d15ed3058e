// The Q of a tile of 64 rows where Q K^T has most of it in registers: A operands cost no shared-memory reads.
//
// `Params` has q and its strides, and `Row` is as in output.cuh. Of Q's columns the first kSteps of 16 are to be in registers, and the
// last kSharedChunks of 64 in shared memory.
#pragma once
#include "attention/output.cuh"
#include "common/types.cuh"
#include "layout/fragments.cuh"
#include "layout/swizzle128.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

// Stands in for query rows past the last. Zeros, because a tensor core that multiplies zeros takes less power, and power
// is what limits the clock.
__device__ alignas(16) const u16 kZeroRow[D_QK] = {};

template <class Row, class Params>
__device__ __forceinline__ const u16* q_address(const Params& params, int req, int tile_row) {
    const Row row(params, tile_row);
    if (!row.valid) return kZeroRow;
    return params.q + req * params.q_stride_b + row.token * params.q_stride_s + row.head * params.q_stride_h;
}

// A thread's row of accumulators, one of two: where what it loads of the row to registers begins.
template <class Row, class Params>
__device__ __forceinline__ const uint4* q_units(const Params& params, int req, int warp_idx, int r) {
    const int tile_row = warp_idx * 16 + lane_index() / 4 + 8 * r;
    return reinterpret_cast<const uint4*>(q_address<Row>(params, req, tile_row)) + lane_index() % 4;
}

// 16 bytes of each two steps of a row, to be turned into A fragments.
template <int kSteps>
__device__ __forceinline__ void load_q_row(const uint4* src, u32 (&q)[kSteps][4], int r) {
    static_assert(kSteps % 2 == 0, "steps come in pairs");
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
        const uint4 value = src[4 * i];
        q[2 * i + r][0] = value.x;
        q[2 * i + r][1] = value.y;
        q[2 * i + r][2] = value.z;
        q[2 * i + r][3] = value.w;
    }
}

// Starts loading the Q of an item. Rows past the last are zero.
template <class Row, int kSharedChunks, int kSteps, class Params>
__device__ __forceinline__ void start_load_q(const Params& params, const unsigned char* smem_q, int req,
                                             u32 (&q)[kSteps][4], int warp_idx) {
    const int lane_idx = lane_index();
    const int thread = warp_idx * 32 + lane_idx;
#pragma unroll 1
    for (int tile_row = thread / 8; tile_row < kBlockM; tile_row += 16) {
        const u16* src =
            q_address<Row>(params, req, tile_row) + D_QK - kSharedChunks * kChunkCols + thread % 8 * 8;
        const u32 dst = smem_address(smem_q) + swizzle128_offset(tile_row, thread % 8);
#pragma unroll
        for (int chunk = 0; chunk < kSharedChunks; ++chunk) {
            cp_async_16(dst + chunk * kChunkBytes, src + chunk * kChunkCols);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) load_q_row<kSteps>(q_units<Row>(params, req, warp_idx, r), q, r);
}
// Turns what was loaded into A fragments: of four 16-byte units in a quad, lane i takes the i-th pairs.
template <int kRows>
__device__ __forceinline__ void make_q_fragments(u32 (&q)[kRows][4]) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
        quad_transpose(q[2 * i]);
        quad_transpose(q[2 * i + 1]);
        const u32 first[4] = {q[2 * i][0], q[2 * i + 1][0], q[2 * i][1], q[2 * i + 1][1]};
        const u32 second[4] = {q[2 * i][2], q[2 * i + 1][2], q[2 * i][3], q[2 * i + 1][3]};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            q[2 * i][j] = first[j];
            q[2 * i + 1][j] = second[j];
        }
    }
}
