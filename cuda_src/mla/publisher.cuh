// The warp of a CTA that walks the plan and publishes work tiles for all roles (mla/work_tiles.cuh).
//
// Shared memory (`Smem`) has the members that work_tiles.cuh names, and `publisher`. The state is there
// between calls because registers are scarce.
#pragma once
#include "common/types.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

struct PublisherState {
    PlanRow plan;
    WorkTileWalk walk;  // at the next work tile to publish
    u32 published;      // number of work tiles; kNoMoreWork after the end mark

    __device__ __forceinline__ void start(const PlanRow& row) {
        plan = row;
        walk.start(row);
        published = 0;
    }
};
constexpr u32 kNoMoreWork = 1u << 31;
// How many work tiles are published when the publishing warp begins one: this one, the next, whose Q K^T may
// be running, and the one after it, whose Q is being loaded.
constexpr u32 kWorkAhead = 3;
static_assert(kWorkAhead <= kWorkStages, "the publisher would wait for a stage that it has not read itself");

// The lane of the calling thread: either read where it is needed or kept in a register.
struct LaneRead {
    __device__ __forceinline__ int operator()() const { return lane_index(); }
};
struct LaneKept {
    int lane_idx = lane_index();
    __device__ __forceinline__ int operator()() const { return lane_idx; }
};

// A converged warp calls these functions.
template <class Params, class Smem>
__device__ __forceinline__ void start_publishing(const Params& params, Smem& smem) {
    if (lane_index() == 0) {
        smem.publisher.start(row_of_cta(params));
    }
    __syncwarp();
}
// Publishes until `count` work tiles or the end mark have been published. The output of a request without
// tokens is written here (`Row`: output.cuh).
template <Dtype kDtype, class Row, class Lane = LaneRead, class Params, class Smem>
__device__ __forceinline__ void publish_work(const Params& params, Smem& smem, u32 count,
                                             Lane lane = Lane()) {
    const PlanRow plan = smem.publisher.plan;
    WorkTileWalk walk = smem.publisher.walk;
    u32 published = smem.publisher.published;
    while (published < count) {
        WorkTile next;
        if (!walk.next(plan, params.tokens(), params.num_splits, params.max_splits, next, is_uniform(params)))
            next.req = -1;
        if (next.req >= 0 && next.num_blocks == 0) {
            store_empty<kDtype, Row>(params, next, lane());
            continue;
        }
        const u32 stage = published % kWorkStages;
        mbarrier_wait_parity(smem_address(&smem.bar_work_free[stage]), ~(published / kWorkStages) & 1);
        if (lane() == 0) {
            smem.work[stage] = next;
            mbarrier_arrive(smem_address(&smem.bar_work_full[stage]));
        }
        published = next.req >= 0 ? published + 1 : kNoMoreWork;
    }
    __syncwarp();
    if (lane() == 0) {
        smem.publisher.walk = walk;
        smem.publisher.published = published;
    }
    __syncwarp();
}
