// Keys in pages of a cache, copied by TMA a piece at a time: mha/piece_keys.cuh. For x = 8 and pages of a
// multiple of 16 tokens, in the dtype of q. Pieces of FP8 caches are brought in the same way where x = 16, to
// be converted: mha/gathered_keys.cuh.
//
// Pieces that no query of the tile sees are asked for past the last block of the cache: TMA gives zeros, and
// neither they nor their entries of the block table are read.
#pragma once
#include "mha/piece_keys.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

struct PagedKeys : PieceKeys {
    static constexpr int kLoadedBytesK = kDimQK * kPieceTokens * kElementBytes;
    static constexpr int kLoadedBytesV = kDimV * kPieceTokens * kElementBytes;
    static constexpr int kLoadedDims = 16 / kElementBytes;  // that lie together: the x of the cache

    struct Loader {
        Pages pages;
        int head, lane;
        int page, offset;  // of the lane's piece

        __device__ __forceinline__ Loader(const Params& params, const Tile& tile)
            : pages(params, tile), head(tile.head / params.heads_per_kv), lane(lane_index()) {}
        // The latency of the block table passes while the place becomes free.
        __device__ __forceinline__ void look_up(const Params& params, int block) {
            const int first = block * kTileKeys + lane * kPieceTokens;
            page = params.num_blocks;
            offset = 0;
            if (lane < kPieces && first < pages.keys.end && first + kPieceTokens > pages.keys.begin)
                page = pages.find(params, first, offset);
        }
        __device__ __forceinline__ void load_k(const Params& params, u32 dst, u32 full) const {
            const bool elected = elect_one_sync();
            if (elected) mbarrier_arrive_expect_tx(full, kPieces * kLoadedBytesK);
#pragma unroll 1
            for (int piece = 0; piece < kPieces; ++piece) {
                const int block = __shfl_sync(0xffffffff, page, piece);
                const int token = __shfl_sync(0xffffffff, offset, piece);
                if (elected)
                    tma_load_4d<kL2EvictNormal>(dst + piece * kLoadedBytesK, &params.k_pages_map, full,
                                                kLoadedDims * token, 0, head, block);
            }
        }
        __device__ __forceinline__ void load_v(const Params& params, u32 dst, u32 full) const {
            const bool elected = elect_one_sync();
            if (elected) mbarrier_arrive_expect_tx(full, kPieces * kLoadedBytesV);
#pragma unroll 1
            for (int piece = 0; piece < kPieces; ++piece) {
                const int block = __shfl_sync(0xffffffff, page, piece);
                const int token = __shfl_sync(0xffffffff, offset, piece);
                if (elected)
                    tma_load_4d<kL2EvictNormal>(dst + piece * kLoadedBytesV, &params.v_pages_map, full, token,
                                                0, head, block);
            }
        }
    };

    // All but `rows`, in the pieces that have some of them; the others are zeros.
    template <int kThreads>
    __device__ __forceinline__ static void trim(unsigned char* v, const KeyInterval& rows, int thread) {
        trim_piece<kThreads>(v, rows, rows.begin / kPieceTokens, thread);
        trim_piece<kThreads>(v, rows, (rows.end - 1) / kPieceTokens, thread);
    }

  private:
    template <int kThreads>
    __device__ __forceinline__ static void trim_piece(unsigned char* v, const KeyInterval& rows, int piece,
                                                      int thread) {
        const int first = rows.begin - piece * kPieceTokens, end = rows.end - piece * kPieceTokens;
#pragma unroll 1
        for (int i = thread; i < kDimV * kPieceTokens; i += kThreads) {
            const int d = i / kPieceTokens, token = i % kPieceTokens;
            u16* eight = reinterpret_cast<u16*>(v + piece * kPieceBytesV + offset_v(d, token / 8));
            if (token < first || token >= end) eight[token % 8] = 0;
        }
    }
};
