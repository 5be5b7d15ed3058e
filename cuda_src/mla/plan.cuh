// The plan of split-KV attention: how the partitions (CTAs along grid z) share the 64-token blocks of a
// batch.
//
// A row of the plan is a contiguous range of the sequence "all blocks of request 0, then all of request 1,
// ...". Its eight integers come in two orders:
//   object layout: begin_req, end_req inclusive, begin_block, end_block exclusive, begin_split, 2 flags, mark
//   tensor layout: begin_req, begin_block, end_req, end_block, begin_split, 2 unused, mark
// A row is idle if begin_req < 0, begin_req >= b or begin_req > end_req.
//
// num_splits [b + 1] is the exclusive prefix sum of the splits per request. A request of one split is written
// to the output directly. The splits of other requests go to o_accum, and mla_combine merges them.
#pragma once
#include "common/types.cuh"
#include "mla/dimensions.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kPlanRowInts = 8;

// Marks, in the last column of each row, a batch-invariant plan. There every request is cut at multiples of
// TokenCounts::invariant_split(its blocks), wherever the partitions begin and end.
constexpr int kBatchInvariantMark = 0x62690001;

// The index in o_accum of the first split of a request. In an ordinary plan a request of k >= 2 splits adds
// k - 1 to num_splits[req] - req. The index 2 (num_splits[req] - req) therefore leaves 2 (k - 1) >= k places
// for them. It depends only on the number of cuts, which is at most the number of partitions, and not on the
// batch.
__device__ __forceinline__ int first_split(int splits_before, int req, bool batch_invariant) {
    return batch_invariant ? splits_before : 2 * (splits_before - req);
}
// The same in a uniform plan, for a request that begins in partition `first_partition`. The next request that
// is cut begins in the last partition of this one or later, so that their indices do not overlap.
__device__ __forceinline__ int first_split_uniform(int first_partition) { return 2 * first_partition; }

// How many tokens a request attends. In dense decoding these are all of its tokens. In sparse decoding these
// are the tokens selected from the cache and from the extra cache, and each of the two is rounded up to whole
// blocks.
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
    // Blocks per split in a batch-invariant plan, for a request of `num_blocks` blocks, which has at most
    // kMostSplits. In sparse decoding it follows from the largest counts that the call allows: a plan may be
    // made without the lengths of the requests.
    static constexpr int kMostSplits = 32;
    __device__ __forceinline__ int invariant_split(int num_blocks) const {
        if (most != kUnlimited)
            num_blocks = ceil_div(most, kBlockTokens) + ceil_div(extra_most, kBlockTokens);
        return max_int(8, ceil_div(num_blocks, kMostSplits));
    }

  private:
    __device__ __forceinline__ static int clamped(const int* lengths, int most, int req) {
        // What rounds up to more blocks than an int counts is cut.
        most = min_int(most, kUnlimited - kBlockTokens + 1);
        return lengths == nullptr ? most : clamp_int(load_global(lengths + req), 0, most);
    }
};
__device__ __forceinline__ TokenCounts all_tokens(const int* cache_seqlens) {
    return {cache_seqlens, nullptr, TokenCounts::kUnlimited, 0};
}

// The caller's arrays may hold anything. A row that is read has requests of the batch, and blocks of which
// sums do not overflow.
constexpr int kMostBlocks = 1 << 29;

struct PlanRow {
    int begin_req, end_req, begin_block, end_block, begin_split, mark;

    __device__ __forceinline__ bool batch_invariant() const { return mark == kBatchInvariantMark; }
};

__device__ __forceinline__ PlanRow read_plan_row(const int* sched_meta, int partition, bool object_layout,
                                                 int b) {
    const int* row = sched_meta + static_cast<i64>(partition) * kPlanRowInts;
    const int c1 = load_global(row + 1);
    const int c2 = load_global(row + 2);
    PlanRow plan;
    plan.begin_req = load_global(row);
    plan.end_req = object_layout ? c1 : c2;
    plan.begin_block = clamp_int(object_layout ? c2 : c1, 0, kMostBlocks);
    plan.end_block = clamp_int(load_global(row + 3), 0, kMostBlocks);
    plan.begin_split = load_global(row + 4);
    plan.mark = load_global(row + 7);
    if (plan.begin_req < 0 || plan.begin_req >= b) {  // idle: begin > end
        plan.begin_req = 0;
        plan.end_req = -1;
    }
    if (plan.end_req >= b) plan.end_req = b - 1;
    return plan;
}

