// Merges the pieces of split requests (sched/pieces.cuh):
//   out = sum_j numerator_j / sum_j 2^lse_j,  lse = ln sum_j 2^lse_j,
// with an attention sink out exp(lse) / (exp(lse) + exp(sink)).
// In float32, with all powers of two relative to the largest lse_j.
//
//   -> out [b, s_q, h_q, 512] in q's type, lse [b, h_q, s_q] float32, natural log
//
// With MAX_LOGITS, behind a prefill kernel, lse is in the base that a factor gives, and the largest of the pieces' largest scores is
// an output too.
//
// Grid: x = groups of rows, y = candidates for a split request: request y when there are no more requests than parts (or
// the plan is batch-invariant), else the last request of part y, if its first piece is there. A CTA whose candidate is not
// split leaves at once; of many rows, where most may have nothing to do, without waiting for the kernel ahead, so that the CTAs of the
// kernel behind find their SMs free. Only the first CTA always waits: this kernel must not be complete before that one is.
//
// A warp merges the columns of a row that share an o_scale_log2, PIECES_AT_ONCE pieces at a time; two such warps a row. With
// PIECE_GROUPS n > 1, for few rows of many pieces, n pairs of warps share a row, each taking every n-th piece, and their sums
// meet in shared memory in fixed order, all warps adding. With ROWS_AT_ONCE n > 1, for more rows than run at once, of few pieces, a
// pair of warps has n rows at the same time.
// Time is latency: plan, then num_splits, then scalars and data together; the data do not wait for their weights.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragments.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "sched/pieces.cuh"
#include "sched/plan.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
static_assert(MAX_LOGITS == 0 || MAX_LOGITS == 1, "MAX_LOGITS must be 0 (decoding) or 1 (prefill)");
constexpr int kDimV = 512;
constexpr int kGroups = PIECE_GROUPS;
constexpr int kRowsAtOnce = ROWS_AT_ONCE;
static_assert(kGroups == 1 || kRowsAtOnce == 1, "groups of pieces share one row");
constexpr int kRows = kGroups == 1 ? 4 * kRowsAtOnce : 1;  // per CTA
constexpr int kThreads = 64 * kGroups * kRows / kRowsAtOnce;
constexpr int kResidentThreads =
    PIECES_AT_ONCE > 6 ? 512 : 1024;  // of an SM; fewer have registers for more pieces
constexpr int kColumns = kDimV / 64;  // per thread
constexpr int kVectorColumns = kFloat16Pieces<kDtype> ? 8 : 4;  // in the 16 bytes of a load
constexpr int kVectors = kColumns / kVectorColumns;
constexpr int kPiecesAtOnce = PIECES_AT_ONCE / kVectors;

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
    int num_slots;
    int object_layout;
    int by_request;  // grid y is requests, else parts
#if MAX_LOGITS
    float lse_factor;  // on lse and max_logits, from base 2
    UniformPlan uniform;
#endif
};

// What a group hands over: the sums of its 64 threads, and for each half the scalars that go with them.
struct Partial {
    float sum[kColumns][64];
    float max_log2[2], weight_sum[2];
};

// The request this CTA merges, or -1.
__device__ __forceinline__ int candidate_request(const Params& params) {
    if (params.by_request) return blockIdx.y;
    const PlanRow plan = part_row(params, blockIdx.y);
    if (plan.begin_req > plan.end_req) return -1;
    const bool begun_before = plan.begin_req == plan.end_req && plan.begin_split > 0;
    return begun_before ? -1 : plan.end_req;
}

// The pieces of a request, and the slot of the first; of no request, none.
struct Splits {
    int count, first;

    template <class Params>
    __device__ __forceinline__ Splits(const Params& params, int req) {
        if constexpr (requires { params.uniform; }) {
            if (params.uniform.length > 0) {
                const int first_part = params.uniform.first_part(req);
                count = req < 0 ? 0 : params.uniform.last_part(req) - first_part + 1;
                first = first_slot_uniform(first_part);
                return;
            }
        }
        const int before = req < 0 ? 0 : load_global(params.num_splits + req);
        count = req < 0 ? 0 : load_global(params.num_splits + req + 1) - before;
        const int mark = load_global(params.sched_meta + kPlanRowInts - 1);
        first = first_slot(before, req, mark == kBatchInvariantMark);
    }
};

// sum += weight * the numbers in a vector.
__device__ __forceinline__ void accumulate(float* sum, float weight, const float4& vector) {
    const float words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kFloat16Pieces<kDtype>) {
            const float2 pair = unpack_f16(__float_as_uint(words[i]));
            sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
            sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
        } else {
            sum[i] = fmaf(weight, words[i], sum[i]);
        }
    }
}

// Some pieces of a half row on their way to registers.
struct Pieces {
    float lse_log2[kPiecesAtOnce], scale_log2[kPiecesAtOnce];
    float4 value[kPiecesAtOnce][kVectors];

