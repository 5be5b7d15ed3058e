// Decoding over a cache (kernels/mha_decode.cu): the parameter struct, the tiles of a CTA, and its shared
// memory.
#pragma once
#include "common/types.cuh"
#include "layout/swizzled_tile.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kMathGroups = MATH_GROUPS;  // warpgroups that compute
constexpr int kOwnRows = GROUP_ROWS;      // query rows of each: 8, 16, 32 or 64
constexpr bool kSoftcap = SOFTCAP;
constexpr bool kAlibi = ALIBI;
constexpr int kStages = STAGES;
// A cache of e4m3 numbers: products are of float16, in which they are exact.
constexpr bool kFp8 = CACHE_FP8;
constexpr Dtype kMath = kFp8 ? Dtype::kF16 : kDtype;
// Warpgroups of math share the query rows of a tile. With FP8 they share the tokens of a block, so that each
// token is converted once.
constexpr int kRowGroups = kFp8 ? 1 : kMathGroups;
constexpr int kTileRows = kRowGroups * kOwnRows;
#if CACHE_FP8
using CacheElement = unsigned char;
#else
using CacheElement = u16;
#endif
#if Q_FP8
using QElement = unsigned char;
#else
using QElement = u16;
#endif

constexpr int kTokenTiles = TOKEN_TILES;  // of 64 tokens, in a block
constexpr int kBlockTokens = 64 * kTokenTiles;
constexpr int kOwnTiles = kTokenTiles * kRowGroups / kMathGroups;  // of a warpgroup
constexpr int kOwnTokens = 64 * kOwnTiles;
constexpr int kKChunks = ceil_div(D_QK, 64), kVChunks = ceil_div(D_V, 64);
constexpr int kRowChunks = max_int(kKChunks, kVChunks);
constexpr int kUnit = 16 / sizeof(CacheElement);          // columns in 16 bytes of the cache
constexpr int kTileColumns = 128 / sizeof(CacheElement);  // of the next
constexpr int kKTiles = ceil_div(D_QK, kTileColumns), kVTiles = ceil_div(D_V, kTileColumns);
using Keys = SwizzledTile<kBlockTokens>;  // rows of 128 bytes of K or V of a block
using Rows = SwizzledTile<kOwnRows>;      // 64 columns of Q or O, or tokens of P, of a warpgroup's rows

// Where a CTA's share of the line begins (mha/decode_line.cuh).
struct Share {
    int request, pair, block;
    int blocks;       // that the share has
    int pair_begins;  // the team whose share has the pair's first block
};

struct Params {
    const QElement* q;      // [b, seqlen_q, heads, d_qk], or with cu_seqlens_q [total_q, heads, d_qk]
    CacheElement* k_cache;  // [blocks, tokens, KV heads, d_qk]; new tokens are written
    CacheElement* v_cache;
    u16* out;
    float* lse;
    const CacheElement* k_new;  // [b, seqlen_new, KV heads, d_qk], or with cu_seqlens_new [total_new, ...]
    const CacheElement* v_new;
    const u16* rotary_cos;  // [rotary_rows, rotary_dim / 2]; null: nothing is rotated
    const u16* rotary_sin;
    const int* cu_seqlens_q;
    const int* cache_seqlens;  // [b]; null: cu_seqlens_k, else cache_length of all
    const int* cu_seqlens_k;   // [b + 1], whose differences are lengths
    const int* cu_seqlens_new;
    const int* cache_leftpad;    // [b]; null: 0
    const int* cache_batch_idx;  // [b]: the row of the table, or without one the block; null: r
    const int* block_table;      // [table_rows, table_columns]; null: a request is a block
    const int* rotary_seqlens;   // [b]; null: tokens in the cache
    const void* attn_sink;
    const float* alibi_slopes;
    const float *q_descale, *k_descale, *v_descale;  // [b, KV heads], of an FP8 cache; null: 1
    float* states;   // scratch: reference and sum of each row of a part (mha/decode_output.cuh)
    float* o_parts;  // scratch: O of a part
    i64 cache_length;
    i64 q_stride_b, q_stride_s, q_stride_h;
    i64 k_stride_b, k_stride_s, k_stride_h;  // of the cache: block, token, head
    i64 v_stride_b, v_stride_s, v_stride_h;
    i64 k_new_stride_b, k_new_stride_s, k_new_stride_h;
    i64 v_new_stride_b, v_new_stride_s, v_new_stride_h;
    i64 out_stride_b, out_stride_s, out_stride_h;
    i64 lse_stride_b, lse_stride_h;
    i64 table_stride;
    i64 q_descale_stride_b, q_descale_stride_h, k_descale_stride_b, k_descale_stride_h;
    i64 v_descale_stride_b, v_descale_stride_h;
    int b, group;
    int team, heads_of_cta;  // CTAs of a team; KV heads of each of them, one after the other
    int group_shift;
    u32 group_magic;
    int d_qk, d_v;  // multiples of 8, of an FP8 cache of 16
    int seqlen_q, total_q, seqlen_new, total_new;
    int num_blocks, block_size, table_rows, table_columns, block_shift;
    u32 block_magic;
    int window_left, window_right;  // 0 on the right: causal
    int rotary_dim, rotary_rows, rotary_interleaved;
    int rotates_by_token;  // query i is at the position of new token i, else at the first one's
    int alibi_stride_b, sink_dtype;
    int max_tiles;      // of the longest request, as the host knows it, or CTAs for them
    int most_tokens;    // longer requests have their results from mha_forward.cu
    int is_whole;       // a CTA attends whole pairs, whatever the batch
    float scale_log2;   // of scores in base 2; with a softcap its factor after tanh
    float score_scale;  // softcap: before tanh
};

struct SharedMemoryPlan {
    alignas(1024) unsigned char k[kStages][kKTiles * Keys::kBytes];
    unsigned char v[kStages][kVTiles * Keys::kBytes];
    // Q, then O in 16 bits. In between, where warpgroups share tokens, O of warpgroup 1 as floats.
    unsigned char rows[kMathGroups][kRowChunks * Rows::kBytes];
    unsigned char p[kMathGroups][kOwnTiles * Rows::kBytes];
    // Maxima, and at the end sums; after these, where warpgroups share tokens, both of warpgroup 1.
    float of_warps[kMathGroups][4][kOwnRows];
    u64 bar_k_full[kStages], bar_k_free[kStages];
    u64 bar_v_full[kStages], bar_v_free[kStages];
    Share share;
};
