// Merges attention results over disjoint sets of keys, called parts:
//   out = sum_i exp(lse_i) out_i / sum_i exp(lse_i),  lse = ln sum_i exp(lse_i).
//
//   up to 32 parts: out_i [n, s, h, 512] of DTYPE, lse_i [n, s, h] float32, natural log
//   -> out [n, s, h, 512] of OUT_DTYPE, lse [n, s, h] float32, natural log
//
// A part has no keys if its lse is +inf or -inf; its out is not read. If no part has keys, out is 0 and lse
// is +inf. If one part has keys, its weight is exactly 1: lse and out are copied, and out is rounded if
// OUT_DTYPE is narrower than DTYPE. Two kinds of values may change their bits on the way, because they are
// added to +0: -0.0 becomes +0.0, and NaN stays NaN with any bits. Sums are in float32, with all powers
// relative to the largest lse_i.
//
// Grid: x = groups of kRows rows. A warp merges 512 bytes of a row, 16 bytes per lane and part. Lane i
// computes the weight of part i. A lane issues the loads of kPartsAtOnce parts before it uses the first
// value. The kernel is memory-bound.
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "mla/dimensions.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

// DTYPE and OUT_DTYPE are values of Dtype, or 2 for float32.
constexpr int kFloat32 = 2;
constexpr int kDtype = DTYPE;
constexpr int kOutDtype = OUT_DTYPE;
constexpr int kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kWarps = kThreads / 32;
constexpr int kMaxParts = 32;  // one per lane
constexpr int kPartsAtOnce = 8;
constexpr int kColumns = kDtype == kFloat32 ? 4 : 8;  // in 16 bytes
constexpr int kRowWarps = kDimV / (32 * kColumns);    // warps per row
constexpr int kRows = kWarps / kRowWarps;             // per CTA
static_assert(kRows >= 1, "a row is of one CTA");
constexpr int kValueBytes = kDtype == kFloat32 ? 4 : 2;
constexpr int kOutValueBytes = kOutDtype == kFloat32 ? 4 : 2;

struct Params {
    const unsigned char* outs[kMaxParts];
    const float* lses[kMaxParts];
    i64 out_strides_n[kMaxParts], out_strides_s[kMaxParts], out_strides_h[kMaxParts];  // elements
    i64 lse_strides_n[kMaxParts], lse_strides_s[kMaxParts], lse_strides_h[kMaxParts];
    unsigned char* out;
    float* lse;
    i64 out_stride_n, out_stride_s, out_stride_h;  // elements
    i64 lse_stride_n, lse_stride_s, lse_stride_h;
    int rows;  // n * s * h
    int s, h;
    int parts;
};

struct RowIndex {
    int n, s, h;

    __device__ __forceinline__ RowIndex(const Params& params, int row) {
        const int token = row / params.h;
        h = row - token * params.h;
        n = token / params.s;
        s = token - n * params.s;
    }
    __device__ __forceinline__ i64 offset(i64 stride_n, i64 stride_s, i64 stride_h) const {
        return n * stride_n + s * stride_s + h * stride_h;
    }
};

__device__ __forceinline__ void unpack(const uint4& vector, float (&values)[kColumns]) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kDtype == kFloat32) {
            values[i] = __uint_as_float(words[i]);
        } else if constexpr (kDtype == static_cast<int>(Dtype::kBf16)) {
            values[2 * i] = bf16_low(words[i]);
            values[2 * i + 1] = bf16_high(words[i]);
        } else {
            const float2 pair = unpack_f16(words[i]);
            values[2 * i] = pair.x;
            values[2 * i + 1] = pair.y;
        }
    }
}

__device__ __forceinline__ void store(unsigned char* dst, const float (&values)[kColumns]) {
    if constexpr (kOutDtype == kFloat32) {
#pragma unroll
        for (int i = 0; i < kColumns; i += 4) {
            reinterpret_cast<float4*>(dst)[i / 4] =
                make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        }
    } else {
        u32 words[kColumns / 2];
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
            words[i] = pack_16bit<static_cast<Dtype>(kOutDtype)>(values[2 * i], values[2 * i + 1]);
        }
        if constexpr (kColumns == 8) {
            store_global_16(dst, make_uint4(words[0], words[1], words[2], words[3]));
        } else {
            store_global_8(dst, make_uint2(words[0], words[1]));
        }
    }
}

// What lane i holds of part i.
struct Part {
    const unsigned char* row = nullptr;  // null: no keys
    float weight = 0.0f;                 // exp(lse_i) / sum_j exp(lse_j)
};

// Sets the weight of the lane's part; returns the merged lse. A converged warp calls.
__device__ __forceinline__ float weigh(const Params& params, const RowIndex& index, int lane_idx,
                                       Part& part) {
    float lse = -kInfinity;
    if (lane_idx < params.parts) {
        lse = load_global(params.lses[lane_idx] + index.offset(params.lse_strides_n[lane_idx],
                                                               params.lse_strides_s[lane_idx],
                                                               params.lse_strides_h[lane_idx]));
        if (lse == kInfinity) lse = -kInfinity;
        if (lse != -kInfinity) {
            const i64 offset = index.offset(params.out_strides_n[lane_idx], params.out_strides_s[lane_idx],
                                            params.out_strides_h[lane_idx]);
            part.row = params.outs[lane_idx] + offset * kValueBytes;
        }
    }
    float top = lse;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, distance));
    }
    if (top == -kInfinity && !__any_sync(0xffffffff, lse != lse)) return kInfinity;
    const float weight = lse == -kInfinity ? 0.0f : exp2_approx((lse - top) * kLog2E);
    float sum = weight;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    part.weight = weight / sum;
    return top + log2_approx(sum) * kLn2;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_merge_states(const __grid_constant__ Params params) {
    const int lane_idx = threadIdx.x % 32;
    const int warp_idx = threadIdx.x / 32;
    const int row = blockIdx.x * kRows + warp_idx / kRowWarps;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (row >= params.rows) return;
    const int first_column = (warp_idx % kRowWarps * 32 + lane_idx) * kColumns;
    const RowIndex index(params, row);
    Part own;
    const float lse = weigh(params, index, lane_idx, own);
    float sum[kColumns] = {};
#pragma unroll 1
    for (int first = 0; first < params.parts; first += kPartsAtOnce) {
        uint4 vectors[kPartsAtOnce];
        float weights[kPartsAtOnce];
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
            const u64 address = __shfl_sync(0xffffffff, reinterpret_cast<u64>(own.row), first + i);
            weights[i] = __shfl_sync(0xffffffff, own.weight, first + i);
            const unsigned char* src = reinterpret_cast<const unsigned char*>(address);
            vectors[i] = load_global_16(src + first_column * kValueBytes, src != nullptr);
        }
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
            float values[kColumns];
            unpack(vectors[i], values);
#pragma unroll
            for (int k = 0; k < kColumns; ++k) sum[k] = fmaf(weights[i], values[k], sum[k]);
        }
    }
    const i64 offset = index.offset(params.out_stride_n, params.out_stride_s, params.out_stride_h);
    store(params.out + (offset + first_column) * kOutValueBytes, sum);
    if (first_column == 0) {
        params.lse[index.offset(params.lse_stride_n, params.lse_stride_s, params.lse_stride_h)] = lse;
    }
}
