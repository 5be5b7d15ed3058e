// What the sparse kernels share: their parameters, the rows of a tile, and how they find the cache rows that
// a query token selects. The kernel defines LOAD_BYTES and MAX_LOGITS.
#pragma once
#include "common/division.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "ptx/memory.cuh"

static_assert(MAX_LOGITS == 0 || MAX_LOGITS == 1, "MAX_LOGITS must be 0 (decoding) or 1 (prefill)");
constexpr bool kMaxLogits = MAX_LOGITS;

struct Params {
    TensorMap q_map;  // mla_sparse_bf16 only; box of 64 columns x rows of a tile (tokens x heads)
    TensorMap q_rope_map;
    const u16* q;
    const u16* q_rope;              // the last 64 columns of q, which may be another array
    const unsigned char* cache[2];  // the cache, the extra cache
    const int* indices[2];
    const int* lengths[2];  // topk_length, extra_topk_length or null
    const float* attn_sink;
    const int* sched_meta;
    const int* num_splits;
    u16* out;
    float* lse;     // [b, h_q, s_q]
    void* o_accum;  // splits: mla/splits.cuh
    float* lse_accum_log2;
    float* o_scale_log2;
#if MAX_LOGITS
    float* max_accum_log2;
    float* max_logits;    // as lse
    const u64* selected;  // mla_unite_selections.cu
#endif
    i64 block_stride[2], token_stride[2];      // bytes
    i64 index_stride_b[2], index_stride_s[2];  // elements
    u32 q_stride_b, q_stride_s, q_stride_h;    // units of 16 bytes: mla/queries.cuh
    u32 q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
    i64 out_stride_b, out_stride_s, out_stride_h;  // elements
    int topk[2];
    u32 cache_slots[2];  // at most 2^31
    int page_block_size[2];
    u32 page_magic[2];  // division by page_block_size: common/division.cuh
    int page_shift[2];
    int b, s_q, h_q;
    int head_tiles;
    int max_splits;
    int object_layout;
    float sm_scale_log2;
#if MAX_LOGITS
    float lse_factor;  // converts lse and max_logits from base 2
    UniformPlan uniform;
#endif

    __device__ __forceinline__ TokenCounts tokens() const {
        return {lengths[0], lengths[1], topk[0], topk[1]};
    }
};

// A row of the CTA's tile of kTileRows heads, as a token and a head of the request. The functions of
// output.cuh construct kBlockM rows; those past kTileRows are not valid.
template <int kTileRows>
struct TileRow {
    int token, head;
    bool valid;

    __device__ __forceinline__ TileRow(const Params& params, int tile_row) {
        token = blockIdx.x / params.head_tiles;
        head = (blockIdx.x - token * params.head_tiles) * kTileRows + tile_row;
        valid = (kTileRows == kBlockM || tile_row < kTileRows) && head < params.h_q;
    }
};

// Walks the indices of one query token, block by block: first those of the cache, then of the extra cache.
//
// `BlockRow` tells which row of a block belongs to the thread that constructs it.
template <class BlockRow>
struct Selection {
    const int* src;     // index of the thread's row in the next block
    int left;           // indices of the same cache from there to the end
    int blocks_before;  // blocks before the first one of the extra cache; 0 inside that cache
    int index;          // loaded from `src`; -1 past the last

    __device__ __forceinline__ void enter_cache(const Params& params, const WorkTile& work, int c, int block,
                                                int end_block) {
        const BlockRow thread;
        const int req = work.req;
        const int first = block * kBlockTokens + thread.block_row();
        const i64 token = blockIdx.x / params.head_tiles;
        src = params.indices[c] + req * params.index_stride_b[c] + token * params.index_stride_s[c] + first;
        left = min_int(c ? params.tokens().extra(req) : work.seqlen, end_block * kBlockTokens) - first;
    }
    __device__ __forceinline__ void load() {
        index = -1;
        if (left > 0) index = load_global(src);
    }
    // Starts with the first block of a work tile.
    __device__ __forceinline__ void start(const Params& params, const WorkTile& work) {
        const int blocks = ceil_div(work.seqlen, kBlockTokens);
        const bool extra = work.first_block >= blocks;
        const int skipped = extra ? blocks : 0;
        blocks_before = extra ? 0 : blocks - work.first_block;
        enter_cache(params, work, extra, work.first_block - skipped,
                    work.first_block + work.num_blocks - skipped);
        load();
    }
    // Moves to the next block.
    __device__ __forceinline__ void advance(const Params& params, const WorkTile& work) {
        src += kBlockTokens;
        left -= kBlockTokens;
        if (blocks_before > 0 && --blocks_before == 0) {
            enter_cache(params, work, 1, 0,
                        work.first_block + work.num_blocks - ceil_div(work.seqlen, kBlockTokens));
        }
        load();
    }
};

// The address of the cache row for the next block, or null if its index is not valid.
template <class BlockRow>
__device__ __forceinline__ const unsigned char* row_address(const Params& params,
                                                            const Selection<BlockRow>& selection) {
    const int c = selection.blocks_before == 0;
    const u32 slot = selection.index;
    if (slot >= params.cache_slots[c]) return nullptr;
    const u32 page = divide(slot, params.page_magic[c], params.page_shift[c]);
    const u32 row_in_page = slot - page * static_cast<u32>(params.page_block_size[c]);
    return params.cache[c] + page * params.block_stride[c] +
           static_cast<u64>(row_in_page) * static_cast<u32>(params.token_stride[c]);
}

// Copies 16 bytes of the cache to shared memory, or writes 16 zeros.
__device__ __forceinline__ void copy_16_or_zeros(u32 dst, const unsigned char* src, bool reads) {
    if constexpr (LOAD_BYTES == 16) {
        cp_async_16_or_zeros(dst, src, reads);
    } else {
        cp_async_8_or_zeros(dst, src, reads);
        cp_async_8_or_zeros(dst + 8, src + 8, reads);
    }
}
