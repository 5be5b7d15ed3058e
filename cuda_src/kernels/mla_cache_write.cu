// Writes tokens into a paged MLA cache. A quantised format (mla/cache_rows.cuh) gets e4m3 values and a scale
// per tile.
//
//   kv_c [tokens, 512 or 448], k_pe [tokens, 64] bf16 -> cache [num_blocks, page_block_size, token]
//
//   V3.2    tiles of 128 values, scale = max(amax / 448, 2^-126)
//   MODEL1  tiles of 64 values, scale = the least power of two that is not below max(amax, 1e-4) / 448
//   A value becomes e4m3(float(value / scale)).
//
// amax is the largest magnitude in the tile. NaN does not count in it.
//
// SLOTS: token t goes to slot slots[t] = block * page_block_size + offset. A slot that is negative or past
// the end of the cache is skipped. Without SLOTS token t goes to slot t, and the sources are also in blocks
// of page_block_size tokens.
//
// Grid: x = groups of kWarps * 4 tokens; a warp writes four tokens. The kernel is memory-bound: for V3.2 it
// reads 1,152 bytes and writes 656 per token. A lane issues all of its loads, nine of 16 bytes if d_qk is
// 576, before it uses the first value.
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
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kWarps = kThreads / 32;
constexpr int kPrefetchingCtas = 528;            // 4 per SM of a GPU with 132
constexpr float kV32MinScale = 1.17549435e-38f;  // 2^-126
constexpr float kModel1MinAmax = 1e-4f;
// If a scale is smaller, values and scale are first multiplied by 2^60. Otherwise the remainder that
// V32Divisor computes could need bits below the smallest float.
constexpr float kMinCorrectableScale = 8.0779357e-28f;  // 2^-90
constexpr float kTwoTo60 = 1152921504606846976.0f;

struct Params {
    const u16* kv_c;
    const u16* k_pe;
    const void* slots;  // [tokens] int32 or int64
    unsigned char* cache;
    int kv_c_stride, k_pe_stride;    // elements from token to token
    int source_block_stride;         // elements from block to block, without SLOTS
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

// Elements from the first row of a source to the row of a token.
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
    if constexpr (kAligned) {
        return load_global_16(src);
    } else {
        u32 values[kVectorColumns];
#pragma unroll
        for (int i = 0; i < kVectorColumns; ++i) values[i] = load_global_2(src + i);
        return make_uint4(values[0] | values[1] << 16, values[2] | values[3] << 16,
                          values[4] | values[5] << 16, values[6] | values[7] << 16);
    }
}

// What a lane holds of the warp's four tokens. Past the last token it loads the last one again, and does not
// store it.
struct Unit {
    uint2 slot;  // slot of the lane's own token: low and high word
    uint4 vectors[kUnitTokens][kLaneVectors];
    uint4 rope;  // d_qk = 576: a RoPE vector of the lane's own token

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

    // The slot of the lane's own token, or -1 if it is not stored. Unsigned, a negative slot is too large.
    __device__ __forceinline__ int own_slot(const Params& params, int first, int lane_idx) const {
        const bool valid = first + lane_idx / kTokenLanes < params.tokens && slot.y == 0 &&
                           slot.x < static_cast<u32>(params.num_slots);
        return valid ? static_cast<int>(slot.x) : -1;
    }
};

// The largest magnitudes of the two tiles that the lane's two vectors of a token belong to, as two bf16: that
// of the first vector in the low half.
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

// Divides by a V3.2 scale with a multiplication and a correction.
struct V32Divisor {
    float scale, inverse;

    V32Divisor() = default;
    __device__ __forceinline__ explicit V32Divisor(float stored_scale) : scale(stored_scale) {
        inverse = 1.0f / (is_tiny() ? scale * kTwoTo60 : scale);
        if (scale == kInfinity) scale = 0.0f;  // the quotient of a finite value is then 0, of an infinity NaN
    }
    __device__ __forceinline__ bool is_tiny() const { return scale < kMinCorrectableScale && scale != 0.0f; }
    __device__ __forceinline__ V32Divisor of_lane(int lane_idx) const {
        V32Divisor other;
        other.scale = __shfl_sync(0xffffffff, scale, lane_idx);
        other.inverse = __shfl_sync(0xffffffff, inverse, lane_idx);
        return other;
    }
    // value / scale: the product value * (1 / scale) is corrected by its remainder. After rounding to e4m3
    // the result is that of a rounded division. The signs are placed so that a zero keeps its sign.
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

// Lane l computes the scale of tile l % 4 of token l / 8. The other lanes get it with a shuffle.
__device__ __forceinline__ void store_v32_unit(const Params& params, const Unit& unit, int first,
                                               int lane_idx) {
    const int own_slot = unit.own_slot(params, first, lane_idx);
    const int tile = lane_idx % 4;
    u32 own_maxima = 0;  // largest magnitudes of tiles tile % 2 and tile % 2 + 2
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

// The scale is 2^(scale - 127), so the product with its inverse is exact.
__device__ __forceinline__ uint2 quantize_model1(const uint4& vector, u32 scale) {
    const float inverse = __uint_as_float((254 - scale) << 23);
    return make_uint2(pack_e4m3(bf16_low(vector.x) * inverse, bf16_high(vector.x) * inverse,
                                bf16_low(vector.y) * inverse, bf16_high(vector.y) * inverse),
                      pack_e4m3(bf16_low(vector.z) * inverse, bf16_high(vector.z) * inverse,
                                bf16_low(vector.w) * inverse, bf16_high(vector.w) * inverse));
}

// The e8m0 code of the least power of two that is not below max(amax, 1e-4) / 448. Since 448 = 1.75 * 2^8,
// the exponent of amax is rounded up if its mantissa is above 1.75. An infinite amax counts as 2^128.
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

// Nothing that the kernel ahead writes may be read before griddepcontrol_wait, but it may be prefetched to
// L2. Only the first CTAs do so, because all waiting CTAs together would prefetch too much at once.
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
