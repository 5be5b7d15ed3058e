"""The examples of docs/flex.md on the GPU, against float64 with all scores in memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from flex_page import CUPY_EXAMPLES, EXAMPLES, reference, run
from full_cases import full_unless
from gpu_support import cupy, torch

import rawmla
from kit.mha import problems_of_out

TIMES = {"softcap": 4}  # tanh is approximate
IN_EVERY_RUN = ("documents", "ALiBi", "softcap", "gate")

# Documents and tables take more registers than there are: docs/flex.md says so.
pytestmark = pytest.mark.filterwarnings("ignore:rawmla. .* runs slower:RuntimeWarning")


def check(name: str, out: Any, want: Any, dtype: str) -> None:
    assert out.shape == want.shape
    problems = problems_of_out(out, want, dtype, TIMES.get(name, 1))
    assert not problems, problems


@pytest.mark.parametrize("name", full_unless(lambda name: name in IN_EVERY_RUN, EXAMPLES))
def test_example(name: str) -> None:
    """Functions that are traced ahead of the call give the same bits."""
    torch.manual_seed(0)
    names, call = run(name)
    check(name, names["out"], reference(call), "bfloat16")
    score = None if call.score_mod is None else rawmla.trace_mod(call.score_mod, "score_mod")
    mask = copy.copy(call.block_mask)
    if mask is not None:
        mask.mask_mod = rawmla.trace_mod(mask.mask_mod, "mask_mod")
    out = rawmla.flex_attention(call.query, call.key, call.value, score, mask)
    assert torch.equal(out, names["out"])


def test_pages_hold_the_same_attention() -> None:
    torch.manual_seed(0)
    paged, _ = run("paged")
    torch.manual_seed(0)
    _, plain = run("ALiBi")
    check("paged", paged["out"], reference(plain), "bfloat16")


@pytest.mark.parametrize("name", CUPY_EXAMPLES)
def test_cupy_example(name: str) -> None:
    """The Python function of this name says what is wanted."""
    torch.manual_seed(0)
    twin, call = run(name, dtype=torch.float16)
    names = {"rawmla": rawmla, "H": twin["H"], "L": twin["L"]}
    torch.cuda.synchronize()
    names |= {x: cupy.from_dlpack(twin[x]) for x in ("q", "k", "v")}
    exec(compile(CUPY_EXAMPLES[name], "docs/flex.md", "exec"), names)
    assert isinstance(names["out"], cupy.ndarray)
    cupy.cuda.get_current_stream().synchronize()
    check(name, torch.from_dlpack(names["out"]), reference(call), "float16")
