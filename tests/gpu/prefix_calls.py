"""Calls of prefix prefill in the GPU tests: of a case's inputs, into buffers of canaries."""

from __future__ import annotations

from typing import Any

from gpu_support import assert_same_bits, torch

import rawmla
from kit.prefix import PrefixCase, PrefixInputs, check_prefix, make_prefix_inputs, written_rows

__all__ = ["Target", "assert_same_rows", "attend", "checked", "readdressed", "run_cases"]

CANARY = 0x5A  # finite in every dtype of o


def _bytes_of(array: Any) -> Any:
    """All memory of an array, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=array.device).set_(array.untyped_storage())


class Target:
    """An o, with canaries around and between its rows, and in those that are not to be written; the others
    are NaN.

    `apart` leaves room between tokens and heads, and before the first.
    """

    def __init__(self, inputs: PrefixInputs, *, apart: bool = True) -> None:
        case = inputs.case
        tokens, heads, d = inputs.q.shape
        if case.out_scale is None:
            dtype = inputs.q.dtype
        else:
            name = "float8_e4m3fn" if case.bytes_dtype == "float8" else case.bytes_dtype
            dtype = getattr(torch, name)
        columns = -(-d // 16) * 16 + (16 if apart else 0)
        first = 16 if apart else 0
        shape = (tokens + 2 * apart, heads + apart, columns)
        self._whole = torch.empty(shape, dtype=dtype, device=inputs.q.device)
        _bytes_of(self._whole).fill_(CANARY)
        rows = slice(1, 1 + tokens) if apart else slice(None)
        self.o = self._whole[rows, :heads, first : first + d]
        self._written = written_rows(inputs)
        self._fill(0xFF)

    def _fill(self, byte: int) -> None:
        """The rows that are written; 0xff is NaN in every dtype."""
        if self.o.element_size() == 1:
            self.o.view(torch.uint8)[self._written] = byte
        else:
            self.o.view(torch.int16)[self._written] = -1 if byte == 0xFF else byte << 8 | byte

    def assert_untouched_around(self) -> None:
        """Raise if anything but the rows to be written was; spoils these."""
        self._fill(CANARY)
        assert bool((_bytes_of(self._whole) == CANARY).all()), "the call wrote outside the rows of o"


def attend(inputs: PrefixInputs, o: Any = None, **changes: Any) -> Any:
    """o of a call, which is a contiguous one of its own if none is given."""
    if o is None:
        o = Target(inputs, apart=False).o
    result = rawmla.context_attention_fwd(**{**inputs.keywords(o), **changes})
    assert result is o
    return o


def checked(inputs: PrefixInputs, *, apart: bool = True, want: Any = None, **changes: Any) -> Any:
    """The rows that a call wrote, after they and their surroundings were looked at."""
    target = Target(inputs, apart=apart)
    attend(inputs, target.o, **changes)
    check_prefix(inputs, target.o, want)
    if target.o.element_size() > 1:
        written = target.o[written_rows(inputs)]
    else:
        written = target.o.view(torch.uint8)[written_rows(inputs)]
    target.assert_untouched_around()
    return written


def assert_same_rows(name: str, inputs: PrefixInputs, got: Any, want: Any) -> None:
    """Raise unless the rows that a call writes have the same bits in two o."""
    rows = written_rows(inputs)
    if got.element_size() == 1:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert_same_bits(f"{name}: {inputs.case.id}", got[rows], want[rows])


def readdressed(inputs: PrefixInputs, k_cache: Any) -> Any:
    """The table for the same blocks in another cache of the same strides; garbage stays garbage."""
    table = inputs.b_loc
    if inputs.case.table != "pointers":
        return table
    return torch.where(table > 0, table + (k_cache.data_ptr() - inputs.k_cache.data_ptr()), table)


def run_cases(cases: Any) -> None:
    """Check every case, and go on after a mismatch, so that one run shows the whole pattern."""
    failures: list[str] = []
    case: PrefixCase
    for case in cases:
        try:
            checked(make_prefix_inputs(case))
            torch.cuda.synchronize()
        except AssertionError as error:
            failures.append(str(error) if case.id in str(error) else f"{case.id}: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"
