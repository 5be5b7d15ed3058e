// Multi-head attention, forward: varlen or fixed lengths, interval masks, groups of query heads, keys in
// arrays and, with PAGED, in pages of a cache before them; with FLEX, functions of the user's and lists of
// blocks. docs/kernels/mha_forward.md has the schedule; rawmla/kernels/mha_forward.py, prefix_prefill.py with
// PAGED and flex_forward.py with FLEX choose the variant and its parameters.
//
// Roles of a CTA, which takes one tile (mha/tiles.cuh) after another:
//   warpgroup 0, warp 0   schedules tiles and copies Q and K to shared memory with TMA
//   warpgroup 0, warp 1   copies V
//   warpgroup 0, warp 2   clears rows of V that no query of the tile sees
//   warpgroup 1           with PAGED 2, gathers K and V of pages, and clears rows of V in place of warp 2
//   the others            64 rows of the tile each: S = Q K^T, softmax, O += P V
// A consumer issues Q K^T of a block together with P V of the block before, so that its softmax runs under
// P V. Consumers take turns in issuing (NB_TURN), so that one's softmax also runs under the other's
// products.
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/array_keys.cuh"
#include "mha/cta.cuh"
#include "mha/gathered_keys.cuh"
#include "mha/masks.cuh"
#include "mha/paged_keys.cuh"
#include "mha/params.cuh"
#include "mha/scores.cuh"
#include "mha/sink.cuh"
#include "mha/softmax.cuh"
#include "mha/tiles.cuh"
#include "mha/trim.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#if FLEX
#include "flex/list_keys.cuh"
using OwnKeys = ListKeys;
#else
using OwnKeys = ArrayKeys;
#endif

constexpr int kThreads = 128 * (kConsumers + 1 + kPagesGathered);
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kRegisters = kConsumers == 3 ? 160 : kConsumers == 2 && kPagesGathered ? 192 : 232;
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
constexpr int kGathererRegisters = kConsumers == 1 ? 168 : 88;
static_assert(kConsumers * kRegisters + kProducerRegisters + kPagesGathered * kGathererRegisters <=
                  65536 / kThreads / 8 * 8 * (kThreads / 128),
              "setmaxnreg would wait for ever: a CTA shares what its threads have at launch");

__device__ __forceinline__ void load_q(const Params& params, SharedMemoryPlan& smem, const Tile& tile,
                                       u32 n) {
    if (!elect_one_sync()) return;
    const int tokens = 64 >> params.log2_group;
    const int batch = params.cu_seqlens_q == nullptr ? tile.request : 0;
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
        const u32 full = smem_address(&smem.bar_q_full[i]);
        mbarrier_wait_parity(smem_address(&smem.bar_q_free[i]), n & 1 ^ 1);
        mbarrier_arrive_expect_tx(full, kChunksQK * Rows::kBytes);
#pragma unroll
        for (int chunk = 0; chunk < kChunksQK; ++chunk)
            tma_load_5d(smem_address(smem.q[i] + chunk * Rows::kBytes), &params.q_map, full, 64 * chunk, 0,
                        tile.q_begin + tile.first_token + i * tokens, tile.head, batch);
    }
}

struct KeyLoader {
    Scheduler scheduler;
    Stage stage;
    u32 n = 0;  // number of the tile
    bool q_is_loaded;
    u32 raw_blocks = 0;

    __device__ __forceinline__ explicit KeyLoader(const Params& params) : scheduler(params) {}

