// Blocks of queries of a tile of keys in flex attention, from lists: the roles of mha/interval_queries.cuh
// for the kernels that compute dQ, dK and dV.
#pragma once
#include "flex/query_lists.cuh"
#include "mha/backward_cta.cuh"

constexpr int kKeySignals = 1;  // arrivals that complete bar_k_full

template <class KeyRows, class Plan>
__device__ __forceinline__ void load(const Params& params, Plan& smem, const KeyTile& tile) {
    load_listed<KeyRows, BlockRows, true, kNeedsDq, kNeedsDs>(params, smem, tile);
}
template <class KeyRows, class Plan>
__device__ __forceinline__ void trim(const Params&, Plan& smem, const KeyTile&) {
    if constexpr (kTrims) trim_listed<BlockRows>(smem);
}

template <class KeyRows, class Plan>
class AddedBlocks {
  public:
    __device__ __forceinline__ AddedBlocks(const Params& params, Plan& smem, const KeyTile&)
        : params(params), smem(smem) {
        read();
        there = step.is_there();
    }
    __device__ __forceinline__ bool is_there() const { return there; }
    __device__ __forceinline__ void advance() {
        there = !step.is_last();
        ++number;
        if (there) read();
    }
    __device__ __forceinline__ int place() const { return static_cast<int>(step.place(params)); }
    __device__ __forceinline__ int turn() const { return step.turn(); }

  private:
    const Params& params;
    Plan& smem;
    u32 number = 0;
    bool there;
    QueryStep step;

    // Steps are published while their data is copied: nobody waits here for long.
    __device__ __forceinline__ void read() {
        mbarrier_wait_parity(smem_address(&smem.bar_step[number % kPublishedSteps]),
                             number / kPublishedSteps & 1);
        step = smem.steps[number % kPublishedSteps];
    }
};

// A thread's keys are 64 keys from `first_key` on.
template <class Plan>
struct Queries {
    const Params& params;
    const Plan& smem;
    const int key;  // the thread's first
    const bool is_cut;
    QueryStep step;
    u32 number = 0;
    bool masked;   // some query may not see some key
    u32 seen = 0;  // then: a bit for each accumulator

    __device__ __forceinline__ Queries(const Params& params, const Plan& smem, const KeyTile& tile,
                                       int first_key, int key)
        : params(params), smem(smem), key(key), is_cut(warp_uniform(first_key + 64 > tile.k_len) != 0) {}
    // Whether there is a block at all.
    __device__ __forceinline__ bool begins() const {
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[0]), 0);
        return smem.steps[0].is_there();
    }
    // After Q's barrier: what the step is.
    __device__ __forceinline__ void look(u32 stage) {
        step = smem.steps[number % kPublishedSteps];
        masked = is_cut;
        if constexpr (kTrims) masked |= smem.trimmed[stage] != 0;
        if constexpr (MaskMod::kIsThere) masked |= step.is_partial();
    }
    // Then, with the lse of the thread's queries: which keys they see. What the mask function reads is on its
    // way while S^T and dP^T are computed.
    template <class Pairs>
    __device__ __forceinline__ void find_seen(const Pairs& lses) {
        if (!is_masked()) return;
        const Function function(*this);
        seen = function.existing_keys();
        if constexpr (MaskMod::kIsThere) {
            if (warp_uniform(step.is_partial()) != 0) seen &= ~function.hidden();
        }
        // Scores of a row without keys are 0 where no function makes them, since the row was cleared.
        if constexpr (ScoreMod::kIsThere) {
#pragma unroll
            for (int j = 0; j < kBlockRows / 8; ++j) {
                const float2 lse = lses[j];
                if (lse.x == kInfinity) seen &= ~(0x5u << 4 * j);
                if (lse.y == kInfinity) seen &= ~(0xau << 4 * j);
            }
        }
    }
    // To the next block; whether there is one.
    __device__ __forceinline__ bool advance() {
        ++number;
        return warp_uniform(step.is_last()) == 0;
    }
    __device__ __forceinline__ bool is_masked() const { return warp_uniform(masked) != 0; }

    // The score function of a block, which knows its masks.
    struct Function {
        const Params& params;
        int b, h, first_query, keys[2];

        __device__ __forceinline__ explicit Function(const Queries& queries)
            : params(queries.params),
              b(queries.step.request),
              h(queries.step.head),
              first_query(queries.step.block * kBlockRows + first_query_of_thread()) {
            // What depends on the keys alone is computed again in each step, not kept: registers are few. The
            // compiler knows that the keys are 8 apart, so that what depends on distances is computed once.
            int key = queries.key;
            asm volatile("" : "+r"(key));
            keys[0] = key, keys[1] = key + 8;
        }

        // A bit for each accumulator whose key exists.
        __device__ __forceinline__ u32 existing_keys() const {
            const int kv_len = params.seqlen_k;
            return (keys[0] < kv_len ? 0x33333333 : 0) | (keys[1] < kv_len ? 0xcccccccc : 0);
        }
        // A bit for each accumulator that the mask function hides.
        __device__ __forceinline__ u32 hidden() const {
            const int q_len = params.seqlen_q, kv_len = params.seqlen_k;
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < kBlockRows / 2; ++i) {
                const int q_idx = min_int(query(i), q_len - 1);
                const int kv_idx = min_int(keys[(i >> 1) & 1], kv_len - 1);
                if (!params.mask_mod(b, h, q_idx, kv_idx, q_len, kv_len)) bits |= 1u << i;
            }
            return bits;
        }

        // e = exp(score - lse) of accumulator i, and the derivative of the score by s. The reference of the
        // row is part of its lse (kernels/flex_row_references.cu): only masked blocks have such rows.
        template <bool kMasked>
        __device__ __forceinline__ float2 exponential(int i, float s, float lse, float reference) const {
            const int q_len = params.seqlen_q, kv_len = params.seqlen_k, key = keys[(i >> 1) & 1];
            int q_idx = query(i), kv_idx = key;
            if constexpr (kMasked) q_idx = min_int(q_idx, q_len - 1), kv_idx = min_int(key, kv_len - 1);
            ValueAndDerivative score = {s, 1.0f};
            if constexpr (ScoreMod::kIsThere)
                score = params.score_mod.value_and_derivative(s * params.score_scale, b, h, q_idx, kv_idx,
                                                              q_len, kv_len);
            if constexpr (kMasked && ScoreMod::kIsThere) score.value = __fsub_rn(score.value, reference);
            return {exp2_approx(fmaf(score.value, params.softmax_scale_log2, -lse)), score.derivative};
        }

      private:
        __device__ __forceinline__ int query(int i) const { return first_query + 8 * (i >> 2) + (i & 1); }
    };
};

// Whether dS has another factor than P.
constexpr bool kHasDerivative = !ScoreMod::kDerivativeIsOne;
