// Tiles: which query rows a CTA attends next, and which keys they see.
//
// A tile has kTileRows rows: tokens of one request and head, or tokens times the query heads of one KV head,
// the head fastest. Its keys come in blocks of kTileKeys, from the last to the first.
#pragma once
#include "common/types.cuh"
#include "mha/params.cuh"

struct Tile {
    int request;      // negative: there is no tile left
    int head;         // a query head, or a KV head whose query heads share the tile
    int first_token;  // in the request
    int q_begin, k_begin;  // where the request's tokens begin in the arrays
    int q_rows;            // tokens of the request that have results
    int q_len, k_len;      // those that exist
    int first_block, end_block;
    bool trims_first, trims_last;  // V of these two blocks has rows that `rows_to_keep` leaves out
};

// The keys that a query token sees: those of an interval.
struct KeyInterval {
    int begin, end;
};
__device__ __forceinline__ KeyInterval keys_of_token(const Params& params, const Tile& tile, int token) {
    const int diagonal = token + tile.k_len - tile.q_len;  // the last query token is aligned to the last key
    KeyInterval keys;
    keys.begin = max_int(diagonal - params.window_left, 0);
    keys.end = token < tile.q_len ? min_int(diagonal + params.window_right + 1, tile.k_len) : 0;
    return keys;
}
// The union of the intervals of tokens first to last; empty if its end is not behind its beginning. Intervals
// move with the token, so it has no gaps that any of the tokens sees.
__device__ __forceinline__ KeyInterval keys_of_tokens(const Params& params, const Tile& tile, int first,
                                                      int last) {
    last = min_int(last, tile.q_len - 1);
    KeyInterval keys;
    keys.begin = keys_of_token(params, tile, first).begin;
    keys.end = last < first ? 0 : keys_of_token(params, tile, last).end;
    return keys;
}

// The rows of V of a block that stay as they are. The others, which no query of the tile sees, may be another
// request's, or hold NaN: their products with probabilities of 0 must be 0, so they are cleared. Past the end
// of the array TMA gives zeros.
template <int kTileKeys>
__device__ __forceinline__ KeyInterval rows_to_keep(const Params& params, const Tile& tile,
                                                    const KeyInterval& keys, int block) {
    KeyInterval rows;
    rows.begin = max_int(keys.begin - block * kTileKeys, 0);
    rows.end = min_int(keys.end - block * kTileKeys, kTileKeys);
    if (tile.k_begin + keys.end >= params.total_k) rows.end = kTileKeys;
    return rows;
}

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

    __device__ __forceinline__ Tile next(const Params& params) {
        Tile tile;
        int index = number, tiles_per_head = params.tiles_per_head;
        if (params.cu_seqlens_q == nullptr) {
            tile.request = index < params.tiles ? 0 : -1;
        } else {
            tile.request = find_request(params, index, tiles_per_head);
        }
        if (tile.request < 0) return tile;
        // Sections of heads; in each, the last query tokens first, which see most keys under a causal mask.
        const int section_tiles = params.section * tiles_per_head;
        const int section = index / section_tiles;
        index -= section * section_tiles;
        const int all_heads = params.cu_seqlens_q == nullptr ? params.heads * params.b : params.heads;
        const int width = min_int(params.section, all_heads - section * params.section);
        const int turn = index / width;
        tile.head = section * params.section + index - turn * width;
        tile.first_token = (tiles_per_head - 1 - turn) * tokens;
        tile.q_rows = params.seqlen_q;
        tile.k_len = params.seqlen_k;
        tile.q_begin = tile.k_begin = 0;
        if (params.cu_seqlens_q == nullptr) {
            tile.request = tile.head / params.heads;
            tile.head -= tile.request * params.heads;
        } else {
            tile.q_begin = params.cu_seqlens_q[tile.request];
            tile.q_rows = params.cu_seqlens_q[tile.request + 1] - tile.q_begin;
        }
        if (params.cu_seqlens_k != nullptr) {
            tile.k_begin = params.cu_seqlens_k[tile.request];
            tile.k_len = params.cu_seqlens_k[tile.request + 1] - tile.k_begin;
        }
        tile.q_len = tile.q_rows;
        if (params.seqused_q != nullptr) tile.q_len = min_int(tile.q_len, params.seqused_q[tile.request]);
        if (params.seqused_k != nullptr) tile.k_len = min_int(tile.k_len, params.seqused_k[tile.request]);
        const KeyInterval keys =
            keys_of_tokens(params, tile, tile.first_token, tile.first_token + tokens - 1);
        tile.first_block = keys.begin / kTileKeys;
        tile.end_block = keys.end <= keys.begin ? tile.first_block : ceil_div(keys.end, kTileKeys);
        tile.trims_first = rows_to_keep<kTileKeys>(params, tile, keys, tile.first_block).begin > 0;
        tile.trims_last = rows_to_keep<kTileKeys>(params, tile, keys, tile.end_block - 1).end < kTileKeys;
        return tile;
    }
    // After the lanes have used the tile.
    __device__ __forceinline__ void advance(const Params& params) {
        if (params.counter == nullptr) {
            number += gridDim.x;
        } else {
            int taken = 0;
            if (threadIdx.x % 32 == 0) taken = atomicAdd(params.counter, 1);
            number = gridDim.x + __shfl_sync(0xffffffff, taken, 0);
        }
    }

  private:
    __device__ __forceinline__ void count_tiles(const Params& params) {
        const int lane = threadIdx.x % 32, request = first_request + lane;
        int rows = 0;
        if (request < params.b) rows = params.cu_seqlens_q[request + 1] - params.cu_seqlens_q[request];
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
};
