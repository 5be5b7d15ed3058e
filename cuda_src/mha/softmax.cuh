// Online softmax for kernels that keep P in the registers of S until the product before has ended: the
// exponentials are taken in place and packed later. See mla/softmax.cuh for the references m and why a
// row's follows its maximum only when that exceeds it by more than kLazyLog2.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragment_rows.cuh"
#include "layout/rescale.cuh"

// kKeepsMaxima: rows' maxima are wanted; references may be smaller.
template <bool kKeepsMaxima = false>
struct LazySoftmax {
    float m[2] = {-kInfinity, -kInfinity};  // references, in units of the scores
    float l[2] = {0.0f, 0.0f};              // this thread's share of the row sums
    float factor[2] = {1.0f, 1.0f};         // for O before P V of the block
    bool rescales = false;                  // whether a factor of the warp is not 1
    float top_score[2] = {-kInfinity, -kInfinity};

    // Replaces the scores of a block by their probabilities. All lanes of a warp call.
    template <int kCount>
    __device__ __forceinline__ void block(float (&s)[kCount], float scale_log2) {
        float top[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
#pragma unroll
        for (int j = 4; j < kCount; j += 2)
            top[(j >> 1) & 1] = fmaxf(top[(j >> 1) & 1], fmaxf(s[j], s[j + 1]));
        bool follows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = quad_max(top[r]);
            if constexpr (kKeepsMaxima) top_score[r] = fmaxf(top_score[r], top[r]);
            // Not for -inf against -inf; a row depends on itself alone.
            follows[r] = (top[r] - m[r]) * scale_log2 > kLazyLog2;
        }
        rescales = __any_sync(0xffffffff, follows[0] || follows[1] || is_far);
        if (rescales) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float m_new = follows[r] ? top[r] : m[r];
                factor[r] = follows[r] ? exp2_approx((m[r] - m_new) * scale_log2) : 1.0f;
                l[r] *= factor[r];
                m[r] = m_new;
            }
            is_far = far(m[0], scale_log2) || far(m[1], scale_log2);
            if (is_far) subtract_far_references(s, scale_log2);
        }
        float offset[2];  // 0 where the reference is -inf, or is subtracted already
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            offset[r] = m[r] * scale_log2;
            if (fabsf(offset[r]) > kFarExponent) offset[r] = 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const int r = (j >> 1) & 1;
            s[j] = exp2_approx(fmaf(s[j], scale_log2, -offset[r]));
            l[r] += s[j];
        }
    }
    // O before P V of the block that `block` saw last.
    template <int kCount>
    __device__ __forceinline__ void rescale(float (&o)[kCount]) const {
        if (rescales) multiply_rows(o, factor[0], factor[1]);
    }

  private:
    bool is_far = false;  // whether a reference of the thread is

    __device__ __forceinline__ static bool far(float m, float scale_log2) {
        return fabsf(m * scale_log2) > kFarExponent && m != -kInfinity;
    }
    // A row depends on itself alone: one reference may be far and the other not.
    template <int kCount>
    __device__ __forceinline__ void subtract_far_references(float (&s)[kCount], float scale_log2) const {
        const float subtracted[2] = {far(m[0], scale_log2) ? m[0] : 0.0f,
                                     far(m[1], scale_log2) ? m[1] : 0.0f};
#pragma unroll
        for (int j = 0; j < kCount; ++j) s[j] = __fsub_rn(s[j], subtracted[(j >> 1) & 1]);
    }
};

// Packs probabilities as A fragments of 16 columns each.
template <Dtype kDtype, int kCount>
__device__ __forceinline__ void pack_probabilities(const float (&s)[kCount], u32 (&p)[kCount / 8][4]) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2) p[j / 8][j / 2 % 4] = pack_16bit<kDtype>(s[j], s[j + 1]);
}
