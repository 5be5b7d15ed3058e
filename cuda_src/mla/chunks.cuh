// Q, K, V and P in shared memory consist of chunks, one after another. A chunk is 64 rows (query rows or
// tokens) by 64 columns, and half a chunk has 32 columns.
#pragma once
#include "layout/swizzled_tile.cuh"
#include "mla/dimensions.cuh"

using Chunk = SwizzledTile<kBlockTokens, 128>;
using HalfChunk = SwizzledTile<kBlockTokens, 64>;
static_assert(kBlockM == kBlockTokens, "chunks hold query rows as well as tokens");
