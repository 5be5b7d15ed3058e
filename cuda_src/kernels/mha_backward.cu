// Gradients of multi-head attention: dK and dV of a tile of keys, and what it adds to dQ. With P and dS of a
// block of 64 query tokens, dV += P^T dO, dK += dS^T Q and dQ += dS K, where P = exp(S - lse), dS = P (dO V^T -
// delta). docs/kernels/mha_backward.md has the schedule; rawmla/kernels/mha_backward.py chooses the variant.
//
// Roles of a CTA, which owns kTileKeys keys of a KV head and walks the blocks of queries that see them, for one
// query head of the group after another:
//   warpgroup 0, warp 0   copies K and V once, then Q, dO and the rows' lse and delta
//   warpgroup 0, warp 1   adds dQ to global memory
//   warpgroup 0, warp 2   clears rows of K, Q and dO that are not the request's, or see no key
//   warpgroups 1, 2       64 keys each: S^T = K Q^T, dP^T = V dO^T, dV and dK in registers; dS to shared memory
//   warpgroup 3           dQ = dS K
// S^T and dP^T have keys on their rows: P^T and dS^T are then A operands as they stand.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/swizzled_tile.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "mha/key_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimQK = D_QK, kDimV = D_V;
constexpr bool kSoftcap = SOFTCAP, kAlibi = ALIBI;
constexpr int kConsumers = 2;
constexpr int kTileKeys = 64 * kConsumers;
constexpr int kStages = 2;
constexpr int kChunksQK = ceil_div(kDimQK, 64), kChunksV = ceil_div(kDimV, 64);
constexpr int kThreads = 128 * (kConsumers + 2);
constexpr int NB_DQ = 1;  // named barrier of the warpgroup of dQ
constexpr int kRegisters = 208, kReducerRegisters = 64, kProducerRegisters = 32;
static_assert(kConsumers * kRegisters + kReducerRegisters + kProducerRegisters <= 65536 / 128,
              "setmaxnreg would wait for ever: a CTA shares what its threads have at launch");

using KeyRows = SwizzledTile<kTileKeys>;         // of K and V
using BlockRows = SwizzledTile<kBlockRows>;      // of Q, dO and dS
constexpr int kPassBytes = kBlockRows * 64 * 4;  // 64 columns of dQ of a block

struct SharedMemoryPlan {
    unsigned char k[kChunksQK * KeyRows::kBytes];
    unsigned char v[kChunksV * KeyRows::kBytes];
    unsigned char q[kStages][kChunksQK * BlockRows::kBytes];
    unsigned char dout[kStages][kChunksV * BlockRows::kBytes];
    unsigned char ds[kStages][kConsumers * BlockRows::kBytes];  // [query][64 keys of a consumer]
    unsigned char dq[kChunksQK][kPassBytes];                    // as the accumulators of 128 threads
    float lse[kStages][kBlockRows], delta[kStages][kBlockRows];
    KeyTile tile;
    u64 bar_kv, bar_kv_landed;
    u64 bar_q_landed[kStages], bar_dout_landed[kStages];  // that are to be trimmed
    u64 bar_q_full[kStages], bar_q_free[kStages];         // with lse
    u64 bar_dout_full[kStages], bar_dout_free[kStages];   // with delta
    u64 bar_ds_full[kStages], bar_ds_free[kStages];
    u64 bar_dq_full[kChunksQK], bar_dq_free[kChunksQK];
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "the host gives less shared memory");

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    mbarrier_init(smem_address(&smem.bar_kv), 1);
    mbarrier_init(smem_address(&smem.bar_kv_landed), 1);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(smem_address(&smem.bar_q_landed[i]), 1);
        mbarrier_init(smem_address(&smem.bar_dout_landed[i]), 1);
        mbarrier_init(smem_address(&smem.bar_q_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_q_free[i]), kConsumers);
        mbarrier_init(smem_address(&smem.bar_dout_full[i]), 1);
        mbarrier_init(smem_address(&smem.bar_dout_free[i]), kConsumers);
        mbarrier_init(smem_address(&smem.bar_ds_full[i]), 128 * kConsumers);
        mbarrier_init(smem_address(&smem.bar_ds_free[i]), 1);
    }
