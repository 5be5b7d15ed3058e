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

struct Gatherer {
    // Eight elements of the cache as they are read.
    struct Raw {
        u32 words[2 * kElementBytes];
    };
    static constexpr int kBatch = 4;                                        // units of 8 elements
    static constexpr int kBatches = kDimV > 128 ? 1 : kCacheIsFp8 ? 3 : 2;  // in flight, as registers allow

    Stage stage;
    const int thread = threadIdx.x % 128;

    // All threads of the warpgroup call.
    __device__ __forceinline__ void run(const Params& params, SharedMemoryPlan& smem) {
        for (TileReader reader;; ++reader.count) {
            const Tile& tile = reader.next(smem);
            if (tile.request < 0) break;
            stage.number += tile.spans[kArrays].blocks();
            smem.turns_k.wait_for_gatherer(reader.count);
            smem.turns_v.wait_for_gatherer(reader.count);
            gather_span(params, smem, tile);
            named_barrier_sync(NB_GATHER, 128);
            if (thread == 0) {
                smem.turns_k.pass_to_loader();
                smem.turns_v.pass_to_loader();
                reader.release(smem);
            }
        }
    }

  private:
    __device__ __forceinline__ void gather_span(const Params& params, SharedMemoryPlan& smem,
                                                const Tile& tile) {
        const Pages pages(params, tile);
        const int head = tile.head / params.heads_per_kv;
        const int first_block = tile.spans[kPages].first_block;
        const bool whole_k = params.x % 8 == 0;
        const bool whole_v = params.block_size % 8 == 0 && params.v_pack % 8 == 0;
#pragma unroll 1
        for (int block = tile.spans[kPages].end_block - 1; block >= first_block; --block) {
            const u32 place = stage.index();
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[place]), stage.free_parity());
            if (whole_k) {
                gather_k(params, pages, head, block, smem.k[place]);
            } else {
                collect_k(params, pages, head, block, smem.k[place]);
            }
            hand_over(smem.bar_k_full[place]);
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[place]), stage.free_parity());
            if (whole_v) {
                gather_v(params, pages, head, block, smem.v[place]);
            } else {
                collect_v(params, pages, head, block, smem.v[place]);
            }
            hand_over(smem.bar_v_full[place]);
            ++stage.number;
        }
    }
    __device__ __forceinline__ void hand_over(u64& full) const {
        fence_proxy_async();
        named_barrier_sync(NB_GATHER, 128);
        if (thread == 0) mbarrier_arrive(smem_address(&full));
    }

    // K: a token for each thread.
    __device__ __forceinline__ void gather_k(const Params& params, const Pages& pages, int head, int block,
                                             unsigned char* k) const {
        if (thread >= kTileKeys) return;
        const int token = block * kTileKeys + thread;
        const bool seen = token >= pages.keys.begin && token < pages.keys.end;
        const unsigned char* src = nullptr;
        if (seen) {
            int offset;
            const i64 page = pages.find(params, token, offset);
            src = static_cast<const unsigned char*>(params.k_cache) +
                  (page * params.k_stride_block + head * params.k_stride_head + offset * params.x) *
                      kElementBytes;
        }
        const i64 next_group = static_cast<i64>(params.block_size) * params.x * kElementBytes;
        int in_group = 0;  // dimension, of the x that lie together
        unsigned char* dst = k + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesK +
                             thread % PieceKeys::kPieceTokens * 16;
        stream<kDimQK / 8>(
            [&](int unit) {
                Raw raw = read(src + in_group * kElementBytes, seen && 8 * unit < params.d_v);
                in_group += 8;
                if (in_group == params.x) {
                    in_group = 0;
                    src += next_group;
                }
                return raw;
            },
            [&](int unit, const uint4& value) {
                *reinterpret_cast<uint4*>(dst + unit * PieceKeys::kUnits) = value;
            });
    }
    // V: eight tokens and every eighth dimension for each thread.
    __device__ __forceinline__ void gather_v(const Params& params, const Pages& pages, int head, int block,
                                             unsigned char* v) const {
        if (thread >= kTileKeys) return;
        const int eight = thread / 8, first_dim = thread % 8;
        const int token = block * kTileKeys + 8 * eight;
        const bool seen = token + 8 > pages.keys.begin && token < pages.keys.end;
        const unsigned char* src = nullptr;
        i64 step = 0;  // bytes from one dimension to the next
        uint4 kept = make_uint4(0, 0, 0, 0);
        if (seen) {
            int offset;
            const i64 page = pages.find(params, token, offset);
            i64 element = page * params.v_stride_block + head * params.v_stride_head;
            if (params.v_pack == 0) {
                element += offset;
                step = params.block_size * kElementBytes;
            } else {
                element += static_cast<i64>(offset / params.v_pack) * params.v_pack * params.d_v +
                           offset % params.v_pack;
                step = params.v_pack * kElementBytes;
            }
            src = static_cast<const unsigned char*>(params.v_cache) + element * kElementBytes +
                  first_dim * step;
            kept = kept_tokens(pages.keys, token);
        }
        unsigned char* dst = v + eight / 2 * PieceKeys::kPieceBytesV;
        stream<kDimV / 8>(
            [&](int unit) {
                const Raw raw = read(src, seen && 8 * unit + first_dim < params.d_v);
                src += 8 * step;
                return raw;
            },
            [&](int unit, const uint4& value) {
                const int dim = 8 * unit + first_dim;
                *reinterpret_cast<uint4*>(dst + PieceKeys::offset_v(dim, eight % 2)) =
                    make_uint4(value.x & kept.x, value.y & kept.y, value.z & kept.z, value.w & kept.w);
            });
    }
    // The same element by element, for layouts in which eight do not lie together.
    __device__ __forceinline__ void collect_k(const Params& params, const Pages& pages, int head, int block,
                                              unsigned char* k) const {
        if (thread >= kTileKeys) return;
        const int token = block * kTileKeys + thread;
        const bool seen = token >= pages.keys.begin && token < pages.keys.end;
        int offset = 0;
        const i64 page = seen ? pages.find(params, token, offset) : 0;
        u16* dst = reinterpret_cast<u16*>(k + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesK +
                                          thread % PieceKeys::kPieceTokens * 16);
        const i64 first = page * params.k_stride_block + head * params.k_stride_head;
#pragma unroll 1
        for (int d = 0; d < kDimQK; ++d) {
            const i64 place =
                static_cast<i64>(d / params.x * params.block_size + offset) * params.x + d % params.x;
            dst[d / 8 * (PieceKeys::kUnits / 2) + d % 8] =
                read_one(params.k_cache, first + place, seen && d < params.d_v);
        }
    }
    __device__ __forceinline__ void collect_v(const Params& params, const Pages& pages, int head, int block,
                                              unsigned char* v) const {
        if (thread >= kTileKeys) return;
        const int token = block * kTileKeys + thread;
        const bool seen = token >= pages.keys.begin && token < pages.keys.end;
        int offset = 0;
        const i64 page = seen ? pages.find(params, token, offset) : 0;
        i64 element = page * params.v_stride_block + head * params.v_stride_head;
        int step = params.block_size;
        if (params.v_pack == 0) {
            element += offset;
        } else {
            element += static_cast<i64>(offset / params.v_pack) * params.v_pack * params.d_v +
                       offset % params.v_pack;
            step = params.v_pack;
        }
        unsigned char* dst = v + thread / PieceKeys::kPieceTokens * PieceKeys::kPieceBytesV + thread % 8 * 2;
#pragma unroll 1
        for (int d = 0; d < kDimV; ++d)
            *reinterpret_cast<u16*>(dst + PieceKeys::offset_v(d, thread / 8 % 2)) =
                read_one(params.v_cache, element + static_cast<i64>(d) * step, seen && d < params.d_v);
    }

    // Reads and stores kCount units, with kBatches batches of reads in flight.
    template <int kCount, class Read, class Store>
    __device__ __forceinline__ static void stream(Read read, Store store) {
        static_assert(kCount % kBatch == 0);
        Raw raw[kBatches][kBatch];
        if constexpr (kBatches == 1) {
#pragma unroll 1
            for (int unit = 0; unit < kCount; unit += kBatch) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) raw[0][i] = read(unit + i);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) store(unit + i, convert(raw[0][i]));
            }
        } else {
#pragma unroll
            for (int batch = 0; batch < kCount / kBatch + kBatches - 1; ++batch) {
                if (batch < kCount / kBatch) {
#pragma unroll
                    for (int i = 0; i < kBatch; ++i) raw[batch % kBatches][i] = read(batch * kBatch + i);
                }
                const int done = batch - kBatches + 1;
                if (done >= 0) {
#pragma unroll
                    for (int i = 0; i < kBatch; ++i)
                        store(done * kBatch + i, convert(raw[done % kBatches][i]));
                }
            }
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
