// In place of cuda_src/ptx/wgmma.cuh. wgmma_fence does nothing: a forgotten one goes unnoticed, and so does a
// register of A that is overwritten before the wait.
#pragma once
#include "common/types.cuh"

enum class Major : int { kK = 0, kMn = 1 };

__device__ __forceinline__ void wgmma_fence() {}
__device__ __forceinline__ void wgmma_commit_group() { emulator::wgmma_commit(); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    emulator::wgmma_wait(kPending);
}
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&acc)[kCount]) {}

template <int kFirst, int kCount, int kAll>
__device__ __forceinline__ float (&wgmma_columns(float (&d)[kAll])) [kCount] {
    static_assert(kFirst + kCount <= kAll);
    return *reinterpret_cast<float (*)[kCount]>(d + kFirst);
}

template <Dtype kDtype, Major kMajorA = Major::kK, Major kMajorB = Major::kK, int kCount>
__device__ __forceinline__ void wgmma_ss(float (&d)[kCount], u64 desc_a, u64 desc_b, bool accumulate) {
    static_assert(kCount % 4 == 0 && kCount <= 128);
    const bool a_is_mn = kMajorA == Major::kMn, b_is_mn = kMajorB == Major::kMn;
    const bool is_f16 = kDtype == Dtype::kF16;
    emulator::wgmma_issue({d, kCount, false, {}, desc_a, desc_b, accumulate, is_f16, a_is_mn, b_is_mn});
}
template <Dtype kDtype, Major kMajorB = Major::kK, int kCount>
__device__ __forceinline__ void wgmma_rs(float (&d)[kCount], const u32 (&a)[4], u64 desc_b, bool accumulate) {
    static_assert(kCount % 4 == 0 && kCount <= 128);
    const bool is_f16 = kDtype == Dtype::kF16, b_is_mn = kMajorB == Major::kMn;
    emulator::wgmma_issue(
        {d, kCount, true, {a[0], a[1], a[2], a[3]}, 0, desc_b, accumulate, is_f16, false, b_is_mn});
}
