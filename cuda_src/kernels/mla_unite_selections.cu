// Unites what the query tokens of a group select, so that mla_sparse_bf16.cu reads a row once for all of them.
//
//   indices [s_q, topk] int32 -> rows [groups, capacity] int32, ascending, each row once; what a token selects twice comes again behind
//                                counts [groups] int32, how many there are
//                                selected [groups, capacity / 64, 2 * group_tokens] uint64: of each block of 64 rows, a word of
//                                bits for each token that selected them, then one for the rows that are not finite
//
// A row that is not finite would reach the other tokens of its group, whose probability of it is zero: it becomes -1, for which
// attention reads nothing, and its bit says where NaN belongs.
//
// A CTA takes a group. In shared memory every row has a byte, in which every token that selects it sets a bit. A bit that was set
// before goes to a list, of which the next round makes bytes again: what is in which round depends on how often a token selects a row
// and not on who comes first. The list fills the end of the group's `rows`, for which there is room as long as something is in it.
//
// attn_sink [heads] is repeated for each token of a group: sinks [64].
#include "common/types.cuh"
#include "mla/plan.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileRows = 64;
constexpr int kListTokenShift = 24;
static_assert(MAX_ROWS <= 1 << kListTokenShift, "row and token share an int");

struct Params {
    const int* indices;
    const int* topk_length;  // [s_q], or null
    const int* not_finite;   // a bit for each row
    const float* attn_sink;  // [heads], or null
    int* rows;
    int* counts;
    u64* selected;
    float* sinks;
    i64 index_stride;  // elements
    int topk;
    int num_rows;
    int group_tokens;
    int capacity;  // of a group, a multiple of 64
};

struct SharedMemoryPlan {
    u32 tokens[MAX_ROWS / 4];                 // of four rows, a byte each
    u32 not_finite[MAX_ROWS / 32];            // of rows, a bit each
    unsigned char united[MAX_ENTRIES];        // of the places that have been filled, their rows' bytes
    u64 united_not_finite[MAX_ENTRIES / 64];  // of these places, a bit each
    int warp_counts[kWarps];
    int listed;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

// The top bit of each byte that is not zero.
__device__ __forceinline__ u32 used_bytes(u32 word) {
    return (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) & 0x80808080;
}

// Sets a token's bit of a row. Returns whether it was set before.
__device__ __forceinline__ bool mark(SharedMemoryPlan& smem, int row, int token) {
    const u32 bit = 1u << (row % 4 * 8 + token);
    return atomicOr(&smem.tokens[row / 4], bit) & bit;
}
// Adds a token's row to the list, which ends at `list_end`.
__device__ __forceinline__ void enlist(SharedMemoryPlan& smem, int* list_end, int row, int token) {
    list_end[-1 - atomicAdd(&smem.listed, 1)] = token << kListTokenShift | row;
}

// Moves the marked rows to place `begin` of `rows` and on, in order, and clears them. Returns the place after them. All threads call.
__device__ __forceinline__ int move_out(const Params& params, SharedMemoryPlan& smem, int* rows, int begin) {
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const int words = (params.num_rows + 3) / 4;
    const int share = (words + kThreads - 1) / kThreads * 32;  // of a warp
    const int first = warp_idx * share, end = min_int(first + share, words);
    int count = 0;
    for (int i = first + lane_idx; i < end; i += 32) count += __popc(used_bytes(smem.tokens[i]));
    count = __reduce_add_sync(0xffffffff, count);
    if (lane_idx == 0) smem.warp_counts[warp_idx] = count;
    __syncthreads();
    const int others = lane_idx < kWarps ? smem.warp_counts[lane_idx] : 0;
    const int total = __reduce_add_sync(0xffffffff, others);
    int place = begin + __reduce_add_sync(0xffffffff, lane_idx < warp_idx ? others : 0);
    for (int base = first; base < end; base += 32) {
        const int i = base + lane_idx;
        const u32 word = i < end ? smem.tokens[i] : 0;
        const int used = __popc(used_bytes(word));
        int before = 0, all = 0;
#pragma unroll
        for (int bit = 0; bit < 3; ++bit) {
            const u32 lanes = __ballot_sync(0xffffffff, used >> bit & 1);
            before += __popc(lanes & ((1u << lane_idx) - 1)) << bit;
            all += __popc(lanes) << bit;
        }
        if (word != 0) {
            smem.tokens[i] = 0;
            const u32 not_finite = smem.not_finite[i / 8] >> i % 8 * 4;
            int at = place + before;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 tokens = word >> 8 * j & 0xff;
                if (tokens == 0) continue;
                rows[at] = not_finite >> j & 1 ? -1 : 4 * i + j;
                smem.united[at] = tokens;
                if (not_finite >> j & 1) atomicOr(&smem.united_not_finite[at / 64], u64{1} << at % 64);
                ++at;
            }
        }
        place += all;
    }
    __syncthreads();
    return begin + total;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_unite_selections(const __grid_constant__ Params params) {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int group = blockIdx.x;
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    int* rows = params.rows + static_cast<i64>(group) * params.capacity;
    int* list_end = rows + params.capacity;

    for (int i = threadIdx.x; i < (params.num_rows + 3) / 4; i += kThreads) smem.tokens[i] = 0;
    for (int i = threadIdx.x; i < MAX_ENTRIES / 64; i += kThreads) smem.united_not_finite[i] = 0;
    if (threadIdx.x == 0) smem.listed = 0;
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int i = threadIdx.x; i < (params.num_rows + 31) / 32; i += kThreads)
        smem.not_finite[i] = load_global(params.not_finite + i);

