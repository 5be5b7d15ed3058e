"""The cases of prefix prefill: new tokens after a context that lies in pages."""

import functools
import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

import rawmla

from . import reference
from .cases import LENGTH_SEED, Arrays, Case, Prepared, worst_error

X = {"bf16": 8, "fp8": 16}
"""Dimensions that lie together in k_cache: 16 bytes, as in vLLM."""

SCALES = 0.03, 0.02
"""Of K and V in an FP8 cache: values of normal(0, 1) stay far below 448 of them."""

OUT_SCALE = 2.0**-10
"""Of an FP8 output. Its numbers are normal ones then; results of some thousand keys are about 0.02."""


@dataclass(frozen=True)
class PrefixCase(Case):
    """One call: b requests of query_len new tokens each after ctx_len older ones, which lie in pages; with
    ragged the new ones are from 1 to twice query_len, query_len on average.

    `cache`: "bf16", or "fp8" (e4m3). With `window`, a query sees so many tokens, its own among them; `alibi`
    and `sink`: each head has a slope, a sink; `fp8_out`: the output is FP8.
    """

    b: int
    query_len: int
    ctx_len: int
    h_q: int = 32
    h_kv: int = 8
    d: int = 128
    page_block_size: int = 16
    cache: str = "bf16"
    window: int | None = None
    alibi: bool = False
    sink: bool = False
    fp8_out: bool = False
    ragged: bool = False

    @property
    def id(self) -> str:
        parts = ["prefix", f"b{self.b}", f"q{self.query_len}", f"ctx{self.ctx_len}"]
        parts += [f"h{self.h_q}kv{self.h_kv}", f"d{self.d}", f"{self.cache}page{self.page_block_size}"]
        parts += [f"window{self.window}"] if self.window is not None else []
        parts += [name for name in ("alibi", "sink") if getattr(self, name)]
        parts += ["fp8out"] if self.fp8_out else []
        return "-".join([*parts, *(["ragged"] if self.ragged else [])])

    def query_lengths(self) -> list[int]:
        """New tokens of each request: with ragged evenly apart from 1 to 2 * query_len, in random order."""
        if not self.ragged:
            return [self.query_len] * self.b
        lengths = [1 + (2 * self.query_len - 1) * i // (self.b - 1) for i in range(self.b)]
        random.Random(LENGTH_SEED).shuffle(lengths)
        return lengths

    def visible(self, token: int) -> tuple[int, int]:
        """The first position that a request's new token of this number sees, and the end of them."""
        end = self.ctx_len + token + 1
        return (0 if self.window is None else max(0, end - self.window)), end

    def flops(self) -> int:
        """Q·K^T and P·V over the positions that each query sees."""
        return 4 * self.d * self.h_q * _positions(self)

    def bytes_moved(self) -> int:
        """q and the requests' own k and v read once, and what any query sees of the context; out written."""
        queries = sum(self.query_lengths())
        context = self.b * max(0, self.ctx_len - self.visible(0)[0])
        heads = queries * self.h_q * (2 + (1 if self.fp8_out else 2)) + 2 * queries * self.h_kv * 2
        return self.d * (heads + 2 * context * self.h_kv * (2 if self.cache == "bf16" else 1))

    def make_inputs(self, device: str = "cuda") -> Arrays:
        """q, keys and values normal(0, 1); pages in a random order.

        As in engines, requests have pages for their new tokens too, which the kernel does not read.
        """
        torch.manual_seed(0)
        lengths = self.query_lengths()
        seq_lens = [self.ctx_len + queries for queries in lengths]
        page, x = self.page_block_size, X[self.cache]
        pages = [-(-length // page) for length in seq_lens]
        blocks = sum(pages)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        def cache(scale: float, *shape: int) -> Any:
            if self.cache == "bf16":
                return normal(*shape)
            return (normal(*shape) / scale).to(torch.float8_e4m3fn)

        def integers(values: Any) -> Any:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        table = torch.zeros(self.b, max(pages), dtype=torch.int32)
        for row, numbers in zip(table, torch.randperm(blocks).int().split(pages), strict=True):
            row[: len(numbers)] = numbers
        q = normal(sum(lengths), self.h_q, self.d)
        slopes = [2 ** (-8 * (head + 1) / self.h_q) for head in range(self.h_q)]
        return Arrays(
            q=q,
            k=normal(sum(lengths), self.h_kv, self.d),
            v=normal(sum(lengths), self.h_kv, self.d),
            out=torch.empty_like(q, dtype=torch.float8_e4m3fn if self.fp8_out else q.dtype),
            k_cache=cache(SCALES[0], blocks, self.h_kv, self.d // x, page, x),
            v_cache=cache(SCALES[1], blocks, self.h_kv, self.d, page),
            block_table=table.to(device),
            start_loc=integers([0, *accumulate(lengths)]),
            seq_lens=integers(seq_lens),
            alibi_slopes=torch.tensor(slopes, device=device) if self.alibi else None,
            sinks=normal(self.h_q) if self.sink else None,
        )

    def call(self, inputs: Arrays) -> Any:
        """Call rawmla; returns out."""
        longest = max(self.query_lengths())
        return rawmla.context_attention_fwd(
            *(inputs.q, inputs.k, inputs.v, inputs.out, "auto" if self.cache == "bf16" else self.cache),
            *(inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.start_loc, inputs.seq_lens),
            *(self.ctx_len + longest, longest, *SCALES),
            alibi_slopes=inputs.alibi_slopes,
            sliding_window=self.window,
            fp8_out_scale=OUT_SCALE if self.fp8_out else None,
            sinks=inputs.sinks,
        )

    def keys_of_request(self, inputs: Arrays, request: int, own: slice) -> tuple[Any, Any]:
        """K and V of all positions of a request in float64, `[positions, h_kv, d]` each."""
        pages = inputs.block_table[request, : -(-self.ctx_len // self.page_block_size)].long()
        k = inputs.k_cache[pages].double().permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[: self.ctx_len]
        v = inputs.v_cache[pages].double().permute(0, 3, 1, 2).flatten(0, 1)[: self.ctx_len]
        k_scale, v_scale = SCALES if self.cache == "fp8" else (1.0, 1.0)
        return (
            torch.cat([k * k_scale, inputs.k[own].double()]),
            torch.cat([v * v_scale, inputs.v[own].double()]),
        )

    def check(self, inputs: Arrays, out: Any) -> float:
        """Error of the first, a middle and the last new token of the first and the last request. Of FP8
        output, whose rounding alone makes about 2.6 %, 4 % are allowed.
        """
        lengths = self.query_lengths()
        found: list[Any] = []
        for request in {0, self.b - 1}:
            begin = sum(lengths[:request])
            k, v = self.keys_of_request(inputs, request, slice(begin, begin + lengths[request]))
            position = torch.arange(len(k), device=k.device)
            tokens = sorted({0, lengths[request] // 2, lengths[request] - 1})
            bounds = torch.tensor([self.visible(token) for token in tokens], device=k.device)
            first, end = bounds.T[..., None]

            def score(scores: Any) -> Any:
                if not self.alibi:
                    return scores
                slopes = inputs.alibi_slopes.double()[:, None, None]
                return scores + slopes * (position + 1 - end)  # noqa: B023

            seen = (position >= first) & (position < end)
            rows = [begin + token for token in tokens]
            want, _, _ = reference.attend(inputs.q[rows], k, v, seen, score, inputs.sinks)
            got = out[rows].double() * (OUT_SCALE if self.fp8_out else 1.0)
            names = (f"token {token} of request {request}" for token in tokens)
            found += zip(names, got, want, strict=True)
        return worst_error(self, found, 0.04 if self.fp8_out else 0.01)

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        return Prepared(lambda _: self.call(inputs), self.check(inputs, self.call(inputs)))


@functools.cache
def _positions(case: PrefixCase) -> int:
    """What all query tokens see, together."""
    intervals = (case.visible(token) for queries in case.query_lengths() for token in range(queries))
    return sum(end - begin for begin, end in intervals)


def prefix_cases() -> list[PrefixCase]:
    """Batches and lengths with a stored time of vLLM, then the first of them with other pages, other head
    dimensions, ALiBi, sinks, FP8 output and varied lengths.
    """
    base = PrefixCase(8, 1024, 8192)
    return [
        base,
        replace(base, cache="fp8"),
        replace(base, window=1024),
        PrefixCase(32, 128, 4096),
        PrefixCase(4, 4096, 0),
        PrefixCase(1, 2048, 32768),
        replace(base, page_block_size=32),
        replace(base, page_block_size=544),
        replace(base, d=64),
        replace(base, d=256),
        replace(base, alibi=True),
        replace(base, sink=True),
        replace(base, fp8_out=True),
        replace(base, ragged=True),
    ]
