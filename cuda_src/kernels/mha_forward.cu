// Multi-head attention, forward (Hopper, sm_90a): varlen or fixed lengths, interval masks, groups of query
// heads. Keys are in arrays and, with PAGED, in pages of a cache before them; with PAGE_ROWS in rows of a
// cache; with FLEX, functions of the user's and lists of blocks. docs/kernels/mha_forward.md has the reasons;
// rawmla/kernels/mha_forward_variants.py chooses the variant.
//
//   S = Q K^T, with softcap, ALiBi or the score function, masked;  P = softmax(scale S);  O = P V
//
//   q [tokens, heads, D_QK], k [keys, KV heads, D_QK], v [keys, KV heads, D_V], in requests, bf16 or fp16
//   -> out [tokens, heads, D_V] in q's type or FP8, lse in float32, natural log; or, of a split, O and lse in
//      float32 for kernels/mha_combine.cu
//
// Grid: a CTA for each SM, or for each tile (mha/tiles.cuh) if these are fewer. A CTA takes its next tile
// from a counter in global memory where tiles are unequal, else the one gridDim.x further.
//
// Roles, with registers for 2 consumers (mha/loaders.cuh, mha/gathered_keys.cuh, mha/output.cuh)
//   warpgroup 0, warp 0    40    schedules tiles, copies Q and K by TMA
//   warpgroup 0, warp 1    40    copies V
//   warpgroup 0, warp 2    40    clears rows of V that no query of the tile sees
//   gatherer              88     PAGED 2, warpgroup 1: gathers K and V of pages, clears V in place of warp 2
//   consumers     232 or 192     64 rows of the tile each
//
// Schedule of consumers 0 and 1. Both products of a step are issued together, in turns (NB_TURN), so that
// the softmax of one runs under the products of the other, and under its own P V.
//   tensor  | 0: QK(j), PV(j-1)   | 1: QK(j), PV(j-1)   | 0: QK(j+1), PV(j)   | ...
//   0       | issues, passes turn | softmax(j), pack P  | issues, passes turn | softmax(j+1)
//   1       | softmax(j-1), pack  | issues, passes turn | softmax(j), pack P  | issues
// Blocks go from the last one that a tile sees to the first: masked ones, whole ones, and with WINDOW masked
// ones again.
//
// Barrier           arrivals      full: signalled by                     free: signalled by
//   q                1            TMA                                    a consumer: its rows are stored, or
//                                                                        with OUT_BUFFER read
//   k, v             full 1,      TMA, or the gatherer; of V warp 2 or   consumers: the product is done
//                    free one a   the gatherer after clearing
//                    consumer
//   v_landed         1            TMA, to the one that clears rows
//   tile             1            warp 0: smem.tiles written             NB_TILE_FREE
//   turns_k, turns_v 1            PAGED 2: loader and gatherer, to each other, once a tile
//   raw_k, raw_v     1            TMA: K or V of an FP8 cache            the gatherer: converted
//   NB_TURN + i      256 (named)  consumer i may issue; the other arrives
//   NB_OWN + i       128 (named)  consumer i: its rows are in shared memory, or read
//   NB_GATHER        128 (named)  the gatherer
//   NB_TILE_FREE + i kTileThreads (named)  all readers: they will not read tile i again; warp 0 waits
#include "common/math.cuh"
#include "common/types.cuh"
#include "mha/array_keys.cuh"
#include "mha/cta.cuh"
#include "mha/gathered_keys.cuh"
#include "mha/loaders.cuh"
#include "mha/masks.cuh"
#include "mha/output.cuh"
#include "mha/paged_keys.cuh"
#include "mha/params.cuh"
#include "mha/scores.cuh"
#include "mha/softmax.cuh"
#include "mha/tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#if FLEX
#include "flex/list_keys.cuh"
#include "flex/score_mods.cuh"
using OwnKeys = ListKeys;
#elif PAGE_ROWS
#include "mha/row_pages.cuh"
using OwnKeys = RowPages;
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

// One consumer: 64 rows of each tile.
class Consumer : Rows64 {
  public:
    __device__ __forceinline__ Consumer(const Params& params, SharedMemoryPlan& smem, int wg, int warp_idx,
                                        bool leads)
        : Rows64{params, smem, wg, warp_idx, leads} {}

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
    // What a consumer keeps of its rows besides O.
    struct State {
        LazySoftmax<kMaxScores> softmax;
        ScoreStep<kSoftcap, kAlibi> score_step;
        Scales scales;
    };
    using Probabilities = u32[kTileKeys / 16][4];

    u32 number = 0;  // of the next block of K

    __device__ __forceinline__ void attend(const Tile& tile, const TileReader& reader) {
        Output o;
        State state;
        if constexpr (kAlibi) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const i64 row = static_cast<i64>(tile.request) * params.alibi_stride_b;
                state.score_step.diagonal[r] = token_of(tile, r) + tile.offset;
                state.score_step.slope[r] = params.alibi_slopes[row + head_of(tile, r)] * kLog2E;
            }
        }
