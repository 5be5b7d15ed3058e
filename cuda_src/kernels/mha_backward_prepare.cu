// What the backward pass needs of each row of queries, before it: delta = sum(dout * out) - dlse, and lse in base
// 2. A row that sees no key, or exists in no request, has lse +inf, so that its probabilities are 0. Clears the
// sums of dQ too.
//
// A CTA takes a block of kBlockRows rows of a head, in the scratch's order (mha/backward_rows.cuh).
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/backward_rows.cuh"
#include "ptx/sync.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kThreads = 128;
constexpr int kUnit = 8;  // elements that a thread loads at once

struct Params {
    const void *out, *dout;
    const float* lse;
    const float* dlse;  // null: zeros
    float *lse_log2, *delta, *dq_accum;
    const int *cu_seqlens_q, *seqused_q;  // as in the kernel after this one
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 dout_stride_b, dout_stride_s, dout_stride_h;
    i64 lse_stride_b, lse_stride_s, lse_stride_h;
    i64 dlse_stride_b, dlse_stride_s, dlse_stride_h;
    i64 blocks;  // of a head
    int b, heads, seqlen_q, d_v;
    int accum_columns;  // of the sums of dQ
};

extern "C" __global__ void __launch_bounds__(kThreads)
    mha_backward_prepare(const __grid_constant__ Params params) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i64 place = blockIdx.x;
    const i64 block = place % params.blocks;
    const int head = place / params.blocks, warp = threadIdx.x / 32, lane = lane_index();
    const int request = request_of_block(params.cu_seqlens_q, params.b, params.seqlen_q, block);
    const RequestRows rows(params.cu_seqlens_q, params.seqlen_q, request);
    const int first_token = static_cast<int>(block - rows.first_block) * kBlockRows;
    if (first_token >= rows.count) return;
    int q_len = rows.count;
    if (params.seqused_q != nullptr) q_len = min_int(q_len, params.seqused_q[request]);

    float4* sums = reinterpret_cast<float4*>(params.dq_accum + place * kBlockRows * params.accum_columns);
    for (int i = threadIdx.x; i < kBlockRows * params.accum_columns / 4; i += kThreads)
        sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    const i64 batch = params.cu_seqlens_q == nullptr ? request : 0;
    for (int row = warp; row < kBlockRows; row += kThreads / 32) {
        const int token = first_token + row;
        float lse = kInfinity, delta = 0.0f;
        if (token < q_len) {
            const i64 at = rows.begin + token;
            const float natural =
                params
                    .lse[batch * params.lse_stride_b + at * params.lse_stride_s + head * params.lse_stride_h];
            if (natural != -kInfinity) {
                const u16* out = static_cast<const u16*>(params.out) + batch * params.out_stride_b +
                                 at * params.out_stride_s + head * params.out_stride_h;
                const u16* dout = static_cast<const u16*>(params.dout) + batch * params.dout_stride_b +
                                  at * params.dout_stride_s + head * params.dout_stride_h;
                for (int column = kUnit * lane; column < params.d_v; column += kUnit * 32) {
                    const uint4 a = *reinterpret_cast<const uint4*>(out + column);
                    const uint4 b = *reinterpret_cast<const uint4*>(dout + column);
                    const u32 first[4] = {a.x, a.y, a.z, a.w}, second[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float2 x = unpack_16bit<kDtype>(first[i]), y = unpack_16bit<kDtype>(second[i]);
                        if (column + 2 * i < params.d_v) delta = fmaf(x.x, y.x, delta);
                        if (column + 2 * i + 1 < params.d_v) delta = fmaf(x.y, y.y, delta);
                    }
                }
                lse = natural * kLog2E;
                if (params.dlse != nullptr && lane == 0)
                    delta -= params.dlse[batch * params.dlse_stride_b + at * params.dlse_stride_s +
                                         head * params.dlse_stride_h];
            }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            delta += __shfl_xor_sync(0xffffffff, delta, distance);
        if (lane == 0) {
            params.lse_log2[place * kBlockRows + row] = lse;
            params.delta[place * kBlockRows + row] = delta;
        }
    }
}
