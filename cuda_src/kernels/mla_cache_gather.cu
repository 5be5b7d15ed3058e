// Reads tokens from a paged cache into rows of bf16, dequantised if its layout is quantised (mla/cache_rows.cuh).
//
//   cache [num_blocks, page_block_size, token] -> out [rows, 576 or 512] bf16; a value is bf16(float(e4m3 * scale))
//
// PAGED: tokens seq_starts[i] .. cache_seqlens[i] - 1 of request i go to rows workspace_starts[i] and following, if these are
// rows of `out`. A token whose page is not in the table, or not in the cache, becomes zeros. Otherwise slot r goes to row r.
//
// Grid: x = groups of kRows rows, four per warp. Which token goes to a row is asked from the row's side: the lanes of a warp look at
// the requests that are likely to have its rows; if that leaves a row of the CTA without a token, the threads share out all of them,
// and each notes its request at the rows that it reaches. Memory-bound: 656 bytes in, 1,152 out at V3.2. Lines of a row are asked for
// before the parts of them that lanes load, ten loads at most, all on their way before the first is used. CTAs are small, short-lived and
// many, so that their waits overlap and no SM is left with work when the others are done.
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
constexpr int kWarps = kThreads / 32;
constexpr int kRows = kWarps * kUnitTokens;
constexpr int kResidentCtas = kPaged ? 20 : 32;  // of an SM, at least: 21 fit
constexpr int kNearbyRequests = 32;              // a lane each
constexpr int kRequestsAtOnce = 8;               // of a thread that looks at all
constexpr int kLineBytes = 128;
constexpr i64 kPrefetchedTable = 16 << 10;  // elements

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

// A token of a request.
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

// Of a request: its tokens begin .. end - 1 go to rows `place` and following.
struct Request {
    int begin, end, place;

    // Past the last request: none.
    __device__ __forceinline__ void load(const Params& params, i64 number) {
        const bool exists = number < params.b;
        end = load_global_4(params.cache_seqlens + number, exists);
        place = load_global_4(params.workspace_starts + number, exists);
        begin = load_global_4(params.seq_starts + number, exists && params.seq_starts != nullptr);
    }
};

// The tokens that go to the CTA's rows.
struct Tokens {
    // Written whole: where two requests meet, the token of either stays, not a mixture.
    volatile u64 words[kRows];

    // All threads, before any fill().
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < kRows) words[threadIdx.x] = Token{-1, 0}.packed();
        __syncthreads();
    }
    // All threads. Rows first_row .. first_row + rows - 1 are looked at.
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
        const i64 begin = static_cast<i64>(request.place) - first_row;
        const i64 end = begin + request.end - request.begin;  // no request: not above 0
#pragma unroll 1
        for (i64 row = begin > 0 ? begin : 0; row < end && row < rows; ++row)
            words[row] =
                Token{static_cast<int>(number), static_cast<int>(request.begin + row - begin)}.packed();
    }
};

// The rows that requests fill if they follow each other.
__device__ __forceinline__ i64 rows_of_requests(const Params& params) {
    Request last;
    last.load(params, params.b - 1);
    return static_cast<i64>(last.place) + last.end - last.begin;
}

// The token of the lane's row by 32 requests: all that there are, or those that have it if requests are of about one length and fill
// `filled` rows one after another. One that reaches the row is enough. A converged warp.
__device__ __forceinline__ Token find_nearby(const Params& params, i64 filled, int row, int lane_idx) {
    const float b = static_cast<float>(params.b);
    const float likely = static_cast<float>(row) * b * reciprocal_approx(static_cast<float>(filled));
    const int middle = warp_uniform(static_cast<int>(fminf(fmaxf(likely, 0.0f), b)));
    const int first = max_int(min_int(middle - kNearbyRequests / 2, params.b - kNearbyRequests), 0);
    Request request;
    request.load(params, first + lane_idx);
    const i64 length = static_cast<i64>(request.end) - request.begin;
    u32 reaching = 0;  // a bit for each request that reaches the lane's row
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) {
        const i64 distance = static_cast<i64>(__shfl_sync(0xffffffff, row, j * kTokenLanes)) - request.place;
        const u32 found = __ballot_sync(0xffffffff, distance >= 0 && distance < length);
        if (lane_idx / kTokenLanes == j) reaching = found;
    }
    const int source = __ffs(reaching) - 1;
    // Modulo 2^32, as differences of any two numbers here
    const u32 shift = static_cast<u32>(request.begin) - static_cast<u32>(request.place);
    const u32 index = static_cast<u32>(row) + __shfl_sync(0xffffffff, shift, source & 31);
    return source < 0 ? Token{-1, 0} : Token{first + source, static_cast<int>(index)};
}

// The token of the lane's row, row `own_row` of the CTA's `rows`. All threads of the CTA call.
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

// Where a token is read; row is null if it is not in the cache.
struct Source {
    const unsigned char* row = nullptr;
    const unsigned char* scales = nullptr;

