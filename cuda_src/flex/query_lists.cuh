// Blocks of queries from lists (flex attention): which of them a tile of keys walks, for every request and
// query head that reads its keys. Partial blocks of the mask, where the mask function is asked, and full ones
// come together in the order that lists have, the last first. Without lists all are full.
//
// The thread that copies reads the lists, and publishes each step in a ring in shared memory.
#pragma once
#include "layout/swizzled_tile.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "mha/key_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

// A row that sees no key may hold NaN, and only functions make such rows: they are cleared.
constexpr bool kTrims = ScoreMod::kIsThere || MaskMod::kIsThere;
// The threads that add dQ and keep turns, which read steps last, are six steps behind at most.
constexpr int kPublishedSteps = 8;

struct alignas(16) QueryStep {
    int block;  // of kBlockRows queries; negative: there are no steps
    int head, request;
    int flags;  // and in a fixed order the turn

    static constexpr int kPartial = 1, kLast = 2, kTurnShift = 2;

    __device__ __forceinline__ bool is_there() const { return block >= 0; }
    __device__ __forceinline__ bool is_partial() const { return (flags & kPartial) != 0; }
    __device__ __forceinline__ bool is_last() const { return (flags & kLast) != 0; }
    // The number of tiles that add to the block before this one: tiles of keys before it that list the block.
    // They were given out before.
    __device__ __forceinline__ int turn() const { return flags >> kTurnShift; }
    // Of the block, in the scratch.
    __device__ __forceinline__ i64 place(const Params& params) const {
        return head * params.blocks + static_cast<i64>(request) * params.q_blocks + block;
    }
};

// Where a walk over lists is. One thread has it in shared memory: it has few registers.
struct WalkState {
    int reader;  // a request and head
    // Of partial and of full blocks: what is left of the list, and its next row of the mask, counted from the
    // last one.
    const int* list[2];
    int left[2], row[2];
    const int* ranks;       // of the tile's column of the mask (kernels/block_mask_ranks.cu)
    int flags;              // of the steps of a row of the mask
    int block, begin, end;  // and the blocks that are left of it
};

// From the last block on. kByBlock: each for all requests and heads that read the keys if these have the same
// lists, as BlockWalk (mha/interval_queries.cuh) has it; else for one of them after the other.
template <bool kByBlock, int kTileKeys>
class QueryWalk {
  public:
    __device__ __forceinline__ QueryWalk(const Params& params, const KeyTile& tile, WalkState& at)
        : params(params), tile(tile), at(at) {
        at = {-1, {}, {}, {kNoRow, kNoRow}, nullptr, flags(tile.first_key / kTileKeys, true), 0, 0, 0};
        if (!together()) return;
        open_lists();
        at.reader = params.requests * params.group - 1;
    }

    // The next step, if there is one.
    __device__ __forceinline__ QueryStep next() {
        if (together()) {
            if (++at.reader == params.requests * params.group) {
                if (!next_block()) return {-1, 0, 0, 0};
                at.reader = 0;
            }
        } else {
            while (!next_block()) {
                if (++at.reader == params.requests * params.group) return {-1, 0, 0, 0};
                open_lists();
            }
        }
        return {at.block, head(), request(), at.flags};
    }

  private:
    static constexpr int kNoRow = 0x7fffffff;

    const Params& params;
    const KeyTile& tile;
    WalkState& at;

