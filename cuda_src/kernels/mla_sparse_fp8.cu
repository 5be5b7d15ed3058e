// Sparse MLA decoding over a paged FP8 cache: each query token attends the tokens that it selects (sm_90a).
//
//   S = sm_scale Q K^T,  P = softmax(S),  O = P V,  K = the cache rows that the indices name, V = K[:, 0:512]
//
//   q [b, s_q, h_q, D_QK] bf16, indices [b, s_q, topk] int32
//   -> out [b, s_q, h_q, 512] bf16, lse [b, h_q, s_q] float32, natural log, +inf for a row without tokens
//
// An index is a slot of the cache. It is skipped if it is negative or past the cache. An extra cache has
// indices of its own, and its tokens are in the same softmax. The splits of a request go to scratch
// (mla/splits.cuh), and mla_combine merges them.
//
// FORMAT: 0 V3.2 (D_QK 576), 1 MODEL1 (D_QK 512); mla/cache_rows.cuh
// A value times its scale is rounded to bf16 once. Other kernels serve up to 16 heads over V3.2
// (mla_sparse_fp8_few_heads.cu), pairs of tiles with enough blocks (mla_sparse_fp8_cluster.cu) and bf16
// caches (mla_sparse_bf16.cu).
//
// MAX_LOGITS: the kernel serves prefill. Every query token is a request, lse_factor gives the base of lse,
// and max_logits gets the largest score of each row, which is -inf for a row that attends nothing.
//
// Grid: x = query tokens x tiles of 64 heads, z = partitions of the plan (mla/plan.cuh). The tiles of a token
// are neighbours, so that they read the same rows at the same time, from L2. A block of the plan is 64
// indices. The blocks of the cache come before those of the extra cache.
//
// Roles (640 threads; the launch gives 96 registers to each, setmaxnreg redistributes them)
//   QK        warpgroup 0,     64 registers  S = Q K^T, online softmax, P; loads Q
//   PV0, PV1  warpgroups 1, 2,    160        O[:, 0:256] and O[:, 256:512] += P V, rescale, epilogue;
//                                            warp 0 of PV1 walks the plan
//   producer  warpgroups 3, 4,     48        gather and dequantise rows into the ring of K; each of the eight
//                                            warps has a group of eight rows of a block
//
// Schedule, per 64-token block j: the tensor core has 36 x 32 = 1152 cycles of Q K^T, 16 x 64 = 1024 of P V
//   producer  | P V(j - 1) complete: convert block j + 1, store it | find and prefetch rows of block j + 3,
//             |                                                    | issue the first loads of block j + 2
//   QK        | Q K^T(j), softmax(j), store P(j)      | Q K^T(j + 1) ...
//   PV0, PV1  | P V(j - 1)                            | P V(j) ...
// A stage is in use during Q K^T, softmax and P V of its block. To fill it again takes half as long. The two
// stages take turns, so a block takes half of the sum (docs/kernels/mla_sparse_fp8.md has the cycles). P(j)
// is stored over the RoPE of block j, which no P V reads, so that it needs no memory and no barrier of its
// own. At D_QK 512 RoPE is part of V, and P has one buffer per stage.
//
// Barrier           count  arrives, after what                           waits, before what            parity
// bar_work_full[8]  1      warp 0 of PV1: work[n] written                all: read it                  0
// bar_work_free[8]  20     lane 0 of each warp: done with the work tile  warp 0 of PV1: overwrite it   1
// bar_k_full[s]     8      producer: lane 0 of each warp, its rows       QK: S = Q K^T                 0
//                          stored, fenced
// bar_k_free[s]     64     PV0, PV1: scale read, P V of the warp         producer: refill              1
//                          complete
// bar_p_full[s]     32     QK: P and scale stored, fenced                PV0, PV1: rescale, O += P V   0
// bar_sum_full      128    QK: row sums and maxima of the work tile      PV0, PV1: epilogue            0
//                          written
// bar_sum_free      256    PV0, PV1: rows of the work tile stored        QK: write those of the next   1
// NB_QK             128    QK: Q of the work tile copied, fenced         QK: S = Q K^T                 -
//                          QK: last Q K^T of the work tile complete      QK: copy the next Q
//                          QK: Q K^T complete (D_QK 576)                 QK: store P over RoPE
//
// Nothing is read for an invalid index. Its row in shared memory is zeros, and its scores are masked.
#include "common/math.cuh"
#include "common/types.cuh"
#include "layout/rescale.cuh"
#include "mla/chunks.cuh"
#include "mla/fp8_rows.cuh"
#include "mla/masks.cuh"
#include "mla/output.cuh"
#include "mla/plan.cuh"
#include "mla/publisher.cuh"
#include "mla/queries.cuh"
#include "mla/selection.cuh"
#include "mla/softmax.cuh"
#include "mla/splits.cuh"
#include "mla/store_p.cuh"
#include "mla/work_tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"
#include "ptx/wgmma.cuh"

