"""Attention and its gradients round no more often than their peers, on the emulated device."""

from __future__ import annotations

from typing import Any

import pytest
from emulator import Emulator
from full_cases import full_unless
from rounding import CASES, Case, assert_as_exact

import rawmla

torch = pytest.importorskip("torch")

QUICK = (
    *(((128, 128), "bfloat16", "dense"), ((192, 128), "bfloat16", "dense")),
    *(((256, 256), "float16", "dense"), ((64, 64), "float16", "flex"), ((192, 128), "bfloat16", "flex")),
)


@pytest.mark.parametrize("case", full_unless(lambda case: case in QUICK, CASES), ids=str)
def test_errors(emulator: Emulator, case: Case) -> None:
    assert_as_exact("cpu", case, tokens=192, seeds=1)


TOKENS, LARGEST = 300, 200


def attend_cache(q: Any, keys: Any, values: Any) -> Any:
    """Out of attention over a cache."""
    return rawmla.flash_attn_with_kvcache(q, keys[None, :, None], values[None, :, None], softmax_scale=1.0)[0]


def decode(q: Any, keys: Any, values: Any) -> Any:
    """Out of MLA decoding, in the columns of the values."""
    cache = torch.zeros(320, 1, 576, dtype=q.dtype)
    cache[:TOKENS, 0, :128] = torch.cat((keys, values), -1)
    rows = torch.nn.functional.pad(q, (0, 512))
    lengths, table = torch.tensor([TOKENS], dtype=torch.int32), torch.arange(5, dtype=torch.int32)[None]
    plan = rawmla.get_mla_metadata(lengths, q.shape[2], 1)
    paged = cache.view(5, 64, 1, 576)
    return rawmla.flash_mla_with_kvcache(rows, paged, table, lengths, 512, *plan, softmax_scale=1.0)[0][
        ..., 64:128
    ]


@pytest.mark.parametrize("attend", (attend_cache, decode))
def test_the_largest_probability_is_not_rounded(emulator: Emulator, attend: Any) -> None:
    """Where one key has nearly all of the sum, out is rounded once. That key comes late, and exceeds those
    before it by less than what the range of 16-bit types would bear.
    """
    emulator.sm_count = 1  # so that nobody begins with that key
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(TOKENS, 64, generator=draw).bfloat16()
    q, keys = torch.zeros(1, 1, 16, 64), torch.zeros(TOKENS, 64)
    q[..., 0] = torch.linspace(3.5, 5.4, 16)  # natural logarithm
    keys[:, 0] = -4
    keys[0, 0], keys[LARGEST, 0] = 0, 1
    q, keys = q.bfloat16(), keys.bfloat16()
    out = attend(q, keys, values)
    exact = (q.double() @ keys.double().T).softmax(-1) @ values.double()
    assert (out != exact.bfloat16()).double().mean() < 0.1
