// Which keys a CTA of the backward pass owns, and which queries see them.
#pragma once
#include "common/types.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "ptx/sync.cuh"

struct KeyTile {
    int request;  // negative: there is no such tile
    int kv_head;
    int first_key;
    int q_begin, k_begin;        // where the request's tokens begin in the arrays
    int q_len, k_len;            // tokens that exist
    int k_rows;                  // keys that have gradients
    int offset;                  // the key that the first query token is aligned to
    int first_row_block;         // of the request, in the scratch
    int first_query;             // that sees a key of the request; those before see none
    int first_seen_key;          // by a query of the request; those before are seen by none
    int first_block, end_block;  // blocks of kBlockRows query tokens that see a key of the tile

    __device__ __forceinline__ int blocks() const { return end_block - first_block; }
    // Rows of a block that stay as they are. The others may be another request's, or see no key, and hold
    // NaN: their products with 0 must be 0, so they are cleared.
    __device__ __forceinline__ int first_row(int block) const {
        return max_int(first_query - block * kBlockRows, 0);
    }
    __device__ __forceinline__ int end_row(int block) const {
        return min_int(q_len - block * kBlockRows, kBlockRows);
    }
    __device__ __forceinline__ bool trims(int block) const {
        return first_row(block) > 0 || end_row(block) < kBlockRows;
    }
};

// The tile of a CTA. All lanes of a warp call, and agree.
template <int kTileKeys>
__device__ __forceinline__ KeyTile find_key_tile(const Params& params) {
    KeyTile tile;
    int index = blockIdx.x;  // becomes the tile's number in its request and head
    if (params.cu_seqlens_k == nullptr) {
        // Sections of heads, in each the first keys first, which most queries see under a causal mask.
        const int section_tiles = params.section * params.tiles_per_head, section = index / section_tiles;
        index -= section * section_tiles;
        const int width = min_int(params.section, params.heads_kv * params.b - section * params.section);
        const int head = section * params.section + index % width;
        index /= width;
        tile.request = head / params.heads_kv;
        tile.kv_head = head - tile.request * params.heads_kv;
    } else {
        tile.request = -1;
        for (int first = 0; first < params.b && tile.request < 0; first += 32) {
            const int request = first + lane_index();
            int tiles = 0;
            if (request < params.b)
                tiles = ceil_div(Segment(params.cu_seqlens_k, request, params.total_k, 0).count, kTileKeys) *
                        params.heads_kv;
            int upto = tiles;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int before = __shfl_up_sync(0xffffffff, upto, distance);
                if (lane_index() >= distance) upto += before;
            }
            const u32 behind = __ballot_sync(0xffffffff, index < upto);
            if (behind != 0) {
                const int lane = __ffs(behind) - 1;
                index -= __shfl_sync(0xffffffff, upto - tiles, lane);
                const int of_head = __shfl_sync(0xffffffff, tiles, lane) / params.heads_kv;
                tile.request = first + lane;
                const int section = params.section, number = index / of_head / section;
                index -= number * section * of_head;
                tile.kv_head = number * section + index % section;
                index /= section;
            } else {
                index -= __shfl_sync(0xffffffff, upto, 31);
            }
        }
        if (tile.request < 0) return tile;
    }
    tile.first_key = index * kTileKeys;
    const RequestRows q(params.cu_seqlens_q, params.total_q, params.seqlen_q, tile.request);
    const Segment k(params.cu_seqlens_k, tile.request, params.total_k, params.seqlen_k);
    tile.q_begin = q.begin;
    // A negative number leaves no blocks. With one clamp more NVRTC 12.6 serialises WGMMA of mha_backward.cu.
    tile.q_len = q.count;
    if (params.seqused_q != nullptr) tile.q_len = min_int(tile.q_len, params.seqused_q[tile.request]);
    tile.first_row_block = q.first_block;
    tile.k_begin = k.begin;
    tile.k_rows = k.count;
    tile.k_len = used_tokens(params.seqused_k, tile.request, k.count);
    tile.offset = tile.k_len - tile.q_len;
    tile.first_query = max_int(-(tile.offset + params.window_right), 0);
    tile.first_seen_key = max_int(tile.offset - params.window_left, 0);
    // Key j is seen by queries j - offset - right to j - offset + left.
    const int last_key = min_int(tile.first_key + kTileKeys, tile.k_len) - 1;
    const int first = max_int(tile.first_key - tile.offset - params.window_right, 0);
    const int end = min_int(last_key - tile.offset + params.window_left + 1, tile.q_len);
    tile.first_block = first / kBlockRows;
    tile.end_block = last_key < tile.first_key || end <= first ? tile.first_block : ceil_div(end, kBlockRows);
    return tile;
}
