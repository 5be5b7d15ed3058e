// Thread-block clusters: their CTAs are under way together, and each reaches the shared memory of the others.
#include <cstring>

#include "state.h"

namespace emulator {
namespace {

constexpr int kRankShift = 24;  // in an address, of the rank + 1

// Calls `action` as if the CTA of that rank ran.
template <class Action>
void in_cta(unsigned rank, Action action) {
    if (rank >= cta->cluster->ctas.size())
        fail("CTA %u of a cluster of %zu", rank, cta->cluster->ctas.size());
    Cta* const own = cta;
    Cta* const other = cta->cluster->ctas[rank];
    if (has_ended(*other)) fail("CTA %u of the cluster has ended: its shared memory is gone", rank);
    cta = other;
    action();
    cta = own;
}

}  // namespace

unsigned cluster_rank() { return cta->rank; }

unsigned remote_address(unsigned address, unsigned rank) { return (rank + 1) << kRankShift | address; }

void cluster_arrive() {
    Cluster& cluster = *cta->cluster;
    thread->cluster_turn = cluster.turn;
    if (++cluster.arrived == cluster.ctas.size() * cta->threads.size()) {
        cluster.arrived = 0;
        ++cluster.turn;
    }
}

void cluster_wait() {
    const Cluster& cluster = *cta->cluster;
    const unsigned turn = thread->cluster_turn;
    wait([&cluster, turn] { return cluster.turn != turn; },
         [&cluster] {
             return formatted("the barrier of the cluster: %zu threads are there", cluster.arrived);
         });
}

void mbarrier_arrive_remote(unsigned bar, unsigned rank) {
    in_cta(rank, [bar] { mbarrier_arrive(bar, 0); });
}

void store_remote(unsigned dst, unsigned bar, const void* values, int bytes) {
    const unsigned rank = (dst >> kRankShift) - 1, local = (1u << kRankShift) - 1;
    if (dst >> kRankShift != bar >> kRankShift) fail("a remote store and its barrier are of two CTAs");
    std::vector<unsigned char> stored(bytes);
    memcpy(stored.data(), values, bytes);
    in_cta(rank, [&] {
        unsigned char* const to = shared(dst & local, bytes);
        cta->copies.push_back([=] {
            memcpy(to, stored.data(), stored.size());
            mbarrier_land(bar & local, stored.size());
        });
    });
}

void tensor_multicast(unsigned ranks, const void* map, unsigned dst, unsigned bar, const int* c, int dims) {
    for (unsigned rank = 0; ranks >> rank; ++rank)
        if (ranks >> rank & 1) in_cta(rank, [&] { tensor_copy(Transfer::kLoad, map, dst, bar, c, dims); });
}

}  // namespace emulator