constexpr Dtype kDtype = Dtype::kBf16;
constexpr int kStages = 2;
constexpr int kChunks = D_QK / Chunk::kCols;
using KTiles = GroupMajorTiles<kChunks>;
constexpr int kStageBytes = kChunks * Chunk::kBytes;
constexpr int kRopeChunk = kChunks - 1;
// Whether P of a block is stored over its RoPE chunk. It is, if RoPE is not part of V.
constexpr bool kPOverRope = D_QK > kDimV;
constexpr int kPChunks = kPOverRope ? kChunks : 1;  // chunks of the group-major tile that P is stored in

constexpr int kThreads = 640;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kRegistersQK = 64;
constexpr int kRegistersPV = 160;
constexpr int kRegistersProducer = 48;
static_assert(kRegistersQK + 2 * kRegistersPV + 2 * kRegistersProducer <=
                  65536 / kThreads / 8 * 8 * (kThreads / 128),
              "more registers than the launch gives");

enum NamedBarrier : int { NB_QK = 1 };

struct SharedMemoryPlan {
    alignas(1024) unsigned char k[kStages][kStageBytes];         // 147,456 B (D_QK 576)
    unsigned char q[kStageBytes];                                //  73,728 B
    unsigned char p[kPOverRope ? 16 : kStages * Chunk::kBytes];  // unless P is stored over RoPE
    float row_scale[kStages][kBlockM];                           // factor on O before P V
    float row_sum[kBlockM];                                      // of the work tile
    float row_max[kBlockM];                                      // m_ref at the work tile's end, base 2
    alignas(8) unsigned char valid[kStages][kProducerWarps];     // a bit for each row of the stage
    u64 bar_k_full[kStages];
    u64 bar_k_free[kStages];
    u64 bar_p_full[kStages];
    u64 bar_sum_full;
    u64 bar_sum_free;
    u64 bar_work_full[kWorkStages];
    u64 bar_work_free[kWorkStages];
    WorkTile work[kWorkStages];
    PublisherState publisher;
    float row_top[kMaxLogits ? kBlockM : 1];  // largest scores of the work tile, base 2
};
static_assert(sizeof(SharedMemoryPlan) <= SMEM_BYTES, "SMEM_BYTES is what the launch asks for");
static_assert(SMEM_BYTES <= kMaxSharedBytes, "more shared memory than a CTA may have");

using RowIndex = TileRow<kBlockM>;

// ---- QK ---------------------------------------------------------------------------------------------------

// Starts copying Q of a work tile to shared memory. Rows past the last are zeros.
__device__ __forceinline__ void start_load_q(const Params& params, SharedMemoryPlan& smem, int req) {
    const int thread = threadIdx.x % 128;
#pragma unroll 1
    for (int tile_row = thread / 8; tile_row < kBlockM; tile_row += 16) {
        const RowIndex row(params, tile_row);
        const int head = row.valid ? row.head : 0;
        const u16* src = q_address(params, req, row.token, head, thread % 8);
        const u16* rope = q_rope_address(params, req, row.token, head, thread % 8);
        const u32 dst = smem_address(smem.q) + Chunk::offset(tile_row, thread % 8);
#pragma unroll
        for (int chunk = 0; chunk < kRopeChunk; ++chunk) {
            cp_async_16_or_zeros(dst + chunk * Chunk::kBytes, src + chunk * Chunk::kCols, row.valid);
        }
        cp_async_16_or_zeros(dst + kRopeChunk * Chunk::kBytes, rope, row.valid);
    }
}

