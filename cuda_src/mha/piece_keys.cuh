// Keys of a paged cache in shared memory: pieces of 16 tokens, K [d / 8][16][8] and V [d][16], as they lie
// in K [block, head, d / 8, token, 8] and V [block, head, d, token]. Both are operands of wgmma as they
// are, which is why blocks of any multiple of 16 tokens take the same path:
//
//   K   matrices of 8 tokens x 16 bytes, not swizzled. One wgmma takes the first 8 tokens of all pieces as
//       its columns, another the last 8, so that they are two apart evenly.
//   V   rows of 32 bytes, K-major, swizzled: one step of 16 keys.
//
// So column 8 c + i of product h is token 16 c + 8 h + i of the block. P of the two products is an A
// fragment of piece c as it stands: tokens 0 to 7 from product 0, tokens 8 to 15 from product 1.
#pragma once
#include "common/division.cuh"
#include "common/math.cuh"
#include "mha/cta.cuh"
#include "ptx/wgmma.cuh"

struct PieceKeys {
    static constexpr int kSpan = kPages;
    static constexpr int kPieceTokens = 16;
    static constexpr int kPieces = kTileKeys / kPieceTokens;
    static constexpr int kPieceBytesK = kDimQK * kPieceTokens * 2, kPieceBytesV = kDimV * kPieceTokens * 2;
    static constexpr int kUnits = kPieceTokens * 16;  // bytes of 8 columns of a piece of K
    static constexpr int kHalf = kTileKeys / 4;       // accumulators of one of the two products

    __device__ __forceinline__ static constexpr int column_of(int j) {
        return j % kHalf / 4 * kPieceTokens + j / kHalf * 8 + (j & 1);
    }
    __device__ __forceinline__ static u64 k_descriptor(u32 k) {
        return matrix_descriptor(k, kUnits, kPieceBytesK, 0);
    }
    __device__ __forceinline__ static u64 v_descriptor(u32 v) {
        return matrix_descriptor(v, 0, kGroupRows * 2 * kPieceTokens, 3);
    }
    __device__ __forceinline__ static void issue_qk(float (&s)[kTileKeys / 2], u64 desc_q, u64 desc_k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < kDimQK / 16; ++i) {
                const u64 a = desc_q + i / 4 * Rows::kStepTile + i % 4 * Rows::kStepK;
                const u64 b = desc_k + half * (kGroupRows * 16 >> 4) + i * (2 * kUnits >> 4);
                if (half == 0) {
                    wgmma_ss<kDtype>(wgmma_columns<0, kHalf>(s), a, b, i > 0);
                } else {
                    wgmma_ss<kDtype>(wgmma_columns<kHalf, kHalf>(s), a, b, i > 0);
                }
            }
        }
    }
    __device__ __forceinline__ static void issue_pv(float (&o)[kDimV / 2], const u32 (&p)[kTileKeys / 16][4],
                                                    u64 desc_v) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            wgmma_rs<kDtype, Major::kK>(o, p[i], desc_v + i * (kPieceBytesV >> 4), true);
    }
    __device__ __forceinline__ static void pack(const float (&s)[kTileKeys / 2],
                                                u32 (&p)[kTileKeys / 16][4]) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                p[i][j] = pack_16bit<kDtype>(s[j / 2 * kHalf + 4 * i + j % 2 * 2],
                                             s[j / 2 * kHalf + 4 * i + j % 2 * 2 + 1]);
    }

    // Byte offset of tokens 8 `half` to 8 `half` + 7 of dimension `d` in a piece of V: of rows of 32 bytes
    // the two units are swapped where bit 2 of the row is set.
    __device__ __forceinline__ static constexpr int offset_v(int d, int half) {
        return d * 2 * kPieceTokens + (half ^ (d >> 2 & 1)) * 16;
    }
};

// Where tokens of a request lie in the cache.
struct Pages {
    const void* row;   // of the block table
    KeyInterval keys;  // that the tile sees

    __device__ __forceinline__ Pages(const Params& params, const Tile& tile) {
        const int tokens = kTileRows >> params.log2_group;
        keys = tile.spans[kPages].clip(
            keys_of_tokens(params, tile, tile.first_token, tile.first_token + tokens - 1));
        const i64 entry_bytes = params.table_entry == 0 ? 4 : 8;
        row = static_cast<const char*>(params.block_table) + tile.request * params.table_stride * entry_bytes;
    }
    // The page of a token, and the token's place in it. -1: it is not in the cache.
    __device__ __forceinline__ int find(const Params& params, int token, int& offset) const {
        const int entry = divide(token, params.block_magic, params.block_shift);
        offset = token - entry * params.block_size;
        i64 page = params.table_entry == 0 ? static_cast<const int*>(row)[entry]
                                           : static_cast<const i64*>(row)[entry];
        if (params.table_entry == 2 && page > 0)
            page = divide_exactly(page - reinterpret_cast<i64>(params.k_cache), params.block_bytes_inverse,
                                  params.block_bytes_shift);
        return static_cast<u64>(page) < static_cast<u64>(params.num_blocks) ? static_cast<int>(page) : -1;
    }
};
