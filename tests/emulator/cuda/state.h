// The state of the emulated machine, shared by its source files.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "machine.h"

namespace emulator {

constexpr int kLanes = 32, kWarpgroup = 128;
constexpr unsigned kFirstAddress = 1024;
constexpr int kDynamicBytes = 232448, kStaticBytes = 8192;

// A bulk store or reduction: it reads shared memory, and writes global memory some time later.
struct BulkGroup {
    int to_read = 0, to_write = 0;
};

struct Thread {
    int index = 0;
    bool done = false;
    unsigned cluster_turn = 0;  // of the cluster's barrier when it last arrived there
    char* stack = nullptr;
    void* stack_pointer = nullptr;
    std::function<bool()> may_go_on;     // empty: it can run
    std::function<std::string()> waits;  // what for, for the report of a deadlock

    std::vector<Product> products;                            // not committed
    std::vector<std::vector<Product>> batches;                // committed, not computed
    std::vector<std::function<void()>> gathers;               // cp.async that nothing waits for yet
    std::vector<std::vector<std::function<void()>>> landing;  // those that arrive on a barrier
    unsigned landed = 0;                                      // how many of these have
    std::shared_ptr<BulkGroup> bulk;                          // not committed
    std::vector<std::shared_ptr<BulkGroup>> bulks;
};

struct Warp {
    unsigned turn = 0;  // of exchanges; two are kept, since a lane can be one ahead
    int lanes = 0;
    const char* instruction[2] = {};
    unsigned char values[2][kLanes][16] = {};
    int pause = 0;  // turns of the scheduler
};

struct Warpgroup {
    unsigned computed = 0;       // batches
    std::vector<int> committed;  // the threads that committed each batch which is not computed
};

struct Mbarrier {
    int count = 0, missing = 0;
    long bytes = 0;  // expected and not there
    unsigned phase = 0;

    void check();  // whether the phase is complete
};

struct NamedBarrier {
    int threads = 0, arrived = 0;
    unsigned turn = 0;
    Votes votes{false, true}, result[2] = {};
};

struct Cta;

struct Cluster {
    std::vector<Cta*> ctas;  // by rank
    unsigned turn = 0;       // of the barrier
    size_t arrived = 0;
};

struct Cta {
    Index index{};
    Cluster* cluster = nullptr;
    unsigned rank = 0;
    unsigned char* memory = nullptr;  // dynamic shared memory, then static
    int dynamic_bytes = 0, static_bytes = 0;
    std::map<int, int> static_offsets;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    std::map<unsigned, Mbarrier> mbarriers;
    NamedBarrier named[16];
    std::vector<std::function<void()>> copies;  // under way; they land in any order
    int copies_of_shared = 0;                   // those that have not read or written shared memory yet
    bool has_slow_copies = false;               // they land when no thread can go on
};

bool has_ended(const Cta& one);  // all of its threads

extern Cta* cta;        // of the running thread, or of the copy that lands
extern Thread* thread;  // null while a copy lands
extern std::mt19937 random_number;

// Bytes of a copy are there.
void mbarrier_land(unsigned bar, long bytes);

// The running thread waits. Where it does not have to, others may run all the same.
void wait(std::function<bool()> may_go_on, std::function<std::string()> waits);

std::string formatted(const char* format, ...);

}  // namespace emulator
