"""The cases of prefix prefill: new tokens after a context that lies in pages."""

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

import rawmla

from .cases import LENGTH_SEED, Arrays, Prepared
from .reference import AttentionCase, Request

X = {"bf16": 8, "fp8": 16}
"""Dimensions that lie together in k_cache: 16 bytes, as in vLLM."""

SCALES = 0.03, 0.02
"""Of K and V in an FP8 cache: values of normal(0, 1) stay far below 448 of them."""

OUT_SCALE = 2.0**-10
"""Of an FP8 output. Its numbers are normal ones then; results of some thousand keys are about 0.02."""


def page_table(pages: list[int]) -> Any:
    """A table of so many pages of each request, all pages in a random order."""
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for row, numbers in zip(table, torch.randperm(sum(pages)).int().split(pages), strict=True):
        row[: len(numbers)] = numbers
    return table


def stored(values: Any, cache: str, scale: float) -> Any:
    """Values as a cache has them: bf16, or e4m3 with this scale."""
    return values if cache == "bf16" else (values / scale).to(torch.float8_e4m3fn)


@dataclass(eq=False)
class PrefixCase(AttentionCase):
    """One call: b requests of query_len new tokens each after ctx_len older ones, which lie in pages; with
    ragged the new ones are from 1 to twice query_len, query_len on average.

    `cache`: "bf16", or "fp8" (e4m3). With `window`, a query sees the last `window` tokens, its own among
    them; `alibi` and `sink`: each head has a slope, a sink; `fp8out`: the output is FP8.
    """

    template = (
        "prefix-b{b}-q{query_len}-ctx{ctx_len}-h{h_q}kv{h_kv}-d{d}-{cache:bf16|fp8}page{page}"
        "[-window{window}][-{alibi}][-{sink}][-{fp8out}][-{ragged}]"
    )
    query_len: int
    ctx_len: int
    h_q: int
    h_kv: int
    d: int
    cache: str
    page: int
    window: int | None = None
    alibi: bool = False
    sink: bool = False
    fp8out: bool = False
    ragged: bool = False

    def query_lengths(self) -> list[int]:
        """New tokens of each request: with ragged evenly apart from 1 to 2 * query_len, in random order."""
        if not self.ragged:
            return [self.query_len] * self.b
        lengths = [1 + (2 * self.query_len - 1) * i // (self.b - 1) for i in range(self.b)]
        random.Random(LENGTH_SEED).shuffle(lengths)
        return lengths

    def first_visible(self, token: int) -> int:
        """The first position that a request's new token of this number sees."""
        return 0 if self.window is None else max(0, self.ctx_len + token + 1 - self.window)

    def flops(self) -> int:
        """Q·K^T and P·V over the positions that each query sees."""
        tokens = (token for queries in self.query_lengths() for token in range(queries))
        seen = sum(self.ctx_len + token + 1 - self.first_visible(token) for token in tokens)
        return 4 * self.d * self.h_q * seen

    def bytes_moved(self) -> int:
        """q and the requests' own k and v read once, and what any query sees of the context; out written."""
        queries = sum(self.query_lengths())
        context = self.b * max(0, self.ctx_len - self.first_visible(0))
        heads = queries * self.h_q * (2 + (1 if self.fp8out else 2)) + 2 * queries * self.h_kv * 2
        return self.d * (heads + 2 * context * self.h_kv * (2 if self.cache == "bf16" else 1))

    def make_inputs(self, device: str = "cuda") -> Arrays:
        """q, keys and values normal(0, 1); pages in a random order.

        As in engines, requests have pages for their new tokens too, which the kernel does not read.
        """
        torch.manual_seed(0)
        lengths = self.query_lengths()
        seq_lens = [self.ctx_len + queries for queries in lengths]
        page, x, tokens = self.page, X[self.cache], sum(lengths)
        pages = [-(-length // page) for length in seq_lens]
        blocks = sum(pages)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        def integers(values: Any) -> Any:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        table = page_table(pages)
        q = normal(tokens, self.h_q, self.d)
        slopes = [2 ** (-8 * (head + 1) / self.h_q) for head in range(self.h_q)]
        return Arrays(
            q=q,
            k=normal(tokens, self.h_kv, self.d),
            v=normal(tokens, self.h_kv, self.d),
            out=torch.empty_like(q, dtype=torch.float8_e4m3fn if self.fp8out else q.dtype),
            k_cache=stored(normal(blocks, self.h_kv, self.d // x, page, x), self.cache, SCALES[0]),
            v_cache=stored(normal(blocks, self.h_kv, self.d, page), self.cache, SCALES[1]),
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
            fp8_out_scale=OUT_SCALE if self.fp8out else None,
            sinks=inputs.sinks,
        )

    def of_request(self, array: Any, number: int, keys: bool = False) -> Any:
        """See AttentionCase: of its new tokens."""
        return array.split(self.query_lengths())[number]

    def request(self, inputs: Arrays, number: int) -> Request:
        """See AttentionCase: its context from the pages, then the new tokens."""
        pages = inputs.block_table[number, : -(-self.ctx_len // self.page)].long()
        k = inputs.k_cache[pages].double().permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[: self.ctx_len]
        v = inputs.v_cache[pages].double().permute(0, 3, 1, 2).flatten(0, 1)[: self.ctx_len]
        k_scale, v_scale = SCALES if self.cache == "fp8" else (1.0, 1.0)
        q, new_k, new_v = (self.of_request(x, number) for x in (inputs.q, inputs.k, inputs.v))

        def seen(own: Any, keys: Any) -> Any:
            return (keys <= own) & (keys > own - (self.window or len(k) + len(q)))

        def score(scores: Any, own: Any, keys: Any) -> Any:
            return (
                scores + inputs.alibi_slopes.double()[:, None, None] * (keys - own) if self.alibi else scores
            )

        k, v = torch.cat([k * k_scale, new_k.double()]), torch.cat([v * v_scale, new_v.double()])
        return Request(q, k, v, seen, score, inputs.sinks)

    def prepare(self) -> Prepared:
        """See Case. Of FP8 output, whose rounding alone makes about 2.6 %, 4 % are allowed."""
        inputs = self.make_inputs()
        out = self.call(inputs)
        out, bound = (out.double() * OUT_SCALE, 0.04) if self.fp8out else (out, 0.01)
        return Prepared(lambda _: self.call(inputs), self.check(inputs, out, bound=bound))
