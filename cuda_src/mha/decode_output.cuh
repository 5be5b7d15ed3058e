// Results of decoding. A thread of a warpgroup has kOwnRows / 4 query rows, i = 0, 1, ... They are columns of
// O, which is transposed (layout/transposed.cuh). Several CTAs may share a pair. Each of them then writes its
// part to scratch: floats, of which a thread has four side by side, and (reference, sum) of each row.
//
// CTA c has part 2c of a pair that another CTA begins, and part 2c + 1 of one that it begins itself.
#pragma once
#include "common/math.cuh"
#include "layout/transposed.cuh"
#include "mha/decode_fp8.cuh"
#include "mha/decode_line.cuh"
#include "mha/sink.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kThreadRows = kOwnRows / 4;
constexpr int kAccumulators = kOwnRows / 2;  // of 64 tokens, or of 64 columns of V
using Output = float[kVChunks][kAccumulators];

constexpr int kPartFloats = kVChunks * kAccumulators * 128;  // of a group of rows

// The thread's first four numbers; the next four are 128 further.
__device__ __forceinline__ float4* part_of(const Params& params, int part, int row_group) {
    return reinterpret_cast<float4*>(params.o_parts) +
           (static_cast<i64>(part) * kRowGroups + row_group) * (kPartFloats / 4) + threadIdx.x % 128;
}
__device__ __forceinline__ float2* states_of(const Params& params, int part, int row_group) {
    return reinterpret_cast<float2*>(params.states) +
           (static_cast<i64>(part) * kRowGroups + row_group) * kOwnRows;
}

// Packs 64 transposed rows (tokens or columns of V) to 16 bits, and stores them to a tile of query rows.
template <Dtype kDtype>
__device__ __forceinline__ void store_transposed(u32 tile, const float (&x)[kAccumulators], int warp_idx) {
    const int lane = lane_index();
    const int unit = 2 * warp_idx + lane / 8 % 2;
    if constexpr (kAccumulators == 4) {
        stmatrix_x2_trans(tile + Rows::offset(lane % 8, unit), pack_16bit<kDtype>(x[0], x[1]),
                          pack_16bit<kDtype>(x[2], x[3]));
    } else {
        const u32 dst = tile + lane / 16 * Rows::kGroupBytes + Rows::offset(lane % 8, unit);
#pragma unroll
        for (int j = 0; j < kAccumulators; j += 8)
            stmatrix_x4_trans(dst + j / 4 * Rows::kGroupBytes, pack_16bit<kDtype>(x[j], x[j + 1]),
                              pack_16bit<kDtype>(x[j + 2], x[j + 3]), pack_16bit<kDtype>(x[j + 4], x[j + 5]),
                              pack_16bit<kDtype>(x[j + 6], x[j + 7]));
    }
}

// The same of O, whose rows are columns of V in the order of mha/decode_fp8.cuh if the cache is FP8.
__device__ __forceinline__ void store_columns(u32 tile, const float (&o)[kAccumulators], int warp_idx) {
    if constexpr (!kFp8) {
        store_transposed<kDtype>(tile, o, warp_idx);
        return;
    }
    const int pair = lane_index() / 4;  // of 16 columns
    const int unit = 2 * warp_idx + pair / 4;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
        const int j = accumulator_of(i);
        store_shared_4(tile + Rows::offset(query_of(i), unit) + pair % 4 * 4,
                       pack_16bit<kDtype>(o[j], o[j + 2]));
    }
}

// Divides O by the sums and stores it with lse. `m` and `sum` are the thread's; `rows` is shared memory of
// the warpgroup, and `barrier` its named barrier.
__device__ __forceinline__ void store_results(const Params& params, const Walk& walk, int row_group, u32 rows,
                                              Output& o, const float (&m)[kThreadRows],
                                              const float (&sum)[kThreadRows], int warp_idx, int barrier) {
    const int first_row = walk.first_row(row_group);
    const bool segments = params.cu_seqlens_q != nullptr;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
        const RowPlace row(params, walk, first_row + query_of(i));
        float factor = 0.0f, lse = -kInfinity;
        if (sum[i] != 0.0f && row.exists) {
            factor = reciprocal_approx(add_sink(params.attn_sink, params.sink_dtype, row.head, m[i], sum[i]));
            if constexpr (kFp8)
                factor *=
                    descale(params.v_descale, params.v_descale_stride_b, params.v_descale_stride_h, walk);
            lse = (m[i] + log2_approx(sum[i])) * kLn2;
        }
        if (row.exists && warp_idx == 0 && lane_index() < 4) {
            const i64 request = segments ? 0 : walk.index * params.lse_stride_b;
            params.lse[request + row.head * params.lse_stride_h + walk.request.q_begin + row.token] = lse;
        }
        const int j = accumulator_of(i);
#pragma unroll
        for (int chunk = 0; chunk < kVChunks; ++chunk) {
            o[chunk][j] = factor == 0.0f ? 0.0f : o[chunk][j] * factor;
            o[chunk][j + 2] = factor == 0.0f ? 0.0f : o[chunk][j + 2] * factor;
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < kVChunks; ++chunk)
        store_columns(rows + chunk * Rows::kBytes, o[chunk], warp_idx);
    named_barrier_sync(barrier, 128);
    const int unit = threadIdx.x % 8;
#pragma unroll
    for (int own = threadIdx.x % 128 / 8; own < kOwnRows; own += 16) {
        const RowPlace row(params, walk, first_row + own);
        if (!row.exists) continue;
        u16* out = params.out + (segments ? 0 : walk.index * params.out_stride_b) +
                   (walk.request.q_begin + row.token) * params.out_stride_s + row.head * params.out_stride_h;
#pragma unroll
        for (int chunk = 0; chunk < kVChunks; ++chunk) {
            const int column = 64 * chunk + 8 * unit;
            if (column < params.d_v)
                *reinterpret_cast<uint4*>(out + column) =
                    load_shared_16(rows + chunk * Rows::kBytes + Rows::offset(own, unit));
        }
    }
}
