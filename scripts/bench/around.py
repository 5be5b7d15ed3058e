"""The cases of operations around decoding: caches, index conversion, merging of results."""

from dataclasses import dataclass
from typing import Any

import torch

import rawmla

from .cases import Case, Prepared
from .mla import D_V

LAYOUTS = {"v32": (576, 656), "model1": (512, 584), "bf16-576": (576, 1152), "bf16-512": (512, 1024)}
"""Columns of a row and bytes of a token, by the name of the layout."""

QUANTIZED = ("v32", "model1")
NO_CHECK = 0.0
"""The error of cases whose results only the tests check."""


def _generator() -> Any:
    return torch.Generator("cuda").manual_seed(0)


def _normal(*shape: int, dtype: Any, generator: Any) -> Any:
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@dataclass(frozen=True)
class CacheCase(Case):
    """One call that moves tokens in or out of a paged cache.

    `op` is quantize, dequantize, write (random slots) or gather (`requests` equal requests, pages in random
    order).
    """

    op: str
    layout: str
    tokens: int
    requests: int = 1
    page_block_size: int = 64

    @property
    def id(self) -> str:
        return f"cache-{self.op}-{self.layout}-t{self.tokens}-b{self.requests}"

    def bytes_moved(self) -> int:
        """Each token as bf16 and as the cache has it, once; indices."""
        columns, token_bytes = LAYOUTS[self.layout]
        indices = {"write": 8 * self.tokens, "gather": 4 * self.tokens // self.page_block_size}
        return self.tokens * (2 * columns + token_bytes) + indices.get(self.op, 0)

    def prepare(self) -> Prepared:
        generator = _generator()
        columns, _ = LAYOUTS[self.layout]
        pages, page = self.tokens // self.page_block_size, self.page_block_size
        spread = max(pages, 2 * self.requests)  # at least one page to choose for each request
        made = _normal(spread, page, 1, columns, dtype=torch.bfloat16, generator=generator)
        cache = rawmla.quantize_k_cache(made, self.layout) if self.layout in QUANTIZED else made
        rows = _normal(self.tokens, columns, dtype=torch.bfloat16, generator=generator)
        slots = torch.randperm(spread * page, generator=generator, device="cuda")[: self.tokens]
        each = self.tokens // self.requests
        order = torch.randperm(spread, generator=generator, device="cuda").int()
        table = order[: self.requests * -(-each // page)].view(self.requests, -1)
        lengths = torch.full((self.requests,), each, dtype=torch.int32, device="cuda")
        starts = torch.arange(self.requests, dtype=torch.int32, device="cuda") * each
        calls = {
            "quantize": lambda _: rawmla.quantize_k_cache(made, self.layout, out=cache),
            "dequantize": lambda _: rawmla.dequantize_k_cache(cache, self.layout),
            "write": lambda _: rawmla.write_kv_cache(rows[:, :-64], rows[:, -64:], cache, slots),
            "gather": lambda _: rawmla.gather_kv_cache(cache, table, lengths, rows, workspace_starts=starts),
        }
        return Prepared(calls[self.op], NO_CHECK)


@dataclass(frozen=True)
class ConvertCase(Case):
    """One conversion of `rows` rows of `topk` token positions in requests of `context` tokens."""

    rows: int
    topk: int
    compact: bool
    context: int = 131072
    page_block_size: int = 64

    @property
    def id(self) -> str:
        return f"convert-r{self.rows}-k{self.topk}{'-compact' if self.compact else ''}"

    def bytes_moved(self) -> int:
        """Positions read, slots and counts written; the table mostly comes from L2."""
        return self.rows * (8 * self.topk + (4 if self.compact else 0))

    def prepare(self) -> Prepared:
        given: dict[str, Any] = {"generator": _generator(), "device": "cuda", "dtype": torch.int32}
        positions = torch.randint(-1, self.context, (self.rows, self.topk), **given)
        table = torch.randint(0, 16384, (self.rows, -(-self.context // self.page_block_size)), **given)
        out = torch.empty_like(positions)

        def call(_: int) -> Any:
            return rawmla.convert_indices(
                positions, table, self.page_block_size, compact=self.compact, out=out
            )

        return Prepared(call, NO_CHECK)


@dataclass(frozen=True)
class MergeCase(Case):
    """One merge of `parts` results of a decode call with b requests, one query token and h_q heads."""

    parts: int
    b: int
    h_q: int
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        return f"merge-p{self.parts}-b{self.b}-h{self.h_q}-{self.dtype}"

    def bytes_moved(self) -> int:
        """Every part read and the result written, with their lse."""
        row_bytes = D_V * (4 if self.dtype == "float32" else 2) + 4
        return (self.parts + 1) * self.b * self.h_q * row_bytes

    def prepare(self) -> Prepared:
        generator, dtype = _generator(), getattr(torch, self.dtype)
        shape = self.b, 1, self.h_q, D_V
        outs = [_normal(*shape, dtype=dtype, generator=generator) for _ in range(self.parts)]
        lses = [
            _normal(self.b, self.h_q, 1, dtype=torch.float32, generator=generator) for _ in range(self.parts)
        ]
        out = torch.empty_like(outs[0])
        return Prepared(lambda _: rawmla.merge_attn_states(outs, lses, out=out), NO_CHECK)


def around_cases() -> list[Case]:
    """A whole prefill's tokens, a decode step's, and what goes with them."""
    cases: list[Case] = []
    for layout in LAYOUTS:
        ops = ("quantize", "dequantize") if layout in QUANTIZED else ()
        cases += [CacheCase(op, layout, 65536) for op in (*ops, "write")]
        cases += [CacheCase("write", layout, 128)]
        cases += [CacheCase("gather", layout, 65536, requests) for requests in (1, 16, 1024)]
    for compact in (False, True):
        cases += [ConvertCase(rows, 2048, compact) for rows in (1, 128, 4096)]
        cases += [ConvertCase(16384, 64, compact)]
    cases += [MergeCase(parts, b, 128) for parts in (2, 8, 32) for b in (1, 128)]
    return [*cases, MergeCase(8, 128, 128, "float32")]
