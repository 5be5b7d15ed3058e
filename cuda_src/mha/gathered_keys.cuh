// Keys in pages of a cache that TMA cannot bring into place, because they are in FP8 or lie in another
// layout: a warpgroup makes the pieces of mha/piece_keys.cuh of them. K [block, head, d / x, token, x],
// V [block, head, d, token] or, interleaved, [block, head, token / y, d, y].
//
// FP8: a block's bytes lie in shared memory first (`raw_k`, `raw_v`), and are converted from there while
// those of the next block come. TMA brings them where it can (`cache_by_tma`), else the threads do. Raw
// pieces are K [d / 16][16 tokens][16] and V [d][16 tokens].
// In the dtype of q, the threads copy them to their place.
#pragma once
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "mha/array_keys.cuh"
#include "mha/piece_keys.cuh"
#include "mha/trim.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

struct Gatherer {
    static_assert(!kPagesGathered || kDimQK == kDimV);
    static constexpr int kDim = kDimV;
    static constexpr int kPieceTokens = PieceKeys::kPieceTokens;

    ValueTrimmer<128> trimmer;
    Stage stage;
    u32 raw_blocks = 0;  // of FP8, so far
    const int thread = threadIdx.x % 128;

    // All threads of the warpgroup call.
    __device__ __forceinline__ void run(const Params& params, SharedMemoryPlan& smem) {
        for (TileReader reader;; ++reader.count) {
            const Tile& tile = reader.next(smem);
            if (tile.request < 0) break;
            // The gatherer trims V of the arrays too: racecheck sees a conflict where two roles write V and
            // only the consumers' barriers stand between them.
            trimmer.trim<ArrayKeys>(params, smem, tile);
            trimmer.loads += tile.spans[kPages].blocks();
            stage.number += tile.spans[kArrays].blocks();
            smem.turns_k.wait_for_gatherer(reader.count);
            smem.turns_v.wait_for_gatherer(reader.count);
            if constexpr (kCacheIsFp8) {
                convert_span(params, smem, tile);
            } else {
                copy_span(params, smem, tile);
            }
            named_barrier_sync(NB_GATHER, 128);  // no warp still waits for its turn
            if (thread == 0) {
                smem.turns_k.pass_to_loader();
                smem.turns_v.pass_to_loader();
            }
            reader.release();
        }
    }

  private:
    __device__ __forceinline__ void convert_span(const Params& params, SharedMemoryPlan& smem,
                                                 const Tile& tile) {
        const Copier copier(params, tile, thread);
        const int first_block = tile.spans[kPages].first_block;
        int block = tile.spans[kPages].end_block - 1;
        if (block < first_block) return;
        Place place;
        if (!params.cache_by_tma) {
            place = copier.find(params, block);
            copier.copy_k(params, place, smem.raw_k);
            copier.copy_v(params, place, smem.raw_v);
        }
#pragma unroll 1
        for (; block >= first_block; --block) {
            const u32 index = stage.index();
            const bool copies = !params.cache_by_tma && block > first_block;
            if (copies) place = copier.find(params, block - 1);
            wait_for_raw(params, smem.bar_raw_k_full);
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[index]), stage.free_parity());
            convert_k(smem.raw_k, smem.k[index]);
            hand_over(smem.bar_k_full[index]);
            free_raw(params, smem.bar_raw_k_free);
            if (copies) copier.copy_k(params, place, smem.raw_k);

