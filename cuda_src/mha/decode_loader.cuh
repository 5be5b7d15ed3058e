// Loads blocks of keys and values: from pages of any size or from the rows of a cache, and new tokens from
// arrays, which are written to the cache on the way.
//
// Eight lanes copy a row, 16 bytes at a time. A lane finds the place of one of the rows that its warp copies,
// and tells the others. Rows that no query sees are zeros, and are not read. New tokens are read from their
// arrays only, so that no CTA depends on what another one writes.
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
        : params(params),
          smem(smem),
          unit(threadIdx.x % 8),
          lane_row(threadIdx.x % 128 / 8),
          k_offset_of_thread(k_offset(lane_row, unit)),
          v_offset_of_thread(Keys::offset(lane_row, unit)) {}

    __device__ __forceinline__ void run() {
        for (Walk walk(params, smem.share); walk.next(params);) {
            find_row_of_cache(walk);
            const Source k = {params.k_cache + walk.head * params.k_stride_h, params.k_stride_b,
                              params.k_stride_s};
            const Source v = {params.v_cache + walk.head * params.v_stride_h, params.v_stride_b,
                              params.v_stride_s};
            look_up(walk, walk.first_block);
#pragma unroll 1
            for (int i = 0; i < walk.blocks; ++i, ++number) {
                const int block = walk.first_block + i;
                const Place place = next;
                if (i + 1 < walk.blocks) look_up(walk, block + 1);  // its latency passes under the wait
                const u32 stage = number % kStages, parity = ~(number / kStages) & 1;
                const bool appends =
                    walk.request.new_len > 0 && (block + 1) * kBlockTokens > walk.request.cached;
                const u32 k_full = smem_address(&smem.bar_k_full[stage]);
                const u32 v_full = smem_address(&smem.bar_v_full[stage]);
                const u32 k_at = smem_address(smem.k[stage]) + k_offset_of_thread;
                const u32 v_at = smem_address(smem.v[stage]) + v_offset_of_thread;
                mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage]), parity);
                const u64 k_row = row_at(k, place), v_row = row_at(v, place);
                if (!appends) {
                    load<kKTiles>(k_row, params.d_qk, k_at);
                    cp_async_mbarrier_arrive(k_full);
                    mbarrier_wait_parity(smem_address(&smem.bar_v_free[stage]), parity);
                    load<kVTiles>(v_row, params.d_v, v_at);
                    cp_async_mbarrier_arrive(v_full);
                } else {
                    mbarrier_wait_parity(smem_address(&smem.bar_v_free[stage]), parity);
                    load_and_append(walk, block, k_row, v_row, k_at, v_at);
                    cp_async_wait_all();
                    mbarrier_arrive(k_full);  // which releases what the thread itself stored
                    mbarrier_arrive(v_full);
                }
            }
        }
    }

  private:
    static constexpr int kRows = kBlockTokens / 16;  // of a thread
    static_assert(4 * kRows <= 32, "a lane finds a row");
    // A token's place in the cache.
    struct Place {
        int block;  // -1: not there, or not to be read
        int token;
    };
    // The rows of a KV head in the cache.
    struct Source {
        CacheElement* first;
        i64 block, token;  // strides
    };

    const Params& params;
    SharedMemoryPlan& smem;
    const int unit, lane_row;
    const u32 k_offset_of_thread, v_offset_of_thread;  // in a tile, of its first row
    u32 number = 0;                                    // of the next block
    // The current pair's row of the block table. Without a table it is a block; -1: there is none.
    int row_of_cache;
    const int* blocks;
    Place next;  // of the row that the lane finds

    __device__ __forceinline__ void find_row_of_cache(const Walk& walk) {
        row_of_cache = params.cache_batch_idx == nullptr ? walk.index : params.cache_batch_idx[walk.index];
        const int rows = params.block_table == nullptr ? params.num_blocks : params.table_rows;
        if (row_of_cache >= rows) row_of_cache = -1;
        blocks = params.block_table + row_of_cache * params.table_stride;
    }
    __device__ __forceinline__ void look_up(const Walk& walk, int block) {
        const int lane = lane_index();
        const int row = 16 * (lane / 4) + threadIdx.x % 128 / 32 * 4 + lane % 4;
        const int key = block * kBlockTokens + row;
        next = {-1, key};
        if (row >= kBlockTokens || key < walk.request.first_key || key >= walk.request.length ||
            row_of_cache < 0)
            return;
        next.block = row_of_cache;
        if (params.block_table == nullptr) return;
        const int column = divide(key, params.block_magic, params.block_shift);
        next.block = blocks[column];
        next.token = key - column * params.block_size;
    }
    // The address of a row, odd if the cache does not have it.
    __device__ __forceinline__ u64 row_at(const Source& source, const Place& place) const {
        const bool exists = static_cast<u32>(place.block) < static_cast<u32>(params.num_blocks);
        const CacheElement* row = source.first;
        if (exists) row += place.block * source.block + place.token * source.token;
        return reinterpret_cast<u64>(row) | !exists;
    }
    // From the lane that has found it, the row that the thread copies a part of.
    __device__ __forceinline__ static u64 row_of(u64 found, int row) {
        return __shfl_sync(0xffffffff, found, 4 * row + lane_index() / 8);
    }
    __device__ __forceinline__ uint4* units_of(u64 row) const {
        return reinterpret_cast<uint4*>(row & ~u64{1}) + unit;
    }
    // The thread's units of all rows; zeros past column d.
    template <int kTiles>
    __device__ __forceinline__ void load(u64 found, int d, u32 at) const {
#pragma unroll
        for (int row = 0; row < kRows; ++row)
            copy<kTiles>(row_of(found, row), d, at + row * 16 * Keys::kRowBytes);
    }
    template <int kTiles>
    __device__ __forceinline__ void copy(u64 row, int d, u32 at) const {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
            cp_async_16_or_zeros(at + tile * Keys::kBytes, units_of(row) + 8 * tile,
                                 row % 2 == 0 && kUnit * (8 * tile + unit) < d);
    }
    // The same of K and V of a block that has new tokens.
    __device__ __forceinline__ void load_and_append(const Walk& walk, int block, u64 k_found, u64 v_found,
                                                    u32 k_at, u32 v_at) const {
        // Not unrolled: the code of other blocks would lie far apart.
#pragma unroll 1
        for (int row = 0; row < kRows; ++row) {
            const int key = block * kBlockTokens + 16 * row + lane_row;
            const u64 k_row = row_of(k_found, row), v_row = row_of(v_found, row);
            if (key >= max_int(walk.request.cached, 0)) {
                append(walk, key, k_row, v_row, k_at, v_at);
            } else {
                copy<kKTiles>(k_row, params.d_qk, k_at);
                copy<kVTiles>(v_row, params.d_v, v_at);
            }
            k_at += 16 * Keys::kRowBytes;
            v_at += 16 * Keys::kRowBytes;
        }
    }
    // A new token, or zeros past the last one: to shared memory, and to the cache by the CTA that has the
    // first tile. Loads of K and V are on their way together. V that no query sees is zeros in shared memory:
    // it may hold NaN.
    __device__ __forceinline__ void append(const Walk& walk, int key, u64 k_row, u64 v_row, u32 k_at,
                                           u32 v_at) const {
        const Request& request = walk.request;
        const int token = key - request.cached;
        const bool is_new = key < request.length && token < request.new_len;
        const i64 batch = params.cu_seqlens_new == nullptr ? walk.index : 0, row = request.new_begin + token;
        const CacheElement* k_src = params.k_new + batch * params.k_new_stride_b +
                                    row * params.k_new_stride_s + walk.head * params.k_new_stride_h;
        const CacheElement* v_src = params.v_new + batch * params.v_new_stride_b +
                                    row * params.v_new_stride_s + walk.head * params.v_new_stride_h;
        const auto has = [&](int tile, int d) { return is_new && kUnit * (8 * tile + unit) < d; };
        uint4 k_units[kKTiles], v_units[kVTiles];
#pragma unroll
        for (int tile = 0; tile < kVTiles; ++tile) {
            v_units[tile] = make_uint4(0, 0, 0, 0);
            if (has(tile, params.d_v)) v_units[tile] = reinterpret_cast<const uint4*>(v_src)[8 * tile + unit];
        }
#if !CACHE_FP8
        const int position =
            token + (params.rotary_seqlens == nullptr ? request.cached : params.rotary_seqlens[walk.index]);
#endif
#pragma unroll
        for (int tile = 0; tile < kKTiles; ++tile) {
            k_units[tile] = make_uint4(0, 0, 0, 0);
            if (!has(tile, params.d_qk)) continue;
#if CACHE_FP8
            k_units[tile] = reinterpret_cast<const uint4*>(k_src)[8 * tile + unit];
#else
            k_units[tile] = load_rotated(params, k_src, 8 * tile + unit, position);
#endif
        }
        const bool is_kept = k_row % 2 == 0 && walk.tile == 0, is_seen = key >= request.first_seen;
#pragma unroll
        for (int tile = 0; tile < kKTiles; ++tile) {
            if (is_kept && has(tile, params.d_qk)) units_of(k_row)[8 * tile] = k_units[tile];
            store_shared_16(k_at + tile * Keys::kBytes, k_units[tile]);
        }
#pragma unroll
        for (int tile = 0; tile < kVTiles; ++tile) {
            if (is_kept && has(tile, params.d_v)) units_of(v_row)[8 * tile] = v_units[tile];
            store_shared_16(v_at + tile * Keys::kBytes, is_seen ? v_units[tile] : make_uint4(0, 0, 0, 0));
        }
    }
};