    __device__ __forceinline__ void run(const Params& params, SharedMemoryPlan& smem) {
        for (;; ++n) {
            const u32 slot = n % kTileStages;
            if (n >= kTileStages) named_barrier_sync(NB_TILE_FREE + slot, kTileThreads);
            const Tile& tile = smem.tiles[slot];
            const bool found = scheduler.next(params, smem.tiles[slot]);
            if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_tile_full[slot]));
            if (!found) break;
            q_is_loaded = false;
            if constexpr (kPagesGathered) smem.turns_k.wait_for_loader(n);
            load<OwnKeys>(params, smem, tile);
            if constexpr (kPagesGathered) {
                smem.turns_k.pass_to_gatherer();
                stage.number += tile.spans[kPages].blocks();
            }
            if constexpr (kPagesByTma) load<PagedKeys>(params, smem, tile);
            if (!q_is_loaded) {
                load_q(params, smem, tile, n);
                scheduler.ask(params);
            }
            // Behind Q: without it the places of raw keys would not become free.
            if constexpr (kCacheIsFp8)
                if (params.cache_by_tma) load_raw(params, smem, tile);
            __syncwarp();
            scheduler.advance(params);
        }
    }

  private:
    template <class Keys>
    __device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        typename Keys::Loader loader(params, tile);
        const int first_block = tile.spans[Keys::kSpan].first_block;
#pragma unroll 1
        for (int block = tile.spans[Keys::kSpan].end_block - 1; block >= first_block; --block) {
            loader.look_up(params, block);
            const u32 place = stage.index();
            mbarrier_wait_parity(smem_address(&smem.bar_k_free[place]), stage.free_parity());
            loader.load_k(params, smem_address(smem.k[place]), smem_address(&smem.bar_k_full[place]));
            ++stage.number;
            if (!q_is_loaded) {
                load_q(params, smem, tile, n);
                scheduler.ask(params);
            }
            q_is_loaded = true;
            __syncwarp();
        }
    }
    // K of an FP8 cache, for the gatherer to convert
    __device__ __forceinline__ void load_raw(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        PagedKeys::Loader loader(params, tile);
        const Span& span = tile.spans[kPages];
#pragma unroll 1
        for (int block = span.end_block - 1; block >= span.first_block; --block, ++raw_blocks) {
            loader.look_up(params, block);
            mbarrier_wait_parity(smem_address(&smem.bar_raw_k_free), raw_blocks & 1 ^ 1);
            loader.load_k(params, smem_address(smem.raw_k), smem_address(&smem.bar_raw_k_full));
            __syncwarp();
        }
    }
};

struct ValueLoader {
    Stage stage;
    u32 raw_blocks = 0;

    __device__ __forceinline__ void run(const Params& params, SharedMemoryPlan& smem) {
        for (TileReader reader;; ++reader.count) {
            const Tile& tile = reader.next(smem);
            if (tile.request < 0) break;
            if constexpr (kPagesGathered) smem.turns_v.wait_for_loader(reader.count);
            load<OwnKeys>(params, smem, tile);
            if constexpr (kPagesByTma) load<PagedKeys>(params, smem, tile);
            if constexpr (kPagesGathered) {
                smem.turns_v.pass_to_gatherer();
                stage.number += tile.spans[kPages].blocks();
            }
            if constexpr (kCacheIsFp8)
                if (params.cache_by_tma) load_raw(params, smem, tile);
            reader.release();
        }
    }

  private:
    template <class Keys>
    __device__ __forceinline__ void load(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        typename Keys::Loader loader(params, tile);
        const Span& span = tile.spans[Keys::kSpan];
#pragma unroll 1
        for (int block = span.end_block - 1; block >= span.first_block; --block) {
            loader.look_up(params, block);
            u64* full = trims_values(params, tile, span, block) ? smem.bar_v_landed : smem.bar_v_full;
            const u32 place = stage.index();
            mbarrier_wait_parity(smem_address(&smem.bar_v_free[place]), stage.free_parity());
            loader.load_v(params, smem_address(smem.v[place]), smem_address(full + place));
            ++stage.number;
            __syncwarp();
        }
    }
    // V of an FP8 cache, for the gatherer to convert
    __device__ __forceinline__ void load_raw(const Params& params, SharedMemoryPlan& smem, const Tile& tile) {
        PagedKeys::Loader loader(params, tile);
        const Span& span = tile.spans[kPages];
#pragma unroll 1
        for (int block = span.end_block - 1; block >= span.first_block; --block, ++raw_blocks) {
            loader.look_up(params, block);
            mbarrier_wait_parity(smem_address(&smem.bar_raw_v_free), raw_blocks & 1 ^ 1);
            loader.load_v(params, smem_address(smem.raw_v), smem_address(&smem.bar_raw_v_full));
            __syncwarp();
        }
    }
};

