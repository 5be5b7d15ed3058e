// What the text of a score or mask function calls: rawmla/attention/operators.py writes it from a Python
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
//   kGradients          how many captured arrays have a gradient: gradients[i] is float32 and contiguous
//   kSites, kSite[i]    what the function adds to them
//   kSitesNeedScore     captured_gradients reads `score`
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
__device__ __forceinline__ float torch_div(float a, float b) { return a * reciprocal_approx(b); }
__device__ __forceinline__ float torch_trunc_divide(float a, float b) { return truncf(a / b); }
template <class T>
__device__ __forceinline__ T torch_trunc_divide(T a, T b) {
    if (b == -1) return torch_neg(a);
    return b == 0 ? T(-1) : a / b;
}
__device__ __forceinline__ float torch_fmod(float a, float b) { return fmodf(a, b); }
template <class T>
__device__ __forceinline__ T torch_fmod(T a, T b) {
    return b == 0 || b == -1 ? T(0) : a % b;
}
// With the sign of the divisor.
__device__ __forceinline__ float torch_remainder(float a, float b) {
    const float rest = fmodf(a, b);
    return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
template <class T>
__device__ __forceinline__ T torch_remainder(T a, T b) {
    const T rest = torch_fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ float torch_floor_divide(float a, float b) {
    if (b == 0.0f) return a / b;
    const float quotient = (a - torch_remainder(a, b)) / b;
    const float down = floorf(quotient);
    return quotient == 0.0f ? copysignf(0.0f, a / b) : quotient - down > 0.5f ? down + 1.0f : down;
}
template <class T>
__device__ __forceinline__ T torch_floor_divide(T a, T b) {
    const T quotient = torch_trunc_divide(a, b);
    return torch_fmod(a, b) != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
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
__device__ __forceinline__ float torch_pow(float a, float b) { return powf(a, b); }
template <class T>
__device__ __forceinline__ T torch_pow(T a, T b) {
    if (b < 0) return a == 1 ? T(1) : a == -1 ? T(b % 2 == 0 ? 1 : -1) : T(0);
    T power = 1;
    for (; b > 0; b /= 2, a = torch_mul(a, a))
        if (b % 2 != 0) power = torch_mul(power, a);
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

__device__ __forceinline__ float torch_reciprocal(float x) { return 1.0f / x; }
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
// Sine and cosine. sinf and cosf need local memory, for arguments beyond 100,000. Here the multiple of pi / 2
// is taken off in float64, which leaves 1e-9 of absolute error at 10^7, and the rest is a polynomial.
struct Turned {
    float rest;    // within pi / 4
    int quadrant;  // multiples of pi / 2

    __device__ __forceinline__ explicit Turned(float x) {
        const double count = rint(x * 0.63661977236758134);
        rest = static_cast<float>(
            fma(count, -6.123233995736766e-17, fma(count, -1.5707963267948966, double(x))));
        quadrant = static_cast<int>(static_cast<i64>(count) & 3);
    }
    __device__ __forceinline__ float sine(int quadrant) const {
        const float r2 = rest * rest;
        const float odd = rest + rest * r2 *
                                     (-1.66666667e-1f +
                                      r2 * (8.33333333e-3f + r2 * (-1.98412698e-4f + r2 * 2.75573192e-6f)));
        const float even =
            1.0f + r2 * (-0.5f + r2 * (4.16666667e-2f + r2 * (-1.38888889e-3f + r2 * 2.48015873e-5f)));
        const float size = (quadrant & 1) != 0 ? even : odd;
        return (quadrant & 2) != 0 ? -size : size;
    }
};
__device__ __forceinline__ float torch_sin(float x) {
    const Turned turned(x);
    return turned.sine(turned.quadrant);
}
__device__ __forceinline__ float torch_cos(float x) {
    const Turned turned(x);
    return turned.sine(turned.quadrant + 1);
}
__device__ __forceinline__ float torch_tan(float x) {
    const Turned turned(x);
    return turned.sine(turned.quadrant) / turned.sine(turned.quadrant + 1);
}
__device__ __forceinline__ float torch_frac(float x) { return x - truncf(x); }
__device__ __forceinline__ float torch_gelu(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.707106781186547524f));
}
__device__ __forceinline__ float torch_gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.797884560802865356f * (x + 0.044715f * x * x * x)));
}
__device__ __forceinline__ float torch_softplus(float x, float beta, float threshold) {
    return x * beta > threshold ? x : log1pf(expf(x * beta)) / beta;
}
__device__ __forceinline__ float torch_leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }
__device__ __forceinline__ float torch_elu(float x, float alpha, float scale, float input_scale) {
    return x > 0.0f ? x * scale : expm1f(x * input_scale) * (alpha * scale);
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
    return x > 0.0f ? grad * scale : grad * (input_scale * alpha * scale) * expf(x * input_scale);
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
