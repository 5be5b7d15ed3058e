// Threads, the scheduler and launches.
//
// A thread is a fiber: it runs until it has to wait. As many CTAs as there are multiprocessors are under way
// together. In a turn of the scheduler each warp that is not paused runs, its lanes in one of two orders, and
// a copy may land; in some CTAs copies land as late as they can. A seed decides all of that.
#include "state.h"

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {

Index thread_index, block_index, grid_size, block_size;
Cta* cta;
Thread* thread;
std::mt19937 random_number;

namespace {

constexpr int kStackBytes = 96 * 1024, kPoisonedBytes = 32 * 1024;
constexpr uint64_t kEndOfStack = 0x5aa5c33c5aa5c33c;
constexpr int kMostPause = 60, kIdleTurns = 500;  // nothing can pause for so long

void* scheduler_stack_pointer;
std::string report;
unsigned spins;
std::vector<char*> free_stacks;  // kept: to get them from the system takes longer than a short kernel
void (*kernel)(const void*);
const void* kernel_params;

}  // namespace

// Saves the callee's registers and the stack pointer, and goes on where another stack pointer was saved.
extern "C" void emulator_switch(void** saved, void* next);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

std::string formatted(const char* format, ...) {
    char text[400];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return text;
}

namespace {

void leave() { emulator_switch(&thread->stack_pointer, scheduler_stack_pointer); }

std::string name(const Index& index) { return formatted("CTA (%u, %u, %u)", index.x, index.y, index.z); }

// Where a thread begins; it is never left.
void run_thread() {
    kernel(kernel_params);
    if (!thread->products.empty() || !thread->batches.empty()) fail("the thread ends with wgmma under way");
    thread->done = true;
    for (;;) leave();
}

void resume(Thread& next) {
    thread = &next;
    thread_index = {static_cast<unsigned>(next.index), 0, 0};
    block_index = cta->index;
    emulator_switch(&scheduler_stack_pointer, next.stack_pointer);
    uint64_t end;
    memcpy(&end, next.stack, sizeof end);
    if (end != kEndOfStack && report.empty()) report = "a thread's stack is too small";
    thread = nullptr;
}

// Registers and local variables that were not set are NaN, as far as they lie in the stack.
void prepare(Thread& made, int index) {
    made.index = index;
    if (free_stacks.empty()) free_stacks.push_back(static_cast<char*>(aligned_alloc(4096, kStackBytes)));
    made.stack = free_stacks.back();
    free_stacks.pop_back();
    memcpy(made.stack, &kEndOfStack, sizeof kEndOfStack);
    memset(made.stack + kStackBytes - kPoisonedBytes, 0xff, kPoisonedBytes);
    void** top = reinterpret_cast<void**>(made.stack + kStackBytes - 64);
    *--top = nullptr;  // a return address of run_thread, as the stack's alignment wants it
    *--top = reinterpret_cast<void*>(run_thread);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    made.stack_pointer = top;
}

Cta* start(const Index& index, Cluster* cluster, int threads, int dynamic_bytes) {
    Cta* made = new Cta;
    made->index = index;
    made->cluster = cluster;
    made->rank = cluster->ctas.size();
    cluster->ctas.push_back(made);
    made->dynamic_bytes = dynamic_bytes;
    made->has_slow_copies = random_number() % 2;
    made->memory = static_cast<unsigned char*>(aligned_alloc(1024, kDynamicBytes + kStaticBytes));
    memset(made->memory, 0xff, kDynamicBytes + kStaticBytes);
    made->threads.resize(threads);
    for (int i = 0; i < threads; ++i) prepare(made->threads[i], i);
    made->warps.resize((threads + kLanes - 1) / kLanes);
    made->warpgroups.resize((threads + kWarpgroup - 1) / kWarpgroup);
    return made;
}

// The CTAs of cluster `number` of the grid.
Cluster* start_cluster(unsigned long number, const Index& size, int threads, int dynamic_bytes) {
    const unsigned columns = grid_size.x / size.x, rows = grid_size.y / size.y;
    const Index first = {unsigned(number % columns) * size.x, unsigned(number / columns % rows) * size.y,
                         unsigned(number / columns / rows) * size.z};
    Cluster* made = new Cluster;
    for (unsigned z = 0; z < size.z; ++z)
        for (unsigned y = 0; y < size.y; ++y)
            for (unsigned x = 0; x < size.x; ++x)
                start({first.x + x, first.y + y, first.z + z}, made, threads, dynamic_bytes);
    return made;
}

void end(Cluster* ended) {
    for (Cta* one : ended->ctas) {
        for (Thread& each : one->threads) free_stacks.push_back(each.stack);
        free(one->memory);
        delete one;
    }
    delete ended;
}

bool is_done(const Cluster& cluster) {
    for (const Cta* one : cluster.ctas)
        if (!has_ended(*one) || !one->copies.empty()) return false;
    return true;
}

// Runs the lanes of a warp that can run; how many of them did more than spin.
unsigned run_warp(int index) {
    const int first = index * kLanes, count = std::min<int>(cta->threads.size() - first, kLanes);
    const bool descending = random_number() & 1;
    unsigned ran = 0;
    const unsigned spins_before = spins;
    for (int i = 0; i < count && report.empty(); ++i) {
        Thread& next = cta->threads[first + (descending ? count - 1 - i : i)];
        if (next.done || (next.may_go_on && !next.may_go_on())) continue;
        ++ran;
        resume(next);
    }
    return ran - (spins - spins_before);
}

void land_one() {
    const size_t i = random_number() % cta->copies.size();
    const auto copy = std::move(cta->copies[i]);
    cta->copies.erase(cta->copies.begin() + i);
    copy();
}

// A turn of the CTA; whether anything came nearer to its end.
bool take_turn(Cta* one) {
    cta = one;
    bool progress = false;
    const int warps = cta->warps.size(), first = random_number() % warps;
    for (int i = 0; i < warps && report.empty(); ++i) {
        const int index = (first + i) % warps;
        Warp& warp = cta->warps[index];
        if (warp.pause > 0) {
            --warp.pause;
        } else if (random_number() % 128 == 0) {
            warp.pause = random_number() % kMostPause;
        } else if (random_number() % 4) {
            progress |= run_warp(index) > 0;
        }
    }
    const bool lands = !progress || (!cta->has_slow_copies && random_number() % 3 == 0);
    if (!cta->copies.empty() && report.empty() && lands) {
        land_one();
        progress = true;
    }
    if (has_ended(*cta) && cta->copies_of_shared && report.empty())
        report = name(cta->index) +
                 formatted(": ends with %d copies of its shared memory under way", cta->copies_of_shared);
    return progress;
}

// What every thread waits for.
std::string deadlock(const std::vector<Cluster*>& clusters) {
    std::vector<const Cta*> ctas;
    for (const Cluster* one : clusters) ctas.insert(ctas.end(), one->ctas.begin(), one->ctas.end());
    std::string text = "deadlock";
    for (const Cta* one : ctas) {
        std::map<std::string, std::vector<int>> threads;
        for (const Thread& each : one->threads)
            if (!each.done) threads[each.waits ? each.waits() : "nothing"].push_back(each.index);
        for (const auto& [what, indices] : threads) {
            text += "\n  " + name(one->index) + ": " + std::to_string(indices.size()) + " threads (";
            for (size_t i = 0; i < indices.size() && i < 4; ++i)
                text += (i ? " " : "") + std::to_string(indices[i]);
            text +=
                (indices.size() > 4 ? " .. " + std::to_string(indices.back()) : "") + ") wait for " + what;
        }
    }
    return text;
}

}  // namespace

bool has_ended(const Cta& one) {
    for (const Thread& each : one.threads)
        if (!each.done) return false;
    return true;
}

void fail(const char* format, ...) {
    char text[400];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    if (report.empty()) {
        report = thread ? formatted("thread %d of ", thread->index) : "a copy of ";
        report += name(cta->index) + ": " + text;
    }
    if (thread)
        for (;;) leave();
    throw 0;  // a copy is called by the scheduler, on its stack
}

void wait(std::function<bool()> may_go_on, std::function<std::string()> waits) {
    if (may_go_on() && random_number() % 8) return;
    thread->may_go_on = std::move(may_go_on);
    thread->waits = std::move(waits);
    leave();
    thread->may_go_on = nullptr;
    thread->waits = nullptr;
}

void spin() {
    ++spins;
    thread->waits = [] { return std::string("a value in global memory"); };
    leave();
    thread->waits = nullptr;
}

unsigned char* dynamic_shared() { return cta->memory; }

void* static_shared(int line, int bytes) {
    const auto [found, is_new] = cta->static_offsets.try_emplace(line, cta->static_bytes);
    if (is_new) cta->static_bytes += (bytes + 15) / 16 * 16;
    if (cta->static_bytes > kStaticBytes) fail("more than %d bytes of static shared memory", kStaticBytes);
    return cta->memory + kDynamicBytes + found->second;
}

unsigned char* shared(unsigned address, int bytes) {
    const unsigned offset = address - kFirstAddress;
    const bool is_dynamic = address >= kFirstAddress && offset + bytes <= unsigned(cta->dynamic_bytes);
    const bool is_static =
        offset >= kDynamicBytes && offset + bytes <= unsigned(kDynamicBytes + kStaticBytes);
    if (!is_dynamic && !is_static) fail("%d bytes at %d of shared memory", bytes, int(offset));
    return cta->memory + offset;
}

unsigned shared_address(const void* pointer) {
    const long offset = static_cast<const unsigned char*>(pointer) - cta->memory;
    if (offset < 0 || offset > kDynamicBytes + kStaticBytes) fail("a pointer to no shared memory");
    return static_cast<unsigned>(offset) + kFirstAddress;
}

}  // namespace emulator