// The warp that trims V.
__device__ __forceinline__ void trim_values(const Params& params, SharedMemoryPlan& smem) {
    ValueTrimmer<32> trimmer;
    for (TileReader reader;; ++reader.count) {
        const Tile& tile = reader.next(smem);
        if (tile.request < 0) break;
        trimmer.trim<OwnKeys>(params, smem, tile);
        if constexpr (kPagesByTma) trimmer.trim<PagedKeys>(params, smem, tile);
        reader.release();
    }
}

// One consumer: 64 rows of each tile.
struct Consumer {
    const Params& params;
    SharedMemoryPlan& smem;
    const int wg, warp_idx;
    const bool leads;  // the first thread of the warpgroup
    u32 number = 0;    // of the next block of K

    // What follows from the tile is read again where it is needed: it would take registers meanwhile.
    __device__ __forceinline__ int row_of(int r) const {
        return wg * 64 + warp_idx * 16 + lane_index() / 4 + 8 * r;
    }
    __device__ __forceinline__ int token_of(const Tile& tile, int r) const {
        return tile.first_token + (row_of(r) >> params.log2_group);
    }
    __device__ __forceinline__ int head_of(const Tile& tile, int r) const {
        return (tile.head << params.log2_group) + (row_of(r) & ((1 << params.log2_group) - 1));
    }

    __device__ __forceinline__ void run() {
        if (wg == 0) named_barrier_arrive(NB_TURN, 256);
        for (TileReader reader;; ++reader.count) {
            const Tile& tile = reader.next(smem);
            if (warp_uniform(tile.request) < 0) break;
            attend(tile, reader);
        }
        if (leads) bulk_wait_group_read<0>();
    }

  private:
    using Scores = float[kTileKeys / 2];
    using Output = float[kDimV / 2];
    using Probabilities = u32[kTileKeys / 16][4];

    __device__ __forceinline__ void attend(const Tile& tile, const TileReader& reader) {
        Output o;
        LazySoftmax<kMaxScores> softmax;
        ScoreStep<kSoftcap, kAlibi> score_step;
        if constexpr (kAlibi) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const i64 row = static_cast<i64>(tile.request) * params.alibi_stride_b;
                score_step.diagonal[r] = token_of(tile, r) + tile.offset;
                score_step.slope[r] = params.alibi_slopes[row + head_of(tile, r)] * kLog2E;
            }
        }
