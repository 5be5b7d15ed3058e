// Keys in pages of a cache: K [block, head, d / 8, token, 8], V [block, head, d, token]. Both are operands of
// wgmma as they lie, 16 tokens (a piece) at a time, which is why blocks of any multiple of 16 tokens take the
// same path:
//
//   K   [d / 8][16 tokens][8] of a piece: matrices of 8 tokens x 16 bytes, not swizzled. One wgmma takes the
//       first 8 tokens of all pieces as its columns, another the last 8, so that they are two apart evenly.
//   V   [d][16 tokens] of a piece: rows of 32 bytes, K-major, one step of 16 keys.
//
// So column 8 c + i of product h is token 16 c + 8 h + i of the block. P of the two products is an A fragment of
// piece c as it stands: tokens 0 to 7 from product 0, tokens 8 to 15 from product 1.
//
// Pieces that no query of the tile sees are asked for past the last block of the cache: TMA gives zeros, and
// neither they nor their entries of the block table are read.
#pragma once
#include "attention/lazy_softmax.cuh"
#include "common/division.cuh"
#include "mha/cta.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

struct PagedKeys {
    static constexpr int kSpan = kPages;
    static constexpr int kPieceTokens = 16;
    static constexpr int kPieces = kTileKeys / kPieceTokens;
    static constexpr int kPieceBytesK = kDimQK * kPieceTokens * 2, kPieceBytesV = kDimV * kPieceTokens * 2;
    static constexpr int kUnits = kPieceTokens * 16;  // bytes of 8 columns of a piece of K
    static constexpr int kHalf = kTileKeys / 4;  // accumulators of one of the two products

    __device__ __forceinline__ static constexpr int column_of(int j) {
        return j % kHalf / 4 * kPieceTokens + j / kHalf * 8 + (j & 1);
    }

    struct Loader {
        int head, lane;
        KeyInterval keys;  // that the tile sees
        const void* row;   // of the block table
        int page, offset;  // of the lane's piece

        __device__ __forceinline__ Loader(const Params& params, const Tile& tile)
            : head(tile.head / params.heads_per_kv), lane(lane_index()) {
            const int tokens = kTileRows >> params.log2_group;
            keys = tile.spans[kSpan].clip(
                keys_of_tokens(params, tile, tile.first_token, tile.first_token + tokens - 1));
            const i64 entry_bytes = params.table_entry == 0 ? 4 : 8;
            row = static_cast<const char*>(params.block_table) +
                  tile.request * params.table_stride * entry_bytes;
        }
        // The block table's entry of the lane's piece. Its latency passes while the place becomes free.
        __device__ __forceinline__ void look_up(const Params& params, int block) {
            const int first = block * kTileKeys + lane * kPieceTokens;
            page = params.num_blocks;
            offset = 0;
            if (lane < kPieces && first < keys.end && first + kPieceTokens > keys.begin) {
                const int entry = divide(first, params.block_magic, params.block_shift);
                offset = first - entry * params.block_size;
                if (params.table_entry == 0) {
                    page = static_cast<const int*>(row)[entry];
                } else {
                    const i64 value = static_cast<const i64*>(row)[entry];
                    const i64 start = reinterpret_cast<i64>(params.k_cache);
                    page = static_cast<int>(params.table_entry == 1 || value <= 0
                                                ? value
                                                : (value - start) / params.block_bytes);
                }
            }
        }
        __device__ __forceinline__ void load_k(const Params& params, u32 dst, u32 full) const {
            const bool elected = elect_one_sync();
            if (elected) mbarrier_arrive_expect_tx(full, kPieces * kPieceBytesK);
#pragma unroll 1
            for (int piece = 0; piece < kPieces; ++piece) {
                const int block = __shfl_sync(0xffffffff, page, piece);
                const int token = __shfl_sync(0xffffffff, offset, piece);
                if (elected)
                    tma_load_4d<kL2EvictNormal>(dst + piece * kPieceBytesK, &params.k_pages_map, full,
                                                8 * token, 0, head, block);
            }
        }
        __device__ __forceinline__ void load_v(const Params& params, u32 dst, u32 full) const {
            const bool elected = elect_one_sync();
            if (elected) mbarrier_arrive_expect_tx(full, kPieces * kPieceBytesV);
#pragma unroll 1
            for (int piece = 0; piece < kPieces; ++piece) {
                const int block = __shfl_sync(0xffffffff, page, piece);
                const int token = __shfl_sync(0xffffffff, offset, piece);
                if (elected)
                    tma_load_4d<kL2EvictNormal>(dst + piece * kPieceBytesV, &params.v_pages_map, full, token,
                                                0, head, block);
            }
        }
    };

    __device__ __forceinline__ static u64 k_descriptor(u32 k) { return matrix_descriptor(k, kUnits, kPieceBytesK, 0); }
    __device__ __forceinline__ static u64 v_descriptor(u32 v) { return matrix_descriptor(v, 0, kGroupRows * 2 * kPieceTokens, 3); }
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
    __device__ __forceinline__ static void pack(const float (&s)[kTileKeys / 2], u32 (&p)[kTileKeys / 16][4]) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                p[i][j] = pack_16bit<kDtype>(s[j / 2 * kHalf + 4 * i + j % 2 * 2],
                                             s[j / 2 * kHalf + 4 * i + j % 2 * 2 + 1]);
    }
    // All but `rows`, in the pieces that have some of them; the others are zeros.
    __device__ __forceinline__ static void trim(unsigned char* v, const KeyInterval& rows, int lane) {
        trim_piece(v, rows, rows.begin / kPieceTokens, lane);
        trim_piece(v, rows, (rows.end - 1) / kPieceTokens, lane);
    }

  private:
    __device__ __forceinline__ static void trim_piece(unsigned char* v, const KeyInterval& rows, int piece,
                                                      int lane) {
        const int first = rows.begin - piece * kPieceTokens, end = rows.end - piece * kPieceTokens;
#pragma unroll 1
        for (int i = lane; i < kDimV * kPieceTokens; i += 32) {
            const int d = i / kPieceTokens, token = i % kPieceTokens;
            // Of rows of 32 bytes the two units are swapped where bit 2 of the row is set.
            const int unit = token / 8 ^ (d >> 2 & 1);
            u16* row = reinterpret_cast<u16*>(v + piece * kPieceBytesV + d * 2 * kPieceTokens);
            if (token < first || token >= end) row[unit * 8 + token % 8] = 0;
        }
    }
};
