"""Calls of flex attention in the GPU tests, of a case's inputs."""

from __future__ import annotations

from typing import Any

from gpu_support import assert_same_bits, torch

import rawmla
from kit.flex import FlexInputs

__all__ = [
    "assert_same_results",
    "assert_untouched_around",
    "attend",
    "created_mask",
    "out_buffer",
]

Results = tuple[Any, Any, Any]


def attend(inputs: FlexInputs, form: str = "python", *, max_scores: bool = False, **more: Any) -> Results:
    """out, lse and, if they are asked for, the largest scores; `more` are further keywords, or others."""
    keywords = {**inputs.keywords(form), **more}
    wanted = rawmla.AuxRequest(lse=True, max_scores=max_scores)
    out, aux = rawmla.flex_attention(inputs.q, inputs.k, inputs.v, return_aux=wanted, **keywords)
    return out, aux.lse, aux.max_scores


def created_mask(inputs: FlexInputs, form: str = "python", **more: Any) -> Any:
    """The block mask that rawmla makes of the case's mask, for as many requests and heads as it needs."""
    case, known = inputs.case, inputs.block_mask
    assert inputs.mask is not None and known is not None
    given = {"BLOCK_SIZE": case.block, "separate_full_blocks": case.separate, **more}
    batches, heads = known.kv_num_blocks.shape[:2]
    return rawmla.create_block_mask(inputs.mask.form(form), batches, heads, case.s_q, case.s_k, **given)


CANARY = -7.0


def out_buffer(inputs: FlexInputs) -> tuple[Any, Any]:
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


def assert_same_results(name: str, got: Any, want: Any) -> None:
    """Raise unless results that both calls gave have the same bits."""
    for result, one, wanted in zip(("out", "lse", "max_scores"), got, want, strict=False):
        if one is not None and wanted is not None:
            assert_same_bits(f"{name}: {result}", one, wanted)
