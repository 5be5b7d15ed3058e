"""The operations around decoding as benchmark cases: inputs, the bytes they must move and the timed call.

Nothing here times anything. `make_call` builds the inputs of a case on the current GPU and returns the
call, which can be captured into a CUDA graph and repeated.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .cases import D_V

LAYOUTS = {"v32": (576, 656), "model1": (512, 584), "bf16-576": (576, 1152), "bf16-512": (512, 1024)}
"""Columns of a row and bytes of a token, by the name of the layout."""

QUANTIZED = ("v32", "model1")
SEED = 0


@dataclass(frozen=True)
class CacheCase:
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
        """The name of the case."""
        return f"cache-{self.op}-{self.layout}-t{self.tokens}-b{self.requests}"

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: each token as bf16 and as the cache has it, once; indices."""
        columns, token_bytes = LAYOUTS[self.layout]
        indices = {"write": 8 * self.tokens, "gather": 4 * self.tokens // self.page_block_size}
        return self.tokens * (2 * columns + token_bytes) + indices.get(self.op, 0)

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"family": "cache", **asdict(self)}

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        return "caches"


@dataclass(frozen=True)
class ConvertCase:
    """One conversion of `rows` rows of `topk` token positions in requests of `context` tokens."""

    rows: int
    topk: int
    compact: bool
    context: int = 131072
    page_block_size: int = 64

    @property
    def id(self) -> str:
        """The name of the case."""
        return f"convert-r{self.rows}-k{self.topk}{'-compact' if self.compact else ''}"

    def bytes_moved(self) -> int:
        """Positions read, slots and counts written; the table mostly comes from L2."""
        return self.rows * (8 * self.topk + (4 if self.compact else 0))

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "convert_indices", "family": "convert_indices", **asdict(self)}

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        return "index conversion"


@dataclass(frozen=True)
class MergeCase:
    """One merge of `parts` results of a decode call with b requests, one query token and h_q heads."""

    parts: int
    b: int
    h_q: int
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        """The name of the case."""
        return f"merge-p{self.parts}-b{self.b}-h{self.h_q}-{self.dtype}"

    def bytes_moved(self) -> int:
        """Every part read and the result written, with their lse."""
        row_bytes = D_V * (4 if self.dtype == "float32" else 2) + 4
        return (self.parts + 1) * self.b * self.h_q * row_bytes

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "merge_attn_states", "family": "merge_attn_states", **asdict(self)}

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        return "merging"


Case = CacheCase | ConvertCase | MergeCase


def all_cases() -> list[Case]:
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
    cases += [MergeCase(8, 128, 128, "float32")]
    return cases


def make_call(case: Case) -> Callable[[], Any]:
    """Build the inputs on the current GPU; returns the call to time."""
    import torch

    generator = torch.Generator("cuda").manual_seed(SEED)
    if isinstance(case, CacheCase):
        return _cache_call(case, torch, generator)
    if isinstance(case, ConvertCase):
        return _convert_call(case, torch, generator)
    return _merge_call(case, torch, generator)


def _cache_call(case: CacheCase, torch: Any, generator: Any) -> Callable[[], Any]:
    import rawmla

    columns, _ = LAYOUTS[case.layout]
    pages, page = case.tokens // case.page_block_size, case.page_block_size
    spread = max(pages, 2 * case.requests)  # at least one page to choose for each request
    k_cache = torch.randn(spread, page, 1, columns, generator=generator, device="cuda", dtype=torch.bfloat16)
    cache = rawmla.quantize_k_cache(k_cache, case.layout) if case.layout in QUANTIZED else k_cache
    rows = torch.randn(case.tokens, columns, generator=generator, device="cuda", dtype=torch.bfloat16)
    if case.op == "quantize":
        return lambda: rawmla.quantize_k_cache(k_cache, case.layout, out=cache)
    if case.op == "dequantize":
        return lambda: rawmla.dequantize_k_cache(cache, case.layout)
    if case.op == "write":
        slots = torch.randperm(spread * page, generator=generator, device="cuda")[: case.tokens]
        return lambda: rawmla.write_kv_cache(rows[:, :-64], rows[:, -64:], cache, slots)
    per_request = case.tokens // case.requests
    order = torch.randperm(spread, generator=generator, device="cuda").to(torch.int32)
    table = order[: case.requests * -(-per_request // page)].view(case.requests, -1)
    lengths = torch.full((case.requests,), per_request, dtype=torch.int32, device="cuda")
    starts = torch.arange(case.requests, dtype=torch.int32, device="cuda") * per_request
    return lambda: rawmla.gather_kv_cache(cache, table, lengths, rows, workspace_starts=starts)


def _convert_call(case: ConvertCase, torch: Any, generator: Any) -> Callable[[], Any]:
    import rawmla

    shape = (case.rows, case.topk)
    positions = torch.randint(-1, case.context, shape, generator=generator, device="cuda", dtype=torch.int32)
    width = -(-case.context // case.page_block_size)
    table = torch.randint(0, 16384, (case.rows, width), generator=generator, device="cuda", dtype=torch.int32)
    out = torch.empty_like(positions)
    return lambda: rawmla.convert_indices(
        positions, table, case.page_block_size, compact=case.compact, out=out
    )


def _merge_call(case: MergeCase, torch: Any, generator: Any) -> Callable[[], Any]:
    import rawmla

    shape = (case.b, 1, case.h_q, D_V)
    dtype = getattr(torch, case.dtype)
    outs = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(case.parts)]
    lses = [torch.randn(case.b, case.h_q, 1, generator=generator, device="cuda") for _ in range(case.parts)]
    out = torch.empty_like(outs[0])
    return lambda: rawmla.merge_attn_states(outs, lses, out=out)
