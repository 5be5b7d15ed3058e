// Dense multi-head attention, forward: varlen or fixed lengths, interval masks, groups of query heads.
// docs/kernels/mha_forward.md has the schedule; rawmla/kernels/mha_forward.py chooses the tile.
//
// Roles of a CTA, which takes one tile (mha/tiles.cuh) after another:
//   warpgroup 0, warp 0   schedules tiles and copies Q, K and V to shared memory with TMA
//   warpgroup 0, warp 1   clears rows of V that no query of the tile sees
//   warpgroups 1 and on   64 rows of the tile each: S = Q K^T, softmax, O += P V
// A consumer issues Q K^T of a block together with P V of the block before, so that its softmax runs under P V.
// Consumers take turns in issuing (NB_TURN), so that one's softmax also runs under the other's products.
#include "attention/lazy_softmax.cuh"
#include "attention/masks.cuh"
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/swizzled_tile.cuh"
#include "mha/masks.cuh"
#include "mha/params.cuh"
#include "mha/scores.cuh"
#include "mha/tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimQK = D_QK, kDimV = D_V;  // multiples of 32; columns past those of the arrays are zeros
constexpr int kTileKeys = TILE_KEYS;
constexpr int kConsumers = CONSUMERS;
constexpr bool kWindow = WINDOW, kSoftcap = SOFTCAP, kAlibi = ALIBI;

constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kTileRows = 64 * kConsumers;
constexpr int kRegisters = kConsumers == 2 ? 232 : 160, kProducerRegisters = kConsumers == 2 ? 40 : 32;
static_assert(kConsumers * kRegisters + kProducerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1),
              "setmaxnreg would wait for ever: a CTA shares what its threads have at launch");
constexpr int kStages = 2;
constexpr int kTileStages = 2;
constexpr int kChunksQK = ceil_div(kDimQK, 64), kChunksV = ceil_div(kDimV, 64);

using Rows = SwizzledTile<64>;         // of Q and O
using Keys = SwizzledTile<kTileKeys>;  // of K and V
using Scheduler = TileScheduler<kTileRows, kTileKeys>;

struct SharedMemoryPlan {
    unsigned char q[kConsumers][max_int(kChunksQK, kChunksV) * Rows::kBytes];  // later O
    unsigned char k[kStages][kChunksQK * Keys::kBytes];
    unsigned char v[kStages][kChunksV * Keys::kBytes];
    u64 bar_q_full[kConsumers], bar_q_free[kConsumers];
    u64 bar_k_full[kStages], bar_k_free[kStages];
    u64 bar_v_full[kStages], bar_v_free[kStages];
    u64 bar_v_landed[kStages];  // V that is to be trimmed
    u64 bar_tile_full[kTileStages], bar_tile_free[kTileStages];
    Tile tiles[kTileStages];
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "the host gives less shared memory");

// Named barriers: the turn of consumer i is NB_TURN + i, that of its own threads NB_OWN + i.
constexpr int NB_TURN = 1, NB_OWN = NB_TURN + kConsumers;

// The copies of one tile, from the place where the consumers find it; one thread calls.
struct Loader {
    u32 stage_k = 0, free_k = 1, stage_v = 0, free_v = 1;  // parities of phases

    __device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, u32 n) {
        const Tile& tile = smem.tiles[n % kTileStages];
        const int kv_head = tile.head / params.heads_per_kv;
        const int batch_k = params.cu_seqlens_k == nullptr ? tile.request : 0;
        int blocks = tile.end_block - tile.first_block;
        int token = tile.k_begin + (tile.end_block - 1) * kTileKeys;
        bool trims = tile.trims_last || (blocks == 1 && tile.trims_first);

        if (blocks > 0) load_k(params, smem, token, kv_head, batch_k);
        const int tokens = 64 >> params.log2_group;
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) {
            const u32 full = smem_address(&smem.bar_q_full[i]);
            mbarrier_wait_parity(smem_address(&smem.bar_q_free[i]), n & 1 ^ 1);
            mbarrier_arrive_expect_tx(full, kChunksQK * Rows::kBytes);
#pragma unroll
            for (int chunk = 0; chunk < kChunksQK; ++chunk)
                tma_load_5d(smem_address(smem.q[i] + chunk * Rows::kBytes), &params.q_map, full, 64 * chunk,
                            0, tile.q_begin + tile.first_token + i * tokens, tile.head,
                            params.cu_seqlens_q == nullptr ? tile.request : 0);
        }
