// The emulated machine as instructions see it: what instead/ and kernel_text.h call, in the running thread.
#pragma once

namespace emulator {

struct Index {
    unsigned x, y, z;
};
extern Index thread_index, block_index, grid_size, block_size;

// Ends the launch with a report: the thread, its CTA and this text.
[[noreturn]] void fail(const char* format, ...);

// Lets the other threads run: in loops that wait for global memory.
void spin();

// ---- shared memory. Addresses are numbers from 1024 on, so that 0 is none.

unsigned char* dynamic_shared();
void* static_shared(int line, int bytes);  // of the declaration in this line
unsigned char* shared(unsigned address, int bytes);
unsigned shared_address(const void* pointer);

// ---- warps

// All lanes of a warp give a value of at most 16 bytes and get those of all. Lanes that meet in different
// instructions are a fault.
using Lanes = const unsigned char (*)[16];
Lanes exchange(const void* value, int bytes, const char* instruction);

// ---- barriers

void mbarrier_init(unsigned bar, int count);
void mbarrier_arrive(unsigned bar, long more_bytes);  // more_bytes are expected in this phase
void mbarrier_expect(unsigned bar, long more_bytes);
void mbarrier_wait(unsigned bar, unsigned parity);
bool mbarrier_has_completed(unsigned bar, unsigned parity);

struct Votes {
    bool any, all;
};
Votes named_barrier_sync(int id, int threads, bool vote);
void named_barrier_arrive(int id, int threads);

// ---- wgmma

// One 64 x 16 x N product, as one thread of the warpgroup issues it.
struct Product {
    float* d;
    int count;  // of its accumulators: N / 2
    bool a_in_registers;
    unsigned a[4];
    unsigned long long desc_a, desc_b;
    bool accumulate, is_f16, a_is_mn_major, b_is_mn_major;
};
void wgmma_issue(const Product& product);
void wgmma_commit();
void wgmma_wait(unsigned left);

// ---- clusters. A rank's address is one in its shared memory.

unsigned cluster_rank();
unsigned remote_address(unsigned address, unsigned rank);
void cluster_arrive();
void cluster_wait();
void mbarrier_arrive_remote(unsigned bar, unsigned rank);
void store_remote(unsigned dst, unsigned bar, const void* values, int bytes);  // counted on the barrier

// ---- copies

void copy_async(unsigned dst, const void* src, int bytes, bool reads);  // cp.async; or zeros
void copy_async_arrive(unsigned bar);
void copy_async_wait();

// `map` is what emulator/device.py makes in place of the driver's.
enum class Transfer { kLoad, kStore, kAdd };
void tensor_copy(Transfer transfer, const void* map, unsigned shared, unsigned bar, const int* c, int dims);
void tensor_multicast(unsigned ranks, const void* map, unsigned dst, unsigned bar, const int* c, int dims);
void bulk_load(unsigned dst, const void* src, unsigned bytes, unsigned bar);
void bulk_add_f32(float* dst, unsigned src, unsigned bytes);
void bulk_commit();
void bulk_wait(unsigned left, bool only_reads);

}  // namespace emulator
