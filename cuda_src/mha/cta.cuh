// What the roles of a CTA share: sizes, shared memory, barriers.
#pragma once
#include "common/types.cuh"
#include "layout/swizzled_tile.cuh"
#include "mha/tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimQK = D_QK, kDimV = D_V;  // multiples of 32; columns past those of the arrays are zeros
constexpr int kTileKeys = TILE_KEYS;
constexpr int kConsumers = CONSUMERS;
constexpr bool kWindow = WINDOW, kSoftcap = SOFTCAP, kAlibi = ALIBI, kOutIsFp8 = OUT_FP8;
constexpr bool kMaxScores = MAX_SCORES;
constexpr bool kFlexGrouped = FLEX_GROUPED;  // with FLEX: query heads share tiles, and have one list
// How keys in pages come to shared memory: by TMA (mha/paged_keys.cuh), or by a warpgroup that reads them
// (mha/gathered_keys.cuh).
constexpr bool kPagesByTma = PAGED == 1, kPagesGathered = PAGED == 2;
// What the cache holds (mha/gathered_keys.cuh).
enum class CacheType : int { kSame = 0, kE4m3 = 1, kE5m2 = 2 };
constexpr CacheType kCacheType = static_cast<CacheType>(CACHE_TYPE);
constexpr bool kCacheIsFp8 = kCacheType != CacheType::kSame;
constexpr int kElementBytes = kCacheIsFp8 ? 1 : 2;

constexpr int kTileRows = 64 * kConsumers;
constexpr int kStages = 2;
constexpr int kTileStages = 2;
constexpr int kChunksQK = ceil_div(kDimQK, 64), kChunksV = ceil_div(kDimV, 64);

using Rows = SwizzledTile<64>;            // of Q and O
using KeyRows = SwizzledTile<kTileKeys>;  // of K and V
using Scheduler = TileScheduler<kTileRows, kTileKeys>;
using Scores = float[kTileKeys / 2];  // of a thread's two rows

// What some row of a consumer may not see of a block: keys that a mask hides; those past the last key, where
// lists have the last block anywhere; or nothing.
enum class BlockKind { kMasked, kCut, kWhole };

// Whether O has a place of its own in shared memory. Then the next tile's Q is copied while O is stored.
constexpr bool kOwnOutput = OUT_BUFFER;

// Turns of two roles that fill the same places: in each tile first the loader of arrays, then the gatherer of
// pages. A role may ask whether a place is free only when the other has seen all its own places free, since a
// parity tells only neighbouring phases apart.
struct Turns {
    u64 loader, gatherer;

    __device__ __forceinline__ void init() {
        mbarrier_init(smem_address(&loader), 1);
        mbarrier_init(smem_address(&gatherer), 1);
    }
    // `tile`: its number, from 0
    __device__ __forceinline__ void wait_for_loader(u32 tile) {
        mbarrier_wait_parity(smem_address(&loader), tile & 1 ^ 1);
    }
    __device__ __forceinline__ void wait_for_gatherer(u32 tile) {
        mbarrier_wait_parity(smem_address(&gatherer), tile & 1);
    }
    // All lanes of the warp. None still waits for the loader's turn: the next one has the parity after it.
    __device__ __forceinline__ void pass_to_gatherer() {
        __syncwarp();
        if (lane_index() == 0) mbarrier_arrive(smem_address(&gatherer));
    }
    // One thread
    __device__ __forceinline__ void pass_to_loader() { mbarrier_arrive(smem_address(&loader)); }
};

struct SharedMemoryPlan {
    unsigned char q[kConsumers][(kOwnOutput ? kChunksQK : max_int(kChunksQK, kChunksV)) * Rows::kBytes];
    unsigned char k[kStages][kChunksQK * KeyRows::kBytes];
    unsigned char v[kStages][kChunksV * KeyRows::kBytes];
    unsigned char o[kConsumers][kOwnOutput ? kChunksV * Rows::kBytes : 8];
    alignas(kCacheIsFp8
                ? 128
                : 8) unsigned char raw_k[kCacheIsFp8 ? kTileKeys * kDimQK : 8];  // mha/gathered_keys.cuh
    alignas(kCacheIsFp8 ? 128 : 8) unsigned char raw_v[kCacheIsFp8 ? kTileKeys * kDimV : 8];
    u64 bar_q_full[kConsumers], bar_q_free[kConsumers];
    u64 bar_k_full[kStages], bar_k_free[kStages];
    u64 bar_v_full[kStages], bar_v_free[kStages];
    u64 bar_v_landed[kStages];  // V that is to be trimmed
    u64 bar_tile_full[kTileStages];
    Turns turns_k, turns_v;  // with gathered pages
    u64 bar_raw_k_full, bar_raw_k_free, bar_raw_v_full, bar_raw_v_free;
    Tile tiles[kTileStages];
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

// Named barriers: the turn of consumer i is NB_TURN + i, that of its own threads NB_OWN + i; place i for a
// tile is free behind NB_TILE_FREE + i.
constexpr int NB_TURN = 1, NB_OWN = NB_TURN + kConsumers, NB_GATHER = NB_OWN + kConsumers;
constexpr int NB_TILE_FREE = NB_GATHER + 1;
// Who writes and reads tiles: the warp that schedules, the one that loads V, who trims it, consumers.
constexpr int kTileThreads = 32 * 2 + (kPagesGathered ? 128 : 32) + 128 * kConsumers;

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
        mbarrier_init(smem_address(&smem.bar_q_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_q_free[i]), 1);
    }
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(smem_address(&smem.bar_k_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_v_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_v_landed[i]), 1);
        mbarrier_init(smem_address(&smem.bar_k_free[i]), kConsumers);
        mbarrier_init(smem_address(&smem.bar_v_free[i]), kConsumers);
    }
#pragma unroll
    for (int i = 0; i < kTileStages; ++i) {
        mbarrier_init(smem_address(&smem.bar_tile_full[i]), 1);
    }
    smem.turns_k.init();
    smem.turns_v.init();
    mbarrier_init(smem_address(&smem.bar_raw_k_full), 1);
    mbarrier_init(smem_address(&smem.bar_raw_k_free), 1);
    mbarrier_init(smem_address(&smem.bar_raw_v_full), 1);
    mbarrier_init(smem_address(&smem.bar_raw_v_free), 1);
    mbarrier_init_fence();
}

// The tiles in the order in which they are given out, for a role that reads them.
struct TileReader {
    u32 count = 0;

    // Waits for the next tile.
    __device__ __forceinline__ const Tile& next(SharedMemoryPlan& smem) {
        mbarrier_wait_parity(smem_address(&smem.bar_tile_full[count % kTileStages]), count / kTileStages & 1);
        return smem.tiles[count % kTileStages];
    }
    // All threads of the role, when they will not read the tile again.
    __device__ __forceinline__ void release() const {
        __syncwarp();
        named_barrier_arrive(NB_TILE_FREE + count % kTileStages, kTileThreads);
    }
};

// The places of K or V, in the order of blocks.
struct Stage {
    u32 number = 0;  // of the block

    __device__ __forceinline__ u32 index() const { return number % kStages; }
    // Of the phase in which the place becomes free.
    __device__ __forceinline__ u32 free_parity() const { return number / kStages & 1 ^ 1; }
};
