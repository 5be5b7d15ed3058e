// In which order tiles of keys add to dQ of a block of queries, where the order is fixed: those of the first
// keys first. Of each block of a mask, how many tiles of the listed blocks before it in its row there are.
//
// A thread takes a row of blocks.
#include "common/types.cuh"
#include "flex/block_states.cuh"

constexpr int kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    const unsigned char* states;  // [batches and heads, columns, rows], flex/block_states.cuh
    int* ranks;                   // of the same shape
    i64 all_rows;                 // of all batches and heads
    int rows, columns;
    int tiles;  // of a block
};

extern "C" __global__ void __launch_bounds__(kThreads)
    block_mask_ranks(const __grid_constant__ Params params) {
    for (i64 number = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; number < params.all_rows;
         number += static_cast<i64>(gridDim.x) * kThreads) {
        const i64 first = number / params.rows * params.columns * params.rows + number % params.rows;
        int rank = 0;
        for (int column = 0; column < params.columns; ++column) {
            const i64 place = first + static_cast<i64>(column) * params.rows;
            params.ranks[place] = rank;
            if (params.states[place] != kEmpty) rank += params.tiles;
        }
    }
}
