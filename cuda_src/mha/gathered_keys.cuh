// Keys in pages of a cache of any layout or in FP8, which a warpgroup reads, converts and stores as pieces:
// mha/piece_keys.cuh. K [block, head, d / x, token, x], V [block, head, d, token] or, interleaved,
// [block, head, token / y, d, y].
#pragma once
#include "common/fp8.cuh"
#include "common/math.cuh"
#include "mha/piece_keys.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

enum class CacheType : int { kSame = 0, kE4m3 = 1, kE5m2 = 2 };
constexpr CacheType kCacheType = static_cast<CacheType>(CACHE_TYPE);
constexpr bool kCacheIsFp8 = kCacheType != CacheType::kSame;
constexpr int kElementBytes = kCacheIsFp8 ? 1 : 2;

struct GatheredKeys : PieceKeys {};

// Of those up to `most`.
__device__ constexpr int largest_divisor(int n, int most) { return n % most == 0 ? most : largest_divisor(n, most - 1); }

struct Gatherer {
    // A unit: eight elements of the cache as they are read.
    struct Raw {
        u32 words[2 * kElementBytes];
    };
    static_assert(!kPagesGathered || kDimQK == kDimV);
    static constexpr int kUnits = kDimV / 8;  // that a thread reads of a block of K, or of V
    static constexpr int kInFlight = largest_divisor(kUnits, 8 / kElementBytes);  // 16 registers

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
    // Where a thread reads in a block.
    struct Place {
        int page = -1, offset = 0;

        // By a query of the tile; a thread reads nothing else.
        __device__ __forceinline__ bool is_seen() const { return page >= 0; }
    };
    // K: a token for each thread.
    struct KeyUnits {
        const unsigned char* src;
        int dims;          // to be read
        int in_group = 0;  // dimension, of the x that lie together

        __device__ __forceinline__ KeyUnits(const Params& params, int head, const Place& place)
            : dims(place.is_seen() ? params.d_v : 0) {
            src = static_cast<const unsigned char*>(params.k_cache) +
                  (place.page * params.k_stride_block + head * params.k_stride_head +
                   place.offset * params.x) *
                      kElementBytes;
        }
        // The units in their order.
        __device__ __forceinline__ Raw read(const Params& params, int unit) {
            const Raw raw = Gatherer::read(src + in_group * kElementBytes, 8 * unit < dims);
            in_group += 8;
            if (in_group == params.x) {
                in_group = 0;
                src += params.block_size * params.x * kElementBytes;
            }
            return raw;
        }
    };
    // V: eight tokens and every eighth dimension for each thread.
    struct ValueUnits {
        const unsigned char* src;
        int dims;  // to be read, from the first on

        __device__ __forceinline__ ValueUnits(const Params& params, int head, const Place& place,
                                              int first_dim)
            : dims(place.is_seen() ? params.d_v - first_dim : 0) {
            i64 element = place.page * params.v_stride_block + head * params.v_stride_head + place.offset;
            if (params.v_pack != 0) {
                const int in_pack = place.offset % params.v_pack;
                element += static_cast<i64>(place.offset - in_pack) * (params.d_v - 1);
            }
            src = static_cast<const unsigned char*>(params.v_cache) + element * kElementBytes +
                  first_dim * step(params);
        }
        // Bytes from one dimension to the next.
        __device__ __forceinline__ static int step(const Params& params) {
            return (params.v_pack == 0 ? params.block_size : params.v_pack) * kElementBytes;
        }
        __device__ __forceinline__ Raw read(const Params& params, int unit) {
            const Raw raw = Gatherer::read(src, 8 * unit < dims);
            src += 8 * step(params);
            return raw;
        }
    };

