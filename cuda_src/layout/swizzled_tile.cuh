// Shared-memory tiles of a 16-bit type that TMA writes with a swizzle and wgmma reads, and their matrix
// descriptors.
//
// A tile has rows of 128 or 64 bytes, 64 or 32 columns, one after another; wider matrices are several tiles.
// The swizzle permutes the 16-byte units of a row: of 128 bytes, unit u of row r lies at unit u ^ (r % 8); of
// 64 bytes, at u ^ (r / 2 % 4). A tile begins at a multiple of eight rows' bytes.
//
// Matrix descriptor (PTX ISA, "Matrix Descriptor Format"; addresses in units of 16 bytes):
//   bits 0-13 start address, 16-29 leading byte offset (LBO), 32-45 stride byte offset (SBO),
//   62-63 swizzle (0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes).
//   K-major (rows x k, k contiguous): SBO is the distance of groups of eight rows. LBO is not used.
//   MN-major (k x columns, columns contiguous): LBO is the distance of tiles side by side, SBO that of groups
//   of eight rows along k.
// The hardware permutes the final address, so steps along k just add to the start address.
#pragma once
#include "common/types.cuh"

constexpr int kGroupRows = 8;  // after which the permutation repeats

__device__ __forceinline__ constexpr u64 matrix_descriptor(u32 smem, int lbo_bytes, int sbo_bytes,
                                                           int swizzle) {
    return static_cast<u64>(swizzle) << 62 | static_cast<u64>(sbo_bytes >> 4) << 32 |
           static_cast<u64>(lbo_bytes >> 4) << 16 | ((smem & 0x3ffff) >> 4);
}

template <int kTileRows, int kTileRowBytes = 128>
struct SwizzledTile {
    static_assert(kTileRows % kGroupRows == 0, "the permutation repeats after eight rows");
    static_assert(kTileRowBytes == 128 || kTileRowBytes == 64, "swizzles are of 128 or 64 bytes");
    static constexpr int kRows = kTileRows;
    static constexpr int kRowBytes = kTileRowBytes;
    static constexpr int kCols = kRowBytes / 2;
    static constexpr int kBytes = kRows * kRowBytes;
    static constexpr int kGroupBytes = kGroupRows * kRowBytes;
    static constexpr int kSwizzle = kRowBytes == 128 ? 1 : 2;

    // Byte offset of 16-byte unit `unit` of row `row`.
    __device__ __forceinline__ static constexpr u32 offset(int row, int unit) {
        return row * kRowBytes + ((unit ^ (row / (128 / kRowBytes) & (kRowBytes / 16 - 1))) << 4);
    }
    __device__ __forceinline__ static constexpr u64 k_major(u32 smem) {
        return matrix_descriptor(smem, 0, kGroupBytes, kSwizzle);
    }
    __device__ __forceinline__ static constexpr u64 mn_major(u32 smem) {
        return matrix_descriptor(smem, kBytes, kGroupBytes, kSwizzle);
    }
    // What to add to a descriptor for 16 columns on (K-major), for 16 rows on (MN-major), and for the next
    // tile.
    static constexpr u64 kStepK = 32 >> 4;
    static constexpr u64 kStepMn = 16 * kRowBytes >> 4;
    static constexpr u64 kStepTile = kBytes >> 4;
};

// Tiles side by side whose groups of eight rows are interleaved: first rows 0 to 7 of all kTiles tiles, then
// rows 8 to 15, and so on. A warp that fills eight rows has them in one place.
template <int kTiles>
struct GroupMajorTiles {
    static constexpr int kGroupBytes = kGroupRows * 128;  // of one tile

    // For both K-major and MN-major use.
    __device__ __forceinline__ static constexpr u64 descriptor(u32 smem) {
        return matrix_descriptor(smem, kGroupBytes, kTiles * kGroupBytes, 1);
    }
    static constexpr u64 kStepMn = 2 * kTiles * kGroupBytes >> 4;
    static constexpr u64 kStepTile = kGroupBytes >> 4;
};

// K-major, 16 columns, not swizzled: the units of columns 0-7 of all rows, 16 bytes each, then `unit_bytes`
// after the first those of columns 8-15.
__device__ __forceinline__ constexpr u64 descriptor_unswizzled(u32 smem, int unit_bytes) {
    return matrix_descriptor(smem, unit_bytes, kGroupRows * 16, 0);
}
