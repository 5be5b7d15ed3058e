// Writes tokens into a paged cache, quantised if its layout is (mla/cache_rows.cuh).
//
//   kv_c [tokens, 512 or 448], k_pe [tokens, 64] bf16 -> cache [num_blocks, page_block_size, token]
//
// V3.2: scale = max(amax / 448, 2^-126) per 128 values. MODEL1: the least power of two not below max(amax, 1e-4) / 448, per 64
// values. amax leaves NaN out. A value becomes e4m3(value / scale), the quotient rounded to float first.
//
// With SLOTS token t goes to slot slots[t] = block * page_block_size + offset; slots that are negative or past the cache are
// skipped. Without, it goes to slot t, and the sources are blocks of page_block_size tokens too.
//
// Grid: x = groups of kWarps units. A warp takes a unit of four tokens: nine 16-byte loads per lane (wide layouts) are on their
// way before the first is used. Memory-bound: 1,152 bytes in, 656 out at V3.2.
#include "common/division.cuh"
#include "common/fp8.cuh"
#include "common/types.cuh"
#include "mla/cache_rows.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

constexpr CacheFormat kFormat = static_cast<CacheFormat>(FORMAT);
constexpr bool kSlots = SLOTS;
using Row = CacheRow<kFormat>;
constexpr int kThreads = 64;
constexpr int kWarps = kThreads / 32;
constexpr int kPrefetchingCtas = 528;            // 4 of an SM
constexpr float kV32MinScale = 1.17549435e-38f;  // 2^-126
constexpr float kModel1MinAmax = 1e-4f;
// Below it, values and scale are multiplied by a power of two first: a remainder of the division would not be exact.
constexpr float kMinCorrectableScale = 8.0779357e-28f;  // 2^-90
constexpr float kTwoTo60 = 1152921504606846976.0f;

struct Params {
    const u16* kv_c;
    const u16* k_pe;
    const void* slots;  // [tokens] int32 or int64
    unsigned char* cache;
    int kv_c_stride, k_pe_stride;    // elements from token to token
    int source_block_stride;         // elements from block to block, without slots
    int block_stride, token_stride;  // bytes, of the cache
    int num_slots;
    int tokens;
    int page_block_size;
    u32 page_magic;
    int page_shift;
    int slots_are_64bit;
    int sources_are_aligned;  // to 16 bytes, every row
};

__device__ __forceinline__ i64 wide_product(int a, int b) { return static_cast<i64>(a) * b; }

__device__ __forceinline__ int block_of(const Params& params, int slot) {
    return divide(slot, params.page_magic, params.page_shift);
}

// Elements from the first row of a source to a token's.
__device__ __forceinline__ i64 source_offset(const Params& params, int token, int stride) {
    if constexpr (kSlots) return wide_product(token, stride);
    const int block = block_of(params, token);
    return wide_product(block, params.source_block_stride) +
           wide_product(token - block * params.page_block_size, stride);
}

// Where the token of a slot is stored.
struct Target {
    unsigned char* row;
    unsigned char* scales;

    __device__ __forceinline__ Target(const Params& params, int slot) {
        const int block = block_of(params, slot);
        const int offset = slot - block * params.page_block_size;
        unsigned char* first = params.cache + wide_product(block, params.block_stride);
        row = first + Row::row_offset(offset, params.token_stride);
        scales = Row::kQuantized ? first + Row::scales_offset(offset, params.page_block_size) : nullptr;
    }
};

template <bool kAligned>
__device__ __forceinline__ uint4 load_vector(const u16* src) {
    if constexpr (kAligned) return load_global_16(src);
    u32 values[kVectorColumns];
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) values[i] = load_global_2(src + i);
    return make_uint4(values[0] | values[1] << 16, values[2] | values[3] << 16, values[4] | values[5] << 16,
                      values[6] | values[7] << 16);
}

// A lane's part of a unit. Everything is loaded before anything is looked at; tokens past the last repeat it.
struct Unit {
    uint2 slot;  // of the own token: low and high word
    uint4 vectors[kUnitTokens][kLaneVectors];
    uint4 rope;  // wide layouts: of the own token

