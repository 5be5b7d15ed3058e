// Adds up the parts of pairs that CTAs of mha_decode.cu shared (mha/decode_output.cuh), in their order.
//
// Grid: x = the CTAs of mha_decode, y = its warpgroups of math. A CTA takes the pair that ends in this share
// and begins in an earlier one, if there is one; its threads have the rows and columns that they had there.
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/decode_line.cuh"
#include "mha/decode_output.cuh"
#include "mha/decode_params.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
// Parts whose loads are on their way together: a pair may be cut into as many as there are multiprocessors.
constexpr int kStatesAtOnce = 32 / kThreadRows;
constexpr int kColumns = kVChunks * kAccumulators;
constexpr int kPartsAtOnce = max_int(64 / kColumns, 1);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mha_decode_combine(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char rows[];
    static_assert(kVChunks * Rows::kBytes <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int last = blockIdx.x, wg = blockIdx.y, warp_idx = threadIdx.x / 32;
    const Share share = params.shares[last];
    if (share.block == 0) return;  // there is no share, or a pair begins with it
    Walk walk(params, share);
    walk.next(params);
    if (!walk.ends) return;
    const int first = share.pair_begins;
    // Parts first + 1, ..., last begin with their CTAs' shares.
    const auto part_from = [&](int cta) { return cta == first ? 2 * cta + 1 : 2 * cta; };

    float m[kThreadRows], sum[kThreadRows];
    Output o;
    int query[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) m[i] = -kInfinity, sum[i] = 0.0f, query[i] = query_of(i);
#pragma unroll 1
    for (int batch = first; batch <= last; batch += kStatesAtOnce) {
#pragma unroll
        for (int n = 0; n < kStatesAtOnce; ++n) {
            const float2* states = states_of(params, part_from(min_int(batch + n, last)), wg);
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) m[i] = fmaxf(m[i], states[query[i]].x);
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
        for (int j = 0; j < kAccumulators; ++j) o[chunk][j] = 0.0f;
#pragma unroll 1
    for (int batch = first; batch <= last; batch += kPartsAtOnce) {
        float2 state[kPartsAtOnce][kThreadRows];
        float x[kPartsAtOnce][kColumns];
#pragma unroll
        for (int n = 0; n < kPartsAtOnce; ++n) {
            const bool is_there = batch + n <= last;
            const int part = part_from(batch + n);
            const float2* states = states_of(params, part, wg);
            const float* numbers = part_of(params, part, wg) + threadIdx.x;
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i)
                state[n][i] = is_there ? states[query[i]] : make_float2(-kInfinity, 0.0f);
#pragma unroll
            for (int j = 0; j < kColumns; ++j) x[n][j] = is_there ? numbers[j * 128] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kPartsAtOnce; ++n)
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                const float2& of_row = state[n][i];
                const float weight = of_row.x == -kInfinity ? 0.0f : exp2_approx(of_row.x - m[i]);
                sum[i] += weight * of_row.y;
#pragma unroll
                for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int j = accumulator_of(i) + 2 * half;
                        o[chunk][j] += weight * x[n][chunk * kAccumulators + j];
                    }
            }
    }
    store_results(params, walk, wg, smem_address(rows), o, m, sum, warp_idx, 1);
}