    // For layouts in which eight elements lie together. Reads run ahead of stores, through K and V of one block
    // after another.
    __device__ __forceinline__ void gather_span(const Params& params, SharedMemoryPlan& smem, const Tile& tile,
                                                u32 tile_number) {
        const Pages pages(params, tile);
        const int head = tile.head / params.heads_per_kv;
        const int first_block = tile.spans[kPages].first_block;
        int block = tile.spans[kPages].end_block - 1;
        const int eight = thread / 8;
        const bool stores = thread < kTileKeys;
        auto find_keys = [&](int block) {
            return find(params, pages, block * kTileKeys + thread, 1, stores && block >= first_block);
        };
        auto find_values = [&](int block) {
            return find(params, pages, block * kTileKeys + 8 * eight, 8, stores && block >= first_block);
        };
        Place place = find_values(block);
        KeyUnits keys(params, head, find_keys(block));
        Raw raw[kInFlight];
#pragma unroll
        for (int unit = 0; unit < kInFlight; ++unit) raw[unit] = keys.read(params, unit);
        wait_for_turns(smem, tile_number);
#pragma unroll 1
        for (; block >= first_block; --block) {
            const u32 index = stage.index();
            ValueUnits values(params, head, place, thread % 8);
            place = find_keys(block - 1);
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[index]), stage.free_parity());
            unsigned char* k = smem.k[index] + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesK +
                               thread % PieceKeys::kPieceTokens * 16;
            move(params, raw, keys, values, [&](int unit, const uint4& value) {
                if (stores) *reinterpret_cast<uint4*>(k + unit * PieceKeys::kUnits) = value;
            });
            hand_over(smem.bar_k_full[index]);
            keys = KeyUnits(params, head, place);
            place = find_values(block - 1);
            const uint4 kept = kept_tokens(pages.keys, block * kTileKeys + 8 * eight);
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[index]), stage.free_parity());
            unsigned char* v = smem.v[index] + eight / 2 * PieceKeys::kPieceBytesV;
            move(params, raw, values, keys, [&](int unit, const uint4& value) {
                if (stores)
                    *reinterpret_cast<uint4*>(v + PieceKeys::offset_v(8 * unit + thread % 8, eight % 2)) =
                        make_uint4(value.x & kept.x, value.y & kept.y, value.z & kept.z, value.w & kept.w);
            });
            hand_over(smem.bar_v_full[index]);
            ++stage.number;
        }
    }
    // The same element by element, for other layouts.
    __device__ __forceinline__ void collect_span(const Params& params, SharedMemoryPlan& smem,
                                                 const Tile& tile, u32 tile_number) {
        const Pages pages(params, tile);
        const int head = tile.head / params.heads_per_kv;
        const int first_block = tile.spans[kPages].first_block;
        wait_for_turns(smem, tile_number);
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
    __device__ __forceinline__ static void wait_for_turns(SharedMemoryPlan& smem, u32 tile_number) {
        smem.turns_k.wait_for_gatherer(tile_number);
        smem.turns_v.wait_for_gatherer(tile_number);
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
        const ValueUnits values(params, head, place, 0);
        unsigned char* dst = v + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesV + thread % 8 * 2;
#pragma unroll 1
        for (int d = 0; d < kDimV; ++d)
            *reinterpret_cast<u16*>(dst + PieceKeys::offset_v(d, thread / 8 % 2)) =
                read_one(values.src + d * ValueUnits::step(params), 0, place.is_seen() && d < params.d_v);
    }

    // Stores what was read of `current`, and reads as far ahead: the rest of it, then the first of `next`.
    template <class Current, class Next, class Store>
    __device__ __forceinline__ static void move(const Params& params, Raw (&raw)[kInFlight], Current& current,
                                                Next& next, Store store) {
        int unit = 0;
#pragma unroll 1
        for (; unit < kUnits - kInFlight; unit += kInFlight) {
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                store(unit + i, convert(raw[i]));
                raw[i] = current.read(params, unit + kInFlight + i);
            }
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            store(unit + i, convert(raw[i]));
            raw[i] = next.read(params, i);
        }
    }
    __device__ __forceinline__ static Raw read(const void* src, bool enabled) {
        Raw raw;
        if constexpr (kCacheIsFp8) {
            const uint2 value = load_global_8(src, enabled);
            raw.words[0] = value.x;
            raw.words[1] = value.y;
        } else {
            const uint4 value = load_global_16(src, enabled);
            raw.words[0] = value.x;
            raw.words[1] = value.y;
            raw.words[2] = value.z;
            raw.words[3] = value.w;
        }
        return raw;
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
    __device__ __forceinline__ static uint4 kept_tokens(const KeyInterval& keys, int first) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first + 2 * i;
            words[i] = (token >= keys.begin && token < keys.end ? 0xffffu : 0u) |
                       (token + 1 >= keys.begin && token + 1 < keys.end ? 0xffff0000u : 0u);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};
