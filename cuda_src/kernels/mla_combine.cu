// Merges the pieces of split requests:  out = sum_j w_j O_j / sum_j w_j,  w_j = 2^(lse_j - max lse),  lse = ln sum_j 2^lse_j.
//
//   o_accum [num_slots, rows, 512] float32 (each piece normalised by its own sum), lse_accum_log2 [num_slots, rows]
//   -> out [b, s_q, h_q, 512] in q's type, lse [b, h_q, s_q] float32, natural log; rows = s_q * h_q, row = token * h_q + head.
//
// Grid: x = groups of rows, y = candidates for a split request: request y when there are no more requests than parts (or
// the plan is batch-invariant), else the last request of part y, if its first piece is there. A CTA whose candidate is not
// split leaves at once. Two mappings:
//   PIECE_GROUPS 1   two warps merge a row; 2 rows per CTA. For many rows of few pieces.
//   PIECE_GROUPS n   4 n warps merge a row: n groups of pieces x 4 quarters of the columns, meeting in shared memory in
//                    fixed order; n = 2 or 4. For few rows of many pieces.
// Time is latency: plan, then num_splits, then lse and data together; the data do not wait for their weights.
#include "common/math.cuh"
#include "common/types.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "sched/plan.cuh"

static_assert(PIECE_GROUPS == 1 || PIECE_GROUPS == 2 || PIECE_GROUPS == 4, "PIECE_GROUPS must be 1, 2 or 4");

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimV = 512;
constexpr int kGroups = PIECE_GROUPS;
constexpr int kThreads = 128 * kGroups;
constexpr int kVectors = kGroups == 1 ? 2 : 1;        // float4 per thread and piece
constexpr int kPiecesAtOnce = kGroups == 1 ? 4 : 8;   // loads in flight: kVectors times as many
constexpr int kColumnVectors = kDimV / 4 / kVectors;  // threads that share a row's columns

struct Params {
    const int* sched_meta;
    const int* num_splits;
    const float* o_accum;
    const float* lse_accum_log2;
    u16* out;
    i64 out_stride_b, out_stride_s, out_stride_h;  // elements
    float* lse;
    int b, s_q, h_q;
    int num_slots;
    int object_layout;
    int by_request;  // grid y is requests, else parts
};

// The request this CTA merges, or -1.
__device__ __forceinline__ int candidate_request(const Params& params) {
    if (params.by_request) return blockIdx.y;
    const PlanRow plan = read_plan_row(params.sched_meta, blockIdx.y, params.object_layout, params.b);
    if (plan.begin_req > plan.end_req) return -1;
    const bool begun_before = plan.begin_req == plan.end_req && plan.begin_split > 0;
    return begun_before ? -1 : plan.end_req;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, offset));
    return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    return value;
}

// One row's pieces; each lane holds the lse of piece lane_idx of the 32 in hand.
struct Pieces {
    const float* lse;     // of piece 0
    const float4* accum;  // of piece 0, this thread's first vector
    i64 lse_stride, accum_stride;
    int count;

