// Blocks of queries from lists (flex attention): which of them a tile of keys walks, for every request and
// query head that reads its keys. Partial blocks of the mask, where the mask function is asked, and full ones
// come together in the order that lists have, the last first. Without lists all are full.
//
// The thread that copies reads the lists. It tells the other roles of each step in shared memory, and of the
// end as of a step more, which has no data.
#pragma once
#include "layout/swizzled_tile.cuh"
#include "mha/key_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

// A row that sees no key may hold NaN, and only functions make such rows: they are cleared.
constexpr bool kTrims = ScoreMod::kIsThere || MaskMod::kIsThere;
// Places for what is told. The thread that adds dQ is five steps behind at most, and keep_turns of
// mha_backward.cu, which reads last, one more.
constexpr int kToldSteps = 8;

struct alignas(16) QueryStep {
    int block;  // of kBlockRows queries; negative: the end
    int head, request;
    int partial;

    __device__ __forceinline__ bool is_end() const { return block < 0; }
    // Of the block, in the scratch.
    __device__ __forceinline__ i64 place(const Params& params) const {
        return head * params.blocks + static_cast<i64>(request) * params.q_blocks + block;
    }
};

// From the last block on. kByBlock: each for all requests and heads that read the keys if these have the same
// lists, as BlockWalk (mha/key_tiles.cuh) has it; else for one of them after the other.
template <bool kByBlock>
class QueryWalk {
  public:
    __device__ __forceinline__ QueryWalk(const Params& params, const KeyTile& tile)
        : params(params), tile(tile) {
        if (!together()) return;
        open_lists();
        reader = params.requests * params.group - 1;
    }

    // The step after this one, or the end.
    __device__ __forceinline__ QueryStep next() {
        if (together()) {
            if (++reader == params.requests * params.group) {
                if (!next_block()) return {-1, 0, 0, 0};
                reader = 0;
            }
        } else {
            while (!next_block()) {
                if (++reader == params.requests * params.group) return {-1, 0, 0, 0};
                open_lists();
            }
        }
        return {block, head(), request(), !is_full};
    }

  private:
    static constexpr int kNoRow = 0x7fffffff;

    // What can be computed again is not kept: there are few registers.
    const Params& params;
    const KeyTile& tile;
    int reader = -1;  // a request and head
    // Of partial and of full blocks: what is left of the list, and its next row of the mask, counted from the
    // last one.
    const int* list[2] = {};
    int left[2] = {}, row[2] = {kNoRow, kNoRow};
    bool is_full = true;
    int block = 0, begin = 0, end = 0;  // and the blocks that are left of its row of the mask

    __device__ __forceinline__ int request() const {
        return tile.request * params.requests + reader / params.group;
    }
    __device__ __forceinline__ int head() const {
        return tile.kv_head * params.group + reader % params.group;
    }
    __device__ __forceinline__ bool together() const {
        if constexpr (!kByBlock) return false;
        return params.q_num_blocks == nullptr || (params.mask_batches == 1 && params.mask_heads == 1);
    }
    __device__ __forceinline__ int mirrored(int mask_row) const {
        return static_cast<int>(static_cast<u32>(params.mask_rows) - 1 - mask_row);
    }
    __device__ __forceinline__ void advance(int kind) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // no index but a constant one, for these are registers
            if (i != kind) continue;
            row[i] = left[i] > 0 ? min_int(mirrored(*list[i]), kNoRow - 1) : kNoRow;
            --list[i], --left[i];
        }
    }
    // Of the lists; whether there is one.
    __device__ __forceinline__ bool next_block() {
        while (begin >= end) {
            const int kind = row[1] < row[0], next_row = min_int(row[0], row[1]);
            if (next_row == kNoRow) return false;
            // A number that is no block's is skipped: it would be an address of the scratch.
            if (static_cast<u32>(next_row) < static_cast<u32>(params.mask_rows)) {
                begin = mirrored(next_row) * params.block_rows;
                end = min_int(begin + params.block_rows, params.q_blocks);
                is_full = kind;
            }
            advance(kind);
        }
        block = --end;
        return true;
    }
    __device__ __forceinline__ void open_lists() {
        if (params.q_num_blocks == nullptr) {
            begin = 0, end = params.q_blocks;
            return;
        }
        const i64 batch = request() % params.mask_batches, mask_head = head() % params.mask_heads;
        const i64 column = tile.first_key / params.block_k;
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
            const int* counts = kind == 0 ? params.q_num_blocks : params.full_q_num_blocks;
            const int* lists = kind == 0 ? params.q_indices : params.full_q_indices;
            if (counts == nullptr) continue;
            const i64 *of_counts = params.counts_strides + 3 * kind,
                      *of_lists = params.lists_strides + 3 * kind;
            left[kind] =
                min_int(counts[batch * of_counts[0] + mask_head * of_counts[1] + column * of_counts[2]],
                        params.list_rows[kind]);
            list[kind] = lists + batch * of_lists[0] + mask_head * of_lists[1] + column * of_lists[2];
            list[kind] += left[kind] - 1;
            advance(kind);
        }
    }
};

