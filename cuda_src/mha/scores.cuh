// The score step: what happens to scores between Q K^T and the softmax.
//
//   kSoftcap   s = tanh(score_scale s); the cap is part of the factor behind it
//   kAlibi     s = score_factor s - slope |query - key|, in base 2
//
// Softmax then takes 2^(softmax_scale_log2 s).
#pragma once
#include "common/math.cuh"
#include "mha/params.cuh"

template <bool kSoftcap, bool kAlibi>
struct ScoreStep {
    float slope[2];   // times log2(e), of the thread's two rows
    int diagonal[2];  // the key that a row's token is aligned to

    // `first_key` is that of the lane's first column; Keys::column_of has the others.
    template <class Keys, int kCount>
    __device__ __forceinline__ void apply(const Params& params, float (&s)[kCount], int first_key) const {
        if constexpr (kSoftcap) {
#pragma unroll
            for (int j = 0; j < kCount; ++j) s[j] = tanh_approx(s[j] * params.score_scale);
        }
        if constexpr (kAlibi) {
            const float first[2] = {static_cast<float>(diagonal[0] - first_key),
                                    static_cast<float>(diagonal[1] - first_key)};
#pragma unroll
            for (int j = 0; j < kCount; ++j) {
                const int r = (j >> 1) & 1;
                const float distance = fabsf(first[r] - static_cast<float>(Keys::column_of(j)));
                s[j] = fmaf(-slope[r], distance, s[j] * params.score_factor);
            }
        }
    }
};
