"""Calls of dense attention in the GPU tests: of a case's inputs, through the function that takes them."""

from __future__ import annotations

from typing import Any

from gpu_support import assert_same_bits, torch

import rawmla
from kit.mha import MhaInputs, covered_rows

__all__ = [
    "assert_same_results",
    "assert_untouched_around",
    "attend",
    "function_and_arguments",
    "out_buffer",
]


def function_and_arguments(inputs: MhaInputs, **more: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The public function of a case, and what it is called with; `more` are further keywords."""
    case = inputs.case
    keywords = {**inputs.options(), **more}
    if inputs.cu_seqlens_q is None:
        return rawmla.flash_attn_func, (inputs.q, inputs.k, inputs.v), keywords
    keywords = {"seqused_q": inputs.seqused_q, "seqused_k": inputs.seqused_k, **keywords}
    longest_q, longest_k = max(case.q_lengths or (0,)), max(case.k_lengths or (0,))
    segments = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, longest_q, longest_k)
    if not case.packed:
        return rawmla.flash_attn_varlen_func, (inputs.q, inputs.k, inputs.v, *segments), keywords
    if not case.packed.endswith("4"):
        keywords["head_dim_qk"] = case.d_qk
    if case.packed.startswith("qkv"):
        arguments = (inputs.parts, inputs.cu_seqlens_q, longest_q)
        return rawmla.flash_attn_varlen_qkvpacked_func, arguments, keywords
    return rawmla.flash_attn_varlen_kvpacked_func, (inputs.q, inputs.parts, *segments), keywords


def attend(inputs: MhaInputs, **more: Any) -> tuple[Any, Any]:
    """out and lse."""
    function, arguments, keywords = function_and_arguments(inputs, **more)
    return function(*arguments, **keywords)


CANARY = -7.0


def out_buffer(inputs: MhaInputs) -> tuple[Any, Any]:
    """A buffer of canaries, and a slice of it in all dimensions, full of NaN, to be given as `out`."""
    shape = (*inputs.q.shape[:-1], inputs.case.d_v)
    aligned = -(-shape[-1] // 8) * 8
    buffer = torch.full(
        (*[n + 2 for n in shape[:-1]], aligned + 16), CANARY, dtype=inputs.q.dtype, device=inputs.q.device
    )
    given = buffer[(*[slice(1, n + 1) for n in shape[:-1]], slice(8, 8 + shape[-1]))]
    given.fill_(float("nan"))
    return buffer, given


def assert_untouched_around(buffer: Any, given: Any) -> None:
    """Raise if anything but `given` was written; spoils `given`."""
    given.fill_(CANARY)
    assert bool((buffer == CANARY).all()), "the call wrote outside `out`"


def assert_same_results(name: str, inputs: MhaInputs, got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    """Raise unless the rows of requests have the same bits."""
    rows = covered_rows(inputs)
    for result, one, wanted in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(f"{name}: {inputs.case.id} {result}", one[rows], wanted[rows])
