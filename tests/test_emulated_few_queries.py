"""flex_attention of few queries over many keys, which are split over multiprocessors, on the emulator."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import rawmla  # noqa: E402

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