#pragma unroll
        for (int j = 0; j < kDimV / 2; ++j) o[j] = 0.0f;
        wgmma_pin(o);  // not to be zeroed in the middle of a pipeline of wgmma

        mbarrier_wait_parity(smem_address(&smem.bar_q_full[wg]), reader.count & 1);
        attend_span<OwnKeys>(tile, o, state);
        if constexpr (kPagesByTma) attend_span<PagedKeys>(tile, o, state);
        if constexpr (kPagesGathered) {
            if constexpr (kCacheIsFp8) enter_pages(o, state.softmax, state.scales);
            attend_span<PieceKeys>(tile, o, state);
        }
        store(tile, reader, o, state.softmax, state.scales);
    }

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

    // From scores of a block to probabilities. `first_key` and `partial` are FLEX's: flex/score_mods.cuh.
    template <class Keys>
    __device__ __forceinline__ void probabilities(const Tile& tile, int block, BlockKind kind, int first_key,
                                                  bool partial, Scores& s, State& state) const {
#if FLEX
        const int tokens[2] = {token_of(tile, 0), token_of(tile, 1)};
        int heads[2] = {head_of(tile, 0), head_of(tile, 1)};
        if (!kFlexGrouped) heads[0] = heads[1] = tile.head;  // the same for all lanes
        apply_mods(params, tile, heads, tokens, kind, first_key, partial, s);
#else
        const Span& span = tile.spans[Keys::kSpan];
        const int first_column = block * kTileKeys + 2 * (lane_index() % 4);
        if constexpr (kAlibi || kSoftcap)
            state.score_step.template apply<Keys>(params, s, span.base + first_column, state.scales.k);
        if (kind == BlockKind::kMasked) {
            IntervalMask<kWindow> mask;
#pragma unroll
            for (int r = 0; r < 2; ++r)
                mask.set(r, span.clip(keys_of_token(params, tile, token_of(tile, r))), first_column);
#pragma unroll
            for (int j = 0; j < kTileKeys / 2; ++j)
                if (mask.hides((j >> 1) & 1, Keys::column_of(j))) s[j] = -kInfinity;
        }
#endif
        state.softmax.block(s, softmax_scale_log2(state.scales));
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
    __device__ __forceinline__ void step(const Tile& tile, int block, BlockKind kind, const u64 (&desc)[3],
                                         Scores& s, Output& o, Probabilities& p, State& state) {
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
        probabilities<Keys>(tile, block, kind, first_key, kind == BlockKind::kMasked, s, state);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        free_v();
        ++number;
        Keys::pack(s, p);
        state.softmax.rescale(o);
    }

    template <class Keys>
    __device__ __forceinline__ void attend_span(const Tile& tile, Output& o, State& state) {
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
        probabilities<Keys>(tile, block, BlockKind::kMasked, first_key, partial, s, state);
        Keys::pack(s, p);
        if (Keys::kSpan > 0) state.softmax.rescale(o);

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
            step<Keys>(tile, block, BlockKind::kMasked, desc, s, o, p, state);
#if FLEX
        if (params.last_block_is_cut) {  // lists have it anywhere
#pragma unroll 1
            for (; block >= first_block; --block)
                step<Keys>(tile, block, BlockKind::kCut, desc, s, o, p, state);
        }
#endif
#pragma unroll 1
        for (; block >= max_int(first_block, plain_begin); --block)
            step<Keys>(tile, block, BlockKind::kWhole, desc, s, o, p, state);
        if constexpr (kWindow) {
#pragma unroll 1
            for (; block >= first_block; --block)
                step<Keys>(tile, block, BlockKind::kMasked, desc, s, o, p, state);
        }
        wait_v();
        issue_pv<Keys>(o, p, desc[2]);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        free_v();
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
    if (!OwnKeys::runs_beside(params)) griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    if (wg_idx == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (warp_idx == 0) {
            KeyLoader<OwnKeys>(params).run(params, smem);
        } else if (warp_idx == 1) {
            ValueLoader<OwnKeys>{}.run(params, smem);
        } else if (!kPagesGathered && warp_idx == 2) {
            trim_values<OwnKeys>(params, smem);
        }
    } else if (kPagesGathered && wg_idx == 1) {
        setmaxnreg_dec<kGathererRegisters>();
        Gatherer{}.run(params, smem);
    } else {
        setmaxnreg_inc<kRegisters>();
        Consumer{params, smem, wg_idx - 1 - kPagesGathered, warp_idx, threadIdx.x % 128 == 0}.run();
    }
    // Later kernels wait for the end of this kernel, so it must not end before mha_decode.cu does. One CTA
    // that waits is enough.
    if (OwnKeys::runs_beside(params) && blockIdx.x == 0) griddepcontrol_wait();
}
