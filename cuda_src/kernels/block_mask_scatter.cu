// The states of blocks (flex/block_states.cuh) from lists of them. Others stay as they are: zeros.
//
// A warp takes a row of blocks.
#include "common/types.cuh"
#include "flex/block_states.cuh"

constexpr int kWarps = 4, kThreads = 32 * kWarps;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    const int *kv_num_blocks, *kv_indices, *full_kv_num_blocks, *full_kv_indices;  // the last two may be null
    unsigned char* states;                    // [batches, heads, rows, columns]
    i64 counts_strides[6], lists_strides[6];  // (batch, head, row) of partial and of full blocks
    i64 all_rows;                             // of all batches and heads
    int list_columns[2];                      // of the lists of partial and of full blocks
    int heads, rows, columns;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    block_mask_scatter(const __grid_constant__ Params params) {
    const int lane = threadIdx.x % 32;
    for (i64 number = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; number < params.all_rows;
         number += static_cast<i64>(gridDim.x) * kWarps) {
        const i64 row = number % params.rows, h = number / params.rows % params.heads;
        const i64 b = number / params.rows / params.heads;
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
            const int* counts = kind == 0 ? params.kv_num_blocks : params.full_kv_num_blocks;
            const int* lists = kind == 0 ? params.kv_indices : params.full_kv_indices;
            if (counts == nullptr) continue;
            const i64 *of_counts = params.counts_strides + 3 * kind,
                      *of_lists = params.lists_strides + 3 * kind;
            const int count = min_int(counts[b * of_counts[0] + h * of_counts[1] + row * of_counts[2]],
                                      params.list_columns[kind]);
            const int* list = lists + b * of_lists[0] + h * of_lists[1] + row * of_lists[2];
            for (int i = lane; i < count; i += 32) {
                const int block = list[i];
                if (static_cast<u32>(block) < static_cast<u32>(params.columns))
                    params.states[number * params.columns + block] = kind == 0 ? kPartial : kFull;
            }
        }
    }
}
