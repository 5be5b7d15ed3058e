// Reads tokens from a paged cache into rows of bf16, dequantised if its layout is quantised (layout/cache_rows.cuh).
//
//   cache [num_blocks, page_block_size, token] -> out [rows, 576 or 512] bf16; a value is bf16(float(e4m3 * scale))
//
// PAGED: tokens seq_starts[i] .. cache_seqlens[i] - 1 of request i go to rows workspace_starts[i] and following, if these are
// rows of `out`. A token whose page is not in the table, or not in the cache, becomes zeros. Otherwise slot r goes to row r.
//
// A unit is up to four consecutive tokens of a request; warps take units in turn. PAGED: each CTA counts the units of kRequests
// requests by a block scan, and its warps find the request of a unit by binary search. Memory-bound: 656 bytes in, 1,152 out
// at V3.2; up to 17 loads per lane are on their way before the first is used.
#include "common/division.cuh"
#include "common/fp8.cuh"
#include "common/types.cuh"
#include "layout/cache_rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

constexpr CacheLayout kLayout = static_cast<CacheLayout>(LAYOUT);
constexpr bool kPaged = PAGED;
using Row = CacheRow<kLayout>;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRequestsPerThread = 4;
constexpr int kRequests = kThreads * kRequestsPerThread;  // counted at a time

struct Params {
    const unsigned char* cache;
    const int* block_table;       // [b, table_width]
    const int* cache_seqlens;     // [b]
    const int* workspace_starts;  // [b]
    const int* seq_starts;        // [b], or null: all 0
    u16* out;                     // [rows, 576 or 512]
    i64 table_stride;             // elements
    i64 out_stride;               // elements
    int block_stride;             // bytes
    int token_stride;             // bytes
    int b;
    int table_width;
    int num_blocks;
    int rows;
    int page_block_size;
    u32 page_magic;
    int page_shift;
};

// Consecutive tokens of a request and the rows they go to.
struct Run {
    int request;
    int first_token;
    int first_row;
    int count;
};

// What is known of a request; zeros if there is none.
struct Request {
    u32 length, row, start;

    __device__ __forceinline__ void load(const Params& params, int request) {
        const bool exists = request < params.b;
        length = load_global_4(params.cache_seqlens + request, exists);
        row = load_global_4(params.workspace_starts + request, exists);
        start = load_global_4(params.seq_starts + request, exists && params.seq_starts != nullptr);
    }
    // The tokens that have a row.
    __device__ __forceinline__ Run run(const Params& params, int request) const {
        const i64 first_token = static_cast<int>(start), first_row = static_cast<int>(row);
        const i64 tokens = static_cast<int>(length) - first_token, rows = params.rows - first_row;
        const i64 skipped = first_row < 0 ? -first_row : 0;
        const i64 count = (tokens < rows ? tokens : rows) - skipped;
        return {request, static_cast<int>(first_token + skipped), static_cast<int>(first_row + skipped),
                count > 0 ? static_cast<int>(count) : 0};
    }
};

__device__ __forceinline__ int units_of(int tokens) {
    return tokens / kUnitTokens + (tokens % kUnitTokens != 0);
}

// kRequests requests and the units before each.
struct Requests {
    int first_unit[kRequests + 1];
    Run runs[kRequests];
    int warp_sums[kWarps];

    // All threads call. Returns the number of units.
    __device__ __forceinline__ int load(const Params& params, int first_request) {
        const int first = threadIdx.x * kRequestsPerThread;
        Request known[kRequestsPerThread];
#pragma unroll
        for (int i = 0; i < kRequestsPerThread; ++i) known[i].load(params, first_request + first + i);
        int units[kRequestsPerThread];
        int sum = 0;
#pragma unroll
        for (int i = 0; i < kRequestsPerThread; ++i) {
            runs[first + i] = known[i].run(params, first_request + first + i);
            units[i] = units_of(runs[first + i].count);
            sum += units[i];
        }
        int before = exclusive_sum(sum);
#pragma unroll
        for (int i = 0; i < kRequestsPerThread; ++i) {
            first_unit[first + i] = before;
            before += units[i];
        }
        if (threadIdx.x == kThreads - 1) first_unit[kRequests] = before;
        __syncthreads();
        return first_unit[kRequests];
    }

