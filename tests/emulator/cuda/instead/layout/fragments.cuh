// The functions of cuda_src/layout/fragments.cuh that are PTX.
__device__ __forceinline__ void max_magnitudes(float (&top)[2], float a0, float a1, float b0, float b1) {
    top[0] = fmaxf(top[0], fmaxf(fabsf(a0), fabsf(a1)));
    top[1] = fmaxf(top[1], fmaxf(fabsf(b0), fabsf(b1)));
}
__device__ __forceinline__ void store_unit_f16(uint4* dst, float factor, float a0, float a1, float b0,
                                               float b1, float c0, float c1, float d0, float d1) {
    const auto pair = [factor](float x, float y) { return pack_16bit<Dtype::kF16>(x * factor, y * factor); };
    *dst = {pair(a0, a1), pair(b0, b1), pair(c0, c1), pair(d0, d1)};
}
__device__ __forceinline__ void store_unit_f32(uint4* dst, float a0, float a1, float b0, float b1) {
    *dst = {__float_as_uint(a0), __float_as_uint(a1), __float_as_uint(b0), __float_as_uint(b1)};
}
template <Dtype kDtype>
__device__ __forceinline__ void store_four_groups_16bit(u16* dst, bool valid, float factor, float a0,
                                                        float a1, float b0, float b1, float c0, float c1,
                                                        float d0, float d1) {
    const auto pair = [factor](float x, float y) { return pack_16bit<kDtype>(x * factor, y * factor); };
    u32 words[4] = {pair(a0, a1), pair(b0, b1), pair(c0, c1), pair(d0, d1)};
    quad_transpose(words);
    if (valid) memcpy(dst, words, sizeof words);
}
