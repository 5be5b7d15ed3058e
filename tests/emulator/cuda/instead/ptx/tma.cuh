// In place of cuda_src/ptx/tma.cuh.
#pragma once
#include "common/types.cuh"

constexpr u64 kL2EvictFirst = 0x12F0000000000000ull;
constexpr u64 kL2EvictNormal = 0x1000000000000000ull;

__device__ __forceinline__ void tma_prefetch_descriptor(const TensorMap* map) {}

// clang-format off
#define EMULATED_TMA(DIMS, PARAMETERS, ...)                                                                  \
    template <u64 kPriority = kL2EvictFirst>                                                                 \
    __device__ __forceinline__ void tma_load_##DIMS##d(u32 dst, const TensorMap* map, u32 bar, PARAMETERS) { \
        const int c[] = {__VA_ARGS__};                                                                       \
        emulator::tensor_copy(emulator::Transfer::kLoad, map, dst, bar, c, DIMS);                            \
    }                                                                                                        \
    __device__ __forceinline__ void tma_load_##DIMS##d_multicast(u32 dst, const TensorMap* map, u32 bar,     \
                                                                 u16 cta_mask, PARAMETERS) {                 \
        const int c[] = {__VA_ARGS__};                                                                       \
        emulator::tensor_multicast(cta_mask, map, dst, bar, c, DIMS);                                        \
    }                                                                                                        \
    __device__ __forceinline__ void tma_prefetch_##DIMS##d(const TensorMap* map, PARAMETERS) {}              \
    __device__ __forceinline__ void tma_store_##DIMS##d(const TensorMap* map, u32 src, PARAMETERS) {         \
        const int c[] = {__VA_ARGS__};                                                                       \
        emulator::tensor_copy(emulator::Transfer::kStore, map, src, 0, c, DIMS);                             \
    }
#define EMULATED_PARAMETERS_2 int c0, int c1
#define EMULATED_PARAMETERS_3 EMULATED_PARAMETERS_2, int c2
#define EMULATED_PARAMETERS_4 EMULATED_PARAMETERS_3, int c3
#define EMULATED_PARAMETERS_5 EMULATED_PARAMETERS_4, int c4
EMULATED_TMA(2, EMULATED_PARAMETERS_2, c0, c1)
EMULATED_TMA(3, EMULATED_PARAMETERS_3, c0, c1, c2)
EMULATED_TMA(4, EMULATED_PARAMETERS_4, c0, c1, c2, c3)
EMULATED_TMA(5, EMULATED_PARAMETERS_5, c0, c1, c2, c3, c4)
// clang-format on

__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    emulator::bulk_load(dst, src, bytes, bar);
}
__device__ __forceinline__ void bulk_reduce_add_f32(float* dst, u32 src, u32 bytes) {
    emulator::bulk_add_f32(dst, src, bytes);
}
__device__ __forceinline__ void bulk_commit_group() { emulator::bulk_commit(); }
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
    emulator::bulk_wait(kPending, true);
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
    emulator::bulk_wait(kPending, false);
}
