// The producer warps of the kernels over FP8 caches. They find the rows of a block, load them, dequantise
// them and store them to the ring of K.
//
// The kernel defines FORMAT (mla_sparse_fp8.cu) and `Share`, the part of a row that one thread handles:
//   Share::prefetch(row)               prefetches the row to L2; the four threads of the row share this
//   start(row)                         issues the first loads; sets `src`, which is null if there is no row
//   store(params, smem, stage, group)  converts the values and stores them to the group; zeros if no row
// Shared memory (`Smem`) has k, group-major (layout/swizzled_tile.cuh), valid, bar_k_full and bar_k_free.
#pragma once
#include "common/division.cuh"
#include "common/fp8.cuh"
#include "common/types.cuh"
#include "mla/cache_rows.cuh"
#include "mla/chunks.cuh"
#include "mla/plan.cuh"
#include "mla/selection.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

constexpr CacheFormat kFormat = static_cast<CacheFormat>(FORMAT);
using Fp8Row = CacheRow<kFormat>;
static_assert(FORMAT == 0 || FORMAT == 1, "FORMAT must be 0 (V3.2) or 1 (MODEL1)");
static_assert(D_QK == Fp8Row::kDimQk, "D_QK of V3.2 is 576, of MODEL1 512");
static_assert(LOAD_BYTES == 16 || LOAD_BYTES == 8, "LOAD_BYTES is the alignment of rows in bytes: 16 or 8");

constexpr int kProducerWarps = 8;  // each has a group of eight rows of a block
static_assert(kProducerWarps * kGroupRows == kBlockTokens);

// The rows of a producer thread. A warp has a group of eight rows of a block. Four threads share a row, and
// each takes 16 bytes of every 64. Members are computed where they are needed, since registers are scarce.
struct ProducerThread {
    int warp_idx, row, quarter;

    __device__ __forceinline__ ProducerThread() {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        warp_idx = thread / 32 % kProducerWarps;
        row = thread % 32 / 4;
        quarter = thread % 4;
    }
    __device__ __forceinline__ int block_row() const { return warp_idx * kGroupRows + row; }
};

// Where the row of a thread is in the cache.
struct Row {
    const unsigned char* data;  // null: no row
    int scale_distance;         // MODEL1: bytes from the row to its scales
};

using RowSelection = Selection<ProducerThread>;

// The row for the next block. Each parameter is selected by itself. To index them, as row_address does
// (mla/selection.cuh), makes the producers of mla_sparse_fp8 spill registers.
__device__ __forceinline__ Row find_row(const Params& params, const RowSelection& selection) {
    const int c = selection.blocks_before == 0;
    const unsigned char* cache = c ? params.cache[1] : params.cache[0];
    const u32 slots = c ? params.cache_slots[1] : params.cache_slots[0];
    const u32 page_size = c ? params.page_block_size[1] : params.page_block_size[0];
    const u32 magic = c ? params.page_magic[1] : params.page_magic[0];
    const int shift = c ? params.page_shift[1] : params.page_shift[0];
    const i64 block_stride = c ? params.block_stride[1] : params.block_stride[0];
    const u32 token_stride = c ? params.token_stride[1] : params.token_stride[0];
    const u32 slot = selection.index;
    const u32 page = divide(slot, magic, shift);
    const u32 row_in_page = slot - page * page_size;
    Row row;
    row.data = cache + page * block_stride + static_cast<u64>(row_in_page) * token_stride;
    if (slot >= slots) row.data = nullptr;
    row.scale_distance =
        page_size * Fp8Row::kRowBytes - row_in_page * (Fp8Row::kRowBytes - Fp8Row::kScalesBytes);
    return row;
}

// Loads 16 bytes of the cache, or 16 zeros.
__device__ __forceinline__ void load_16_or_zeros(u32 (&v)[4], const unsigned char* src, bool reads) {
    if constexpr (LOAD_BYTES == 16) {
        const uint4 x = load_global_16(src, reads);
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
    } else {
        const uint2 low = load_global_8(src, reads), high = load_global_8(src + 8, reads);
        v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
    }
}

