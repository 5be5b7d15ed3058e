// The split-KV plan: how the partitions (CTAs along grid z) share the 64-token blocks of all requests.
//
// A plan row covers a contiguous range on the line "all blocks of request 0, then of request 1, ...". Two orders of its
// eight integers are in use:
//   object layout  begin_req, end_req (inclusive), begin_block, end_block (exclusive), begin_split, 2 flags, mark
//   tensor layout  begin_req, begin_block, end_req, end_block, begin_split, 2 unused, mark
// A row is idle when begin_req < 0, begin_req >= b or begin_req > end_req.
//
// num_splits[b + 1] is the exclusive prefix sum of the splits per request. A request of one split is written straight to
// the output; the splits of the others go to o_accum and are merged by mla_combine.
#pragma once
#include "common/types.cuh"
#include "mla/dimensions.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kPlanRowInts = 8;

// In the last column of the rows of a batch-invariant plan: every request is cut at multiples of
// TokenCounts::invariant_split(its own blocks), wherever the partitions begin and end.
constexpr int kBatchInvariantMark = 0x62690001;

// Index in o_accum of a request's first split. In an ordinary plan a request of k >= 2 splits adds k - 1 to
// num_splits[req] - req, so that 2 (num_splits[req] - req) leaves at least k places for it and depends on the number of
// cuts (at most the number of partitions) and not on the batch.
__device__ __forceinline__ int first_split(int splits_before, int req, bool batch_invariant) {
    return batch_invariant ? splits_before : 2 * (splits_before - req);
}
// The same in a uniform plan: no request cut in that partition or a later one has an earlier index.
__device__ __forceinline__ int first_split_uniform(int first_part) { return 2 * first_part; }

// How many tokens a request attends: all of its own in dense decoding; in sparse decoding those it selected from a cache and
// from an extra cache, each padded to whole blocks.
struct TokenCounts {
    const int* lengths;        // [b]; null: `most` for every request
    const int* extra_lengths;  // the same of the extra cache
    int most, extra_most;      // counts are clamped to 0 .. most; `most` is kUnlimited in dense decoding

    static constexpr int kUnlimited = 0x7fffffff;

    __device__ __forceinline__ int main(int req) const { return clamped(lengths, most, req); }
    __device__ __forceinline__ int extra(int req) const { return clamped(extra_lengths, extra_most, req); }
    __device__ __forceinline__ int blocks(int req) const {
        return ceil_div(main(req), kBlockTokens) + ceil_div(extra(req), kBlockTokens);
    }
    // Blocks in a split of a batch-invariant plan, for a request of so many. In sparse decoding that depends on what a call has
    // room for, not on the request: a plan may know no more.
    __device__ __forceinline__ int invariant_split(int num_blocks) const {
        if (most != kUnlimited)
            num_blocks = ceil_div(most, kBlockTokens) + ceil_div(extra_most, kBlockTokens);
        return max_int(8, ceil_div(num_blocks, 32));
    }

  private:
    __device__ __forceinline__ static int clamped(const int* lengths, int most, int req) {
        return lengths == nullptr ? most : max_int(min_int(load_global(lengths + req), most), 0);
    }
};
__device__ __forceinline__ TokenCounts all_tokens(const int* cache_seqlens) {
    return {cache_seqlens, nullptr, TokenCounts::kUnlimited, 0};
}

struct PlanRow {
    int begin_req, end_req, begin_block, end_block, begin_split, mark;

    __device__ __forceinline__ bool batch_invariant() const { return mark == kBatchInvariantMark; }
};

__device__ __forceinline__ PlanRow read_plan_row(const int* sched_meta, int part, bool object_layout, int b) {
    const int* row = sched_meta + static_cast<i64>(part) * kPlanRowInts;
    const int c1 = load_global(row + 1);
    const int c2 = load_global(row + 2);
    PlanRow plan;
    plan.begin_req = load_global(row);
    plan.end_req = object_layout ? c1 : c2;
    plan.begin_block = object_layout ? c2 : c1;
    plan.end_block = load_global(row + 3);
    plan.begin_split = load_global(row + 4);
    plan.mark = load_global(row + 7);
    if (plan.begin_req < 0 || plan.begin_req >= b) {  // idle: begin > end
        plan.begin_req = 0;
        plan.end_req = -1;
    }
    if (plan.end_req >= b) plan.end_req = b - 1;
    return plan;
}

// A plan that needs no arrays: all requests have `blocks` blocks, request i those at i * pitch and following on a line, of which
// every partition has `length`. Length 0: the plan is in arrays.
struct UniformPlan {
    int blocks, pitch, length;

