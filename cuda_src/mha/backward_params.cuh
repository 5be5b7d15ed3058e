// Parameters of the backward pass of multi-head attention. rawmla/kernels/mha_backward.py fills them in.
#pragma once
#include "common/types.cuh"
#if FLEX
#include "user/mods.cuh"
#endif

struct Params {
    // q and dout: (column, token, head, batch) in boxes of 64 columns and kBlockRows tokens; k and v: in
    // boxes of 64 columns and the tile's keys
    TensorMap q_map, dout_map, k_map, v_map;
    // kernels/mha_backward_prepare.cu: [query heads, rows of the scratch]. Flex attention has no weights, but
    // references there: kernels/flex_row_references.cu.
    float *lse, *delta, *weights;
    float* dq_accum;  // [query heads, blocks of the scratch, every 8 columns, 64 rows * 8]
    int* turns;       // [query heads, blocks]: tiles that have added to a block; null: in any order
    void *dk, *dv;
    const int *cu_seqlens_q, *cu_seqlens_k;  // [b + 1]; null: all requests have seqlen_q, seqlen_k tokens
    const int *seqused_q, *seqused_k;        // [b]; null: all tokens of a request exist
    const float* alibi_slopes;               // [b, query heads] or [query heads]
#if FLEX
    // flex/query_lists.cuh; null: all keys are attended, or there are no full blocks
    const int *q_num_blocks, *q_indices, *full_q_num_blocks, *full_q_indices;
    const int* ranks;  // kernels/block_mask_ranks.cu; null without turns or lists
    u32* largest;      // kernels/flex_captured_gradients.cu: of each gradient, bits of a float
    ScoreMod score_mod;
    MaskMod mask_mod;
#endif
    i64 dk_stride_b, dk_stride_s, dk_stride_h;
    i64 dv_stride_b, dv_stride_s, dv_stride_h;
    i64 blocks;       // of a head in the scratch
    int b, heads_kv;  // with FLEX b counts those of K and V
    int group;        // query heads of a KV head
    int d_qk, d_v;
    int seqlen_q, seqlen_k;
    int total_q, total_k;           // tokens of q and k, as in mha/params.cuh
    int window_left, window_right;  // 2^30: none
    int tiles_per_head;             // without cu_seqlens_k
    int section;                    // KV heads whose tiles go together; divides heads_kv with cu_seqlens_k
    int alibi_stride_b;
    // As in mha/scores.cuh: from scores, as the score step leaves them, to exponents of 2; and its factors.
    float softmax_scale_log2, score_scale, score_factor;
    float scale;  // of the softmax
#if FLEX
    i64 counts_strides[6], lists_strides[6];  // (batch, head, column) of partial and of full blocks
    int list_rows[2];                         // of the lists of partial and of full blocks
    int mask_batches, mask_heads;             // that have lists of their own
    int mask_rows, mask_columns;              // blocks of the mask
    int block_rows, block_k;                  // of a block of the mask: blocks of kBlockRows, and keys
    int q_blocks;                             // of kBlockRows query tokens in a request
    int requests;                             // that read the same K and V
    int terms_log2;                           // of a captured gradient: at most 2^ so many
#endif
};