    __device__ __forceinline__ int request() const {
        return tile.request * params.requests + at.reader / params.group;
    }
    __device__ __forceinline__ int head() const {
        return tile.kv_head * params.group + at.reader % params.group;
    }
    __device__ __forceinline__ bool together() const {
        if constexpr (!kByBlock) return false;
        return params.q_num_blocks == nullptr || (params.mask_batches == 1 && params.mask_heads == 1);
    }
    __device__ __forceinline__ static int flags(int turn, bool is_full) {
        return turn << QueryStep::kTurnShift | (is_full ? 0 : QueryStep::kPartial);
    }
    __device__ __forceinline__ int mirrored(int mask_row) const {
        return static_cast<int>(static_cast<u32>(params.mask_rows) - 1 - mask_row);
    }
    __device__ __forceinline__ void advance(int kind) {
        at.row[kind] = at.left[kind] > 0 ? min_int(mirrored(*at.list[kind]), kNoRow - 1) : kNoRow;
        --at.list[kind], --at.left[kind];
    }
    // Of the lists; whether there is one.
    __device__ __forceinline__ bool next_block() {
        while (at.begin >= at.end) {
            const int kind = at.row[1] < at.row[0], next_row = min_int(at.row[0], at.row[1]);
            if (next_row == kNoRow) return false;
            // A number that is no block's is skipped: it would be an address of the scratch.
            if (static_cast<u32>(next_row) < static_cast<u32>(params.mask_rows)) {
                at.begin = mirrored(next_row) * params.block_rows;
                at.end = min_int(at.begin + params.block_rows, params.q_blocks);
                int turn = 0;
                if (params.ranks != nullptr)
                    turn = at.ranks[mirrored(next_row)] + tile.first_key % params.block_k / kTileKeys;
                at.flags = flags(turn, kind == 1);
            }
            advance(kind);
        }
        at.block = --at.end;
        return true;
    }
    __device__ __forceinline__ void open_lists() {
        if (params.q_num_blocks == nullptr) {
            at.begin = 0, at.end = params.q_blocks;
            return;
        }
        const int batch = request() % params.mask_batches, mask_head = head() % params.mask_heads;
        const int column = tile.first_key / params.block_k;
        const i64 mask = static_cast<i64>(batch) * params.mask_heads + mask_head;
        at.ranks = params.ranks + (mask * params.mask_columns + column) * params.mask_rows;
        const auto offset = [&](const i64* strides) {
            return batch * strides[0] + mask_head * strides[1] + column * strides[2];
        };
#pragma unroll 1
        for (int kind = 0; kind < 2; ++kind) {
            const int* counts = kind == 0 ? params.q_num_blocks : params.full_q_num_blocks;
            const int* lists = kind == 0 ? params.q_indices : params.full_q_indices;
            if (counts == nullptr) continue;
            at.left[kind] = min_int(counts[offset(params.counts_strides + 3 * kind)], params.list_rows[kind]);
            at.list[kind] = lists + offset(params.lists_strides + 3 * kind) + at.left[kind] - 1;
            advance(kind);
        }
    }
};