#pragma unroll
    for (int i = 0; i < kChunksQK; ++i) {
        mbarrier_init(smem_address(&smem.bar_dq_full[i]), 128);
        mbarrier_init(smem_address(&smem.bar_dq_free[i]), 1);
    }
    mbarrier_init_fence();
}

// A block of queries as all roles count them.
struct Step {
    u32 number = 0;

    __device__ __forceinline__ u32 stage() const { return number % kStages; }
    __device__ __forceinline__ u32 parity() const { return number / kStages & 1; }
    __device__ __forceinline__ u32 free_parity() const { return parity() ^ 1; }
};

// Whether rows of K are to be cleared: those behind the request's, and those that no query sees.
__device__ __forceinline__ bool trims_keys(const KeyTile& tile) {
    return tile.first_key < tile.first_seen_key || tile.first_key + kTileKeys > tile.k_len;
}

// Clears all but rows `first` to `end - 1` of tiles side by side. A warp.
template <class Tiles>
__device__ __forceinline__ void clear_rows(unsigned char* tiles, int chunks, int first, int end) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
        uint4* units = reinterpret_cast<uint4*>(tiles + chunk * Tiles::kBytes);
        for (int i = lane_index(); i < 8 * first; i += 32) units[i] = make_uint4(0, 0, 0, 0);
        for (int i = 8 * end + lane_index(); i < 8 * Tiles::kRows; i += 32) units[i] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    __syncwarp();
}

// The warp that trims.
__device__ __forceinline__ void trim(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    if (trims_keys(tile)) {
        mbarrier_wait_parity(smem_address(&smem.bar_kv_landed), 0);
        clear_rows<KeyRows>(smem.k, kChunksQK, max_int(tile.first_seen_key - tile.first_key, 0),
                            min_int(tile.k_len - tile.first_key, kTileKeys));
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_kv));
    }
    Step step;
    u32 landed = 0;  // parities of the stages
    for (int member = 0; member < params.group; ++member) {
        for (int block = tile.first_block; block < tile.end_block; ++block, ++step.number) {
            if (!tile.trims(block)) continue;
            const u32 stage = step.stage(), parity = landed >> stage & 1;
            landed ^= 1 << stage;
            mbarrier_wait_parity(smem_address(&smem.bar_q_landed[stage]), parity);
            clear_rows<BlockRows>(smem.q[stage], kChunksQK, tile.first_row(block), tile.end_row(block));
            if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_q_full[stage]));
            mbarrier_wait_parity(smem_address(&smem.bar_dout_landed[stage]), parity);
            clear_rows<BlockRows>(smem.dout[stage], kChunksV, tile.first_row(block), tile.end_row(block));
            if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_dout_full[stage]));
        }
    }
}

// One thread.
__device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    const int batch_k = params.cu_seqlens_k == nullptr ? tile.request : 0;
    const int batch_q = params.cu_seqlens_q == nullptr ? tile.request : 0;
    const u32 kv = smem_address(trims_keys(tile) ? &smem.bar_kv_landed : &smem.bar_kv);
    mbarrier_arrive_expect_tx(kv, sizeof(smem.k) + sizeof(smem.v));
#pragma unroll
    for (int chunk = 0; chunk < kChunksQK; ++chunk)
        tma_load_4d(smem_address(smem.k) + chunk * KeyRows::kBytes, &params.k_map, kv, 64 * chunk,
                    tile.k_begin + tile.first_key, tile.kv_head, batch_k);
