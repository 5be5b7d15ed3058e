// Keys in pages of a cache of any layout or in FP8, which a warpgroup reads, converts and stores as pieces:
// mha/piece_keys.cuh. K [block, head, d / x, token, x], V [block, head, d, token] or, interleaved,
// [block, head, token / y, d, y].
#pragma once
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "mha/piece_keys.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

struct GatheredKeys : PieceKeys {};

struct Gatherer {
    // A unit: eight elements of the cache as they are read.
    struct __align__(8 * kElementBytes) Raw {
        u32 words[2 * kElementBytes];
    };
    static_assert(!kPagesGathered || kDimQK == kDimV);
    static constexpr int kUnits = kDimV / 8;  // that a thread reads of a block of K, or of V

    Stage stage;
    const int thread = threadIdx.x % 128;

    // All threads of the warpgroup call.
    __device__ __forceinline__ void run(const Params& params, SharedMemoryPlan& smem) {
        for (TileReader reader;; ++reader.count) {
            const Tile& tile = reader.next(smem);
            if (tile.request < 0) break;
            stage.number += tile.spans[kArrays].blocks();
            if (params.x % 8 == 0 && params.block_size % 8 == 0 && params.v_pack % 8 == 0) {
                gather_span(params, smem, tile, reader.count);
            } else {
                collect_span(params, smem, tile, reader.count);
            }
            named_barrier_sync(NB_GATHER, 128);
            if (thread == 0) {
                smem.turns_k.pass_to_loader();
                smem.turns_v.pass_to_loader();
                reader.release(smem);
            }
        }
    }

  private:
    // Where tokens lie.
    struct Place {
        int page = -1, offset = 0;

        // By a query of the tile; nothing else is read.
        __device__ __forceinline__ bool is_seen() const { return page >= 0; }
    };

