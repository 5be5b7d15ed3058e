// Q, K, V and P in shared memory are chunks of 64 rows (query rows or tokens) and 64 columns, one after
// another. Half a chunk has 32 columns.
#pragma once
#include "layout/swizzled_tile.cuh"
#include "mla/dimensions.cuh"

using Chunk = SwizzledTile<kBlockTokens, 128>;
using HalfChunk = SwizzledTile<kBlockTokens, 64>;
static_assert(kBlockM == kBlockTokens, "chunks hold query rows as well as tokens");