#pragma unroll
    for (int chunk = 0; chunk < kChunksV; ++chunk)
        tma_load_4d(smem_address(smem.v) + chunk * KeyRows::kBytes, &params.v_map, kv, 64 * chunk,
                    tile.k_begin + tile.first_key, tile.kv_head, batch_k);
    Step step;
    for (int member = 0; member < params.group; ++member) {
        const int head = tile.kv_head * params.group + member;
        for (int block = tile.first_block; block < tile.end_block; ++block, ++step.number) {
            const u32 stage = step.stage();
            const int token = tile.q_begin + block * kBlockRows;
            const i64 row = (head * params.blocks + tile.first_row_block + block) * kBlockRows;
            const bool trims = tile.trims(block);
            const u32 q_full = smem_address((trims ? smem.bar_q_landed : smem.bar_q_full) + stage);
            mbarrier_wait_parity(smem_address(&smem.bar_q_free[stage]), step.free_parity());
            mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + sizeof(smem.lse[0]));
#pragma unroll
            for (int chunk = 0; chunk < kChunksQK; ++chunk)
                tma_load_4d(smem_address(smem.q[stage]) + chunk * BlockRows::kBytes, &params.q_map, q_full,
                            64 * chunk, token, head, batch_q);
            bulk_load(smem_address(smem.lse[stage]), params.lse + row, sizeof(smem.lse[0]), q_full);
            const u32 dout_full = smem_address((trims ? smem.bar_dout_landed : smem.bar_dout_full) + stage);
            mbarrier_wait_parity(smem_address(&smem.bar_dout_free[stage]), step.free_parity());
            mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]) + sizeof(smem.delta[0]));
#pragma unroll
            for (int chunk = 0; chunk < kChunksV; ++chunk)
                tma_load_4d(smem_address(smem.dout[stage]) + chunk * BlockRows::kBytes, &params.dout_map,
                            dout_full, 64 * chunk, token, head, batch_q);
            bulk_load(smem_address(smem.delta[stage]), params.delta + row, sizeof(smem.delta[0]), dout_full);
        }
    }
}

// One thread.
__device__ __forceinline__ void add_dq(const Params& params, SharedMemoryPlan& smem, const KeyTile& tile) {
    u32 number = 0;
    for (int member = 0; member < params.group; ++member) {
        const int head = tile.kv_head * params.group + member;
        for (int block = tile.first_block; block < tile.end_block; ++block, ++number) {
            const i64 place = head * params.blocks + tile.first_row_block + block;
            float* dst = params.dq_accum + place * (kChunksQK * kPassBytes / 4);
#pragma unroll
            for (int chunk = 0; chunk < kChunksQK; ++chunk) {
                mbarrier_wait_parity(smem_address(&smem.bar_dq_full[chunk]), number & 1);
                bulk_reduce_add_f32(dst + chunk * (kPassBytes / 4), smem_address(smem.dq[chunk]), kPassBytes);
                bulk_commit_group();
                bulk_wait_group_read<0>();
                mbarrier_arrive(smem_address(&smem.bar_dq_free[chunk]));
            }
        }
    }
    bulk_wait_group<0>();
}

// The warpgroup of dQ.
__device__ __forceinline__ void multiply_dq(const Params& params, SharedMemoryPlan& smem,
                                            const KeyTile& tile) {
    const int thread = threadIdx.x % 128;
    Step step;
    mbarrier_wait_parity(smem_address(&smem.bar_kv), 0);
    const int blocks = tile.blocks() * params.group;
#pragma unroll 1
    for (int i = 0; i < blocks; ++i, ++step.number) {
        const u32 stage = step.stage();
        mbarrier_wait_parity(smem_address(&smem.bar_ds_full[stage]), step.parity());
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk) {
            float dq[32];
            const u64 desc_ds = BlockRows::k_major(smem_address(smem.ds[stage]));
            const u64 desc_k = KeyRows::mn_major(smem_address(smem.k) + chunk * KeyRows::kBytes);
            wgmma_pin(dq);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kTileKeys / 16; ++k)
                wgmma_ss<kDtype, Major::kK, Major::kMn>(
                    dq, desc_ds + k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK,
                    desc_k + k * KeyRows::kStepMn, k > 0);
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(dq);
            if (chunk == kChunksQK - 1) {
                named_barrier_sync(NB_DQ, 128);  // all warps have read dS
                if (thread == 0) mbarrier_arrive(smem_address(&smem.bar_ds_free[stage]));
            }
            mbarrier_wait_parity(smem_address(&smem.bar_dq_free[chunk]), step.number & 1 ^ 1);
            float4* dst = reinterpret_cast<float4*>(smem.dq[chunk]) + thread;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                dst[128 * j] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
            fence_proxy_async();
            mbarrier_arrive(smem_address(&smem.bar_dq_full[chunk]));
        }
    }
}