// Tiles that add to a block of dQ before this one: those of keys before it that list the block. They have
// been given out before.
template <int kTileKeys>
__device__ __forceinline__ int turn_of(const Params& params, const KeyTile& tile, const QueryStep& step) {
    if (params.ranks == nullptr) return tile.first_key / kTileKeys;
    const int column = tile.first_key / params.block_k;
    const i64 mask = static_cast<i64>(step.request % params.mask_batches) * params.mask_heads +
                     step.head % params.mask_heads;
    const i64 line = mask * params.mask_columns + column;
    return params.ranks[line * params.mask_rows + step.block / params.block_rows] +
           (tile.first_key - column * params.block_k) / kTileKeys;
}

// One thread: copies K and V once, then Q, dO, lse, references and delta of each step, in the order of
// QueryWalk<kByBlock>. kTellsAhead: who adds dQ waits for what is told, ahead of what is copied.
template <class KeyRows, class BlockRows, bool kByBlock, bool kTellsAhead, class Plan>
__device__ __forceinline__ void load_listed(const Params& params, Plan& smem, const KeyTile& tile) {
    constexpr int kStages = sizeof(smem.lse) / sizeof(smem.lse[0]);
    constexpr int kChunksQK = sizeof(smem.k) / KeyRows::kBytes, kChunksV = sizeof(smem.v) / KeyRows::kBytes;
    const u32 kv = smem_address(&smem.bar_kv);
    mbarrier_arrive_expect_tx(kv, sizeof(smem.k) + sizeof(smem.v));
#pragma unroll
    for (int chunk = 0; chunk < kChunksQK; ++chunk)
        tma_load_4d(smem_address(smem.k) + chunk * KeyRows::kBytes, &params.k_map, kv, 64 * chunk,
                    tile.first_key, tile.kv_head, tile.request);
#pragma unroll
    for (int chunk = 0; chunk < kChunksV; ++chunk)
        tma_load_4d(smem_address(smem.v) + chunk * KeyRows::kBytes, &params.v_map, kv, 64 * chunk,
                    tile.first_key, tile.kv_head, tile.request);
    QueryWalk<kByBlock> walk(params, tile);
#pragma unroll 1
    for (u32 number = 0;; ++number) {
        const QueryStep step = walk.next();
        const u32 stage = number % kStages, free_parity = number / kStages & 1 ^ 1;
        const u32 q_full = smem_address((kTrims ? smem.bar_q_landed : smem.bar_q_full) + stage);
        const u32 dout_full = smem_address((kTrims ? smem.bar_dout_landed : smem.bar_dout_full) + stage);
        mbarrier_wait_parity(smem_address(&smem.bar_free[stage]), free_parity);
        smem.told[number % kToldSteps] = step;
        if constexpr (kTellsAhead) mbarrier_arrive(smem_address(&smem.bar_told[number % kToldSteps]));
        if (step.is_end()) {
            mbarrier_arrive(q_full);
            break;
        }
        const int token = step.block * kBlockRows;
        const i64 row = step.place(params) * kBlockRows;
        mbarrier_arrive_expect_tx(q_full,
                                  sizeof(smem.q[0]) + (ScoreMod::kIsThere ? 2 : 1) * sizeof(smem.lse[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk)
            tma_load_4d(smem_address(smem.q[stage]) + chunk * BlockRows::kBytes, &params.q_map, q_full,
                        64 * chunk, token, step.head, step.request);
        bulk_load(smem_address(smem.lse[stage]), params.lse + row, sizeof(smem.lse[0]), q_full);
        if constexpr (ScoreMod::kIsThere)
            bulk_load(smem_address(smem.references[stage]), params.weights + row, sizeof(smem.references[0]),
                      q_full);
        mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]) + sizeof(smem.delta[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; ++chunk)
            tma_load_4d(smem_address(smem.dout[stage]) + chunk * BlockRows::kBytes, &params.dout_map,
                        dout_full, 64 * chunk, token, step.head, step.request);
        bulk_load(smem_address(smem.delta[stage]), params.delta + row, sizeof(smem.delta[0]), dout_full);
    }
}

// A warp: clears the rows of a block of Q or dO whose lse is +inf; whether there are any. They see no key, or
// do not exist: what they hold times a probability of 0 must be 0.
template <class BlockRows, int kBytes>
__device__ __forceinline__ bool clear_empty_rows(unsigned char (&tiles)[kBytes],
                                                 const float (&lse)[kBlockRows]) {
    const int lane = lane_index();
    unsigned char* units = tiles + lane / 8 * BlockRows::kBytes + lane % 8 * 16;
    bool any = false;
#pragma unroll 1
    for (int first = 0; first < kBlockRows; first += 32) {
        u32 rows = __ballot_sync(0xffffffff, lse[first + lane] == kInfinity);
        any |= rows != 0;
#pragma unroll 1
        for (; rows != 0; rows &= rows - 1)
            if (lane < kBytes / BlockRows::kBytes * 8)
                *reinterpret_cast<uint4*>(units + (first + __ffs(rows) - 1) * BlockRows::kRowBytes) =
                    make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    __syncwarp();
    return any;
}

// A warp: whether a row of the block has a reference (kernels/flex_row_references.cu).
__device__ __forceinline__ bool has_reference(const float (&references)[kBlockRows]) {
    bool found = false;
#pragma unroll
    for (int first = 0; first < kBlockRows; first += 32) found |= references[first + lane_index()] != 0.0f;
    return __any_sync(0xffffffff, found);
}

// A warp, which hands Q and dO on, with kTrims.
template <class BlockRows, class Plan>
__device__ __forceinline__ void trim_listed(Plan& smem) {
    constexpr int kStages = sizeof(smem.lse) / sizeof(smem.lse[0]);
#pragma unroll 1
    for (u32 number = 0;; ++number) {
        const u32 stage = number % kStages, parity = number / kStages & 1;
        mbarrier_wait_parity(smem_address(&smem.bar_q_landed[stage]), parity);
        const bool is_end = smem.told[number % kToldSteps].is_end();
        if (!is_end) {
            bool any = clear_empty_rows<BlockRows>(smem.q[stage], smem.lse[stage]);
            if constexpr (ScoreMod::kIsThere) any |= has_reference(smem.references[stage]);
            if (lane_index() == 0) smem.trimmed[stage] = any;
        }
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_q_full[stage]));
        if (is_end) return;
        mbarrier_wait_parity(smem_address(&smem.bar_dout_landed[stage]), parity);
        clear_empty_rows<BlockRows>(smem.dout[stage], smem.lse[stage]);
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_dout_full[stage]));
        mbarrier_arrive(smem_address(&smem.bar_free[stage]));
    }
}

