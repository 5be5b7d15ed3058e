// The 128-byte-swizzled shared-memory tiles that TMA writes and wgmma reads, and their matrix descriptors.
//
// A chunk is 64 rows (tokens or heads) x 64 columns of a 16-bit type: 64 rows of 128 bytes, 8,192 bytes, 1,024-byte
// aligned. Inside a row the eight 16-byte units are permuted: unit u of row r lies at unit u ^ (r % 8). A wide tile
// (64 x 576) is its chunks one after another ("chunk-major"):
//   byte(row, col) = (col / 64) * 8192 + row * 128 + (((col % 64) / 8) ^ (row % 8)) * 16 + (col % 8) * 2.
//
// The rows of a tile that warps fill for themselves go group by group instead ("group-major"), so that a warp's share is in one
// split: eight rows of all chunks, 1,024 bytes each, then the next eight rows.
//
// Matrix descriptor (PTX ISA, "Matrix Descriptor Format"; all three addresses in 16-byte units):
//   bits 0-13 start address, 16-29 leading byte offset (LBO), 32-45 stride byte offset (SBO), 62-63 swizzle (1 = 128 B).
//   K-major (rows x k, k contiguous): SBO = distance of 8-row groups = 1,024 B; LBO is not used with this swizzle.
//   MN-major (k x columns, columns contiguous): LBO = distance of 64-column chunks = 8,192 B, SBO = distance of
//   8-row groups along k = 1,024 B.
// The hardware applies the XOR to the final address, so a 16-element step along contiguous k adds 32 bytes to the start,
// and a 16-row step along strided k adds 2,048.
#pragma once
#include "common/types.cuh"

constexpr int kChunkCols = 64;
constexpr int kChunkRows = 64;
constexpr int kChunkRowBytes = 128;
constexpr int kChunkBytes = kChunkRows * kChunkRowBytes;
constexpr int kGroupRows = 8;
constexpr int kGroupBytes = kGroupRows * kChunkRowBytes;  // of one chunk

// Byte offset of 16-byte unit `unit` (0-7) of row `row` inside a chunk.
__device__ __forceinline__ constexpr u32 swizzle128_offset(int row, int unit) {
    return row * kChunkRowBytes + ((unit ^ (row & 7)) << 4);
}

constexpr u64 kDescriptorSwizzle128 = 1ull << 62;
constexpr u64 kDescriptorSbo = static_cast<u64>(1024 >> 4) << 32;
constexpr u64 kDescriptorLboChunk = static_cast<u64>(kChunkBytes >> 4) << 16;

// Of a group-major tile of kChunks chunks.
template <int kChunks>
__device__ __forceinline__ u64 descriptor_grouped(u32 smem) {
    constexpr u64 kSbo = static_cast<u64>(kChunks * kGroupBytes >> 4) << 32;
    constexpr u64 kLbo = static_cast<u64>(kGroupBytes >> 4) << 16;  // of the MN-major view
    return kDescriptorSwizzle128 | kSbo | kLbo | ((smem & 0x3ffff) >> 4);
}
__device__ __forceinline__ u64 descriptor_k_major(u32 smem) {
    return kDescriptorSwizzle128 | kDescriptorSbo | ((smem & 0x3ffff) >> 4);
}
__device__ __forceinline__ u64 descriptor_mn_major(u32 smem) {
    return kDescriptorSwizzle128 | kDescriptorSbo | kDescriptorLboChunk | ((smem & 0x3ffff) >> 4);
}

// Of a tile of 16 columns, without a swizzle: the units of eight columns are one after the other, `unit_bytes` each, and
// have rows of 16 bytes (LBO = distance of the units, SBO = of 8-row groups).
__device__ __forceinline__ u64 descriptor_unswizzled(u32 smem, int unit_bytes) {
    return static_cast<u64>(8 * 16 >> 4) << 32 | static_cast<u64>(unit_bytes >> 4) << 16 |
           ((smem & 0x3ffff) >> 4);
}

// Steps of 16 along k, in the descriptor's 16-byte units.
constexpr u64 kStepKMajor = 32 >> 4;
constexpr u64 kStepMnMajor = (16 * kChunkRowBytes) >> 4;
constexpr u64 kStepChunk = kChunkBytes >> 4;
// The last two of a group-major tile.
template <int kChunks>
constexpr u64 kStepMnMajorGrouped = 2 * kChunks * kGroupBytes >> 4;
constexpr u64 kStepChunkGrouped = kGroupBytes >> 4;
