// dQ from its sums in float32, which lie as the accumulators of the kernel before (ptx/wgmma.cuh): for each
// block of kBlockRows rows of a head and every 8 columns, four accumulators of each thread together. And the
// gradients of sinks from their parts.
#include "common/float_dtypes.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragments.cuh"
#include "mha/backward_rows.cuh"
#include "ptx/sync.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    const float* dq_accum;
    void* dq;  // null: nobody needs it
    const int* cu_seqlens_q;
    const float* dsink_parts;  // [heads, blocks]
    void* dsink;               // [heads]; null: none
    i64 dq_stride_b, dq_stride_s, dq_stride_h;
    i64 blocks;  // of a head
    int b, seqlen_q, total_q, d_qk;
    int accum_columns;  // of the sums
    int sink_dtype;     // common/float_dtypes.cuh
    float scale;
};

// All threads. The sum of a head's parts, always in the same order.
__device__ __forceinline__ void store_dsink(const Params& params, int head) {
    __shared__ float sums[kThreads];
    float sum = 0.0f;
    for (i64 block = threadIdx.x; block < params.blocks; block += kThreads)
        sum += params.dsink_parts[head * params.blocks + block];
    sums[threadIdx.x] = sum;
    for (int distance = kThreads / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
    }
    if (threadIdx.x == 0) store_float(params.dsink, params.sink_dtype, head, sums[0]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mha_backward_finish(const __grid_constant__ Params params) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i64 place = blockIdx.x, block = place % params.blocks;
    const int head = place / params.blocks, thread = threadIdx.x;
    if (params.dsink != nullptr && block == 0 && blockIdx.y == 0) store_dsink(params, head);
    if (params.dq == nullptr) return;
    const int request =
        request_of_block(params.cu_seqlens_q, params.b, params.total_q, params.seqlen_q, block);
    const RequestRows rows(params.cu_seqlens_q, params.total_q, params.seqlen_q, request);
    const int first_token = static_cast<int>(block - rows.first_block) * kBlockRows;
    if (first_token < 0 || first_token >= rows.count) return;
    u16* out = static_cast<u16*>(params.dq) + head * params.dq_stride_h;
    if (params.cu_seqlens_q == nullptr) out += request * params.dq_stride_b;
    const int chunk = blockIdx.y;
    const float4* sums =
        reinterpret_cast<const float4*>(params.dq_accum + place * kBlockRows * params.accum_columns) +
        chunk * 1024 + thread;
    const int token = first_token + thread / 32 * 16 + thread % 32 / 4;
    u16* row = out + (rows.begin + token) * params.dq_stride_s;
    float4 fours[8];  // all are loaded before anything is stored, which might alias them
#pragma unroll
    for (int j = 0; j < 8; ++j)
        fours[j] =
            64 * chunk + 8 * j < params.accum_columns ? sums[128 * j] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u16* dst = row + 8 * r * params.dq_stride_s;
        const bool exists = token + 8 * r < rows.count;
#pragma unroll
        for (int first = 0; first < 8; first += 4) {
            u32 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float4& four = fours[first + j];
                pairs[j] = pack_16bit<kDtype>((r == 0 ? four.x : four.z) * params.scale,
                                              (r == 0 ? four.y : four.w) * params.scale);
            }
            quad_transpose(pairs);  // eight neighbouring columns
            const int column = 64 * chunk + 8 * (first + thread % 4);
            if (exists) store_columns(dst + column, pairs, params.d_qk - column);
        }
    }
}
