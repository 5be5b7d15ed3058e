// Gradients of tokens of no request, which lie before the first segment or behind the last: zeros.
//
// A CTA takes kRows tokens of one array.
#include "common/types.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = 128, kRows = 64;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    const int *cu_seqlens_q, *cu_seqlens_k;  // [b + 1]
    void* gradients[3];                      // dq, dk, dv, of 16-bit elements
    i64 strides_s[3], strides_h[3];
    int tokens[3], heads[3], columns[3];
    int first_ctas[3];
    int b;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    mha_backward_clear(const __grid_constant__ Params params) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    int which = 0;
    while (which < 2 && static_cast<int>(blockIdx.x) >= params.first_ctas[which + 1]) ++which;
    const int* cu_seqlens = which == 0 ? params.cu_seqlens_q : params.cu_seqlens_k;
    const int begin = cu_seqlens[0], end = cu_seqlens[params.b], columns = params.columns[which];
    const int first = (blockIdx.x - params.first_ctas[which]) * kRows;
    const int last = min_int(first + kRows, params.tokens[which]);
    for (int token = first; token < last; ++token) {
        if (token >= begin && token < end) continue;
        u16* row = static_cast<u16*>(params.gradients[which]) + token * params.strides_s[which];
        for (int i = threadIdx.x; i < params.heads[which] * columns; i += kThreads)
            row[i / columns * params.strides_h[which] + i % columns] = 0;
    }
}
