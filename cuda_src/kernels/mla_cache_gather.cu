// Reads tokens from a paged MLA cache into rows of bf16. Rows of a quantised format are dequantised.
//
//   cache [num_blocks, page_block_size, token] -> out [rows, 576 or 512] bf16, value = bf16(e4m3 * scale)
//
// The formats of a token are described in mla/cache_rows.cuh.
//
// PAGED: tokens seq_starts[i] .. cache_seqlens[i] - 1 of request i go to row workspace_starts[i] of `out` and
// to the rows after it. A token that would go outside `out` is skipped, and a row that gets no token is not
// written. A token whose page is outside the block table or outside the cache gives a row of zeros. Without
// PAGED slot r of the cache goes to row r.
//
// Grid: x = groups of kRows rows, four rows per warp.
//
// With PAGED a warp has to find the request of each of its rows. If all requests had the same length, its
// position would follow from the row. So the lanes look at the 32 requests around that position, first as if
// the requests filled `out`, then as if they filled it up to the end of the last request. If a row of the CTA
// still has no token, all threads of the CTA look at all requests, and a thread that finds a request of such
// a row writes it to a table in shared memory.
//
// The kernel is memory-bound: for V3.2 it reads 656 bytes and writes 1,152 per token. Each lane prefetches
// whole 128-byte lines to L2 and issues its loads, ten at most, before it uses the first value. The CTAs are
// small and there are many: while some wait for memory others run, and at the end no SM works much longer
// than the rest.
#include "common/division.cuh"
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "mla/cache_rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

constexpr CacheFormat kFormat = static_cast<CacheFormat>(FORMAT);
constexpr bool kPaged = PAGED;
using Row = CacheRow<kFormat>;
constexpr int kThreads = kPaged ? 64 : 32;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kWarps = kThreads / 32;
constexpr int kRows = kWarps * kUnitTokens;
constexpr int kResidentCtas = kPaged ? 20 : 32;  // per SM, at least
constexpr int kNearbyRequests = 32;              // one per lane
constexpr int kRequestsAtOnce = 8;               // per thread, in the search through all requests
constexpr int kLineBytes = 128;
constexpr i64 kPrefetchedTable = 16 << 10;  // elements of the block table, at most

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

// A token of a request. Packed into 64 bits, so that one store writes it.
struct Token {
    int request;  // negative: none
    int index;

    __device__ __forceinline__ u64 packed() const {
        return static_cast<u64>(static_cast<u32>(request)) << 32 | static_cast<u32>(index);
    }
    __device__ static __forceinline__ Token unpacked(u64 word) {
        return {static_cast<int>(word >> 32), static_cast<int>(word)};
    }
};

// Tokens begin .. end - 1 of a request go to `row` and the rows after it.
struct Request {
    int begin, end, row;

    // A number past the last request gives a request without tokens.
    __device__ __forceinline__ void load(const Params& params, i64 number) {
        const bool exists = number < params.b;
        end = load_global_4(params.cache_seqlens + number, exists);
        row = load_global_4(params.workspace_starts + number, exists);
        begin = load_global_4(params.seq_starts + number, exists && params.seq_starts != nullptr);
    }
};

// The table in shared memory: for each row of the CTA the token that goes there.
struct Tokens {
    // If two requests claim a row, one of the two tokens remains, never a mixture: a word is one store.
    volatile u64 words[kRows];

