// Online softmax over blocks of keys, on scores as the accumulators of a product hold them (ptx/wgmma.cuh):
// of kCount scores a thread has half in each of two rows.
//
// Probabilities are 2^(S - m_ref). The reference m_ref of a row follows the row's maximum only when a
// probability may exceed 2^kLazyLog2: O is rescaled rarely, and P stays in the range of 16-bit types. The
// result is exact, since numerator and denominator carry the same factor. The idea is FlashAttention-4's
// conditional rescaling. A thread needs the sum of its probabilities of a row anyway; while that is at most
// kLazySum, none of them is larger, and no maximum is looked for.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragment_rows.cuh"
#include "layout/rescale.cuh"
#include "ptx/sync.cuh"

struct OnlineSoftmax {
    float m[2] = {-kInfinity, -kInfinity};  // m_ref
    float l[2] = {0.0f, 0.0f};              // this thread's share of the row sums

    // P = 2^(S - m_ref) of a block, packed as A fragments, and the factors to be applied to O before P V of
    // the block. All lanes of a warp call.
    template <Dtype kDtype, int kCount>
    __device__ __forceinline__ void block(const float (&s)[kCount], float sm_scale_log2, u32 (&p)[kCount / 2],
                                          float (&scale)[2]) {
        float sum[2];
        scale[0] = scale[1] = 1.0f;
        // In the first block there are no references yet: the maxima come first. Later the references nearly
        // always stand.
        bool outgrown[2] = {true, true};
        bool looks = __all_sync(0xffffffff, m[0] == -kInfinity && m[1] == -kInfinity);
#pragma unroll 1
        while (true) {  // once or twice: two copies of the exponentials would spill registers
            if (looks) follow_maxima(s, sm_scale_log2, outgrown, scale);
            exponentials<kDtype>(s, sm_scale_log2, p, sum);
            if (looks) break;
#pragma unroll
            for (int r = 0; r < 2; ++r) outgrown[r] = m[r] == -kInfinity || !(sum[r] <= kLazySum);
            looks = __any_sync(0xffffffff, outgrown[0] || outgrown[1]);
            if (!looks) break;
        }
        l[0] += sum[0];
        l[1] += sum[1];
    }

    // Writes the sums and references of 64 rows; all lanes of warp `warp_idx` of the warpgroup call.
    __device__ __forceinline__ void store(float* row_sum, float* row_max, int warp_idx) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] = quad_sum(l[r]);
            const int lane_idx = lane_index();  // once: leads_quad and first_row would each read it anew
            const int row = warp_idx * 16 + lane_idx / 4 + 8 * r;
            if (lane_idx % 4 == 0) {
                row_sum[row] = l[r];
                row_max[row] = m[r];
            }
        }
    }

  private:
    // Raises the references of rows that have outgrown theirs, in any of a row's four threads.
    template <int kCount>
    __device__ __forceinline__ void follow_maxima(const float (&s)[kCount], float sm_scale_log2,
                                                  const bool (&outgrown)[2], float (&scale)[2]) {
        float row_max[2] = {-kInfinity, -kInfinity};
#pragma unroll
        for (int j = 0; j < kCount; ++j) row_max[(j >> 1) & 1] = fmaxf(row_max[(j >> 1) & 1], s[j]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_max[r] = quad_max(row_max[r]) * sm_scale_log2;
            // Other rows of the warp stay as they are: a row depends on itself alone.
            const bool follows = __ballot_sync(0xffffffff, outgrown[r]) >> (lane_index() & ~3) & 0xf;
            const float m_new = follows ? fmaxf(row_max[r], m[r]) : m[r];
            // O is still zero while m_ref is -inf
            scale[r] = m_new == m[r] || m[r] == -kInfinity ? 1.0f : exp2_approx(m[r] - m_new);
            l[r] *= scale[r];
            m[r] = m_new;
        }
    }

    // P by the references, packed, and its sums of this thread.
    template <Dtype kDtype, int kCount>
    __device__ __forceinline__ void exponentials(const float (&s)[kCount], float sm_scale_log2,
                                                 u32 (&p)[kCount / 2], float (&sum)[2]) const {
        const float offset[2] = {m[0] == -kInfinity ? 0.0f : m[0], m[1] == -kInfinity ? 0.0f : m[1]};
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int j = 0; j < kCount; j += 2) {
            const int r = (j >> 1) & 1;
            const float p0 = exp2_approx(fmaf(s[j], sm_scale_log2, -offset[r]));
            const float p1 = exp2_approx(fmaf(s[j + 1], sm_scale_log2, -offset[r]));
            sum[r] += p0 + p1;
            p[j / 2] = pack_16bit<kDtype>(p0, p1);
        }
    }
};