    __device__ __forceinline__ float load_lse(int piece) const {
        return piece < count ? load_global(lse + piece * lse_stride) : -kInfinity;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads) mla_combine(const __grid_constant__ Params params) {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    float4* partial = reinterpret_cast<float4*>(smem_bytes);  // [kGroups - 1][kColumnVectors]
    const int lane_idx = threadIdx.x % 32;
    const int column = threadIdx.x % kColumnVectors;  // vectors column, column + kColumnVectors, ...
    const int group = threadIdx.x / kColumnVectors % kGroups;
    const int row =
        blockIdx.x * (kThreads / kColumnVectors / kGroups) + threadIdx.x / kColumnVectors / kGroups;
    const int rows = params.s_q * params.h_q;
    // The plan is older than the kernel ahead, which waited for it before it let this one start.
    const int req = candidate_request(params);
    griddepcontrol_launch_dependents();
    if (req < 0) {
        griddepcontrol_wait();
        return;
    }
    const int splits_before = load_global(params.num_splits + req);
    const int splits = load_global(params.num_splits + req + 1) - splits_before;
    const bool batch_invariant = load_global(params.sched_meta + kPlanRowInts - 1) == kBatchInvariantMark;
    griddepcontrol_wait();
    if (splits <= 1 || row >= rows) return;
    const int slot = first_slot(splits_before, req, batch_invariant);
    const bool fits = slot >= 0 && slot + splits <= params.num_slots;
    Pieces pieces;
    pieces.count = fits ? splits : 0;
    pieces.lse_stride = rows;
    pieces.accum_stride = static_cast<i64>(rows) * (kDimV / 4);
    const i64 first_row = static_cast<i64>(slot) * rows + row;
    pieces.lse = params.lse_accum_log2 + first_row;
    pieces.accum = reinterpret_cast<const float4*>(params.o_accum) + first_row * (kDimV / 4) + column;

    float lse_here = pieces.load_lse(lane_idx);
    float max_log2 = -kInfinity;
    float weight_sum = fits ? 0.0f : kNaN;  // a plan that its scratch was not made for: NaN, not nonsense
    float4 sum[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    // Takes 32 more pieces into the maximum and the weights' sum; returns this lane's weight.
    auto weigh = [&](float lse_log2) {
        const float max_new = fmaxf(max_log2, warp_max(lse_log2));
        const float offset = max_new == -kInfinity ? 0.0f : max_new;
        const float rescale = exp2_approx(max_log2 - offset);
        const float weight = exp2_approx(lse_log2 - offset);
        weight_sum = weight_sum * rescale + warp_sum(weight);
        max_log2 = max_new;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            sum[v] =
                make_float4(sum[v].x * rescale, sum[v].y * rescale, sum[v].z * rescale, sum[v].w * rescale);
        }
        return weight;
    };
    for (int base = 0; base < pieces.count; base += 32) {
        // 32 pieces at a time; further ones rescale what there is
        const int here = min_int(pieces.count - base, 32);
        float weight_here = 0.0f;
        for (int i = group; i < here; i += kGroups * kPiecesAtOnce) {
            float4 value[kPiecesAtOnce][kVectors];
#pragma unroll
            for (int j = 0; j < kPiecesAtOnce; ++j) {
                const int piece = min_int(i + j * kGroups, here - 1);
#pragma unroll
                for (int v = 0; v < kVectors; ++v) {
                    value[j][v] =
                        load_global(pieces.accum + (base + piece) * pieces.accum_stride + v * kColumnVectors);
                }
            }
            if (i == group) weight_here = weigh(lse_here);
#pragma unroll
            for (int j = 0; j < kPiecesAtOnce; ++j) {
                const int piece = i + j * kGroups;
                const float weight = __shfl_sync(0xffffffff, weight_here, piece % 32);
                if (piece < here && weight != 0.0f) {  // a piece without any key holds nothing
#pragma unroll
                    for (int v = 0; v < kVectors; ++v) {
                        sum[v].x = fmaf(weight, value[j][v].x, sum[v].x);
                        sum[v].y = fmaf(weight, value[j][v].y, sum[v].y);
                        sum[v].z = fmaf(weight, value[j][v].z, sum[v].z);
                        sum[v].w = fmaf(weight, value[j][v].w, sum[v].w);
                    }
                }
            }
        }
        if (group >= here) weigh(lse_here);  // no piece for this group, but the others' factors count
        lse_here = pieces.load_lse(base + 32 + lane_idx);
    }
    if constexpr (kGroups > 1) {
        if (group > 0) partial[(group - 1) * kColumnVectors + column] = sum[0];
        __syncthreads();
        if (group > 0) return;
#pragma unroll
        for (int other = 0; other < kGroups - 1; ++other) {
            const float4 more = partial[other * kColumnVectors + column];
            sum[0] = make_float4(sum[0].x + more.x, sum[0].y + more.y, sum[0].z + more.z, sum[0].w + more.w);
        }
    }
    const int token = row / params.h_q;
    const int head = row - token * params.h_q;
    const float inverse = weight_sum == 0.0f ? 0.0f : 1.0f / weight_sum;
    u16* out =
        params.out + req * params.out_stride_b + token * params.out_stride_s + head * params.out_stride_h;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        *reinterpret_cast<uint2*>(out + 4 * (column + v * kColumnVectors)) =
            make_uint2(pack_16bit<kDtype>(sum[v].x * inverse, sum[v].y * inverse),
                       pack_16bit<kDtype>(sum[v].z * inverse, sum[v].w * inverse));
    }
    if (column == 0) {
        params.lse[(static_cast<i64>(req) * params.h_q + head) * params.s_q + token] =
            weight_sum == 0.0f ? kInfinity : (max_log2 + log2_approx(weight_sum)) * kLn2;
    }
}