#pragma unroll
        for (int j = 0; j < kDimV / 2; ++j) o[j] = 0.0f;
        wgmma_pin(o);  // not to be zeroed in the middle of a pipeline of wgmma

        mbarrier_wait_parity(smem_address(&smem.bar_q_full[wg]), reader.count & 1);
        Scales scales;
        attend_span<OwnKeys>(tile, o, softmax, score_step, scales);
        if constexpr (kPagesByTma) attend_span<PagedKeys>(tile, o, softmax, score_step, scales);
        if constexpr (kPagesGathered) {
            if constexpr (kCacheIsFp8) enter_pages(o, softmax, scales);
            attend_span<PieceKeys>(tile, o, softmax, score_step, scales);
        }
        store(tile, reader, o, softmax, scales);
    }

    // Factors of scores and of V in the span: those of an FP8 cache.
    struct Scales {
        float k = 1.0f, v = 1.0f;
    };
    // Scores of FP8 keys are in other units than those of the request's own, and so is P V: references of the
    // softmax and O are brought to them.
    __device__ __forceinline__ void enter_pages(Output& o, LazySoftmax<kMaxScores>& softmax,
                                                Scales& scales) const {
        scales.k = not_zero(params.k_scale == nullptr ? params.k_scale_value : *params.k_scale);
        scales.v = not_zero(params.v_scale == nullptr ? params.v_scale_value : *params.v_scale);
        if constexpr (!kAlibi) {
            softmax.m[0] /= scales.k;
            softmax.m[1] /= scales.k;
        }
        const float factor = 1.0f / scales.v;
        multiply_rows(o, factor, factor);
    }
    // Scales are divided by: instead of 0, a number that makes as little of the cache.
    __device__ __forceinline__ static float not_zero(float scale) { return scale == 0.0f ? 1e-30f : scale; }
    // From scores as the score step leaves them to exponents of 2
    __device__ __forceinline__ float softmax_scale_log2(const Scales& scales) const {
        return kCacheIsFp8 && !kAlibi ? params.softmax_scale_log2 * scales.k : params.softmax_scale_log2;
    }
    // scale x and log2 y in base e, where `scaled` is scale x in base 2. It may overflow where x does not.
    __device__ __forceinline__ float to_natural(float x, float scaled, float y_log2,
                                                const Scales& scales) const {
        if (fabsf(scaled) == kInfinity && x != -kInfinity) return x * (softmax_scale_log2(scales) * kLn2);
        return (scaled + y_log2) * kLn2;
    }

    template <class Keys>
    __device__ __forceinline__ void issue_qk(Scores& s, u64 desc_q, u64 desc_k) const {
        wgmma_pin(s);
        wgmma_fence();
        Keys::issue_qk(s, desc_q, desc_k + number % kStages * (sizeof(smem.k[0]) >> 4));
        wgmma_commit_group();
    }
    // Of the block before `number`
    template <class Keys>
    __device__ __forceinline__ void issue_pv(Output& o, const Probabilities& p, u64 desc_v) const {
        wgmma_pin(o);
        wgmma_fence();
        Keys::issue_pv(o, p, desc_v + (number - 1) % kStages * (sizeof(smem.v[0]) >> 4));
        wgmma_commit_group();
    }
    __device__ __forceinline__ void wait_k() const {
        mbarrier_wait_parity(smem_address(&smem.bar_k_full[number % kStages]), number / kStages & 1);
    }
    __device__ __forceinline__ void wait_v() const {
        mbarrier_wait_parity(smem_address(&smem.bar_v_full[(number - 1) % kStages]),
                             (number - 1) / kStages & 1);
    }
    __device__ __forceinline__ void free_k() const {
        if (leads) mbarrier_arrive(smem_address(&smem.bar_k_free[number % kStages]));
    }
    __device__ __forceinline__ void free_v() const {
        if (leads) mbarrier_arrive(smem_address(&smem.bar_v_free[(number - 1) % kStages]));
    }
    __device__ __forceinline__ void take_turn() const { named_barrier_sync(NB_TURN + wg, 256); }
    __device__ __forceinline__ void pass_turn() const {
        named_barrier_arrive(NB_TURN + (wg + 1 == kConsumers ? 0 : wg + 1), 256);
    }

