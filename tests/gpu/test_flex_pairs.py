"""Score functions with pairs of head dimensions, forward and backward, and biases in every order of indices.

Masks, texts, dtypes, lengths, heads, batches, blocks and layouts go round by draws that are always the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
from full_cases import full_unless
from gpu_support import torch
from test_flex_matrix import BATCHES, BLOCKS, GRADIENTS, HEADS, LAYOUTS, VARIANTS

from kit.flex import BIASES, MASKS, SCORES, FlexCase, check_flex
from kit.flex_backward import make_flex_backward_inputs, make_flex_gradients
from operations.flex import attend
from operations.flex_backward import BackwardInputs, backward_of, check_backward

# Many pairs of functions take more registers than there are: docs/flex.md says so.
pytestmark = pytest.mark.filterwarnings("ignore:rawmla. .* runs slower:RuntimeWarning")

DIMS = tuple(variant.dims for variant in VARIANTS)
LENGTHS = ((37, 37), (64, 127), (277, 256), (1, 277), (128, 257), (200, 64), (31, 130))
DTYPES = ("bfloat16", "float16")
FORMS = ("python", "cuda")
SEED = 2  # with which each pair of head dimensions, each mask and each form meet all dtypes and layouts


class Pair(NamedTuple):
    """A case, the form of its functions, and what gradients are of."""

    case: FlexCase
    form: str
    of: str

    @property
    def id(self) -> str:
        case = self.case
        return f"{case.d_qk}x{case.d_v} {case.score}, {case.mask} {case.dtype} {self.form}"


def pairs() -> list[Pair]:
    """Each score function with three pairs of head dimensions, and each further order of a bias with one."""
    scores = [*list(SCORES) * 3, *sorted(BIASES.keys() - SCORES.keys())]
    draw = random.Random(SEED)

    def around(values: Iterable[Any]) -> Iterator[Any]:
        """Each value as often as the others, in a random order."""
        known = list(values)
        order = known * -(-len(scores) // len(known))
        draw.shuffle(order)
        return iter(order)

    heads, batches, lengths, dtypes, blocks = map(around, (HEADS, BATCHES, LENGTHS, DTYPES, BLOCKS))
    separate, layouts, forms, gradients = map(around, ((False, True), LAYOUTS, FORMS, GRADIENTS))
    masks = list(MASKS)
    made = []
    for number, score in enumerate(scores):
        place = number + number // len(SCORES)
        d_qk, d_v = DIMS[place % len(DIMS)]
        (h_q, h_kv), (b, b_kv), (s_q, s_k) = next(heads), next(batches), next(lengths)
        case = FlexCase(
            b=b,
            b_kv=b_kv,
            h_q=h_q,
            h_kv=h_kv,
            s_q=s_q,
            s_k=s_k,
            d_qk=d_qk,
            d_v=d_v,
            dtype=next(dtypes),
            score=score,
            mask=masks[(place + number // len(DIMS)) % len(masks)],
            block=next(blocks),
            separate=next(separate),
            layout=next(layouts),
            seed=number,
        )
        made.append(Pair(case, next(forms), next(gradients)))
    return made


def quick(pair: Pair) -> bool:
    """Every twentieth bias beyond the score functions, which other files run."""
    return pair.case.seed >= 3 * len(SCORES) and pair.case.seed % 20 == 0


@pytest.mark.parametrize("pair", full_unless(quick, pairs()), ids=lambda pair: pair.id)
def test_pair(pair: Pair) -> None:
    """Within the bounds of a dtype's products; memory that no result may depend on is NaN."""
    inputs = make_flex_backward_inputs(pair.case)
    with torch.no_grad():
        out, lse, _ = attend(inputs, pair.form)
    check_flex(inputs, (out, lse, None))
    call = BackwardInputs(inputs, make_flex_gradients(inputs, pair.of), (out, lse))
    check_backward(call, backward_of(call, pair.form))