// Multiplies eight e4m3 values by `factor`, rounds them to bf16 and stores them to shared memory.
__device__ __forceinline__ void store_dequantised(u32 dst, u32 low, u32 high, float factor) {
#define RAWMLA_PAIR(WORD, E4M3)       \
    "cvt.rn.f16x2.e4m3x2 pair, " E4M3 \
    ";\n"                             \
    "mov.b32 {a, b}, pair;\n"         \
    "cvt.f32.f16 x, a;\n"             \
    "cvt.f32.f16 y, b;\n"             \
    "mul.f32 x, x, %3;\n"             \
    "mul.f32 y, y, %3;\n"             \
    "cvt.rn.bf16x2.f32 " WORD ", y, x;\n"
    asm volatile(
        "{\n"
        ".reg .b16 e0, e1, e2, e3, a, b;\n"
        ".reg .b32 pair, w0, w1, w2, w3;\n"
        ".reg .f32 x, y;\n"
        "mov.b32 {e0, e1}, %1;\n"
        "mov.b32 {e2, e3}, %2;\n" RAWMLA_PAIR("w0", "e0") RAWMLA_PAIR("w1", "e1") RAWMLA_PAIR("w2", "e2")
            RAWMLA_PAIR("w3", "e3") "st.shared.v4.b32 [%0], {w0, w1, w2, w3};\n"
                                    "}\n" ::"r"(dst),
        "r"(low), "r"(high), "f"(factor)
        : "memory");
#undef RAWMLA_PAIR
}

template <class Smem>
constexpr u32 kStagesOf = sizeof(Smem::k) / sizeof(Smem::k[0]);

// Waits until the stage of block n is free and records which rows of the warp exist. Returns the address of
// their group.
template <class Smem>
__device__ __forceinline__ u32 open_stage(Smem& smem, u32 n, bool valid) {
    const u32 stage = n % kStagesOf<Smem>, round = n / kStagesOf<Smem>;
    mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage]), ~round & 1);
    const ProducerThread thread;
    const u32 bits = __reduce_or_sync(0xffffffff, static_cast<u32>(valid) << thread.row);
    if (lane_index() == 0) smem.valid[stage][thread.warp_idx] = bits;
    return smem_address(smem.k[stage]) + thread.warp_idx * (sizeof(Smem::k[0]) / kProducerWarps);
}
// Announces that the warp has stored its rows of block n.
template <class Smem>
__device__ __forceinline__ void announce_rows(Smem& smem, u32 n) {
    if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_k_full[n % kStagesOf<Smem>]));
}

// Produces blocks n to end - 1, which belong to one work tile. The rows of block n + 1 are prefetched to L2
// before block n is stored. Their first loads are issued right after that, while their stage may still be in
// use.
template <class Share, class Smem>
__device__ __forceinline__ void produce(const Params& params, Smem& smem, RowSelection& selection,
                                        const WorkTile& work, u32 n, u32 end) {
    Row next = find_row(params, selection);
    selection.advance(params, work);
    Share share;
    auto step = [&]() {
        const Row after = find_row(params, selection);
        Share::prefetch(after);
        selection.advance(params, work);
        share.start(next);
        next = after;
    };
    step();
#pragma unroll 1
    for (; n != end; ++n) {
        const u32 group = open_stage(smem, n, share.src != nullptr);
        share.store(params, smem, n % kStagesOf<Smem>, group);
        cp_async_wait_all();
        fence_proxy_async();
        __syncwarp();
        announce_rows(smem, n);
        step();
    }
}

// Prefetches the rows of the first block to L2 before the first work tile is published: nearly always it
// begins where the partition begins.
template <class Share>
__device__ __forceinline__ void prefetch_first_block(const Params& params) {
    const PlanRow plan = row_of_cta(params);
    if (plan.begin_req > plan.end_req) return;
    WorkTile work;
    work.req = plan.begin_req;
    work.seqlen = params.tokens().main(work.req);
    work.first_block = min_int(plan.begin_block, 1 << 24);  // so that numbers of tokens do not overflow
    work.num_blocks = 1;
    RowSelection selection;
    selection.start(params, work);
    Share::prefetch(find_row(params, selection));
}

template <class Share, class Smem>
__device__ __forceinline__ void producer_warp(const Params& params, Smem& smem) {
    griddepcontrol_wait();  // before indices are read
    griddepcontrol_launch_dependents();
    prefetch_first_block<Share>(params);
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    for (; reader.next(smem); reader.release(smem)) {
        const WorkTile& work = reader.work(smem);
        const u32 end = n + warp_uniform(work.num_blocks);
        RowSelection selection;
        selection.start(params, work);
        produce<Share>(params, smem, selection, work, n, end);
        n = end;
    }
}
