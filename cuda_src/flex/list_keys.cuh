// Keys in arrays, of which a tile attends the blocks in two lists (flex attention): partial ones, where the
// mask function is asked, and full ones. As for other sources, steps are taken from the last to the first:
// those of partial blocks, then those of full ones. Without lists all keys are full blocks.
#pragma once
#include "mha/array_keys.cuh"

struct ListKeys : ArrayKeys {
    static constexpr bool kHasLists = true;

    // The key that a step begins with. It may lie past the last one, where a block does.
    __device__ __forceinline__ static int first_key(const Params& params, const Tile& tile, int step) {
        if (params.kv_num_blocks == nullptr) return step * kTileKeys;
        const bool full = step < tile.full_steps;
        if (!full) step -= tile.full_steps;
        const int entry = params.block_tiles == 1 ? step : step / params.block_tiles;
        const int block = (full ? tile.full_blocks : tile.partial_blocks)[entry];
        return block * params.block_k + (step - entry * params.block_tiles) * kTileKeys;
    }

    // Clears V of the keys of a step that no query of the tile may see: their block is in no list of the
    // caller's and may hold NaN, whose product with a probability of 0 must be 0.
    template <int kThreads>
    __device__ __forceinline__ static void clear_unlisted(const Params& params, const Tile& tile, int step,
                                                          unsigned char* v, int thread) {
        const int key = first_key(params, tile, step);
        const int first_row = tile.first_token / params.state_q;
        const int end = tile.first_token + (kFlexGrouped ? kTileRows >> params.log2_group : kTileRows);
        const int last_row = (min_int(end, tile.q_len) - 1) / params.state_q;
        const i64 head = static_cast<i64>(tile.request % params.mask_batches) * params.mask_heads +
                         tile.head % params.mask_heads;
        const unsigned char* states = params.states + head * params.state_rows * params.state_columns;
        for (int row = thread; row < kTileKeys; row += kThreads) {
            const int column = (key + row) / params.state_k;
            bool listed = false;
            for (int i = first_row; i <= last_row && column < params.state_columns; ++i)
                listed |= states[static_cast<i64>(i) * params.state_columns + column] != 0;
            if (listed) continue;
#pragma unroll 1
            for (int unit = 0; unit < 8 * kChunksV; ++unit)
                *reinterpret_cast<uint4*>(v + unit / 8 * KeyRows::kBytes + row * KeyRows::kRowBytes +
                                          unit % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
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