// One thread: copies K and V once, then Q, dO and the rows' lse, references and delta of each step, in the
// order of QueryWalk<kByBlock>. kSignals: other threads wait for steps (bar_step). kLoadsV: V is needed.
template <class KeyRows, class BlockRows, bool kByBlock, bool kSignals, bool kLoadsV, class Plan>
__device__ __forceinline__ void load_listed(const Params& params, Plan& smem, const KeyTile& tile) {
    constexpr int kStages = sizeof(smem.lse) / sizeof(smem.lse[0]);
    constexpr int kChunksQK = sizeof(smem.k) / KeyRows::kBytes, kChunksV = sizeof(smem.v) / KeyRows::kBytes;
    const auto load_keys = [&](unsigned char* keys, int chunks, const TensorMap& map, u64& bar) {
        mbarrier_arrive_expect_tx(smem_address(&bar), chunks * KeyRows::kBytes);
        for (int chunk = 0; chunk < chunks; ++chunk)
            tma_load_4d<kL2EvictNormal>(smem_address(keys) + chunk * KeyRows::kBytes, &map,
                                        smem_address(&bar), 64 * chunk, tile.first_key, tile.kv_head,
                                        tile.request);
    };
    load_keys(smem.k, kChunksQK, params.k_map, smem.bar_k_full);
    if constexpr (kLoadsV) load_keys(smem.v, kChunksV, params.v_map, smem.bar_v_full);
    QueryWalk<kByBlock, KeyRows::kRows> walk(params, tile, smem.walk);
    smem.steps[0] = walk.next();
#pragma unroll 1
    for (u32 number = 0;; ++number) {
        const u32 stage = number % kStages, free_parity = number / kStages & 1 ^ 1;
        QueryStep& published = smem.steps[number % kPublishedSteps];
        const QueryStep step = published;
        const u32 q_full = smem_address((kTrims ? smem.bar_q_landed : smem.bar_q_full) + stage);
        const u32 dout_full = smem_address((kTrims ? smem.bar_dout_landed : smem.bar_dout_full) + stage);
        const auto publish = [&] {
            if constexpr (kSignals) mbarrier_arrive(smem_address(&smem.bar_step[number % kPublishedSteps]));
            mbarrier_arrive(q_full);
        };
        mbarrier_wait_parity(smem_address(&smem.bar_q_free[stage]), free_parity);
        if (!step.is_there()) {
            publish();
            return;
        }
        const int token = step.block * kBlockRows;
        const i64 row = step.place(params) * kBlockRows;
        mbarrier_expect_tx(q_full, sizeof(smem.q[0]) + (ScoreMod::kIsThere ? 2 : 1) * sizeof(smem.lse[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk)
            tma_load_4d<kL2EvictNormal>(smem_address(smem.q[stage]) + chunk * BlockRows::kBytes,
                                        &params.q_map, q_full, 64 * chunk, token, step.head, step.request);
        bulk_load(smem_address(smem.lse[stage]), params.lse + row, sizeof(smem.lse[0]), q_full);
        if constexpr (ScoreMod::kIsThere)
            bulk_load(smem_address(smem.references[stage]), params.weights + row, sizeof(smem.references[0]),
                      q_full);
        mbarrier_wait_parity(smem_address(&smem.bar_dout_free[stage]), free_parity);
        mbarrier_arrive_expect_tx(dout_full, sizeof(smem.dout[0]) + sizeof(smem.delta[0]));
#pragma unroll
        for (int chunk = 0; chunk < kChunksV; ++chunk)
            tma_load_4d<kL2EvictNormal>(smem_address(smem.dout[stage]) + chunk * BlockRows::kBytes,
                                        &params.dout_map, dout_full, 64 * chunk, token, step.head,
                                        step.request);
        bulk_load(smem_address(smem.delta[stage]), params.delta + row, sizeof(smem.delta[0]), dout_full);
        // Lists are read while the copies are on their way.
        const QueryStep next = walk.next();
        if (!next.is_there()) published.flags |= QueryStep::kLast;
        smem.steps[(number + 1) % kPublishedSteps] = next;
        publish();
        if (!next.is_there()) return;
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

// The warp that clears rows, with kTrims.
template <class BlockRows, class Plan>
__device__ __forceinline__ void trim_listed(Plan& smem) {
    constexpr int kStages = sizeof(smem.lse) / sizeof(smem.lse[0]);
    u32 stage = 0, parity = 0;
#pragma unroll 1
    for (u32 number = 0;; ++number) {
        mbarrier_wait_parity(smem_address(&smem.bar_q_landed[stage]), parity);
        const QueryStep step = smem.steps[number % kPublishedSteps];
        if (step.is_there()) {
            bool any = clear_empty_rows<BlockRows>(smem.q[stage], smem.lse[stage]);
            if constexpr (ScoreMod::kIsThere) any |= has_reference(smem.references[stage]);
            if (lane_index() == 0) smem.trimmed[stage] = any;
        }
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_q_full[stage]));
        if (!step.is_there()) return;
        mbarrier_wait_parity(smem_address(&smem.bar_dout_landed[stage]), parity);
        clear_empty_rows<BlockRows>(smem.dout[stage], smem.lse[stage]);
        if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_dout_full[stage]));
        mbarrier_arrive(smem_address(&smem.bar_q_free[stage]));  // lse has been read
        if (step.is_last()) return;
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
}

// A warpgroup: clears rows that are not finite, of 64 rows of K from `first_row` on. Perhaps no query sees
// such a row: then its products with a dS of 0 must be 0. Where one does, its lse is not finite anyway.
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