#pragma unroll 1
        for (; blocks > 1; --blocks) {
            load_k(params, smem, token - kTileKeys, kv_head, batch_k);
            load_v(params, smem, token, kv_head, batch_k, trims);
            token -= kTileKeys;
            trims = blocks == 2 && tile.trims_first;
        }
        if (blocks > 0) load_v(params, smem, token, kv_head, batch_k, trims);
    }

  private:
    __device__ __forceinline__ void load_k(const Params& params, SharedMemoryPlan& smem, int token, int head,
                                           int batch) {
        const u32 full = smem_address(&smem.bar_k_full[stage_k]);
        mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage_k]), free_k);
        mbarrier_arrive_expect_tx(full, kChunksQK * Keys::kBytes);
        const u32 dst = smem_address(smem.k[stage_k]);
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk)
            tma_load_4d<kL2EvictNormal>(dst + chunk * Keys::kBytes, &params.k_map, full, 64 * chunk, token,
                                        head, batch);
        if (++stage_k == kStages) {
            stage_k = 0;
            free_k ^= 1;
        }
    }
    __device__ __forceinline__ void load_v(const Params& params, SharedMemoryPlan& smem, int token, int head,
                                           int batch, bool trims) {
        const u32 full =
            smem_address(trims ? &smem.bar_v_landed[stage_v] : &smem.bar_v_full[stage_v]);
        mbarrier_wait_parity(smem_address(&smem.bar_v_free[stage_v]), free_v);
        mbarrier_arrive_expect_tx(full, kChunksV * Keys::kBytes);
        const u32 dst = smem_address(smem.v[stage_v]);
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; ++chunk)
            tma_load_4d<kL2EvictNormal>(dst + chunk * Keys::kBytes, &params.v_map, full, 64 * chunk, token,
                                        head, batch);
        if (++stage_v == kStages) {
            stage_v = 0;
            free_v ^= 1;
        }
    }
};

__device__ __forceinline__ void load_tiles(const Params& params, SharedMemoryPlan& smem) {
    Scheduler scheduler(params);
    Loader loader;
    const bool elected = elect_one_sync();
    for (u32 n = 0;; ++n) {
        const Tile tile = scheduler.next(params);
        const bool ends = tile.request < 0;
        if (elected) {
            const u32 slot = n % kTileStages;
            mbarrier_wait_parity(smem_address(&smem.bar_tile_free[slot]), n / kTileStages & 1 ^ 1);
            smem.tiles[slot] = tile;
            mbarrier_arrive(smem_address(&smem.bar_tile_full[slot]));
            if (!ends) loader.load(params, smem, n);
        }
        __syncwarp();
        if (ends) break;
        scheduler.advance(params);
    }
}

// Clears rows of V that no query of the tile sees (mha/tiles.cuh), and hands V on to the consumers.
__device__ __forceinline__ void trim_values(const Params& params, SharedMemoryPlan& smem) {
    const int lane = lane_index();
    u32 loads = 0;   // of V before this tile
    u32 landed = 0;  // parities of the stages
    for (u32 n = 0;; ++n) {
        const u32 slot = n % kTileStages;
        mbarrier_wait_parity(smem_address(&smem.bar_tile_full[slot]), n / kTileStages & 1);
        const Tile tile = smem.tiles[slot];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&smem.bar_tile_free[slot]));
        if (tile.request < 0) break;
        const int blocks = tile.end_block - tile.first_block;
        const KeyInterval keys = keys_of_tokens(params, tile, tile.first_token,
                                                tile.first_token + (kTileRows >> params.log2_group) - 1);
        auto trim = [&](int block) {
            const u32 stage = (loads + tile.end_block - 1 - block) % kStages;
            const KeyInterval rows = rows_to_keep<kTileKeys>(params, tile, keys, block);
            mbarrier_wait_parity(smem_address(&smem.bar_v_landed[stage]), landed >> stage & 1);
            landed ^= 1 << stage;
#pragma unroll 1
            for (int chunk = 0; chunk < kChunksV; ++chunk) {
                uint4* units = reinterpret_cast<uint4*>(smem.v[stage] + chunk * Keys::kBytes);
                for (int i = lane; i < 8 * rows.begin; i += 32) units[i] = make_uint4(0, 0, 0, 0);
                for (int i = 8 * rows.end + lane; i < 8 * kTileKeys; i += 32)
                    units[i] = make_uint4(0, 0, 0, 0);
            }
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_address(&smem.bar_v_full[stage]));
        };
        if (blocks > 0 && (tile.trims_last || (blocks == 1 && tile.trims_first))) trim(tile.end_block - 1);
        if (blocks > 1 && tile.trims_first) trim(tile.first_block);
        loads += blocks;
    }
}

