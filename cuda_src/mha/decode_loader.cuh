// Loads blocks of keys and values: from pages of any size or from the rows of a cache, and new tokens from
// arrays, which are written to the cache on the way.
//
// Eight lanes copy a row, 16 bytes at a time. Rows that no query sees are zeros, and are not read. New tokens
// are read from their arrays only, so that no CTA depends on what another one writes.
#pragma once
#include "mha/decode_fp8.cuh"
#include "mha/decode_line.cuh"
#include "mha/decode_rotary.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"

class BlockLoader {
  public:
    __device__ __forceinline__ BlockLoader(const Params& params, SharedMemoryPlan& smem)
        : params(params), smem(smem), unit(threadIdx.x % 8), lane_row(threadIdx.x % 128 / 8) {}

    __device__ __forceinline__ void run() {
        for (Walk walk(params, smem.share); walk.next(params);) {
            look_up(walk, walk.first_block);
#pragma unroll 1
            for (int i = 0; i < walk.blocks; ++i, ++number) {
                const int block = walk.first_block + i;
                Place place[kRows];
#pragma unroll
                for (int row = 0; row < kRows; ++row) place[row] = next[row];
                if (i + 1 < walk.blocks) look_up(walk, block + 1);  // its latency passes under the wait
                const u32 stage = number % kStages, parity = ~(number / kStages) & 1;
                const bool appends =
                    walk.request.new_len > 0 && (block + 1) * kBlockTokens > walk.request.cached;
                mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage]), parity);
                load<kKTiles>(walk, block, place, Side::kK, smem_address(smem.k[stage]), appends);
                const u32 k_full = smem_address(&smem.bar_k_full[stage]);
                const u32 v_full = smem_address(&smem.bar_v_full[stage]);
                if (!appends) cp_async_mbarrier_arrive(k_full);
                mbarrier_wait_parity(smem_address(&smem.bar_v_free[stage]), parity);
                load<kVTiles>(walk, block, place, Side::kV, smem_address(smem.v[stage]), appends);
                if (!appends) {
                    cp_async_mbarrier_arrive(v_full);
                } else {  // an arrival that releases what the thread itself stored
                    cp_async_wait_all();
                    mbarrier_arrive(k_full);
                    mbarrier_arrive(v_full);
                }
            }
        }
    }

  private:
    static constexpr int kRows = kBlockTokens / 16;  // of a thread
    enum class Side { kK, kV };
    // A token's place in the cache.
    struct Place {
        int block;  // -1: not there, or not to be read
        int token;
    };

    const Params& params;
    SharedMemoryPlan& smem;
    const int unit, lane_row;
    u32 number = 0;  // of the next block
    Place next[kRows];

    __device__ __forceinline__ int key_of(int block, int row) const {
        return block * kBlockTokens + 16 * row + lane_row;
    }
    __device__ __forceinline__ void look_up(const Walk& walk, int block) {
        const int row_of_cache =
            params.cache_batch_idx == nullptr ? walk.index : params.cache_batch_idx[walk.index];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const int key = key_of(block, row);
            Place& place = next[row];
            place = {-1, key};
            if (key < walk.request.first_key || key >= walk.request.length) continue;
            place.block = row_of_cache;
            if (params.block_table != nullptr && 0 <= row_of_cache && row_of_cache < params.table_rows) {
                const int column = divide(key, params.block_magic, params.block_shift);
                place.block = params.block_table[row_of_cache * params.table_stride + column];
                place.token = key - column * params.block_size;
            } else if (params.block_table != nullptr) {
                place.block = -1;
            }
            if (place.block >= params.num_blocks) place.block = -1;
        }
    }
    __device__ __forceinline__ CacheElement* cache_row(const Place& place, int head, Side side) const {
        return side == Side::kK ? params.k_cache + place.block * params.k_stride_b +
                                      place.token * params.k_stride_s + head * params.k_stride_h
                                : params.v_cache + place.block * params.v_stride_b +
                                      place.token * params.v_stride_s + head * params.v_stride_h;
    }
    template <int kTiles>
    __device__ __forceinline__ void load(const Walk& walk, int block, Place (&place)[kRows], Side side,
                                         u32 dst, bool appends) const {
        if (!appends) {
#pragma unroll
            for (int row = 0; row < kRows; ++row) copy<kTiles>(walk, place[row], row, side, dst);
            return;
        }
        // Not unrolled: the code of other blocks would lie far apart. Places take turns in the first one.
#pragma unroll 1
        for (int row = 0; row < kRows; ++row) {
            const int key = key_of(block, row);
            if (key >= max_int(walk.request.cached, 0)) {
                append<kTiles>(walk, key, place[0], side, dst + offset(row, side));
            } else {
                copy<kTiles>(walk, place[0], row, side, dst);
            }
            const Place first = place[0];
#pragma unroll
            for (int i = 1; i < kRows; ++i) place[i - 1] = place[i];
            place[kRows - 1] = first;
        }
    }
    __device__ __forceinline__ u32 offset(int row, Side side) const {
        return side == Side::kK ? k_offset(16 * row + lane_row, unit)
                                : Keys::offset(16 * row + lane_row, unit);
    }
    __device__ __forceinline__ int columns(Side side) const {
        return side == Side::kK ? params.d_qk : params.d_v;
    }
    template <int kTiles>
    __device__ __forceinline__ void copy(const Walk& walk, const Place& place, int row, Side side,
                                         u32 dst) const {
        const bool reads = place.block >= 0;
        const CacheElement* src = reads ? cache_row(place, walk.head, side) : nullptr;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const int column = kTileColumns * tile + kUnit * unit;
            const bool is_there = reads && column < columns(side);
            const void* from = is_there ? static_cast<const void*>(src + column) : params.q;
            cp_async_16_or_zeros(dst + offset(row, side) + tile * Keys::kBytes, from, is_there);
        }
    }
    // A new token's row: to shared memory, and to the cache by the CTA that has the first tile.
    template <int kTiles>
    __device__ __forceinline__ void append(const Walk& walk, int key, const Place& place, Side side,
                                           u32 at) const {
        const Request& request = walk.request;
        const int token = key - request.cached;
        const bool exists = key < request.length && token < request.new_len;
        const i64 row = request.new_begin + token;
        const bool segments = params.cu_seqlens_new != nullptr;
        const CacheElement* src = nullptr;
        if (exists && side == Side::kK)
            src = params.k_new + (segments ? 0 : walk.index * params.k_new_stride_b) +
                  row * params.k_new_stride_s + walk.head * params.k_new_stride_h;
        if (exists && side == Side::kV)
            src = params.v_new + (segments ? 0 : walk.index * params.v_new_stride_b) +
                  row * params.v_new_stride_s + walk.head * params.v_new_stride_h;
        CacheElement* kept =
            exists && place.block >= 0 && walk.tile == 0 ? cache_row(place, walk.head, side) : nullptr;
#if !CACHE_FP8
        const int position =
            token + (params.rotary_seqlens == nullptr ? request.cached : params.rotary_seqlens[walk.index]);
#endif
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const int i = 8 * tile + unit;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (exists && kUnit * i < columns(side)) {
                value = reinterpret_cast<const uint4*>(src)[i];
#if !CACHE_FP8
                if (side == Side::kK) value = load_rotated(params, src, i, position);
#endif
                if (kept != nullptr) reinterpret_cast<uint4*>(kept)[i] = value;
            }
            store_shared_16(at + tile * Keys::kBytes, value);
        }
    }
};
