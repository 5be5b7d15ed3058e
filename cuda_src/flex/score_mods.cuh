// The score and the mask function of a call, applied to the scores of a block of keys (flex attention).
#pragma once
#include "common/math.cuh"
#include "mha/array_keys.cuh"
#include "mha/cta.cuh"
#include "mha/params.cuh"
#include "mha/tiles.cuh"

// `heads`, `tokens`: of the thread's two rows. `first_key`: of the block. `partial`: with kMasked, the block
// is in the lists of partial ones, and the mask function is called.
__device__ __forceinline__ void apply_mods(const Params& params, const Tile& tile, const int (&heads)[2],
                                           const int (&tokens)[2], BlockKind kind, int first_key,
                                           bool partial, Scores& s) {
    const int q_len = tile.q_len, kv_len = tile.k_len, b = tile.request;
    const int first = first_key + 2 * (lane_index() % 4);
    // Rows past the last token take part, since all lanes do what one does; their results go nowhere.
    const int q_idx[2] = {min_int(tokens[0], q_len - 1), min_int(tokens[1], q_len - 1)};
    if (kind == BlockKind::kMasked || (kind == BlockKind::kCut && first_key + kTileKeys > kv_len)) {
#pragma unroll
        for (int j = 0; j < kTileKeys / 2; ++j) {
            const int r = (j >> 1) & 1, key = first + ArrayKeys::column_of(j);
            const int kv_idx = min_int(key, kv_len - 1);
            if constexpr (ScoreMod::kIsThere)
                s[j] =
                    params.score_mod(s[j] * params.score_scale, b, heads[r], q_idx[r], kv_idx, q_len, kv_len);
            bool seen = key < kv_len;
            if constexpr (MaskMod::kIsThere)
                if (kind == BlockKind::kMasked)
                    seen &= !partial | params.mask_mod(b, heads[r], q_idx[r], kv_idx, q_len, kv_len);
            s[j] = seen ? s[j] : -kInfinity;
        }
    } else if constexpr (ScoreMod::kIsThere) {
#pragma unroll
        for (int j = 0; j < kTileKeys / 2; ++j) {
            const int r = (j >> 1) & 1;
            s[j] = params.score_mod(s[j] * params.score_scale, b, heads[r], q_idx[r],
                                    first + ArrayKeys::column_of(j), q_len, kv_len);
        }
    }
}
