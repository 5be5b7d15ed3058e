// The producer warps of the kernels over FP8 caches: they find rows, load them and dequantise them into K's ring.
//
// FORMAT is the kernel's, see mla_sparse_fp8.cu. `Share` is what a thread has of a row on its way to a stage:
//   Share::prefetch(row)               has the row brought to L2, together with the three other lanes of it
//   start(row)                         asks for its values; `src` is null if there is no row, and zeros are stored
//   store(params, smem, stage, group)  converts them and stores them to the warp's group of the stage
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
static_assert(LOAD_BYTES == 16 || LOAD_BYTES == 8,
              "LOAD_BYTES is what addresses of rows are multiples of: 16 or 8");

constexpr int kProducerWarps = 8;  // each has a group of a block's rows
static_assert(kProducerWarps * kGroupRows == kBlockTokens);

// A producer thread's thread. Its warp has eight rows of a block, a group of the tile. It shares one of them with three other lanes,
// taking 16 bytes of every 64. Worked out where it is needed: registers are short.
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

// A thread's row in a block.
struct Row {
    const unsigned char* data;  // null: none
    int scale_distance;         // MODEL1: bytes from the row to its scales
};

using RowSelection = Selection<ProducerThread>;

// The row of the block that is next.
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

// 16 bytes of the cache to registers, or 16 zeros.
__device__ __forceinline__ void load_16_or_zeros(u32 (&v)[4], const unsigned char* src, bool reads) {
    if constexpr (LOAD_BYTES == 16) {
        const uint4 x = load_global_16(src, reads);
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
    } else {
        const uint2 low = load_global_8(src, reads), high = load_global_8(src + 8, reads);
        v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
    }
}

// Eight e4m3 times `factor`, rounded to bf16.
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

// Waits for the stage of block n, notes which of the warp's rows there are, and returns where their group begins.
template <class Smem>
__device__ __forceinline__ u32 open_stage(Smem& smem, u32 n, bool valid) {
    const u32 stage = n % kStagesOf<Smem>, round = n / kStagesOf<Smem>;
    mbarrier_wait_parity(smem_address(&smem.bar_k_free[stage]), ~round & 1);
    const ProducerThread thread;
    const u32 bits = __reduce_or_sync(0xffffffff, static_cast<u32>(valid) << thread.row);
    if (lane_index() == 0) smem.valid[stage][thread.warp_idx] = bits;
    return smem_address(smem.k[stage]) + thread.warp_idx * (sizeof(Smem::k[0]) / kProducerWarps);
}
// The warp's rows of block n are stored.
template <class Smem>
__device__ __forceinline__ void announce_rows(Smem& smem, u32 n) {
    if (lane_index() == 0) mbarrier_arrive(smem_address(&smem.bar_k_full[n % kStagesOf<Smem>]));
}

// Blocks n to end - 1, all of one work tile. While a block is stored the next one's rows are on their way to L2;
// its first values are asked for right after, while its stage may still be in use.
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

// The partition's first work tile nearly always begins where the partition does: rows of its first block are on their way to L2 before it is known.
template <class Share>
__device__ __forceinline__ void prefetch_first_block(const Params& params) {
    const PlanRow plan = plan_row(params);
    if (plan.begin_req > plan.end_req) return;
    WorkTile work;
    work.req = plan.begin_req;
    work.seqlen = params.tokens().main(work.req);
    work.first_block = max_int(plan.begin_block, 0);
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