// Runs a grid to its end. Returns 0, or 1 and a report.
extern "C" int emulator_launch(void (*entry)(const void*), const unsigned* grid, const unsigned* cluster,
                               int threads, int dynamic_bytes, int multiprocessors, unsigned seed,
                               const void* params, char* text, int size) {
    using namespace emulator;
    random_number.seed(seed);
    report.clear();
    spins = 0;
    kernel = entry;
    kernel_params = params;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {static_cast<unsigned>(threads), 1, 1};
    const Index cluster_size = {cluster[0], cluster[1], cluster[2]};
    const unsigned long ctas = 1ul * cluster[0] * cluster[1] * cluster[2];
    const unsigned long total = 1ul * grid[0] * grid[1] * grid[2] / ctas;
    unsigned long started = 0;
    std::vector<Cluster*> under_way;
    int idle = 0;
    try {
        while (report.empty() && (started < total || !under_way.empty())) {
            while (started < total &&
                   (under_way.empty() || (under_way.size() + 1) * ctas <= unsigned(multiprocessors)))
                under_way.push_back(start_cluster(started++, cluster_size, threads, dynamic_bytes));
            bool progress = false;
            for (const Cluster* one : under_way)
                for (Cta* each : one->ctas)
                    if (report.empty()) progress |= take_turn(each);
            for (size_t i = 0; i < under_way.size() && report.empty();) {
                if (is_done(*under_way[i])) {
                    end(under_way[i]);
                    under_way.erase(under_way.begin() + i);
                    progress = true;
                } else {
                    ++i;
                }
            }
            idle = progress ? 0 : idle + 1;
            if (idle > kIdleTurns) report = deadlock(under_way);
        }
    } catch (int) {}
    for (Cluster* one : under_way) end(one);
    if (report.empty()) return 0;
    snprintf(text, size, "%s", report.c_str());
    return 1;
}
