// The warps that copy Q, K and V of tiles to shared memory, and the warp that clears rows of V. `OwnKeys` is
// the source of the keys in arrays. Keys in pages come after them.
#pragma once
#include "common/types.cuh"
#include "mha/array_keys.cuh"
#include "mha/cta.cuh"
#include "mha/paged_keys.cuh"
#include "mha/params.cuh"
#include "mha/tiles.cuh"
#include "mha/trim.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

// Copies Q of a tile, 64 rows for each consumer. The warp that copies K calls it.
__device__ __forceinline__ void load_q(const Params& params, SharedMemoryPlan& smem, const Tile& tile,
                                       u32 n) {
    if (!elect_one_sync()) return;
    const int tokens = 64 >> params.log2_group;
    const int batch = params.cu_seqlens_q == nullptr ? tile.request : 0;
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
        const u32 full = smem_address(&smem.bar_q_full[i]);
        mbarrier_wait_parity(smem_address(&smem.bar_q_free[i]), n & 1 ^ 1);
        mbarrier_arrive_expect_tx(full, kChunksQK * Rows::kBytes);
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk)
            tma_load_5d(smem_address(smem.q[i] + chunk * Rows::kBytes), &params.q_map, full, 64 * chunk, 0,
                        tile.q_begin + tile.first_token + i * tokens, tile.head, batch);
    }
}

template <class OwnKeys>
struct KeyLoader {
    Scheduler scheduler;
    Stage stage;
    u32 n = 0;  // number of the tile
    bool q_is_loaded;
    u32 raw_blocks = 0;

    __device__ __forceinline__ explicit KeyLoader(const Params& params) : scheduler(params) {}

    __device__ __forceinline__ void run(const Params& params, SharedMemoryPlan& smem) {
        for (;; ++n) {
            const u32 slot = n % kTileStages;
            if (n >= kTileStages) named_barrier_sync(NB_TILE_FREE + slot, kTileThreads);
            const Tile& tile = smem.tiles[slot];
            const bool found = scheduler.next(params, smem.tiles[slot]);
            if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_tile_full[slot]));
            if (!found) break;
            q_is_loaded = false;
            if constexpr (kPagesGathered) smem.turns_k.wait_for_loader(n);
            load<OwnKeys>(params, smem, tile);
            if constexpr (kPagesGathered) {
                smem.turns_k.pass_to_gatherer();
                stage.number += tile.spans[kPages].blocks();
            }
            if constexpr (kPagesByTma) load<PagedKeys>(params, smem, tile);
            if (!q_is_loaded) load_q(params, smem, tile, n);
            // After Q: without it the places of raw keys would not become free.
            if constexpr (kCacheIsFp8)
                if (params.cache_by_tma) load_raw(params, smem, tile);
            __syncwarp();
            scheduler.advance(params);
        }
    }

  private:
    template <class Keys>
    __device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        typename Keys::Loader loader(params, tile);
        const int first_block = tile.spans[Keys::kSpan].first_block;
#pragma unroll 1
        for (int block = tile.spans[Keys::kSpan].end_block - 1; block >= first_block; --block) {
            loader.look_up(params, block);
            const u32 place = stage.index();
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[place]), stage.free_parity());
            loader.load_k(params, smem_address(smem.k[place]), smem_address(&smem.bar_k_full[place]));
            ++stage.number;
            if (!q_is_loaded) load_q(params, smem, tile, n);
            q_is_loaded = true;
            __syncwarp();
        }
    }
    // K of an FP8 cache, for the gatherer to convert
    __device__ __forceinline__ void load_raw(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        PagedKeys::Loader loader(params, tile);
        const Span& span = tile.spans[kPages];
#pragma unroll 1
        for (int block = span.end_block - 1; block >= span.first_block; --block, ++raw_blocks) {
            loader.look_up(params, block);
            mbarrier_wait_parity(smem_address(&smem.bar_raw_k_free), raw_blocks & 1 ^ 1);
            loader.load_k(params, smem_address(smem.raw_k), smem_address(&smem.bar_raw_k_full));
            __syncwarp();
        }
    }
};

template <class OwnKeys>
struct ValueLoader {
    Stage stage;
    u32 raw_blocks = 0;

    __device__ __forceinline__ void run(const Params& params, SharedMemoryPlan& smem) {
        for (TileReader reader;; ++reader.count) {
            const Tile& tile = reader.next(smem);
            if (tile.request < 0) break;
            if constexpr (kPagesGathered) smem.turns_v.wait_for_loader(reader.count);
            load<OwnKeys>(params, smem, tile);
            if constexpr (kPagesByTma) load<PagedKeys>(params, smem, tile);
            if constexpr (kPagesGathered) {
                smem.turns_v.pass_to_gatherer();
                stage.number += tile.spans[kPages].blocks();
            }
            if constexpr (kCacheIsFp8)
                if (params.cache_by_tma) load_raw(params, smem, tile);
            reader.release();
        }
    }

  private:
    template <class Keys>
    __device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        typename Keys::Loader loader(params, tile);
        const Span& span = tile.spans[Keys::kSpan];
#pragma unroll 1
        for (int block = span.end_block - 1; block >= span.first_block; --block) {
            loader.look_up(params, block);
            u64* full = trims_values(params, tile, span, block) ? smem.bar_v_landed : smem.bar_v_full;
            const u32 place = stage.index();
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[place]), stage.free_parity());
            loader.load_v(params, smem_address(smem.v[place]), smem_address(full + place));
            ++stage.number;
            __syncwarp();
        }
    }
    // V of an FP8 cache, for the gatherer to convert
    __device__ __forceinline__ void load_raw(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        PagedKeys::Loader loader(params, tile);
        const Span& span = tile.spans[kPages];
#pragma unroll 1
        for (int block = span.end_block - 1; block >= span.first_block; --block, ++raw_blocks) {
            loader.look_up(params, block);
            mbarrier_wait_parity(smem_address(&smem.bar_raw_v_free), raw_blocks & 1 ^ 1);
            loader.load_v(params, smem_address(smem.raw_v), smem_address(&smem.bar_raw_v_full));
            __syncwarp();
        }
    }
};

// The warp that clears rows of V that no query of the tile sees.
template <class OwnKeys>
__device__ __forceinline__ void trim_values(const Params& params, SharedMemoryPlan& smem) {
    ValueTrimmer<32> trimmer;
    for (TileReader reader;; ++reader.count) {
        const Tile& tile = reader.next(smem);
        if (tile.request < 0) break;
        trimmer.trim<OwnKeys>(params, smem, tile);
        if constexpr (kPagesByTma) trimmer.trim<PagedKeys>(params, smem, tile);
        reader.release();
    }
}