__device__ __forceinline__ u32 p_address(const SharedMemoryPlan& smem, u32 stage) {
    return kPOverRope ? smem_address(smem.k[stage]) + kRopeChunk * Chunk::kGroupBytes
                      : smem_address(smem.p) + stage * Chunk::kBytes;
}

__device__ __forceinline__ void qk_warpgroup(const Params& params, SharedMemoryPlan& smem, int warp_idx) {
    const u64 desc_q = Chunk::k_major(smem_address(smem.q));
    griddepcontrol_wait();  // before Q is read
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    if (reader.next(smem)) start_load_q(params, smem, reader.work(smem).req);
    for (; reader.next(smem); reader.release(smem)) {
        cp_async_wait_all();
        fence_proxy_async();
        named_barrier_sync(NB_QK, 128);
        OnlineSoftmax softmax;
        RowMaximum maximum;
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages;
            mbarrier_wait_parity(smem_address(&smem.bar_k_full[stage]), n / kStages & 1);
            u32 valid_low = 0, valid_high = 0;
            if (leads_quad()) {
                const u32* valid = reinterpret_cast<const u32*>(smem.valid[stage]);
                valid_low = valid[0];
                valid_high = valid[1];
            }
            float s[32];
            const u64 desc_k = KTiles::descriptor(smem_address(smem.k[stage]));
            wgmma_pin(s);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4 * kChunks; ++i) {
                const u64 a = desc_q + i / 4 * Chunk::kStepTile + i % 4 * Chunk::kStepK;
                const u64 b = desc_k + i / 4 * KTiles::kStepTile + i % 4 * Chunk::kStepK;
                wgmma_ss<kDtype>(s, a, b, i > 0);
            }
            wgmma_commit_group();
            valid_low = quad_broadcast(valid_low);
            valid_high = quad_broadcast(valid_high);
            wgmma_wait_group<0>();
            wgmma_pin(s);

            if (left == 1) {
                // Load Q of the next work tile while this one is finished
                WorkTileReader after = reader;
                ++after.count;
                if (after.next(smem)) {
                    named_barrier_sync(NB_QK, 128);
                    start_load_q(params, smem, after.work(smem).req);
                }
            }
            if ((valid_low & valid_high) != 0xffffffff) apply_mask(s, KeyBits(valid_low, valid_high));
            if constexpr (kMaxLogits) maximum.block(s);
            u32 p[16];
            float scale[2];
            softmax.block<kDtype>(s, params.sm_scale_log2, p, scale);

            if (leads_quad()) {
                float* row_scale = first_row(smem.row_scale[stage], warp_idx);
                row_scale[0] = scale[0];
                row_scale[8] = scale[1];
            }
            if constexpr (kPOverRope) named_barrier_sync(NB_QK, 128);  // Q K^T is complete in all warps
            const int lane_idx = lane_index();
            const u32 smem_p = p_address(smem, stage) +
                               (warp_idx * 2 + lane_idx / 8 % 2) * kPChunks * Chunk::kGroupBytes +
                               Chunk::offset(lane_idx % 8, lane_idx / 16);
            store_probabilities<Chunk::kBytes>(smem_p, p);
            fence_proxy_async();
            __syncwarp();
            if (leads_quad()) mbarrier_arrive(smem_address(&smem.bar_p_full[stage]));
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_free), ~reader.count & 1);
        softmax.store(smem.row_sum, smem.row_max, warp_idx);
        if constexpr (kMaxLogits) maximum.store(smem.row_top, params.sm_scale_log2, warp_idx);
        mbarrier_arrive(smem_address(&smem.bar_sum_full));
    }
}

