// Keys in arrays, of which a tile attends the blocks in two lists (flex attention): partial ones, where the
// mask function is asked, and full ones. As for other sources, steps are taken from the last to the first:
// those of partial blocks, then those of full ones. Without lists all keys are full blocks.
#pragma once
#include "mha/array_keys.cuh"

struct ListKeys : ArrayKeys {
    // The key that a step begins with. It may lie past the last one, where a block does.
    __device__ __forceinline__ static int first_key(const Params& params, const Tile& tile, int step) {
        if (params.kv_num_blocks == nullptr) return step * kTileKeys;
        const bool full = step < tile.full_steps;
        if (!full) step -= tile.full_steps;
        const int entry = params.block_tiles == 1 ? step : step / params.block_tiles;
        const int block = (full ? tile.full_blocks : tile.partial_blocks)[entry];
        return block * params.block_k + (step - entry * params.block_tiles) * kTileKeys;
    }

    struct Loader : ArrayKeys::Loader {
        const Tile& tile;

        __device__ __forceinline__ Loader(const Params& params, const Tile& tile)
            : ArrayKeys::Loader(params, tile), tile(tile) {
            if (params.k_batches == 1) batch = 0;
        }
        // The latency of the list passes while the place becomes free.
        __device__ __forceinline__ void look_up(const Params& params, int step) {
            row = first_key(params, tile, step);
        }
    };
};
