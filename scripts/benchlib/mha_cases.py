"""The cases of dense attention with a K and a V of their own: lengths, operation and byte counts."""

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from .cases import LENGTH_SEED


@dataclass(frozen=True)
class MhaCase:
    """One forward call: b requests of s query tokens and s keys each, or with varlen of about as many.

    With `window`, a query sees so many keys to the left of its own; `softcap` 0 is none; `sink`: each head
    has one.
    """

    b: int
    s: int
    causal: bool = True
    h_q: int = 16
    h_kv: int = 16
    d_qk: int = 128
    d_v: int = 128
    dtype: str = "bf16"
    varlen: bool = False
    window: int | None = None
    softcap: float = 0.0
    sink: bool = False

    @property
    def id(self) -> str:
        """The name of the case."""
        heads = f"h{self.h_q}" if self.h_kv == self.h_q else f"h{self.h_q}kv{self.h_kv}"
        d = f"d{self.d_qk}" if self.d_v == self.d_qk else f"d{self.d_qk}v{self.d_v}"
        parts = ["mha", f"b{self.b}", f"s{self.s}", heads, d]
        parts += ["causal"] if self.causal else []
        parts += [f"window{self.window}"] if self.window is not None else []
        parts += [f"softcap{self.softcap:g}"] if self.softcap else []
        parts += ["sink"] if self.sink else []
        return "-".join([*parts, self.dtype, "varlen" if self.varlen else "fixed"])

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        if self.varlen:
            return "varied lengths"
        if self.window is not None or self.softcap or self.sink:
            return "window, softcap, sink"
        return "s >= 8192" if self.s >= 8192 else "s <= 2048"

    def lengths(self) -> list[tuple[int, int]]:
        """Query tokens and keys of each request: s and s; or with varlen both drawn from a normal
        distribution (deviation s / 2), scaled to the mean s, rounded down, and no fewer keys than queries.
        """
        if not self.varlen:
            return [(self.s, self.s)] * self.b
        rng = random.Random(LENGTH_SEED)

        def draw() -> list[int]:
            drawn = [max(1.0, rng.normalvariate(self.s, self.s / 2)) for _ in range(self.b)]
            return [max(1, int(one * self.b * self.s / sum(drawn))) for one in drawn]

        return [(queries, max(queries, keys)) for queries, keys in zip(draw(), draw(), strict=True)]

    def flops(self) -> int:
        """Multiplications and additions of Q·K^T and P·V over the keys that each query sees; a causal mask
        hides half of the square at its end.
        """
        pairs = sum(self._pairs(queries, keys) for queries, keys in self.lengths())
        return int(2 * self.h_q * pairs * (self.d_qk + self.d_v))

    def _pairs(self, queries: int, keys: int) -> float:
        if self.window is not None:
            own = range(keys - queries, keys)  # the key that each query stands at
            return sum((key + 1 if self.causal else keys) - max(0, key - self.window) for key in own)
        return queries * keys - (queries**2 / 2 if self.causal else 0)

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: q, k and v read once, out written (two bytes a value)."""
        queries, keys = (sum(lengths) for lengths in zip(*self.lengths(), strict=True))
        return 2 * (queries * self.h_q + keys * self.h_kv) * (self.d_qk + self.d_v)

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "mha_forward", **asdict(self)}


def mha_cases() -> list[MhaCase]:
    """Long and short rows of d 128 and 192/128, then other head dimensions, fp16, score steps, a window, and
    batches of varied lengths.
    """
    base = MhaCase(2, 8192)
    mixed = replace(base, d_qk=192)
    d64, d96 = (replace(base, d_qk=d, d_v=d) for d in (64, 96))
    d256 = replace(base, d_qk=256, d_v=256, h_q=8, h_kv=8)
    return [
        base,
        replace(base, causal=False),
        MhaCase(1, 16384),
        MhaCase(8, 2048),
        MhaCase(32, 512),
        replace(base, h_kv=2),
        mixed,
        replace(mixed, causal=False),
        replace(mixed, h_kv=2),
        d64,
        replace(d64, causal=False),
        d96,
        d256,
        replace(d256, causal=False),
        replace(base, dtype="fp16"),
        replace(base, softcap=30.0),
        replace(base, sink=True),
        replace(base, window=1024),
        replace(base, varlen=True),
        replace(base, varlen=True, causal=False),
        MhaCase(8, 2048, varlen=True),
        MhaCase(32, 512, varlen=True),
    ]