// The factor of a sink on a row's result, where `l` is the row's sum and `m` its reference in base 2.
__device__ __forceinline__ float sum_with_sink(const Params& params, int head, float m, float l) {
    if (params.attn_sink == nullptr) return l;
    float sink;
    if (params.sink_dtype == 0) {
        sink = static_cast<const float*>(params.attn_sink)[head];
    } else {
        const u32 bits = static_cast<const u16*>(params.attn_sink)[head];
        sink = params.sink_dtype == 1 ? __uint_as_float(bits << 16) : unpack_f16(bits).x;
    }
    return l + exp2_approx(sink * kLog2E - m);
}

__device__ __forceinline__ void attend_tiles(const Params& params, SharedMemoryPlan& smem, int wg,
                                             int warp_idx) {
    const u64 desc_q = Rows::k_major(smem_address(smem.q[wg]));
    const u64 desc_k = Keys::k_major(smem_address(smem.k));
    const u64 desc_v = Keys::mn_major(smem_address(smem.v));
    const bool leads = threadIdx.x % 128 == 0;
    auto take_turn = [&]() { named_barrier_sync(NB_TURN + wg, 256); };
    auto pass_turn = [&]() { named_barrier_arrive(NB_TURN + (wg + 1 == kConsumers ? 0 : wg + 1), 256); };

    if (wg == 0) named_barrier_arrive(NB_TURN, 256);
    u32 number = 0;  // of the next block of K
    for (u32 n = 0;; ++n) {
        const u32 slot = n % kTileStages;
        mbarrier_wait_parity(smem_address(&smem.bar_tile_full[slot]), n / kTileStages & 1);
        const Tile& tile = smem.tiles[slot];
        if (warp_uniform(tile.request) < 0) break;
        int block = warp_uniform(tile.end_block) - 1;
        const int first_block = warp_uniform(tile.first_block);

        // What follows from the tile is read again where it is needed: it would take registers meanwhile.
        auto row_of = [&](int r) { return wg * 64 + warp_idx * 16 + lane_index() / 4 + 8 * r; };
        auto token_of = [&](int r) { return tile.first_token + (row_of(r) >> params.log2_group); };
        auto head_of = [&](int r) {
            const int in_group = row_of(r) & ((1 << params.log2_group) - 1);
            return (tile.head << params.log2_group) + in_group;
        };

        float s[kTileKeys / 2], o[kDimV / 2];
        u32 p[kTileKeys / 16][4];
        LazySoftmax softmax;
        ScoreStep<kSoftcap, kAlibi> score_step;
        if constexpr (kAlibi) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                score_step.diagonal[r] = token_of(r) + tile.k_len - tile.q_len - 2 * (lane_index() % 4);
                const i64 row = static_cast<i64>(tile.request) * params.alibi_stride_b;
                score_step.slope[r] = params.alibi_slopes[row + head_of(r)] * kLog2E;
            }
        }
