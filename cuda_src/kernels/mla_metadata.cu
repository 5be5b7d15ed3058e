// Computes the plan of split-KV decoding: shares the 64-token blocks of all requests among the partitions.
//
//   token counts [b]  ->  sched_meta [num_parts, 8] int32, num_splits [splits_length] int32   (mla/plan.cuh)
//
// Grid: one CTA.
//
// All requests lie on one line. Request i takes n_i units on it, one for each of its blocks and at least one.
// In front of them lie F more units: the fixed cost of a request, which stands for the time that a partition
// needs to change to it. Only the first request has none. The line is cut into ranges of equal length T:
//   partition p computes the blocks in [p T, (p + 1) T), which it finds by binary search;
//   request i has (last partition - first partition + 1) splits; num_splits is their exclusive prefix sum.
// No step is serial over requests or partitions: a thread has ceil(b / THREADS) requests, the sums are two
// scans over the CTA, and a partition takes O(log b).
//
// If all requests have the same length, they are moved apart on the line so that cuts fall between them,
// unless a partition would get longer. Then either no request is cut and there is nothing to merge, or no
// partition has blocks of two requests. If only a few rows of such a plan are without work, they lie between
// the others. CTAs of neighbouring rows run on neighbouring SMs, and if all idle SMs are neighbours, some of
// the busy ones get more memory bandwidth than the rest. In other plans there is hardly ever more than one
// row without work, and these rows come last.
//
// In a batch-invariant plan a unit of the line is a split of invariant_split(n_i) blocks. Where a request is
// cut then depends on its own length alone. The cuts of the line only decide which partition computes a
// split.
//
// num_splits is longer than b + 1 if a plan is recomputed in place for a smaller batch. A captured CUDA graph
// of the larger batch still reads the later elements. They all get the total, so that requests past the batch
// have no splits and mla_combine does not merge stale ones.
#include "common/division.cuh"
#include "common/types.cuh"
#include "mla/plan.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxBatch = MAX_BATCH;
constexpr int kMaxFixedCost = 3;        // blocks: about what a change of requests costs a partition
constexpr int kFixedCostDivisor = 3;    // and of a partition's share no more than this fraction
constexpr int kMaxShortPartition = 16;  // blocks: the cost of merging never asks for longer partitions
constexpr int kShortPartFactor = 32;    // merging n / T splits takes as long as n / (this * T) blocks
constexpr int kRowsPerIdle = 8;         // with fewer rows per idle row, idle rows come last

struct Params {
    TokenCounts tokens;
    int* sched_meta;
    int* num_splits;
    int b;
    int num_parts;
    int object_layout;
    int batch_invariant;
    int requests_per_part;  // ceil(b / num_parts)
    int parts_per_request;  // num_parts / b, but at least 1
    // Division by num_parts, b and parts_per_request (common/division.cuh). A division by a divisor that is
    // not known in advance takes about 40 cycles, of the few thousand that the kernel takes.
    u32 parts_magic, b_magic, share_magic;
    int parts_shift, b_shift, share_shift;
    int splits_length;  // elements of num_splits, at least b + 1
};

struct SharedMemoryPlan {
    int start[kMaxBatch + 1];  // where each request begins on the line
    int blocks[kMaxBatch];
    int warp_sums[2][kWarps];
};
static_assert(kWarps <= 32, "one warp scans the warps' sums");
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

// Exclusive prefix sum over the CTA; `total` gets the sum. All threads call, each time with another
// `warp_sums`. `barrier` synchronises the CTA: __syncthreads, or a vote that does so.
template <class Barrier>
__device__ __forceinline__ int block_exclusive_sum(int value, int (&warp_sums)[kWarps], int& total,
                                                   Barrier barrier) {
    const int lane_idx = threadIdx.x % 32;
    const int warp_idx = threadIdx.x / 32;
    int inclusive = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffff, inclusive, offset);
        if (lane_idx >= offset) inclusive += below;
    }
    if (lane_idx == 31) warp_sums[warp_idx] = inclusive;
    barrier();
    // Every warp scans the sums of the warps itself, which saves a barrier.
    int warp_sum = lane_idx < kWarps ? warp_sums[lane_idx] : 0;
    const int own = warp_sum;
#pragma unroll
    for (int offset = 1; offset < kWarps; offset *= 2) {
        const int below = __shfl_up_sync(0xffffffff, warp_sum, offset);
        if (lane_idx >= offset) warp_sum += below;
    }
    total = __shfl_sync(0xffffffff, warp_sum, kWarps - 1);
    const int before = __shfl_sync(0xffffffff, warp_sum - own, warp_idx);
    return before + inclusive - value;
}

