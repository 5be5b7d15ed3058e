// How the roles of a CTA read the work tiles that one of its warps publishes in advance (mla/publisher.cuh).
//
// Shared memory (`Smem`) has a ring of them: work[kWorkStages], and the barriers bar_work_full[kWorkStages]
// and bar_work_free[kWorkStages]. The publisher waits for bar_work_free, writes the work tile and arrives on
// bar_work_full. Every warp reads it, and arrives on bar_work_free when it is done.
#pragma once
#include "common/types.cuh"
#include "mla/plan.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

#ifndef WORK_STAGES  // a kernel with little shared memory defines fewer
#define WORK_STAGES 8
#endif
constexpr int kWorkStages = WORK_STAGES;

// One thread calls. `readers`: the number of warps in the CTA.
template <class Smem>
__device__ __forceinline__ void init_work_barriers(Smem& smem, int readers) {
#pragma unroll
    for (int stage = 0; stage < kWorkStages; ++stage) {
        mbarrier_init(smem_address(&smem.bar_work_full[stage]), 1);
        mbarrier_init(smem_address(&smem.bar_work_free[stage]), readers);
    }
}

struct WorkTileReader {
    u32 count = 0;

    // Waits for the next work tile. False if there is none.
    template <class Smem>
    __device__ __forceinline__ bool next(Smem& smem) {
        mbarrier_wait_parity(smem_address(&smem.bar_work_full[count % kWorkStages]), count / kWorkStages & 1);
        return warp_uniform(work(smem).req) >= 0;
    }
    // Stays in shared memory and is read where it is needed, because registers are scarce.
    template <class Smem>
    __device__ __forceinline__ const WorkTile& work(const Smem& smem) const {
        return smem.work[count % kWorkStages];
    }
    template <class Smem>
    __device__ __forceinline__ void release(Smem& smem) {
        __syncwarp();
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_work_free[count % kWorkStages]));
        ++count;
    }
};