    // Over the CTA.
    __device__ __forceinline__ int exclusive_sum(int value) {
        const int lane_idx = threadIdx.x % 32;
        int inclusive = value;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int below = __shfl_up_sync(0xffffffff, inclusive, distance);
            if (lane_idx >= distance) inclusive += below;
        }
        if (lane_idx == 31) warp_sums[threadIdx.x / 32] = inclusive;
        __syncthreads();
        int before = inclusive - value;
        for (int warp = 0; warp < static_cast<int>(threadIdx.x) / 32; ++warp) before += warp_sums[warp];
        return before;
    }

    // The tokens of a unit.
    __device__ __forceinline__ Run unit_run(int unit) const {
        int request = 0;  // the last one with first_unit <= unit
#pragma unroll
        for (int step = kRequests / 2; step > 0; step /= 2) {
            if (first_unit[request + step] <= unit) request += step;
        }
        Run run = runs[request];
        const int skipped = (unit - first_unit[request]) * kUnitTokens;
        run.first_token += skipped;
        run.first_row += skipped;
        run.count -= skipped;
        return run;
    }
};

// Where a token is read; row is null if it is not in the cache.
struct Source {
    const unsigned char* row = nullptr;
    const unsigned char* scales = nullptr;

    // `block` may be anything.
    __device__ __forceinline__ Source(const Params& params, int block, int offset) {
        if (block < 0 || block >= params.num_blocks) return;
        const unsigned char* first = params.cache + static_cast<i64>(block) * params.block_stride;
        row = first + Row::row_offset(offset, params.token_stride);
        if constexpr (Row::kQuantized) scales = first + Row::scales_offset(offset, params.page_block_size);
    }
};

// The pages of a run's first four tokens.
struct Pages {
    int block[kUnitTokens];
    int offset[kUnitTokens];

    __device__ __forceinline__ Pages(const Params& params, const Run& run) {
#pragma unroll
        for (int j = 0; j < kUnitTokens; ++j) {
            const int token = run.first_token + j;
            const int column = divide(token, params.page_magic, params.page_shift);
            offset[j] = token - column * params.page_block_size;
            block[j] = -1;
            if constexpr (!kPaged) {
                if (j < run.count) block[j] = column;
            } else if (j < run.count && token >= 0 && column < params.table_width) {
                block[j] = load_global(params.block_table + run.request * params.table_stride + column);
            }
        }
    }
    __device__ __forceinline__ Source source(const Params& params, int j) const {
        return Source(params, block[j], offset[j]);
    }
    // Of token lane / 8.
    __device__ __forceinline__ Source own_source(const Params& params, int lane_idx) const {
        int own_block = block[0], own_offset = offset[0];
#pragma unroll
        for (int j = 1; j < kUnitTokens; ++j) {
            if (lane_idx / kRopeVectors == j) {
                own_block = block[j];
                own_offset = offset[j];
            }
        }
        return Source(params, own_block, own_offset);
    }
};

// A lane's two vectors of a token as they are in the cache.
template <bool kQuantized>
struct Vectors;

template <>
struct Vectors<false> {
    uint4 values[kLaneVectors];

    __device__ __forceinline__ void load(const Source& source, int lane_idx) {
#pragma unroll
        for (int v = 0; v < kLaneVectors; ++v) {
            values[v] = load_global_16(source.row + (v * 32 + lane_idx) * 16, source.row != nullptr);
        }
    }
    __device__ __forceinline__ uint4 bf16(int lane_idx, int v) const { return values[v]; }
};

template <>
struct Vectors<true> {
    uint2 codes[kLaneVectors];
    u32 scales[kLaneVectors];
    uint2 rope_tail;  // where the second vector is RoPE, its codes are the first half of it