    // All threads call it before fill().
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < kRows) words[threadIdx.x] = Token{-1, 0}.packed();
        __syncthreads();
    }
    // Looks at all requests and fills the table for rows first_row .. first_row + rows - 1. All threads call.
    __device__ __forceinline__ void fill(const Params& params, int first_row, int rows) {
        for (i64 first = threadIdx.x; first < params.b; first += kThreads * kRequestsAtOnce) {
            Request requests[kRequestsAtOnce];
#pragma unroll
            for (int i = 0; i < kRequestsAtOnce; ++i) requests[i].load(params, first + i * kThreads);
#pragma unroll
            for (int i = 0; i < kRequestsAtOnce; ++i)
                note(requests[i], first + i * kThreads, first_row, rows);
        }
        __syncthreads();
    }

  private:
    __device__ __forceinline__ void note(const Request& request, i64 number, int first_row, int rows) {
        const i64 begin = static_cast<i64>(request.row) - first_row;
        const i64 end = begin + request.end - request.begin;  // at most `begin` if the request has no tokens
#pragma unroll 1
        for (i64 row = begin > 0 ? begin : 0; row < end && row < rows; ++row)
            words[row] =
                Token{static_cast<int>(number), static_cast<int>(request.begin + row - begin)}.packed();
    }
};

// How many rows the requests fill, if each begins where the one before it ends.
__device__ __forceinline__ i64 rows_of_requests(const Params& params) {
    Request last;
    last.load(params, params.b - 1);
    return static_cast<i64>(last.row) + last.end - last.begin;
}

// Looks for the token of the lane's row among 32 requests. The 32 are those around the request that would
// have the row if all requests had one length and together filled `filled` rows in order. If several requests
// have the row, the first of them counts. A converged warp calls.
__device__ __forceinline__ Token find_nearby(const Params& params, i64 filled, int row, int lane_idx) {
    const float b = static_cast<float>(params.b);
    const float likely = static_cast<float>(row) * b * reciprocal_approx(static_cast<float>(filled));
    const int middle = warp_uniform(static_cast<int>(fminf(fmaxf(likely, 0.0f), b)));
    const int first = max_int(min_int(middle - kNearbyRequests / 2, params.b - kNearbyRequests), 0);
    Request request;
    request.load(params, first + lane_idx);
    const i64 length = static_cast<i64>(request.end) - request.begin;
    u32 reaching = 0;  // bit i: request first + i has the lane's row
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) {
        const i64 distance = static_cast<i64>(__shfl_sync(0xffffffff, row, j * kTokenLanes)) - request.row;
        const u32 found = __ballot_sync(0xffffffff, distance >= 0 && distance < length);
        if (lane_idx / kTokenLanes == j) reaching = found;
    }
    const int source = __ffs(reaching) - 1;
    // Unsigned, because the difference of two arbitrary ints can overflow
    const u32 shift = static_cast<u32>(request.begin) - static_cast<u32>(request.row);
    const u32 index = static_cast<u32>(row) + __shfl_sync(0xffffffff, shift, source & 31);
    return source < 0 ? Token{-1, 0} : Token{first + source, static_cast<int>(index)};
}

// The token of the lane's row, which is row `own_row` of the CTA. All threads of the CTA call.
__device__ __forceinline__ Token find_token(const Params& params, int first_row, int rows, int own_row,
                                            int lane_idx) {
    __shared__ Tokens tokens;
    const int row = first_row + own_row;
    Token token = find_nearby(params, params.rows, row, lane_idx);
    auto is_found = [&]() { return token.request >= 0 || own_row >= rows; };
    if (params.b > kNearbyRequests) {
        if (!__all_sync(0xffffffff, is_found()))
            token = find_nearby(params, rows_of_requests(params), row, lane_idx);
        if (!__syncthreads_and(is_found())) {
            tokens.clear();
            tokens.fill(params, first_row, rows);
            token = Token::unpacked(tokens.words[own_row]);
        }
    }
    return own_row < rows ? token : Token{-1, 0};
}

// The addresses of a token in the cache. `row` is null if there is no token or if it is not in the cache.
struct Source {
    const unsigned char* row = nullptr;
    const unsigned char* scales = nullptr;

