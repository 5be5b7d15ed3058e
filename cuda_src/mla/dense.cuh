// What the dense decode kernels share: their parameters, the query rows of a tile, and where the tokens of a
// request are in the cache.
//
// A box is the range of a page that one TMA load reads. The last box of a request is moved back so that it
// ends with the last token of the request. In front of that token it has earlier tokens of the page, or zeros
// where it begins before the page. The softmax masks both. Tokens past the length are never in shared memory.
#pragma once
#include "common/types.cuh"
#include "mla/chunks.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"

static_assert(D_QK == 576 || D_QK == 512, "D_QK must be 576 (512 + 64 RoPE) or 512");
static_assert(DTYPE == 0 || DTYPE == 1, "DTYPE must be 0 (bf16) or 1 (fp16)");
static_assert(BOX_ROWS == 64 || BOX_ROWS == 32 || BOX_ROWS == 16,
              "BOX_ROWS is min(page_block_size, 64): 16, 32 or 64");

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kQChunks = D_QK / Chunk::kCols;
constexpr int kVChunks = kDimV / Chunk::kCols;
constexpr bool kHasRope = D_QK > kDimV;
constexpr int kBoxes = kBlockTokens / BOX_ROWS;  // boxes per chunk of a block

// A request has no more tokens than its row of the block table has pages for.
struct TokensInTable : TokenCounts {
    int room;

    __device__ __forceinline__ int main(int req) const { return min_int(TokenCounts::main(req), room); }
};

struct Params {
    TensorMap k_map_half;  // box 64 columns x 64 tokens x 4 chunks
    TensorMap k_map_one;   // box 64 columns x BOX_ROWS tokens x 1 chunk
    const u16* q;
    const u16* q_rope;  // the last 64 columns of q, which may be another array
    const int* block_table;
    const int* cache_seqlens;
    const int* sched_meta;
    const int* num_splits;
    u16* out;
    float* lse;     // [b, h_q, s_q]
    void* o_accum;  // splits: mla/splits.cuh
    float* lse_accum_log2;
    float* o_scale_log2;
    u32 q_stride_b, q_stride_s, q_stride_h;  // units of 16 bytes: mla/queries.cuh; other strides in elements
    u32 q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
    i64 block_table_stride;
    i64 out_stride_b, out_stride_s, out_stride_h;
    int b, s_q, h_q, heads_per_kv;
    u32 heads_magic;  // ceil(2^32 / heads_per_kv), for heads_per_kv > 1
    int rows;         // s_q * heads_per_kv, query rows of one KV head
    int page_block_size;
    u32 page_magic;  // ceil(2^32 / (page_block_size / 16)), for BOX_ROWS > 16
    int max_seqlen;  // tokens that a row of block_table has room for
    int max_splits;
    int object_layout;
    int causal;
    float sm_scale_log2;

    __device__ __forceinline__ TokensInTable tokens() const {
        return {all_tokens(cache_seqlens), max_seqlen};
    }
};

__device__ __forceinline__ int token_of_row(const Params& params, int row) {
    return params.heads_per_kv == 1 ? row : __umulhi(row, params.heads_magic);
}

// A row of the CTA's tile, as a token and a head of the request.
struct RowIndex {
    int token, head;
    bool valid;

    __device__ __forceinline__ RowIndex(const Params& params, int tile_row) {
        const int row = blockIdx.x * kBlockM + tile_row;
        token = token_of_row(params, row);
        head = blockIdx.y * params.heads_per_kv + row - token * params.heads_per_kv;
        valid = row < params.rows;
    }
};

// For the first token of a box: the column of its page in the block table, and the address of that entry.
__device__ __forceinline__ u32 page_in_table(const Params& params, int token) {
    return BOX_ROWS == 16 ? token / 16 : __umulhi(token / 16, params.page_magic);
}
__device__ __forceinline__ const int* page_entry(const Params& params, int req, int token) {
    return params.block_table + req * params.block_table_stride + page_in_table(params, token);
}