// Where requests and partitions lie on the line. A unit cannot be cut: it is a block, or a split of a
// batch-invariant plan.
struct Line {
    int fixed;   // F, in units
    int length;  // T, in units; at least 1
    int group;   // 0: requests follow each other; else `group` requests begin at each multiple of `span`
    int span;

    // Moves requests of `units` units each apart, unless a partition would get longer. If `requests` is above
    // 1, each partition gets that many whole requests. If it is 1, each request gets partitions of its own,
    // of `apart` units each.
    __device__ __forceinline__ void move_apart(int units, int requests, int apart) {
        if (requests > 1) apart = requests * units + (requests - 1) * fixed;
        if (apart > length) return;
        if (requests == 1) fixed = 0;
        length = apart;
        group = requests;
        span = requests > 1 ? apart : ceil_div(units, apart) * apart;
    }
    // Where request i begins on the line. `units_before`: the units of the requests before it.
    __device__ __forceinline__ int start(int i, int units, int units_before) const {
        if (group == 0) return units_before + (i - 1) * fixed;
        return i / group * span + i % group * (units + fixed) - fixed;
    }

    __device__ __forceinline__ int first_partition(int start) const { return (start + fixed) / length; }
    __device__ __forceinline__ int last_partition(int start, int units) const {
        return (start + fixed + units - 1) / length;
    }
};

__device__ __forceinline__ int unit_blocks(const Params& params, int blocks) {
    return params.batch_invariant ? params.tokens.invariant_split(blocks) : 1;
}

// For each of two positions on the line, the last request that begins at or before it. No position may be
// before the first request. The two binary searches run together to hide each other's latency.
struct RequestsAt {
    int first, second;

    __device__ __forceinline__ RequestsAt(const int* start, int b, int first_position, int second_position)
        : first(0), second(0) {
        for (int step = 1 << (31 - __clz(b)); step > 0; step /= 2) {
            const int next_first = first + step, next_second = second + step;
            const int start_first = start[min_int(next_first, b - 1)];
            const int start_second = start[min_int(next_second, b - 1)];
            if (next_first < b && start_first <= first_position) first = next_first;
            if (next_second < b && start_second <= second_position) second = next_second;
        }
    }
};