    __device__ __forceinline__ void load_slot(const Params& params, int first, int lane_idx) {
        const int token = first + lane_idx / kTokenLanes, loaded = min_int(token, params.tokens - 1);
        if (!kSlots) {
            slot = make_uint2(token, 0);
        } else if (params.slots_are_64bit) {
            slot = load_global_8(static_cast<const i64*>(params.slots) + loaded);
        } else {
            slot = make_uint2(load_global_4(static_cast<const int*>(params.slots) + loaded), 0);
        }
    }

    template <bool kAligned>
    __device__ __forceinline__ void load_rows(const Params& params, int first, int lane_idx) {
#pragma unroll
        for (int j = 0; j < kUnitTokens; ++j) {
            const int token = min_int(first + j, params.tokens - 1);
            const u16* kv_c = params.kv_c + source_offset(params, token, params.kv_c_stride);
            const u16* k_pe = params.k_pe + source_offset(params, token, params.k_pe_stride);
#pragma unroll
            for (int v = 0; v < kLaneVectors; ++v) {
                const u16* src = kv_c + (v * 32 + lane_idx) * kVectorColumns;
                if (Row::is_rope(lane_idx, v)) src = k_pe + Row::rope_vector(lane_idx) * kVectorColumns;
                vectors[j][v] = load_vector<kAligned>(src);
            }
        }
        if constexpr (Row::kWide) {
            const int token = min_int(first + lane_idx / kTokenLanes, params.tokens - 1);
            const u16* k_pe = params.k_pe + source_offset(params, token, params.k_pe_stride);
            rope = load_vector<kAligned>(k_pe + Row::rope_vector(lane_idx) * kVectorColumns);
        }
    }

    // Where the own token goes, or -1. A negative slot is a large number here, in one word or two.
    __device__ __forceinline__ int own_slot(const Params& params, int first, int lane_idx) const {
        const bool valid = first + lane_idx / kTokenLanes < params.tokens && slot.y == 0 &&
                           slot.x < static_cast<u32>(params.num_slots);
        return valid ? static_cast<int>(slot.x) : -1;
    }
};

// The largest magnitudes in the tiles of a token that the lane's two vectors belong to: bf16, the first in the low half.
__device__ __forceinline__ u32 tile_maxima(const uint4 (&vectors)[kLaneVectors]) {
    u32 top[kLaneVectors];
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
        const uint4& x = vectors[v];
        top[v] = max_bf16x2(max_bf16x2(abs_bf16x2(x.x), abs_bf16x2(x.y)),
                            max_bf16x2(abs_bf16x2(x.z), abs_bf16x2(x.w)));
    }
    u32 maxima = max_bf16x2(__byte_perm(top[0], top[1], 0x5410), __byte_perm(top[0], top[1], 0x7632));
#pragma unroll
    for (int distance = 1; distance < Row::kTileLanes; distance *= 2) {
        maxima = max_bf16x2(maxima, __shfl_xor_sync(0xffffffff, maxima, distance));
    }
    return maxima;
}

// What quotients of bf16 values by a V3.2 scale are made of.
struct V32Divisor {
    float scale, inverse;

    V32Divisor() = default;
    __device__ __forceinline__ explicit V32Divisor(float stored_scale) : scale(stored_scale) {
        inverse = 1.0f / (is_tiny() ? scale * kTwoTo60 : scale);
        if (scale == kInfinity) scale = 0.0f;  // as its inverse is: quotients are 0, or NaN for infinities
    }
    __device__ __forceinline__ bool is_tiny() const { return scale < kMinCorrectableScale && scale != 0.0f; }
    __device__ __forceinline__ V32Divisor of_lane(int lane_idx) const {
        V32Divisor other;
        other.scale = __shfl_sync(0xffffffff, scale, lane_idx);
        other.inverse = __shfl_sync(0xffffffff, inverse, lane_idx);
        return other;
    }
    // value / scale, rounded as by a division wherever e4m3 can tell: value * (1 / scale) is corrected by its remainder.
    // This order of signs keeps the sign of zero.
    __device__ __forceinline__ float quotient(float value) const {
        const float product = value * inverse;
        return fmaf(fmaf(product, scale, -value), -inverse, product);
    }
};

