// Combines the results of splits: of every row, attention over disjoint parts of its keys
// (kernels/mha_forward.cu). A warp takes a row; splits are added in a fixed order.
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/sink.cuh"
#include "ptx/sync.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr bool kOutIsFp8 = OUT_FP8;
constexpr int kDimV = D_V;  // of the splits' rows, a multiple of 32
constexpr int kRows = 4;    // of a CTA
constexpr int kThreads = 32 * kRows;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    const float* o_accum;    // [splits, rows, kDimV], each split by itself
    const float* lse_accum;  // [splits, rows], natural logarithms
    void* out;
    float* lse;               // [rows]; null: not wanted
    const int* cu_seqlens_q;  // [b + 1]; null: all rows are of requests
    const void* attn_sink;
    const float* out_scale;  // null: out_scale_value
    i64 rows;
    i64 out_stride_b, out_stride_s, out_stride_h;
    int splits;
    int b;
    int heads;
    int seqlen_q;  // rows are [head, token], or [request, head, token] of so many tokens
    int d_v;
    int sink_dtype;
    float out_scale_value;
};

__device__ __forceinline__ void store(const Params& params, i64 element, int column, float a, float b) {
    if constexpr (kOutIsFp8) {
        const u32 pair = pack_e4m3(a, b, 0.0f, 0.0f);
        unsigned char* out = static_cast<unsigned char*>(params.out) + element + column;
        if (column < params.d_v) out[0] = static_cast<unsigned char>(pair);
        if (column + 1 < params.d_v) out[1] = static_cast<unsigned char>(pair >> 8);
    } else {
        const u32 pair = pack_16bit<kDtype>(a, b);
        u16* out = static_cast<u16*>(params.out) + element + column;
        if (column < params.d_v) out[0] = static_cast<u16>(pair);
        if (column + 1 < params.d_v) out[1] = static_cast<u16>(pair >> 16);
    }
}

// Whether a request has the token, for a whole warp. Positions may decrease: zeros may fill their array up.
__device__ __forceinline__ bool is_of_a_request(const Params& params, int token) {
    bool found = false;
    for (int request = threadIdx.x % 32; request < params.b; request += 32)
        found |= params.cu_seqlens_q[request] <= token && token < params.cu_seqlens_q[request + 1];
    return __any_sync(0xffffffff, found);
}

extern "C" __global__ void __launch_bounds__(kThreads) mha_combine(const __grid_constant__ Params params) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / 32;
    if (row >= params.rows) return;
    const int lane = threadIdx.x % 32;
    const int token = static_cast<int>(row % params.seqlen_q);
    const i64 of_token = row / params.seqlen_q;
    const int head = static_cast<int>(of_token % params.heads);
    const i64 element = of_token / params.heads * params.out_stride_b + token * params.out_stride_s +
                        head * params.out_stride_h;
    if (params.cu_seqlens_q != nullptr && !is_of_a_request(params, token)) return;

    float top = -kInfinity;
    for (int split = 0; split < params.splits; ++split)
        top = fmaxf(top, params.lse_accum[split * params.rows + row]);
    if (top == -kInfinity) top = 0.0f;
    const float reference = top * kLog2E;
    // The difference first: of two large products rounding would be left.
    const auto weight_of = [&](i64 part) { return exp2_approx((params.lse_accum[part] - top) * kLog2E); };
    float sum = 0.0f;
    for (int split = 0; split < params.splits; ++split) sum += weight_of(split * params.rows + row);
    if (params.lse != nullptr && lane == 0)
        params.lse[row] = sum == 0.0f ? -kInfinity : (reference + log2_approx(sum)) * kLn2;
    float factor =
        sum == 0.0f ? 0.0f
                    : reciprocal_approx(add_sink(params.attn_sink, params.sink_dtype, head, reference, sum));
    if constexpr (kOutIsFp8)
        factor /= params.out_scale == nullptr ? params.out_scale_value : *params.out_scale;

#pragma unroll
    for (int first = 0; first < kDimV; first += 64) {
        const int column = first + 2 * lane;
        float a = 0.0f, b = 0.0f;
        if (column < kDimV && factor != 0.0f) {
            for (int split = 0; split < params.splits; ++split) {
                const i64 part = split * params.rows + row;
                const float weight = weight_of(part);
                const float2 value = *reinterpret_cast<const float2*>(params.o_accum + part * kDimV + column);
                // A split without keys of the row has weight 0, and holds zeros.
                a += weight * value.x;
                b += weight * value.y;
            }
            a *= factor;
            b *= factor;
        }
        store(params, element, column, a, b);
    }
}
