// Unites what the query tokens of a group select, so that mla_sparse_bf16.cu reads each row once for the
// whole group.
//
//   indices [s_q, topk] int32, not_finite (mla_find_not_finite.cu), attn_sink [heads] float32 ->
//     rows      [groups, capacity] int32: the rows that any token of the group selects
//     counts    [groups] int32: the number of these rows
//     selected  [groups, capacity / 64, 2 * group_tokens] uint64: a bit for each row of a block of 64
//     sinks     [64] float32: attn_sink, repeated for each token of a group
//
// Rows are ascending and each comes once. If a token selects a row more than once, the row comes again after
// all others, as often as needed.
//
// Word t of a block, t < group_tokens, has the bits of the rows that token t selects. Word group_tokens has
// the bits of the rows with NaN or Inf in V. The other words are not written.
//
// A row has probability 0 for the tokens of the group that do not select it. That does not keep NaN and Inf
// out of their results, since 0 * NaN is NaN. So a row with NaN or Inf becomes -1 in `rows` and is not read
// by attention, which sets the scores of the tokens that select it to NaN.
//
// Grid: x = groups. Shared memory has one byte for each row of the cache, and token t sets bit t of the rows
// it selects. If the bit is already set, the pair of token and row goes to a list. The marked rows are then
// moved to `rows` in order, and the next round does the same with the pairs of the list. How many rounds a
// row takes part in depends on how often a token selects it and not on the order of the threads, so the
// result is deterministic. The list is stored at the end of the group's `rows`. There is room for it: marked
// rows and list together have at most as many entries as the group has indices.
#include "common/types.cuh"
#include "mla/plan.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = 256;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kWarps = kThreads / 32;
constexpr int kTileRows = 64;
constexpr int kListTokenShift = 24;
static_assert(MAX_ROWS <= 1 << kListTokenShift, "row and token share an int");

struct Params {
    const int* indices;
    const int* topk_length;  // [s_q], or null
    const int* not_finite;   // a bit for each row: mla_find_not_finite.cu
    const float* attn_sink;  // [heads], or null
    int* rows;
    int* counts;
    u64* selected;
    float* sinks;
    i64 index_stride;  // elements
    int topk;
    int num_rows;
    int group_tokens;
    int capacity;  // entries of `rows` per group, a multiple of 64
};

struct SharedMemoryPlan {
    u32 tokens[MAX_ROWS / 4];                 // a byte for each row: bit t is set if token t selects it
    u32 not_finite[MAX_ROWS / 32];            // a bit for each row
    unsigned char united[MAX_ENTRIES];        // for each entry of `rows`, the byte of its row
    u64 united_not_finite[MAX_ENTRIES / 64];  // for each entry of `rows`, a bit
    int warp_counts[kWarps];
    int listed;  // length of the list
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

// Sets the top bit of each byte that is not zero, and no other bit.
__device__ __forceinline__ u32 used_bytes(u32 word) {
    return (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) & 0x80808080;
}

// Sets the bit of a token in the byte of a row. Returns whether it was set before.
__device__ __forceinline__ bool mark(SharedMemoryPlan& smem, int row, int token) {
    const u32 bit = 1u << (row % 4 * 8 + token);
    return atomicOr(&smem.tokens[row / 4], bit) & bit;
}
// Adds a token and a row to the list, which grows downwards from `list_end`.
__device__ __forceinline__ void enlist(SharedMemoryPlan& smem, int* list_end, int row, int token) {
    list_end[-1 - atomicAdd(&smem.listed, 1)] = token << kListTokenShift | row;
}

// Moves the marked rows in ascending order to rows[begin] and the entries after it, and clears the marks.
// Returns the index after the last entry. All threads call.
__device__ __forceinline__ int move_out(const Params& params, SharedMemoryPlan& smem, int* rows, int begin) {
    const int lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
    const int words = (params.num_rows + 3) / 4;
    const int share = (words + kThreads - 1) / kThreads * 32;  // words per warp
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
        // The new list replaces the old one in place: it never gets longer than what has been read.
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