    // The first at `accum_row` of o_accum, each kGroups * `rows` rows behind the one before; `count`: with those of other groups.
    __device__ __forceinline__ void load(const Params& params, i64 accum_row, int rows, int count, int half,
                                         int lane_idx) {
#pragma unroll
        for (int j = 0; j < kPiecesAtOnce; ++j) {
            lse_log2[j] = -kInfinity;
            if (j * kGroups >= count) continue;
            const i64 row = accum_row + static_cast<i64>(j * kGroups) * rows;
            lse_log2[j] = load_global(params.lse_accum_log2 + row);
            scale_log2[j] = load_global(params.o_scale_log2 + row * kScaleHalves + half);
            const float4* vectors = static_cast<const float4*>(params.o_accum) +
                                    (row * kDimV + half * (kDimV / 2)) / kVectorColumns + lane_idx;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) value[j][v] = load_global(vectors + v * 32);
        }
    }
};

// The merge of some pieces of a row: numerator and denominator, divided by 2^max_log2.
struct Merged {
    float max_log2 = -kInfinity;
    float weight_sum = 0.0f;
    float sum[kColumns] = {};

    // Makes room for a maximum; returns what powers of two are relative to from now on.
    __device__ __forceinline__ float raise_max(float lse_log2) {
        const float max_new = fmaxf(max_log2, lse_log2);
        const float offset = max_new == -kInfinity ? 0.0f : max_new;
        const float rescale = exp2_approx(max_log2 - offset);
        max_log2 = max_new;
        weight_sum *= rescale;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum[i] *= rescale;
        return offset;
    }

    __device__ __forceinline__ void add(const Pieces& pieces) {
        float top = -kInfinity;
#pragma unroll
        for (int j = 0; j < kPiecesAtOnce; ++j) top = fmaxf(top, pieces.lse_log2[j]);
        const float offset = raise_max(top);
#pragma unroll
        for (int j = 0; j < kPiecesAtOnce; ++j) {
            if (pieces.lse_log2[j] == -kInfinity) continue;  // no such piece, or one without any key
            weight_sum += exp2_approx(pieces.lse_log2[j] - offset);
            const float weight = exp2_approx(pieces.scale_log2[j] - offset);
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                accumulate(sum + v * kVectorColumns, weight, pieces.value[j][v]);
        }
    }
};

// The largest of the maxima of a lane's share of the pieces of a row; all lanes have their own.
template <class Params>
__device__ __forceinline__ float load_top(const Params& params, i64 accum_row, int rows, int count,
                                          int lane_idx) {
    float top = -kInfinity;
    if constexpr (requires { params.max_logits; }) {
        for (int piece = lane_idx; piece < count; piece += 32) {
            const float of_piece =
                load_global(params.max_accum_log2 + accum_row + static_cast<i64>(piece) * rows);
            top = max_or_nan(top, of_piece);
        }
    }
    return top;
}
// Writes the largest of what the lanes have. All lanes of the warp call.
template <class Params>
__device__ __forceinline__ void store_top(const Params& params, int req, int token, int head, float top,
                                          int lane_idx) {
    if constexpr (requires { params.max_logits; }) {
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2)
            top = max_or_nan(top, __shfl_xor_sync(0xffffffff, top, lanes));
        if (lane_idx == 0) params.max_logits[lse_index(params, req, token, head)] = top * lse_factor(params);
    }
}

// Stores a lane's columns of a half row, rounded: the quad exchanges its units (sched/pieces.cuh) so that each lane has
// neighbours. All lanes of the warp call.
__device__ __forceinline__ void store_merged(u16* half_row, int unit, u32 (&words)[4]) {
    quad_transpose(words);
    *reinterpret_cast<uint4*>(half_row + 8 * unit) = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void store_merged(u16* half_row, int unit, u32 (&words)[2]) {
    pair_transpose(words);
    u16* dst = half_row + 16 * (unit / 4) + 8 * (unit % 2) + 4 * (unit / 2 % 2);
    *reinterpret_cast<uint2*>(dst) = make_uint2(words[0], words[1]);
}

// Adds up what the groups of a row have merged; the first group has it then. All threads of the CTA call; true for that group's.
__device__ __forceinline__ bool merge_groups(Partial* partial, Merged& merged, int half, int group,
                                             int lane_idx) {
    const int column = threadIdx.x % 64;
    Partial& own = partial[group];
    if (lane_idx == 0) {
        own.max_log2[half] = merged.max_log2;
        own.weight_sum[half] = merged.weight_sum;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) own.sum[i][column] = merged.sum[i];
    __syncthreads();
    // All warps add up, each one column of its threads'; lane g knows the scalars of group g.
    const bool has_group = lane_idx < kGroups;
    const float group_max = has_group ? partial[lane_idx % kGroups].max_log2[half] : -kInfinity;
    merged.max_log2 = group_max;
#pragma unroll
    for (int lanes = 1; lanes < kGroups; lanes *= 2) {
        merged.max_log2 = fmaxf(merged.max_log2, __shfl_xor_sync(0xffffffff, merged.max_log2, lanes));
    }
    merged.max_log2 = __shfl_sync(0xffffffff, merged.max_log2, 0);
    const float offset = merged.max_log2 == -kInfinity ? 0.0f : merged.max_log2;
    const float group_weight = exp2_approx(group_max - offset);
    merged.weight_sum = has_group ? group_weight * partial[lane_idx % kGroups].weight_sum[half] : 0.0f;
#pragma unroll
    for (int lanes = 1; lanes < kGroups; lanes *= 2) {
        merged.weight_sum += __shfl_xor_sync(0xffffffff, merged.weight_sum, lanes);
    }
    merged.weight_sum = __shfl_sync(0xffffffff, merged.weight_sum, 0);
    for (int i = group; i < kColumns; i += kGroups) {
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            sum = fmaf(__shfl_sync(0xffffffff, group_weight, g), partial[g].sum[i][column], sum);
        }
        partial[0].sum[i][column] = sum;  // only this thread has read it
    }
    __syncthreads();
    if (group > 0) return false;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) merged.sum[i] = partial[0].sum[i][column];
    return true;
}

