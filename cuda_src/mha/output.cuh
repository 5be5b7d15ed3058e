// The 64 rows of a tile that a consumer has, and how their results are stored: out by TMA or row by row, lse
// and the largest scores. A split of the keys stores O and lse in float32.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/cta.cuh"
#include "mha/params.cuh"
#include "mha/sink.cuh"
#include "mha/softmax.cuh"
#include "mha/tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

struct Rows64 {
    const Params& params;
    SharedMemoryPlan& smem;
    const int wg, warp_idx;
    const bool leads;  // the first thread of the warpgroup

    using Output = float[kDimV / 2];

    // Read from the tile again at each use: kept, it would take registers.
    __device__ __forceinline__ int row_of(int r) const {
        return wg * 64 + warp_idx * 16 + lane_index() / 4 + 8 * r;
    }
    __device__ __forceinline__ int token_of(const Tile& tile, int r) const {
        return tile.first_token + (row_of(r) >> params.log2_group);
    }
    __device__ __forceinline__ int head_of(const Tile& tile, int r) const {
        return (tile.head << params.log2_group) + (row_of(r) & ((1 << params.log2_group) - 1));
    }

    // What the scores and V of the span are multiplied by, which an FP8 cache needs.
    struct Scales {
        float k = 1.0f, v = 1.0f;
    };
    // From scores as the score step leaves them to exponents of 2
    __device__ __forceinline__ float softmax_scale_log2(const Scales& scales) const {
        return kCacheIsFp8 && !kAlibi ? params.softmax_scale_log2 * scales.k : params.softmax_scale_log2;
    }
    // scale x and log2 y in base e, where `scaled` is scale x in base 2. It may overflow where x does not.
    __device__ __forceinline__ float to_natural(float x, float scaled, float y_log2,
                                                const Scales& scales) const {
        if (fabsf(scaled) == kInfinity && x != -kInfinity) return x * (softmax_scale_log2(scales) * kLn2);
        return (scaled + y_log2) * kLn2;
    }

