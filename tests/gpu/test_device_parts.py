"""Parts of cuda_src that no kernel uses yet, on the GPU: wgmma of every width, TMA of 2 to 5 dimensions."""

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

// a [64, 64]; b [N, 64], or [64, 64 kTiles] if MN_MAJOR; d [64, N] = A B.
extern "C" __global__ void __launch_bounds__(128, 1) probe(const u16* a, const u16* b, float* d) {
    __shared__ alignas(1024) unsigned char smem_a[TileA::kBytes];
    __shared__ alignas(1024) unsigned char smem_b[MN_MAJOR ? kTiles * TileB::kBytes : TileB::kBytes];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    auto copy = [&](unsigned char* dst, const u16* src) {
        *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(src);
    };
    for (int i = thread; i < 64 * 8; i += 128)
        copy(smem_a + TileA::offset(i / 8, i % 8), a + i / 8 * 64 + i % 8 * 8);
    for (int i = thread; i < TileB::kRows * 8; i += 128) {
        for (int tile = 0; tile < (MN_MAJOR ? kTiles : 1); ++tile) {
            copy(smem_b + tile * TileB::kBytes + TileB::offset(i / 8, i % 8),
                 b + (MN_MAJOR ? i / 8 * 64 * kTiles + tile * 64 : i / 8 * 64) + i % 8 * 8);
        }
    }
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
    const u64 desc_a = TileA::k_major(smem_address(smem_a));
    const u32 start_b = smem_address(smem_b);
    const u64 desc_b = MN_MAJOR ? TileB::mn_major(start_b) : TileB::k_major(start_b);
    constexpr Major kMajorB = MN_MAJOR ? Major::kMn : Major::kK;
    wgmma_pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u64 step_b = desc_b + k * (MN_MAJOR ? TileB::kStepMn : TileB::kStepK);
        if constexpr (A_IN_REGISTERS) {
            wgmma_rs<Dtype::kBf16, kMajorB>(acc, fragments[k], step_b, k > 0);
        } else {
            wgmma_ss<Dtype::kBf16, Major::kK, kMajorB>(acc, desc_a + k * TileA::kStepK, step_b, k > 0);
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
"""


@pytest.mark.parametrize("n", (8, 16, 40, 64, 96, 128, 192, 248, 256))
@pytest.mark.parametrize("a_in_registers", (0, 1))
@pytest.mark.parametrize("mn_major", (0, 1))
def test_products(n: int, a_in_registers: int, mn_major: int, tmp_path: Path) -> None:
    """Small integers: exact in bf16, and their sums in float32."""
    kernel = probe(tmp_path, PRODUCT, N=n, MN_MAJOR=mn_major, A_IN_REGISTERS=a_in_registers)
    draw = torch.Generator("cuda").manual_seed(n)
    a = torch.randint(-8, 9, (64, 64), generator=draw, device="cuda").bfloat16()
    b = torch.randint(-8, 9, (64, -(-n // 64) * 64), generator=draw, device="cuda").bfloat16()
    given = b if mn_major else b[:, :n].T.contiguous()
    d = torch.full((64, n), float("nan"), device="cuda")
    torch.cuda.synchronize()
    kernel((1,), (128,), tuple(np.uint64(array.data_ptr()) for array in (a, given, d)))
    cupy.cuda.runtime.deviceSynchronize()
    assert torch.equal(d.double(), a.double() @ b[:, :n].double())


COPY = """
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

// A box of `src` to `copy`, and added to `sums`; its bytes, as they arrived, added to `flat`. One thread.
extern "C" __global__ void probe(const __grid_constant__ TensorMap src,
                                 const __grid_constant__ TensorMap copy,
                                 const __grid_constant__ TensorMap sums, float* flat) {
    __shared__ alignas(128) unsigned char box[BOX_BYTES];
    __shared__ u64 bar;
    const u32 smem = smem_address(box), full = smem_address(&bar);
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(full, BOX_BYTES);
    LOAD(smem, &src, full, COORDINATES);
    mbarrier_wait_parity(full, 0);
    STORE(&copy, smem, COORDINATES);
    REDUCE_ADD(&sums, smem, COORDINATES);
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
    for name, function in (("LOAD", "load"), ("STORE", "store"), ("REDUCE_ADD", "reduce_add")):
        text = text.replace(f"{name}(", f"tma_{function}_{rank}d(")
    text = text.replace("COORDINATES", ", ".join(str(c) for c in reversed(first)))
    numbers = int(np.prod(box_shape))
    kernel = probe(tmp_path, text, BOX_BYTES=4 * numbers)

    src = torch.randn(shape, device="cuda")
    copy, sums = torch.zeros_like(src), torch.ones_like(src)
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
        for array in (src, copy, sums)
    ]
    torch.cuda.synchronize()
    kernel((1,), (1,), (*maps, np.uint64(flat.data_ptr())))
    cupy.cuda.runtime.deviceSynchronize()

    inside = torch.zeros_like(src)
    inside[tuple(slice(start, start + size) for start, size in zip(first, box_shape, strict=True))] = 1
    assert int(inside.sum()) == 32
    assert torch.equal(copy, src * inside) and torch.equal(sums, 1 + src * inside)
    arrived = torch.zeros(box_shape, device="cuda")
    arrived[(0,) * (rank - 1)] = src[first[:-1]][32:]
    assert torch.equal(flat, 1 + arrived)
