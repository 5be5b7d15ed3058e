"""Parts of cuda_src: wgmma of several widths with operands in every form, TMA of 2 to 5 dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_probe import headers
from gpu_support import cupy, torch

from rawmla.jit import nvrtc
from rawmla.jit.sources import SourceSet
from rawmla.jit.tensormap import tensor_map


def probe(folder: Path, text: str, **defines: int) -> Any:
    """The kernel `probe` of a source that includes project headers."""
    options = ("-arch=sm_90a", "-std=c++20", *(f"-D{name}={value}" for name, value in defines.items()))
    result = nvrtc.compile_source(SourceSet("probe.cu", text.encode(), headers()), options)
    assert result.status == "NVRTC_SUCCESS" and result.cubin is not None, result.log
    path = folder / "probe.cubin"
    path.write_bytes(result.cubin)
    return cupy.RawModule(path=str(path)).get_function("probe")


PRODUCT = """
#include "layout/swizzled_tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

constexpr int kTiles = (N + 63) / 64;
using TileA = SwizzledTile<64>;
using TileB = SwizzledTile<MN_MAJOR ? 64 : N>;

enum class A { kKMajor, kMnMajor, kRegisters };

// 16 bytes.
__device__ __forceinline__ void copy(unsigned char* dst, const u16* src) {
    *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(src);
}

// d [64, N] = A B. A is in a [64, 64], for MN-major use transposed; B is in shared memory. All threads call.
template <A kA>
__device__ __forceinline__ void product(const u16* a, unsigned char* smem_a, u32 smem_b, float* d) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    __syncthreads();
    for (int i = thread; i < 64 * 8; i += 128)
        copy(smem_a + TileA::offset(i / 8, i % 8), a + i / 8 * 64 + i % 8 * 8);
    fence_proxy_async();
    __syncthreads();
    float acc[N / 2] = {};
    u32 fragments[4][4];
    for (int k = 0; k < 4; ++k) {
        for (int r = 0; r < 4; ++r) {
            const int row = 16 * warp + lane / 4 + 8 * (r & 1);
            const int column = 16 * k + 8 * (r >> 1) + 2 * (lane % 4);
            fragments[k][r] = *reinterpret_cast<const u32*>(a + row * 64 + column);
        }
    }
    constexpr Major kMajorA = kA == A::kMnMajor ? Major::kMn : Major::kK;
    constexpr Major kMajorB = MN_MAJOR ? Major::kMn : Major::kK;
    const u32 start_a = smem_address(smem_a);
    const u64 desc_a = kA == A::kMnMajor ? TileA::mn_major(start_a) : TileA::k_major(start_a);
    const u64 desc_b = MN_MAJOR ? TileB::mn_major(smem_b) : TileB::k_major(smem_b);
    wgmma_pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u64 step_b = desc_b + k * (MN_MAJOR ? TileB::kStepMn : TileB::kStepK);
        if constexpr (kA == A::kRegisters) {
            wgmma_rs<Dtype::kBf16, kMajorB>(acc, fragments[k], step_b, k > 0);
        } else {
            const u64 step_a = desc_a + k * (kA == A::kMnMajor ? TileA::kStepMn : TileA::kStepK);
            wgmma_ss<Dtype::kBf16, kMajorA, kMajorB>(acc, step_a, step_b, k > 0);
        }
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_pin(acc);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const int row = 16 * warp + lane / 4 + 8 * (i >> 1 & 1);
        const int column = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
        d[row * N + column] = acc[i];
    }
}

