// Finds the rows that hold NaN or Inf among their first 512 bf16 values, which are V.
//
//   rows [num_rows, >= 512] bf16 -> not_finite [4 * ceil(num_rows / 32)] bytes, one bit per row
//
// Grid: x = groups of 32 rows; a warp takes eight rows and writes their byte. Each lane issues all of its
// loads before it uses the first value.
#include "common/types.cuh"
#include "mla/dimensions.cuh"
#include "ptx/sync.cuh"
#include "ptx/vector.cuh"

constexpr int kThreads = 128;
static_assert(kThreads == THREADS, "THREADS is what the launch gives");
constexpr int kWarpRows = 8;
constexpr int kRowVectors = 2;  // 16-byte vectors per lane and row
static_assert(kRowVectors * 32 * 16 == 2 * kDimV, "a warp reads the values of V in a row");

struct Params {
    const unsigned char* rows;
    unsigned char* not_finite;
    i64 row_stride;  // bytes
    int num_rows;
};

// NaN and Inf have all bits of the exponent set.
__device__ __forceinline__ bool either_not_finite(u32 pair) {
    return (pair & 0x7f80) == 0x7f80 || (pair & 0x7f800000) == 0x7f800000;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mla_find_not_finite(const __grid_constant__ Params params) {
    const int lane_idx = threadIdx.x % 32;
    const int byte = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int first = byte * kWarpRows;
    if (byte >= ceil_div(params.num_rows, 32) * 4) return;
    uint4 values[kWarpRows][kRowVectors];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
        const int row = min_int(first + i, params.num_rows - 1);
        const unsigned char* src = params.rows + row * params.row_stride + lane_idx * 16;
#pragma unroll
        for (int v = 0; v < kRowVectors; ++v) values[i][v] = load_global_16(src + v * 512);
    }
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
        bool found = false;
#pragma unroll
        for (int v = 0; v < kRowVectors; ++v) {
            const uint4 x = values[i][v];
            found |= either_not_finite(x.x) || either_not_finite(x.y) || either_not_finite(x.z) ||
                     either_not_finite(x.w);
        }
        if (__any_sync(0xffffffff, found) && first + i < params.num_rows) bits |= 1u << i;
    }
    if (lane_idx == 0) params.not_finite[byte] = bits;
}
