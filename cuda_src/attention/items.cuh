// A role's view of the work items that one warp of the CTA publishes ahead of their use.
#pragma once
#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "sched/plan.cuh"

constexpr int kItemSlots = 8;

// The ring of items: the publisher waits for bar_free, writes and arrives on bar_full; a role reads and arrives on bar_free.
struct ItemRing {
    u64 bar_full[kItemSlots];
    u64 bar_free[kItemSlots];
    WorkItem items[kItemSlots];
};

struct ItemReader {
    u32 count = 0;

    // False after the last item.
    __device__ __forceinline__ bool next(ItemRing& ring) {
        mbarrier_wait_parity(smem_address(&ring.bar_full[count % kItemSlots]), count / kItemSlots & 1);
        return warp_uniform(item(ring).req) >= 0;
    }
    // Read from shared memory where it is needed: registers are short.
    __device__ __forceinline__ const WorkItem& item(const ItemRing& ring) const {
        return ring.items[count % kItemSlots];
    }
    __device__ __forceinline__ void release(ItemRing& ring) {
        __syncwarp();
        if (lane_index() == 0) mbarrier_arrive(smem_address(&ring.bar_free[count % kItemSlots]));
        ++count;
    }
};

// Row scales are written and read by the first lane of a quad, for its two rows. These lanes also arrive for P and scales, since
// racecheck does not see that __syncwarp orders what other lanes did before one lane's arrival.
__device__ __forceinline__ bool has_row_scales() { return lane_index() % 4 == 0; }
