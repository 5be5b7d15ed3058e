// Half a chunk: shared-memory tiles of 32 columns of a 16-bit type for wgmma, rows of 64 bytes one after another, 512-byte aligned.
//
// Unit u (16 bytes, of four) of row r lies at unit u ^ (r / 2 % 4), the 64-byte swizzle. K-major matrix descriptors (swizzle128.cuh has
// the format): swizzle 2, SBO = distance of 8-row groups = 512 bytes; a step of 16 columns adds 32 bytes.
#pragma once
#include "common/types.cuh"

constexpr int kHalfChunkCols = 32;
constexpr int kHalfChunkRowBytes = 64;
constexpr int kHalfChunkBytes = 64 * kHalfChunkRowBytes;

// Byte offset of 16-byte unit `unit` (0-3) of row `row`.
__device__ __forceinline__ constexpr u32 swizzle64_offset(int row, int unit) {
    return row * kHalfChunkRowBytes + ((unit ^ (row / 2 & 3)) << 4);
}

__device__ __forceinline__ u64 descriptor_half_chunk(u32 smem) {
    return 2ull << 62 | static_cast<u64>(8 * kHalfChunkRowBytes >> 4) << 32 | ((smem & 0x3ffff) >> 4);
}
