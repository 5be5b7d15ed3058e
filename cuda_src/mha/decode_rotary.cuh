// Rotary embedding of a row of q or of new keys.
#pragma once
#include "common/math.cuh"
#include "mha/decode_params.cuh"

// Columns 8 unit to 8 unit + 7 of a row, rotated for a position. Pairs are columns 2i and 2i + 1 if
// interleaved, else i and i + rotary_dim / 2. Products and sums are float32.
__device__ __forceinline__ uint4 load_rotated(const Params& params, const u16* row, int unit, int position) {
    const uint4* units = reinterpret_cast<const uint4*>(row);
    uint4 own = units[unit];
    if (params.rotary_cos == nullptr || 8 * unit >= params.rotary_dim) return own;
    const int half = params.rotary_dim / 2;
    const i64 angles = static_cast<i64>(clamp_int(position, 0, params.rotary_rows - 1)) * half;
    const u16 *cos = params.rotary_cos + angles, *sin = params.rotary_sin + angles;
    const auto number = [](const u16* x, int i) { return unpack_16bit<kDtype>(x[i]).x; };
    u32* words = &own.x;
    if (params.rotary_interleaved) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = unpack_16bit<kDtype>(words[i]);
            const float c = number(cos, 4 * unit + i), s = number(sin, 4 * unit + i);
            words[i] = pack_16bit<kDtype>(x.x * c - x.y * s, x.x * s + x.y * c);
        }
        return own;
    }
    const bool is_first = 8 * unit < half;
    const int pair = is_first ? 8 * unit : 8 * unit - half;
    const uint4 other = units[is_first ? unit + half / 8 : unit - half / 8];
    const u32* others = &other.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 x = unpack_16bit<kDtype>(words[i]), y = unpack_16bit<kDtype>(others[i]);
        const float c[2] = {number(cos, pair + 2 * i), number(cos, pair + 2 * i + 1)};
        float s[2] = {number(sin, pair + 2 * i), number(sin, pair + 2 * i + 1)};
        if (is_first) s[0] = -s[0], s[1] = -s[1];
        words[i] = pack_16bit<kDtype>(x.x * c[0] + y.x * s[0], x.y * c[1] + y.y * s[1]);
    }
    return own;
}