#pragma unroll
        for (int j = 0; j < kDimV / 2; ++j) o[j] = 0.0f;
        wgmma_pin(o);

        auto issue_qk = [&]() {
            const u64 b = desc_k + number % kStages * (kChunksQK * Keys::kStepTile);
            wgmma_pin(s);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kDimQK / 16; ++k)
                wgmma_ss<kDtype>(s, desc_q + k / 4 * Rows::kStepTile + k % 4 * Rows::kStepK,
                                 b + k / 4 * Keys::kStepTile + k % 4 * Keys::kStepK, k > 0);
            wgmma_commit_group();
        };
        auto issue_pv = [&]() {  // of the block before `number`
            const u64 b = desc_v + (number - 1) % kStages * (kChunksV * Keys::kStepTile);
            wgmma_pin(o);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kTileKeys / 16; ++k)
                wgmma_rs<kDtype, Major::kMn>(o, p[k], b + k * Keys::kStepMn, true);
            wgmma_commit_group();
        };
        auto wait_k = [&]() {
            mbarrier_wait_parity(smem_address(&smem.bar_k_full[number % kStages]), number / kStages & 1);
        };
        auto wait_v = [&]() {
            mbarrier_wait_parity(smem_address(&smem.bar_v_full[(number - 1) % kStages]),
                                 (number - 1) / kStages & 1);
        };
        auto free_k = [&]() {
            if (leads) mbarrier_arrive(smem_address(&smem.bar_k_free[number % kStages]));
        };
        auto free_v = [&]() {
            if (leads) mbarrier_arrive(smem_address(&smem.bar_v_free[(number - 1) % kStages]));
        };
        auto mask = [&](int block) {
            IntervalMask<kWindow> interval;
#pragma unroll
            for (int r = 0; r < 2; ++r)
                interval.set(r, keys_of_token(params, tile, token_of(r)), block * kTileKeys, lane_index());
            apply_mask(s, interval);
        };
        // One block: S of it, P V of the block before, and the softmax between.
        auto step = [&](int block, bool masked) {
            wait_k();
            take_turn();
            issue_qk();
            wait_v();
            issue_pv();
            pass_turn();
            wgmma_wait_group<1>();
            wgmma_pin(s);
            free_k();
            score_step.apply(params, s, block * kTileKeys);
            if (masked) mask(block);
            softmax.block(s, params.softmax_scale_log2, masked);
            wgmma_wait_group<0>();
            wgmma_pin(o);
            free_v();
            ++number;
            pack_probabilities<kDtype>(s, p);
            softmax.rescale(o);
        };

        mbarrier_wait_parity(smem_address(&smem.bar_q_full[wg]), n & 1);
        if (block >= first_block) {
            wait_k();
            issue_qk();
            wgmma_wait_group<0>();
            wgmma_pin(s);
            free_k();
            ++number;
            score_step.apply(params, s, block * kTileKeys);
            mask(block);
            softmax.block(s, params.softmax_scale_log2, true);
            pack_probabilities<kDtype>(s, p);

            // Blocks [plain_begin, plain_end) are seen whole by all rows of the warpgroup that exist.
            const int first_row = tile.first_token + (wg * 64 >> params.log2_group);
            const int last_row = tile.first_token + (wg * 64 + 63 >> params.log2_group);
            const int plain_end = warp_uniform(keys_of_token(params, tile, first_row).end) / kTileKeys;
            const int plain_begin =
                kWindow ? warp_uniform(ceil_div(keys_of_token(params, tile, last_row).begin, kTileKeys)) : 0;
            --block;
#pragma unroll 1
            for (; block >= max_int(first_block, plain_end); --block) step(block, true);
#pragma unroll 1
            for (; block >= max_int(first_block, plain_begin); --block) step(block, false);
            if constexpr (kWindow) {
#pragma unroll 1
                for (; block >= first_block; --block) step(block, true);
            }
            wait_v();
            issue_pv();
        }

        // Results
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = token_of(r), head = head_of(r);
            // Tokens past q_len have results, which are those of a row without keys.
            const float sum = quad_sum(softmax.l[r]);
            const float l = token < tile.q_len ? sum : 0.0f;
            const float m = softmax.m[r] * params.softmax_scale_log2;
            factor[r] = l == 0.0f ? 0.0f : reciprocal_approx(sum_with_sink(params, head, m, l));
            if (leads_quad() && token < tile.q_rows) {
                float* lse = params.lse + (params.cu_seqlens_q == nullptr ? tile.request : 0) * params.lse_stride_b;
                lse[head * params.lse_stride_h + tile.q_begin + token] =
                    l == 0.0f ? -kInfinity : (m + log2_approx(l)) * kLn2;
            }
        }
        const u32 smem_o = smem_address(smem.q[wg]);
        const u32 dst = smem_o + Rows::offset(warp_idx * 16 + lane_index() % 16, lane_index() / 16);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        if (warp_uniform(tile.end_block) > first_block) free_v();
