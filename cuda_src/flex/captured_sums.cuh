// Sums of what scores add to the gradients of captured arrays (flex/mods.cuh, Site), for fragments with
// keys on their rows. A site whose place depends on no key is summed over a warp's keys of a block; one whose
// place depends on no query, over all queries of a head; one whose place depends on neither, over both. Then,
// or at once where it depends on both, sums are added to global memory.
//
// PASS   0   to float32, in any order
//        1   nothing is added: the largest absolute value of a gradient's sums is found
//        2   to integers, in units that follow from it: in any order the result is the same
//        3   to integers, digit by digit: in any order the result is the same, and pass 1 is not needed
#pragma once
#include "flex/captured_cells.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "ptx/sync.cuh"

// Of the sites before site `end`, those whose place depends on queries alone.
__device__ __forceinline__ constexpr int sites_of_queries(int end) {
    int count = 0;
    for (int i = 0; i < end; ++i) count += ScoreMod::kSite[i].by_q && !ScoreMod::kSite[i].by_kv;
    return count;
}

struct CapturedSums {
    static constexpr int kSites = ScoreMod::kSites;
    static constexpr int kPass = PASS;

    // What a thread has of a block's queries: 16 columns of each such site.
    struct Block {
        static constexpr int kCount = sites_of_queries(kSites);
        float sums[kCount > 0 ? kCount : 1][kBlockRows / 4];

