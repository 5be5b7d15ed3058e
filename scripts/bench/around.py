"""The cases of operations around decoding: caches, index conversion, merging of results. Only the tests check
these results.
"""

from dataclasses import dataclass
from typing import Any

import torch

import rawmla

from .cases import Case, Prepared
from .mla import D_V

LAYOUTS = {"v32": (576, 656), "model1": (512, 584), "bf16-576": (576, 1152), "bf16-512": (512, 1024)}
"""Columns of a row and bytes of a token, by the name of the layout."""

PAGE, CONTEXT = 64, 131072


@dataclass(eq=False)
class CacheCase(Case):
    """One call that moves tokens in or out of a paged cache.

    `op` is quantize, dequantize, write (random slots) or gather (`requests` equal requests, pages in random
    order).
    """

    template = (
        "cache-{op:quantize|dequantize|write|gather}-{layout:v32|model1|bf16-576|bf16-512}"
        "-t{tokens}-b{requests}"
    )
    op: str
    layout: str
    tokens: int
    requests: int

    def bytes_moved(self) -> int:
        """Each token as bf16 and as the cache has it, once; indices."""
        columns, token_bytes = LAYOUTS[self.layout]
        indices = {"write": 8 * self.tokens, "gather": 4 * self.tokens // PAGE}
        return self.tokens * (2 * columns + token_bytes) + indices.get(self.op, 0)

    def prepare(self) -> Prepared:
        torch.manual_seed(0)
        columns, _ = LAYOUTS[self.layout]
        spread = max(self.tokens // PAGE, 2 * self.requests)  # at least one page to choose for each request
        made = torch.randn(spread, PAGE, 1, columns, device="cuda", dtype=torch.bfloat16)
        cache = made if self.layout.startswith("bf16") else rawmla.quantize_k_cache(made, self.layout)
        rows = torch.randn(self.tokens, columns, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(spread * PAGE, device="cuda")[: self.tokens]
        each = self.tokens // self.requests
        order = torch.randperm(spread, device="cuda").int()
        table = order[: self.requests * -(-each // PAGE)].view(self.requests, -1)
        lengths = torch.full((self.requests,), each, dtype=torch.int32, device="cuda")
        starts = torch.arange(self.requests, dtype=torch.int32, device="cuda") * each
        calls = {
            "quantize": lambda _: rawmla.quantize_k_cache(made, self.layout, out=cache),
            "dequantize": lambda _: rawmla.dequantize_k_cache(cache, self.layout),
            "write": lambda _: rawmla.write_kv_cache(rows[:, :-64], rows[:, -64:], cache, slots),
            "gather": lambda _: rawmla.gather_kv_cache(cache, table, lengths, rows, workspace_starts=starts),
        }
        return Prepared(calls[self.op], 0.0)


@dataclass(eq=False)
class ConvertCase(Case):
    """One conversion of `rows` rows of `topk` token positions in requests of CONTEXT tokens."""

    template = "convert-r{rows}-k{topk}[-{compact}]"
    rows: int
    topk: int
    compact: bool = False

    def bytes_moved(self) -> int:
        """Positions read, slots and counts written; the table mostly comes from L2."""
        return self.rows * (8 * self.topk + (4 if self.compact else 0))

    def prepare(self) -> Prepared:
        torch.manual_seed(0)
        given: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
        positions = torch.randint(-1, CONTEXT, (self.rows, self.topk), **given)
        table = torch.randint(0, 16384, (self.rows, CONTEXT // PAGE), **given)
        out = torch.empty_like(positions)

        def call(_: int) -> Any:
            return rawmla.convert_indices(positions, table, PAGE, compact=self.compact, out=out)

        return Prepared(call, 0.0)


@dataclass(eq=False)
class MergeCase(Case):
    """One merge of `parts` results of a decode call with b requests, one query token and h_q heads."""

    template = "merge-p{parts}-b{b}-h{h_q}-{dtype:bfloat16|float32}"
    parts: int
    b: int
    h_q: int
    dtype: str

    def bytes_moved(self) -> int:
        """Every part read and the result written, with their lse."""
        row_bytes = D_V * (4 if self.dtype == "float32" else 2) + 4
        return (self.parts + 1) * self.b * self.h_q * row_bytes

    def prepare(self) -> Prepared:
        torch.manual_seed(0)
        dtype, shape = getattr(torch, self.dtype), (self.b, 1, self.h_q, D_V)
        outs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(self.parts)]
        lses = [torch.randn(self.b, self.h_q, 1, device="cuda") for _ in range(self.parts)]
        out = torch.empty_like(outs[0])
        return Prepared(lambda _: rawmla.merge_attn_states(outs, lses, out=out), 0.0)
