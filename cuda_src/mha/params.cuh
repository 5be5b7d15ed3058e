// Parameters of multi-head attention; rawmla/kernels/mha_forward.py fills them in.
#pragma once
#include "common/types.cuh"

struct Params {
    // q and out: (column, head in the group, token, group, batch); k and v: (column, token, head, batch)
    TensorMap q_map, k_map, v_map, out_map;
    TensorMap k_pages_map, v_pages_map;  // mha/paged_keys.cuh
    void* out;
    float* lse;  // null: not wanted
    const int *cu_seqlens_q, *cu_seqlens_k;  // [b + 1]; null: all requests have seqlen_q, seqlen_k tokens
    const int *seqused_q, *seqused_k;        // [b]; null: all tokens of a request exist
    const void* attn_sink;                   // [query heads]; null: none
    const float* alibi_slopes;               // [b, query heads] or [query heads]
    const void *block_table, *k_cache;       // with pages; seqused_k then counts the context too
    int* counter;                            // tiles given out; null: CTAs take tiles by turns
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 lse_stride_b, lse_stride_h;
    i64 table_stride, block_bytes;
    int b;
    int heads;         // groups of query heads that share a tile
    int log2_group;    // query heads in such a group: 1, or those of a KV head
    int heads_per_kv;  // groups of a KV head
    int d_v;
    int seqlen_q, seqlen_k;
    int total_k;                    // tokens of k; of one request, where all have the same number
    int window_left, window_right;  // kNoBound: none
    int tiles_per_head;             // without cu_seqlens_q
    int tiles;
    int section;    // heads that are processed together, so that their K and V stay in L2
    int sink_dtype;
    int alibi_stride_b;
    int num_blocks, block_size;  // of the cache
    u32 block_magic;             // common/division.cuh
    int block_shift;
    int table_entry;       // 0: int32 numbers of blocks, 1: int64 ones, 2: int64 addresses
    int own_in_cache;      // the request's own tokens are in the cache as well
    int skip_decode;       // requests with one query token have no results
    float softmax_scale_log2;         // from scores, as the score step leaves them, to exponents of 2
    float score_scale, score_factor;  // mha/scores.cuh
};

constexpr int kNoBound = 1 << 30;