    // Results of the tile, which is free then, as is Q.
    __device__ __forceinline__ void store(const Tile& tile, const TileReader& reader, Output& o,
                                          LazySoftmax<kMaxScores>& softmax, const Scales& scales) const {
        float factor[2];
        const bool split = params.splits > 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = token_of(tile, r), head = head_of(tile, r);
            // Tokens past q_len get the results of a row without keys.
            const float sum = quad_sum(softmax.l[r]);
            const float l = token < tile.q_len ? sum : 0.0f;
            const float m = softmax.m[r] * softmax_scale_log2(scales);
            const float all = split ? l : add_sink(params.attn_sink, params.sink_dtype, head, m, l);
            factor[r] = l == 0.0f ? 0.0f : reciprocal_approx(all);
            if constexpr (kCacheIsFp8) factor[r] *= scales.v;
            float* lse = split ? params.lse_accum + tile.split * params.accum_rows : params.lse;
            if (lse != nullptr && leads_quad() && token < tile.q_rows)
                lse[place_of(tile, token, head)] =
                    l == 0.0f ? -kInfinity : to_natural(softmax.m[r], m, log2_approx(l), scales);
#if FLEX
            if (kMaxScores && leads_quad() && token < tile.q_rows)
                params.max_scores[place_of(tile, token, head)] = to_natural(
                    softmax.top_score[r], softmax.top_score[r] * softmax_scale_log2(scales), 0.0f, scales);
#endif
        }
        if (kOutIsFp8 && !split) {
            const float scale = params.out_scale == nullptr ? params.out_scale_value : *params.out_scale;
            factor[0] /= scale;
            factor[1] /= scale;
        }
        // Where a row has no key, O may be 0 times Inf of keys that other rows see.
        const bool empty[2] = {factor[0] == 0.0f, factor[1] == 0.0f};
        auto result = [&](int j) {
            const int r = (j >> 1) & 1;
            return empty[r] ? 0.0f : o[j] * factor[r];
        };
        if (split) {
            store_split(tile, reader, result);
            return;
        }
        if constexpr (kOwnOutput) {
            if (leads) bulk_wait_group_read<0>();  // of the tile before
        }
        // Q is given back only when no warp reads it or still waits for it: q_full would pass on to its next
        // phase. 16-bit rows of O over Q lie where the warp's own rows of Q were, which no other warp reads;
        // FP8 rows lie elsewhere, so that all warps must have read theirs.
        if constexpr (kOwnOutput || kOutIsFp8) named_barrier_sync(NB_OWN + wg, 128);
        if constexpr (kOwnOutput) {
            if (leads) mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
        }
        unsigned char* staged = staged_rows();
        const u32 smem_o = smem_address(staged);
        if constexpr (kOutIsFp8) {
            // Rows of kDimV bytes
            u16* dst = reinterpret_cast<u16*>(staged) + (warp_idx * 16 + lane_index() / 4) * (kDimV / 2) +
                       lane_index() % 4;
#pragma unroll
            for (int j = 0; j < kDimV / 2; j += 2) {
                const u32 pair = pack_e4m3(result(j), result(j + 1), 0.0f, 0.0f);
                dst[((j >> 1) & 1) * 8 * (kDimV / 2) + j / 4 * 4] = static_cast<u16>(pair);
            }
        } else {
            const u32 dst = smem_o + Rows::offset(warp_idx * 16 + lane_index() % 16, lane_index() / 16);
#pragma unroll
            for (int k = 0; k < kDimV / 16; ++k) {
                u32 packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    packed[i] = pack_16bit<kDtype>(result(8 * k + 2 * i), result(8 * k + 2 * i + 1));
                stmatrix_x4((dst ^ (32 * (k % 4))) + k / 4 * Rows::kBytes, packed[0], packed[1], packed[2],
                            packed[3]);
            }
        }
        const int first_token = tile.first_token + (wg * 64 >> params.log2_group);
        const int tokens = 64 >> params.log2_group;
        const int q_begin = tile.q_begin, head = tile.head, request = tile.request, rows = tile.q_rows;
        fence_proxy_async();
        named_barrier_sync(NB_OWN + wg, 128);
        reader.release();
        // TMA would write past the end of a segment.
        if (!kOutIsFp8 && !params.out_by_rows &&
            (params.cu_seqlens_q == nullptr || first_token + tokens <= rows)) {
            if (leads) {
#pragma unroll
                for (int chunk = 0; chunk < kChunksV; ++chunk)
                    tma_store_5d(&params.out_map, smem_o + chunk * Rows::kBytes, 64 * chunk, 0,
                                 q_begin + first_token, head, params.cu_seqlens_q == nullptr ? request : 0);
                bulk_commit_group();
                if constexpr (!kOwnOutput) {
                    bulk_wait_group_read<0>();
                    mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
                }
            }
        } else {
            store_rows(request, q_begin, first_token, rows, head);
            if constexpr (!kOwnOutput) {
                fence_proxy_async();
                named_barrier_sync(NB_OWN + wg, 128);
                if (leads) mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
            }
        }
    }
    // Where O waits for its copy to global memory
    __device__ __forceinline__ unsigned char* staged_rows() const {
        return kOwnOutput ? smem.o[wg] : smem.q[wg];
    }
    // The place of a row in lse, and among the rows of a split.
    __device__ __forceinline__ i64 place_of(const Tile& tile, int token, int head) const {
        const i64 place = head * params.lse_stride_h + tile.q_begin + token;
        return params.cu_seqlens_q == nullptr ? place + tile.request * params.lse_stride_b : place;
    }
    // Results of a split in float32, to be combined by kernels/mha_combine.cu.
    template <class Result>
    __device__ __forceinline__ void store_split(const Tile& tile, const TileReader& reader,
                                                Result result) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = token_of(tile, r), head = head_of(tile, r);
            if (token < tile.q_rows) {
                const i64 row = tile.split * params.accum_rows + place_of(tile, token, head);
                float* dst = params.o_accum + row * kDimV + 2 * (lane_index() % 4);
#pragma unroll
                for (int j = 2 * r; j < kDimV / 2; j += 4)
                    *reinterpret_cast<float2*>(dst + 2 * j - 4 * r) = make_float2(result(j), result(j + 1));
            }
        }
        named_barrier_sync(NB_OWN + wg, 128);
        reader.release();
        if (leads) mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
    }
    // Tokens below `rows` of what `store` has put in shared memory, without TMA.
    __device__ __forceinline__ void store_rows(int request, int q_begin, int first_token, int rows,
                                               int head) const {
        constexpr int kBytes = kOutIsFp8 ? 1 : 2;  // of an element
        constexpr int kUnit = 16 / kBytes, kRowUnits = ceil_div(kDimV, kUnit);
        const int group = 1 << params.log2_group;
        const i64 batch = params.cu_seqlens_q == nullptr ? request * params.out_stride_b : 0;
        for (int i = threadIdx.x % 128; i < 64 * kRowUnits; i += 128) {
            const int row = i / kRowUnits, unit = i % kRowUnits;
            const int token = first_token + (row >> params.log2_group);
            if (token >= rows) break;
            const unsigned char* src =
                staged_rows() +
                (kOutIsFp8 ? row * kDimV + 16 * unit : unit / 8 * Rows::kBytes + Rows::offset(row, unit % 8));
            const i64 element = batch + (q_begin + token) * params.out_stride_s +
                                (head * group + (row & (group - 1))) * params.out_stride_h + kUnit * unit;
            unsigned char* out = static_cast<unsigned char*>(params.out) + element * kBytes;
            const int bytes = min_int(16, (params.d_v - kUnit * unit) * kBytes);
            if (bytes == 16 && reinterpret_cast<u64>(out) % 16 == 0) {
                *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(src);
            } else {
                for (int byte = 0; byte < bytes; ++byte) out[byte] = src[byte];
            }
        }
    }
};
