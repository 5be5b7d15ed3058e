// Tiles: which query rows a CTA attends next, and which keys they see.
//
// A tile has kTileRows rows: tokens of one request and head, or tokens times the query heads of one KV head,
// the head fastest. Its keys lie in spans, each with its own source; blocks of a span are attended from the
// last to the first.
#pragma once
#include "common/types.cuh"
#include "mha/params.cuh"
#include "mha/segments.cuh"
#include "ptx/sync.cuh"

struct KeyInterval {
    int begin, end;
};

// Keys base to base + length - 1 of a request.
struct Span {
    int base, length;
    int first_block, end_block;    // that a row of the tile sees, counted from `base`
    bool trims_first, trims_last;  // V of these two blocks has rows to be cleared: see `rows_to_keep`

    __device__ __forceinline__ int blocks() const { return end_block - first_block; }
    // Whether V of this block is to be trimmed.
    __device__ __forceinline__ bool trims(int block) const {
        return (block == first_block && trims_first) || (block == end_block - 1 && trims_last);
    }
    __device__ __forceinline__ KeyInterval clip(const KeyInterval& keys) const {
        return {min_int(max_int(keys.begin - base, 0), length), min_int(max_int(keys.end - base, 0), length)};
    }
};

// Spans: keys in arrays, then, with PAGED, those in pages of a cache.
constexpr int kSpans = PAGED ? 2 : 1;
constexpr int kArrays = 0, kPages = kSpans - 1;

struct Tile {
    int request;           // negative: there is no tile left
    int split;             // which part of the keys
    int head;              // a query head, or a KV head whose query heads share the tile
    int first_token;       // in the request
    int q_begin, k_begin;  // where the request's tokens begin in the arrays
    int q_rows;            // tokens of the request that have results
    int q_len, k_len;      // those that exist
    int offset;            // the key that the first query token is aligned to
    Span spans[kSpans];
#if FLEX
    // flex/list_keys.cuh
    const int *partial_blocks, *full_blocks;
    int full_steps;
#endif
};

// The keys that a query token sees.
__device__ __forceinline__ KeyInterval keys_of_token(const Params& params, const Tile& tile, int token) {
    const int diagonal = token + tile.offset;
    KeyInterval keys;
    keys.begin = max_int(diagonal - params.window_left, 0);
    keys.end = token < tile.q_len ? min_int(diagonal + params.window_right + 1, tile.k_len) : 0;
    return keys;
}
// The union over tokens first to last; empty if its end is not behind its beginning. Intervals move with the
// token, so it has no gaps that any of the tokens sees.
__device__ __forceinline__ KeyInterval keys_of_tokens(const Params& params, const Tile& tile, int first,
                                                      int last) {
    last = min_int(last, tile.q_len - 1);
    KeyInterval keys;
    keys.begin = keys_of_token(params, tile, first).begin;
    keys.end = last < first ? 0 : keys_of_token(params, tile, last).end;
    return keys;
}

#if FLEX
// The row of lists that the tile walks, in steps of kTileKeys keys. A list may claim more blocks than there
// are.
__device__ __forceinline__ int list_of(const Params& params, const Tile& tile, int kind, const int* counts,
                                       const int* lists, const int*& list) {
    list = nullptr;
    if (counts == nullptr) return 0;
    const i64 batch = tile.request % params.mask_batches, head = tile.head % params.mask_heads;
    const i64 row = tile.first_token / params.block_q;
    const i64* strides = params.counts_strides + 3 * kind;
    const int count = counts[batch * strides[0] + head * strides[1] + row * strides[2]];
    strides = params.lists_strides + 3 * kind;
    list = lists + batch * strides[0] + head * strides[1] + row * strides[2];
    return max_int(min_int(count, params.list_columns[kind]), 0);
}
template <int kTileKeys>
__device__ __forceinline__ void find_steps(const Params& params, Tile& tile) {
    Span& span = tile.spans[kArrays];
    span = {0, tile.k_len, 0, ceil_div(tile.k_len, kTileKeys), false, false};
    tile.full_steps = span.end_block;
    tile.partial_blocks = tile.full_blocks = nullptr;
    if (params.kv_num_blocks == nullptr) return;
    const int partial =
        list_of(params, tile, 0, params.kv_num_blocks, params.kv_indices, tile.partial_blocks);
    const int full =
        list_of(params, tile, 1, params.full_kv_num_blocks, params.full_kv_indices, tile.full_blocks);
    tile.full_steps = full * params.block_tiles;
    span.end_block = tile.full_steps + partial * params.block_tiles;
}
#endif