// a [64, 64] and its transposed; b [N, 64], or [64, 64 kTiles] if MN_MAJOR; d [3, 64, N]: A B with A K-major,
// MN-major and in registers.
extern "C" __global__ void __launch_bounds__(128, 1)
    probe(const u16* a, const u16* transposed, const u16* b, float* d) {
    __shared__ alignas(1024) unsigned char smem_a[TileA::kBytes];
    __shared__ alignas(1024) unsigned char smem_b[MN_MAJOR ? kTiles * TileB::kBytes : TileB::kBytes];
    for (int i = threadIdx.x; i < TileB::kRows * 8; i += 128) {
        for (int tile = 0; tile < (MN_MAJOR ? kTiles : 1); ++tile) {
            copy(smem_b + tile * TileB::kBytes + TileB::offset(i / 8, i % 8),
                 b + (MN_MAJOR ? i / 8 * 64 * kTiles + tile * 64 : i / 8 * 64) + i % 8 * 8);
        }
    }
    const u32 start_b = smem_address(smem_b);
    product<A::kKMajor>(a, smem_a, start_b, d);
    product<A::kMnMajor>(transposed, smem_a, start_b, d + 64 * N);
    product<A::kRegisters>(a, smem_a, start_b, d + 2 * 64 * N);
}
"""


@pytest.mark.parametrize("n", (8, 40, 96, 256))
@pytest.mark.parametrize("mn_major", (0, 1))
def test_products(n: int, mn_major: int, tmp_path: Path) -> None:
    """Small integers: exact in bf16, and their sums in float32. `mn_major` is that of B."""
    kernel = probe(tmp_path, PRODUCT, N=n, MN_MAJOR=mn_major)
    draw = torch.Generator("cuda").manual_seed(n)
    a = torch.randint(-8, 9, (64, 64), generator=draw, device="cuda").bfloat16()
    transposed = a.T.contiguous()
    b = torch.randint(-8, 9, (64, -(-n // 64) * 64), generator=draw, device="cuda").bfloat16()
    given = b if mn_major else b[:, :n].T.contiguous()
    d = torch.full((3, 64, n), float("nan"), device="cuda")
    torch.cuda.synchronize()
    kernel((1,), (128,), tuple(np.uint64(array.data_ptr()) for array in (a, transposed, given, d)))
    cupy.cuda.runtime.deviceSynchronize()
    want = a.double() @ b[:, :n].double()
    for form, got in zip(("K-major", "MN-major", "in registers"), d, strict=True):
        assert torch.equal(got.double(), want), f"A {form}"


COPY = """
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

// A box of `src` to `copy`; its bytes, as they arrived, added to `flat`. One thread.
extern "C" __global__ void probe(const __grid_constant__ TensorMap src,
                                 const __grid_constant__ TensorMap copy, float* flat) {
    __shared__ alignas(128) unsigned char box[BOX_BYTES];
    __shared__ u64 bar;
    const u32 smem = smem_address(box), full = smem_address(&bar);
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(full, BOX_BYTES);
    LOAD(smem, &src, full, COORDINATES);
    mbarrier_wait_parity(full, 0);
    STORE(&copy, smem, COORDINATES);
    bulk_reduce_add_f32(flat, smem, BOX_BYTES);
    bulk_commit_group();
    bulk_wait_group_read<0>();
    bulk_wait_group<0>();
}
"""


@pytest.mark.parametrize("rank", (2, 3, 4, 5))
def test_boxes(rank: int, tmp_path: Path) -> None:
    """A box that reaches past the tensor in every dimension but the innermost."""
    shape = (3, 4, 5, 6)[: rank - 1] + (64,)
    first = (2, 3, 4, 5)[: rank - 1] + (32,)  # of the box, of 2 x 2 x ... x 32 numbers
    box_shape = (2,) * (rank - 1) + (32,)
    text = COPY
    for name, function in (("LOAD", "load"), ("STORE", "store")):
        text = text.replace(f"{name}(", f"tma_{function}_{rank}d(")
    text = text.replace("COORDINATES", ", ".join(str(c) for c in reversed(first)))
    numbers = int(np.prod(box_shape))
    kernel = probe(tmp_path, text, BOX_BYTES=4 * numbers)

    src = torch.randn(shape, device="cuda")
    copy = torch.zeros_like(src)
    flat = torch.ones(box_shape, device="cuda")
    dims = tuple(reversed(shape))
    strides = tuple(4 * stride for stride in reversed(src.stride()))[1:]
    maps = [
        np.frombuffer(
            tensor_map(
                array.data_ptr(), "float32", dims, strides, tuple(reversed(box_shape)), "none", "none"
            ),
            "V128",  # one value of 128 bytes, which CuPy passes by value
        )
        for array in (src, copy)
    ]
    torch.cuda.synchronize()
    kernel((1,), (1,), (*maps, np.uint64(flat.data_ptr())))
    cupy.cuda.runtime.deviceSynchronize()

    inside = torch.zeros_like(src)
    inside[tuple(slice(start, start + size) for start, size in zip(first, box_shape, strict=True))] = 1
    assert int(inside.sum()) == 32
    assert torch.equal(copy, src * inside)
    arrived = torch.zeros(box_shape, device="cuda")
    arrived[(0,) * (rank - 1)] = src[first[:-1]][32:]
    assert torch.equal(flat, 1 + arrived)
