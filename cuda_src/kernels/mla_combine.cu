// Merges the splits of requests that were cut (mla/splits.cuh):
//   out = sum_j numerator_j / sum_j 2^lse_j,  lse = ln sum_j 2^lse_j.
// An attention sink multiplies out by exp(lse) / (exp(lse) + exp(sink)). Sums are in float32, with all powers
// of two relative to the largest lse_j.
//
//   -> out [b, s_q, h_q, 512] of q's type, lse [b, h_q, s_q] float32, natural log
//
// MAX_LOGITS: the kernel merges the splits of a prefill kernel. lse_factor then gives the base of lse, and
// max_logits [b, h_q, s_q] gets the largest score of all splits.
//
// Grid: x = groups of kRows rows, y = candidates for a request with splits. Candidate y is request y if there
// are no more requests than partitions, or if the plan is batch-invariant. Otherwise it is the last request
// of partition y, provided that its first split is there. If the candidate has no splits, the CTA exits at
// once and does not wait for the kernel ahead, so that the CTAs of the next kernel find free SMs. Only the
// first CTA always waits, because this kernel must not complete before the kernel ahead.
//
// Two warps merge a row, one for each half of the columns. A half has a single o_scale_log2. A warp loads
// SPLITS_AT_ONCE splits at a time.
//   SPLIT_GROUPS n > 1, for few rows of many splits: n pairs of warps share a row, and each takes every n-th
//   split. Their sums meet in shared memory. There each of the first four pairs adds up two columns per
//   thread, in a fixed order, and stores them.
//   ROWS_AT_ONCE n > 1, for many rows of few splits: a pair of warps merges n rows at the same time.
// A warp has only a few vectors to load, so most of the time is latency: first of the plan, then of
// num_splits, then of scalars and data, which are loaded together. The rest is instructions.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragments.cuh"
#include "mla/dimensions.cuh"
#include "mla/plan.cuh"
#include "mla/sink.cuh"
#include "mla/splits.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
static_assert(MAX_LOGITS == 0 || MAX_LOGITS == 1, "MAX_LOGITS must be 0 (decoding) or 1 (prefill)");
constexpr int kGroups = SPLIT_GROUPS;
constexpr int kRowsAtOnce = ROWS_AT_ONCE;
static_assert(kGroups == 1 || kRowsAtOnce == 1, "groups of splits share one row");
constexpr int kRows = kGroups == 1 ? 4 * kRowsAtOnce : 1;  // per CTA
constexpr int kThreads = 64 * kGroups * kRows / kRowsAtOnce;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kResidentThreads =
    SPLITS_AT_ONCE > 6 ? 512 : 1024;  // per SM; with more splits at once a thread needs more registers
constexpr int kColumns = kDimV / 64;  // per thread
constexpr int kPairs = kColumns / 2;
static_assert(kGroups == 1 || kGroups >= kPairs, "a pair is added up and stored by the group of its number");
constexpr int kVectorColumns = kFloat16Splits<kDtype> ? 8 : 4;  // in the 16 bytes of a load
constexpr int kVectors = kColumns / kVectorColumns;
constexpr int kSplitsAtOnce = SPLITS_AT_ONCE / kVectors;

struct Params {
    const int* sched_meta;
    const int* num_splits;
    const void* o_accum;
    const float* lse_accum_log2;
    const float* o_scale_log2;
    u16* out;
    float* lse;
    const float* attn_sink;  // [h_q] or null
#if MAX_LOGITS
    const float* max_accum_log2;
    float* max_logits;  // as lse
#endif
    i64 out_stride_b, out_stride_s, out_stride_h;  // elements
    int b, s_q, h_q;
    int max_splits;
    int object_layout;
    int by_request;  // grid y is requests; 0: partitions
#if MAX_LOGITS
    float lse_factor;  // converts lse and max_logits from base 2
    UniformPlan uniform;
#endif
};

