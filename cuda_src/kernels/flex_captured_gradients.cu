// Gradients of the arrays that a score function of flex attention reads. Of each score the function says what
// it adds where (flex/mods.cuh, Site), from the gradient of its result, P (dO V^T - delta). This kernel
// computes P and dP of all scores once more, after mha_backward_prepare.cu, and sums.
// docs/kernels/flex_backward.md.
//
// A CTA owns kTileKeys keys of a KV head and walks blocks of 64 queries as mha_backward.cu does with FLEX:
//   warpgroup 0, warp 0   copies K and V once, then Q, dO and the rows' lse, references and delta
//   warpgroup 0, warp 1   clears rows of Q and dO that see no key
//   warpgroups 1, 2       S^T = K Q^T and dP^T = V dO^T of 64 keys each; sums
// What goes to the same place from all keys, all queries or both of a tile is summed before it is added.
#include "common/math.cuh"
#include "common/types.cuh"
#include "flex/captured_sums.cuh"
#include "flex/query_lists.cuh"
#include "layout/swizzled_tile.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "mha/key_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimQK = D_QK, kDimV = D_V, kStages = STAGES;
constexpr int kConsumers = 2, kTileKeys = 64 * kConsumers;
constexpr int kChunksQK = ceil_div(kDimQK, 64), kChunksV = ceil_div(kDimV, 64);
constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kRegisters = 232, kProducerRegisters = 40;

using KeyRows = SwizzledTile<kTileKeys>;     // of K and V
using BlockRows = SwizzledTile<kBlockRows>;  // of Q and dO

struct SharedMemoryPlan {
    unsigned char k[kChunksQK * KeyRows::kBytes];
    unsigned char v[kChunksV * KeyRows::kBytes];
    unsigned char q[kStages][kChunksQK * BlockRows::kBytes];
    unsigned char dout[kStages][kChunksV * BlockRows::kBytes];
    float lse[kStages][kBlockRows], delta[kStages][kBlockRows], references[kStages][kBlockRows];
    KeyTile tile;
    WalkState walk;
    QueryStep steps[kPublishedSteps];
    int trimmed[kStages];  // whether the block has rows that see no key, or that have references
    u64 bar_k_full, bar_v_full;
    u64 bar_q_landed[kStages], bar_dout_landed[kStages];  // rows are still to be cleared
    u64 bar_q_full[kStages], bar_q_free[kStages];         // with lse and references
    u64 bar_dout_full[kStages], bar_dout_free[kStages];   // with delta
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

struct Consumer {
    const Params& params;
    SharedMemoryPlan& smem;
    const KeyTile& tile;
    const int wg, warp_idx;
    u32 number = 0;  // of the step

    using Scores = float[kBlockRows / 2];

