// Clears rows of V that no query of the tile sees (mha/tiles.cuh), and hands V on to the consumers.
#pragma once
#include "mha/cta.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

// Whether V of this block is to be trimmed.
__device__ __forceinline__ bool trims_values(const Params& params, const Tile& tile, const Span& span,
                                             int block) {
#if FLEX
    return params.states != nullptr && block >= tile.full_steps;
#else
    return span.trims(block);
#endif
}

// A warp, or the warpgroup that gathers.
template <int kThreads>
struct ValueTrimmer {
    u32 loads = 0;   // of V so far
    u32 landed = 0;  // parities of the stages

    // All threads call.
    template <class Keys>
    __device__ __forceinline__ void trim(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        const Span& span = tile.spans[Keys::kSpan];
        const int blocks = span.blocks();
#if FLEX
        if (params.states != nullptr)
            for (int i = 0; i < min_int(blocks, span.end_block - tile.full_steps); ++i)
                trim_block<Keys>(params, smem, tile, i);
#else
        if (blocks > 0 && span.trims(span.end_block - 1)) trim_block<Keys>(params, smem, tile, 0);
        if (blocks > 1 && span.trims(span.first_block)) trim_block<Keys>(params, smem, tile, blocks - 1);
#endif
        loads += blocks;
    }

  private:
    // `index`: the block's place in the order of loads
    template <class Keys>
    __device__ __forceinline__ void trim_block(const Params& params, SharedMemoryPlan& smem, const Tile& tile,
                                               int index) {
        const Span& span = tile.spans[Keys::kSpan];
        const u32 stage = (loads + index) % kStages;
        mbarrier_wait_parity(smem_address(&smem.bar_v_landed[stage]), landed >> stage & 1);
        landed ^= 1 << stage;
        const int block = span.end_block - 1 - index, thread = threadIdx.x % kThreads;
#if FLEX
        if constexpr (Keys::kHasLists)  // the gatherer of pages has arrays, and nothing to do with FLEX
            Keys::template clear_unlisted<kThreads>(params, tile, block, smem.v[stage], thread);
#else
        Keys::template trim<kThreads>(smem.v[stage],
                                      rows_to_keep<kTileRows, kTileKeys>(params, tile, span, block), thread);
#endif
        fence_proxy_async();
        if constexpr (kThreads == 32) {
            __syncwarp();
        } else {
            named_barrier_sync(NB_GATHER, kThreads);
        }
        if (thread == 0) mbarrier_arrive(smem_address(&smem.bar_v_full[stage]));
    }
};