// What the groups write to shared memory: the sums of their 64 threads, two columns at a time, and the
// scalars of each half row.
struct Partials {
    float2 sum[kPairs][kGroups][64];
    float max_log2[2][kGroups], weight_sum[2][kGroups];
};
static_assert((kGroups == 1 ? 0 : sizeof(Partials)) == SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

// The candidate of the CTA, or -1.
__device__ __forceinline__ int candidate_request(const Params& params) {
    if (params.by_request) return blockIdx.y;
    const PlanRow plan = row_of_partition(params, blockIdx.y);
    if (plan.begin_req > plan.end_req) return -1;
    const bool begun_before = plan.begin_req == plan.end_req && plan.begin_split > 0;
    return begun_before ? -1 : plan.end_req;
}

// The splits of a request and the index of the first in o_accum. Request -1 has no splits.
struct SplitRange {
    int count, first;

    __device__ __forceinline__ SplitRange(const Params& params, int req) {
        if (is_uniform(params)) {
            const UniformPlan plan = uniform_plan(params);
            const int first_partition = plan.first_partition(req);
            count = req < 0 ? 0 : plan.last_partition(req) - first_partition + 1;
            first = first_split_uniform(first_partition);
            return;
        }
        const int before = req < 0 ? 0 : load_global(params.num_splits + req);
        count = req < 0 ? 0 : load_global(params.num_splits + req + 1) - before;
        const int mark = load_global(params.sched_meta + kPlanRowInts - 1);
        first = first_split(before, req, mark == kBatchInvariantMark);
    }
};

// sum += weight * the numbers in a vector.
__device__ __forceinline__ void accumulate(float* sum, float weight, const float4& vector) {
    const float words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kFloat16Splits<kDtype>) {
            const float2 pair = unpack_f16(__float_as_uint(words[i]));
            sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
            sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
        } else {
            sum[i] = fmaf(weight, words[i], sum[i]);
        }
    }
}

// Where a lane reads a half row of a split.
struct SplitPointers {
    const float* lse_log2;
    const float* scale_log2;
    const float4* vectors;

    __device__ __forceinline__ SplitPointers(const Params& params, i64 accum_row, int half, int lane_idx)
        : lse_log2(params.lse_accum_log2 + accum_row),
          scale_log2(params.o_scale_log2 + accum_row * kScaleHalves + half),
          vectors(static_cast<const float4*>(params.o_accum) +
                  (accum_row * kDimV + half * (kDimV / 2)) / kVectorColumns + lane_idx) {}
    __device__ __forceinline__ void advance(int rows) {
        lse_log2 += rows;
        scale_log2 += static_cast<i64>(rows) * kScaleHalves;
        vectors += static_cast<i64>(rows) * (kDimV / kVectorColumns);
    }
};

// Splits of a half row, loaded to registers.
struct SplitData {
    float lse_log2[kSplitsAtOnce], scale_log2[kSplitsAtOnce];
    float4 value[kSplitsAtOnce][kVectors];

    // Loads the split at `pointers` and the ones after it, which are `step` rows of o_accum apart. `count`:
    // the splits that are left, those of the other groups included.
    __device__ __forceinline__ void load(SplitPointers pointers, int step, int count) {
#pragma unroll
        for (int j = 0; j < kSplitsAtOnce; ++j) {
            const bool exists = j * kGroups < count;
            lse_log2[j] = -kInfinity;
            load_global_if(lse_log2[j], pointers.lse_log2, exists);
            load_global_if(scale_log2[j], pointers.scale_log2, exists);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) load_global_if(value[j][v], pointers.vectors + v * 32, exists);
            pointers.advance(step);
        }
    }
};

// The sum of the splits so far: numerator and denominator, divided by 2^max_log2.
struct Merged {
    float max_log2 = -kInfinity;
    float weight_sum = 0.0f;
    float sum[kColumns] = {};

    // Rescales the sums if `lse_log2` is a new maximum. Returns the exponent that powers of two are relative
    // to from now on.
    __device__ __forceinline__ float raise_max(float lse_log2) {
        const float max_new = fmaxf(max_log2, lse_log2);
        const float offset = max_new == -kInfinity ? 0.0f : max_new;
        if (max_log2 != -kInfinity) {
            const float rescale = exp2_approx(max_log2 - offset);
            weight_sum *= rescale;
#pragma unroll
            for (int i = 0; i < kColumns; ++i) sum[i] *= rescale;
        }
        max_log2 = max_new;
        return offset;
    }

    __device__ __forceinline__ void add(const SplitData& data) {
        float top = -kInfinity;
#pragma unroll
        for (int j = 0; j < kSplitsAtOnce; ++j) top = fmaxf(top, data.lse_log2[j]);
        const float offset = raise_max(top);
#pragma unroll
        for (int j = 0; j < kSplitsAtOnce; ++j) {
            if (data.lse_log2[j] == -kInfinity) continue;  // there is no such split, or it has no keys
            weight_sum += exp2_approx(data.lse_log2[j] - offset);
            const float weight = exp2_approx(data.scale_log2[j] - offset);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) accumulate(sum + v * kVectorColumns, weight, data.value[j][v]);
        }
    }
};