__device__ __forceinline__ uint2 quantize_v32(const uint4& vector, V32Divisor divisor) {
    float values[kVectorColumns] = {bf16_low(vector.x),  bf16_high(vector.x), bf16_low(vector.y),
                                    bf16_high(vector.y), bf16_low(vector.z),  bf16_high(vector.z),
                                    bf16_low(vector.w),  bf16_high(vector.w)};
    if (divisor.is_tiny()) {
        divisor.scale *= kTwoTo60;
#pragma unroll
        for (int i = 0; i < kVectorColumns; ++i) values[i] *= kTwoTo60;
    }
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) values[i] = divisor.quotient(values[i]);
    return make_uint2(pack_e4m3(values[0], values[1], values[2], values[3]),
                      pack_e4m3(values[4], values[5], values[6], values[7]));
}

// Lane l computes the scale of tile l % 4 of token l / 8 for the whole warp.
__device__ __forceinline__ void store_v32_unit(const Params& params, const Unit& unit, int first,
                                               int lane_idx) {
    const int own_slot = unit.own_slot(params, first, lane_idx);
    const int tile = lane_idx % 4;
    u32 own_maxima = 0;  // of tiles tile % 2 and tile % 2 + 2
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) {
        const u32 maxima = __shfl_sync(0xffffffff, tile_maxima(unit.vectors[j]), tile % 2 * Row::kTileLanes);
        if (lane_idx / kTokenLanes == j) own_maxima = maxima;
    }
    const float amax = tile < 2 ? bf16_low(own_maxima) : bf16_high(own_maxima);
    const float scale = fmaxf(amax / kE4m3Max, kV32MinScale);
    const V32Divisor divisor(scale);
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) {
        const int source = j * kTokenLanes + lane_idx / Row::kTileLanes;
        const V32Divisor low = divisor.of_lane(source), high = divisor.of_lane(source + Row::kTilesPerPass);
        const int slot = __shfl_sync(0xffffffff, own_slot, j * kTokenLanes);
        if (slot < 0) continue;
        unsigned char* row = Target(params, slot).row + lane_idx * 8;
        store_global_8(row, quantize_v32(unit.vectors[j][0], low));
        store_global_8(row + 256, quantize_v32(unit.vectors[j][1], high));
    }
    if (own_slot < 0 || lane_idx % kTokenLanes >= 4) return;
    *reinterpret_cast<float*>(Target(params, own_slot).scales + tile * 4) = scale;
}

// A power of two is undone by an exact product.
__device__ __forceinline__ uint2 quantize_model1(const uint4& vector, u32 scale) {
    const float inverse = __uint_as_float((254 - scale) << 23);
    return make_uint2(pack_e4m3(bf16_low(vector.x) * inverse, bf16_high(vector.x) * inverse,
                                bf16_low(vector.y) * inverse, bf16_high(vector.y) * inverse),
                      pack_e4m3(bf16_low(vector.z) * inverse, bf16_high(vector.z) * inverse,
                                bf16_low(vector.w) * inverse, bf16_high(vector.w) * inverse));
}

// The e8m0 code of the least power of two not below max(amax, 1e-4) / 448, for 448 = 1.75 * 2^8; infinity counts as 2^128.
__device__ __forceinline__ u32 model1_scale(float amax) {
    constexpr u32 kMantissa175 = 0x600000, kMantissaMax = 0x7fffff;
    const u32 bits = __float_as_uint(fmaxf(amax, kModel1MinAmax));
    return ((bits + kMantissaMax - kMantissa175) >> 23) - 8;
}

