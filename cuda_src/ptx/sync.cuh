// Named barriers, fences, register reallocation, lane election and programmatic dependent launch.
#pragma once
#include "common/types.cuh"

// All `threads` participants (a multiple of 32) wait for each other. Id 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and all learn whether the condition holds in any of them.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool condition) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "barrier.cta.red.or.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<u32>(condition))
        : "memory");
    return any != 0;
}

// Counts towards the barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// For a thread that wrote shared memory with ordinary stores: before the barrier behind which wgmma or TMA
// uses it.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Between ordinary accesses to global memory and those of the async proxy, either way round.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// All warps of a warpgroup, once, at the start of its role.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The calling thread's lane. The compiler cannot merge two calls, so the lane takes no register in between.
__device__ __forceinline__ int lane_index() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The value of lane 0, for values that all lanes have alike: ptxas may then keep it in a uniform register.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// A converged warp: true in exactly one lane. ptxas then emits the guarded TMA instructions bare.
__device__ __forceinline__ bool elect_one_sync() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
}

// Programmatic dependent launch. In every kernel that is launched with it at least one CTA waits for the
// kernel ahead. Every CTA waits before it writes global memory or reads what the kernel ahead may write;
// where a kernel reads earlier, the host launches it without programmatic dependent launch (mla/plan.cuh). A
// kernel that is launched without it begins when the one ahead is complete, and need not wait. A kernel is
// thus complete only after the one ahead of it, along a whole chain of launches.
//
// mha_decode.cu beside mha_forward.cu writes before it waits, and nothing that both touch. It starts when
// each CTA of mha_forward.cu has waited: kernels before these two are complete then.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
