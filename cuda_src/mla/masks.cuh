// Masks: which keys of a block a query does not attend. A mask is a type with
//
//   static constexpr int kMaxColumns   how many columns of a block it can tell apart
//   bool hides(int i, int column) const
//
// for the thread's query i (0 or 1) and the key in column `column` of the thread's scores. Columns are
// numbered as the first lane of a quad has them, which the compiler knows; a mask adds its own lane's offset,
// 2 (lane % 4). Masks that depend on more (windows, chunks, a user's function) keep it in members.
#pragma once
#include "common/types.cuh"
#include "ptx/sync.cuh"

// -inf in scores of hidden keys, in fragments whose rows are queries: the thread has queries 0 and 1.
template <int kCount, class Mask>
__device__ __forceinline__ void apply_mask(float (&s)[kCount], const Mask& mask) {
    static_assert(2 * kCount <= Mask::kMaxColumns, "the mask has fewer columns than the scores");
#pragma unroll
    for (int j = 0; j < kCount; ++j)
        if (mask.hides((j >> 1) & 1, 8 * (j >> 2) + (j & 1))) s[j] = -kInfinity;
}

// How many keys a query token attends: all of them, or with a causal mask those up to its own, where the s_q
// query tokens are the last of `seqlen`.
__device__ __forceinline__ int visible_keys(int seqlen, int s_q, int token, int causal) {
    return causal ? seqlen - s_q + token + 1 : seqlen;
}

// Keys whose bit is not set are hidden, for all queries.
struct KeyBits {
    static constexpr int kMaxColumns = 64;
    u32 low, high;

    // Bits of the block's 64 keys.
    __device__ __forceinline__ KeyBits(u32 valid_low, u32 valid_high) {
        const int shift = 2 * (lane_index() % 4);
        low = valid_low >> shift;
        high = valid_high >> shift;
    }
    __device__ __forceinline__ bool hides(int, int column) const {
        return !((column < 32 ? low : high) >> column % 32 & 1);
    }
};
