"""Flex attention over lengths, heads, batches, head dimensions, blocks and layouts.

Each pair of head dimensions has a function and a mask of its own, so that a pair costs one kernel, and meets
every pair of lengths; heads, batches, blocks and layouts go round. All functions and masks are in
test_flex_functions.py. The cases of one kernel are one test, which goes on after a mismatch, so that one run
shows the whole pattern.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
from full_cases import full_unless
from gpu_support import torch

from kit.flex import FlexCase, check_flex
from operations.dense import assert_untouched_around
from operations.flex import attend, created_mask, out_buffer
from operations.flex_backward import backward_inputs, backward_of, check_backward

KEYS = (37, 64, 127, 256, 257, 277, 1023, 1025, 2048)
QUERIES = {"same": 1, "half": 2, "eighth": 8, "one": 0}  # the part of the keys' number
HEADS = ((4, 4), (4, 2), (4, 1), (16, 4))
BATCHES = ((2, 2), (3, 1), (5, 1))
BLOCKS = ((16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (128, 256), (256, 128), (32, 64))
GRADIENTS = ("out", "lse", "both")
LAYOUTS = ("plain", "slice", "tokens")
SEED = 2  # with which all pairs occur


class Variant(NamedTuple):
    """What chooses a kernel."""

    dims: tuple[int, int]
    dtype: str
    score: str
    mask: str
    form: str
    max_scores: bool


VARIANTS = (
    Variant((16, 16), "bfloat16", "head scale", "causal", "python", False),
    Variant((17, 17), "float16", "alibi", "window", "cuda", True),
    Variant((64, 64), "bfloat16", "", "documents", "python", False),
    Variant((94, 94), "float16", "relative table", "prefix", "cuda", False),
    Variant((121, 121), "bfloat16", "bias h q k", "random", "python", True),
    Variant((128, 128), "float16", "softcap", "causal", "python", True),
    Variant((64, 32), "bfloat16", "square", "checkered", "cuda", False),
    Variant((32, 64), "float16", "distance", "per head", "python", False),
    Variant((64, 128), "bfloat16", "silu", "padding", "cuda", True),
    Variant((256, 256), "float16", "", "per batch", "python", False),
)


def cases_of(variant: Variant) -> list[tuple[FlexCase, str, bool, bool]]:
    """The cases of a kernel, with the name of the number of their query tokens, whether out is given, and
    whether rawmla makes the block mask.
    """
    draw = random.Random(f"{SEED} {variant}")

    def around(values: Sequence[Any]) -> Any:
        """Each value as often as the others, in a random order."""
        count = len(KEYS) * len(QUERIES)
        order = list(values) * -(-count // len(values))
        draw.shuffle(order)
        return iter(order)

    heads, batches, blocks, layouts = map(around, (HEADS, BATCHES, BLOCKS, LAYOUTS))
    given, created, separate = (around((False, True)) for _ in range(3))
    cases = []
    for s_k, (length, part) in product(KEYS, QUERIES.items()):
        (h_q, h_kv), (b, b_kv) = next(heads), next(batches)
        case = FlexCase(
            b=b,
            b_kv=b_kv,
            h_q=h_q,
            h_kv=h_kv,
            s_q=s_k // part if part else 1,
            s_k=s_k,
            d_qk=variant.dims[0],
            d_v=variant.dims[1],
            dtype=variant.dtype,
            score=variant.score,
            mask=variant.mask,
            block=next(blocks),
            separate=next(separate),
            layout=next(layouts),
            seed=len(cases),
        )
        cases.append((case, length, next(given), next(created)))
    return cases


@pytest.mark.parametrize(
    "variant",
    full_unless(lambda variant: variant.dims == (128, 128), VARIANTS),
    ids=lambda variant: f"{variant.dims[0]}x{variant.dims[1]}-{variant.dtype}",
)
def test_matrix(variant: Variant) -> None:
    """Within the bounds of a dtype's products; memory that no result may depend on is NaN."""
    failures: list[str] = []
    cases = cases_of(variant)
    for (case, _, out_given, created), of in zip(cases, cycle(GRADIENTS), strict=False):
        call = backward_inputs(case, of)
        inputs = call.inputs
        try:
            buffer, given = out_buffer(inputs) if out_given else (None, None)
            more = {"block_mask": created_mask(inputs, variant.form)} if created else {}
            with torch.no_grad():
                got = attend(inputs, variant.form, max_scores=variant.max_scores, out=given, **more)
            assert given is None or got[0] is given
            assert (got[2] is not None) == variant.max_scores
            torch.cuda.synchronize()
            check_flex(inputs, got, plain=case.s_q > 1)
            if buffer is not None:
                assert_untouched_around(buffer, given)
            check_backward(call, backward_of(call, variant.form, **more))
        except AssertionError as error:
            failures.append(f"created={created} gradient of {of}: {error}")
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {len(cases)} cases failed:\n{shown}"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_without_functions(batch: tuple[int, int], heads: tuple[int, int]) -> None:
    """Everything is attended."""
    lengths = ((37, 37), (128, 1025), (1, 277), (1023, 64))
    for (layout, (s_q, s_k)), of in zip(product(LAYOUTS, lengths), cycle(GRADIENTS), strict=False):
        case = FlexCase(
            b=batch[0], b_kv=batch[1], h_q=heads[0], h_kv=heads[1], s_q=s_q, s_k=s_k, d_qk=128, d_v=128,
            layout=layout,
        )  # fmt: skip
        call = backward_inputs(case, of)
        check_flex(call.inputs, attend(call.inputs), plain=s_q > 1)
        check_backward(call, backward_of(call))