    __device__ __forceinline__ void load(const Source& source, int lane_idx) {
        const bool enabled = source.row != nullptr;
#pragma unroll
        for (int v = 0; v < kLaneVectors; ++v) {
            const bool is_rope = Row::is_rope(lane_idx, v);
            const int rope = Row::kRopeOffset + Row::rope_vector(lane_idx) * 16;
            const int tile = lane_idx / Row::kTileLanes + v * Row::kTilesPerPass;
            codes[v] = load_global_8(source.row + (is_rope ? rope : (v * 32 + lane_idx) * 8), enabled);
            if constexpr (kLayout == CacheLayout::kV32) {
                scales[v] = load_global_4(source.scales + tile * 4, enabled);
            } else {
                scales[v] = load_global_1(source.scales + tile, enabled);
                if (v == 1) rope_tail = load_global_8(source.row + rope + 8, enabled && is_rope);
            }
        }
    }
    __device__ __forceinline__ uint4 bf16(int lane_idx, int v) const {
        if (Row::is_rope(lane_idx, v)) return make_uint4(codes[v].x, codes[v].y, rope_tail.x, rope_tail.y);
        const float scale = kLayout == CacheLayout::kV32 ? __uint_as_float(scales[v]) : e8m0_value(scales[v]);
        const uint2 low = dequantize_e4m3(codes[v].x, scale), high = dequantize_e4m3(codes[v].y, scale);
        return make_uint4(low.x, low.y, high.x, high.y);
    }
};

// A converged warp copies the first four tokens of a run, or as many as there are.
__device__ __forceinline__ void copy_unit(const Params& params, const Run& run, int lane_idx) {
    const Pages pages(params, run);
    Vectors<Row::kQuantized> vectors[kUnitTokens];
    uint4 rope;
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) vectors[j].load(pages.source(params, j), lane_idx);
    if constexpr (Row::kWide) {
        const Source own = pages.own_source(params, lane_idx);
        rope =
            load_global_16(own.row + Row::kRopeOffset + Row::rope_vector(lane_idx) * 16, own.row != nullptr);
    }
    u16* out = params.out + run.first_row * params.out_stride;
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) {
        if (j >= run.count) break;
        u16* row = out + j * params.out_stride + lane_idx * kVectorColumns;
#pragma unroll
        for (int v = 0; v < kLaneVectors; ++v) {
            store_global_16(row + v * 32 * kVectorColumns, vectors[j].bf16(lane_idx, v));
        }
    }
    if constexpr (Row::kWide) {
        const int j = lane_idx / kRopeVectors;
        u16* columns = out + j * params.out_stride + Row::kDimNope;
        if (j < run.count) store_global_16(columns + Row::rope_vector(lane_idx) * kVectorColumns, rope);
    }
}

// All requests; the CTA's warps are `warp` and following of `warps`.
__device__ __forceinline__ void gather_requests(const Params& params, int warp, int warps, int lane_idx) {
    __shared__ Requests requests;
    int turn = warp;  // this warp's first unit among those not yet handed out
    for (int first_request = 0; first_request < params.b; first_request += kRequests) {
        if (first_request > 0) __syncthreads();  // the requests before are done with
        const int units = requests.load(params, first_request);
        while (turn < units) {
            copy_unit(params, requests.unit_run(turn), lane_idx);
            turn += warps;
        }
        turn -= units;
    }
}

__device__ __forceinline__ void copy_slots(const Params& params, int warp, int warps, int lane_idx) {
    for (i64 row = static_cast<i64>(warp) * kUnitTokens; row < params.rows; row += warps * kUnitTokens) {
        const int first = static_cast<int>(row);
        copy_unit(params, Run{0, first, first, params.rows - first}, lane_idx);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_cache_gather(const __grid_constant__ Params params) {
    const int warp = blockIdx.x * kWarps + threadIdx.x / 32;
    const int warps = gridDim.x * kWarps;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if constexpr (kPaged) {
        gather_requests(params, warp, warps, threadIdx.x % 32);
    } else {
        copy_slots(params, warp, warps, threadIdx.x % 32);
    }
}
