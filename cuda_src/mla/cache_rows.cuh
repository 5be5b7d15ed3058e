// The bytes of a token in a paged MLA cache, and how the lanes of a warp share them.
//
//   kV32     DeepSeek-V3.2  656 bytes: 512 e4m3 | 4 float32 scales, one per 128 values | 64 bf16 RoPE
//   kModel1  DeepSeek-V4    584 bytes; a block of n tokens is n x (448 e4m3 | 64 bf16 RoPE), followed by
//                           n x (7 e8m0 scales, one per 64 values | a zero byte)
//   kBf16Wide, kBf16Narrow  576 and 512 bf16, the last 64 RoPE
// Rows of V3.2 are aligned to 16 bytes, rows of MODEL1 to 8, so that blocks with an odd number of tokens need
// no padding. The formats are those of FlashMLA (github.com/deepseek-ai/FlashMLA).
//
// A row is divided into vectors of eight columns. A warp has four tokens at a time, and lane l has vectors l
// and 32 + l of each. In the wide formats (d_qk 576) these are the columns before RoPE, and the lane also has
// RoPE vector l % 8 of token l / 8. In the narrow formats (d_qk 512) the second vector of the last eight
// lanes is RoPE.
#pragma once
#include "common/types.cuh"
#include "mla/dimensions.cuh"

enum class CacheFormat : int { kV32 = 0, kModel1 = 1, kBf16Wide = 2, kBf16Narrow = 3 };

constexpr int kUnitTokens = 4;                 // tokens of a warp at a time
constexpr int kTokenLanes = 32 / kUnitTokens;  // lane l looks up page and scale of its own token, l / this
constexpr int kVectorColumns = 8;
constexpr int kLaneVectors = 2;  // per token
constexpr int kRopeVectors = kDimRope / kVectorColumns;
static_assert(kUnitTokens * kRopeVectors == 32, "one RoPE vector of a unit per lane");

template <CacheFormat kFormat>
struct CacheRow {
    static constexpr bool kQuantized = kFormat == CacheFormat::kV32 || kFormat == CacheFormat::kModel1;
    static constexpr bool kWide = kFormat == CacheFormat::kV32 || kFormat == CacheFormat::kBf16Wide;
    static constexpr int kDimNope = kWide ? 512 : 448;
    static constexpr int kDimQk = kDimNope + kDimRope;
    static constexpr int kTile = kWide ? 128 : 64;             // values per scale
    static constexpr int kTileLanes = kTile / kVectorColumns;  // lanes that share a scale
    static constexpr int kTilesPerPass =
        32 / kTileLanes;  // tile of vector v of lane l: l / kTileLanes + v * this
    static constexpr int kValueBytes = kQuantized ? 1 : 2;
    static constexpr int kScaleBytes = kFormat == CacheFormat::kV32 ? 4 : 1;
    static constexpr int kScalesBytes = kFormat == CacheFormat::kV32 ? 16 : 8;  // of a token
    static constexpr int kScalesOffset = kDimNope;                              // V3.2: into the row
    static constexpr int kRopeOffset =
        kDimNope * kValueBytes + (kFormat == CacheFormat::kV32 ? kScalesBytes : 0);
    static constexpr int kRowBytes = kRopeOffset + 2 * kDimRope;                 // MODEL1: without its scales
    static constexpr int kAlignment = kFormat == CacheFormat::kModel1 ? 8 : 16;  // of rows, in bytes

    // Whether vector `v` of a lane is RoPE. If so, it is RoPE vector rope_vector(lane_idx).
    __device__ static __forceinline__ bool is_rope(int lane_idx, int v) {
        return !kWide && v == kLaneVectors - 1 && lane_idx >= 32 - kRopeVectors;
    }
    __device__ static __forceinline__ int rope_vector(int lane_idx) { return lane_idx % kRopeVectors; }

    // Byte offsets within a block.
    __device__ static __forceinline__ i64 row_offset(int token, int token_stride) {
        return static_cast<i64>(token) * (kQuantized ? kRowBytes : token_stride);
    }
    __device__ static __forceinline__ i64 scales_offset(int token, int page_block_size) {
        if constexpr (kFormat == CacheFormat::kV32)
            return static_cast<i64>(token) * kRowBytes + kScalesOffset;
        return static_cast<i64>(page_block_size) * kRowBytes + static_cast<i64>(token) * kScalesBytes;
    }
};