// One consumer: 64 keys of the tile.
struct Consumer {
    const Params& params;
    SharedMemoryPlan& smem;
    const KeyTile& tile;
    const int wg, warp_idx;
    const bool leads;  // the first thread of the warpgroup
    Step step;

    using Scores = float[kBlockRows / 2];
    using Packed = u32[kBlockRows / 4];

    __device__ __forceinline__ void run() {
        float dk[kDimQK / 2], dv[kDimV / 2];
#pragma unroll
        for (int i = 0; i < kDimQK / 2; ++i) dk[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kDimV / 2; ++i) dv[i] = 0.0f;
        wgmma_pin(dk);
        wgmma_pin(dv);
        const int blocks = warp_uniform(tile.blocks()) * params.group;
        if (blocks > 0) {
            Scores s;
            mbarrier_wait_parity(smem_address(&smem.bar_kv), 0);
            issue_scores(s);
            wgmma_wait_group<0>();
            wgmma_pin(s);
            // Blocks [plain_begin, plain_end) are seen by all keys of the warpgroup, as wholes.
            const int first_key = tile.first_key + wg * 64, last_key = first_key + 63;
            const int plain_begin =
                warp_uniform(ceil_div(max_int(last_key - tile.offset - params.window_right, 0), kBlockRows));
            int plain_end =
                warp_uniform(max_int(first_key - tile.offset + params.window_left + 1, 0)) / kBlockRows;
            if (last_key >= tile.k_len) plain_end = 0;
            int left = blocks;
#pragma unroll 1
            for (int member = 0; member < params.group; ++member) {
                float slope = 0.0f;
                if constexpr (kAlibi) {
                    const i64 row = static_cast<i64>(tile.request) * params.alibi_stride_b;
                    const int head = tile.kv_head * params.group + member;
                    slope = __shfl_sync(0xffffffff, params.alibi_slopes[row + head] * kLog2E, 0);
                }
#pragma unroll 1
                for (int block = tile.first_block; block < tile.end_block; ++block) {
                    const bool masked = block < plain_begin || block >= plain_end;
                    --left;
                    if (masked) {
                        take_block<true>(slope, block, left > 0, s, dk, dv);
                    } else {
                        take_block<false>(slope, block, left > 0, s, dk, dv);
                    }
                }
            }
        }
        store(dk, params.dk, params.dk_stride_b, params.dk_stride_s, params.dk_stride_h, params.d_qk,
              params.scale);
        store(dv, params.dv, params.dv_stride_b, params.dv_stride_s, params.dv_stride_h, params.d_v, 1.0f);
    }

  private:
    // S^T of the block `step`, which is waited for.
    __device__ __forceinline__ void issue_scores(Scores& s) const {
        const u32 stage = step.stage();
        mbarrier_wait_parity(smem_address(&smem.bar_q_full[stage]), step.parity());
        const u64 desc_k = KeyRows::k_major(smem_address(smem.k) + wg * 64 * KeyRows::kRowBytes);
        const u64 desc_q = BlockRows::k_major(smem_address(smem.q[stage]));
        wgmma_pin(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDimQK / 16; ++k)
            wgmma_ss<kDtype>(s, desc_k + k / 4 * KeyRows::kStepTile + k % 4 * KeyRows::kStepK,
                             desc_q + k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK, k > 0);
        wgmma_commit_group();
    }
    // The thread's two keys.
    __device__ __forceinline__ int key_of(int r) const {
        return tile.first_key + wg * 64 + warp_idx * 16 + lane_index() / 4 + 8 * r;
    }
    // The first of the two query columns of accumulators 4 j to 4 j + 3.
    __device__ __forceinline__ static int column_of(int j) { return 8 * j + 2 * (lane_index() % 4); }

