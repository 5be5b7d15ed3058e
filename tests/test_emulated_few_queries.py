"""flex_attention of few queries on the emulator: over many keys, which are split over multiprocessors, and
with query heads that share tiles.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import rawmla  # noqa: E402
from kit.flex import (  # noqa: E402
    FlexCase,
    FlexInputs,
    Function,
    check_flex,
    listed_positions,
    make_flex_inputs,
)
from operations.flex import attend  # noqa: E402

H_KV, D = 2, 64
DOCUMENTS = torch.arange(2100) // 700
MASKS = {
    "": None,
    "causal": lambda b, h, q, k: q + 2060 >= k,
    "window": lambda b, h, q, k: (q + 2060 >= k) & (q + 2060 - k < 200),
    "documents": lambda b, h, q, k: DOCUMENTS[q + 2060] == DOCUMENTS[k],
}


@pytest.mark.parametrize("block", (128, (128, 64)), ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("s_q", (1, 40))
def test_keys_are_split(emulator: Any, mask: str, s_q: int, block: Any) -> None:
    """Results are those of one float64 softmax, and blocks of a list go to every part."""
    draw = torch.Generator().manual_seed(s_q)
    q, k, v = (
        torch.randn(1, h, s, D, generator=draw).bfloat16()
        for h, s in ((2 * H_KV, s_q), (H_KV, 2100), (H_KV, 2100))
    )
    function = MASKS[mask]
    lists = None
    if function is not None:
        lists = rawmla.create_block_mask(function, None, None, s_q, 2100, device="cuda:0", BLOCK_SIZE=block)
    emulator.sm_count = 24
    out, lse = rawmla.flex_attention(q, k, v, block_mask=lists, enable_gqa=True, return_lse=True)
    assert any(label.startswith("mha_combine") for label in emulator.launched)
    keys, values = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = q.double() @ keys.mT * D**-0.5
    if function is not None:
        seen = function(0, 0, torch.arange(s_q)[:, None], torch.arange(2100))
        scores = scores.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ values, rtol=2e-2, atol=4e-3)


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k + h) % 3 > 0


BY_HEAD = Function(by_head, "", lambda xp, captures, *at: by_head(*at))


def with_random_lists(case: FlexCase, heads: int) -> FlexInputs:
    """Inputs with lists of partial and of full blocks for some heads, and a mask that depends on the head.
    V of keys that are in no list is NaN.
    """
    inputs = make_flex_inputs(case, "cpu")
    draw = torch.Generator().manual_seed(case.seed)
    rows, columns = (-(-n // size) for n, size in zip((case.s_q, case.s_k), case.block, strict=True))
    states = torch.randint(0, 3, (1, heads, rows, columns), generator=draw)
    states[..., 0] = 0
    lists = []
    for kind in (1, 2):
        listed = states == kind
        lists += [listed.sum(-1, dtype=torch.int32), (~listed).int().argsort(dim=-1, stable=True).int()]
    block_mask = rawmla.BlockMask(
        (case.s_q, case.s_k), *lists, BLOCK_SIZE=case.block, mask_mod=BY_HEAD.python
    )
    some, full = listed_positions(block_mask)
    inputs.v[:, :, ~(some | full).flatten(0, 2).any(0)] = nan
    return replace(inputs, mask=BY_HEAD, block_mask=block_mask)


GROUP: dict[str, Any] = {"h_q": 8, "h_kv": 2, "score": "query scale"}
LARGER = {**GROUP, "h_q": 16, "h_kv": 1}  # of the rows of a thread each has a head of its own


@pytest.mark.parametrize(
    ("case", "heads", "is_split"),
    (
        (FlexCase(b=2, **GROUP, s_q=1, s_k=2100), 1, True),
        (FlexCase(b=2, **GROUP, s_q=3, s_k=500, d_qk=128, d_v=128), 1, False),
        (FlexCase(**LARGER, s_q=17, s_k=700, d_qk=256, d_v=256, layout="tokens"), 1, False),
        (FlexCase(b=2, **GROUP, s_q=17, s_k=1100, block=(64, 64)), 1, True),
        (FlexCase(b=2, **GROUP, s_q=133, s_k=400, layout="slice"), 1, False),  # 5 tiles, 2 rows of blocks
        (FlexCase(b=1, **GROUP, s_q=70, s_k=400, block=(16, 32)), 1, False),
        (FlexCase(b=2, **GROUP, s_q=3, s_k=500), 2, False),
    ),
    ids=lambda x: x.id if isinstance(x, FlexCase) else str(x),
)
def test_query_heads_share_tiles(emulator: Any, case: FlexCase, heads: int, is_split: bool) -> None:
    """Where there is one list for all of them; score function and mask depend on the head all the same."""
    inputs = with_random_lists(case, heads)
    emulator.sm_count = 24 if is_split else 3
    check_flex(inputs, attend(inputs, max_scores=not is_split))
    labels = " ".join(emulator.launched)
    assert f"FLEX_GROUPED={int(heads == 1)}" in labels and ("mha_combine" in labels) == is_split