    __device__ __forceinline__ PlanRow row(int part, int b) const {
        const int begin = part * length, end = begin + length;
        PlanRow plan;
        plan.begin_req = begin / pitch;
        plan.end_req = (end - 1) / pitch;
        plan.begin_block = begin - plan.begin_req * pitch;
        plan.end_block = min_int(end - plan.end_req * pitch, blocks);
        plan.begin_split = part - first_part(plan.begin_req);
        plan.mark = 0;
        if (plan.begin_block >= blocks) {
            ++plan.begin_req;
            plan.begin_block = plan.begin_split = 0;
        }
        if (plan.end_req >= b) {  // idle if begin > end
            plan.end_req = b - 1;
            plan.end_block = blocks;
        }
        return plan;
    }
    __device__ __forceinline__ int first_part(int req) const { return req * pitch / length; }
    __device__ __forceinline__ int last_part(int req) const { return (req * pitch + blocks - 1) / length; }
};

// `Params` has `uniform` where a plan may do without arrays.
template <class Params>
__device__ __forceinline__ UniformPlan uniform_plan(const Params& params) {
    if constexpr (requires { params.uniform; }) {
        return params.uniform;
    } else {
        return {0, 0, 0};
    }
}
template <class Params>
__device__ __forceinline__ bool is_uniform(const Params& params) {
    return uniform_plan(params).length > 0;
}
template <class Params>
__device__ __forceinline__ PlanRow part_row(const Params& params, int part) {
    if (is_uniform(params)) return uniform_plan(params).row(part, params.b);
    return read_plan_row(params.sched_meta, part, params.object_layout, params.b);
}
// Of the CTA's partition. Arrays are read when the kernel ahead is complete; a uniform plan is known before, and work tiles are published under
// that kernel's end. Roles wait for it themselves.
template <class Params>
__device__ __forceinline__ PlanRow plan_row(const Params& params) {
    if (!is_uniform(params)) griddepcontrol_wait();
    return part_row(params, blockIdx.z);
}

// Brings to L1 what is known of the requests around the one that a partition begins with if all are alike: its first work tile then waits
// for the plan row alone. A converged warp calls.
__device__ __forceinline__ void touch_requests(const int* lengths, const int* num_splits, int b,
                                               int lane_idx) {
    const int likely = blockIdx.z * static_cast<u32>(b) / gridDim.z;
    const int req = max_int(min_int(likely - 16 + lane_idx, b - 1), 0);
    if (lengths != nullptr) load_global(lengths + req);
    load_global(num_splits + req);
}

// One contiguous range of blocks of one request, computed by one CTA in one go.
struct WorkTile {
    int req;
    int seqlen;  // tokens of the request, without those of an extra cache
    int first_block;
    int num_blocks;  // 0 for a request without tokens
    int split_idx;   // in o_accum; -1: the whole request, written to the output
};

// Walks the work work tiles of a plan row.
struct WorkTileWalk {
    int req;
    int block;  // blocks of `req` before this one are done

    __device__ __forceinline__ void start(const PlanRow& row) {
        req = row.begin_req;
        block = 0;
    }

    __device__ __forceinline__ bool next(const PlanRow& row, const TokenCounts& tokens, const int* num_splits,
                                         int max_splits, WorkTile& work, bool uniform = false) {
        while (req <= row.end_req) {
            const int seqlen = tokens.main(req);
            const int splits_before = uniform ? 0 : load_global(num_splits + req);
            const int splits = uniform ? 0 : load_global(num_splits + req + 1) - splits_before;
            const int blocks = ceil_div(seqlen, kBlockTokens) + ceil_div(tokens.extra(req), kBlockTokens);
            const int begin = req == row.begin_req ? max_int(row.begin_block, 0) : 0;
            int end = req == row.end_req ? row.end_block : blocks;
            const int first = max_int(block, begin);
            int stop = end;
            int split = req == row.begin_req ? row.begin_split : 0;
            if (row.batch_invariant()) {
                const int split_blocks = tokens.invariant_split(blocks);
                if (req != row.end_req)
                    end = splits * split_blocks;  // of the plan, which may see more blocks than there are
                split = first / split_blocks;
                stop = min_int(end, (split + 1) * split_blocks);
            }
            const bool is_split = uniform ? begin > 0 || end < blocks : splits > 1;
            const int first_idx = uniform ? first_split_uniform(blockIdx.z - split)
                                          : first_split(splits_before, req, row.batch_invariant());
            work.req = req;
            work.seqlen = seqlen;
            work.first_block = first;
            work.num_blocks = max_int(min_int(stop, blocks) - first, 0);
            work.split_idx = is_split ? first_idx + split : -1;
            // A plan that its scratch was not made for must not write outside; mla_combine then writes NaN.
            const bool fits = !is_split || (work.split_idx >= 0 && work.split_idx < max_splits);
            block = stop;
            if (stop >= end) {
                ++req;
                block = 0;
            }
            // An empty range writes something only where nobody else does.
            if (fits && (work.num_blocks > 0 || blocks == 0 || work.split_idx >= 0)) return true;
        }
        return false;
    }
};
