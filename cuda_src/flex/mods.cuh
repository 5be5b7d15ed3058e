// What the text of a score or mask function calls: rawmla/flex/operators.py writes it from a Python
// function, with torch's meaning of every operation. int and i64 arithmetic wraps.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"

// ---- captured arrays

struct Bf16 {
    u16 bits;
};
struct F16 {
    u16 bits;
};
struct Bool {
    unsigned char byte;
};

__device__ __forceinline__ float value_of(Bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ __forceinline__ float value_of(F16 x) { return unpack_f16(x.bits).x; }
__device__ __forceinline__ bool value_of(Bool x) { return x.byte != 0; }
__device__ __forceinline__ float value_of(double x) { return static_cast<float>(x); }
template <class T>
__device__ __forceinline__ T value_of(T x) {
    return x;
}

// Loads that may move: no kernel writes what it reads so.
template <class T>
__device__ __forceinline__ T load_read_only(const T* src) {
    return __ldg(src);
}
__device__ __forceinline__ Bf16 load_read_only(const Bf16* src) { return {__ldg(&src->bits)}; }
__device__ __forceinline__ F16 load_read_only(const F16* src) { return {__ldg(&src->bits)}; }
__device__ __forceinline__ Bool load_read_only(const Bool* src) { return {__ldg(&src->byte)}; }

template <bool kFirst, class A, class B>
struct Either {
    using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

// An index as torch takes it, negative ones from the end; what is outside is moved inside, so that no
// function can read another array's memory.
__device__ __forceinline__ int inside(int index, int size) {
    return max_int(min_int(index < 0 ? index + size : index, size - 1), 0);
}
__device__ __forceinline__ int inside(i64 index, int size) {
    if (index < 0) index += size;
    return static_cast<int>(index < 0 ? 0 : index < size ? index : size - 1);
}

// An index of a few elements, which is not moved inside: what is less than 1 means the first, and what is not
// less than the last one's place the last. ptxas of CUDA 12.6 to 13.2 compiles max(min(i, c), 0) == c, beside
// other uses of the maximum, so that it holds for 0 <= i < c too. For 64 bits there is no maximum in one
// instruction, and the comparison is right: those indices are moved.
__device__ __forceinline__ int wrapped(int index, int size) { return index < 0 ? index + size : index; }
__device__ __forceinline__ int wrapped(i64 index, int size) { return inside(index, size); }

// How an array lies: anyhow; so that 32 bits count its elements; and with a contiguous last dimension too.
enum class Layout : int { kAny = 0, kSmall = 1, kSmallRows = 2 };

// Of kRank dimensions; nothing writes to it while the kernel runs.
template <class T, int kRank, Layout kLayout = Layout::kAny>
struct Captured {
    using Offset = typename Either<kLayout == Layout::kAny, i64, int>::Type;

    const T* data;
    i64 strides[kRank == 0 ? 1 : kRank];  // elements
    int sizes[kRank == 0 ? 1 : kRank];

    template <class... Indices>
    __device__ __forceinline__ auto operator()(Indices... indices) const {
        static_assert(sizeof...(Indices) == kRank);
        return value_of(load_read_only(data + offset<0>(indices...)));
    }
    // Of the same element in a contiguous array of this shape.
    template <class... Indices>
    __device__ __forceinline__ i64 place(Indices... indices) const {
        static_assert(sizeof...(Indices) == kRank);
        i64 found = 0;
        int dim = 0;
        ((found = found * sizes[dim] + inside(indices, sizes[dim]), ++dim), ...);
        return found;
    }

  private:
    template <int kDim>
    __device__ __forceinline__ Offset offset() const {
        return 0;
    }
    template <int kDim, class Index, class... Others>
    __device__ __forceinline__ Offset offset(Index index, Others... others) const {
        const Offset place = inside(index, sizes[kDim]);
        if constexpr (kLayout == Layout::kSmallRows && kDim == kRank - 1) return place;
        return place * static_cast<Offset>(strides[kDim]) + offset<kDim + 1>(others...);
    }
};

// What text that a user wrote reads: integers as i64.
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ bool wide(bool x) { return x; }
template <class T>
__device__ __forceinline__ i64 wide(T x) {
    return x;
}
// A captured array under the name that the user gave it. (The compiler takes a generic lambda for host code.)
template <class Array>
struct Named {
    const Array& array;

    template <class... Indices>
    __device__ __forceinline__ auto operator()(Indices... indices) const {
        return wide(array(indices...));
    }
};

// ---- gradients

// A score function with its derivative by the score.
struct ValueAndDerivative {
    float value, derivative;
};
// A place of a captured array to which each score contributes: an element of gradient `gradient`, which can
// be another one for another query token if `by_q` and for another key if `by_kv`. A kernel sums over what a
// site does not depend on before it adds.
//
// A ScoreMod of a backward kernel has, besides what calls it:
//   kDerivativeIsOne    the derivative is 1 everywhere
//   kGradients          how many captured arrays have a gradient; gradients[i] is where its sums go: float32,
//                       or what flex/captured_cells.cuh has
//   kSites, kSite[i]    what the function adds to them
//   value_and_derivative(score, b, h, q_idx, kv_idx, q_len, kv_len)
//   captured_gradients(grad, score, b, h, q_idx, kv_idx, q_len, kv_len, sink)
// The latter calls sink.template add<i>(place, value) once for each site i, where the gradient of the
// function's result is `grad`: `value` is to be added to gradients[kSite[i].gradient][place]. `place` depends
// on nothing but b, h, the lengths and what by_q and by_kv say. Of the two, what a sink does not use costs
// nothing. Both functions are linear in the gradient, and may give NaN where a score is masked: what they
// give there is to be left out, not to be multiplied by 0.
struct Site {
    int gradient;
    bool by_q, by_kv;
};

// ---- arithmetic

__device__ __forceinline__ float torch_add(float a, float b) { return a + b; }
__device__ __forceinline__ int torch_add(int a, int b) {
    return static_cast<int>(static_cast<u32>(a) + static_cast<u32>(b));
}
__device__ __forceinline__ i64 torch_add(i64 a, i64 b) {
    return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b));
}
__device__ __forceinline__ float torch_sub(float a, float b) { return a - b; }
__device__ __forceinline__ int torch_sub(int a, int b) {
    return static_cast<int>(static_cast<u32>(a) - static_cast<u32>(b));
}
__device__ __forceinline__ i64 torch_sub(i64 a, i64 b) {
    return static_cast<i64>(static_cast<u64>(a) - static_cast<u64>(b));
}
__device__ __forceinline__ float torch_mul(float a, float b) { return a * b; }
__device__ __forceinline__ int torch_mul(int a, int b) {
    return static_cast<int>(static_cast<u32>(a) * static_cast<u32>(b));
}
__device__ __forceinline__ i64 torch_mul(i64 a, i64 b) {
    return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b));
}
__device__ __forceinline__ float torch_neg(float a) { return -a; }
template <class T>
__device__ __forceinline__ T torch_neg(T a) {
    return torch_sub(T(0), a);
}
__device__ __forceinline__ float torch_abs(float a) { return fabsf(a); }
template <class T>
__device__ __forceinline__ T torch_abs(T a) {
    return a < 0 ? torch_neg(a) : a;
}
// A score function is inlined for each score that a thread has, so what it calls has to be short: / of
// floats, powf, fmodf and other functions of CUDA's library bring subroutines and rare cases, with which a
// kernel takes half a minute to compile.
__device__ __forceinline__ float torch_div(float a, float b) { return a * reciprocal_approx(b); }
// Rounded as / rounds but in rare cases, and exact where the quotient is: what is rounded to an integer
// afterwards needs that.
__device__ __forceinline__ float precise_div(float a, float b) {
    const float inverse = reciprocal_approx(b), quotient = a * inverse, rest = fmaf(-quotient, b, a);
    return fabsf(rest) < kInfinity ? fmaf(rest, inverse, quotient) : quotient;
}
__device__ __forceinline__ float torch_trunc_divide(float a, float b) { return truncf(precise_div(a, b)); }
template <class T>
__device__ __forceinline__ T torch_trunc_divide(T a, T b) {
    const T quotient = a / (b == 0 || b == -1 ? T(1) : b);
    return b == 0 ? T(-1) : b == -1 ? torch_neg(a) : quotient;
}
// Exact for quotients below 2^30 and divisors that are normal numbers: a step leaves 2^-24 of what it is
// given, for which float32 has room, or less than 2b. Of larger quotients that leave too much it is 0.
__device__ __forceinline__ float torch_fmod(float a, float b) {
    const float size = fabsf(a), divisor = fabsf(b);
    float rest = fmaf(-torch_trunc_divide(size, divisor), divisor, size);
    rest = fmaf(-truncf(torch_div(rest, divisor)), divisor, rest);
    rest = rest < 0.0f ? rest + divisor : rest;
    rest = rest >= divisor ? rest - divisor : rest;
    rest = fabsf(rest) >= divisor ? 0.0f : rest;
    return copysignf(size < divisor ? size : rest, a);
}
template <class T>
__device__ __forceinline__ T torch_fmod(T a, T b) {
    return b == 0 ? T(0) : torch_sub(a, torch_mul(torch_trunc_divide(a, b), b));
}
// With the sign of the divisor.
__device__ __forceinline__ float torch_remainder(float a, float b) {
    const float rest = torch_fmod(a, b);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
template <class T>
__device__ __forceinline__ T torch_remainder(T a, T b) {
    const T rest = torch_fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ float torch_floor_divide(float a, float b) {
    const float quotient = torch_div(a, b), rest = torch_fmod(a, b);
    const float whole =
        rintf(precise_div(a - rest, b)) - (rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? 1.0f : 0.0f);
    return b == 0.0f ? quotient : whole == 0.0f ? copysignf(0.0f, quotient) : whole;
}
template <class T>
__device__ __forceinline__ T torch_floor_divide(T a, T b) {
    const T quotient = torch_trunc_divide(a, b);
    const T rest = b == 0 ? T(0) : torch_sub(a, torch_mul(quotient, b));
    return rest != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
// NaN if one of them is.
__device__ __forceinline__ float torch_maximum(float a, float b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ float torch_minimum(float a, float b) { return a != a || a < b ? a : b; }
template <class T>
__device__ __forceinline__ T torch_maximum(T a, T b) {
    return a > b ? a : b;
}
template <class T>
__device__ __forceinline__ T torch_minimum(T a, T b) {
    return a < b ? a : b;
}
template <class T>
__device__ __forceinline__ T torch_sign(T a) {
    return T((a > T(0)) - (a < T(0)));
}
template <class T>
__device__ __forceinline__ T torch_square(T a) {
    return torch_mul(a, a);
}
template <class T>
__device__ __forceinline__ T torch_pow(T a, T b) {
    if (b < 0) return a == 1 ? T(1) : a == -1 ? T(b % 2 == 0 ? 1 : -1) : T(0);
    T power = 1;
    for (; b > 0; b >>= 1, a = torch_mul(a, a))
        if ((b & 1) != 0) power = torch_mul(power, a);
    return power;
}
template <class T>
__device__ __forceinline__ T torch_left_shift(T a, T b) {
    constexpr int kBits = 8 * sizeof(T);
    return b < 0 || b >= kBits ? T(0) : static_cast<T>(static_cast<u64>(a) << b);
}
template <class T>
__device__ __forceinline__ T torch_right_shift(T a, T b) {
    constexpr int kBits = 8 * sizeof(T);
    return a >> (b < 0 || b >= kBits ? T(kBits - 1) : b);
}

// ---- functions

__device__ __forceinline__ float torch_reciprocal(float x) { return reciprocal_approx(x); }
__device__ __forceinline__ float torch_sqrt(float x) {
    const float inverse = rsqrtf(x), root = x * inverse;
    const float better = fmaf(fmaf(-root, root, x), 0.5f * inverse, root);
    return x == 0.0f || x == kInfinity ? x : better;
}
__device__ __forceinline__ float torch_exp(float x) { return exp2_approx(x * kLog2E); }
__device__ __forceinline__ float torch_exp2(float x) { return exp2_approx(x); }
__device__ __forceinline__ float torch_log(float x) { return log2_approx(x) * kLn2; }
__device__ __forceinline__ float torch_log2(float x) { return log2_approx(x); }
__device__ __forceinline__ float torch_log10(float x) { return log2_approx(x) * 0.301029995663981195f; }
__device__ __forceinline__ float torch_tanh(float x) { return tanh_approx(x); }
__device__ __forceinline__ float torch_sigmoid(float x) {
    return reciprocal_approx(1.0f + exp2_approx(x * -kLog2E));
}
__device__ __forceinline__ float torch_silu(float x) { return x * torch_sigmoid(x); }
// What sine, cosine and tangent are polynomials of: the argument less a multiple of pi / 2. Multiples of 644
// turns are taken off first, because 644 times 2 pi is a float32 number to within 2e-11 of itself. The error
// is 1e-7 up to 2^31. Arguments beyond 2^33 count as 0: few digits of their results would be right.
struct Turned {
    float sine, cosine;  // of `rest`, which is within pi / 4
    u32 quadrant;        // the multiple

    __device__ __forceinline__ explicit Turned(float x) {
        constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: the last bits of a sum are an integer
        const float angle = fabsf(x) < 0x1p33f ? x : 0.0f * x;
        const float turns = fmaf(angle, 2.47135045e-4f, kToInteger) - kToInteger;
        const float less = fmaf(turns, -4046.37134f, angle);
        const float counted = fmaf(less, 0.636619772f, kToInteger), quarters = counted - kToInteger;
        quadrant = __float_as_uint(counted);
        float rest = fmaf(quarters, -1.57079637f, less);  // exact
        rest = fmaf(turns, 6.69713089e-8f, rest);
        rest = fmaf(quarters, 4.37113883e-8f, rest);
        const float square = rest * rest;
        sine = fmaf(rest * square, fmaf(fmaf(-1.95156303e-4f, square, 8.3321631e-3f), square, -0.166666552f),
                    rest);
        cosine = fmaf(
            fmaf(fmaf(fmaf(2.44354887e-5f, square, -1.38873386e-3f), square, 4.16666456e-2f), square, -0.5f),
            square, 1.0f);
    }
    // The sine that many quarters of a turn further on
    __device__ __forceinline__ float sine_at(u32 quarters) const {
        const u32 at = quadrant + quarters;
        return __uint_as_float(__float_as_uint((at & 1) != 0 ? cosine : sine) ^ (at & 2) << 30);
    }
};
__device__ __forceinline__ float torch_sin(float x) { return Turned(x).sine_at(0); }
__device__ __forceinline__ float torch_cos(float x) { return Turned(x).sine_at(1); }
__device__ __forceinline__ float torch_tan(float x) {
    const Turned turned(x);
    return torch_div(turned.sine_at(0), turned.sine_at(1));
}
// atanh where |x| <= 1 / 3
__device__ __forceinline__ float small_atanh(float x) {
    const float square = x * x;
    const float slope =
        fmaf(fmaf(fmaf(0.140172213f, square, 0.139984488f), square, 0.200109303f), square, 0.333332032f);
    return fmaf(x * square, slope, x);
}
__device__ __forceinline__ float torch_atanh(float x) {
    const float size = fabsf(x);
    const float large = 0.5f * torch_log(torch_div(1.0f + size, 1.0f - size));
    return size < 0.333333333f ? small_atanh(x) : copysignf(large, x);
}
__device__ __forceinline__ float torch_log1p(float x) {
    return fabsf(x) < 0.5f ? 2.0f * small_atanh(torch_div(x, 2.0f + x)) : torch_log(1.0f + x);
}
__device__ __forceinline__ float torch_expm1(float x) {
    const float slope =
        fmaf(fmaf(fmaf(fmaf(1.39977841e-3f, x, 8.40304978e-3f), x, 4.16653045e-2f), x, 0.166661218f), x,
             0.50000006f);
    return fabsf(x) < 0.5f ? fmaf(x * x, slope, x) : torch_exp(x) - 1.0f;
}
__device__ __forceinline__ float torch_sinh(float x) {
    const float size = fabsf(x), square = x * x;
    const float half_exp = exp2_approx(fmaf(size, kLog2E, -1.0f));
    const float large = half_exp - 0.25f * reciprocal_approx(half_exp);
    const float slope = fmaf(fmaf(2.03794276e-4f, square, 8.33018124e-3f), square, 0.166667193f);
    return size < 1.0f ? fmaf(x * square, slope, x) : copysignf(large, x);
}
// The logarithm of 1 + x + about_x, where both are about x if it is large
__device__ __forceinline__ float log_of_sum(float x, float about_x) {
    const bool is_large = x > 0x1p30f;
    const float part = torch_log1p(is_large ? x : x + about_x);
    return is_large ? part + kLn2 : part;
}
__device__ __forceinline__ float torch_asinh(float x) {
    const float size = fabsf(x), square = x * x;
    return copysignf(log_of_sum(size, torch_div(square, 1.0f + torch_sqrt(1.0f + square))), x);
}
__device__ __forceinline__ float torch_acosh(float x) {
    const float above = x - 1.0f;
    return x < 1.0f ? kNaN : log_of_sum(above, torch_sqrt(above * (above + 2.0f)));
}
__device__ __forceinline__ float torch_atan2(float y, float x) {
    const float across = fabsf(x), up = fabsf(y);
    const bool is_steep = up > across;
    const float larger = is_steep ? up : across, smaller = is_steep ? across : up;
    const float ratio = smaller != larger ? torch_div(smaller, larger) : larger > 0.0f ? 1.0f : 0.0f;
    const float square = ratio * ratio;
    float slope = fmaf(-4.78045316e-3f, square, 2.458499e-2f);
    slope = fmaf(fmaf(slope, square, -5.99953011e-2f), square, 9.95408446e-2f);
    slope = fmaf(fmaf(slope, square, -0.140362158f), square, 0.199733585f);
    slope = fmaf(slope, square, -0.333323419f);
    const float flat = fmaf(ratio * square, slope, ratio);
    const float ahead = is_steep ? 1.57079632679489662f - flat : flat;
    return copysignf(copysignf(1.0f, x) < 0.0f ? 3.14159265358979324f - ahead : ahead, y);
}
// t * 2^(polynomial of t) / e^(x^2), where t = 1 / (1 + x / 2)
__device__ __forceinline__ float torch_erfc(float x) {
    const float size = fabsf(x), t = reciprocal_approx(fmaf(size, 0.5f, 1.0f));
    float power = fmaf(0.211408451f, t, -0.994866908f);
    power = fmaf(fmaf(power, t, 1.69859493f), t, -1.04415643f);
    power = fmaf(fmaf(power, t, -8.29764307e-2f), t, -1.56302731e-2f);
    power = fmaf(fmaf(power, t, 5.58604486e-2f), t, 0.556561828f);
    power = fmaf(fmaf(power, t, 1.44086707f), t, -1.82566261f);
    const float above = t * exp2_approx(fmaf(size * -kLog2E, size, power));
    return x < 0.0f ? 2.0f - above : above;
}
// Of x >= 0, relative to the result as exact near 1 as elsewhere; what is below the normal numbers counts as
// 0.
__device__ __forceinline__ float precise_log2(float x) {
    const u32 power = __float_as_uint(x) - 0x3f3504f3u & 0xff800000u;  // of 2, in the place of an exponent
    const float part = __uint_as_float(__float_as_uint(x) - power);    // from sqrt(1 / 2) to sqrt(2)
    const float found = fmaf(2.0f * kLog2E, small_atanh(torch_div(part - 1.0f, part + 1.0f)),
                             static_cast<float>(static_cast<int>(power) >> 23));
    return x < 0x1p-126f ? -kInfinity : x < kInfinity ? found : x;
}
__device__ __forceinline__ float torch_pow(float a, float b) {
    const float log = precise_log2(fabsf(a)), half = 0.5f * b;
    const float size = exp2_approx(log == 0.0f || b == 0.0f ? 0.0f : b * log);
    const bool is_whole = b == truncf(b), is_odd = is_whole && half != truncf(half);
    return a < 0.0f && a > -kInfinity && !is_whole ? kNaN : is_odd ? copysignf(size, a) : size;
}
__device__ __forceinline__ float torch_frac(float x) { return x - truncf(x); }
__device__ __forceinline__ float torch_gelu(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.707106781186547524f));
}
__device__ __forceinline__ float torch_gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.797884560802865356f * (x + 0.044715f * x * x * x)));
}
__device__ __forceinline__ float torch_softplus(float x, float beta, float threshold) {
    return x * beta > threshold ? x : torch_div(torch_log1p(torch_exp(x * beta)), beta);
}
__device__ __forceinline__ float torch_leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }
__device__ __forceinline__ float torch_elu(float x, float alpha, float scale, float input_scale) {
    return x > 0.0f ? x * scale : torch_expm1(x * input_scale) * (alpha * scale);
}

