// A role's view of the work items that one warp of the CTA publishes ahead of their use.
//
// Shared memory (`Smem`) has a ring of them: items[kItemSlots] and the barriers bar_item_full[kItemSlots] and
// bar_item_free[kItemSlots]. The publisher waits for bar_item_free, writes and arrives on bar_item_full; every warp reads, and
// arrives on bar_item_free when it is done.
#pragma once
#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "mla/plan.cuh"

#ifndef ITEM_SLOTS  // what a kernel has room for
#define ITEM_SLOTS 8
#endif
constexpr int kItemSlots = ITEM_SLOTS;

// One thread. `readers`: warps of the CTA.
template <class Smem>
__device__ __forceinline__ void init_item_barriers(Smem& smem, int readers) {
#pragma unroll
    for (int slot = 0; slot < kItemSlots; ++slot) {
        mbarrier_init(smem_address(&smem.bar_item_full[slot]), 1);
        mbarrier_init(smem_address(&smem.bar_item_free[slot]), readers);
    }
}

struct ItemReader {
    u32 count = 0;

    // False after the last item.
    template <class Smem>
    __device__ __forceinline__ bool next(Smem& smem) {
        mbarrier_wait_parity(smem_address(&smem.bar_item_full[count % kItemSlots]), count / kItemSlots & 1);
        return warp_uniform(item(smem).req) >= 0;
    }
    // Read from shared memory where it is needed: registers are short.
    template <class Smem>
    __device__ __forceinline__ const WorkItem& item(const Smem& smem) const {
        return smem.items[count % kItemSlots];
    }
    template <class Smem>
    __device__ __forceinline__ void release(Smem& smem) {
        __syncwarp();
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_item_free[count % kItemSlots]));
        ++count;
    }
};