__device__ __forceinline__ void store_model1_unit(const Params& params, const Unit& unit, int first,
                                                  int lane_idx) {
    const int own_slot = unit.own_slot(params, first, lane_idx);
    const int tile_shift = lane_idx / Row::kTileLanes * 8;
    const bool has_rope = Row::is_rope(lane_idx, 1);
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) {
        const u32 maxima = tile_maxima(unit.vectors[j]);
        const u32 low_scale = model1_scale(bf16_low(maxima));
        const u32 high_scale = has_rope ? 0 : model1_scale(bf16_high(maxima));
        const uint2 scales = make_uint2(__reduce_or_sync(0xffffffff, low_scale << tile_shift),
                                        __reduce_or_sync(0xffffffff, high_scale << tile_shift));
        const int slot = __shfl_sync(0xffffffff, own_slot, j * kTokenLanes);
        if (slot < 0) continue;
        const Target target(params, slot);
        const uint4& high = unit.vectors[j][1];
        stream_global_8(target.row + lane_idx * 8, quantize_model1(unit.vectors[j][0], low_scale));
        if (has_rope) {
            unsigned char* rope = target.row + Row::kRopeOffset + Row::rope_vector(lane_idx) * 16;
            stream_global_8(rope, make_uint2(high.x, high.y));
            stream_global_8(rope + 8, make_uint2(high.z, high.w));
        } else {
            stream_global_8(target.row + 256 + lane_idx * 8, quantize_model1(high, high_scale));
        }
        if (lane_idx == 0) stream_global_8(target.scales, scales);
    }
}

__device__ __forceinline__ void store_bf16_unit(const Params& params, const Unit& unit, int first,
                                                int lane_idx) {
    const int own_slot = unit.own_slot(params, first, lane_idx);
#pragma unroll
    for (int j = 0; j < kUnitTokens; ++j) {
        const int slot = __shfl_sync(0xffffffff, own_slot, j * kTokenLanes);
        if (slot < 0) continue;
        unsigned char* row = Target(params, slot).row + lane_idx * 16;
#pragma unroll
        for (int v = 0; v < kLaneVectors; ++v) store_global_16(row + v * 512, unit.vectors[j][v]);
    }
}

__device__ __forceinline__ void store_wide_rope(const Params& params, const Unit& unit, int first,
                                                int lane_idx) {
    const int own_slot = unit.own_slot(params, first, lane_idx);
    if (own_slot < 0) return;
    store_global_16(Target(params, own_slot).row + Row::kRopeOffset + Row::rope_vector(lane_idx) * 16,
                    unit.rope);
}

// Before griddepcontrol_wait nothing may be read, but it may be on its way: the first CTAs bring their sources to L2 while they wait for
// the kernel ahead. All that wait would bring too much at once.
__device__ __forceinline__ void prefetch_sources(const Params& params, int first, int lane_idx) {
    constexpr int kLineColumns = 64;
    const int token = min_int(first + lane_idx / kTokenLanes, params.tokens - 1);
    const u16* kv_c = params.kv_c + source_offset(params, token, params.kv_c_stride);
    const u16* k_pe = params.k_pe + source_offset(params, token, params.k_pe_stride);
    const int column = lane_idx % kTokenLanes * kLineColumns;
    prefetch_l2(column < Row::kDimNope ? kv_c + column : k_pe);
    if (Row::kWide && column == 0) prefetch_l2(k_pe);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_cache_write(const __grid_constant__ Params params) {
    const int lane_idx = threadIdx.x % 32;
    const int first = (blockIdx.x * kWarps + threadIdx.x / 32) * kUnitTokens;
    if (blockIdx.x < kPrefetchingCtas) prefetch_sources(params, first, lane_idx);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (first >= params.tokens) return;
    Unit unit;
    unit.load_slot(params, first, lane_idx);
    if (params.sources_are_aligned) {
        unit.load_rows<true>(params, first, lane_idx);
    } else {
        unit.load_rows<false>(params, first, lane_idx);
    }
    if constexpr (kFormat == CacheFormat::kV32) {
        store_v32_unit(params, unit, first, lane_idx);
    } else if constexpr (kFormat == CacheFormat::kModel1) {
        store_model1_unit(params, unit, first, lane_idx);
    } else {
        store_bf16_unit(params, unit, first, lane_idx);
    }
    if constexpr (Row::kWide) store_wide_rope(params, unit, first, lane_idx);
}
