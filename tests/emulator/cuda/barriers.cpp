// Exchanges within a warp, mbarriers and named barriers.
#include "state.h"

#include <cstring>

namespace emulator {

// ---- warps

Lanes exchange(const void* value, int bytes, const char* instruction) {
    Warp& warp = cta->warps[thread->index / kLanes];
    const unsigned turn = warp.turn, side = turn % 2;
    if (warp.lanes == 0) warp.instruction[side] = instruction;
    if (strcmp(warp.instruction[side], instruction))
        fail("lanes of a warp part: one is at %s, others are at %s", instruction, warp.instruction[side]);
    memcpy(warp.values[side][thread->index % kLanes], value, bytes);
    if (++warp.lanes == kLanes) {
        warp.lanes = 0;
        ++warp.turn;
    } else {
        wait([&warp, turn] { return warp.turn != turn; },
             [instruction] { return formatted("the other lanes of the warp at %s", instruction); });
    }
    return warp.values[side];
}

// ---- mbarriers. Their state is not in the shared memory that they take.

namespace {

Mbarrier& mbarrier_at(unsigned bar) {
    const auto found = cta->mbarriers.find(bar);
    if (found == cta->mbarriers.end()) fail("no mbarrier at %d of shared memory", int(bar - kFirstAddress));
    return found->second;
}

}  // namespace

void Mbarrier::check() {
    if (missing < 0) fail("an mbarrier of %d arrivals has more in a phase", count);
    if (missing || bytes) return;
    ++phase;
    missing = count;
}

void mbarrier_init(unsigned bar, int count) {
    shared(bar, 8);
    cta->mbarriers[bar] = {count, count, 0, 0};
}

void mbarrier_arrive(unsigned bar, long more_bytes) {
    Mbarrier& at = mbarrier_at(bar);
    at.bytes += more_bytes;
    --at.missing;
    at.check();
}

void mbarrier_expect(unsigned bar, long more_bytes) { mbarrier_at(bar).bytes += more_bytes; }

void mbarrier_land(unsigned bar, long bytes) {
    Mbarrier& at = mbarrier_at(bar);
    at.bytes -= bytes;
    at.check();
}

bool mbarrier_has_completed(unsigned bar, unsigned parity) { return mbarrier_at(bar).phase % 2 != parity; }

void mbarrier_wait(unsigned bar, unsigned parity) {
    const Mbarrier& at = mbarrier_at(bar);
    wait([bar, parity] { return mbarrier_has_completed(bar, parity); },
         [&at, bar, parity] {
             return formatted(
                 "parity %u of the mbarrier at %u: phase %u, %d of %d arrivals and %ld bytes missing", parity,
                 bar - kFirstAddress, at.phase, at.missing, at.count, at.bytes);
         });
}

// ---- named barriers

namespace {

NamedBarrier& arrive(int id, int threads, bool vote) {
    if (id < 0 || id > 15) fail("named barrier %d", id);
    NamedBarrier& at = cta->named[id];
    if (at.arrived && at.threads != threads)
        fail("named barrier %d of %d threads and of %d", id, at.threads, threads);
    at.threads = threads;
    at.votes.any |= vote;
    at.votes.all &= vote;
    if (++at.arrived == threads) {
        at.result[at.turn++ % 2] = at.votes;
        at.votes = {false, true};
        at.arrived = 0;
    }
    return at;
}

}  // namespace

Votes named_barrier_sync(int id, int threads, bool vote) {
    const unsigned turn = id < 0 || id > 15 ? 0 : cta->named[id].turn;
    const NamedBarrier& at = arrive(id, threads, vote);
    if (at.turn == turn)
        wait([&at, turn] { return at.turn != turn; },
             [&at, id] {
                 return formatted("named barrier %d: %d of %d threads", id, at.arrived, at.threads);
             });
    return at.result[turn % 2];
}

void named_barrier_arrive(int id, int threads) { arrive(id, threads, false); }

}  // namespace emulator
