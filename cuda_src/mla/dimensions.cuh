// Sizes that every MLA kernel shares.
#pragma once

constexpr int kDimV = 512;        // columns of V, the first ones of K
constexpr int kDimRope = 64;      // columns of RoPE, the last ones of K
constexpr int kBlockM = 64;       // query rows of a tile
constexpr int kBlockTokens = 64;  // tokens of a KV block
