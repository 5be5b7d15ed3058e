// Gradients of tokens of no request, which lie before the first segment or behind the last: zeros.
//
// A CTA takes kRows tokens of one array.
#include "common/math.cuh"
#include "common/types.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = 128, kRows = 64;

struct Array {
    void* data;
    i64 stride_s, stride_h;  // elements of 16 bits
    int tokens, heads, columns;
    int first_cta;
};

struct Params {
    const int *cu_seqlens_q, *cu_seqlens_k;  // [b + 1]
    Array arrays[3];                         // dq, dk, dv
    int b;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    mha_backward_clear(const __grid_constant__ Params params) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    int which = 0;
    while (which < 2 && static_cast<int>(blockIdx.x) >= params.arrays[which + 1].first_cta) ++which;
    const Array& array = params.arrays[which];
    const int* cu_seqlens = which == 0 ? params.cu_seqlens_q : params.cu_seqlens_k;
    const int begin = cu_seqlens[0], end = cu_seqlens[params.b];
    const int first = (blockIdx.x - array.first_cta) * kRows, last = min_int(first + kRows, array.tokens);
    for (int token = first; token < last; ++token) {
        if (token >= begin && token < end) continue;
        u16* row = static_cast<u16*>(array.data) + token * array.stride_s;
        for (int i = threadIdx.x; i < array.heads * array.columns; i += kThreads)
            row[i / array.columns * array.stride_h + i % array.columns] = 0;
    }
}