            wait_for_raw(params, smem.bar_raw_v_full);
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[index]), stage.free_parity());
            convert_v(smem.raw_v, copier.pages.keys, block, smem.v[index]);
            hand_over(smem.bar_v_full[index]);
            free_raw(params, smem.bar_raw_v_free);
            if (copies) copier.copy_v(params, place, smem.raw_v);
            ++raw_blocks;
            ++stage.number;
        }
    }
    __device__ __forceinline__ void wait_for_raw(const Params& params, u64& full) const {
        if (params.cache_by_tma) {
            mbarrier_wait_parity(smem_address(&full), raw_blocks & 1);
        } else {
            cp_async_wait_all();
            named_barrier_sync(NB_GATHER, 128);
        }
    }
    // Behind hand_over: all threads have read.
    __device__ __forceinline__ void free_raw(const Params& params, u64& free) const {
        if (params.cache_by_tma && thread == 0) mbarrier_arrive(smem_address(&free));
    }
    __device__ __forceinline__ void hand_over(u64& full) const {
        fence_proxy_async();
        named_barrier_sync(NB_GATHER, 128);
        if (thread == 0) mbarrier_arrive(smem_address(&full));
    }

    // K: a token for each thread.
    __device__ __forceinline__ void convert_k(const unsigned char* raw, unsigned char* k) const {
        if (thread >= kTileKeys) return;
        const int piece = thread / kPieceTokens, token = thread % kPieceTokens;
        const uint4* src = reinterpret_cast<const uint4*>(raw + piece * kDim * kPieceTokens) + token;
        uint4* dst = reinterpret_cast<uint4*>(k + piece * PieceKeys::kPieceBytesK) + token;
#pragma unroll 4
        for (int i = 0; i < kDim / 16; ++i) {
            const uint4 codes = src[i * kPieceTokens];
            dst[(2 * i) * kPieceTokens] = convert(codes.x, codes.y);
            dst[(2 * i + 1) * kPieceTokens] = convert(codes.z, codes.w);
        }
    }
    // V: every sixteenth dimension of a piece for each thread.
    __device__ __forceinline__ void convert_v(const unsigned char* raw, const KeyInterval& keys, int block,
                                              unsigned char* v) const {
        const int piece = thread / 16, first_dim = thread % 16;
        if (piece >= PieceKeys::kPieces) return;
        const uint4 kept = kept_tokens(keys, block * kTileKeys + piece * kPieceTokens);
        const uint4* src = reinterpret_cast<const uint4*>(raw + piece * kDim * kPieceTokens) + first_dim;
        unsigned char* dst = v + piece * PieceKeys::kPieceBytesV;
#pragma unroll 4
        for (int i = 0; i < kDim / 16; ++i) {
            const uint4 codes = src[16 * i];
            const int d = 16 * i + first_dim;
            *reinterpret_cast<uint4*>(dst + PieceKeys::offset_v(d, 0)) =
                convert(codes.x & kept.x, codes.y & kept.y);
            *reinterpret_cast<uint4*>(dst + PieceKeys::offset_v(d, 1)) =
                convert(codes.z & kept.z, codes.w & kept.w);
        }
    }
    // Eight numbers, in the dtype of q, exactly: FP8 numbers are numbers of both 16-bit types.
    __device__ __forceinline__ static uint4 convert(u32 first, u32 second) {
        u32 pairs[4];
        if constexpr (kCacheType == CacheType::kE4m3) {
            e4m3_to_f16(first, pairs[0], pairs[1]);
            e4m3_to_f16(second, pairs[2], pairs[3]);
        } else {
            e5m2_to_f16(first, pairs[0], pairs[1]);
            e5m2_to_f16(second, pairs[2], pairs[3]);
        }
        if constexpr (kDtype == Dtype::kBf16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_f16(pairs[i]);
                pairs[i] = pack_16bit<kDtype>(pair.x, pair.y);
            }
        }
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    // Ones in the bytes of those of 16 tokens that are in the interval.
    __device__ __forceinline__ static uint4 kept_tokens(const KeyInterval& keys, int first) {
        u32 words[4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i)
            words[i / 4] |= first + i >= keys.begin && first + i < keys.end ? 0xffu << 8 * (i % 4) : 0u;
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ __forceinline__ void copy_span(const Params& params, SharedMemoryPlan& smem,
                                              const Tile& tile) {
        const Copier copier(params, tile, thread);
        const int first_block = tile.spans[kPages].first_block;
#pragma unroll 1
        for (int block = tile.spans[kPages].end_block - 1; block >= first_block; --block) {
            const u32 index = stage.index();
            const Place place = copier.find(params, block);
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[index]), stage.free_parity());
            copier.copy_k(params, place, smem.k[index]);
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[index]), stage.free_parity());
            copier.copy_v(params, place, smem.v[index]);
            cp_async_wait_all();
            copier.clear_unseen(block, smem.v[index]);
            hand_over(smem.bar_k_full[index]);
            hand_over(smem.bar_v_full[index]);
            ++stage.number;
        }
    }

    // Where tokens lie.
    struct Place {
        int page = -1, offset = 0;

        // By a query of the tile. Nothing else is read, but for the rest of a unit of eight tokens.
        __device__ __forceinline__ bool is_seen() const { return page >= 0; }
    };

    // Copies blocks as they are, each thread its part: in units of eight elements where they lie together,
    // else element by element.
    struct Copier {
        const Pages pages;
        const int head, thread;
        const bool in_units;

        __device__ __forceinline__ Copier(const Params& params, const Tile& tile, int thread)
            : pages(params, tile),
              head(tile.head / params.heads_per_kv),
              thread(thread),
              in_units(params.x % 8 == 0 && params.block_size % 8 == 0 && params.v_pack % 8 == 0) {}

        // Of the thread's token, or, for units, of the first of its eight, which lie in one page.
        __device__ __forceinline__ Place find(const Params& params, int block) const {
            Place place;
            const int tokens = in_units ? 8 : 1, token = block * kTileKeys + thread / tokens * tokens;
            if (thread < kTileKeys && token + tokens > pages.keys.begin && token < pages.keys.end)
                place.page = pages.find(params, token, place.offset);
            return place;
        }
        // K: a token for each thread.
        __device__ __forceinline__ void copy_k(const Params& params, const Place& place,
                                               unsigned char* k) const {
            if (thread >= kTileKeys) return;
            const unsigned char* src = static_cast<const unsigned char*>(params.k_cache);
            if (place.is_seen())
                src += (place.page * params.k_stride_block + head * params.k_stride_head +
                        static_cast<i64>(place.offset + (in_units ? thread % 8 : 0)) * params.x) *
                       kElementBytes;
            const int step = in_units ? 8 : 1;
            int in_group = 0;  // dimension, of the x that lie together
#pragma unroll 1
            for (int d = 0; d < kDim; d += step) {
                copy(k + offset_k(d), src + in_group * kElementBytes, place.is_seen() && d < params.d_v);
                in_group += step;
                if (in_group == params.x) {
                    in_group = 0;
                    src += static_cast<i64>(params.block_size) * params.x * kElementBytes;
                }
            }
        }
        // V: a token for each thread, or eight and every eighth dimension.
        __device__ __forceinline__ void copy_v(const Params& params, const Place& place,
                                               unsigned char* v) const {
            if (thread >= kTileKeys) return;
            const unsigned char* src = static_cast<const unsigned char*>(params.v_cache);
            const int step = in_units ? 8 : 1;
            int d = in_units ? thread % 8 : 0;
            const i64 dim_elements = params.v_pack == 0 ? params.block_size : params.v_pack;
            if (place.is_seen()) {
                i64 element = place.page * params.v_stride_block + head * params.v_stride_head + place.offset;
                if (params.v_pack != 0)
                    element +=
                        static_cast<i64>(place.offset - place.offset % params.v_pack) * (params.d_v - 1);
                src += (element + d * dim_elements) * kElementBytes;
            }
#pragma unroll 1
            for (; d < kDim; d += step) {
                copy(v + offset_v(d), src, place.is_seen() && d < params.d_v);
                src += step * dim_elements * kElementBytes;
            }
        }
        // Of what the thread has copied to V, the tokens of a unit that no query of the tile sees.
        __device__ __forceinline__ void clear_unseen(int block, unsigned char* v) const {
            const int first = block * kTileKeys + thread / 8 * 8;
            if (!in_units || thread >= kTileKeys ||
                (first >= pages.keys.begin && first + 8 <= pages.keys.end))
                return;
#pragma unroll 1
            for (int d = thread % 8; d < kDim; d += 8) {
                u16* unit = reinterpret_cast<u16*>(v + offset_v(d));
                for (int i = 0; i < 8; ++i)
                    if (first + i < pages.keys.begin || first + i >= pages.keys.end) unit[i] = 0;
            }
        }

      private:
        // Bytes from the beginning of the block, raw or in place.
        __device__ __forceinline__ int offset_k(int d) const {
            constexpr int kTogether = 16 / kElementBytes;
            return thread / kPieceTokens * (kDim * kPieceTokens * kElementBytes) +
                   d / kTogether * (kPieceTokens * 16) + thread % kPieceTokens * 16 +
                   d % kTogether * kElementBytes;
        }
        __device__ __forceinline__ int offset_v(int d) const {
            const int piece = thread / kPieceTokens * (kDim * kPieceTokens * kElementBytes);
            const int token = in_units ? 0 : thread % 8 * kElementBytes;
            if constexpr (kCacheIsFp8) return piece + d * kPieceTokens + thread / 8 % 2 * 8 + token;
            return piece + PieceKeys::offset_v(d, thread / 8 % 2) + token;
        }
        __device__ __forceinline__ void copy(unsigned char* dst, const unsigned char* src, bool reads) const {
            if (!in_units) {
                if constexpr (kCacheIsFp8) {
                    *dst = reads ? *src : 0;
                } else {
                    *reinterpret_cast<u16*>(dst) = reads ? *reinterpret_cast<const u16*>(src) : 0;
                }
            } else if constexpr (kCacheIsFp8) {
                cp_async_8_or_zeros(smem_address(dst), src, reads);
            } else {
                cp_async_16_or_zeros(smem_address(dst), src, reads);
            }
        }
    };
};
