// How an attention kernel stores a work tile: the rows of a whole request to the output, those of a split to
// scratch (mla/splits.cuh).
//
// `Params` names sizes, pointers and strides as below. With a member `max_logits` they belong to a prefill
// kernel, which also stores the largest score of each row. `Row` is constructed from the params and a row of
// the CTA's tile. It names the query token and the head of that row, and says whether the row exists.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragment_rows.cuh"
#include "layout/fragments.cuh"
#include "mla/dimensions.cuh"
#include "mla/plan.cuh"
#include "mla/sink.cuh"
#include "mla/splits.cuh"
#include "ptx/sync.cuh"

template <class Params, class Row>
__device__ __forceinline__ i64 lse_index(const Params& params, int req, const Row& row) {
    return lse_index(params, req, row.token, row.head);
}
// Row of o_accum.
template <class Params, class Row>
__device__ __forceinline__ i64 split_row(const Params& params, int split_idx, const Row& row) {
    return (static_cast<i64>(split_idx) * params.s_q + row.token) * params.h_q + row.head;
}
template <class Params, class Row>
__device__ __forceinline__ u16* out_address(const Params& params, int req, const Row& row) {
    return params.out + req * params.out_stride_b + row.token * params.out_stride_s +
           row.head * params.out_stride_h;
}
// These two store the largest score of row `tile_row`, of a split or of the request, if shared memory has it.
template <class Params, class Smem>
__device__ __forceinline__ void store_split_top(const Params& params, const Smem& smem, i64 accum_row,
                                                int tile_row) {
    if constexpr (requires { params.max_logits, smem.row_top; })
        params.max_accum_log2[accum_row] = smem.row_top[tile_row];
}
template <class Params, class Smem>
__device__ __forceinline__ void store_top(const Params& params, const Smem& smem, i64 index, int tile_row) {
    if constexpr (requires { params.max_logits, smem.row_top; })
        params.max_logits[index] = smem.row_top[tile_row] * lse_factor(params);
}

// Stores half of the columns, 0-255 or 256-511, of two rows per thread, from the accumulators of P V.
template <Dtype kDtype, class Row, class Params, class Smem>
__device__ __forceinline__ void store_rows(const Params& params, const Smem& smem, const WorkTile& work,
                                           float (&o)[128], int warp_idx, int half) {
    const bool is_split = work.split_idx >= 0;
    SplitScale scales[2];
    if (kFloat16Splits<kDtype> && is_split) {
        float top[2] = {};
#pragma unroll
        for (int j = 0; j < 128; j += 4) max_magnitudes(top, o[j], o[j + 1], o[j + 2], o[j + 3]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            scales[r] = SplitScale(quad_max(top[r]));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const SplitScale scale = scales[r];
        const int quad_lane = lane_index() % 4;
        const int tile_row = warp_idx * 16 + lane_index() / 4 + 8 * r;
        const Row row(params, tile_row);
        const float sum = smem.row_sum[tile_row];
        const float lse_log2 = smem.row_max[tile_row] + log2_approx(sum);
        const bool writes_scalars = quad_lane == 0 && row.valid;
        if (is_split) {
            const i64 accum_row = split_row(params, work.split_idx, row);
            if (writes_scalars) {
                if (half == 0) {
                    params.lse_accum_log2[accum_row] = sum == 0.0f ? -kInfinity : lse_log2;
                    store_split_top(params, smem, accum_row, tile_row);
                }
                params.o_scale_log2[accum_row * kScaleHalves + half] = smem.row_max[tile_row] + scale.log2();
            }
            if (row.valid) {
                uint4* units = static_cast<uint4*>(params.o_accum) +
                               (accum_row * 2 + half) * kUnitsPerHalf<kDtype> + quad_lane;
#pragma unroll
                for (int unit = 0; unit < kUnitsPerHalf<kDtype>; unit += 4) {
                    const float* pairs = &o[kGroupsPerUnit<kDtype> * unit + 2 * r];
                    if constexpr (kFloat16Splits<kDtype>) {
                        store_unit_f16(units + unit, scale.factor, pairs[0], pairs[1], pairs[4], pairs[5],
                                       pairs[8], pairs[9], pairs[12], pairs[13]);
                    } else {
                        store_unit_f32(units + unit, pairs[0], pairs[1], pairs[4], pairs[5]);
                    }
                }
            }
        } else {
            if (half == 0 && writes_scalars) {
                const i64 index = lse_index(params, work.req, row);
                params.lse[index] = sum == 0.0f ? kInfinity : lse_log2 * lse_factor(params);
                store_top(params, smem, index, tile_row);
            }
            float factor = sum == 0.0f ? 0.0f : reciprocal_approx(sum);
            if constexpr (requires { params.attn_sink; }) {
                if (row.valid && sum != 0.0f) factor *= sink_factor(params.attn_sink, row.head, lse_log2);
            }
            u16* out = out_address(params, work.req, row) + half * (kDimV / 2) + 8 * quad_lane;
#pragma unroll
            for (int j = 0; j < 32; j += 4) {
                const float* pair = &o[4 * j + 2 * r];
                store_four_groups_16bit<kDtype>(out + 8 * j, row.valid, factor, pair[0], pair[1], pair[4],
                                                pair[5], pair[8], pair[9], pair[12], pair[13]);
            }
        }
    }
}

// Stores a work tile without tokens. For a request the output is 0, lse is +inf and the largest score -inf.
// For a split lse_accum_log2 is -inf, by which mla_combine recognises it. A converged warp calls.
template <Dtype kDtype, class Row, class Params>
__device__ __forceinline__ void store_empty(const Params& params, const WorkTile& empty, int lane_idx) {
    for (int tile_row = 0; tile_row < kBlockM; ++tile_row) {
        const Row row(params, tile_row);
        if (!row.valid) return;
        const bool is_split = empty.split_idx >= 0;
        constexpr int kSplitBytes = kFloat16Splits<kDtype> ? 2 : 4;  // of a value
        const i64 accum_row = is_split ? split_row(params, empty.split_idx, row) : 0;
        uint4* vectors = is_split
                             ? static_cast<uint4*>(params.o_accum) + accum_row * (kDimV * kSplitBytes / 16)
                             : reinterpret_cast<uint4*>(out_address(params, empty.req, row));
        const int bytes = kDimV * (is_split ? kSplitBytes : 2);
        for (int i = lane_idx; i < bytes / 16; i += 32) vectors[i] = make_uint4(0, 0, 0, 0);
        if (lane_idx > 0) continue;
        if (is_split) {
            params.lse_accum_log2[accum_row] = -kInfinity;
            if constexpr (requires { params.max_logits; }) params.max_accum_log2[accum_row] = -kInfinity;
            for (int half = 0; half < kScaleHalves; ++half) {
                params.o_scale_log2[accum_row * kScaleHalves + half] = -kInfinity;
            }
        } else {
            const i64 index = lse_index(params, empty.req, row);
            params.lse[index] = kInfinity;
            if constexpr (requires { params.max_logits; }) params.max_logits[index] = -kInfinity;
        }
    }
}