// A plan without arrays, for requests of equal length. On one line request i has the blocks from i * pitch
// on, and partition p computes the range [p * length, (p + 1) * length). Length 0: the plan is in arrays.
struct UniformPlan {
    int blocks, pitch, length;

    __device__ __forceinline__ PlanRow row(int partition, int b) const {
        const int begin = partition * length, end = begin + length;
        PlanRow plan;
        plan.begin_req = begin / pitch;
        plan.end_req = (end - 1) / pitch;
        plan.begin_block = begin - plan.begin_req * pitch;
        plan.end_block = min_int(end - plan.end_req * pitch, blocks);
        plan.begin_split = partition - first_partition(plan.begin_req);
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
    __device__ __forceinline__ int first_partition(int req) const { return req * pitch / length; }
    __device__ __forceinline__ int last_partition(int req) const {
        return (req * pitch + blocks - 1) / length;
    }
};

// `Params` has a member `uniform` if the kernel can work without the arrays of a plan.
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
__device__ __forceinline__ PlanRow row_of_partition(const Params& params, int partition) {
    if (is_uniform(params)) return uniform_plan(params).row(partition, params.b);
    return read_plan_row(params.sched_meta, partition, params.object_layout, params.b);
}
// The row of the CTA. The arrays of a plan are read only after the kernel ahead is complete. A uniform plan
// reads no arrays, so that work tiles are published before that kernel ends; the roles that read arrays of
// the call then wait for it by themselves; the others follow these. The publisher also reads the lengths of
// requests, if there are any. A call that has both lengths and a uniform plan is therefore launched without
// programmatic dependent launch (rawmla/kernels/mla_sparse.py).
template <class Params>
__device__ __forceinline__ PlanRow row_of_cta(const Params& params) {
    if (!is_uniform(params)) griddepcontrol_wait();
    return row_of_partition(params, blockIdx.z);
}

// Loads to L1 the lengths and split counts of the 32 requests around the one with which the partition begins
// if all requests are alike. The first work tile then waits for the plan row alone. A converged warp calls.
__device__ __forceinline__ void touch_requests(const int* lengths, const int* num_splits, int b,
                                               int lane_idx) {
    const int likely = blockIdx.z * static_cast<u32>(b) / gridDim.z;
    const int req = max_int(min_int(likely - 16 + lane_idx, b - 1), 0);
    if (lengths != nullptr) load_global(lengths + req);
    load_global(num_splits + req);
}

// A contiguous range of blocks of one request, computed by one CTA.
struct WorkTile {
    int req;
    int seqlen;  // tokens of the request, without those of an extra cache
    int first_block;
    int num_blocks;  // 0 for a request without tokens
    int split_idx;   // index in o_accum; -1: the work tile is the whole request and goes to the output
};

// Walks the work tiles of a plan row.
struct WorkTileWalk {
    int req;
    int block;  // blocks of `req` before this one are done

    __device__ __forceinline__ void start(const PlanRow& row) {
        req = row.begin_req;
        block = 0;
    }

    template <class Tokens>
    __device__ __forceinline__ bool next(const PlanRow& row, const Tokens& tokens, const int* num_splits,
                                         int max_splits, WorkTile& work, bool uniform = false) {
        while (req <= row.end_req) {
            const int seqlen = tokens.main(req);
            const int splits_before = uniform ? 0 : load_global(num_splits + req);
            const int splits = uniform ? 0 : load_global(num_splits + req + 1) - splits_before;
            const int blocks = ceil_div(seqlen, kBlockTokens) + ceil_div(tokens.extra(req), kBlockTokens);
            const int begin = req == row.begin_req ? row.begin_block : 0;
            int end = req == row.end_req ? row.end_block : blocks;
            const int first = max_int(block, begin);
            int stop = end;
            int split = req == row.begin_req ? row.begin_split : 0;
            if (row.batch_invariant()) {
                const int split_blocks = tokens.invariant_split(blocks);
                const int most = TokenCounts::kMostSplits;
                if (req != row.end_req)
                    end = min_int(splits, most) * split_blocks;  // as planned: perhaps more than there are
                end = min_int(end, most * split_blocks);
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
            // If the scratch was made for another plan, nothing is written outside it; mla_combine then
            // writes NaN.
            const bool fits = !is_split || (work.split_idx >= 0 && work.split_idx < max_splits);
            block = stop;
            if (stop >= end) {
                ++req;
                block = 0;
            }
            // An empty range is a work tile only if no other one writes the output or the split.
            if (fits && (work.num_blocks > 0 || blocks == 0 || work.split_idx >= 0)) return true;
        }
        return false;
    }
};
