// Adds up the parts of pairs that CTAs of mha_decode.cu shared (mha/decode_output.cuh), in their order.
//
// Grid: x = the CTAs of mha_decode, y = its groups of query rows. A CTA has the share of the line that the
// CTA of mha_decode with its number has, and takes the pair that ends in this share and begins in an earlier
// one, if there is one. Its threads have the rows and columns that threads have there. It finds the pair
// while mha_decode still runs, if registers have room for both: lengths are older.
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/decode_line.cuh"
#include "mha/decode_output.cuh"
#include "mha/decode_params.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kColumns = kVChunks * kAccumulators;  // a thread's numbers of a part
// Parts whose loads are on their way together: 104 registers for numbers, states and an address of each. A
// pair may be cut into as many parts as there are teams.
constexpr int kPartsAtOnce = max_int(104 / (kColumns + 2 * kThreadRows + 1), 1);

extern "C" __global__ void __launch_bounds__(kThreads, kOwnRows == 8 ? 4 : 2)
    mha_decode_combine(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char rows[];
    static_assert(kVChunks * Rows::kBytes <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
    __shared__ i64 counts[kCounts];
    const int row_group = blockIdx.y, warp_idx = threadIdx.x / 32;
    count_blocks(params, counts);
    __syncthreads();
    const Share share = share_of_cta(params, counts);
    Walk walk(params, share);
    const bool has_last_part = share.block > 0 && walk.next(params) && walk.ends();  // of several
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (!has_last_part) return;
    const int first = share.pair_begins, last = blockIdx.x / params.team;
    // Parts of teams first + 1, ..., last begin with their shares.
    const auto part_from = [&](int team) {
        return 2 * (team * params.team + walk.head_of_team) + (team == first);
    };

    float m[kThreadRows], sum[kThreadRows];
    Output o;
    int query[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) m[i] = -kInfinity, sum[i] = 0.0f, query[i] = query_of(i);
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
            const float2* states = states_of(params, part, row_group);
            const float4* numbers = part_of(params, part, row_group);
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i)
                state[n][i] = is_there ? states[query[i]] : make_float2(-kInfinity, 0.0f);
#pragma unroll
            for (int j = 0; j < kColumns; j += 4) {
                const float4 four = is_there ? numbers[j / 4 * 128] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                x[n][j] = four.x, x[n][j + 1] = four.y, x[n][j + 2] = four.z, x[n][j + 3] = four.w;
            }
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            float top = m[i];
#pragma unroll
            for (int n = 0; n < kPartsAtOnce; ++n) top = fmaxf(top, state[n][i].x);
            const float shrink = m[i] == top ? 1.0f : exp2_approx(m[i] - top);
            m[i] = top, sum[i] *= shrink;
            float weight[kPartsAtOnce];
#pragma unroll
            for (int n = 0; n < kPartsAtOnce; ++n) {
                weight[n] = state[n][i].x == -kInfinity ? 0.0f : exp2_approx(state[n][i].x - top);
                sum[i] += weight[n] * state[n][i].y;
            }
#pragma unroll
            for (int chunk = 0; chunk < kVChunks; ++chunk)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int j = accumulator_of(i) + 2 * half;
                    o[chunk][j] *= shrink;
#pragma unroll
                    for (int n = 0; n < kPartsAtOnce; ++n)
                        o[chunk][j] += weight[n] * x[n][chunk * kAccumulators + j];
                }
        }
    }
    store_results(params, walk, row_group, smem_address(rows), o, m, sum, warp_idx, 1);
}