#if FLEX
    // The functions of the call, applied to the scores of a block that begins with `first_key`. `asks`: the
    // block may be a partial one, and is if `partial`. `may_end`: the last key may be in front of its end.
    __device__ __forceinline__ void apply_mods(const Tile& tile, int first_key, bool asks, bool partial,
                                               bool may_end, Scores& s) const {
        const int q_len = tile.q_len, kv_len = tile.k_len, b = tile.request, h = tile.head;
        const int first = first_key + 2 * (lane_index() % 4);
        // Rows past the last token take part, since all lanes do what one does; their results go nowhere.
        const int q_idx[2] = {min_int(token_of(tile, 0), q_len - 1), min_int(token_of(tile, 1), q_len - 1)};
        if (asks || (may_end && first_key + kTileKeys > kv_len)) {
#pragma unroll
            for (int j = 0; j < kTileKeys / 2; ++j) {
                const int r = (j >> 1) & 1, key = first + OwnKeys::column_of(j);
                const int kv_idx = min_int(key, kv_len - 1);
                if constexpr (ScoreMod::kIsThere)
                    s[j] = params.score_mod(s[j] * params.score_scale, b, h, q_idx[r], kv_idx, q_len, kv_len);
                bool seen = key < kv_len;
                if constexpr (MaskMod::kIsThere)
                    if (asks) seen &= !partial | params.mask_mod(b, h, q_idx[r], kv_idx, q_len, kv_len);
                s[j] = seen ? s[j] : -kInfinity;
            }
        } else if constexpr (ScoreMod::kIsThere) {
#pragma unroll
            for (int j = 0; j < kTileKeys / 2; ++j)
                s[j] = params.score_mod(s[j] * params.score_scale, b, h, q_idx[(j >> 1) & 1],
                                        first + OwnKeys::column_of(j), q_len, kv_len);
        }
    }
