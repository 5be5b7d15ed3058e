// Keys in a cache whose tokens are rows, [block, token, head, column] (FlashAttention's layout), copied by
// TMA in boxes of PAGE_ROWS tokens, which a block of the cache has whole: 16, or all keys of a tile's block.
//
// Boxes past a request's last key are asked for past the last block of the cache: TMA gives zeros, and
// neither they nor their entries of the block table are read.
#pragma once
#include "common/division.cuh"
#include "mha/array_keys.cuh"
#include "mha/piece_keys.cuh"

constexpr int kBoxes = kTileKeys / PAGE_ROWS;
static_assert(kTileKeys % PAGE_ROWS == 0 && kBoxes <= 32, "a lane looks up a box");

// Where the boxes of a tile's block lie in the cache: each lane has one.
struct RowBoxes {
    int row;  // of the block table, or without one the block
    int head;
    int length;        // of the keys
    int block, token;  // of the lane's box

    __device__ __forceinline__ RowBoxes(const Params& params, const Tile& tile)
        : row(tile.request), head(tile.head / params.heads_per_kv), length(tile.k_len) {
        if (params.cache_batch_idx != nullptr) row = params.cache_batch_idx[tile.request];
    }
    // The latency of the block table passes while the place becomes free.
    __device__ __forceinline__ void look_up(const Params& params, int tile_block) {
        const int lane = lane_index();
        const int first = tile_block * kTileKeys + lane * PAGE_ROWS;
        block = params.num_blocks;
        token = first;
        if (lane >= kBoxes || first >= length) return;
        int found = row;
        if (params.block_table != nullptr) {
            if (row < 0 || row >= params.table_rows) return;
            const int column = divide(first, params.block_magic, params.block_shift);
            token = first - column * params.block_size;
            found = static_cast<const int*>(params.block_table)[row * params.table_stride + column];
        }
        if (found >= 0 && found < params.num_blocks) block = found;
    }
};

// Boxes of 64 columns. In shared memory they lie as keys of arrays do.
struct RowPages : ArrayKeys {
    struct Loader : RowBoxes {
        using RowBoxes::RowBoxes;
        __device__ __forceinline__ void load_k(const Params& params, u32 dst, u32 full) const {
            load<kChunksQK>(&params.k_map, dst, full);
        }
        __device__ __forceinline__ void load_v(const Params& params, u32 dst, u32 full) const {
            load<kChunksV>(&params.v_map, dst, full);
        }

      private:
        template <int kChunks>
        __device__ __forceinline__ void load(const TensorMap* map, u32 dst, u32 full) const {
            const int box = lane_index();
            if (box == 0) mbarrier_arrive_expect_tx(full, kChunks * KeyRows::kBytes);
            __syncwarp();
            if (box >= kBoxes) return;
            dst += box * PAGE_ROWS * KeyRows::kRowBytes;
#pragma unroll 1
            for (int chunk = 0; chunk < kChunks; ++chunk)
                tma_load_4d<kL2EvictNormal>(dst + chunk * KeyRows::kBytes, map, full, 64 * chunk, token, head,
                                            block);
        }
    };
};

// Boxes of 16 tokens and all columns, of which there are multiples of 64: TMA is slow with smaller ones. In
// shared memory such a piece has its tiles of 64 columns one after the other. So its groups of eight tokens
// are columns of two products, as in mha/piece_keys.cuh.
struct RowPieces : PieceKeys {
    static constexpr int kSpan = kArrays;
    static constexpr bool kHasLists = false;
    using Piece = SwizzledTile<kPieceTokens>;

    struct Loader : RowBoxes {
        using RowBoxes::RowBoxes;
        __device__ __forceinline__ void load_k(const Params& params, u32 dst, u32 full) const {
            load<kPieceBytesK>(&params.k_map, dst, full);
        }
        __device__ __forceinline__ void load_v(const Params& params, u32 dst, u32 full) const {
            load<kPieceBytesV>(&params.v_map, dst, full);
        }

      private:
        template <int kBytes>
        __device__ __forceinline__ void load(const TensorMap* map, u32 dst, u32 full) const {
            const bool elected = elect_one_sync();
            if (elected) mbarrier_arrive_expect_tx(full, kPieces * kBytes);
#pragma unroll 1
            for (int piece = 0; piece < kPieces; ++piece) {
                const int of_cache = __shfl_sync(0xffffffff, block, piece);
                const int first = __shfl_sync(0xffffffff, token, piece);
                if (elected)
                    tma_load_5d<kL2EvictNormal>(dst + piece * kBytes, map, full, 0, first, 0, head, of_cache);
            }
        }
    };

    __device__ __forceinline__ static u64 k_descriptor(u32 k) {
        return matrix_descriptor(k, 0, kPieceBytesK, Piece::kSwizzle);
    }
    __device__ __forceinline__ static u64 v_descriptor(u32 v) { return Piece::mn_major(v); }
    __device__ __forceinline__ static void issue_qk(float (&s)[kTileKeys / 2], u64 desc_q, u64 desc_k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < kDimQK / 16; ++i) {
                const u64 a = desc_q + i / 4 * Rows::kStepTile + i % 4 * Rows::kStepK;
                const u64 b = desc_k + half * (Piece::kGroupBytes >> 4) + i / 4 * Piece::kStepTile +
                              i % 4 * Piece::kStepK;
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
            wgmma_rs<kDtype, Major::kMn>(o, p[i], desc_v + i * (kPieceBytesV >> 4), true);
    }
    // All but `rows`.
    template <int kThreads>
    __device__ __forceinline__ static void trim(unsigned char* v, const KeyInterval& rows, int thread) {
        constexpr int kRowUnits = kDimV / 8;
#pragma unroll 1
        for (int i = thread; i < kTileKeys * kRowUnits; i += kThreads) {
            const int row = i / kRowUnits, unit = i % kRowUnits;
            if (row >= rows.begin && row < rows.end) continue;
            unsigned char* piece = v + row / kPieceTokens * kPieceBytesV + unit / 8 * Piece::kBytes;
            const u32 offset = row % kPieceTokens * Piece::kRowBytes + unit % 8 * 16;
            *reinterpret_cast<uint4*>(piece + offset) = make_uint4(0, 0, 0, 0);
        }
    }
};