// The row of a partition, if requests were moved apart. Partitions without work come last on the line, but a
// few of them get rows between the others.
__device__ __forceinline__ int row_index_of_partition(int partition, int num_parts, int partition_length,
                                                      int line_end) {
    const int busy = ceil_div(line_end, partition_length);
    const int idle = num_parts - busy;
    if (idle <= 0 || idle * kRowsPerIdle > num_parts) return partition;
    const int gap = num_parts / idle;  // the last of every `gap` rows is idle, as long as there are idle ones
    return partition < busy ? partition + min_int(partition / (gap - 1), idle)
                            : (partition - busy + 1) * gap - 1;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_metadata(const __grid_constant__ Params params) {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int b = params.b;
    const int per_thread = ceil_div(b, kThreads);
    const int first = min_int(threadIdx.x * per_thread, b);
    const int last = min_int(first + per_thread, b);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    // Blocks and units per request. Lengths may hold anything: the plan has at most kMostBlocks / b blocks of
    // a request, so that no sum overflows.
    const int most_blocks = divide(kMostBlocks, params.b_magic, params.b_shift);
    const int blocks_of_first = clamp_int(params.tokens.blocks(0), 1, most_blocks);
    int units_here = 0;
    bool equal = b > 1;
    for (int i = first; i < last; ++i) {
        const int blocks = clamp_int(params.tokens.blocks(i), 1, most_blocks);
        smem.blocks[i] = blocks;
        equal &= blocks == blocks_of_first;
        units_here += ceil_div(blocks, unit_blocks(params, blocks));
    }
    int units_total;
    const int units_before = block_exclusive_sum(units_here, smem.warp_sums[0], units_total,
                                                 [&] { equal = __syncthreads_and(equal); });

    // If partitions are short, the fixed cost is lowered: filling the GPU then matters more than whole
    // requests. Partitions must also not be so short that merging costs more than it saves. Suppose that
    // merging the n / T splits of a request takes as long as n / (f T) blocks. Then T = sqrt(n / f) is best.
    // n is the mean number of blocks per request, and f = kShortPartFactor was the fastest of the factors
    // that were measured (docs/kernels/mla_dense_decode.md).
    Line line;
    const auto over_partitions = [&](int n) { return divide(n, params.parts_magic, params.parts_shift); };
    line.fixed =
        params.batch_invariant ? 0 : min_int(kMaxFixedCost, over_partitions(units_total) / kFixedCostDivisor);
    line.length = max_int(over_partitions(units_total + (b - 1) * line.fixed + params.num_parts - 1), 1);
    line.group = 0;
    if (!params.batch_invariant) {
        const int mean = divide(units_total, params.b_magic, params.b_shift);
        int shortest = 1;
        while (shortest * shortest * kShortPartFactor < mean && shortest < kMaxShortPartition) ++shortest;
        line.length = max_int(line.length, shortest);
        if (equal) {
            const int apart = divide(blocks_of_first + params.parts_per_request - 1, params.share_magic,
                                     params.share_shift);
            line.move_apart(blocks_of_first, params.requests_per_part, max_int(apart, shortest));
        }
    }

    int before = units_before;
    int splits_here = 0;
    for (int i = first; i < last; ++i) {
        const int blocks = smem.blocks[i];
        const int units = ceil_div(blocks, unit_blocks(params, blocks));
        const int start = line.start(i, units, before);
        smem.start[i] = start;
        splits_here += params.batch_invariant
                           ? units
                           : line.last_partition(start, units) - line.first_partition(start) + 1;
        before += units;
    }
    int splits_total;
    int splits = block_exclusive_sum(splits_here, smem.warp_sums[1], splits_total, [] { __syncthreads(); });
    for (int i = first; i < last; ++i) {
        params.num_splits[i] = splits;
        const int blocks = smem.blocks[i];
        const int units = ceil_div(blocks, unit_blocks(params, blocks));
        splits += params.batch_invariant
                      ? units
                      : line.last_partition(smem.start[i], units) - line.first_partition(smem.start[i]) + 1;
    }
#pragma unroll 1
    for (int i = b + static_cast<int>(threadIdx.x); i < params.splits_length; i += kThreads) {
        params.num_splits[i] = splits_total;
    }

    // One partition per thread
    const int last_units = ceil_div(smem.blocks[b - 1], unit_blocks(params, smem.blocks[b - 1]));
    const int line_end = smem.start[b - 1] + line.fixed + last_units;
    for (int partition = threadIdx.x; partition < params.num_parts; partition += kThreads) {
        const int begin = partition * line.length;
        const int end = min_int(begin + line.length, line_end);
        int begin_req = b, end_req = -1, begin_block = 0, end_block = 0, begin_split = 0;
        bool begin_is_split = false, end_is_split = false;
        if (begin < end) {
            // A request belongs to the partition if one of its units does; its fixed cost does not count.
            const RequestsAt requests(smem.start, b, begin, end - 1 - line.fixed);
            begin_req = requests.first;
            end_req = requests.second;
            const int begin_unit = max_int(begin - smem.start[begin_req] - line.fixed, 0);
            const int end_blocks = smem.blocks[end_req];
            const int end_unit_blocks = unit_blocks(params, end_blocks);
            const int begin_unit_blocks = unit_blocks(params, smem.blocks[begin_req]);
            begin_block = begin_unit * begin_unit_blocks;
            end_block = min_int((end - smem.start[end_req] - line.fixed) * end_unit_blocks, end_blocks);
            begin_split =
                params.batch_invariant ? begin_unit : partition - line.first_partition(smem.start[begin_req]);
            begin_split = max_int(begin_split, 0);
            end_is_split = end_block < end_blocks || (end_req == begin_req && begin_block > 0);
            begin_is_split = begin_block > 0 || (end_req == begin_req && end_is_split);
            if (params.batch_invariant) {
                begin_is_split = begin_is_split || smem.blocks[begin_req] > begin_unit_blocks;
                end_is_split = end_is_split || end_blocks > end_unit_blocks;
            }
            if (end_req < begin_req) {  // the range holds only the fixed cost of a request
                begin_req = b;
                end_req = -1;
                begin_block = end_block = begin_split = 0;
                begin_is_split = end_is_split = false;
            }
        }
        const int row_index = line.group > 0
                                  ? row_index_of_partition(partition, params.num_parts, line.length, line_end)
                                  : partition;
        int* row = params.sched_meta + static_cast<i64>(row_index) * kPlanRowInts;
        row[0] = begin_req;
        row[1] = params.object_layout ? end_req : begin_block;
        row[2] = params.object_layout ? begin_block : end_req;
        row[3] = end_block;
        row[4] = begin_split;
        row[5] = params.object_layout ? begin_is_split : 0;
        row[6] = params.object_layout ? end_is_split : 0;
        row[7] = params.batch_invariant ? kBatchInvariantMark : 0;
    }
}
