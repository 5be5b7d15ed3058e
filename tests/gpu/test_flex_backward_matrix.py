"""Backward of flex attention over lengths, heads, batches, head dimensions, blocks and layouts.

The cases are those of test_flex_matrix.py: each pair of head dimensions has a function and a mask of its
own, and meets every pair of lengths. Gradients of out, of lse and of both go round. The cases of one kernel
are one test, which goes on after a mismatch, so that one run shows the whole pattern.
"""

from __future__ import annotations

from itertools import cycle, product

import pytest
from gpu_support import torch
from test_flex_matrix import BATCHES, HEADS, LAYOUTS, VARIANTS, Variant, cases_of

from kit.flex import FlexCase
from operations.flex_backward import backward_inputs, backward_of, check_backward

GRADIENTS = ("out", "lse", "both")


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda variant: f"{variant.dims[0]}x{variant.dims[1]}-{variant.dtype}"
)
def test_backward_matrix(variant: Variant) -> None:
    """Within the bounds of a dtype's products; memory that no result may depend on is NaN."""
    failures: list[str] = []
    cases = cases_of(variant)
    for (case, *_), of in zip(cases, cycle(GRADIENTS), strict=False):
        call = backward_inputs(case, of)
        try:
            got = backward_of(call, variant.form)
            torch.cuda.synchronize()
            check_backward(call, got)
        except AssertionError as error:
            failures.append(f"gradient of {of}: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_backward_without_functions(batch: tuple[int, int], heads: tuple[int, int]) -> None:
    """Everything is attended."""
    lengths = ((37, 37), (128, 1025), (1, 277), (1023, 64))
    for (layout, (s_q, s_k)), of in zip(product(LAYOUTS, lengths), cycle(GRADIENTS), strict=False):
        case = FlexCase(
            b=batch[0], b_kv=batch[1], h_q=heads[0], h_kv=heads[1], s_q=s_q, s_k=s_k, d_qk=128, d_v=128,
            layout=layout,
        )  # fmt: skip
        call = backward_inputs(case, of)
        check_backward(call, backward_of(call))
