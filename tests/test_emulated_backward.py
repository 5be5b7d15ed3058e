"""Gradients of dense and flex attention, computed by their kernels on the emulated device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from full_cases import full_unless
from test_flex_backward_sanitizer import CASES as FLEX_CASES
from test_mha_backward_sanitizer import CASES as MHA_CASES

from kit.flex import FlexCase
from kit.mha import MhaCase

if TYPE_CHECKING:
    from emulator import Emulator

pytest.importorskip("torch")

WIDE = MhaCase(b=1, s_q=150, s_k=200, h_q=2, h_kv=1, d_qk=192, d_v=128, causal=True)
BY_PRODUCT = MhaCase(
    b=1, s_q=100, s_k=150, h_q=1, h_kv=1, d_qk=256, d_v=256, dtype="float16", window=(60, 10)
)
SMALL = (*MHA_CASES, (WIDE, "out"), (BY_PRODUCT, "both"))
MAIN_KERNELS = ("mha_backward[", "mha_backward_by_product[")
SEEDS = full_unless(lambda seeds: 2 in seeds, ((2, 3), (4, 5)))


def check(family: str, case: MhaCase | FlexCase, of: str, deterministic: bool = False) -> None:
    from emulator import cases

    cases.check(family, case, of=of, deterministic=deterministic)


@pytest.mark.parametrize(
    "which",
    full_unless(lambda which: which[0] % 2 == which[1], itertools.product(range(len(SMALL)), (False, True))),
    ids=lambda which: "-".join([SMALL[which[0]][0].id, SMALL[which[0]][1], str(which[1])]),
)
def test_small_calls(emulator: Emulator, which: tuple[int, bool]) -> None:
    """Every run takes every second case in a fixed order, and the others in any."""
    (case, of), deterministic = SMALL[which[0]], which[1]
    check("mha_backward", case, of, deterministic)
    assert any(label.startswith(MAIN_KERNELS) for label in emulator.launched)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize(
    "case", (MHA_CASES[1][0], MHA_CASES[3][0], WIDE, BY_PRODUCT), ids=lambda case: case.id
)
def test_other_schedules(
    emulator: Emulator, case: MhaCase, deterministic: bool, seeds: tuple[int, ...]
) -> None:
    for emulator.seed in seeds:
        check("mha_backward", case, "out", deterministic)


@pytest.mark.parametrize(
    "which",
    full_unless(lambda which: FLEX_CASES.index(which) % 3 != 2, FLEX_CASES),
    ids=lambda which: "-".join([which[0].id, which[1], str(which[2])]),
)
def test_small_flex_calls(emulator: Emulator, which: tuple[FlexCase, str, bool]) -> None:
    case, of, deterministic = which
    check("flex_backward", case, of, deterministic)
    assert any(label.startswith(MAIN_KERNELS) for label in emulator.launched)


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize(
    ("score", "deterministic"),
    (
        ("head scale", False),
        ("query scale", True),
        pytest.param("head scale", True, marks=pytest.mark.full),
        pytest.param("query scale", False, marks=pytest.mark.full),
    ),
)
def test_other_schedules_of_flex(
    emulator: Emulator, deterministic: bool, score: str, seeds: tuple[int, ...]
) -> None:
    case = FlexCase(b=1, h_q=2, h_kv=1, s_q=200, s_k=300, mask="documents", score=score)
    for emulator.seed in seeds:
        check("flex_backward", case, "both", deterministic)


@pytest.mark.parametrize("form", ("both lists", "by columns"))
def test_a_block_named_twice_ends(emulator: Emulator, form: str) -> None:
    """In a fixed order a tile waits until others have added: a list of the user's may count them wrong."""
    import torch

    import rawmla

    n = 384
    q, k, v, dout = torch.randn(4, 1, 1, n, 32).half()
    counts = torch.tensor([[[1, 1, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    if form == "both lists":
        lists = {"full_kv_num_blocks": counts, "full_kv_indices": indices}
        mask = rawmla.BlockMask.from_kv_blocks(counts, indices, **lists, seq_lengths=(n, n))
    else:
        q_counts = torch.tensor([[[3, 1, 1]]], dtype=torch.int32)
        q_indices = torch.tensor([[[[0, 0, 1], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
        mask = rawmla.BlockMask((n, n), counts, indices, q_num_blocks=q_counts, q_indices=q_indices)
    with emulator.installed():
        out, lse = rawmla.flex_attention(q, k, v, None, mask, return_lse=True)
        gradients = rawmla.flex_attention_backward(dout, q, k, v, out, lse, None, mask, deterministic=True)
    assert all(x.isfinite().all() for x in gradients[:3])


def test_keys_that_no_block_lists(emulator: Emulator) -> None:
    """A tile of them waits for its copies before it ends: the next CTA has the same shared memory."""
    import torch

    import rawmla

    n = 512
    q, k, v, dout = torch.randn(4, 1, 1, n, 32).half()
    counts, indices = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    mask = rawmla.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(n, n))
    for emulator.seed in range(2, 8):
        with emulator.installed():
            out, lse = rawmla.flex_attention(q, k, v, None, mask, return_lse=True)
            _, dk, dv, *_ = rawmla.flex_attention_backward(dout, q, k, v, out, lse, None, mask)
        for gradient in (dk, dv):
            assert gradient[..., :128, :].any() and not gradient[..., 128:, :].any()
