"""The examples of docs/flex.md: run as they stand, and what they pass to `flex_attention` is kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import rawmla
from kit.flex import block_mask_of, listed_positions

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "flex.md").read_text()
NEEDS = {"paged": ("causal", "ALiBi")}
"""Examples whose functions another uses; all use those of the first."""


def blocks_of(kind: str) -> dict[str, str]:
    """The blocks of a kind by their names."""
    return dict(re.findall(rf"<!-- {kind}(?:: (.+?))? -->\n```python\n(.*?)```", PAGE, re.DOTALL))


EXAMPLES, CUPY_EXAMPLES = blocks_of("example"), blocks_of("cupy example")
GRADIENTS = blocks_of("gradients")
SETUP, TRACED = blocks_of("setup")[""], blocks_of("traced")[""]


class Call(NamedTuple):
    """Arguments of `flex_attention`."""

    query: Any
    key: Any
    value: Any
    score_mod: Any = None
    block_mask: Any = None


def run(
    name: str,
    flex_attention: Callable[..., Any] = rawmla.flex_attention,
    create_block_mask: Callable[..., Any] = rawmla.create_block_mask,
    device: str = "cuda",
    tokens: int = 1000,
    dtype: Any = None,
) -> tuple[dict[str, Any], Call]:
    """Run an example behind what it needs; returns its names, and its call."""
    calls: list[Call] = []

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        calls.append(Call(*arguments, **keywords))
        return flex_attention(*arguments, **keywords)

    public = {name: getattr(rawmla, name) for name in rawmla.__all__}
    public |= {"flex_attention": recorded, "create_block_mask": create_block_mask}
    names: dict[str, Any] = {"rawmla": SimpleNamespace(**public)}
    assert "L, D = 2, 8, 1000, 128" in SETUP
    _execute(SETUP.replace("1000", str(tokens)), device, names)
    if dtype is not None:
        names |= {x: names[x].to(dtype) for x in ("q", "k", "v")}
    for one in (*NEEDS.get(name, ("causal",)), name):
        _execute({**EXAMPLES, **GRADIENTS}[one], device, names)
    return names, calls[-1]


def _execute(block: str, device: str, names: dict[str, Any]) -> None:
    code = block.replace("import rawmla\n", "").replace('"cuda"', f'"{device}"')
    exec(compile(code, "docs/flex.md", "exec"), names)


def positions(shape: tuple[int, ...], device: Any = None) -> list[Any]:
    """Requests, heads, query tokens and keys, which together have an element for each score of this shape."""
    import torch

    return [
        torch.arange(size, device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(shape)
    ]


def create_block_mask(
    mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, BLOCK_SIZE: int = 128
) -> rawmla.BlockMask:
    """A mask with lists that torch makes on the CPU."""
    shape, lengths = (B or 1, H or 1, Q_LEN, KV_LEN), (Q_LEN, KV_LEN)
    seen = mask_mod(*positions(shape)).expand(shape)
    return block_mask_of(seen, lengths, (BLOCK_SIZE, BLOCK_SIZE), mask_mod)


def reference(call: Call) -> Any:
    """The result by plain torch in float64, with all scores in memory."""
    q, k, v = (x.double() for x in call[:3])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    at = positions(scores.shape, q.device)
    if call.score_mod is not None:
        scores = call.score_mod(scores, *at)
    if call.block_mask is not None:  # in full blocks the function is not asked
        partial, full = listed_positions(call.block_mask)
        scores = scores.masked_fill(~(full | partial & call.block_mask.mask_mod(*at)), float("-inf"))
    return scores.softmax(dim=-1) @ v
