// The gradient of a captured array in its dtype, from the sums that flex_captured_gradients.cu leaves.
#include "common/float_dtypes.cuh"
#include "common/types.cuh"
#include "flex/captured_cells.cuh"
#include "ptx/sync.cuh"

constexpr int kThreads = 256;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");

struct Params {
    const void* sums;
    const u32* largest;  // of what was added to cells
    void* out;
    i64 count;
    int sums_are;  // 0: float32, 1: CapturedCell, 2: CapturedDigits
    int dtype;     // common/float_dtypes.cuh
    int terms_log2;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    flex_captured_finish(const __grid_constant__ Params params) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    double unit = 0.0;
    if (params.sums_are == 1) unit = power_of_two(-units_exponent(*params.largest, params.terms_log2));
    for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < params.count;
         i += static_cast<i64>(gridDim.x) * kThreads) {
        double sum;
        if (params.sums_are == 0) {
            sum = static_cast<const float*>(params.sums)[i];
        } else if (params.sums_are == 2) {
            const CapturedDigits& sums =
                static_cast<const CapturedDigits*>(params.sums)[i / kElementsTogether];
            const int element = static_cast<int>(i % kElementsTogether);
            sum = sum_of_digits(sums, element) + sums.rest[element];
        } else {
            const CapturedCell cell = static_cast<const CapturedCell*>(params.sums)[i];
            sum = static_cast<double>(static_cast<i64>(cell.units)) * unit + cell.rest;
        }
        store_float(params.out, params.dtype, i, sum);
    }
}