    template <bool kMasked>
    __device__ __forceinline__ void take_block(float slope, int block, bool has_next, Scores& s,
                                               float (&dk)[kDimQK / 2], float (&dv)[kDimV / 2]) {
        const u32 stage = step.stage();
        Packed p;  // P^T, then dS^T
        // The first queries that see the thread's two keys, counted from its first column; as many see each.
        int begin[2] = {};
        if constexpr (kMasked) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int key = key_of(r), first = block * kBlockRows + column_of(0);
                begin[r] = key < tile.k_len ? key - tile.offset - params.window_right - first : 0x7fffffff;
            }
        }
        const u32 seen = static_cast<u32>(params.window_left) + static_cast<u32>(params.window_right) + 1;
        auto hides = [&](int i) {
            if constexpr (!kMasked) return false;
            return static_cast<u32>(8 * (i >> 2) + (i & 1) - begin[(i >> 1) & 1]) >= seen;
        };
        float distance[2] = {};  // from the thread's first column to the query that stands at its key
        if constexpr (kAlibi) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                distance[r] = static_cast<float>(key_of(r) - tile.offset - block * kBlockRows - column_of(0));
        }
        auto bias = [&](int i) {
            const int column = 8 * (i >> 2) + (i & 1);
            return slope * fabsf(distance[(i >> 1) & 1] - static_cast<float>(column));
        };
        const float* lse = smem.lse[stage];
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
            const float2 of_columns = *reinterpret_cast<const float2*>(lse + column_of(j));
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) {
                float score = s[i];
                if constexpr (kSoftcap) score = tanh_approx(score * params.score_scale);
                if constexpr (kAlibi) score = fmaf(score, params.score_factor, -bias(i));
                const float e = exp2_approx(
                    fmaf(score, params.softmax_scale_log2, -((i & 1) ? of_columns.y : of_columns.x)));
                s[i] = hides(i) ? 0.0f : e;
            }
            p[2 * j] = pack_16bit<kDtype>(s[4 * j], s[4 * j + 1]);
            p[2 * j + 1] = pack_16bit<kDtype>(s[4 * j + 2], s[4 * j + 3]);
        }

        mbarrier_wait_parity(smem_address(&smem.bar_dout_full[stage]), step.parity());
        const u64 desc_v = KeyRows::k_major(smem_address(smem.v) + wg * 64 * KeyRows::kRowBytes);
        wgmma_pin(s);
        wgmma_pin(dv);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDimV / 16; ++k)
            wgmma_ss<kDtype>(s, desc_v + k / 4 * KeyRows::kStepTile + k % 4 * KeyRows::kStepK,
                             BlockRows::k_major(smem_address(smem.dout[stage])) +
                                 k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK,
                             k > 0);
        wgmma_commit_group();
        multiply(dv, p, smem.dout[stage]);
        wgmma_wait_group<0>();
        wgmma_pin(s);
        wgmma_pin(dv);

        const float* delta = smem.delta[stage];