// Gives out the tiles of a call. All lanes of a warp call; they agree.
template <int kTileRows, int kTileKeys>
struct TileScheduler {
    int number;  // of the next tile
    int tokens;  // of a tile
    // With cu_seqlens_q: requests 32 at a time, one for each lane.
    int first_request = 0;
    int tiles_before = 0;  // of the requests before these
    int tiles_upto = 0;    // of these, up to and with the lane's

    __device__ __forceinline__ explicit TileScheduler(const Params& params)
        : number(blockIdx.x), tokens(kTileRows >> params.log2_group) {
        if (params.cu_seqlens_q != nullptr) count_tiles(params);
    }

    // Finds the next tile; lane 0 writes it.
    __device__ __forceinline__ bool next(const Params& params, Tile& tile) {
        int index = number / params.splits, tiles_per_head = params.tiles_per_head, request = 0;
        if (number >= params.tiles) {
            request = -1;
        } else if (params.cu_seqlens_q != nullptr) {
            request = find_request(params, index, tiles_per_head);
        }
        if (lane_index() == 0) {
            tile.request = request;
            tile.split = number % params.splits;
            if (request >= 0) find_rows(params, tile, index, tiles_per_head);
        }
        __syncwarp();
        return request >= 0;
    }
    // Takes a tile when all copies of the one before are on their way. Taken earlier, the last tiles would
    // wait in CTAs that have long ones, while other CTAs have none.
    __device__ __forceinline__ void advance(const Params& params) {
        int taken = 0;
        if (params.counter != nullptr && lane_index() == 0) taken = atomicAdd(params.counter, 1);
        number = gridDim.x + (params.counter == nullptr ? number : __shfl_sync(0xffffffff, taken, 0));
    }