    __device__ __forceinline__ Source(const Params& params, Token token) {
        const int column = divide(token.index, params.page_magic, params.page_shift);
        const int offset = token.index - column * params.page_block_size;
        int block = -1;
        if constexpr (!kPaged) {
            if (token.request >= 0) block = column;
        } else if (token.request >= 0 && token.index >= 0 && column < params.table_width) {
            block = load_global(params.block_table + token.request * params.table_stride + column);
        }
        if (block < 0 || block >= params.num_blocks) return;
        const unsigned char* first = params.cache + static_cast<i64>(block) * params.block_stride;
        row = first + Row::row_offset(offset, params.token_stride);
        if constexpr (Row::kQuantized) scales = first + Row::scales_offset(offset, params.page_block_size);
    }
};

// How the lanes of a warp share the loads of four tokens. A row is 64 vectors and, except in kBf16Narrow, a
// tail of eight more, which are RoPE. Lane l loads vectors l and 32 + l of each token. Its own token is token
// l / 8, of which it loads vector l % 8 of the tail. A vector is eight e4m3 codes in a quantised format and
// eight bf16 otherwise. RoPE in MODEL1 is aligned to eight bytes only, so there a vector of it is four bf16.
template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<8> {
    using Type = uint2;
};
template <>
struct VectorOf<16> {
    using Type = uint4;
};
constexpr int kVectorBytes = Row::kQuantized ? 8 : 16;
constexpr int kTailBytes = Row::kAlignment;  // per vector
constexpr int kTailColumns = kTailBytes / 2;
constexpr int kTailVectors = 8;
constexpr bool kHasTail = kFormat != CacheFormat::kBf16Narrow;
constexpr int kTailOffset = Row::kRowBytes - kTailVectors * kTailBytes;
constexpr int kScales = Row::kScalesBytes / Row::kScaleBytes;
using Vector = VectorOf<kVectorBytes>::Type;
using TailVector = VectorOf<kTailBytes>::Type;
static_assert(kTailVectors == kTokenLanes && kScales <= kTokenLanes);

__device__ __forceinline__ void load_vector(uint4& vector, const unsigned char* src, bool enabled) {
    vector = load_global_16(src, enabled);
}
__device__ __forceinline__ void load_vector(uint2& vector, const unsigned char* src, bool enabled) {
    vector = load_global_8(src, enabled);
}
__device__ __forceinline__ void store_vector(u16* dst, const uint4& vector) { store_global_16(dst, vector); }
__device__ __forceinline__ void store_vector(u16* dst, const uint2& vector) { store_global_8(dst, vector); }

// What a lane holds of the warp's four tokens.
struct Unit {
    Vector vectors[kUnitTokens][kLaneVectors];
    TailVector tail;  // of the lane's own token
    u32 scale;        // scale l % 8 of the lane's own token
    u32 present;      // bit 8 j: token j exists

    // `token` is the lane's own. A converged warp calls.
    __device__ __forceinline__ void load(const Params& params, Token token, int lane_idx) {
        const Source own(params, token);
        const bool own_exists = own.row != nullptr;
        const int own_vector = lane_idx % kTailVectors;
        present = __ballot_sync(0xffffffff, token.request >= 0);
#pragma unroll
        for (int j = 0; j < kUnitTokens; ++j) {
            const u64 row = __shfl_sync(0xffffffff, reinterpret_cast<u64>(own.row), j * kTailVectors);
            const unsigned char* src = reinterpret_cast<const unsigned char*>(row) + lane_idx * kVectorBytes;
#pragma unroll
            for (int v = 0; v < kLaneVectors; ++v) {
                load_vector(vectors[j][v], src + v * 32 * kVectorBytes, row != 0);
            }
        }
        if constexpr (kHasTail) {
            load_vector(tail, own.row + kTailOffset + own_vector * kTailBytes, own_exists);
        }
        if constexpr (kFormat == CacheFormat::kV32) {
            scale = load_global_4(own.scales + own_vector * 4, own_exists && own_vector < kScales);
        } else if constexpr (kFormat == CacheFormat::kModel1) {
            scale = load_global_1(own.scales + own_vector, own_exists);
        }
    }

