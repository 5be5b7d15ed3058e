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
constexpr bool kWindow = WINDOW, kSoftcap = SOFTCAP, kAlibi = ALIBI;

constexpr int kTileRows = 64 * kConsumers;
constexpr int kStages = 2;
constexpr int kTileStages = 2;
constexpr int kChunksQK = ceil_div(kDimQK, 64), kChunksV = ceil_div(kDimV, 64);

using Rows = SwizzledTile<64>;           // of Q and O
using KeyRows = SwizzledTile<kTileKeys>;  // of K and V
using Scheduler = TileScheduler<kTileRows, kTileKeys>;

struct SharedMemoryPlan {
    unsigned char q[kConsumers][max_int(kChunksQK, kChunksV) * Rows::kBytes];  // later O
    unsigned char k[kStages][kChunksQK * KeyRows::kBytes];
    unsigned char v[kStages][kChunksV * KeyRows::kBytes];
    u64 bar_q_full[kConsumers], bar_q_free[kConsumers];
    u64 bar_k_full[kStages], bar_k_free[kStages];
    u64 bar_v_full[kStages], bar_v_free[kStages];
    u64 bar_v_landed[kStages];  // V that is to be trimmed
    u64 bar_tile_full[kTileStages], bar_tile_free[kTileStages];
    Tile tiles[kTileStages];
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "the host gives less shared memory");

// Threads that read tiles: one of each consumer, of the warp that loads V and of the one that trims it.
constexpr int kTileReaders = kConsumers + 2;

// Named barriers: the turn of consumer i is NB_TURN + i, that of its own threads NB_OWN + i.
constexpr int NB_TURN = 1, NB_OWN = NB_TURN + kConsumers;

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
        mbarrier_init(smem_address(&smem.bar_tile_free[i]), kTileReaders);
    }
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
    // One thread of the role, when none will read the tile again.
    __device__ __forceinline__ void release(SharedMemoryPlan& smem) const {
        mbarrier_arrive(smem_address(&smem.bar_tile_free[count % kTileStages]));
    }
};

// A ring of kStages places.
struct Stage {
    u32 index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kStages) {
            index = 0;
            parity ^= 1;
        }
    }
};