    // No token is not in the cache either.
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

// A row is 64 pieces, of which a lane has pieces l and 32 + l of each token, and up to eight more: piece 64 + l % 8 of token
// l / 8, the lane's own. Quantised, a piece before RoPE is eight codes. MODEL1 aligns its RoPE to eight bytes only: four bf16
// are a piece there.
template <int kBytes>
struct PieceOf;
template <>
struct PieceOf<8> {
    using Type = uint2;
};
template <>
struct PieceOf<16> {
    using Type = uint4;
};
constexpr int kPieceBytes = Row::kQuantized ? 8 : 16;
constexpr int kTailBytes = Row::kAlignment;  // of a piece
constexpr int kTailColumns = kTailBytes / 2;
constexpr int kTailPieces = 8;
constexpr bool kHasTail = kFormat != CacheFormat::kBf16Narrow;
constexpr int kTailOffset = Row::kRowBytes - kTailPieces * kTailBytes;
constexpr int kScales = Row::kScalesBytes / Row::kScaleBytes;
using Piece = PieceOf<kPieceBytes>::Type;
using TailPiece = PieceOf<kTailBytes>::Type;
static_assert(kTailPieces == kTokenLanes && kScales <= kTokenLanes);

__device__ __forceinline__ void load_piece(uint4& piece, const unsigned char* src, bool enabled) {
    piece = load_global_16(src, enabled);
}
__device__ __forceinline__ void load_piece(uint2& piece, const unsigned char* src, bool enabled) {
    piece = load_global_8(src, enabled);
}
__device__ __forceinline__ void store_piece(u16* dst, const uint4& piece) { store_global_16(dst, piece); }
__device__ __forceinline__ void store_piece(u16* dst, const uint2& piece) { store_global_8(dst, piece); }

// A lane's part of a warp's four tokens.
struct Unit {
    Piece pieces[kUnitTokens][kLaneVectors];
    TailPiece tail;  // of the own token
    u32 scale;       // number l % 8 of the own token's
    u32 present;     // bit 8 j: there is a token j

    // A converged warp; `token` is the own one.
    __device__ __forceinline__ void load(const Params& params, Token token, int lane_idx) {
        const Source own(params, token);
        const bool own_exists = own.row != nullptr;
        const int own_piece = lane_idx % kTailPieces;
        present = __ballot_sync(0xffffffff, token.request >= 0);
#pragma unroll
        for (int j = 0; j < kUnitTokens; ++j) {
            const u64 row = __shfl_sync(0xffffffff, reinterpret_cast<u64>(own.row), j * kTailPieces);
            const unsigned char* src = reinterpret_cast<const unsigned char*>(row) + lane_idx * kPieceBytes;
#pragma unroll
            for (int v = 0; v < kLaneVectors; ++v) {
                load_piece(pieces[j][v], src + v * 32 * kPieceBytes, row != 0);
            }
        }
        if constexpr (kHasTail) {
            load_piece(tail, own.row + kTailOffset + own_piece * kTailBytes, own_exists);
        }
        if constexpr (kFormat == CacheFormat::kV32) {
            scale = load_global_4(own.scales + own_piece * 4, own_exists && own_piece < kScales);
        } else if constexpr (kFormat == CacheFormat::kModel1) {
            scale = load_global_1(own.scales + own_piece, own_exists);
        }
    }

    // To four rows from `first_row`.
    __device__ __forceinline__ void store(const Params& params, i64 first_row, int lane_idx) {
        if constexpr (kFormat == CacheFormat::kModel1) scale = __float_as_uint(e8m0_value(scale));
        u16* out = params.out + first_row * params.out_stride;
#pragma unroll
        for (int j = 0; j < kUnitTokens; ++j) {
            if (!(present >> j * kTailPieces & 1)) continue;
#pragma unroll
            for (int v = 0; v < kLaneVectors; ++v) {
                store_columns(out + j * params.out_stride, j, v, lane_idx);
            }
        }
        if constexpr (kHasTail) {
            u16* row = out + lane_idx / kTailPieces * params.out_stride;
            const int column = Row::kDimQk - (kTailPieces - lane_idx % kTailPieces) * kTailColumns;
            if (present >> lane_idx & 1) store_piece(row + column, tail);
        }
    }

  private:
    __device__ __forceinline__ void store_columns(u16* row, int j, int v, int lane_idx) const {
        const Piece& piece = pieces[j][v];
        u16* dst = row + (v * 32 + lane_idx) * kVectorColumns;
        if constexpr (Row::kQuantized) {
            const int tile = lane_idx / Row::kTileLanes + v * Row::kTilesPerPass;
            const float factor = __uint_as_float(__shfl_sync(0xffffffff, scale, j * kTailPieces + tile));
            if (Row::is_rope(lane_idx, v)) {
                store_piece(row + Row::kDimNope + Row::rope_vector(lane_idx) * kTailColumns, piece);
            } else {
                const uint2 low = dequantize_e4m3(piece.x, factor), high = dequantize_e4m3(piece.y, factor);
                store_global_16(dst, make_uint4(low.x, low.y, high.x, high.y));
            }
        } else {
            store_piece(dst, piece);
        }
    }
};

// Before griddepcontrol_wait nothing may be read, but it may be on its way: the CTAs that wait for the kernel before bring to
// L2 what they will ask for first. That keeps the memory busy between two kernels.
__device__ __forceinline__ void prefetch_requests(const Params& params) {
    const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * (kLineBytes / 4);
    if (first < params.b) {
        prefetch_l2(params.cache_seqlens + first);
        prefetch_l2(params.workspace_starts + first);
        if (params.seq_starts != nullptr) prefetch_l2(params.seq_starts + first);
    }
    // Of the table only its beginning: most of a large one may not be needed.
    const i64 table_size = (params.b - 1) * params.table_stride + params.table_width;
    if (params.table_stride > 0 && first < table_size && first < kPrefetchedTable) {
        prefetch_l2(params.block_table + first);
    }
}
__device__ __forceinline__ void prefetch_token(const Params& params, Token token, int lane_idx) {
    const Source own(params, token);
    if (own.row == nullptr) return;
    const int line = lane_idx % kTailPieces * kLineBytes;
    constexpr int kLanesBytes = kTailPieces * kLineBytes;
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
        prefetch_token(params, token, lane_idx);  // whole lines, where loads ask for parts of them
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
