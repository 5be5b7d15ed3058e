// Merges the pieces of split requests (sched/pieces.cuh):
//   out = sum_j numerator_j / sum_j 2^lse_j,  lse = ln sum_j 2^lse_j.
// In float32, with all powers of two relative to the largest lse_j.
//
//   -> out [b, s_q, h_q, 512] in q's type, lse [b, h_q, s_q] float32, natural log
//
// Grid: x = groups of rows, y = candidates for a split request: request y when there are no more requests than parts (or
// the plan is batch-invariant), else the last request of part y, if its first piece is there. A CTA whose candidate is not
// split leaves at once. Two warps merge a row, one the columns that share an o_scale_log2. With PIECE_GROUPS n > 1 there are
// n such pairs, each for every n-th piece, and they meet in shared memory in fixed order: for few rows of many pieces.
// Without, a CTA merges two rows.
// Time is latency: plan, then num_splits, then scalars and data together; the data do not wait for their weights.
#include "common/math.cuh"
#include "common/types.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "sched/pieces.cuh"
#include "sched/plan.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimV = 512;
constexpr int kGroups = PIECE_GROUPS;
constexpr int kRows = kGroups == 1 ? 2 : 1;  // per CTA
constexpr int kThreads = 64 * kGroups * kRows;
constexpr int kMinCtas = kGroups == 1 ? 8 : 1;                  // that fit an SM, which bounds the registers
constexpr int kColumns = kDimV / 64;                            // per thread
constexpr int kVectorColumns = kFloat16Pieces<kDtype> ? 8 : 4;  // in the 16 bytes of a load
constexpr int kVectors = kColumns / kVectorColumns;
constexpr int kPiecesAtOnce = 8 / kVectors;  // eight loads in flight

struct Params {
    const int* sched_meta;
    const int* num_splits;
    const void* o_accum;
    const float* lse_accum_log2;
    const float* o_scale_log2;
    u16* out;
    i64 out_stride_b, out_stride_s, out_stride_h;  // elements
    float* lse;
    int b, s_q, h_q;
    int num_slots;
    int object_layout;
    int by_request;  // grid y is requests, else parts
};

using Partial = float[kColumns][64];  // of a group, in shared memory: kGroups - 1 of them

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

// One row's pieces, as one lane sees them.
struct Pieces {
    const float* lse;       // of piece 0
    const float* scale;     // of piece 0, of this warp's columns
    const float4* vectors;  // of piece 0, this lane's first
    int rows;               // from piece to piece
    int count;

    __device__ __forceinline__ i64 offset(int piece) const { return static_cast<i64>(piece) * rows; }
    __device__ __forceinline__ float load_lse(int piece) const {
        return piece < count ? load_global(lse + offset(piece)) : -kInfinity;
    }
    __device__ __forceinline__ float load_scale(int piece) const {
        return piece < count ? load_global(scale + offset(piece) * kScaleHalves) : -kInfinity;
    }
    __device__ __forceinline__ float4 load_vector(int piece, int v) const {
        return load_global(vectors + offset(piece) * (kDimV / kVectorColumns) + v * 32);
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

extern "C" __global__ void __launch_bounds__(kThreads, kMinCtas)
    mla_combine(const __grid_constant__ Params params) {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    Partial* partial = reinterpret_cast<Partial*>(smem_bytes);
    const int lane_idx = threadIdx.x % 32;
    const int half = threadIdx.x / 32 % 2;
    const int group = threadIdx.x / 64 % kGroups;
    const int row = blockIdx.x * kRows + threadIdx.x / 64 / kGroups;
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
    const i64 first_row = static_cast<i64>(slot) * rows + row;
    Pieces pieces;
    pieces.count = fits ? splits : 0;
    pieces.rows = rows;
    pieces.lse = params.lse_accum_log2 + first_row;
    pieces.scale = params.o_scale_log2 + first_row * kScaleHalves + half;
    pieces.vectors = static_cast<const float4*>(params.o_accum) +
                     (first_row * kDimV + half * (kDimV / 2)) / kVectorColumns + lane_idx;

    // Each lane holds the scalars of piece lane_idx of the 32 in hand.
    float lse_here = pieces.load_lse(lane_idx);
    float scale_here = pieces.load_scale(lane_idx);
    float max_log2 = -kInfinity;
    float weight_sum = fits ? 0.0f : kNaN;  // a plan that its scratch was not made for: NaN, not nonsense
    float sum[kColumns] = {};

    // Takes 32 more pieces into the maximum and the denominator; returns this lane's factor on o_accum.
    auto weigh = [&]() {
        const float max_new = fmaxf(max_log2, warp_max(lse_here));
        const float offset = max_new == -kInfinity ? 0.0f : max_new;
        const float rescale = exp2_approx(max_log2 - offset);
        weight_sum = weight_sum * rescale + warp_sum(exp2_approx(lse_here - offset));
        max_log2 = max_new;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum[i] *= rescale;
        return exp2_approx(scale_here - offset);
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
                for (int v = 0; v < kVectors; ++v) value[j][v] = pieces.load_vector(base + piece, v);
            }
            if (i == group) weight_here = weigh();
#pragma unroll
            for (int j = 0; j < kPiecesAtOnce; ++j) {
                const int piece = i + j * kGroups;
                const float weight = __shfl_sync(0xffffffff, weight_here, piece % 32);
                if (piece < here && weight != 0.0f) {  // a piece without any key holds nothing
#pragma unroll
                    for (int v = 0; v < kVectors; ++v) {
                        accumulate(sum + v * kVectorColumns, weight, value[j][v]);
                    }
                }
            }
        }
        if (group >= here) weigh();  // no piece for this group, but the others' factors count
        lse_here = pieces.load_lse(base + 32 + lane_idx);
        scale_here = pieces.load_scale(base + 32 + lane_idx);
    }
    if constexpr (kGroups > 1) {
        const int column = threadIdx.x % 64;
        if (group > 0) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) partial[group - 1][i][column] = sum[i];
        }
        __syncthreads();
        if (group > 0) return;
        for (int other = 0; other < kGroups - 1; ++other) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) sum[i] += partial[other][i][column];
        }
    }
    const int token = row / params.h_q;
    const int head = row - token * params.h_q;
    const float inverse = weight_sum == 0.0f ? 0.0f : 1.0f / weight_sum;
    u16* out = params.out + req * params.out_stride_b + token * params.out_stride_s +
               head * params.out_stride_h + half * (kDimV / 2) + lane_idx * kVectorColumns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        u32 words[kVectorColumns / 2];
#pragma unroll
        for (int i = 0; i < kVectorColumns / 2; ++i) {
            const float* pair = sum + v * kVectorColumns + 2 * i;
            words[i] = pack_16bit<kDtype>(pair[0] * inverse, pair[1] * inverse);
        }
        u16* dst = out + v * 32 * kVectorColumns;
        if constexpr (kVectorColumns == 8) {
            *reinterpret_cast<uint4*>(dst) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
            *reinterpret_cast<uint2*>(dst) = make_uint2(words[0], words[1]);
        }
    }
    if (half == 0 && lane_idx == 0) {
        params.lse[(static_cast<i64>(req) * params.h_q + head) * params.s_q + token] =
            weight_sum == 0.0f ? kInfinity : (max_log2 + log2_approx(weight_sum)) * kLn2;
    }
}