    for (int token = 0; token < params.group_tokens; ++token) {
        const i64 query = static_cast<i64>(group) * params.group_tokens + token;
        int length = params.topk;
        if (params.topk_length != nullptr) length = min_int(load_global(params.topk_length + query), length);
        const int* indices = params.indices + query * params.index_stride;
        constexpr int kAtOnce = 8;
        for (int base = threadIdx.x; base < length; base += kAtOnce * kThreads) {
            int index[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int k = base + j * kThreads;
                index[j] = k < length ? load_global(indices + k) : -1;
            }
            u32 again = 0;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (static_cast<u32>(index[j]) < params.num_rows)
                    again |= static_cast<u32>(mark(smem, index[j], token)) << j;
            }
            if (again == 0) continue;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
                if (again >> j & 1) enlist(smem, list_end, index[j], token);
        }
    }
    __syncthreads();

    int count = 0;
    while (true) {
        count = move_out(params, smem, rows, count);
        const int listed = smem.listed;
        if (listed == 0) break;
        __syncthreads();
        if (threadIdx.x == 0) smem.listed = 0;
        // The list shrinks in place: what is read is at least as much as what is written.
        for (int base = 0; base < listed; base += kThreads) {
            const int k = base + threadIdx.x;
            const int entry = k < listed ? load_global(list_end - 1 - k) : 0;
            __syncthreads();
            const int row = entry & ((1 << kListTokenShift) - 1), token = entry >> kListTokenShift;
            if (k < listed && mark(smem, row, token)) enlist(smem, list_end, row, token);
            __syncthreads();
        }
    }

    const int words = 2 * params.group_tokens;
    u64* selected = params.selected + static_cast<i64>(group) * (params.capacity / kBlockTokens) * words;
    for (int block = warp_idx; block * kBlockTokens < count; block += kWarps) {
        u32 tokens[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int k = block * kBlockTokens + half * 32 + lane_idx;
            tokens[half] = k < count ? smem.united[k] : 0;
        }
        u64 word = smem.united_not_finite[block];
        for (int token = 0; token < params.group_tokens; ++token) {
            const u32 low = __ballot_sync(0xffffffff, tokens[0] >> token & 1);
            const u32 high = __ballot_sync(0xffffffff, tokens[1] >> token & 1);
            if (lane_idx == token) word = static_cast<u64>(high) << 32 | low;
        }
        if (lane_idx <= params.group_tokens) selected[block * words + lane_idx] = word;
    }
    if (threadIdx.x == 0) params.counts[group] = count;
    if (group == 0 && params.attn_sink != nullptr && threadIdx.x < kTileRows) {
        const int heads = kTileRows / params.group_tokens;
        params.sinks[threadIdx.x] = load_global(params.attn_sink + threadIdx.x % heads);
    }
}