  private:
    __device__ __forceinline__ void count_tiles(const Params& params) {
        const int lane = threadIdx.x % 32, request = first_request + lane;
        int rows = 0;
        if (request < params.b) rows = Segment(params.cu_seqlens_q, request, params.total_q, 0).count;
        if (rows <= params.skip_tokens) rows = 0;
        tiles_upto = ceil_div(rows, tokens) * params.heads;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_up_sync(0xffffffff, tiles_upto, distance);
            if (lane >= distance) tiles_upto += before;
        }
    }
    // The request of tile `index`, which becomes the tile's number in the request; -1: there is none.
    __device__ __forceinline__ int find_request(const Params& params, int& index, int& tiles_per_head) {
        while (true) {
            const u32 behind = __ballot_sync(0xffffffff, index - tiles_before < tiles_upto);
            if (behind != 0) {
                const int lane = __ffs(behind) - 1;
                const int upto = __shfl_sync(0xffffffff, tiles_upto, lane);
                const int before = __shfl_sync(0xffffffff, tiles_upto, max_int(lane - 1, 0));
                const int begin = lane == 0 ? 0 : before;
                index -= tiles_before + begin;
                tiles_per_head = (upto - begin) / params.heads;
                return first_request + lane;
            }
            if (first_request + 32 >= params.b) return -1;
            tiles_before += __shfl_sync(0xffffffff, tiles_upto, 31);
            first_request += 32;
            count_tiles(params);
        }
    }
    // The tile's head and tokens, from its number in the request, or in the call without cu_seqlens_q.
    __device__ __forceinline__ void find_rows(const Params& params, Tile& tile, int index,
                                              int tiles_per_head) const {
        // Sections of heads; in each, the last query tokens first, which see most keys under a causal mask.
        const int section_tiles = params.section * tiles_per_head;
        const int section = index / section_tiles;
        index -= section * section_tiles;
        const int all_heads = params.cu_seqlens_q == nullptr ? params.heads * params.b : params.heads;
        const int width = min_int(params.section, all_heads - section * params.section);
        const int turn = index / width;
        tile.head = section * params.section + index - turn * width;
        tile.first_token = (tiles_per_head - 1 - turn) * tokens;
        if (params.cu_seqlens_q == nullptr) {
            tile.request = tile.head / params.heads;
            tile.head -= tile.request * params.heads;
        }
        find_tokens(params, tile);
#if FLEX
        find_steps<kTileKeys>(params, tile);
#else
        find_spans(params, tile);
#endif
        if (params.splits > 1) take_split(params, tile);
    }
    // Where the tile's request lies, and how many tokens it has.
    __device__ __forceinline__ static void find_tokens(const Params& params, Tile& tile) {
        const int request = tile.request;
        const Segment q(params.cu_seqlens_q, request, params.total_q, params.seqlen_q);
        tile.q_begin = q.begin;
        tile.q_rows = q.count;
        tile.q_len = used_tokens(params.seqused_q, request, q.count);
        if constexpr (PAGED) {
            tile.k_begin = q.begin;
            tile.k_len = used_tokens(params.seqused_k, request,
                                     params.own_in_cache ? params.seqlen_k : params.seqlen_k + tile.q_len);
            tile.offset = max_int(tile.k_len - tile.q_len, 0);
            if (!params.own_in_cache) tile.k_len = tile.offset + tile.q_len;
        } else {
#if PAGE_ROWS
            const Segment fresh(params.cu_seqlens_new, request, params.total_new, params.seqlen_new);
            int cached = params.seqlen_k;
            if (params.seqused_k != nullptr) {
                cached = params.seqused_k[request];
            } else if (params.cu_seqlens_k != nullptr) {
                cached = params.cu_seqlens_k[request + 1] - params.cu_seqlens_k[request];
            }
            tile.k_begin = 0;
            tile.k_len = clamp_int(min_int(cached, params.seqlen_k) + fresh.count, 0, params.seqlen_k);
#else
            const Segment k(params.cu_seqlens_k, request, params.total_k, params.seqlen_k);
            tile.k_begin = k.begin;
            tile.k_len = used_tokens(params.seqused_k, request, k.count);
#endif
            tile.offset = tile.k_len - tile.q_len;
        }
    }
    __device__ __forceinline__ void find_spans(const Params& params, Tile& tile) const {
        const int in_pages = !PAGED ? 0 : params.own_in_cache ? tile.k_len : tile.offset;
        const KeyInterval seen =
            keys_of_tokens(params, tile, tile.first_token, tile.first_token + tokens - 1);
#pragma unroll
        for (int i = 0; i < kSpans; ++i) {
            Span& span = tile.spans[i];
            const bool pages = PAGED && i == kPages;
            span.base = pages ? 0 : in_pages;
            span.length = pages ? in_pages : tile.k_len - in_pages;
            const KeyInterval keys = span.clip(seen);
            span.first_block = keys.begin / kTileKeys;
            span.end_block = keys.end <= keys.begin ? span.first_block : ceil_div(keys.end, kTileKeys);
            if (pages) {
                // What lies behind whole pieces of pages is not loaded (mha/paged_keys.cuh).
                span.trims_first = keys.begin % 16 != 0;
                span.trims_last = keys.end % 16 != 0;
            } else {
                // Past the end of the array TMA gives zeros.
                span.trims_first = keys.begin % kTileKeys != 0;
                span.trims_last = keys.end % kTileKeys != 0 && tile.k_begin + keys.end < params.total_k;
            }
        }
    }
    // Leaves the tile its part of the blocks, which are counted in the order in which they are attended.
    __device__ __forceinline__ static void take_split(const Params& params, Tile& tile) {
        int blocks = 0;
#pragma unroll
        for (int i = 0; i < kSpans; ++i) blocks += tile.spans[i].blocks();
        const int share = ceil_div(blocks, params.splits);
        int first = tile.split * share, end = first + share;  // of the blocks from here on
#pragma unroll
        for (int i = 0; i < kSpans; ++i) {
            Span& span = tile.spans[i];
            const int count = span.blocks();
            const int skipped = min_int(first, count), taken = min_int(max_int(end, 0), count);
            if (skipped > 0) span.trims_last = false;
            if (taken < count) span.trims_first = false;
            const int last = span.end_block;
            span.end_block = last - skipped;
            span.first_block = last - max_int(taken, skipped);
            first = max_int(first - count, 0);
            end -= count;
        }
    }
};

// Rows of V of a block that stay as they are. The others, which no query of the tile sees, may be another
// request's, or hold NaN: their products with probabilities of 0 must be 0, so they are cleared.
template <int kTileRows, int kTileKeys>
__device__ __forceinline__ KeyInterval rows_to_keep(const Params& params, const Tile& tile, const Span& span,
                                                    int block) {
    const int tokens = kTileRows >> params.log2_group;
    const KeyInterval keys =
        span.clip(keys_of_tokens(params, tile, tile.first_token, tile.first_token + tokens - 1));
    return {max_int(keys.begin - block * kTileKeys, 0), min_int(keys.end - block * kTileKeys, kTileKeys)};
}