    // Stores to rows first_row .. first_row + 3.
    __device__ __forceinline__ void store(const Params& params, i64 first_row, int lane_idx) {
        if constexpr (kFormat == CacheFormat::kModel1) scale = __float_as_uint(e8m0_value(scale));
        u16* out = params.out + first_row * params.out_stride;
#pragma unroll
        for (int j = 0; j < kUnitTokens; ++j) {
            if (!(present >> j * kTailVectors & 1)) continue;
#pragma unroll
            for (int v = 0; v < kLaneVectors; ++v) {
                store_columns(out + j * params.out_stride, j, v, lane_idx);
            }
        }
        if constexpr (kHasTail) {
            u16* row = out + lane_idx / kTailVectors * params.out_stride;
            const int column = Row::kDimQk - (kTailVectors - lane_idx % kTailVectors) * kTailColumns;
            if (present >> lane_idx & 1) store_vector(row + column, tail);
        }
    }

  private:
    __device__ __forceinline__ void store_columns(u16* row, int j, int v, int lane_idx) const {
        const Vector& vector = vectors[j][v];
        u16* dst = row + (v * 32 + lane_idx) * kVectorColumns;
        if constexpr (Row::kQuantized) {
            const int tile = lane_idx / Row::kTileLanes + v * Row::kTilesPerPass;
            const float factor = __uint_as_float(__shfl_sync(0xffffffff, scale, j * kTailVectors + tile));
            if (Row::is_rope(lane_idx, v)) {
                store_vector(row + Row::kDimNope + Row::rope_vector(lane_idx) * kTailColumns, vector);
            } else {
                const uint2 low = dequantize_e4m3(vector.x, factor), high = dequantize_e4m3(vector.y, factor);
                store_global_16(dst, make_uint4(low.x, low.y, high.x, high.y));
            }
        } else {
            store_vector(dst, vector);
        }
    }
};

// Nothing that the kernel ahead writes may be read before griddepcontrol_wait, but it may be prefetched to
// L2. The CTAs that wait prefetch what they read first, which keeps the memory busy between two kernels.
__device__ __forceinline__ void prefetch_requests(const Params& params) {
    const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * (kLineBytes / 4);
    if (first < params.b) {
        prefetch_l2(params.cache_seqlens + first);
        prefetch_l2(params.workspace_starts + first);
        if (params.seq_starts != nullptr) prefetch_l2(params.seq_starts + first);
    }
    // Only the beginning of the block table: most of a large table may not be needed.
    const i64 table_size = (params.b - 1) * params.table_stride + params.table_width;
    if (params.table_stride > 0 && first < table_size && first < kPrefetchedTable) {
        prefetch_l2(params.block_table + first);
    }
}
__device__ __forceinline__ void prefetch_token(const Params& params, Token token, int lane_idx) {
    const Source own(params, token);
    if (own.row == nullptr) return;
    const int line = lane_idx % kTailVectors * kLineBytes;
    constexpr int kLanesBytes = kTailVectors * kLineBytes;
    prefetch_l2(line < Row::kRowBytes ? own.row + line : own.scales);
    if (line + kLanesBytes < Row::kRowBytes) prefetch_l2(own.row + line + kLanesBytes);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResidentCtas)
    mla_cache_gather(const __grid_constant__ Params params) {
    const int lane_idx = threadIdx.x % 32;
    const int first_row = blockIdx.x * kRows;
    const int rows = min_int(params.rows - first_row, kRows);
    const int unit_row = threadIdx.x / 32 * kUnitTokens;
    const int own_row = unit_row + lane_idx / kTokenLanes;
    Token token{-1, 0};
    if constexpr (kPaged) {
        prefetch_requests(params);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        token = find_token(params, first_row, rows, own_row, lane_idx);
        prefetch_token(params, token, lane_idx);  // whole lines; the loads below ask for parts of them
    } else {
        if (own_row < rows) token = {0, first_row + own_row};
        prefetch_token(params, token, lane_idx);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    }
    Unit unit;
    unit.load(params, token, lane_idx);
    unit.store(params, static_cast<i64>(first_row) + unit_row, lane_idx);
}
