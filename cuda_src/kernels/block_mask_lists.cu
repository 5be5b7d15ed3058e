// Lists of the blocks of a mask, from their states (flex/block_states.cuh): of each line of blocks,
// which are partial and which are full, ascending, then the others. A line is a row or a column of blocks.
// Without lists of full blocks, those are in the other list.
//
// The listed blocks may be larger than those that have the states. One is full if all that it overlaps are,
// and empty if they are.
//
// A warp takes a line.
#include "common/types.cuh"
#include "flex/block_states.cuh"

constexpr int kWarps = 4, kThreads = 32 * kWarps;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    const unsigned char* states;  // [batches and heads, rows, columns]
    // [batches and heads, lines], [batches and heads, lines, entries]; the last two null: not apart
    int *partial_counts, *partial_blocks, *full_counts, *full_blocks;
    i64 all_lines;              // of all batches and heads
    i64 mask_blocks;            // states of a batch and head
    i64 line_step, entry_step;  // between states
    int lines, entries;
    // Tokens of a block along the lines and along the entries: of the lists, of the states; and all tokens.
    int list_line, list_entry, state_line, state_entry;
    int line_tokens, entry_tokens;
};

struct Line {
    const Params& params;
    const unsigned char* states;
    int first, last;  // lines of states that it overlaps

    __device__ __forceinline__ Line(const Params& params, i64 number) : params(params) {
        const int line = number % params.lines;
        states = params.states + number / params.lines * params.mask_blocks;
        first = line * params.list_line / params.state_line;
        last = (min_int((line + 1) * params.list_line, params.line_tokens) - 1) / params.state_line;
    }
    __device__ __forceinline__ int state(int entry) const {
        const int begin = entry * params.list_entry / params.state_entry;
        const int end =
            (min_int((entry + 1) * params.list_entry, params.entry_tokens) - 1) / params.state_entry;
        bool any = false, all = true;
        for (int i = first; i <= last; ++i)
            for (int j = begin; j <= end; ++j) {
                const int one = states[i * params.line_step + j * params.entry_step];
                any |= one != kEmpty;
                all &= one == kFull;
            }
        return all ? kFull : any ? kPartial : kEmpty;
    }
};

// Writes the list of the line's blocks that `listed` names, and how many they are.
template <class Listed>
__device__ __forceinline__ void write_list(const Line& line, i64 number, int* counts, int* blocks, int lane,
                                           Listed listed) {
    const int entries = line.params.entries;
    int count = 0;
    for (int first = 0; first < entries; first += 32)
        count +=
            __popc(__ballot_sync(0xffffffff, first + lane < entries && listed(line.state(first + lane))));
    int in_front = 0, behind = count;  // where the next ones go
    for (int first = 0; first < entries; first += 32) {
        const int entry = first + lane;
        const bool exists = entry < entries, is_listed = exists && listed(line.state(entry));
        const u32 ones = __ballot_sync(0xffffffff, is_listed), all = __ballot_sync(0xffffffff, exists);
        const u32 before = (1u << lane) - 1;
        const int place =
            is_listed ? in_front + __popc(ones & before) : behind + __popc(all & ~ones & before);
        if (exists) blocks[number * entries + place] = entry;
        in_front += __popc(ones);
        behind += __popc(all & ~ones);
    }
    if (lane == 0) counts[number] = count;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    block_mask_lists(const __grid_constant__ Params params) {
    const int lane = threadIdx.x % 32;
    const bool apart = params.full_counts != nullptr;
    for (i64 number = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; number < params.all_lines;
         number += static_cast<i64>(gridDim.x) * kWarps) {
        const Line line(params, number);
        write_list(line, number, params.partial_counts, params.partial_blocks, lane,
                   [=](int state) { return state == kPartial || (!apart && state == kFull); });
        if (apart)
            write_list(line, number, params.full_counts, params.full_blocks, lane,
                       [=](int state) { return state == kFull; });
    }
}