// The largest scores of a thread's two rows. (The references of OnlineSoftmax may be smaller.) NaN if a score
// is NaN.
struct RowMaximum {
    float top[2] = {-kInfinity, -kInfinity};  // of this thread's columns, not scaled

    template <int kCount>
    __device__ __forceinline__ void block(const float (&s)[kCount]) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) top[(j >> 1) & 1] = max_or_nan(top[(j >> 1) & 1], s[j]);
    }

    // Of all columns of row `r`; all lanes of a warp call.
    __device__ __forceinline__ float of_row(int r) const {
        const float pair = max_or_nan(top[r], __shfl_xor_sync(0xffffffff, top[r], 1));
        return max_or_nan(pair, __shfl_xor_sync(0xffffffff, pair, 2));
    }
    // Writes the maxima of 64 rows, in base 2; all lanes of warp `warp_idx` of the warpgroup call.
    __device__ __forceinline__ void store(float* row_top, float sm_scale_log2, int warp_idx) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float row = of_row(r) * sm_scale_log2;
            const int lane_idx = lane_index();  // once, as above
            if (lane_idx % 4 == 0) row_top[warp_idx * 16 + lane_idx / 4 + 8 * r] = row;
        }
    }
};

// An online softmax for kernels that also want the row maxima, which it looks for first. Scores and their
// probabilities then never need registers at the same time. A reference begins as the row's first maximum,
// and follows one that exceeds it by more than kLazyLog2, by a whole number: a factor on O is a power of two
// and is stored as one byte.
struct MaximumFirstSoftmax : OnlineSoftmax {
    RowMaximum maximum;

    // As in OnlineSoftmax, but O is to be multiplied by shrink_factor(shrink) before P V of the block.
    template <Dtype kDtype, int kCount>
    __device__ __forceinline__ void block(const float (&s)[kCount], float sm_scale_log2, u32 (&p)[kCount / 2],
                                          u32 (&shrink)[2]) {
        maximum.block(s);
        shrink[0] = shrink[1] = 0;
        const bool outgrown[2] = {!(maximum.top[0] * sm_scale_log2 <= m[0] + kLazyLog2),
                                  !(maximum.top[1] * sm_scale_log2 <= m[1] + kLazyLog2)};
        if (__any_sync(0xffffffff, outgrown[0] || outgrown[1])) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float top = quad_max(maximum.top[r]) * sm_scale_log2;
                // In any of the row's four threads; a row depends on itself alone.
                const bool follows = __ballot_sync(0xffffffff, outgrown[r]) >> (lane_index() & ~3) & 0xf;
                // O is still zero while m_ref is -inf
                if (m[r] != -kInfinity && follows) {
                    const float rise = fmaxf(ceilf(top - m[r]), 0.0f);
                    shrink[r] = static_cast<u32>(fminf(rise, 255.0f));
                    l[r] *= shrink_factor(shrink[r]);
                    m[r] += rise;
                } else if (follows) {
                    m[r] = fmaxf(top, m[r]);
                }
            }
        }
        const float offset[2] = {m[0] == -kInfinity ? 0.0f : m[0], m[1] == -kInfinity ? 0.0f : m[1]};
#pragma unroll
        for (int j = 0; j < kCount; j += 2) {
            const int r = (j >> 1) & 1;
            const float p0 = exp2_approx(fmaf(s[j], sm_scale_log2, -offset[r]));
            const float p1 = exp2_approx(fmaf(s[j + 1], sm_scale_log2, -offset[r]));
            l[r] += p0 + p1;
            p[j / 2] = pack_16bit<kDtype>(p0, p1);
        }
    }
    // 2^-shrink, or 0 where float32 has no normal number for it.
    __device__ __forceinline__ static float shrink_factor(u32 shrink) {
        return __uint_as_float(shrink < 127 ? (127 - shrink) << 23 : 0);
    }
};