    __device__ __forceinline__ void run() {
        CapturedSums sums(params);
        mbarrier_wait_parity(smem_address(&smem.bar_k_full), 0);
        mbarrier_wait_parity(smem_address(&smem.bar_v_full), 0);
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[0]), 0);
        const bool is_cut = tile.first_key + kTileKeys > tile.k_len;
        QueryStep next = published();
        bool is_there = next.is_there();
#pragma unroll 1
        while (is_there) {
            const QueryStep step = next;
            const u32 stage = number % kStages, parity = number / kStages & 1;
            bool masked = is_cut;
            if constexpr (kTrims) masked |= smem.trimmed[stage] != 0;
            if constexpr (MaskMod::kIsThere) masked |= step.is_partial();
            Scores s, dp;
            issue_product<kDimQK>(s, smem.k, smem.q[stage]);
            mbarrier_wait_parity(smem_address(&smem.bar_dout_full[stage]), parity);
            issue_product<kDimV>(dp, smem.v, smem.dout[stage]);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            wgmma_pin(dp);
            if (warp_uniform(masked)) {
                take_block<true>(step, stage, s, dp, sums);
            } else {
                take_block<false>(step, stage, s, dp, sums);
            }
            mbarrier_arrive(smem_address(&smem.bar_q_free[stage]));
            mbarrier_arrive(smem_address(&smem.bar_dout_free[stage]));
            ++number;
            is_there = !step.is_last();
            if (is_there) {
                mbarrier_wait_parity(smem_address(&smem.bar_q_full[number % kStages]), number / kStages & 1);
                next = published();
            }
            if (!is_there || next.head != step.head || next.request != step.request)
                sums.flush_head(step.request, step.head, key_of(0), key_of(1));
        }
        sums.finish();
    }

  private:
    __device__ __forceinline__ const QueryStep& published() const {
        return smem.steps[number % kPublishedSteps];
    }

    template <int kDim>
    __device__ __forceinline__ void issue_product(Scores& s, const unsigned char* keys,
                                                  const unsigned char* rows) const {
        const u64 desc_keys = KeyRows::k_major(smem_address(keys) + 64 * wg * KeyRows::kRowBytes);
        const u64 desc_rows = BlockRows::k_major(smem_address(rows));
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k)
            wgmma_ss<kDtype>(s, desc_keys + k / 4 * KeyRows::kStepTile + k % 4 * KeyRows::kStepK,
                             desc_rows + k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK, k > 0);
        wgmma_commit_group();
    }

    // The thread's two keys. Its queries are columns 8 j + 2 (lane % 4) and the next of the block:
    // accumulators 4 j and 4 j + 1 for the first key, the two behind them for the second.
    __device__ __forceinline__ int key_of(int r) const {
        return tile.first_key + 64 * wg + warp_idx * 16 + lane_index() / 4 + 8 * r;
    }

    // kMasked: some query may not see some key.
    template <bool kMasked>
    __device__ __forceinline__ void take_block(const QueryStep& step, u32 stage, const Scores& s,
                                               const Scores& dp, CapturedSums& sums) const {
        const int q_len = params.seqlen_q, kv_len = params.seqlen_k, b = step.request, h = step.head;
        const int first_query = step.block * kBlockRows + 2 * (lane_index() % 4);
        const int keys[2] = {key_of(0), key_of(1)};
        const float2* lses = reinterpret_cast<const float2*>(smem.lse[stage]) + lane_index() % 4;
        const float2* deltas = reinterpret_cast<const float2*>(smem.delta[stage]) + lane_index() % 4;
        const float2* references = reinterpret_cast<const float2*>(smem.references[stage]) + lane_index() % 4;
        CapturedSums::Block of_queries;
        of_queries.clear();
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
            const float2 lse = lses[4 * j], delta = deltas[4 * j], reference = references[4 * j];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int i = 4 * j + c, r = c >> 1;
                const float row_lse = (c & 1) ? lse.y : lse.x;
                int q_idx = first_query + 8 * j + (c & 1), kv_idx = keys[r];
                if constexpr (kMasked)
                    q_idx = min_int(q_idx, q_len - 1), kv_idx = min_int(kv_idx, kv_len - 1);
                const float score = s[i] * params.score_scale;
                const float value = params.score_mod(score, b, h, q_idx, kv_idx, q_len, kv_len);
                // Rows of other blocks have none.
                const float above = kMasked ? __fsub_rn(value, (c & 1) ? reference.y : reference.x) : value;
                const float p = exp2_approx(fmaf(above, params.softmax_scale_log2, -row_lse));
                bool seen = p != 0.0f;
                if constexpr (kMasked) {
                    seen &= keys[r] < kv_len && row_lse != kInfinity;
                    if constexpr (MaskMod::kIsThere)
                        seen &= !step.is_partial() | params.mask_mod(b, h, q_idx, kv_idx, q_len, kv_len);
                }
                const float grad = p * (dp[i] - ((c & 1) ? delta.y : delta.x));
                CapturedSums::Sink sink{sums, of_queries, 2 * j + (c & 1), r, seen};
                params.score_mod.captured_gradients(grad, score, b, h, q_idx, kv_idx, q_len, kv_len, sink);
            }
        }
        sums.flush_queries(of_queries, b, h, step.block * kBlockRows);
    }
};

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    mbarrier_init(smem_address(&smem.bar_k_full), 1);
    mbarrier_init(smem_address(&smem.bar_v_full), 1);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(smem_address(&smem.bar_q_landed[i]), 1);
        mbarrier_init(smem_address(&smem.bar_dout_landed[i]), 1);
        mbarrier_init(smem_address(&smem.bar_q_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_dout_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_q_free[i]), 128 * kConsumers + 32);
        mbarrier_init(smem_address(&smem.bar_dout_free[i]), 128 * kConsumers);
    }
    mbarrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flex_captured_gradients(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    if (threadIdx.x == 0) init_barriers(smem);
    if (threadIdx.x < 32) {
        const KeyTile found = find_key_tile<kTileKeys>(params);
        if (threadIdx.x == 0) smem.tile = found;
    }
    __syncthreads();
    const KeyTile& tile = smem.tile;
    if (wg_idx == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (warp_idx == 0) {
            if (elect_one_sync()) load_listed<KeyRows, BlockRows, false, false, true>(params, smem, tile);
        } else if (warp_idx == 1) {
            trim_listed<BlockRows>(smem);
        }
        return;
    }
    setmaxnreg_inc<kRegisters>();
    Consumer{params, smem, tile, wg_idx - 1, warp_idx}.run();
}
