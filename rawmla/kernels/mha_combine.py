"""Host side of cuda_src/kernels/mha_combine.cu: puts splits of dense attention together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, ParamStruct, changing
from .common import DTYPES, FLOAT_DTYPES, ceil_div, fields, padded, stride_params

if TYPE_CHECKING:
    from .mha_forward import MhaForwardCall

PARAMS = ParamStruct(
    changing(POINTER("o_accum", "lse_accum", "out", "lse", "cu_seqlens_q", "attn_sink", "out_scale")),
    I64("rows", "out_stride_b", "out_stride_s", "out_stride_h"),
    I32("splits", "b", "heads", "seqlen_q", "d_v", "sink_dtype"),
    F32("out_scale_value"),
)
_ROWS = 4
_MAX_SPLITS = 32
MAX_SCRATCH = 32 * 2**20
"""Bytes that the results of all splits take at most."""
_MIN_BLOCKS = 4
"""Blocks of keys that a split has at least: below, the combine costs more than the split saves."""


def num_splits(tiles: int, key_blocks: int, sms: int, split_bytes: int) -> int:
    """Into how many parts the keys of a call are split; 1 unless few tiles leave multiprocessors idle.

    ``split_bytes`` is the size of a split's results, `state_bytes`. It counts all rows of the arrays, so it
    can be large where few of them belong to requests.
    """
    if tiles >= 0.8 * sms:
        return 1
    most = min(sms // max(tiles, 1), key_blocks // _MIN_BLOCKS, _MAX_SPLITS, MAX_SCRATCH // split_bytes)
    return max(1, most)


def state_bytes(rows: int, d_accum: int) -> int:
    """Bytes of the results of a split: O and lse in float32."""
    return 4 * rows * (d_accum + 1)


@cache
def spec(dtype: str, d_accum: int, out_fp8: bool = False) -> jit.KernelSpec:
    """The variant for a dtype of out and rows of ``d_accum`` columns."""
    defines = (("DTYPE", DTYPES[dtype]), ("D_V", d_accum), ("OUT_FP8", out_fp8))
    return jit.KernelSpec("mha_combine", defines, threads=32 * _ROWS, smem_bytes=0)


class PreparedCombine:
    """The launch of a combine. The results of all splits take ``scratch_bytes`` of scratch."""

    def __init__(self, call: MhaForwardCall, splits: int, rows: int, capturing: Callable[[], bool]) -> None:
        """Load the kernel; ``rows`` are query tokens times heads. ``capturing`` as in `jit.get_kernel`."""
        out_fp8 = call.cache is not None and call.cache.out_fp8
        out_scale = call.cache.out_scale if call.cache is not None else None
        d_accum = padded(call.d_v)
        kernel = jit.get_kernel(spec(call.dtype, d_accum, out_fp8), call.device, capturing=capturing)
        self._lse_bytes = ceil_div(4 * splits * rows, 16) * 16
        self.scratch_bytes = self._lse_bytes + 4 * splits * rows * d_accum
        params = PARAMS.pack(
            rows=rows,
            **stride_params(out=call.out_strides),
            splits=splits,
            **fields(call, "b", "d_v"),
            heads=call.h_q,
            seqlen_q=call.lse_strides[1],  # contiguous tokens of a head: of a request, or of all
            sink_dtype=FLOAT_DTYPES[call.sink_dtype or "float32"],
            out_scale_value=1.0 if out_scale is None else out_scale,
        )
        grid = (ceil_div(rows, _ROWS), 1, 1)
        self._launch = kernel.prepare(grid, params, PARAMS.changing, pdl=True).launch

    def places(self, scratch: int) -> tuple[int, int]:
        """The addresses of o_accum and lse_accum in scratch."""
        return scratch + self._lse_bytes, scratch

    def launch(self, stream: int, scratch: int, *others: int) -> None:
        """Enqueue the kernel after the one that wrote the splits to ``scratch``.

        ``others`` are the members of `PARAMS` that change, from ``out`` on.
        """
        self._launch(stream, *self.places(scratch), *others)