// ---- PV ---------------------------------------------------------------------------------------------------

// Both halves of the columns share one copy of the code, so that a short call fetches its instructions once.
__device__ __forceinline__ void pv_warpgroup(const Params& params, SharedMemoryPlan& smem, int half,
                                             int warp_idx) {
    const u32 smem_v = smem_address(smem.k) + half * 4 * Chunk::kGroupBytes;
    const bool publishes = half == 1 && warp_idx == 0;
    if (publishes) start_publishing(params, smem);
#if __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 9
    float o[128] = {};  // the first product overwrites O, but undefined this ptxas serialises WGMMA
#else
    float o[128];
#endif
    WorkTileReader reader;
    u32 n = 0;  // running number of the block
    while (true) {
        if (publishes) publish_work<kDtype, RowIndex>(params, smem, reader.count + kWorkAhead);
        if (!reader.next(smem)) break;
        bool begun = false;  // false: the first product of the work tile overwrites O
        for (int left = warp_uniform(reader.work(smem).num_blocks); left > 0; --left, ++n) {
            const u32 stage = n % kStages;
            mbarrier_wait_parity(smem_address(&smem.bar_p_full[stage]), n / kStages & 1);
            rescale(o, smem.row_scale[stage], warp_idx);
            const u64 desc_p = GroupMajorTiles<kPChunks>::descriptor(p_address(smem, stage));
            const u64 desc_v = KTiles::descriptor(smem_v + stage * kStageBytes);
            wgmma_pin(o);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockTokens / 16; ++k) {
                const u64 a = desc_p + k * Chunk::kStepK, b = desc_v + k * KTiles::kStepMn;
                wgmma_ss<kDtype, Major::kK, Major::kMn>(wgmma_columns<0, 64>(o), a, b, begun || k > 0);
                wgmma_ss<kDtype, Major::kK, Major::kMn>(wgmma_columns<64, 64>(o), a,
                                                        b + 2 * KTiles::kStepTile, begun || k > 0);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            wgmma_pin(o);
            begun = true;
            if (leads_quad()) mbarrier_arrive(smem_address(&smem.bar_k_free[stage]));
        }
        mbarrier_wait_parity(smem_address(&smem.bar_sum_full), reader.count & 1);
        store_rows<kDtype, RowIndex>(params, smem, reader.work(smem), o, warp_idx, half);
        mbarrier_arrive(smem_address(&smem.bar_sum_free));
        reader.release(smem);
    }
}

// ---- Producer ---------------------------------------------------------------------------------------------

// The share of a thread in an FP8 row: 16 values of each chunk except RoPE's.
struct Share {
    static constexpr int kAhead = LOAD_BYTES == 16 ? 4 : 3;  // chunks in flight; registers are scarce
    static constexpr int kValueChunks = Fp8Row::kDimNope / Chunk::kCols;

    const unsigned char* src;  // the share's first byte, or null
    u32 values[kAhead][4];
    u32 scales[2];  // V3.2: float32, of chunks 4 i + {0, 1} and 4 i + {2, 3}; MODEL1: 8 e8m0

