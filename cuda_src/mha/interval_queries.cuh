// Blocks of queries of a tile of keys in dense attention: one interval, for all query heads of the group.
// flex/listed_queries.cuh has the same roles for flex attention:
//
//   load, trim      producer warps: copy blocks, clear rows
//   AddedBlocks     the blocks of dQ that the tile adds to, for the threads that add
//   Queries         the steps of a consumer, and its masks
#pragma once
#include "mha/backward_cta.cuh"

// From the last block on. Tiles of the first keys, which go first, see the last blocks longest, and tiles
// after them follow step by step: what they read and add to at a time is little, and stays in L2.
struct BlockWalk {
    const Params& params;
    const KeyTile& tile;
    int block, member = 0;

    __device__ __forceinline__ BlockWalk(const Params& params, const KeyTile& tile)
        : params(params), tile(tile), block(tile.end_block - 1) {}

    __device__ __forceinline__ bool is_there() const { return block >= tile.first_block; }
    __device__ __forceinline__ void advance() {
        if (++member == params.group) member = 0, --block;
    }
};

// Arrivals that complete bar_k_full. Where consumers read K by ldmatrix, all lanes of the warp that clears
// rows signal: for compute-sanitizer, what one lane says does not order what the others wrote.
constexpr int kKeySignals = kDimQK <= 64 && kDimV <= 64 ? 32 : 1;

// Whether K goes through the warp that clears rows: those after the request's, and those that no query sees.
template <class KeyRows>
__device__ __forceinline__ bool trims_keys(const KeyTile& tile) {
    return kKeySignals > 1 || tile.first_key < tile.first_seen_key ||
           tile.first_key + KeyRows::kRows > tile.k_len;
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

// The warp that clears rows.
template <class KeyRows, class Plan>
__device__ __forceinline__ void trim(const Params& params, Plan& smem, const KeyTile& tile) {
    if (trims_keys<KeyRows>(tile)) {
        mbarrier_wait_parity(smem_address(&smem.bar_k_landed), 0);
        clear_rows<KeyRows>(smem.k, kChunksQK, max_int(tile.first_seen_key - tile.first_key, 0),
                            min_int(tile.k_len - tile.first_key, KeyRows::kRows));
        if (kKeySignals > 1 || lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_k_full));
    }
    constexpr int kStages = sizeof(smem.lse) / sizeof(smem.lse[0]);
    RingPlace<kStages> place;
    u32 landed = 0;  // parities of the stages
    for (BlockWalk walk(params, tile); walk.is_there(); walk.advance(), place.advance()) {
        const int block = walk.block;
        if (!tile.trims(block)) continue;
        const u32 stage = place.stage, parity = landed >> stage & 1;
        landed ^= 1 << stage;
        mbarrier_wait_parity(smem_address(&smem.bar_q_landed[stage]), parity);
        clear_rows<BlockRows>(smem.q[stage], kChunksQK, tile.first_row(block), tile.end_row(block));
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_q_full[stage]));
        mbarrier_wait_parity(smem_address(&smem.bar_dout_landed[stage]), parity);
        clear_rows<BlockRows>(smem.dout[stage], kChunksV, tile.first_row(block), tile.end_row(block));
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_dout_full[stage]));
    }
}