// A warpgroup: clears those of 64 rows of K from `first_row` on that hold what is not finite. Perhaps no
// query sees them: then their products with a dS of 0 must be 0. Where one does, its lse is not finite
// anyway.
template <Dtype kDtype, class KeyRows, int kBytes>
__device__ __forceinline__ void clear_keys_not_finite(unsigned char (&k)[kBytes], int first_row,
                                                      int barrier) {
    constexpr int kChunks = kBytes / KeyRows::kBytes;
    constexpr u32 kExponent = kDtype == Dtype::kBf16 ? 0x7f80 : 0x7c00;
    const int thread = threadIdx.x % 128;
#pragma unroll 1
    for (int row = first_row + thread / 8; row < first_row + 64; row += 16) {
        unsigned char* units = k + row * KeyRows::kRowBytes + thread % 8 * 16;
        bool bad = false;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const uint4 unit = *reinterpret_cast<const uint4*>(units + chunk * KeyRows::kBytes);
            const u32 pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                bad |= (pairs[i] & kExponent) == kExponent || (pairs[i] >> 16 & kExponent) == kExponent;
        }
        const u32 lanes = 0xffu << (lane_index() & 24);
        if ((__ballot_sync(0xffffffff, bad) & lanes) == 0) continue;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
            *reinterpret_cast<uint4*>(units + chunk * KeyRows::kBytes) = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
}
