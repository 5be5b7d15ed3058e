"""The cases of prefix prefill: lengths, operation and byte counts."""

import functools
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from .cases import LENGTH_SEED


@dataclass(frozen=True)
class PrefixCase:
    """One call: b requests of query_len new tokens each behind ctx_len older ones, which lie in pages; with
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
        """The name of the case."""
        parts = ["prefix", f"b{self.b}", f"q{self.query_len}", f"ctx{self.ctx_len}"]
        parts += [f"h{self.h_q}kv{self.h_kv}", f"d{self.d}", f"{self.cache}page{self.page_block_size}"]
        parts += [f"window{self.window}"] if self.window is not None else []
        parts += [name for name in ("alibi", "sink") if getattr(self, name)]
        parts += ["fp8out"] if self.fp8_out else []
        return "-".join([*parts, *(["ragged"] if self.ragged else [])])

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        return "window" if self.window is not None else f"{self.cache} cache"

    def query_lengths(self) -> list[int]:
        """New tokens of each request: with ragged evenly apart from 1 to 2 * query_len, in random order."""
        if not self.ragged:
            return [self.query_len] * self.b
        lengths = [1 + (2 * self.query_len - 1) * i // (self.b - 1) for i in range(self.b)]
        random.Random(LENGTH_SEED).shuffle(lengths)
        return lengths

    def visible(self, token: int) -> tuple[int, int]:
        """The first position that a request's new token of this number sees, and the one behind the last."""
        end = self.ctx_len + token + 1
        return (0 if self.window is None else max(0, end - self.window)), end

    def flops(self) -> int:
        """Multiplications and additions of Q·K^T and P·V over the positions that each query sees."""
        return 4 * self.d * self.h_q * _positions(self)

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: q and the requests' own k and v read once, and what any query
        sees of the context; out written.
        """
        queries = sum(self.query_lengths())
        context = self.b * max(0, self.ctx_len - self.visible(0)[0])
        heads = queries * self.h_q * (2 + (1 if self.fp8_out else 2)) + 2 * queries * self.h_kv * 2
        return self.d * (heads + 2 * context * self.h_kv * (2 if self.cache == "bf16" else 1))

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "prefix_prefill", **asdict(self)}


@functools.cache  # pages and tables ask for it again and again
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