    // For layouts in which eight elements lie together. Units of the next block are copied to shared memory while
    // those of this one are converted; each thread converts what it has copied itself.
    __device__ __forceinline__ void gather_span(const Params& params, SharedMemoryPlan& smem,
                                                const Tile& tile, u32 tile_number) {
        const Pages pages(params, tile);
        const int head = tile.head / params.heads_per_kv;
        const int first_block = tile.spans[kPages].first_block;
        const int eight = thread / 8;
        int block = tile.spans[kPages].end_block - 1;
        // Of the thread's eight tokens, which lie in one page.
        auto find_eight = [&](int block) {
            return find(params, pages, block * kTileKeys + 8 * eight, 8, block >= first_block);
        };
        Place place = find_eight(block);
        copy_k(params, place, head, smem);
        copy_v(params, place, head, smem);
        smem.turns_k.wait_for_gatherer(tile_number);
        smem.turns_v.wait_for_gatherer(tile_number);
#pragma unroll 1
        for (; block >= first_block; --block) {
            const u32 index = stage.index();
            place = find_eight(block - 1);
            cp_async_wait_group<1>();
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[index]), stage.free_parity());
            convert_k(smem, smem.k[index]);
            hand_over(smem.bar_k_full[index]);
            copy_k(params, place, head, smem);
            cp_async_wait_group<1>();
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[index]), stage.free_parity());
            convert_v(smem, kept_tokens(pages.keys, block * kTileKeys + 8 * eight), smem.v[index]);
            hand_over(smem.bar_v_full[index]);
            copy_v(params, place, head, smem);
            ++stage.number;
        }
        cp_async_wait_group<0>();
    }
    // K: a token for each thread.
    __device__ __forceinline__ void copy_k(const Params& params, const Place& place, int head,
                                           SharedMemoryPlan& smem) const {
        const unsigned char* src = static_cast<const unsigned char*>(params.k_cache);
        if (place.is_seen())
            src += (place.page * params.k_stride_block + head * params.k_stride_head +
                    (place.offset + thread % 8) * params.x) *
                   kElementBytes;
        int in_group = 0;  // dimension, of the x that lie together
#pragma unroll 4
        for (int unit = 0; unit < kUnits; ++unit) {
            copy(smem.raw_k, unit, src + in_group * kElementBytes, place.is_seen() && 8 * unit < params.d_v);
            in_group += 8;
            if (in_group == params.x) {
                in_group = 0;
                src += params.block_size * params.x * kElementBytes;
            }
        }
        cp_async_commit_group();
    }
    // V: eight tokens and every eighth dimension for each thread.
    __device__ __forceinline__ void copy_v(const Params& params, const Place& place, int head,
                                           SharedMemoryPlan& smem) const {
        const int first_dim = thread % 8;
        const unsigned char* src = static_cast<const unsigned char*>(params.v_cache);
        if (place.is_seen())
            src += (first_value(params, place, head) + first_dim * step(params)) * kElementBytes;
#pragma unroll 4
        for (int unit = 0; unit < kUnits; ++unit)
            copy(smem.raw_v, unit, src + 8 * unit * step(params) * kElementBytes,
                 place.is_seen() && 8 * unit + first_dim < params.d_v);
        cp_async_commit_group();
    }
    __device__ __forceinline__ void copy(unsigned char* raw, int unit, const unsigned char* src,
                                         bool reads) const {
        if (thread >= kTileKeys) return;
        const u32 dst = smem_address(raw) + (unit * kTileKeys + thread) * sizeof(Raw);
        if constexpr (kCacheIsFp8) {
            cp_async_8_or_zeros(dst, src, reads);
        } else {
            cp_async_16_or_zeros(dst, src, reads);
        }
    }
    __device__ __forceinline__ void convert_k(const SharedMemoryPlan& smem, unsigned char* k) const {
        if (thread >= kTileKeys) return;
        const Raw* raw = reinterpret_cast<const Raw*>(smem.raw_k) + thread;
        unsigned char* dst = k + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesK +
                             thread % PieceKeys::kPieceTokens * 16;
#pragma unroll 4
        for (int unit = 0; unit < kUnits; ++unit)
            *reinterpret_cast<uint4*>(dst + unit * PieceKeys::kUnits) = convert(raw[unit * kTileKeys]);
    }
    __device__ __forceinline__ void convert_v(const SharedMemoryPlan& smem, const Raw& kept,
                                              unsigned char* v) const {
        if (thread >= kTileKeys) return;
        const Raw* src = reinterpret_cast<const Raw*>(smem.raw_v) + thread;
        const int eight = thread / 8;
        unsigned char* dst = v + eight / 2 * PieceKeys::kPieceBytesV;
#pragma unroll 4
        for (int unit = 0; unit < kUnits; ++unit) {
            Raw raw = src[unit * kTileKeys];
#pragma unroll
            for (int i = 0; i < 2 * kElementBytes; ++i) raw.words[i] &= kept.words[i];
            *reinterpret_cast<uint4*>(dst + PieceKeys::offset_v(8 * unit + thread % 8, eight % 2)) =
                convert(raw);
        }
    }
    // Elements of V from one dimension to the next.
    __device__ __forceinline__ static int step(const Params& params) {
        return params.v_pack == 0 ? params.block_size : params.v_pack;
    }
    // The element of V with dimension 0 of a token.
    __device__ __forceinline__ static i64 first_value(const Params& params, const Place& place, int head) {
        const i64 element = place.page * params.v_stride_block + head * params.v_stride_head + place.offset;
        if (params.v_pack == 0) return element;
        return element + static_cast<i64>(place.offset - place.offset % params.v_pack) * (params.d_v - 1);
    }

    // The same element by element, for other layouts.
    __device__ __forceinline__ void collect_span(const Params& params, SharedMemoryPlan& smem,
                                                 const Tile& tile, u32 tile_number) {
        const Pages pages(params, tile);
        const int head = tile.head / params.heads_per_kv;
        const int first_block = tile.spans[kPages].first_block;
        smem.turns_k.wait_for_gatherer(tile_number);
        smem.turns_v.wait_for_gatherer(tile_number);
#pragma unroll 1
        for (int block = tile.spans[kPages].end_block - 1; block >= first_block; --block) {
            const u32 index = stage.index();
            const Place place = find(params, pages, block * kTileKeys + thread, 1, thread < kTileKeys);
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[index]), stage.free_parity());
            if (thread < kTileKeys) collect_k(params, place, head, smem.k[index]);
            hand_over(smem.bar_k_full[index]);
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[index]), stage.free_parity());
            if (thread < kTileKeys) collect_v(params, place, head, smem.v[index]);
            hand_over(smem.bar_v_full[index]);
            ++stage.number;
        }
    }
    __device__ __forceinline__ void hand_over(u64& full) const {
        fence_proxy_async();
        named_barrier_sync(NB_GATHER, 128);
        if (thread == 0) mbarrier_arrive(smem_address(&full));
    }
    // Of `tokens` tokens, which lie in one page.
    __device__ __forceinline__ static Place find(const Params& params, const Pages& pages, int token,
                                                 int tokens, bool wanted) {
        Place place;
        if (wanted && token + tokens > pages.keys.begin && token < pages.keys.end)
            place.page = pages.find(params, token, place.offset);
        return place;
    }

    __device__ __forceinline__ void collect_k(const Params& params, const Place& place, int head,
                                              unsigned char* k) const {
        u16* dst = reinterpret_cast<u16*>(k + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesK +
                                          thread % PieceKeys::kPieceTokens * 16);
        const i64 first = place.page * params.k_stride_block + head * params.k_stride_head;
#pragma unroll 1
        for (int d = 0; d < kDimQK; ++d) {
            const i64 element =
                static_cast<i64>(d / params.x * params.block_size + place.offset) * params.x + d % params.x;
            dst[d / 8 * (PieceKeys::kUnits / 2) + d % 8] =
                read_one(params.k_cache, first + element, place.is_seen() && d < params.d_v);
        }
    }
    __device__ __forceinline__ void collect_v(const Params& params, const Place& place, int head,
                                              unsigned char* v) const {
        const i64 first = first_value(params, place, head);
        unsigned char* dst = v + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesV + thread % 8 * 2;
#pragma unroll 1
        for (int d = 0; d < kDimV; ++d)
            *reinterpret_cast<u16*>(dst + PieceKeys::offset_v(d, thread / 8 % 2)) =
                read_one(params.v_cache, first + d * step(params), place.is_seen() && d < params.d_v);
    }

    // In the dtype of q, exactly: FP8 numbers are numbers of both 16-bit types.
    __device__ __forceinline__ static uint4 convert(const Raw& raw) {
        if constexpr (!kCacheIsFp8) {
            return make_uint4(raw.words[0], raw.words[1], raw.words[2], raw.words[3]);
        } else {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (kCacheType == CacheType::kE4m3) {
                    e4m3_to_f16(raw.words[i], pairs[2 * i], pairs[2 * i + 1]);
                } else {
                    e5m2_to_f16(raw.words[i], pairs[2 * i], pairs[2 * i + 1]);
                }
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
    }
    __device__ __forceinline__ static u16 read_one(const void* cache, i64 element, bool enabled) {
        if (!enabled) return 0;
        if constexpr (!kCacheIsFp8) {
            return static_cast<const u16*>(cache)[element];
        } else {
            Raw raw{{static_cast<const unsigned char*>(cache)[element], 0}};
            return static_cast<u16>(convert(raw).x);
        }
    }
    // Ones for the tokens from `first` on, of eight, that are in the interval.
    __device__ __forceinline__ static Raw kept_tokens(const KeyInterval& keys, int first) {
        constexpr int kBits = 8 * kElementBytes;
        Raw kept = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 ones = first + i >= keys.begin && first + i < keys.end ? (1u << kBits) - 1 : 0;
            kept.words[i * kBits / 32] |= ones << i * kBits % 32;
        }
        return kept;
    }
};
