"""Host side of cuda_src/kernels/mla_merge_states.cu: merges results of attention over disjoint keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from .. import jit
from ..jit.params import I32, I64, POINTER, ParamStruct
from .common import D_V, DTYPES, ceil_div

MAX_PARTS = 32
"""Results that one launch merges at most."""
PARAMS = ParamStruct(
    POINTER("outs", "lses", length=MAX_PARTS),
    I64("out_strides_n", "out_strides_s", "out_strides_h", length=MAX_PARTS),
    I64("lse_strides_n", "lse_strides_s", "lse_strides_h", length=MAX_PARTS),
    POINTER("out", "lse"),
    I64("out_stride_n", "out_stride_s", "out_stride_h"),
    I64("lse_stride_n", "lse_stride_s", "lse_stride_h"),
    I32("rows", "s", "h", "parts"),
)
OUT_DTYPES = {**DTYPES, "float32": 2}
"""Values of the defines DTYPE and OUT_DTYPE."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_THREADS = 128


class State(NamedTuple):
    """Addresses of an out and its lse, with the strides of both in elements for the dimensions n, s and h."""

    out: int
    lse: int
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int, int]


_NO_STATE = State(0, 0, (0, 0, 0), (0, 0, 0))


@cache
def spec(dtype: str, out_dtype: str) -> jit.KernelSpec:
    """The variant that reads one dtype and writes another."""
    defines = (("DTYPE", OUT_DTYPES[dtype]), ("OUT_DTYPE", OUT_DTYPES[out_dtype]))
    return jit.KernelSpec("mla_merge_states", defines, threads=_THREADS, smem_bytes=0)


def specs(dtype: str) -> list[jit.KernelSpec]:
    """The variants for results of a dtype. Merging more than `MAX_PARTS` goes through float32 results."""
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
    unused = (_NO_STATE,) * (MAX_PARTS - len(parts))
    outs, lses, out_strides, lse_strides = zip(*parts, *unused, strict=True)
    out_strides_n, out_strides_s, out_strides_h = zip(*out_strides, strict=True)
    lse_strides_n, lse_strides_s, lse_strides_h = zip(*lse_strides, strict=True)
    params = PARAMS.pack(
        outs=outs,
        lses=lses,
        out_strides_n=out_strides_n,
        out_strides_s=out_strides_s,
        out_strides_h=out_strides_h,
        lse_strides_n=lse_strides_n,
        lse_strides_s=lse_strides_s,
        lse_strides_h=lse_strides_h,
        out=merged.out,
        lse=merged.lse,
        out_stride_n=merged.out_strides[0],
        out_stride_s=merged.out_strides[1],
        out_stride_h=merged.out_strides[2],
        lse_stride_n=merged.lse_strides[0],
        lse_stride_s=merged.lse_strides[1],
        lse_stride_h=merged.lse_strides[2],
        rows=n * s * h,
        s=s,
        h=h,
        parts=len(parts),
    )
    kernel.launch((ceil_div(n * s * h, rows_per_cta(dtype)), 1, 1), params, stream, pdl=True)
