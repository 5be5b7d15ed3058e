"""Host side of cuda_src/kernels/mla_merge_states.cu: merging attention over disjoint parts of the keys."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from .. import jit
from .common import D_V, DTYPES, ceil_div

__all__ = [
    "ITEM_BYTES",
    "MAX_PARTS",
    "OUT_DTYPES",
    "PARAMS",
    "State",
    "launch",
    "rows_per_cta",
    "spec",
    "specs",
]

MAX_PARTS = 32  # of one launch
PARAMS = struct.Struct(f"<{2 * MAX_PARTS}Q{6 * MAX_PARTS}q2Q6q4i")  # Params of mla_merge_states.cu
OUT_DTYPES = {**DTYPES, "float32": 2}  # values of the defines DTYPE and OUT_DTYPE
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_THREADS = 128


class State(NamedTuple):
    """Addresses of an out and its lse, with strides in elements for the dimensions n, s and h of both."""

    out: int
    lse: int
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int, int]


@cache
def spec(dtype: str, out_dtype: str) -> jit.KernelSpec:
    """The variant that reads one dtype and writes another."""
    defines = (("DTYPE", OUT_DTYPES[dtype]), ("OUT_DTYPE", OUT_DTYPES[out_dtype]))
    return jit.KernelSpec("mla_merge_states", defines, threads=_THREADS, smem_bytes=0)


def specs(dtype: str) -> list[jit.KernelSpec]:
    """The variants for parts of a dtype; merges of merges are of float32 in between."""
    pairs = {(dtype, dtype), (dtype, "float32"), ("float32", dtype), ("float32", "float32")}
    return [spec(*pair) for pair in sorted(pairs)]


def rows_per_cta(dtype: str) -> int:
    """Rows of a dtype that the threads of a CTA read with one 16-byte load each."""
    return _THREADS * 16 // (D_V * ITEM_BYTES[dtype])


def launch(
    parts: Sequence[State],
    merged: State,
    dtype: str,
    out_dtype: str,
    *,
    device: int,
    stream: int,
    capturing: Callable[[], bool],
    n: int,
    s: int,
    h: int,
) -> None:
    """Enqueue the merge of 1 to `MAX_PARTS` parts of n * s * h rows, at least one."""
    kernel = jit.get_kernel(spec(dtype, out_dtype), device, capturing=capturing)
    unused = (0,) * (MAX_PARTS - len(parts))
    arrays = [
        [part.out for part in parts],
        [part.lse for part in parts],
        *([part.out_strides[axis] for part in parts] for axis in range(3)),
        *([part.lse_strides[axis] for part in parts] for axis in range(3)),
    ]
    params = PARAMS.pack(
        *chain.from_iterable((*values, *unused) for values in arrays),
        merged.out, merged.lse, *merged.out_strides, *merged.lse_strides, n * s * h, s, h, len(parts),
    )  # fmt: skip
    kernel.launch((ceil_div(n * s * h, rows_per_cta(dtype)), 1, 1), params, stream, pdl=True)
