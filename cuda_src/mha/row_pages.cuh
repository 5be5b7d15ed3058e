// Keys in a cache whose tokens are rows, [block, token, head, column] (FlashAttention's layout), copied by
// TMA in boxes of PAGE_ROWS tokens, which a block of the cache has whole: 16, or all keys of a tile's block.
// In shared memory they lie as keys of arrays do.
//
// Boxes past a request's last key are asked for past the last block of the cache: TMA gives zeros, and
// neither they nor their entries of the block table are read.
#pragma once
#include "common/division.cuh"
#include "mha/array_keys.cuh"

struct RowPages : ArrayKeys {
    static constexpr int kBoxes = kTileKeys / PAGE_ROWS;
    static_assert(kTileKeys % PAGE_ROWS == 0 && kBoxes <= 32, "a lane looks up a box");

    __device__ __forceinline__ static bool runs_beside(const Params& params) { return params.runs_beside; }

    struct Loader {
        int row;  // of the block table, or without one the block
        int head;
        int length;        // of the keys
        int block, token;  // of the lane's box, in the cache

        __device__ __forceinline__ Loader(const Params& params, const Tile& tile)
            : row(tile.request), head(tile.head / params.heads_per_kv), length(tile.k_len) {
            if (params.cache_batch_idx != nullptr) row = params.cache_batch_idx[tile.request];
        }
        // The latency of the block table passes while the place becomes free.
        __device__ __forceinline__ void look_up(const Params& params, int tile_block) {
            const int lane = lane_index();
            const int first = tile_block * kTileKeys + lane * PAGE_ROWS;
            block = params.num_blocks;
            token = first;
            if (lane >= kBoxes || first >= length) return;
            int found = row;
            if (params.block_table != nullptr) {
                if (row < 0 || row >= params.table_rows) return;
                const int column = divide(first, params.block_magic, params.block_shift);
                token = first - column * params.block_size;
                found = static_cast<const int*>(params.block_table)[row * params.table_stride + column];
            }
            if (found >= 0 && found < params.num_blocks) block = found;
        }
        __device__ __forceinline__ void load_k(const Params& params, u32 dst, u32 full) const {
            load<kChunksQK>(&params.k_map, dst, full);
        }
        __device__ __forceinline__ void load_v(const Params& params, u32 dst, u32 full) const {
            load<kChunksV>(&params.v_map, dst, full);
        }

      private:
        template <int kChunks>
        __device__ __forceinline__ void load(const TensorMap* map, u32 dst, u32 full) const {
            // TMA has coordinates from registers of the whole warp. From a lane's each box takes longer, but
            // beside three consumers there are no others.
#if CONSUMERS < 3
            const bool elected = elect_one_sync();
            if (elected) mbarrier_arrive_expect_tx(full, kChunks * KeyRows::kBytes);
#pragma unroll 2
            for (int box = 0; box < kBoxes; ++box) {
                const int first = __shfl_sync(0xffffffff, token, box);
                const int of_cache = __shfl_sync(0xffffffff, block, box);
                if (elected) {
#pragma unroll
                    for (int chunk = 0; chunk < kChunks; ++chunk)
                        tma_load_4d<kL2EvictNormal>(dst + chunk * KeyRows::kBytes, map, full, 64 * chunk,
                                                    first, head, of_cache);
                }
                dst += PAGE_ROWS * KeyRows::kRowBytes;
            }
#else
            const int box = lane_index();
            if (box == 0) mbarrier_arrive_expect_tx(full, kChunks * KeyRows::kBytes);
            __syncwarp();
            if (box >= kBoxes) return;
            dst += box * PAGE_ROWS * KeyRows::kRowBytes;
#pragma unroll 1
            for (int chunk = 0; chunk < kChunks; ++chunk)
                tma_load_4d<kL2EvictNormal>(dst + chunk * KeyRows::kBytes, map, full, 64 * chunk, token, head,
                                            block);
#endif
        }
    };
};