// The largest score among the lane's share of the splits of a row.
template <class Params>
__device__ __forceinline__ float load_top(const Params& params, i64 accum_row, int rows, int count,
                                          int lane_idx) {
    float top = -kInfinity;
    if constexpr (requires { params.max_logits; }) {
        for (int split = lane_idx; split < count; split += 32) {
            const float of_split =
                load_global(params.max_accum_log2 + accum_row + static_cast<i64>(split) * rows);
            top = max_or_nan(top, of_split);
        }
    }
    return top;
}
// Writes the largest score of all lanes. All lanes of the warp call.
template <class Params>
__device__ __forceinline__ void store_top(const Params& params, i64 at, float top, int lane_idx) {
    if constexpr (requires { params.max_logits; }) {
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2)
            top = max_or_nan(top, __shfl_xor_sync(0xffffffff, top, lanes));
        if (lane_idx == 0) params.max_logits[at] = top * lse_factor(params);
    }
}

// Stores the lane's columns of a half row. The lanes of a quad exchange words (mla/splits.cuh), so that each
// has neighbouring columns. All lanes of the warp call.
__device__ __forceinline__ void store_merged(u16* half_row, int unit, u32 (&words)[4]) {
    quad_transpose(words);
    *reinterpret_cast<uint4*>(half_row + 8 * unit) = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void store_merged(u16* half_row, int unit, u32 (&words)[2]) {
    pair_transpose(words);
    u16* dst = half_row + 16 * (unit / 4) + 8 * (unit % 2) + 4 * (unit / 2 % 2);
    *reinterpret_cast<uint2*>(dst) = make_uint2(words[0], words[1]);
}

// Writes the sums of a group to shared memory. All threads of the CTA call.
__device__ __forceinline__ void hand_over(Partials& partials, const Merged& merged, int half, int group,
                                          int lane_idx) {
    const int column = half * 32 + lane_idx;
    if (lane_idx == 0) {
        partials.max_log2[half][group] = merged.max_log2;
        partials.weight_sum[half][group] = merged.weight_sum;
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
        partials.sum[pair][group][column] = make_float2(merged.sum[2 * pair], merged.sum[2 * pair + 1]);
    __syncthreads();
}
// Adds up the scalars of all groups and the sums of one pair of columns, which it returns.
__device__ __forceinline__ float2 merge_groups(const Partials& partials, Merged& merged, int half, int pair,
                                               int lane_idx) {
    float2 sum = make_float2(0.0f, 0.0f);
    merged.max_log2 = -kInfinity;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) merged.max_log2 = fmaxf(merged.max_log2, partials.max_log2[half][g]);
    const float offset = merged.max_log2 == -kInfinity ? 0.0f : merged.max_log2;
    merged.weight_sum = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const float weight = exp2_approx(partials.max_log2[half][g] - offset);
        merged.weight_sum = fmaf(weight, partials.weight_sum[half][g], merged.weight_sum);
        const float2 partial = partials.sum[pair][g][half * 32 + lane_idx];
        sum.x = fmaf(weight, partial.x, sum.x);
        sum.y = fmaf(weight, partial.y, sum.y);
    }
    return sum;
}

// Where a half row of the result is stored.
struct Target {
    u16* half_row;
    i64 lse_at;  // in lse and max_logits
    int head;

    __device__ __forceinline__ Target(const Params& params, int req, int row, int half) {
        const int token = row / params.h_q;
        head = row - token * params.h_q;
        half_row = params.out + req * params.out_stride_b + token * params.out_stride_s +
                   head * params.out_stride_h + half * (kDimV / 2);
        lse_at = lse_index(params, req, token, head);
    }
};

// Returns the factor that turns the sums of a row into the result. `fits` is false if the scratch was made
// for another plan: the result is then NaN. The lane with `stores_scalars` stores the lse of the row.
__device__ __forceinline__ float finish(const Params& params, const Target& target, const Merged& merged,
                                        bool fits, bool stores_scalars) {
    const float weight_sum = fits ? merged.weight_sum : kNaN;
    const float lse_log2 = merged.max_log2 + log2_approx(weight_sum);
    if (stores_scalars)
        params.lse[target.lse_at] = weight_sum == 0.0f ? kInfinity : lse_log2 * lse_factor(params);
    if (weight_sum == 0.0f) return 0.0f;
    return sink_factor(params.attn_sink, target.head, lse_log2) * reciprocal_approx(weight_sum);
}