    __device__ __forceinline__ static void prefetch(const Row& row) {
        const ProducerThread thread;
        constexpr int kLines = ceil_div(Fp8Row::kRowBytes + 127, 128);  // for any start of the row
        if (row.data == nullptr) return;
#pragma unroll
        for (int line = 0; line < kLines; line += 4) {
            if (line + thread.quarter < kLines)
                prefetch_l2(row.data + min_int((line + thread.quarter) * 128, Fp8Row::kRowBytes - 1));
        }
    }
    __device__ __forceinline__ void load(int chunk) {
        load_16_or_zeros(values[chunk % kAhead], src + chunk * Chunk::kCols, src != nullptr);
    }
    __device__ __forceinline__ void load_scale(const unsigned char* row, int chunk) {
        scales[chunk / 2 % 2] = load_global_4(row + Fp8Row::kScalesOffset + chunk / 2 * 4, src != nullptr);
    }
    __device__ __forceinline__ void start(const Row& row) {
        src = row.data != nullptr ? row.data + ProducerThread().quarter * 16 : nullptr;
        if constexpr (kFormat == CacheFormat::kV32) {
            load_scale(row.data, 0);
            load_scale(row.data, 2);
        } else {
            const uint2 x = load_global_8(row.data + row.scale_distance, src != nullptr);
            scales[0] = x.x, scales[1] = x.y;
        }
#pragma unroll
        for (int chunk = 0; chunk < kAhead; ++chunk) load(chunk);
    }
    __device__ __forceinline__ float scale(int chunk) const {
        if constexpr (kFormat == CacheFormat::kV32) {
            return __uint_as_float(scales[chunk / 2 % 2]);
        } else {
            return e8m0_value(scales[chunk / 4] >> chunk % 4 * 8 & 0xff);
        }
    }
    // Copies RoPE, which is already bf16, to its chunk.
    __device__ __forceinline__ void copy_rope(const Params& params, u32 group) {
        const ProducerThread thread;
        const bool reads = src != nullptr;
        const unsigned char* rope = (reads ? src : params.cache[0]) + Fp8Row::kRopeOffset;
        const u32 dst = group + kRopeChunk * Chunk::kGroupBytes + Chunk::offset(thread.row, thread.quarter);
        copy_16_or_zeros(dst, rope, reads);
        copy_16_or_zeros(dst ^ 64, rope + 64, reads);
    }
    __device__ __forceinline__ void dequantise(u32 group) {
        const ProducerThread thread;
        const u32 dst = group + Chunk::offset(thread.row, thread.quarter * 2);
#pragma unroll
        for (int chunk = 0; chunk < kValueChunks; ++chunk) {
            const u32(&v)[4] = values[chunk % kAhead];
            store_dequantised(dst + chunk * Chunk::kGroupBytes, v[0], v[1], scale(chunk));
            store_dequantised((dst ^ 16) + chunk * Chunk::kGroupBytes, v[2], v[3], scale(chunk));
            if (kFormat == CacheFormat::kV32 && chunk % 2 == 1 && chunk + 3 < kValueChunks)
                load_scale(src - thread.quarter * 16, chunk + 3);
            if (chunk + kAhead < kValueChunks) load(chunk + kAhead);
        }
    }
    __device__ __forceinline__ void store(const Params& params, SharedMemoryPlan&, u32, u32 group) {
        copy_rope(params, group);
        dequantise(group);
    }
};

// ---- Kernel -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barriers(SharedMemoryPlan& smem) {
    const int thread = threadIdx.x;
    if (thread == 0) {
        init_work_barriers(smem, kThreads / 32);
    } else if (thread == 32) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&smem.bar_k_full[stage]), kProducerWarps);
            mbarrier_init(smem_address(&smem.bar_k_free[stage]), 64);
            mbarrier_init(smem_address(&smem.bar_p_full[stage]), 32);
        }
        mbarrier_init(smem_address(&smem.bar_sum_full), 128);
        mbarrier_init(smem_address(&smem.bar_sum_free), 256);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sparse_fp8(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    SharedMemoryPlan& smem = *reinterpret_cast<SharedMemoryPlan*>(smem_bytes);
    const int wg_idx = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int warp_idx = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);

    init_barriers(smem);
    __syncthreads();

    if (wg_idx == 0) {
        setmaxnreg_dec<kRegistersQK>();
        qk_warpgroup(params, smem, warp_idx);
    } else if (wg_idx <= 2) {
        setmaxnreg_inc<kRegistersPV>();
        pv_warpgroup(params, smem, wg_idx - 1, warp_idx);
    } else {
        setmaxnreg_dec<kRegistersProducer>();
        producer_warp<Share>(params, smem);
    }
}
