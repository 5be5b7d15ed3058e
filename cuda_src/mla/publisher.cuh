// The warp of a CTA that walks the plan and publishes work items for all roles (mla/items.cuh).
//
// Shared memory (`Smem`) has what items.cuh names, and `publisher`, where the state stays between calls: registers are short.
#pragma once
#include "mla/items.cuh"
#include "mla/output.cuh"
#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "mla/plan.cuh"

struct PublisherState {
    PlanRow plan;
    WorkItems items;  // the next one to publish
    u32 published;    // kNoMoreItems once the end mark is
};
constexpr u32 kNoMoreItems = 1u << 31;
constexpr u32 kItemsAhead = 3;

// One warp, converged, calls these.
template <class Params, class Smem>
__device__ __forceinline__ void start_publishing(const Params& params, Smem& smem) {
    if (lane_index() == 0) {
        PublisherState& state = smem.publisher;
        state.plan = plan_row(params);
        state.items.start(state.plan);
        state.published = 0;
    }
    __syncwarp();
}
// Until there are `count` items, or the end mark. Requests without tokens are written at once (`Row`: see output.cuh).
template <Dtype kDtype, class Row, class Params, class Smem>
__device__ __forceinline__ void publish_items(const Params& params, Smem& smem, u32 count) {
    const PlanRow plan = smem.publisher.plan;
    WorkItems items = smem.publisher.items;
    u32 published = smem.publisher.published;
    while (published < count) {
        WorkItem next;
        if (!items.next(plan, params.tokens(), params.num_splits, params.max_splits, next,
                        is_uniform(params)))
            next.req = -1;
        if (next.req >= 0 && next.num_blocks == 0) {
            store_empty<kDtype, Row>(params, next, lane_index());
            continue;
        }
        const u32 slot = published % kItemSlots;
        mbarrier_wait_parity(smem_address(&smem.bar_item_free[slot]), ~(published / kItemSlots) & 1);
        if (lane_index() == 0) {
            smem.items[slot] = next;
            mbarrier_arrive(smem_address(&smem.bar_item_full[slot]));
        }
        published = next.req >= 0 ? published + 1 : kNoMoreItems;
    }
    __syncwarp();
    if (lane_index() == 0) {
        smem.publisher.items = items;
        smem.publisher.published = published;
    }
    __syncwarp();
}