        __device__ __forceinline__ void clear() {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int j = 0; j < kBlockRows / 4; ++j) sums[i][j] = 0.0f;
        }
    };
    // What ScoreMod::captured_gradients calls for a score of the thread's: of its column `query`, its key
    // `key`.
    struct Sink {
        CapturedSums& all;
        Block& block;
        const int query, key;
        const bool seen;

        template <int kIndex>
        __device__ __forceinline__ void add(i64 place, float value) const {
            constexpr Site kSite = ScoreMod::kSite[kIndex];
            const float part = seen ? value : 0.0f;
            if constexpr (kSite.by_q && kSite.by_kv) {
                all.emit<kSite.gradient>(place, part);
            } else if constexpr (kSite.by_q) {
                block.sums[sites_of_queries(kIndex)][query] += part;
            } else {
                all.of_head[kIndex][kSite.by_kv ? key : 0] += part;
            }
        }
    };

    const Params& params;
    float of_head[kSites][2];
    float largest[ScoreMod::kGradients];

    __device__ __forceinline__ explicit CapturedSums(const Params& params) : params(params) {
#pragma unroll
        for (int i = 0; i < kSites; ++i) of_head[i][0] = of_head[i][1] = 0.0f;
#pragma unroll
        for (int i = 0; i < ScoreMod::kGradients; ++i) largest[i] = 0.0f;
    }

    // All lanes. A block's sums over the keys of the warp; `first` is its first query.
    template <int kIndex = 0>
    __device__ __forceinline__ void flush_queries(Block& block, int b, int h, int first) {
        if constexpr (kIndex < kSites) {
            constexpr Site kSite = ScoreMod::kSite[kIndex];
            if constexpr (kSite.by_q && !kSite.by_kv) {
                float (&sums)[kBlockRows / 4] = block.sums[sites_of_queries(kIndex)];
                const int lane = lane_index();
                halve<8>(sums, lane);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int q_idx = first + 2 * lane + j;
                    if (q_idx < params.seqlen_q)
                        emit<kSite.gradient>(place_of<kIndex>(b, h, q_idx, 0), sums[j]);
                }
            }
            flush_queries<kIndex + 1>(block, b, h, first);
        }
    }
    // All lanes. The sums over the queries of a head; the thread's two keys.
    template <int kIndex = 0>
    __device__ __forceinline__ void flush_head(int b, int h, int first_key, int second_key) {
        if constexpr (kIndex < kSites) {
            constexpr Site kSite = ScoreMod::kSite[kIndex];
            if constexpr (!kSite.by_q) {
#pragma unroll
                for (int r = 0; r < (kSite.by_kv ? 2 : 1); ++r) {
                    float sum = of_head[kIndex][r];
                    of_head[kIndex][r] = 0.0f;
#pragma unroll
                    for (int distance = kSite.by_kv ? 2 : 16; distance > 0; distance /= 2)
                        sum += __shfl_xor_sync(0xffffffff, sum, distance);
                    const int kv_idx = !kSite.by_kv ? 0 : r == 0 ? first_key : second_key;
                    if (lane_index() % (kSite.by_kv ? 4 : 32) == 0 && kv_idx < params.seqlen_k)
                        emit<kSite.gradient>(place_of<kIndex>(b, h, 0, kv_idx), sum);
                }
            }
            flush_head<kIndex + 1>(b, h, first_key, second_key);
        }
    }
    // All lanes, at the end.
    __device__ __forceinline__ void finish() {
        if constexpr (kPass == 1) {
#pragma unroll
            for (int i = 0; i < ScoreMod::kGradients; ++i) {
                const u32 most = __reduce_max_sync(0xffffffff, __float_as_uint(largest[i]));
                if (lane_index() == 0) atomicMax(params.largest + i, most);
            }
        }
    }

  private:
    // Sums over lanes that have the same columns: each time they give away half of these. Lane l is left with
    // columns 2 l and the next of the block.
    template <int kWidth>
    __device__ __forceinline__ static void halve(float (&sums)[kBlockRows / 4], int lane) {
        const bool upper = (lane & 2 * kWidth) != 0;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const float low = sums[j], high = sums[j + kWidth];
            const float given = upper ? low : high, kept = upper ? high : low;
            sums[j] = kept + __shfl_xor_sync(0xffffffff, given, 2 * kWidth);
        }
        if constexpr (kWidth > 2) halve<kWidth / 2>(sums, lane);
    }

    template <int kWanted>
    struct PlaceSink {
        i64 found;

        template <int kIndex>
        __device__ __forceinline__ void add(i64 place, float) {
            if constexpr (kIndex == kWanted) found = place;
        }
    };
    // Where a site adds, which depends on no other index than it says.
    template <int kIndex>
    __device__ __forceinline__ i64 place_of(int b, int h, int q_idx, int kv_idx) const {
        PlaceSink<kIndex> sink{};
        params.score_mod.captured_gradients(0.0f, 0.0f, b, h, q_idx, kv_idx, params.seqlen_q, params.seqlen_k,
                                            sink);
        return sink.found;
    }
    template <int kGradient>
    __device__ __forceinline__ void emit(i64 place, float value) {
        if (value == 0.0f) return;
        if constexpr (kPass == 0) {
            atomicAdd(params.score_mod.gradients[kGradient] + place, value);
            return;
        }
        const bool is_finite = fabsf(value) < kInfinity;
        if constexpr (kPass == 1) {
            if (is_finite) largest[kGradient] = fmaxf(largest[kGradient], fabsf(value));
        } else if constexpr (kPass == 3) {
            CapturedDigits& sums = reinterpret_cast<CapturedDigits*>(
                params.score_mod.gradients[kGradient])[place / kElementsTogether];
            const int element = static_cast<int>(place % kElementsTogether);
            if (is_finite) {
                const TwoDigits two(__float_as_uint(value));
                atomicAdd(&sums.digits[two.first][element], static_cast<u64>(two.low));
                atomicAdd(&sums.digits[two.first + 1][element], static_cast<u64>(two.high));
            } else {
                atomicAdd(&sums.rest[element], value);
            }
        } else {
            CapturedCell* cell =
                reinterpret_cast<CapturedCell*>(params.score_mod.gradients[kGradient]) + place;
            if (is_finite) {
                const double units =
                    power_of_two(units_exponent(params.largest[kGradient], params.terms_log2));
                atomicAdd(&cell->units, static_cast<u64>(__double2ll_rn(static_cast<double>(value) * units)));
            } else {
                atomicAdd(&cell->rest, value);
            }
        }
    }
};
