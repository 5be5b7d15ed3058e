// Keys in arrays, copied by TMA: a block has tiles of 64 columns, swizzled.
//
// A source of keys, as the kernel uses it:
//   kSpan                      which of the tile's spans it has
//   column_of(j)               column of accumulator j of S, in the first lane of a quad
//   first_key                  with FLEX, of a block
//   Loader(params, tile)       copies blocks of the tile's span: look_up(block) before there is a place for
//                              it, load_k or load_v then; all lanes of a warp call
//   k_descriptor, v_descriptor of the places of K and V in shared memory
//   issue_qk, issue_pv         the products with a block
//   pack                       probabilities as A fragments for issue_pv
//   trim                       clears rows of V
//   runs_beside(params)        the kernel starts before the one ahead of it ends
#pragma once
#include "mha/cta.cuh"
#include "mha/softmax.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

struct ArrayKeys {
    static constexpr int kSpan = kArrays;
    static constexpr bool kHasLists = false;

    __device__ __forceinline__ static constexpr bool runs_beside(const Params&) { return false; }
    __device__ __forceinline__ static constexpr int column_of(int j) { return 8 * (j >> 2) + (j & 1); }

    struct Loader {
        int token, head, batch;
        int row;  // of the array, where the block begins

        __device__ __forceinline__ Loader(const Params& params, const Tile& tile)
            : token(tile.k_begin),
              head(tile.head / params.heads_per_kv),
              batch(params.cu_seqlens_k == nullptr && !PAGED ? tile.request : 0) {}
        __device__ __forceinline__ void look_up(const Params&, int block) { row = token + block * kTileKeys; }
        __device__ __forceinline__ void load_k(const Params& params, u32 dst, u32 full) const {
            load<kChunksQK>(&params.k_map, dst, full);
        }
        __device__ __forceinline__ void load_v(const Params& params, u32 dst, u32 full) const {
            load<kChunksV>(&params.v_map, dst, full);
        }

      private:
        template <int kChunks>
        __device__ __forceinline__ void load(const TensorMap* map, u32 dst, u32 full) const {
            if (!elect_one_sync()) return;
            mbarrier_arrive_expect_tx(full, kChunks * KeyRows::kBytes);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
                tma_load_4d<kL2EvictNormal>(dst + chunk * KeyRows::kBytes, map, full, 64 * chunk, row, head,
                                            batch);
        }
    };

    __device__ __forceinline__ static u64 k_descriptor(u32 k) { return KeyRows::k_major(k); }
    __device__ __forceinline__ static u64 v_descriptor(u32 v) { return KeyRows::mn_major(v); }
    __device__ __forceinline__ static void issue_qk(float (&s)[kTileKeys / 2], u64 desc_q, u64 desc_k) {
#pragma unroll
        for (int i = 0; i < kDimQK / 16; ++i) {
            const u64 a = desc_q + i / 4 * Rows::kStepTile + i % 4 * Rows::kStepK;
            const u64 b = desc_k + i / 4 * KeyRows::kStepTile + i % 4 * KeyRows::kStepK;
            if constexpr (PAGED) {
                // In halves, as for pages: ptxas serialises both spans (C7511) if their scores are unlike.
                constexpr int kHalf = kTileKeys / 4;
                wgmma_ss<kDtype>(wgmma_columns<0, kHalf>(s), a, b, i > 0);
                wgmma_ss<kDtype>(wgmma_columns<kHalf, kHalf>(s), a, b + (kTileKeys / 2 * 128 >> 4), i > 0);
            } else {
                wgmma_ss<kDtype>(s, a, b, i > 0);
            }
        }
    }
    __device__ __forceinline__ static void issue_pv(float (&o)[kDimV / 2], const u32 (&p)[kTileKeys / 16][4],
                                                    u64 desc_v) {
#pragma unroll
        for (int i = 0; i < kTileKeys / 16; ++i)
            wgmma_rs<kDtype, Major::kMn>(o, p[i], desc_v + i * KeyRows::kStepMn, true);
    }
    __device__ __forceinline__ static void pack(const float (&s)[kTileKeys / 2],
                                                u32 (&p)[kTileKeys / 16][4]) {
        pack_probabilities<kDtype>(s, p);
    }
    // All but `rows`.
    template <int kThreads>
    __device__ __forceinline__ static void trim(unsigned char* v, const KeyInterval& rows, int thread) {
#pragma unroll 1
        for (int chunk = 0; chunk < kChunksV; ++chunk) {
            uint4* units = reinterpret_cast<uint4*>(v + chunk * KeyRows::kBytes);
            for (int i = thread; i < 8 * rows.begin; i += kThreads) units[i] = make_uint4(0, 0, 0, 0);
            for (int i = 8 * rows.end + thread; i < 8 * kTileKeys; i += kThreads)
                units[i] = make_uint4(0, 0, 0, 0);
        }
    }
};
