// The states of the blocks of a mask function: empty, partial or full (flex/block_states.cuh). A block
// that the end of the queries or keys cuts is partial, unless it is empty.
//
// A CTA takes one block after another: warps its rows, lanes its columns.
#include "common/types.cuh"
#include "flex/block_states.cuh"
#include "user/mods.cuh"

constexpr int kThreads = 256;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    MaskMod mask_mod;
    unsigned char* states;  // [batches, heads, rows, columns]
    i64 blocks;             // of all batches and heads
    int heads, rows, columns;
    int block_q, block_k;
    int q_len, kv_len;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    block_mask_states(const __grid_constant__ Params params) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int q_len = params.q_len, kv_len = params.kv_len;
    for (i64 block = blockIdx.x; block < params.blocks; block += gridDim.x) {
        const int column = block % params.columns;
        const i64 line = block / params.columns;
        const int row = line % params.rows;
        const int h = line / params.rows % params.heads, b = line / params.rows / params.heads;
        const int first_q = row * params.block_q, end_q = min_int(first_q + params.block_q, q_len);
        const int first_k = column * params.block_k, end_k = min_int(first_k + params.block_k, kv_len);
        bool any = false, all = true;
        for (int q_idx = first_q + warp; q_idx < end_q; q_idx += kThreads / 32) {
            for (int kv_idx = first_k + lane; kv_idx < end_k; kv_idx += 32) {
                const bool seen = params.mask_mod(b, h, q_idx, kv_idx, q_len, kv_len);
                any |= seen;
                all &= seen;
            }
        }
        const bool whole = first_q + params.block_q <= q_len && first_k + params.block_k <= kv_len;
        const bool any_seen = __syncthreads_or(any), is_full = __syncthreads_and(all) && whole;
        if (threadIdx.x == 0) params.states[block] = is_full ? kFull : any_seen ? kPartial : kEmpty;
    }
}