// ---- derivatives: `grad` times that of a function at x, or where it gave `result`

__device__ __forceinline__ float torch_tanh_backward(float grad, float result) {
    return grad * (1.0f - result * result);
}
__device__ __forceinline__ float torch_sigmoid_backward(float grad, float result) {
    return grad * ((1.0f - result) * result);
}
__device__ __forceinline__ float torch_silu_backward(float grad, float x) {
    const float sigmoid = torch_sigmoid(x);
    return grad * (sigmoid * (1.0f + x * (1.0f - sigmoid)));
}
__device__ __forceinline__ float torch_gelu_backward(float grad, float x) {
    const float below = 0.5f * (1.0f + erff(x * 0.707106781186547524f));
    return grad * (below + x * 0.398942280401432678f * torch_exp(-0.5f * x * x));
}
__device__ __forceinline__ float torch_gelu_tanh_backward(float grad, float x) {
    const float inner = tanhf(0.797884560802865356f * (x + 0.044715f * x * x * x));
    const float slope = 0.797884560802865356f * (1.0f + 3 * 0.044715f * x * x);
    return grad * (0.5f * (1.0f + inner) + 0.5f * x * (1.0f - inner * inner) * slope);
}
__device__ __forceinline__ float torch_softplus_backward(float grad, float x, float beta, float threshold) {
    return x * beta > threshold ? grad : grad * torch_sigmoid(x * beta);
}
__device__ __forceinline__ float torch_leaky_relu_backward(float grad, float x, float slope) {
    return x > 0.0f ? grad : grad * slope;
}
__device__ __forceinline__ float torch_elu_backward(float grad, float alpha, float scale, float input_scale,
                                                    float x) {
    return x > 0.0f ? grad * scale : grad * (input_scale * alpha * scale) * torch_exp(x * input_scale);
}
__device__ __forceinline__ float torch_elu_backward_of_result(float grad, float alpha, float scale,
                                                              float input_scale, float result) {
    return result > 0.0f ? grad * scale : grad * input_scale * (result + alpha * scale);
}
__device__ __forceinline__ float torch_hardtanh_backward(float grad, float x, float low, float high) {
    return x <= low || x >= high ? 0.0f : grad;
}
__device__ __forceinline__ float torch_threshold_backward(float grad, float x, float threshold) {
    return x <= threshold ? 0.0f : grad;
}