// One thread: copies K and V once, then Q, dO and the rows' lse, weights and delta of each step.
template <class KeyRows, class Plan>
__device__ __forceinline__ void load(const Params& params, Plan& smem, const KeyTile& tile) {
    constexpr int kStages = sizeof(smem.lse) / sizeof(smem.lse[0]);
    const int batch_q = params.cu_seqlens_q == nullptr ? tile.request : 0;
    const auto load_keys = [&](unsigned char* keys, int chunks, const TensorMap& map, u64& bar) {
        const int batch = params.cu_seqlens_k == nullptr ? tile.request : 0;
        mbarrier_arrive_expect_tx(smem_address(&bar), chunks * KeyRows::kBytes);
        for (int chunk = 0; chunk < chunks; ++chunk)
            tma_load_4d<kL2EvictNormal>(smem_address(keys) + chunk * KeyRows::kBytes, &map,
                                        smem_address(&bar), 64 * chunk, tile.k_begin + tile.first_key,
                                        tile.kv_head, batch);
    };
    load_keys(smem.k, kChunksQK, params.k_map,
              trims_keys<KeyRows>(tile) ? smem.bar_k_landed : smem.bar_k_full);
    RingPlace<kStages> place;
    bool is_first = true;
    for (BlockWalk walk(params, tile); walk.is_there(); walk.advance(), place.advance(), is_first = false) {
        const int block = walk.block, head = tile.kv_head * params.group + walk.member;
        const u32 stage = place.stage;
        const int token = tile.q_begin + block * kBlockRows;
        const i64 row = (head * params.blocks + tile.first_row_block + block) * kBlockRows;
        const bool trims = tile.trims(block);
        const u32 q_full = smem_address((trims ? smem.bar_q_landed : smem.bar_q_full) + stage);
        mbarrier_wait_parity(smem_address(&smem.bar_q_free[stage]), place.free_parity());
        mbarrier_arrive_expect_tx(q_full, sizeof(smem.q[0]) + (kWeights ? 2 : 1) * sizeof(smem.lse[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk)
            tma_load_4d<kL2EvictNormal>(smem_address(smem.q[stage]) + chunk * BlockRows::kBytes,
                                        &params.q_map, q_full, 64 * chunk, token, head, batch_q);
        bulk_load(smem_address(smem.lse[stage]), params.lse + row, sizeof(smem.lse[0]), q_full);
        if constexpr (kWeights)
            bulk_load(smem_address(smem.weights[stage]), params.weights + row, sizeof(smem.weights[0]),
                      q_full);
        if (kNeedsDs && is_first) load_keys(smem.v, kChunksV, params.v_map, smem.bar_v_full);
        const u32 dout_full = smem_address((trims ? smem.bar_dout_landed : smem.bar_dout_full) + stage);
        mbarrier_wait_parity(smem_address(&smem.bar_dout_free[stage]), place.free_parity());
        mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]) + sizeof(smem.delta[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; ++chunk)
            tma_load_4d<kL2EvictNormal>(smem_address(smem.dout[stage]) + chunk * BlockRows::kBytes,
                                        &params.dout_map, dout_full, 64 * chunk, token, head, batch_q);
        bulk_load(smem_address(smem.delta[stage]), params.delta + row, sizeof(smem.delta[0]), dout_full);
    }
}

template <class KeyRows, class Plan>
struct AddedBlocks : BlockWalk {
    __device__ __forceinline__ AddedBlocks(const Params& params, Plan&, const KeyTile& tile)
        : BlockWalk(params, tile) {}
    // The number of the block in the scratch.
    __device__ __forceinline__ int place() const {
        return (tile.kv_head * params.group + member) * static_cast<int>(params.blocks) +
               tile.first_row_block + block;
    }
    // The number of tiles that add to the block before this one: tiles of keys before it that see the block.
    // They were given out before, so nobody waits for a CTA that has not begun.
    __device__ __forceinline__ int turn() const {
        const int first_seen = max_int(block * kBlockRows + tile.offset - params.window_left, 0);
        return tile.first_key / KeyRows::kRows - first_seen / KeyRows::kRows;
    }
};

// A thread's keys are 64 keys from `first_key` on. Everything is in registers: a wait for shared memory in
// each step costs more than the arithmetic.
template <class Plan>
struct Queries {
    const Params& params;
    const KeyTile& tile;
    const int first_key, key;  // of 64, and of the thread
    int block, member = 0, left;
    int whole_first, whole_end;  // blocks whose queries all see all 64 keys

    __device__ __forceinline__ Queries(const Params& params, const Plan&, const KeyTile& tile, int first_key,
                                       int key)
        : params(params), tile(tile), first_key(first_key), key(key) {
        block = warp_uniform(tile.end_block - 1);
        left = warp_uniform(tile.blocks()) * params.group;
        const int last_key = first_key + 63, first = last_key - tile.offset - params.window_right;
        whole_first =
            warp_uniform(last_key >= tile.k_len ? 0x7fffffff : ceil_div(max_int(first, 0), kBlockRows));
        whole_end = warp_uniform((first_key - tile.offset + params.window_left + 1) / kBlockRows);
    }
    // Whether there is a block at all.
    __device__ __forceinline__ bool begins() const { return left > 0; }
    // After Q's barrier: what the step is.
    __device__ __forceinline__ void look(u32) const {}
    template <class Pairs>
    __device__ __forceinline__ void find_seen(const Pairs&) const {}
    // To the next block; whether there is one.
    __device__ __forceinline__ bool advance() {
        if (++member == params.group) member = 0, --block;
        return --left > 0;
    }
    __device__ __forceinline__ bool is_masked() const { return block < whole_first || block >= whole_end; }

    // Clears pairs of queries and keys that are not attended, in columns 8 kFirst to 8 kEnd - 1.
    template <int kFirst = 0, int kEnd = kBlockRows / 8>
    __device__ __forceinline__ void hide(Packed& pairs) const {
        const int first = block * kBlockRows + first_query_of_thread();
        const u32 seen = static_cast<u32>(params.window_left) + static_cast<u32>(params.window_right) + 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int at = key + 8 * r;
            // The first query that sees the key, counted from the thread's first.
            const int begin = at < tile.k_len ? at - tile.offset - params.window_right - first : 0x7fffffff;
#pragma unroll
            for (int j = kFirst; j < kEnd; ++j) {
                u32& pair = pairs[2 * j + r];
                if (static_cast<u32>(8 * j - begin) >= seen) pair &= 0xffff0000;
                if (static_cast<u32>(8 * j + 1 - begin) >= seen) pair &= 0x0000ffff;
            }
        }
    }

    // The score function of a block. It knows no masks: `hide` clears what it computes for hidden pairs.
    struct Function {
        const Params& params;
        float slope, distance;  // of ALiBi; from the thread's first query to the one at its first key

        __device__ __forceinline__ explicit Function(const Queries& queries) : params(queries.params) {
            if constexpr (kAlibi) {
                const KeyTile& tile = queries.tile;
                const i64 row = static_cast<i64>(tile.request) * params.alibi_stride_b;
                slope = params.alibi_slopes[row + tile.kv_head * params.group + queries.member] * kLog2E;
                distance = static_cast<float>(queries.key - tile.offset - queries.block * kBlockRows -
                                              first_query_of_thread());
            }
        }
        // e = exp(score - lse) of accumulator i, and the derivative of the score by s.
        template <bool kMasked>
        __device__ __forceinline__ float2 exponential(int i, float s, float lse, float) const {
            float score = s;
            if constexpr (kSoftcap) score = tanh_approx(score * params.score_scale);
            const float derivative = kSoftcap ? fmaf(-score, score, 1.0f) : 1.0f;
            if constexpr (kAlibi) {
                const float before = static_cast<float>(8 * (i >> 2) + (i & 1) - 8 * ((i >> 1) & 1));
                score = fmaf(score, params.score_factor, -(slope * fabsf(distance - before)));
            }
            return {exp2_approx(fmaf(score, params.softmax_scale_log2, -lse)), derivative};
        }
    };
};

// Whether dS has another factor than P.
constexpr bool kHasDerivative = kSoftcap;
