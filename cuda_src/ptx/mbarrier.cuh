// mbarrier instructions. Barriers are addressed by their 32-bit shared-memory address.
// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once
#include "common/types.cuh"

// One thread. `count` arrivals complete a phase.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// The initialising thread, after its last mbarrier_init: makes the barriers visible to TMA.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Any thread. Releases its earlier shared-memory writes to whoever waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// One thread. One arrival, and `bytes` more that TMA has to deliver before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

// One thread, before its arrival: TMA has to deliver `bytes` more before the phase completes.
__device__ __forceinline__ void mbarrier_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

// Any thread. Returns once the phase with this parity has completed. Before the first phase, parity 1 counts
// as completed.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n"
        "}\n" ::"r"(bar),
        "r"(parity)
        : "memory");
}

// Any thread. Whether that phase has completed; what was released to it is seen if it has.
__device__ __forceinline__ bool mbarrier_has_completed(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}