#endif

    // From scores of a block to probabilities. Flex attention has `first_key` of the block, and `partial` and
    // `may_end` as `apply_mods` has them.
    template <class Keys>
    __device__ __forceinline__ void probabilities(const Tile& tile, int block, int first_key, bool masked,
                                                  bool partial, bool may_end, Scores& s,
                                                  LazySoftmax<kMaxScores>& softmax,
                                                  const ScoreStep<kSoftcap, kAlibi>& score_step,
                                                  const Scales& scales) const {
#if FLEX
        apply_mods(tile, first_key, masked, partial, may_end, s);
        softmax.block(s, softmax_scale_log2(scales));
#else
        const Span& span = tile.spans[Keys::kSpan];
        const int first_column = block * kTileKeys + 2 * (lane_index() % 4);
        if constexpr (kAlibi || kSoftcap)
            score_step.template apply<Keys>(params, s, span.base + first_column, scales.k);
        if (masked) {
            IntervalMask<kWindow> mask;
#pragma unroll
            for (int r = 0; r < 2; ++r)
                mask.set(r, span.clip(keys_of_token(params, tile, token_of(tile, r))), first_column);
#pragma unroll
            for (int j = 0; j < kTileKeys / 2; ++j)
                if (mask.hides((j >> 1) & 1, Keys::column_of(j))) s[j] = -kInfinity;
        }
        softmax.block(s, softmax_scale_log2(scales));
#endif
    }

    // Read before the wait for the product, under which its latency passes.
    template <class Keys>
    __device__ __forceinline__ int first_key_of(const Tile& tile, int block) const {
#if FLEX
        return Keys::first_key(params, tile, block);
#else
        return 0;
#endif
    }
    __device__ __forceinline__ bool is_partial(const Tile& tile, int block) const {
#if FLEX
        return block >= tile.full_steps;
#else
        return true;
#endif
    }

    template <class Keys>
    __device__ __forceinline__ void step(const Tile& tile, int block, bool masked, bool may_end,
                                         const u64 (&desc)[3], Scores& s, Output& o, Probabilities& p,
                                         LazySoftmax<kMaxScores>& softmax,
                                         const ScoreStep<kSoftcap, kAlibi>& score_step,
                                         const Scales& scales) {
        const int first_key = first_key_of<Keys>(tile, block);
        wait_k();
        take_turn();
        issue_qk<Keys>(s, desc[0], desc[1]);
        wait_v();
        issue_pv<Keys>(o, p, desc[2]);
        pass_turn();
        wgmma_wait_group<1>();
        wgmma_pin(s);
        free_k();
        probabilities<Keys>(tile, block, first_key, masked, masked, may_end, s, softmax, score_step, scales);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        free_v();
        ++number;
        Keys::pack(s, p);
        softmax.rescale(o);
    }

    template <class Keys>
    __device__ __forceinline__ void attend_span(const Tile& tile, Output& o, LazySoftmax<kMaxScores>& softmax,
                                                const ScoreStep<kSoftcap, kAlibi>& score_step,
                                                const Scales& scales) {
        const Span& span = tile.spans[Keys::kSpan];
        int block = warp_uniform(span.end_block) - 1;
        const int first_block = warp_uniform(span.first_block);
        if (block < first_block) return;
        number = warp_uniform(number);  // else ptxas computes descriptors lane by lane
        Scores s;
        Probabilities p;
        const u64 desc[3] = {Rows::k_major(smem_address(smem.q) + wg * sizeof(smem.q[0])),
                             Keys::k_descriptor(smem_address(smem.k)),
                             Keys::v_descriptor(smem_address(smem.v))};
        const int first_key = first_key_of<Keys>(tile, block);
        const bool partial = is_partial(tile, block);
        wait_k();
        issue_qk<Keys>(s, desc[0], desc[1]);
        wgmma_wait_group<0>();
        wgmma_pin(s);
        free_k();
        ++number;
        probabilities<Keys>(tile, block, first_key, true, partial, true, s, softmax, score_step, scales);
        Keys::pack(s, p);
        if (Keys::kSpan > 0) softmax.rescale(o);

        // Blocks [plain_begin, plain_end) are seen whole by all rows of the warpgroup that exist.
        [[maybe_unused]] const int first_row = tile.first_token + (wg * 64 >> params.log2_group);
        const int last_row = tile.first_token + (wg * 64 + 63 >> params.log2_group);
#if FLEX
        const int plain_end = warp_uniform(tile.full_steps);
#else
        const int plain_end = warp_uniform(span.clip(keys_of_token(params, tile, first_row)).end) / kTileKeys;
#endif
        const int plain_begin =
            kWindow
                ? warp_uniform(ceil_div(span.clip(keys_of_token(params, tile, last_row)).begin, kTileKeys))
                : 0;
        --block;
#pragma unroll 1
        for (; block >= max_int(first_block, plain_end); --block)
            step<Keys>(tile, block, true, true, desc, s, o, p, softmax, score_step, scales);
#if FLEX
        if (params.last_block_is_cut) {  // lists have it anywhere
#pragma unroll 1
            for (; block >= first_block; --block)
                step<Keys>(tile, block, false, true, desc, s, o, p, softmax, score_step, scales);
        }
#endif
#pragma unroll 1
        for (; block >= max_int(first_block, plain_begin); --block)
            step<Keys>(tile, block, false, false, desc, s, o, p, softmax, score_step, scales);
        if constexpr (kWindow) {
#pragma unroll 1
            for (; block >= first_block; --block)
                step<Keys>(tile, block, true, true, desc, s, o, p, softmax, score_step, scales);
        }
        wait_v();
        issue_pv<Keys>(o, p, desc[2]);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        free_v();
    }

    // Results of the tile, which is free then, as is Q.
    __device__ __forceinline__ void store(const Tile& tile, const TileReader& reader, Output& o,
                                          LazySoftmax<kMaxScores>& softmax, const Scales& scales) const {
        float factor[2];
        const bool split = params.splits > 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = token_of(tile, r), head = head_of(tile, r);
            // Tokens past q_len have results, which are those of a row without keys.
            const float sum = quad_sum(softmax.l[r]);
            const float l = token < tile.q_len ? sum : 0.0f;
            const float m = softmax.m[r] * softmax_scale_log2(scales);
            const float all = split ? l : add_sink(params.attn_sink, params.sink_dtype, head, m, l);
            factor[r] = l == 0.0f ? 0.0f : reciprocal_approx(all);
            if constexpr (kCacheIsFp8) factor[r] *= scales.v;
            float* lse = split ? params.lse_accum + tile.split * params.accum_rows : params.lse;
            if (lse != nullptr && leads_quad() && token < tile.q_rows)
                lse[place_of(tile, token, head)] =
                    l == 0.0f ? -kInfinity : to_natural(softmax.m[r], m, log2_approx(l), scales);
#if FLEX
            if (kMaxScores && leads_quad() && token < tile.q_rows)
                params.max_scores[place_of(tile, token, head)] = to_natural(
                    softmax.top_score[r], softmax.top_score[r] * softmax_scale_log2(scales), 0.0f, scales);
#endif
        }
        if (kOutIsFp8 && !split) {
            const float scale = params.out_scale == nullptr ? params.out_scale_value : *params.out_scale;
            factor[0] /= scale;
            factor[1] /= scale;
        }
        // Where a row has no key, O may be 0 times Inf of keys that other rows see.
        const bool empty[2] = {factor[0] == 0.0f, factor[1] == 0.0f};
        auto result = [&](int j) {
            const int r = (j >> 1) & 1;
            return empty[r] ? 0.0f : o[j] * factor[r];
        };
        if (split) {
            store_split(tile, reader, result);
            return;
        }
        if constexpr (kOwnOutput) {
            if (leads) bulk_wait_group_read<0>();  // of the tile before
        }
        // Q is given back only when no warp reads it or still waits for it: q_full would pass on to its next
        // phase. 16-bit rows of O over Q lie where the warp's own rows of Q were, which no other warp reads;
        // FP8 rows lie elsewhere, so that all warps must have read theirs.
        if constexpr (kOwnOutput || kOutIsFp8) named_barrier_sync(NB_OWN + wg, 128);
        if constexpr (kOwnOutput) {
            if (leads) mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
        }
        unsigned char* staged = staged_rows();
        const u32 smem_o = smem_address(staged);
        if constexpr (kOutIsFp8) {
            // Rows of kDimV bytes
            u16* dst = reinterpret_cast<u16*>(staged) + (warp_idx * 16 + lane_index() / 4) * (kDimV / 2) +
                       lane_index() % 4;
#pragma unroll
            for (int j = 0; j < kDimV / 2; j += 2) {
                const u32 pair = pack_e4m3(result(j), result(j + 1), 0.0f, 0.0f);
                dst[((j >> 1) & 1) * 8 * (kDimV / 2) + j / 4 * 4] = static_cast<u16>(pair);
            }
        } else {
            const u32 dst = smem_o + Rows::offset(warp_idx * 16 + lane_index() % 16, lane_index() / 16);
#pragma unroll
            for (int k = 0; k < kDimV / 16; ++k) {
                u32 packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    packed[i] = pack_16bit<kDtype>(result(8 * k + 2 * i), result(8 * k + 2 * i + 1));
                stmatrix_x4((dst ^ (32 * (k % 4))) + k / 4 * Rows::kBytes, packed[0], packed[1], packed[2],
                            packed[3]);
            }
        }
        const int first_token = tile.first_token + (wg * 64 >> params.log2_group);
        const int tokens = 64 >> params.log2_group;
        const int q_begin = tile.q_begin, head = tile.head, request = tile.request, rows = tile.q_rows;
        fence_proxy_async();
        named_barrier_sync(NB_OWN + wg, 128);
        reader.release();
        // TMA would write past the end of a segment.
        if (!kOutIsFp8 && !params.out_by_rows &&
            (params.cu_seqlens_q == nullptr || first_token + tokens <= rows)) {
            if (leads) {
#pragma unroll
                for (int chunk = 0; chunk < kChunksV; ++chunk)
                    tma_store_5d(&params.out_map, smem_o + chunk * Rows::kBytes, 64 * chunk, 0,
                                 q_begin + first_token, head, params.cu_seqlens_q == nullptr ? request : 0);
                bulk_commit_group();
                if constexpr (!kOwnOutput) {
                    bulk_wait_group_read<0>();
                    mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
                }
            }
        } else {
            store_rows(request, q_begin, first_token, rows, head);
            if constexpr (!kOwnOutput) {
                fence_proxy_async();
                named_barrier_sync(NB_OWN + wg, 128);
                if (leads) mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
            }
        }
    }
    // Where O waits for its copy to global memory
    __device__ __forceinline__ unsigned char* staged_rows() const {
        return kOwnOutput ? smem.o[wg] : smem.q[wg];
    }
    // Where a row lies in lse, and among the rows of a split.
    __device__ __forceinline__ i64 place_of(const Tile& tile, int token, int head) const {
        const i64 place = head * params.lse_stride_h + tile.q_begin + token;
        return params.cu_seqlens_q == nullptr ? place + tile.request * params.lse_stride_b : place;
    }
    // Results of a split in float32, to be combined by kernels/mha_combine.cu.
    template <class Result>
    __device__ __forceinline__ void store_split(const Tile& tile, const TileReader& reader,
                                                Result result) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = token_of(tile, r), head = head_of(tile, r);
            if (token < tile.q_rows) {
                const i64 row = tile.split * params.accum_rows + place_of(tile, token, head);
                float* dst = params.o_accum + row * kDimV + 2 * (lane_index() % 4);
#pragma unroll
                for (int j = 2 * r; j < kDimV / 2; j += 4)
                    *reinterpret_cast<float2*>(dst + 2 * j - 4 * r) = make_float2(result(j), result(j + 1));
            }
        }
        named_barrier_sync(NB_OWN + wg, 128);
        reader.release();
        if (leads) mbarrier_arrive(smem_address(&smem.bar_q_free[wg]));
    }
    // Tokens below `rows` of what `store` has put in shared memory, without TMA.
    __device__ __forceinline__ void store_rows(int request, int q_begin, int first_token, int rows,
                                               int head) const {
        constexpr int kBytes = kOutIsFp8 ? 1 : 2;  // of an element
        constexpr int kUnit = 16 / kBytes, kRowUnits = ceil_div(kDimV, kUnit);
        const int group = 1 << params.log2_group;
        const i64 batch = params.cu_seqlens_q == nullptr ? request * params.out_stride_b : 0;
        for (int i = threadIdx.x % 128; i < 64 * kRowUnits; i += 128) {
            const int row = i / kRowUnits, unit = i % kRowUnits;
            const int token = first_token + (row >> params.log2_group);
            if (token >= rows) break;
            const unsigned char* src =
                staged_rows() +
                (kOutIsFp8 ? row * kDimV + 16 * unit : unit / 8 * Rows::kBytes + Rows::offset(row, unit % 8));
            const i64 element = batch + (q_begin + token) * params.out_stride_s +
                                (head * group + (row & (group - 1))) * params.out_stride_h + kUnit * unit;
            unsigned char* out = static_cast<unsigned char*>(params.out) + element * kBytes;
            const int bytes = min_int(16, (params.d_v - kUnit * unit) * kBytes);
            if (bytes == 16 && reinterpret_cast<u64>(out) % 16 == 0) {
                *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(src);
            } else {
                for (int byte = 0; byte < bytes; ++byte) out[byte] = src[byte];
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) mha_forward(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    if (threadIdx.x == 0) init_barriers(smem);
    if (threadIdx.x == 32) {
        tma_prefetch_descriptor(&params.q_map);
        tma_prefetch_descriptor(&params.k_map);
        tma_prefetch_descriptor(&params.v_map);
        tma_prefetch_descriptor(&params.out_map);
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    if (wg_idx == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (warp_idx == 0) {
            KeyLoader(params).run(params, smem);
        } else if (warp_idx == 1) {
            ValueLoader{}.run(params, smem);
        } else if (!kPagesGathered && warp_idx == 2) {
            trim_values(params, smem);
        }
    } else if (kPagesGathered && wg_idx == 1) {
        setmaxnreg_dec<kGathererRegisters>();
        Gatherer{}.run(params, smem);
    } else {
        setmaxnreg_inc<kRegisters>();
        Consumer{params, smem, wg_idx - 1 - kPagesGathered, warp_idx, threadIdx.x % 128 == 0}.run();
    }
}
