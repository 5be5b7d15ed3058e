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
constexpr int kPartsAtOnce = max_int(64 / (kVChunks * kAccumulators), 1);

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
#pragma unroll kStatesAtOnce
    for (int cta = first; cta <= last; ++cta) {
        const float2* states = states_of(params, part_from(cta), wg);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) m[i] = fmaxf(m[i], states[query[i]].x);
    }
#pragma unroll
    for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
        for (int j = 0; j < kAccumulators; ++j) o[chunk][j] = 0.0f;
#pragma unroll kPartsAtOnce
    for (int cta = first; cta <= last; ++cta) {
        const float* part = part_of(params, part_from(cta), wg) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            const float2 state = states_of(params, part_from(cta), wg)[query[i]];
            const float weight = state.x == -kInfinity ? 0.0f : exp2_approx(state.x - m[i]);
            sum[i] += weight * state.y;
            const int j = accumulator_of(i);
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk) {
                o[chunk][j] += weight * part[(chunk * kAccumulators + j) * 128];
                o[chunk][j + 2] += weight * part[(chunk * kAccumulators + j + 2) * 128];
            }
        }
    }
    store_results(params, walk, wg, smem_address(rows), o, m, sum, warp_idx, 1);
}
