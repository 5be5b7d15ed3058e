// Converts token positions within requests to slots of the cache.
//
//   indices [n, s_q, topk] int32, block_table [num_requests, table_width] int32 -> out [n, s_q, topk] int32:
//   slot = block_table[request, position / page_block_size] * page_block_size + position % page_block_size
//
// The request of indices[i] is request_ids[i], or i without request_ids. The slot is -1 if there is no such
// request, if the position is negative, if its page is outside the table or negative in it, or if the slot
// does not fit int32.
//
// COMPACT: the valid slots of a row move to its front and keep their order. The rest of the row is -1, and
// counts [n, s_q] int32 gets the number of valid slots.
//
// `out` may be `indices`: an element is written only after every thread has read it.
//
// Grid: x = groups of kRows rows; ROW_WARPS warps of the CTA share a row. A warp takes kChunk consecutive
// positions at a time: it issues all loads of indices, then all loads of the block table, and only then uses
// the values.
#include "common/division.cuh"
#include "common/types.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kRowWarps = ROW_WARPS;
constexpr bool kCompact = COMPACT;
constexpr int kThreads = 256;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kWarps = kThreads / 32;
constexpr int kRows = kWarps / kRowWarps;  // per CTA
static_assert(kRowWarps == 1 || kRowWarps == kWarps, "a row is of one warp or of the whole CTA");
constexpr int kPerLane = 8;
constexpr int kChunk = kPerLane * 32;
constexpr int kStep = kRowWarps * kChunk;  // positions of a row per step

struct Params {
    const int* indices;
    const int* block_table;
    const int* request_ids;  // [n], or null
    int* out;
    int* counts;                             // [n, s_q], used if COMPACT
    i64 indices_stride_n, indices_stride_s;  // elements
    i64 out_stride_n, out_stride_s;
    i64 table_stride;
    int rows;  // n * s_q
    int s_q;
    int topk;
    int num_requests;
    int table_width;
    int page_block_size;
    u32 page_magic;
    int page_shift;
};

// The request's row of the block table, or null if there is no such request.
__device__ __forceinline__ const int* request_table(const Params& params, int i) {
    const int request = params.request_ids == nullptr ? i : load_global(params.request_ids + i);
    if (request < 0 || request >= params.num_requests) return nullptr;
    return params.block_table + request * params.table_stride;
}

// The slots of the warp's chunk that begins at `first`. Lane l has positions first + l, first + 32 + l, ...
__device__ __forceinline__ void load_slots(const Params& params, const int* indices, const int* table,
                                           int first, int (&slots)[kPerLane]) {
    const int lane_idx = threadIdx.x % 32;
    int positions[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int k = first + i * 32 + lane_idx;
        positions[i] = k < params.topk ? load_global(indices + k) : -1;
    }
    int offsets[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int column = divide(positions[i], params.page_magic, params.page_shift);
        offsets[i] = positions[i] - column * params.page_block_size;
        slots[i] = -1;
        if (positions[i] >= 0 && column < params.table_width && table != nullptr) {
            slots[i] = load_global(table + column);
        }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const i64 slot = static_cast<i64>(slots[i]) * params.page_block_size + offsets[i];
        slots[i] = slots[i] >= 0 && slot <= 0x7fffffff ? static_cast<int>(slot) : -1;
    }
}

// Stores the valid slots of the warp's chunk to out[place] and the elements after it. All lanes call.
__device__ __forceinline__ void store_valid(const int (&slots)[kPerLane], int* out, int place) {
    const u32 lanes_below = (1u << threadIdx.x % 32) - 1;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const u32 valid = __ballot_sync(0xffffffff, slots[i] >= 0);
        if (slots[i] >= 0) out[place + __popc(valid & lanes_below)] = slots[i];
        place += __popc(valid);
    }
}

__device__ __forceinline__ void store_all(const Params& params, const int (&slots)[kPerLane], int* out,
                                          int first) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int k = first + i * 32 + static_cast<int>(threadIdx.x) % 32;
        if (k < params.topk) out[k] = slots[i];
    }
}

// How many valid slots a step has: in the row's warps before this one, and in all.
struct Places {
    int before, total;
};

// All warps of the row call it, each time with the other `warp_counts`. After it every warp has read its
// indices of this step, so that `out` may overwrite them.
__device__ __forceinline__ Places take_places(const int (&slots)[kPerLane], int (&warp_counts)[kWarps],
                                              int row_warp) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) count += __popc(__ballot_sync(0xffffffff, slots[i] >= 0));
    if constexpr (kRowWarps == 1) return {0, count};
    if (threadIdx.x % 32 == 0) warp_counts[row_warp] = count;
    __syncthreads();
    Places places = {0, 0};
#pragma unroll
    for (int warp = 0; warp < kRowWarps; ++warp) {
        if (warp == row_warp) places.before = places.total;
        places.total += warp_counts[warp];
    }
    return places;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_convert_indices(const __grid_constant__ Params params) {
    __shared__ int warp_counts[2][kWarps];  // used in turn
    const int lane_idx = threadIdx.x % 32;
    const int warp_idx = threadIdx.x / 32;
    const int row = blockIdx.x * kRows + warp_idx / kRowWarps;
    const int row_warp = warp_idx % kRowWarps;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (row >= params.rows) return;
    const int n = row / params.s_q;
    const int s = row - n * params.s_q;
    const int* table = request_table(params, n);
    const int* indices = params.indices + n * params.indices_stride_n + s * params.indices_stride_s;
    int* out = params.out + n * params.out_stride_n + s * params.out_stride_s;

    int place = 0;  // valid slots in the steps before
#pragma unroll 1
    for (int step = 0, turn = 0; step < params.topk; step += kStep, turn ^= 1) {
        const int first = step + row_warp * kChunk;
        int slots[kPerLane];
        load_slots(params, indices, table, first, slots);
        if constexpr (kCompact) {
            const Places places = take_places(slots, warp_counts[turn], row_warp);
            store_valid(slots, out, place + places.before);
            place += places.total;
        } else {
            store_all(params, slots, out, first);
        }
    }
    if constexpr (kCompact) {
        for (int k = place + row_warp * 32 + lane_idx; k < params.topk; k += kRowWarps * 32) out[k] = -1;
        if (row_warp == 0 && lane_idx == 0) params.counts[row] = place;
    }
}
