"""Every score function and every mask with every pair of head dimensions, forward and backward; and biases
in every order of their indices.

Each pair of head dimensions takes the score functions in turn, and the masks beside them at another pace, so
that a pair meets all of both; texts, dtypes, lengths, heads, batches, blocks and layouts go round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from full_cases import full_unless
from gpu_support import torch
from test_flex_matrix import BATCHES, BLOCKS, HEADS, LAYOUTS, VARIANTS

from kit.flex import BIASES, MASKS, SCORES, FlexCase, check_flex
from kit.flex_backward import make_flex_backward_inputs, make_flex_gradients
from operations.flex import attend
from operations.flex_backward import BackwardInputs, backward_of, check_backward
from rawmla.kernels.common import padded

# Many pairs of functions take more registers than there are: docs/flex.md says so.
pytestmark = pytest.mark.filterwarnings("ignore:rawmla. .* runs slower:RuntimeWarning")

DIMS = tuple(variant.dims for variant in VARIANTS)
LENGTHS = ((37, 37), (64, 127), (277, 256), (1, 277), (128, 257), (200, 64), (31, 130))
GRADIENTS = ("out", "both", "lse")


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
    """A score function for each pair of head dimensions, then a bias for each order of indices."""
    masks = list(MASKS)
    # Pairs that are padded alike have kernels in common.
    rows = list(dict.fromkeys((padded(d_qk), padded(d_v)) for d_qk, d_v in DIMS))
    chosen = []
    for d_qk, d_v in DIMS:
        row = rows.index((padded(d_qk), padded(d_v)))
        chosen += [
            (score, masks[(number + 3 * row) % len(masks)], (d_qk, d_v), number + row)
            for number, score in enumerate(SCORES)
        ]
    chosen += [
        (score, masks[number % len(masks)], DIMS[number % len(DIMS)], number // len(DIMS))
        for number, score in enumerate(sorted(BIASES.keys() - SCORES.keys()))
    ]
    made = []
    for number, (score, mask, dims, turn) in enumerate(chosen):

        def around(values: Any, number: int = number) -> Any:
            # Steps of 37 between pairs of head dimensions: with 38, functions would meet half of these.
            return values[(number - number // len(SCORES)) % len(values)]

        (h_q, h_kv), (b, b_kv), (s_q, s_k) = around(HEADS), around(BATCHES), around(LENGTHS)
        case = FlexCase(
            b=b,
            b_kv=b_kv,
            h_q=h_q,
            h_kv=h_kv,
            s_q=s_q,
            s_k=s_k,
            d_qk=dims[0],
            d_v=dims[1],
            dtype=("bfloat16", "float16")[turn // 2 % 2],
            score=score,
            mask=mask,
            block=around(BLOCKS),
            separate=bool(number // 4 % 2),
            layout=around(LAYOUTS),
            seed=number,
        )
        made.append(Pair(case, ("python", "cuda")[turn % 2], around(GRADIENTS)))
    return made


def quick(pair: Pair) -> bool:
    """Every eighth bias beyond the score functions, which other files run."""
    return pair.case.seed >= len(DIMS) * len(SCORES) and pair.case.seed % 8 == 0


@pytest.mark.parametrize("pair", full_unless(quick, pairs()), ids=lambda pair: pair.id)
def test_pair(pair: Pair) -> None:
    """Within the bounds of a dtype's products; memory that no result may depend on is NaN."""
    inputs = make_flex_backward_inputs(pair.case)
    with torch.no_grad():
        out, lse, _ = attend(inputs, pair.form)
    check_flex(inputs, (out, lse, None))
    call = BackwardInputs(inputs, make_flex_gradients(inputs, pair.of), (out, lse))
    check_backward(call, backward_of(call, pair.form))
