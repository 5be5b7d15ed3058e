"""Dense attention and its combine, run by their kernels on the emulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_mha_sanitizer import CASES, RAGGED

from kit.mha import MhaCase, make_mha_inputs

if TYPE_CHECKING:
    from emulator import Emulator

pytest.importorskip("torch")

SEEDS = range(2, 6)


def check(case: MhaCase) -> None:
    from emulator import cases

    cases.check("mha", case)


def kernels(emulator: Emulator) -> list[str]:
    """Names of the kernels that ran."""
    return [label.partition("[")[0] for label in emulator.launched]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_calls(emulator: Emulator, case: MhaCase) -> None:
    """They reach every role and path of the kernel."""
    check(case)
    assert "mha_forward" in kernels(emulator)


@pytest.mark.parametrize(
    "case",
    (
        MhaCase(b=2, s_q=150, s_k=300, h_q=2, h_kv=2, causal=True, layout="heads"),
        MhaCase(**RAGGED, h_q=8, h_kv=2, causal=True),
        MhaCase(b=1, s_q=200, s_k=300, h_q=2, h_kv=2, d_qk=64, d_v=64, causal=True),
    ),
    ids=lambda case: case.id,
)
def test_other_schedules(emulator: Emulator, case: MhaCase) -> None:
    for emulator.seed in SEEDS:
        check(case)


@pytest.mark.parametrize("causal", (False, True))
def test_more_tiles_than_sms(emulator: Emulator, causal: bool) -> None:
    """Tiles that a CTA takes one after the other, by turns, or causal ones from the counter."""
    check(MhaCase(b=9, s_q=5, s_k=130, h_q=2, h_kv=2, causal=causal))


def test_splits(emulator: Emulator) -> None:
    """Of the keys of few tiles."""
    emulator.sm_count = 8
    check(MhaCase(b=1, s_q=40, s_k=2100, h_q=1, h_kv=1, causal=True, sink="float32"))
    assert kernels(emulator) == ["mha_forward", "mha_combine"]


@pytest.mark.parametrize("more", ({}, {"d_qk": 64, "d_v": 64}), ids=("d 128", "d 64"))
def test_references_rise(emulator: Emulator, more: dict[str, Any]) -> None:
    """Scores grow from key to key, to many times what the first block has."""
    import torch
    from emulator import cases

    inputs = make_mha_inputs(MhaCase(b=1, s_q=600, s_k=1100, h_q=1, h_kv=1, **more), "cpu")
    inputs.q.mul_(4)
    inputs.k.mul_(torch.linspace(0.1, 3, 1100).bfloat16()[:, None, None])
    cases.check_mha_inputs(inputs)