#pragma unroll
        for (int j = 0; j < kBlockRows / 8; ++j) {
            const float2 deltas = *reinterpret_cast<const float2*>(delta + column_of(j));
            const float2 lses = *reinterpret_cast<const float2*>(lse + column_of(j));
            float ds[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_16bit<kDtype>(p[2 * j + i / 2]);
                const float probability = (i & 1) ? pair.y : pair.x;
                float value = probability * (s[4 * j + i] - ((i & 1) ? deltas.y : deltas.x));
                bool is_zero = hides(4 * j + i);
                if constexpr (kSoftcap) {
                    // The softcap's tanh once more, from the probability, which costs no registers meanwhile.
                    float score = log2_approx(probability) + ((i & 1) ? lses.y : lses.x);
                    if constexpr (kAlibi) score += bias(4 * j + i);
                    score *= params.score_inverse;
                    value *= fmaf(-score, score, 1.0f);
                    is_zero |= probability == 0.0f;
                }
                ds[i] = is_zero ? 0.0f : value;
            }
            p[2 * j] = pack_16bit<kDtype>(ds[0], ds[1]);
            p[2 * j + 1] = pack_16bit<kDtype>(ds[2], ds[3]);
        }
        hand_over(p);
        wgmma_pin(dk);
        wgmma_fence();
        multiply(dk, p, smem.q[stage]);
        ++step.number;
        if (has_next) {
            issue_scores(s);
            wgmma_wait_group<1>();
        } else {
            wgmma_wait_group<0>();
        }
        wgmma_pin(dk);
        if (leads) {
            mbarrier_arrive(smem_address(&smem.bar_q_free[stage]));
            mbarrier_arrive(smem_address(&smem.bar_dout_free[stage]));
        }
        wgmma_wait_group<0>();
        wgmma_pin(s);
    }

    // d += A B for a block of 64 queries, where A is P^T or dS^T, and B dO or Q.
    template <int kCount>
    __device__ __forceinline__ static void multiply(float (&d)[kCount], const Packed& a, unsigned char* b) {
        const u64 desc = BlockRows::mn_major(smem_address(b));
#pragma unroll
        for (int k = 0; k < kBlockRows / 16; ++k) {
            const u32 fragment[4] = {a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]};
            wgmma_rs<kDtype, Major::kMn>(d, fragment, desc + k * BlockRows::kStepMn, true);
        }
        wgmma_commit_group();
    }
    // dS to shared memory, as rows of queries.
    __device__ __forceinline__ void hand_over(const Packed& ds) const {
        const u32 stage = step.stage();
        mbarrier_wait_parity(smem_address(&smem.bar_ds_free[stage]), step.free_parity());
        const u32 dst = smem_address(smem.ds[stage]) + wg * BlockRows::kBytes;
        const int lane = lane_index(), row = lane % 8 + lane / 16 * 8, unit = 2 * warp_idx + lane / 8 % 2;
#pragma unroll
        for (int k = 0; k < kBlockRows / 16; ++k)
            stmatrix_x4_trans(dst + BlockRows::offset(16 * k + row, unit), ds[4 * k], ds[4 * k + 1],
                              ds[4 * k + 2], ds[4 * k + 3]);
        fence_proxy_async();
        mbarrier_arrive(smem_address(&smem.bar_ds_full[stage]));
    }

    template <int kCount>
    __device__ __forceinline__ void store(const float (&d)[kCount], void* out, i64 stride_b, i64 stride_s,
                                          i64 stride_h, int columns, float factor) const {
        u16* rows = static_cast<u16*>(out) + tile.kv_head * stride_h;
        if (params.cu_seqlens_k == nullptr) rows += tile.request * stride_b;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = key_of(r);
            if (key >= tile.k_rows) continue;
            u16* row = rows + (tile.k_begin + key) * stride_s + 2 * (lane_index() % 4);
#pragma unroll
            for (int j = 0; j < kCount / 4; ++j) {
                const u32 pair = pack_16bit<kDtype>(d[4 * j + 2 * r] * factor, d[4 * j + 2 * r + 1] * factor);
                const int column = 8 * j + 2 * (lane_index() % 4);
                if (column + 1 < columns) {
                    *reinterpret_cast<u32*>(row + 8 * j) = pair;
                } else if (column < columns) {
                    row[8 * j] = static_cast<u16>(pair);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mha_backward(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    if (threadIdx.x == 0) init_barriers(smem);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x < 32) {
        const KeyTile found = find_key_tile<kTileKeys>(params);
        if (threadIdx.x == 0) smem.tile = found;
    }
    __syncthreads();
    const KeyTile& tile = smem.tile;
    if (tile.request < 0) return;

    if (wg_idx == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (tile.blocks() == 0) return;  // nobody waits for what would be copied
        if (warp_idx == 0) {
            if (elect_one_sync()) load(params, smem, tile);
        } else if (warp_idx == 1) {
            if (elect_one_sync()) add_dq(params, smem, tile);
        } else if (warp_idx == 2) {
            trim(params, smem, tile);
        }
    } else if (wg_idx == kConsumers + 1) {
        setmaxnreg_dec<kReducerRegisters>();
        if (tile.blocks() > 0) multiply_dq(params, smem, tile);
    } else {
        setmaxnreg_inc<kRegisters>();
        Consumer{params, smem, tile, wg_idx - 1, warp_idx, threadIdx.x % 128 == 0}.run();
    }
}
