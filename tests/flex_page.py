"""The examples of docs/flex.md: run as they stand, and what they pass to `flex_attention` is kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import rawmla

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "flex.md").read_text()
NEEDS = {"paged": ("causal", "ALiBi")}
"""Examples whose functions another uses; all use those of the first."""


def blocks_of(kind: str) -> dict[str, str]:
    """The blocks of a kind by their names."""
    return dict(re.findall(rf"<!-- {kind}: (.+?) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


EXAMPLES, CUPY_EXAMPLES = blocks_of("example"), blocks_of("cupy example")
GRADIENTS = blocks_of("gradients")
SETUP = re.findall(r"<!-- setup -->\n```python\n(.*?)```", PAGE, re.DOTALL)[0]
TRACED = re.findall(r"<!-- traced -->\n```python\n(.*?)```", PAGE, re.DOTALL)[0]


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


def create_block_mask(*arguments: Any, **keywords: Any) -> rawmla.BlockMask:
    """A mask of rawmla with lists that torch makes on the CPU."""
    from torch.nn.attention import flex_attention

    made = flex_attention.create_block_mask(*arguments, **keywords, device="cpu")
    return rawmla.BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        made.full_kv_num_blocks,
        made.full_kv_indices,
        made.BLOCK_SIZE,
        made.mask_mod,
        made.seq_lengths,
    )


def positions(call: Call) -> tuple[Any, Any, Any, Any]:
    """Requests, heads, query tokens and keys, which together have an element for each score."""
    import torch

    (b, h, q_len, _), kv_len = call.query.shape, call.key.shape[2]
    sizes = (b, h, q_len, kv_len)
    axes = [torch.arange(size, device=call.query.device) for size in sizes]
    b_axis, h_axis, q_axis, k_axis = (
        axis.view([-1 if i == j else 1 for j in range(4)]) for i, axis in enumerate(axes)
    )
    return b_axis, h_axis, q_axis, k_axis


def seen(call: Call) -> Any:
    """Which positions the lists and the mask function show, bool `[B', H', L, S]`; F4 of the definition: in
    full blocks the function is not asked.
    """
    import torch

    mask = call.block_mask
    shown = mask.mask_mod(*positions(call))
    listed = []
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        q_len, kv_len = mask.seq_lengths
        block_q, block_k = mask.BLOCK_SIZE
        counted = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
        wide = torch.zeros(
            *indices.shape[:-1], -(-kv_len // block_k), dtype=torch.int32, device=counts.device
        )
        wide.scatter_add_(-1, indices.long(), counted.int())
        by_rows = wide.bool().repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)
        listed.append(by_rows[..., :q_len, :kv_len])
    partial, full = listed
    return (partial & shown) | full


def reference(call: Call) -> Any:
    """The result by plain torch in float64, with all scores in memory."""
    q, k, v = (x.double() for x in call[:3])
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if call.score_mod is not None:
        scores = call.score_mod(scores, *positions(call))
    if call.block_mask is not None:
        scores = scores.masked_fill(~seen(call), float("-inf"))
    return scores.softmax(dim=-1) @ v
