// What the kernels of the backward pass have in common: the options of a variant, how roles count steps, and
// the parts of a step that do not depend on how consumers share it.
//
// Products have keys on their rows: S^T = K Q^T and dP^T = V dO^T of 64 keys and kBlockRows queries. Thread
// t of a warpgroup has keys t / 32 * 16 + t % 32 / 4 and the one 8 after it. Accumulator i belongs to the
// first of them if i & 2 is 0, and to query 8 (i / 4) + 2 (t % 4) + i % 2.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/fragments.cuh"
#include "layout/swizzled_tile.cuh"
#include "mha/backward_params.cuh"
#include "mha/backward_rows.cuh"
#include "mha/key_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr Dtype kDtype = static_cast<Dtype>(DTYPE);
constexpr int kDimQK = D_QK, kDimV = D_V;
constexpr bool kFlex = FLEX, kSoftcap = SOFTCAP, kAlibi = ALIBI, kWeights = WEIGHTS;
constexpr bool kNeedsDq = NEEDS_DQ, kNeedsDk = NEEDS_DK, kNeedsDv = NEEDS_DV, kNeedsDs = kNeedsDq || kNeedsDk;
static_assert(kNeedsDs || kNeedsDv);
constexpr int kChunksQK = ceil_div(kDimQK, 64), kChunksV = ceil_div(kDimV, 64);
using BlockRows = SwizzledTile<kBlockRows>;  // of Q, dO and dS

using Scores = float[kBlockRows / 2];
using Packed = u32[kBlockRows / 4];
// A gradient that nobody needs takes one register.
using Dk = float[kNeedsDk ? kDimQK / 2 : 1];
using Dv = float[kNeedsDv ? kDimV / 2 : 1];

// A place in a ring of kCount buffers, and the parity of the barrier that says it is full.
template <int kCount>
struct RingPlace {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kCount) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ u32 free_parity() const { return parity ^ 1; }
};

// The thread's first query of a block.
__device__ __forceinline__ int first_query_of_thread() { return 2 * (lane_index() % 4); }

// D += A B, with A in registers and B the rows of a block.
template <int kCount>
__device__ __forceinline__ void multiply(float (&d)[kCount], const Packed& a, const unsigned char* rows) {
    const u64 desc = BlockRows::mn_major(smem_address(rows));
    wgmma_pin(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockRows / 16; ++k) {
        const u32 fragment[4] = {a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]};
        const u64 desc_k = desc + k * BlockRows::kStepMn;
        if constexpr (kCount <= 96) {
            wgmma_rs<kDtype, Major::kMn>(d, fragment, desc_k, true);
        } else {  // all operands of an instruction must fit in the registers of the launch
            wgmma_rs<kDtype, Major::kMn>(wgmma_columns<0, 64>(d), fragment, desc_k, true);
            wgmma_rs<kDtype, Major::kMn>(wgmma_columns<64, kCount - 64>(d), fragment,
                                         desc_k + 2 * BlockRows::kStepTile, true);
        }
    }
    wgmma_commit_group();
}

// 64 rows of K or V from `first_row` on, times the rows of a block.
template <class KeyRows, int kDim>
__device__ __forceinline__ void multiply_keys(Scores& s, const unsigned char* keys, int first_row,
                                              const unsigned char* rows) {
    u64 desc_keys = KeyRows::k_major(smem_address(keys) + first_row * KeyRows::kRowBytes);
    // Hides that it is the same in all blocks: descriptors of all steps, kept, would cost registers.
    asm volatile("" : "+l"(desc_keys));
    const u64 desc_rows = BlockRows::k_major(smem_address(rows));
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
        wgmma_ss<kDtype>(s, desc_keys + k / 4 * KeyRows::kStepTile + k % 4 * KeyRows::kStepK,
                         desc_rows + k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK, k > 0);
    wgmma_commit_group();
}

// Columns of dQ = dS K: dS of all keys of the tile, and K from the columns on that are wanted.
template <class KeyRows, int kCount>
__device__ __forceinline__ void multiply_ds(float (&dq)[kCount], u64 desc_ds, u64 desc_k) {
    // As in multiply_keys.
    asm volatile("" : "+l"(desc_ds), "+l"(desc_k));
    wgmma_pin(dq);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KeyRows::kRows / 16; ++k)
        wgmma_ss<kDtype, Major::kK, Major::kMn>(
            dq, desc_ds + k / 4 * BlockRows::kStepTile + k % 4 * BlockRows::kStepK,
            desc_k + k * KeyRows::kStepMn, k > 0);
    wgmma_commit_group();
}

// Stores P^T or dS^T of 64 keys as rows of queries.
__device__ __forceinline__ void store_transposed(unsigned char* tile, const Packed& packed, int warp_idx) {
    const u32 dst = smem_address(tile);
    const int lane = lane_index(), row = lane % 8 + lane / 16 * 8, unit = 2 * warp_idx + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < kBlockRows / 16; ++k)
        stmatrix_x4_trans(dst + BlockRows::offset(16 * k + row, unit), packed[4 * k], packed[4 * k + 1],
                          packed[4 * k + 2], packed[4 * k + 3]);
}

// Stores accumulators of dQ as they are: four of every thread together.
template <int kCount>
__device__ __forceinline__ void store_dq(unsigned char* place, const float (&dq)[kCount]) {
    float4* dst = reinterpret_cast<float4*>(place) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j)
        dst[128 * j] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

template <int kCount>
__device__ __forceinline__ void clear(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] = 0.0f;
    wgmma_pin(d);
}

// Stores dK or dV of the thread's keys, of which the first is `key`. Rows begin at multiples of 16 bytes.
template <int kCount>
__device__ __forceinline__ void store_gradient(const Params& params, const KeyTile& tile, int key,
                                               const float (&d)[kCount], void* out, i64 stride_b,
                                               i64 stride_s, i64 stride_h, int columns, float factor) {
    u16* rows = static_cast<u16*>(out) + tile.kv_head * stride_h;
    if (params.cu_seqlens_k == nullptr) rows += tile.request * stride_b;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool exists = key + 8 * r < tile.k_rows;
        u16* row = rows + (tile.k_begin + key + 8 * r) * stride_s;
#pragma unroll
        for (int first = 0; first < kCount / 4; first += 4) {
            u32 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                pairs[j] = pack_16bit<kDtype>(d[4 * (first + j) + 2 * r] * factor,
                                              d[4 * (first + j) + 2 * r + 1] * factor);
            quad_transpose(pairs);  // eight neighbouring columns
            const int column = 8 * (first + static_cast<int>(lane_index() % 4));
            if (exists) store_columns(row + column, pairs, columns - column);
        }
    }
}