// Writes half a row, and with the first half its scalars. Without `fits`, a plan that its scratch was not made for: NaN, not nonsense.
// All lanes of the warp call.
__device__ __forceinline__ void store_row(const Params& params, int req, int row, int half,
                                          const Merged& merged, bool fits, float top_of_lane, int lane_idx) {
    const float weight_sum = fits ? merged.weight_sum : kNaN;
    const int token = row / params.h_q;
    const int head = row - token * params.h_q;
    const float lse_log2 = merged.max_log2 + log2_approx(weight_sum);
    const float factor =
        weight_sum == 0.0f ? 0.0f : sink_factor(params.attn_sink, head, lse_log2) / weight_sum;
    u16* out = params.out + req * params.out_stride_b + token * params.out_stride_s +
               head * params.out_stride_h + half * (kDimV / 2);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        u32 words[kVectorColumns / 2];
#pragma unroll
        for (int i = 0; i < kVectorColumns / 2; ++i) {
            const float* pair = merged.sum + v * kVectorColumns + 2 * i;
            words[i] = pack_16bit<kDtype>(pair[0] * factor, pair[1] * factor);
        }
        store_merged(out, v * 32 + lane_idx, words);
    }
    if (half == 0 && lane_idx == 0) {
        params.lse[lse_index(params, req, token, head)] =
            weight_sum == 0.0f ? kInfinity : lse_log2 * lse_factor(params);
    }
    if (half == 0) store_top(params, req, token, head, fits ? top_of_lane : kNaN, lane_idx);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResidentThreads / kThreads)
    mla_combine(const __grid_constant__ Params params) {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    Partial* partial = reinterpret_cast<Partial*>(smem_bytes);  // kGroups
    const int lane_idx = threadIdx.x % 32;
    const int half = threadIdx.x / 32 % 2;
    const int group = threadIdx.x / 64 % kGroups;
    const int first_row = blockIdx.x * kRows + threadIdx.x / 64 / kGroups * kRowsAtOnce;
    const int rows = params.s_q * params.h_q;
    // The plan is older than the kernel ahead, which waited for it before it let this one start.
    const int req = candidate_request(params);
    griddepcontrol_launch_dependents();
    const Splits pieces_of(params, req);
    const int splits = pieces_of.count, slot = pieces_of.first;
    const bool merges = splits > 1;
    if (kGroups > 1 || merges || (blockIdx.x == 0 && blockIdx.y == 0)) griddepcontrol_wait();
    if (!merges || first_row >= rows) return;
    const bool fits = slot >= 0 && slot + splits <= params.num_slots;
    const int count = fits ? splits : 0;
    const i64 accum_row = static_cast<i64>(slot) * rows + first_row;

    // Maxima are asked for before the pieces, looked at after them
    float top_of_lane[kRowsAtOnce];
    Merged merged[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
        top_of_lane[r] = 0.0f;
        if (half == 0 && first_row + r < rows)
            top_of_lane[r] = load_top(params, accum_row + r, rows, count, lane_idx);
    }
    for (int piece = group; piece < count; piece += kGroups * kPiecesAtOnce) {
        Pieces pieces[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            pieces[r].load(params, accum_row + r + static_cast<i64>(piece) * rows, rows,
                           first_row + r < rows ? count - piece : 0, half, lane_idx);
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) merged[r].add(pieces[r]);
    }
    if constexpr (kGroups > 1) {
        if (!merge_groups(partial, merged[0], half, group, lane_idx)) return;
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
        if (first_row + r < rows)
            store_row(params, req, first_row + r, half, merged[r], fits, top_of_lane[r], lane_idx);
    }
}