#pragma unroll
        for (int k = 0; k < kDimV / 16; ++k) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i % 2;
                float lo = o[8 * k + 2 * i] * factor[r], hi = o[8 * k + 2 * i + 1] * factor[r];
                // Where a row has no key, O may be 0 times Inf of keys that other rows see.
                if (factor[r] == 0.0f) lo = hi = 0.0f;
                packed[i] = pack_16bit<kDtype>(lo, hi);
            }
            stmatrix_x4((dst ^ (32 * (k % 4))) + k / 4 * Rows::kBytes, packed[0], packed[1], packed[2],
                        packed[3]);
        }
        fence_proxy_async();
        named_barrier_sync(NB_OWN + wg, 128);
        const int first_token = tile.first_token + (wg * 64 >> params.log2_group);
        const int tokens = 64 >> params.log2_group;
        const int q_begin = tile.q_begin, head = tile.head, request = tile.request;
        const int rows = tile.q_rows;
        named_barrier_sync(NB_OWN + wg, 128);
        if (leads) mbarrier_arrive(smem_address(&smem.bar_tile_free[slot]));
        if (params.cu_seqlens_q == nullptr || first_token + tokens <= rows) {
            if (warp_idx == 0 && elect_one_sync()) {
#pragma unroll
                for (int chunk = 0; chunk < kChunksV; ++chunk)
                    tma_store_5d(&params.out_map, smem_o + chunk * Rows::kBytes, 64 * chunk, 0,
                                 q_begin + first_token, head, params.cu_seqlens_q == nullptr ? request : 0);
                bulk_commit_group();
                bulk_wait_group_read<0>();
                mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
            }
        } else {
            // The last tokens of a segment, behind which the next one begins
            for (int i = threadIdx.x % 128; i < 64 * 8 * kChunksV; i += 128) {
                const int row = i / (8 * kChunksV), unit = i % (8 * kChunksV);
                const int token = first_token + (row >> params.log2_group);
                const int query_head = (head << params.log2_group) + (row & ((1 << params.log2_group) - 1));
                const u16* src = reinterpret_cast<const u16*>(smem.q[wg] + unit / 8 * Rows::kBytes +
                                                              Rows::offset(row, unit % 8));
                u16* out = params.out + (q_begin + token) * params.out_stride_s +
                           query_head * params.out_stride_h + 8 * unit;
                if (token >= rows) break;
                if (8 * unit + 8 <= params.d_v) {
                    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(src);
                } else {
                    for (int column = 0; 8 * unit + column < params.d_v; ++column) out[column] = src[column];
                }
            }
            fence_proxy_async();
            named_barrier_sync(NB_OWN + wg, 128);
            if (leads) mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
        }
    }
}

__device__ __forceinline__ void init_barriers(const Params& params, SharedMemoryPlan& smem) {
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kConsumers; ++i) {
            mbarrier_init(smem_address(&smem.bar_q_full[i]), 1);
            mbarrier_init(smem_address(&smem.bar_q_free[i]), 1);
        }
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(smem_address(&smem.bar_k_full[i]), 1);
            mbarrier_init(smem_address(&smem.bar_v_full[i]), 1);
            mbarrier_init(smem_address(&smem.bar_v_landed[i]), 1);
            mbarrier_init(smem_address(&smem.bar_k_free[i]), kConsumers);
            mbarrier_init(smem_address(&smem.bar_v_free[i]), kConsumers);
        }
#pragma unroll
        for (int i = 0; i < kTileStages; ++i) {
            mbarrier_init(smem_address(&smem.bar_tile_full[i]), 1);
            mbarrier_init(smem_address(&smem.bar_tile_free[i]), kConsumers + 1);
        }
        mbarrier_init_fence();
    } else if (threadIdx.x == 32) {
        tma_prefetch_descriptor(&params.q_map);
        tma_prefetch_descriptor(&params.k_map);
        tma_prefetch_descriptor(&params.v_map);
        tma_prefetch_descriptor(&params.out_map);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) mha_forward(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    init_barriers(params, smem);
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    if (wg_idx == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (warp_idx == 0) {
            load_tiles(params, smem);
        } else if (warp_idx == 1) {
            trim_values(params, smem);
        }
    } else {
        setmaxnreg_inc<kRegisters>();
        attend_tiles(params, smem, wg_idx - 1, warp_idx);
    }
}
