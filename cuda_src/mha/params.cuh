// Parameters of multi-head attention. rawmla/kernels/mha_forward.py fills them in.
#pragma once
#include "common/types.cuh"
#if FLEX
#include "user/mods.cuh"
#endif

struct Params {
    // q and out: (column, head in the group, token, group, batch); k and v: (column, token, head, batch)
    TensorMap q_map, k_map, v_map, out_map;
    TensorMap k_pages_map, v_pages_map;  // mha/paged_keys.cuh
    void* out;
    float* lse;                              // null: not wanted
    const int *cu_seqlens_q, *cu_seqlens_k;  // [b + 1]; null: all requests have seqlen_q, seqlen_k tokens
    const int *seqused_q, *seqused_k;        // [b]; null: all tokens of a request exist
    const void* attn_sink;                   // [query heads]; null: none
    const float* alibi_slopes;               // [b, query heads] or [query heads]
    // With pages; seqused_k then counts the context too
    const void *block_table, *k_cache, *v_cache;
    const float *k_scale, *v_scale, *out_scale;  // null: the numbers at the end
    float *o_accum, *lse_accum;                  // of splits: kernels/mha_combine.cu
    int* counter;                                // tiles taken after each CTA's first; null: by turns
#if FLEX
    float* max_scores;  // as lse; with MAX_SCORES
    // flex/list_keys.cuh; null: there are none
    const int *kv_num_blocks, *kv_indices, *full_kv_num_blocks, *full_kv_indices;
    // Of lists that were brought to other blocks: flex/block_states.cuh of the caller's; else null
    const unsigned char* states;
    ScoreMod score_mod;
    MaskMod mask_mod;
#endif
#if PAGE_ROWS
    // mha/row_pages.cuh. seqused_k, or differences of cu_seqlens_k, are tokens in the cache before new ones
    const int *cache_batch_idx, *cu_seqlens_new;  // null: request r; seqlen_new of each request
#endif
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 lse_stride_b, lse_stride_h;
    i64 accum_rows;  // of a split
    i64 table_stride;
    i64 k_stride_block, k_stride_head, v_stride_block, v_stride_head;  // of the cache
    int b;
    int heads;                      // groups of query heads that share a tile
    int log2_group;                 // of the query heads in such a group: 1, or all of a KV head
    int heads_per_kv;               // groups of a KV head
    int d_v;                        // columns of v; with pages of q and k too
    int out_by_rows;                // TMA cannot write out
    int seqlen_q, seqlen_k;         // with pages seqlen_k tokens have entries in the block table
    int total_q, total_k;           // tokens of q and k; of one request, where all have the same number
    int window_left, window_right;  // 2^30: none
    int tiles_per_head;             // without cu_seqlens_q
    int tiles;                      // at most, whatever lengths are
    int splits;                     // parts of a row's keys, which other tiles attend
    int section;                    // heads that are processed together, so that their K and V stay in L2
    int sink_dtype;
    int alibi_stride_b;
    int num_blocks, block_size;            // of the cache
    u32 block_magic, block_bytes_inverse;  // common/division.cuh: by the size, by the stride of k_cache
    int block_shift, block_bytes_shift;
    int table_entry;                  // 0: int32 numbers of blocks, 1: int64 ones, 2: int64 addresses
    int x, v_pack;                    // mha/gathered_keys.cuh; 0: V is not interleaved
    int cache_by_tma;                 // raw bytes of an FP8 cache come by TMA
    int own_in_cache;                 // the request's own tokens are in the cache as well
    int skip_tokens;                  // requests with at most this number of query tokens have no results
    float softmax_scale_log2;         // from scores, as the score step leaves them, to exponents of 2
    float score_scale, score_factor;  // mha/scores.cuh
    float k_scale_value, v_scale_value, out_scale_value;
#if PAGE_ROWS
    int table_rows, seqlen_new, total_new;
    int runs_beside;  // starts before mha_decode.cu ends, which attends shorter requests
#endif
#if FLEX
    i64 counts_strides[6], lists_strides[6];  // (batch, head, row) of partial and of full blocks
    int list_columns[2];                      // of the lists of partial and of full blocks
    int mask_batches, mask_heads;             // that have lists of their own
    int block_q, block_k;                     // query tokens and keys of a block
    int block_tiles;                          // steps of a block
    int last_block_is_cut;                    // it reaches beyond the last key
    int k_batches;                            // 1: all requests read the same K and V
    int state_rows, state_columns;            // blocks of a head that have states
    int state_q, state_k;                     // query tokens and keys of one
#endif
};