// Rounds and stores the columns of a lane in a half row. All lanes of the warp call.
__device__ __forceinline__ void store_columns(u16* half_row, const float (&sum)[kColumns], float factor,
                                              int lane_idx) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        u32 words[kVectorColumns / 2];
#pragma unroll
        for (int i = 0; i < kVectorColumns / 2; ++i) {
            const float* pair = sum + v * kVectorColumns + 2 * i;
            words[i] = pack_16bit<kDtype>(pair[0] * factor, pair[1] * factor);
        }
        store_merged(half_row, v * 32 + lane_idx, words);
    }
}
// Rounds and stores one pair of columns. Its place follows from the order of columns in a split.
__device__ __forceinline__ void store_pair(u16* half_row, int pair, float2 sum, float factor, int lane_idx) {
    constexpr int kUnitPairs = kGroupsPerUnit<kDtype>;
    const int unit = pair / kUnitPairs * 32 + lane_idx;
    const int column = 8 * (kUnitPairs * (unit / 4) + pair % kUnitPairs) + 2 * (unit % 4);
    *reinterpret_cast<u32*>(half_row + column) = pack_16bit<kDtype>(sum.x * factor, sum.y * factor);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResidentThreads / kThreads)
    mla_combine(const __grid_constant__ Params params) {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    const int lane_idx = threadIdx.x % 32;
    const int half = threadIdx.x / 32 % 2;
    const int group = threadIdx.x / 64 % kGroups;
    const int first_row = blockIdx.x * kRows + threadIdx.x / 64 / kGroups * kRowsAtOnce;
    const int rows = params.s_q * params.h_q;
    // The plan may be read now: the kernel ahead waited for it before it let this one start.
    const int req = candidate_request(params);
    griddepcontrol_launch_dependents();
    const SplitRange range(params, req);
    const int splits = range.count, first_split_idx = range.first;
    const bool merges = splits > 1;
    const bool fits = first_split_idx >= 0 && splits <= params.max_splits - first_split_idx;
    const int count = fits ? splits : 0;
    const i64 accum_row = static_cast<i64>(first_split_idx) * rows + first_row;
    SplitPointers pointers(params, accum_row + static_cast<i64>(group) * rows, half, lane_idx);
    if (!merges || first_row >= rows) {
        if (blockIdx.x == 0 && blockIdx.y == 0) griddepcontrol_wait();
        return;
    }
    griddepcontrol_wait();

    // The loads of the largest scores are issued before those of the splits, and used after them
    float top_of_lane[kRowsAtOnce];
    Merged merged[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
        top_of_lane[r] = 0.0f;
        if (half == 0 && group == 0 && first_row + r < rows)
            top_of_lane[r] = load_top(params, accum_row + r, rows, count, lane_idx);
    }
    for (int split = group; split < count; split += kGroups * kSplitsAtOnce) {
        SplitData data[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            SplitPointers of_row = pointers;
            of_row.advance(r);
            data[r].load(of_row, kGroups * rows, first_row + r < rows ? count - split : 0);
        }
        pointers.advance(kSplitsAtOnce * kGroups * rows);
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) merged[r].add(data[r]);
    }
    if constexpr (kGroups > 1) {
        Partials& partials = *reinterpret_cast<Partials*>(smem_bytes);
        hand_over(partials, merged[0], half, group, lane_idx);
        if (group >= kPairs) return;
        const float2 sum = merge_groups(partials, merged[0], half, group, lane_idx);
        const Target target(params, req, first_row, half);
        const float factor =
            finish(params, target, merged[0], fits, half == 0 && group == 0 && lane_idx == 0);
        store_pair(target.half_row, group, sum, factor, lane_idx);
        if (half == 0 && group == 0) store_top(params, target.lse_at, fits ? top_of_lane[0] : kNaN, lane_idx);
    } else {
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            if (first_row + r >= rows) return;
            const Target target(params, req, first_row + r, half);
            const float factor = finish(params, target, merged[r], fits, half == 0 && lane_idx == 0);
            store_columns(target.half_row, merged[r].sum, factor, lane_idx);
            if (half == 0) store_top(params, target.lse_at, fits ? top_of_lane[r] : kNaN, lane_idx);
        }
    }
}
