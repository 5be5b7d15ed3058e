"""Host side of cuda_src/kernels/mla_combine.cu: merges the splits of split requests.

Also the layout of splits in scratch (cuda_src/mla/splits.cuh), which the attention kernels write.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from .. import jit
from ..jit.params import F32, I32, I64, POINTER, ParamStruct, changing
from .common import D_V, DTYPES, ceil_div, fields, max_splits, stride_params
from .mla_metadata import UNIFORM_PLAN

if TYPE_CHECKING:
    from .mla_dense_decode import DenseDecodeCall
    from .mla_sparse import SparseCall

_ARRAYS = (
    *POINTER("sched_meta", "num_splits", "o_accum", "lse_accum_log2", "o_scale_log2"),
    *POINTER("out", "lse", "attn_sink"),
)
_SIZES = (
    *I64("out_stride_b", "out_stride_s", "out_stride_h"),
    *I32("b", "s_q", "h_q", "max_splits", "object_layout", "by_request"),
)
PARAMS = {
    False: ParamStruct(changing(_ARRAYS), _SIZES),
    True: ParamStruct(
        changing(_ARRAYS, POINTER("max_accum_log2", "max_logits")),
        _SIZES,
        F32("lse_factor"),
        UNIFORM_PLAN("uniform"),
    ),
}
"""By whether the call has max_logits (prefill) or not (decoding)."""
_VALUE_BYTES = {"bfloat16": 2, "float16": 4}  # of a value in o_accum, by the dtype of the call
_SCALARS = 3  # of a row: lse_accum_log2 and two o_scale_log2; in prefill also max_accum_log2
_PARTIAL_BYTES = (D_V + 4) * 4  # of a group of splits, in Partials of mla_combine.cu


class Mapping(NamedTuple):
    """How the kernel shares rows and splits among warps: its defines of these names."""

    split_groups: int
    splits_at_once: int
    rows_at_once: int = 1

    @property
    def rows_per_cta(self) -> int:
        """Query rows that one CTA merges."""
        return 4 * self.rows_at_once if self.split_groups == 1 else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 64 * self.split_groups * self.rows_per_cta // self.rows_at_once


_BATCH_INVARIANT = Mapping(1, 4)
# The most rows of split requests for a mapping, which run at once under it.
_UP_TO_ROWS = {
    Mapping(8, 8): 132,
    Mapping(8, 4): 264,
    Mapping(4, 6): 528,
    _BATCH_INVARIANT: 2112,
}
_MORE_ROWS = Mapping(1, 2, 2)
MAPPINGS = (*_UP_TO_ROWS, _MORE_ROWS)


def split_row_bytes(dtype: str, max_logits: bool = False) -> int:
    """Bytes of scratch for a query row of a split."""
    return D_V * _VALUE_BYTES[dtype] + 4 * (_SCALARS + max_logits)


@cache
def spec(dtype: str, mapping: Mapping, max_logits: bool = False) -> jit.KernelSpec:
    """The variant for a dtype and a mapping, for decoding or, with ``max_logits``, for prefill."""
    return jit.KernelSpec(
        "mla_combine",
        (
            ("DTYPE", DTYPES[dtype]),
            ("MAX_LOGITS", max_logits),
            ("SPLITS_AT_ONCE", mapping.splits_at_once),
            ("SPLIT_GROUPS", mapping.split_groups),
            ("ROWS_AT_ONCE", mapping.rows_at_once),
        ),
        threads=mapping.threads,
        smem_bytes=mapping.split_groups * _PARTIAL_BYTES if mapping.split_groups > 1 else 0,
    )


def specs(dtype: str, max_logits: bool = False) -> list[jit.KernelSpec]:
    """The variants for one dtype."""
    return [spec(dtype, mapping, max_logits) for mapping in MAPPINGS]


def launch_shape(
    rows: int, b: int, num_parts: int, by_request: bool, batch_invariant: bool
) -> tuple[tuple[int, int, int], Mapping]:
    """Grid and mapping: as many warps for a row as still let all rows run at once.

    A batch-invariant call always has the same mapping, because the order of its sums may not depend on the
    batch.
    """
    mapping = _BATCH_INVARIANT
    if not batch_invariant:
        split_rows = min(b, num_parts) * rows
        fitting = (mapping for mapping, most in _UP_TO_ROWS.items() if split_rows <= most)
        mapping = next(fitting, _MORE_ROWS)
    candidates = b if by_request else num_parts
    return (ceil_div(rows, mapping.rows_per_cta), candidates, 1), mapping


class PreparedCombine:
    """The splits of a call in scratch, and the launch of their combine.

    Attributes
    ----------
    max_splits : int
        How many splits scratch has room for; 0: no request can be split.
    scratch_bytes : int
    lse_accum, o_scale, max_accum : int
        Where lse_accum_log2, o_scale_log2 and, in prefill, max_accum_log2 begin in scratch, after o_accum.
    launch : callable or None
        Takes the members of `PARAMS` that change; None if no request can be split.
    """

    def __init__(
        self,
        call: DenseDecodeCall | SparseCall,
        dtype: str,
        max_blocks: int,
        capturing: Callable[[], bool],
        max_logits: bool = False,
    ) -> None:
        """Load the kernel of a call whose requests have at most ``max_blocks`` blocks.

        ``capturing`` is as in `rawmla.jit.get_kernel`.
        """
        self.max_splits = max_splits(call.num_parts, call.b, max_blocks, call.batch_invariant)
        split_rows = self.max_splits * call.s_q * call.h_q
        self.scratch_bytes = split_rows * split_row_bytes(dtype, max_logits)
        self.lse_accum = split_rows * D_V * _VALUE_BYTES[dtype]
        self.o_scale = self.lse_accum + 4 * split_rows
        self.max_accum = self.lse_accum + 4 * split_rows * _SCALARS
        self.launch: Callable[..., bool] | None = None
        if not self.max_splits:
            return
        by_request = call.batch_invariant or call.b <= call.num_parts
        grid, mapping = launch_shape(
            call.s_q * call.h_q, call.b, call.num_parts, by_request, call.batch_invariant
        )
        kernel = jit.get_kernel(spec(dtype, mapping, max_logits), call.device, capturing=capturing)
        struct = PARAMS[max_logits]
        params = struct.pack(
            **stride_params(out=call.out_strides),
            **fields(call, "b", "s_q", "h_q", "object_layout"),
            max_splits=self.max_splits,
            by_request=by_request,
            **(fields(call, "lse_factor", "uniform") if max_logits else {}),
        )
        self.launch = kernel.prepare(grid, params, struct.changing, pdl=True).launch
