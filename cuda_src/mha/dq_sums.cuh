// How a tile of keys adds its part of dQ to global memory: consumers store float32 accumulators of a block in
// shared memory, and one thread issues reductions to the sums. In a fixed order (params.turns) tiles take
// turns at a block: its counter says how many have added.
//
// A block goes in kParts parts of kPartBytes. Part p of step n is use n kParts + p of a ring of kPlaces.
#pragma once
#include "mha/backward_cta.cuh"

// One thread. In a fixed order it signals bar_added once the previous block's reduction is complete: while it
// waits for its turn, or else after the first part of the next block.
template <int kParts, int kPlaces, int kPartBytes, class Blocks, class Plan>
__device__ __forceinline__ void add_dq(const Params& params, Plan& smem, const KeyTile& tile) {
    constexpr int kTogether = kParts % 2 == 0 && kPlaces > 1 ? 2 : 1;  // parts that are read at a time
    const bool in_turns = params.turns != nullptr;
    u32 number = 0;
    const auto is_full = [&](u32 use) {
        return mbarrier_has_completed(smem_address(&smem.bar_dq_full[use % kPlaces]), use / kPlaces & 1);
    };
    const auto signal_added = [&] { mbarrier_arrive(smem_address(&smem.bar_added[number - 1 & 1])); };
#pragma unroll 1
    for (Blocks walk(params, smem, tile); walk.is_there(); walk.advance(), ++number) {
        const i64 block = walk.place();
        bool is_owed = in_turns && number > 0;
        if (in_turns) {
            const u32 turn = smem_address(&smem.bar_turn[number & 1]), parity = number >> 1 & 1;
            if (is_owed && !(mbarrier_has_completed(turn, parity) && is_full(number * kParts))) {
                bulk_wait_group<0>();
                signal_added();
                is_owed = false;
            }
            mbarrier_wait_parity(turn, parity);
        }
#pragma unroll
        for (int first = 0; first < kParts; first += kTogether) {
#pragma unroll
            for (int part = first; part < first + kTogether; ++part) {
                const u32 use = number * kParts + part, at = use % kPlaces;
                mbarrier_wait_parity(smem_address(&smem.bar_dq_full[at]), use / kPlaces & 1);
                bulk_reduce_add_f32(params.dq_accum + (block * kParts + part) * (kPartBytes / 4),
                                    smem_address(smem.dq[at]), kPartBytes);
                bulk_commit_group();
                if (part == 0 && is_owed) {
                    bulk_wait_group<1>();
                    signal_added();
                }
            }
#pragma unroll
            for (int part = first; part < first + kTogether; ++part) {
                if (part + 1 < first + kTogether) {
                    bulk_wait_group_read<1>();
                } else {
                    bulk_wait_group_read<0>();
                }
                mbarrier_arrive(smem_address(&smem.bar_dq_free[(number * kParts + part) % kPlaces]));
            }
        }
    }
    bulk_wait_group<0>();
    if (in_turns && number > 0) signal_added();
}

// One thread, with a fixed order. It waits for the turn at the next block while the last one is added to, and
// passes on the turn at that one when its additions are in memory. The thread that adds may be a block
// behind it.
template <class Blocks, class Plan>
__device__ __forceinline__ void keep_turns(const Params& params, Plan& smem, const KeyTile& tile) {
    if (params.turns == nullptr) return;
    u32 number = 0;
    int held = -1;  // the block before, where the turn is to be passed on, or -1
    const auto pass_on = [&] {
        fence_proxy_async_global();
        add_release(params.turns + held, 1);
        held = -1;
    };
    // The barrier of the block before, and its parity.
    const auto added = [&] { return smem_address(&smem.bar_added[number - 1 & 1]); };
    const auto added_parity = [&] { return number - 1 >> 1 & 1; };
#pragma unroll 1
    for (Blocks walk(params, smem, tile); walk.is_there(); walk.advance(), ++number) {
        const int block = walk.place(), turn = walk.turn();
        // More may have added than turns count: a list may name a block twice.
        while (load_acquire(params.turns + block) < turn)
            if (held >= 0 && mbarrier_has_completed(added(), added_parity())) pass_on();
        fence_proxy_async_global();
        mbarrier_arrive(smem_address(&smem.bar_turn[number & 1]));
        if (held >= 0) {
            mbarrier_wait_parity(added(), added_parity());
            pass_on();
        }
        held = block;
    }
    if (held < 0) return;
    mbarrier_wait_parity(added(), added_parity());
    pass_on();
}
