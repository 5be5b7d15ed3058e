// What the backward pass needs of each row of queries, before it: delta = sum(dout * out) - dlse, and lse in
// base 2. A row that sees no key, or exists in no request, has lse +inf, so that its probabilities are 0.
// Clears the sums of dQ too, where there are any.
//
// With a sink, probabilities are w exp(s - lse) where w = 1 / (1 + exp(sink - lse)), and dS = exp(s - lse) (w
// dP - (w sum(dout * out) - dlse)). Without dlse, log2 w goes to lse. With it, w is a number of its own,
// since it may be 0. The sink's gradient is the sum over rows of (w - 1) sum(dout * out).
//
// A CTA takes a block of kBlockRows rows of a head, in the scratch's order (mha/backward_rows.cuh).
#include "common/float_dtypes.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/backward_rows.cuh"
#include "ptx/sync.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kUnit = 8;                                    // elements that a thread loads at once
constexpr int kLanes = LANES, kGroups = kThreads / kLanes;  // of a row; rows that are read side by side
constexpr int kRows = kBlockRows / kGroups;                 // of a thread

struct Params {
    const void *out, *dout;
    const float* lse;
    const float* dlse;  // null: zeros
    float *lse_log2, *delta;
    float* dq_accum;                      // null: nobody needs dQ
    const void* attn_sink;                // [heads]; null: none
    float* dsink_parts;                   // [heads, blocks]
    float* weights;                       // as lse_log2; null: log2 w goes to lse
    int* turns;                           // mha/backward_params.cuh; null: there are none
    const int *cu_seqlens_q, *seqused_q;  // as in the kernel after this one
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 dout_stride_b, dout_stride_s, dout_stride_h;
    i64 lse_stride_b, lse_stride_s, lse_stride_h;
    i64 dlse_stride_b, dlse_stride_s, dlse_stride_h;
    i64 blocks;  // of a head
    int b, heads, seqlen_q, total_q, d_v;
    int accum_columns;  // of the sums of dQ
    int sink_dtype;     // common/float_dtypes.cuh
};

extern "C" __global__ void __launch_bounds__(kThreads)
    mha_backward_prepare(const __grid_constant__ Params params) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i64 place = blockIdx.x;
    const i64 block = place % params.blocks;
    const int head = place / params.blocks;
    const int request =
        request_of_block(params.cu_seqlens_q, params.b, params.total_q, params.seqlen_q, block);
    const RequestRows rows(params.cu_seqlens_q, params.total_q, params.seqlen_q, request);
    const int token_of_block = static_cast<int>(block - rows.first_block) * kBlockRows;
    // A block that is none of the request's has rows that do not exist. It is written as others are: where
    // cu_seqlens decreases, tiles may read it and wait for its turns.
    const bool is_there = token_of_block >= 0 && token_of_block < rows.count;
    const int first_token = is_there ? token_of_block : 0;
    const int q_len = is_there ? used_tokens(params.seqused_q, request, rows.count) : 0;
    const i64 batch = params.cu_seqlens_q == nullptr ? request : 0;
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const i64 first = rows.begin + first_token + group;
    const u16* out = static_cast<const u16*>(params.out) + batch * params.out_stride_b +
                     first * params.out_stride_s + head * params.out_stride_h;
    const u16* dout = static_cast<const u16*>(params.dout) + batch * params.dout_stride_b +
                      first * params.dout_stride_s + head * params.dout_stride_h;
    const float* lse =
        params.lse + batch * params.lse_stride_b + first * params.lse_stride_s + head * params.lse_stride_h;
    // Nothing behind a row's last element is read: it may be the end of the array's memory.
    const int whole = params.d_v / kUnit * kUnit;
    uint4 a[kRows], b[kRows];
    const auto load = [&](int column) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            a[i] = b[i] = make_uint4(0, 0, 0, 0);
            if (first_token + group + kGroups * i >= q_len || column >= whole) continue;
            a[i] = *reinterpret_cast<const uint4*>(out + kGroups * i * params.out_stride_s + column);
            b[i] = *reinterpret_cast<const uint4*>(dout + kGroups * i * params.dout_stride_s + column);
        }
    };
    // Memory is busy from here on: with these rows, then with the zeros.
    load(kUnit * lane);
    float lses[kRows];  // -inf: the row sees no key or does not exist
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        lses[i] =
            first_token + group + kGroups * i < q_len ? lse[kGroups * i * params.lse_stride_s] : -kInfinity;

    if (params.dq_accum != nullptr) {
        float4* sums = reinterpret_cast<float4*>(params.dq_accum + place * kBlockRows * params.accum_columns);
        for (int i = threadIdx.x; i < kBlockRows * params.accum_columns / 4; i += kThreads)
            sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (params.turns != nullptr && threadIdx.x == 0) params.turns[place] = 0;

    float dots[kRows] = {};
    for (int column = kUnit * lane;; load(column)) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const u32 firsts[4] = {a[i].x, a[i].y, a[i].z, a[i].w};
            const u32 seconds[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 x = unpack_16bit<kDtype>(firsts[pair]), y = unpack_16bit<kDtype>(seconds[pair]);
                dots[i] = fmaf(x.x, y.x, dots[i]);
                dots[i] = fmaf(x.y, y.y, dots[i]);
            }
        }
        column += kUnit * kLanes;
        if (column >= whole) break;
    }
    const float* dlse = params.dlse + batch * params.dlse_stride_b + first * params.dlse_stride_s +
                        head * params.dlse_stride_h;
    const bool has_sink = params.attn_sink != nullptr;
    const float sink = has_sink ? load_float(params.attn_sink, params.sink_dtype, head) : 0.0f;
    float dsink = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const bool attends = lses[i] != -kInfinity;
        if (attends && whole + lane < params.d_v)
            dots[i] = fmaf(unpack_16bit<kDtype>(out[kGroups * i * params.out_stride_s + whole + lane]).x,
                           unpack_16bit<kDtype>(dout[kGroups * i * params.dout_stride_s + whole + lane]).x,
                           dots[i]);
#pragma unroll
        for (int distance = kLanes / 2; distance > 0; distance /= 2)
            dots[i] += __shfl_xor_sync(0xffffffff, dots[i], distance);
        const float dot = attends ? dots[i] : 0.0f;
        // Finite where lse is: +inf has a meaning, and kernels/flex_row_references.cu looks for what is far.
        const float largest = 3.402823466e+38f, scaled = lses[i] * kLog2E;
        const float finite = fabsf(scaled) == kInfinity ? copysignf(largest, scaled) : scaled;
        const float lse_log2 = attends ? finite : kInfinity;
        const float w = has_sink && attends ? 1.0f / (1.0f + exp2f(sink * kLog2E - lse_log2)) : 1.0f;
        dsink += (w - 1.0f) * dot;
        if (lane != 0) continue;
        const float of_lse =
            attends && params.dlse != nullptr ? dlse[kGroups * i * params.dlse_stride_s] : 0.0f;
        const i64 at = place * kBlockRows + group + kGroups * i;
        if (params.weights != nullptr) {
            params.lse_log2[at] = lse_log2;
            params.delta[at] = w * dot - of_lse;
            params.weights[at] = w;
        } else {
            params.lse_log2[at] = lse_log2 - log2f(w);
            params.delta[at] = dot - of_lse;
        }
    }
    if (!has_sink) return;
    __shared__ float dsink_of_groups[kGroups];
    if (lane == 0) dsink_of_groups[group] = dsink;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < kGroups; ++i) sum += dsink_of_groups[i];
        params.dsink_parts[place] = sum;
    }
}
