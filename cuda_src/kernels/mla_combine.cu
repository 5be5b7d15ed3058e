// Merges the pieces of split requests:  out = sum_j w_j O_j / sum_j w_j,  w_j = 2^(lse_j - max lse),  lse = ln sum_j 2^lse_j.
//
//   o_accum [num_slots, rows, 512] float32 (each piece normalised by its own sum), lse_accum_log2 [num_slots, rows]
//   -> out [b, s_q, h_q, 512] in q's type, lse [b, h_q, s_q] float32, natural log; rows = s_q * h_q, row = token * h_q + head.
//
// Grid: x = groups of ROWS_PER_CTA rows, y = candidates for a split request: request y when there are no more requests than
// parts (or the plan is batch-invariant), else the last request of part y, if its first piece is there. A CTA whose
// candidate is not split leaves at once. 128 threads hold the 512 columns of a row; 4 / ROWS_PER_CTA groups of them share
// the row's pieces and meet in shared memory in fixed order, so the result does not depend on timing.
// Weights are read before the data they guard: a piece without any key (lse -inf) is never read.
#include "common/math.cuh"
#include "common/types.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "sched/plan.cuh"

static_assert(ROWS_PER_CTA == 1 || ROWS_PER_CTA == 4, "ROWS_PER_CTA must be 1 or 4");

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimV = 512;
constexpr int kThreadsPerRow = kDimV / 4;
constexpr int kThreads = 4 * kThreadsPerRow;
constexpr int kGroups = 4 / ROWS_PER_CTA;
constexpr int kLoadsInFlight = 4;

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

extern "C" __global__ void __launch_bounds__(kThreads) mla_combine(const __grid_constant__ Params params) {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    float4* partial = reinterpret_cast<float4*>(smem_bytes);  // [kGroups - 1][kThreadsPerRow]
    const int column = threadIdx.x % kThreadsPerRow;
    const int group = threadIdx.x / kThreadsPerRow % kGroups;
    const int row = blockIdx.x * ROWS_PER_CTA + threadIdx.x / kThreadsPerRow / kGroups;
    const int lane_idx = threadIdx.x % 32;
    const int rows = params.s_q * params.h_q;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    const int req = candidate_request(params);
    if (req < 0) return;
    const int splits_before = load_global(params.num_splits + req);
    const int splits = load_global(params.num_splits + req + 1) - splits_before;
    if (splits <= 1) return;
    const bool batch_invariant = load_global(params.sched_meta + kPlanRowInts - 1) == kBatchInvariantMark;
    const int slot = first_slot(splits_before, req, batch_invariant);
    const bool fits = slot >= 0 && slot + splits <= params.num_slots;

    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float max_log2 = -kInfinity;
    float weight_sum = fits ? 0.0f : kNaN;  // a plan that its scratch was not made for: NaN, not nonsense
    if (row < rows && fits) {
        const float* lse_accum = params.lse_accum_log2 + static_cast<i64>(slot) * rows + row;
        for (int i = lane_idx; i < splits; i += 32) {
            max_log2 = fmaxf(max_log2, load_global(lse_accum + static_cast<i64>(i) * rows));
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            max_log2 = fmaxf(max_log2, __shfl_xor_sync(0xffffffff, max_log2, offset));
        }
        const float offset_log2 = max_log2 == -kInfinity ? 0.0f : max_log2;
        for (int i = lane_idx; i < splits; i += 32) {
            weight_sum += exp2_approx(load_global(lse_accum + static_cast<i64>(i) * rows) - offset_log2);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            weight_sum += __shfl_xor_sync(0xffffffff, weight_sum, offset);
        }
        const float4* accum =
            reinterpret_cast<const float4*>(params.o_accum + (static_cast<i64>(slot) * rows + row) * kDimV) + column;
        const i64 stride = static_cast<i64>(rows) * kThreadsPerRow;
        for (int i = group; i < splits; i += kGroups * kLoadsInFlight) {
            float weight[kLoadsInFlight];
            float4 value[kLoadsInFlight];
#pragma unroll
            for (int j = 0; j < kLoadsInFlight; ++j) {
                const int piece = i + j * kGroups;
                weight[j] = 0.0f;
                value[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (piece < splits) {
                    weight[j] = exp2_approx(load_global(lse_accum + static_cast<i64>(piece) * rows) - offset_log2);
                }
            }
#pragma unroll
            for (int j = 0; j < kLoadsInFlight; ++j) {
                if (weight[j] != 0.0f) value[j] = load_global(accum + (i + j * kGroups) * stride);
            }
#pragma unroll
            for (int j = 0; j < kLoadsInFlight; ++j) {
                sum.x = fmaf(weight[j], value[j].x, sum.x);
                sum.y = fmaf(weight[j], value[j].y, sum.y);
                sum.z = fmaf(weight[j], value[j].z, sum.z);
                sum.w = fmaf(weight[j], value[j].w, sum.w);
            }
        }
    }
    if constexpr (kGroups > 1) {
        if (group > 0) partial[(group - 1) * kThreadsPerRow + column] = sum;
        __syncthreads();
        if (group > 0) return;
#pragma unroll
        for (int other = 0; other < kGroups - 1; ++other) {
            const float4 more = partial[other * kThreadsPerRow + column];
            sum.x += more.x;
            sum.y += more.y;
            sum.z += more.z;
            sum.w += more.w;
        }
    }
    if (row >= rows) return;
    const int token = row / params.h_q;
    const int head = row - token * params.h_q;
    const float inverse = weight_sum == 0.0f ? 0.0f : 1.0f / weight_sum;
    u16* out = params.out + req * params.out_stride_b + token * params.out_stride_s + head * params.out_stride_h;
    *reinterpret_cast<uint2*>(out + 4 * column) = make_uint2(pack_16bit<kDtype>(sum.x * inverse, sum.y * inverse),
                                                             pack_16bit<kDtype>(sum.z * inverse, sum.w * inverse));
    if (column == 0) {
        params.lse[(static_cast<i64>(req) * params.h_q + head) * params.s_q + token] =
            weight_sum == 0.0f ? kInfinity : (max_log2 + log2_approx(weight_sum)) * kLn2;
    }
}
