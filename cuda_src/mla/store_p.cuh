// P to shared memory, where it is the A operand of P V.
#pragma once
#include "common/types.cuh"
#include "layout/swizzled_tile.cuh"
#include "ptx/memory.cuh"

// Stores packed A fragments of 16 rows and 4 kWords columns. `dst` is where the lane's 16 bytes of the first
// 16 columns lie: row lane % 16 of the warp's, unit lane / 16 of a 128-byte row. 16 columns on, the unit's
// number differs in bits 1 and 2; 64 columns on is the next tile, kTileBytes behind. With kRecomputed,
// addresses are not kept in registers from one call to the next.
template <int kTileBytes, bool kRecomputed = false, int kWords>
__device__ __forceinline__ void store_probabilities(u32 dst, const u32 (&p)[kWords]) {
#pragma unroll
    for (int group = 0; group < kWords / 4; ++group) {
        u32 address = dst;
        if constexpr (kRecomputed) asm volatile("" : "+r"(address));
        stmatrix_x4((address ^ (32 * (group % 4))) + group / 4 * kTileBytes, p[4 * group], p[4 * group + 1],
                    p[4 * group + 2], p[4 * group + 3]);
    }
}
