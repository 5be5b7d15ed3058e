"""Host side of cuda_src/kernels/mla_combine.cu: merging the pieces of split requests."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from .. import jit
from . import mla_metadata as metadata
from .common import D_V, DTYPES, addresses, ceil_div

__all__ = [
    "MAPPINGS",
    "Mapping",
    "launch_shape",
    "prepare",
    "scalar_offsets",
    "slot_row_bytes",
    "spec",
    "specs",
]

# Params of mla_combine.cu and its first members, which are _POINTERS; by whether the call has max_logits
_PARAMS = {False: struct.Struct("<8Q3q6i"), True: struct.Struct("<10Q3q6if3i")}
_POINTERS = {False: addresses(8), True: addresses(10)}
_PIECE_BYTES = {"bfloat16": 2, "float16": 4}  # of a number in o_accum, by the dtype of the call
_SCALARS = 3  # lse_accum_log2 and two o_scale_log2; max_accum_log2 is another one
_PARTIAL_BYTES = (D_V + 4) * 4  # of a group, in Partials of mla_combine.cu


class Mapping(NamedTuple):
    """How the kernel shares rows and pieces among warps: its defines of these names."""

    piece_groups: int
    pieces_at_once: int
    rows_at_once: int = 1

    @property
    def rows_per_cta(self) -> int:
        """Query rows that one CTA merges."""
        return 4 * self.rows_at_once if self.piece_groups == 1 else 1

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 64 * self.piece_groups * self.rows_per_cta // self.rows_at_once


_BATCH_INVARIANT = Mapping(1, 4)
_UP_TO_ROWS = {
    Mapping(8, 8): 132,
    Mapping(8, 4): 264,
    Mapping(4, 6): 528,
    _BATCH_INVARIANT: 2112,
}  # so many rows of split requests, which then all run at once
_MORE_ROWS = Mapping(1, 2, 2)
MAPPINGS = (*_UP_TO_ROWS, _MORE_ROWS)


def slot_row_bytes(dtype: str, max_logits: bool = False) -> int:
    """Bytes of scratch for a query row of a piece: cuda_src/mla/pieces.cuh."""
    return D_V * _PIECE_BYTES[dtype] + 4 * (_SCALARS + max_logits)


def scalar_offsets(dtype: str, slot_rows: int) -> tuple[int, int, int]:
    """Where lse_accum_log2, o_scale_log2 and max_accum_log2, if there is one, begin in scratch for that many
    rows of pieces, behind o_accum.
    """
    lse_accum = slot_rows * D_V * _PIECE_BYTES[dtype]
    return lse_accum, lse_accum + 4 * slot_rows, lse_accum + 4 * slot_rows * _SCALARS


@cache
def spec(dtype: str, mapping: Mapping, max_logits: bool = False) -> jit.KernelSpec:
    """The variant of a dtype and a mapping, for decoding or, with `max_logits`, for prefill."""
    return jit.KernelSpec(
        "mla_combine",
        (
            ("DTYPE", DTYPES[dtype]),
            ("MAX_LOGITS", max_logits),
            ("SPLITS_AT_ONCE", mapping.pieces_at_once),
            ("SPLIT_GROUPS", mapping.piece_groups),
            ("ROWS_AT_ONCE", mapping.rows_at_once),
        ),
        threads=mapping.threads,
        smem_bytes=mapping.piece_groups * _PARTIAL_BYTES if mapping.piece_groups > 1 else 0,
    )


def specs(dtype: str, max_logits: bool = False) -> list[jit.KernelSpec]:
    """The variants for one dtype."""
    return [spec(dtype, mapping, max_logits) for mapping in MAPPINGS]


def launch_shape(
    rows: int, b: int, num_parts: int, by_request: bool, batch_invariant: bool
) -> tuple[tuple[int, int, int], Mapping]:
    """(grid, mapping): as many warps per row as still run all rows at once.

    A batch-invariant sum must not be grouped by the batch: always one mapping.
    """
    mapping = _BATCH_INVARIANT
    if not batch_invariant:
        split_rows = min(b, num_parts) * rows
        fitting = (mapping for mapping, most in _UP_TO_ROWS.items() if split_rows <= most)
        mapping = next(fitting, _MORE_ROWS)
    candidates = b if by_request else num_parts
    return (ceil_div(rows, mapping.rows_per_cta), candidates, 1), mapping


def prepare(
    *,
    device: int,
    dtype: str,
    b: int,
    s_q: int,
    h_q: int,
    num_parts: int,
    slots: int,
    object_layout: bool,
    batch_invariant: bool,
    out_strides: tuple[int, ...],
    capturing: Callable[[], bool],
    lse_factor: float | None = None,
    uniform: metadata.UniformPlan = metadata.NOT_UNIFORM,
) -> Callable[..., bool] | None:
    """A launch of the combine on pointers (those of Params in mla_combine.cu), or None without slots.

    ``capturing`` is as in `rawmla.jit.get_kernel`. ``lse_factor`` and ``uniform``, of a prefill
    call, are those of Params.
    """
    if not slots:
        return None
    by_request = batch_invariant or b <= num_parts
    grid, mapping = launch_shape(s_q * h_q, b, num_parts, by_request, batch_invariant)
    max_logits = lse_factor is not None
    kernel = jit.get_kernel(spec(dtype, mapping, max_logits), device, capturing=capturing)
    pointers = _POINTERS[max_logits]
    params = _PARAMS[max_logits].pack(
        *[0] * (pointers.size // 8), *out_strides, b, s_q, h_q, slots, object_layout, by_request,
        *([lse_factor, *uniform] if max_logits else []),
    )  # fmt: skip
    return kernel.prepare(grid, params, pointers, pdl=True).launch
