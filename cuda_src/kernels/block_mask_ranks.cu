// In which order tiles of keys add to dQ of a block of queries, where the order is fixed: those of the last
// keys first. Of each block of a mask, how many tiles of the listed blocks behind it in its row there are.
//
// A thread takes a row of blocks.
#include "attention/block_states.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;

struct Params {
    const unsigned char* states;  // [batches and heads, columns, rows], attention/block_states.cuh
    int* ranks;                   // of the same shape
    i64 all_rows;                 // of all batches and heads
    int rows, columns;
    int tiles, tiles_of_last;  // of a block, and of those of the last column
};

extern "C" __global__ void __launch_bounds__(kThreads)
    block_mask_ranks(const __grid_constant__ Params params) {
    for (i64 number = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; number < params.all_rows;
         number += static_cast<i64>(gridDim.x) * kThreads) {
        const i64 first = number / params.rows * params.columns * params.rows + number % params.rows;
        int rank = 0;
        for (int column = params.columns - 1; column >= 0; --column) {
            const i64 place = first + static_cast<i64>(column) * params.rows;
            params.ranks[place] = rank;
            if (params.states[place] != kEmpty)
                rank += column == params.columns - 1 ? params.tiles_of_last : params.tiles;
        }
    }
}
