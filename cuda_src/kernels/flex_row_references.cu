// References of the softmax for rows of queries whose lse is far from 0, as when a score function fills a
// whole row with -1e9. Such an lse is rounded by more than the logarithm of the row's sum, so the sum is
// computed once more from the scores. The kernels after this one take
// P = 2^(scale (score - reference) - lse): other rows have the reference 0 and keep their lse.
// docs/kernels/flex_backward.md.
//
//   in    q, k by TMA; lse [heads, rows of the scratch] in base 2, as mha_backward_prepare.cu leaves it
//   out   weights: the references; lse of the rows that are far: log2 of their sums
//   grid  a CTA of one warpgroup for each block of kBlockRows rows; without a far row it ends at once
//
// The warpgroup copies Q, then walks the tiles of keys that the lists have for the block, one at a time: a
// copy, S = Q K^T, the functions of the call, an online softmax.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragment_rows.cuh"
#include "layout/swizzled_tile.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "mha/softmax.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimQK = D_QK, kTileKeys = TILE_KEYS, kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kChunks = ceil_div(kDimQK, 64);

using KeyRows = SwizzledTile<kTileKeys>;
using BlockRows = SwizzledTile<kBlockRows>;
using Scores = float[kTileKeys / 2];

struct SharedMemoryPlan {
    unsigned char q[kChunks * BlockRows::kBytes];
    unsigned char k[kChunks * KeyRows::kBytes];
    u64 bar_q, bar_k;
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");

// The block of a CTA, and the requests and heads that its lists, its keys and the functions go by.
struct Block {
    int head, request, number;

    __device__ __forceinline__ explicit Block(const Params& params) {
        const i64 of_head = blockIdx.x % params.blocks;
        head = static_cast<int>(blockIdx.x / params.blocks);
        request = static_cast<int>(of_head / params.q_blocks);
        number = static_cast<int>(of_head % params.q_blocks);
    }
};

__device__ __forceinline__ bool is_far(float lse) { return fabsf(lse) > kFarExponent && lse != kInfinity; }

template <class Rows, int kBytes>
__device__ __forceinline__ void load(unsigned char (&dst)[kBytes], const TensorMap* map, u64& bar, int token,
                                     int head, int batch) {
    mbarrier_arrive_expect_tx(smem_address(&bar), kBytes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
        tma_load_4d(smem_address(dst) + chunk * Rows::kBytes, map, smem_address(&bar), 64 * chunk, token,
                    head, batch);
}

// Whether the lists of partial (0) or full (1) blocks have the block of queries for a tile of keys. Without
// lists all are full. All threads call.
__device__ __forceinline__ bool is_listed(const Params& params, const Block& block, int first_key, int kind) {
    if (params.q_num_blocks == nullptr) return kind == 1;
    const int* counts = kind == 0 ? params.q_num_blocks : params.full_q_num_blocks;
    const int* lists = kind == 0 ? params.q_indices : params.full_q_indices;
    if (counts == nullptr) return false;
    const i64 *of_counts = params.counts_strides + 3 * kind, *of_lists = params.lists_strides + 3 * kind;
    const i64 batch = block.request % params.mask_batches, head = block.head % params.mask_heads;
    const i64 column = first_key / params.block_k;
    const int count = min_int(counts[batch * of_counts[0] + head * of_counts[1] + column * of_counts[2]],
                              params.list_rows[kind]);
    const int* list = lists + batch * of_lists[0] + head * of_lists[1] + column * of_lists[2];
    bool found = false;
    for (int i = threadIdx.x; i < count; i += kThreads) found |= list[i] == block.number / params.block_rows;
    return __syncthreads_or(found) != 0;
}

// Scores as the softmax takes them: by the functions, -inf where a query does not see a key.
__device__ __forceinline__ void apply_mods(const Params& params, const Block& block, int first_key,
                                           bool partial, int warp_idx, Scores& s) {
    const int q_len = params.seqlen_q, kv_len = params.seqlen_k, b = block.request, h = block.head;
    const int first_query = block.number * kBlockRows + warp_idx * 16 + lane_index() / 4;
    const int first_column = first_key + 2 * (lane_index() % 4);
#pragma unroll
    for (int j = 0; j < kTileKeys / 2; ++j) {
        const int q_idx = min_int(first_query + 8 * ((j >> 1) & 1), q_len - 1);
        const int key = first_column + 8 * (j >> 2) + (j & 1), kv_idx = min_int(key, kv_len - 1);
        s[j] = params.score_mod(s[j] * params.score_scale, b, h, q_idx, kv_idx, q_len, kv_len);
        bool seen = key < kv_len;
        if constexpr (MaskMod::kIsThere)
            seen &= !partial | params.mask_mod(b, h, q_idx, kv_idx, q_len, kv_len);
        s[j] = seen ? s[j] : -kInfinity;
    }
}

// S = Q K^T of the copied tiles.
__device__ __forceinline__ void multiply(const SharedMemoryPlan& smem, Scores& s) {
    const u64 desc_q = BlockRows::k_major(smem_address(smem.q)),
              desc_k = KeyRows::k_major(smem_address(smem.k));
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDimQK / 16; ++i)
        wgmma_ss<kDtype>(s, desc_q + i / 4 * BlockRows::kStepTile + i % 4 * BlockRows::kStepK,
                         desc_k + i / 4 * KeyRows::kStepTile + i % 4 * KeyRows::kStepK, i > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_pin(s);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flex_row_references(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    griddepcontrol_wait();
    const i64 first_row = static_cast<i64>(blockIdx.x) * kBlockRows;
    bool far = false;
    if (threadIdx.x < kBlockRows) {
        far = is_far(params.lse[first_row + threadIdx.x]);
        params.weights[first_row + threadIdx.x] = 0.0f;
    }
    if (__syncthreads_or(far) == 0) return;

    const Block block(params);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        mbarrier_init(smem_address(&smem.bar_q), 1);
        mbarrier_init(smem_address(&smem.bar_k), 1);
        mbarrier_init_fence();
        load<BlockRows>(smem.q, &params.q_map, smem.bar_q, block.number * kBlockRows, block.head,
                        block.request);
    }
    __syncthreads();
    mbarrier_wait_parity(smem_address(&smem.bar_q), 0);
    LazySoftmax<> softmax;
    u32 number = 0;  // of the tile
#pragma unroll 1
    for (int step = 0; step < 2 * ceil_div(params.seqlen_k, kTileKeys); ++step) {
        const int first_key = step / 2 * kTileKeys, kind = step % 2;
        if (!is_listed(params, block, first_key, kind)) continue;
        if (threadIdx.x == 0)
            load<KeyRows>(smem.k, &params.k_map, smem.bar_k, first_key, block.head / params.group,
                          block.request / params.requests);
        mbarrier_wait_parity(smem_address(&smem.bar_k), number & 1);
        Scores s;
        multiply(smem, s);
        apply_mods(params, block, first_key, kind == 0, warp_idx, s);
        softmax.block(s, params.softmax_scale_log2);
        ++number;
        __syncthreads();  // all have read the tile
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(softmax.l[r]);
        const i64 row = first_row + warp_idx * 16 + lane_index() / 4 + 8 * r;
        if (!leads_quad() || !is_far(params.lse[row])) continue;
        params.weights[row] = sum == 0.0f ? 0.0f : softmax.m[r];
        params.lse[row] = sum == 0.0f ? kInfinity : log2_approx(sum);
    }
}
