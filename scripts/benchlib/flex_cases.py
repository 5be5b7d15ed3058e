"""The cases of flex attention: masks and score functions, operation and byte counts."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

BLOCK = 128
"""Tokens of a block by which operations are counted, whatever the blocks of a case's mask are."""


@dataclass(frozen=True)
class FlexCase:
    """One forward call: b requests of s query tokens and s keys each.

    `mask`: "full", "causal"; causal and besides "window", the `extent` keys before a query's own, or
    "documents" of `extent` tokens each; or "prefix", causal behind `extent` tokens that everyone attends.
    `score`: "alibi", "softcap" (30), "bias" (a table by head and distance), "scale" (a factor for each
    head), "scalar" (one factor), or None. `cuda_text`: the mask is CUDA text instead of a Python function;
    `further`: lse and max_scores are results too.
    """

    b: int = 2
    s: int = 8192
    h_q: int = 16
    h_kv: int = 16
    d: int = 128
    mask: str = "causal"
    extent: int = 0
    score: str | None = None
    block_size: int = 128
    cuda_text: bool = False
    further: bool = False

    @property
    def id(self) -> str:
        """The name of the case."""
        heads = f"h{self.h_q}" if self.h_kv == self.h_q else f"h{self.h_q}kv{self.h_kv}"
        parts = ["flex", f"b{self.b}", f"s{self.s}", heads, f"d{self.d}"]
        parts += [f"{self.mask}{self.extent}" if self.extent else self.mask]
        parts += [self.score] if self.score is not None else []
        parts += [f"block{self.block_size}"] if self.block_size != BLOCK else []
        parts += ["cuda"] if self.cuda_text else []
        return "-".join([*parts, *(["lse-max"] if self.further else [])])

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        return "mask alone" if self.score is None else "score function"

    @property
    def is_compared(self) -> bool:
        """Whether torch's flex attention runs beside."""
        plain = self.block_size == BLOCK and not self.cuda_text and not self.further
        return plain and self.mask != "prefix" and self.score not in ("bias", "scale", "scalar")

    def visible(self, token: int) -> tuple[int, int]:
        """The first key that a query token attends, and the one behind the last."""
        end = token + 1
        if self.mask == "full":
            return 0, self.s
        if self.mask == "window":
            return max(0, token - self.extent), end
        if self.mask == "documents":
            return token - token % self.extent, end
        return 0, max(self.extent, end)  # extent: of "prefix"

    def attended(self, block: int) -> list[set[int]]:
        """Of each block of so many query tokens, the blocks of as many keys that any of them attends."""
        rows: list[set[int]] = [set() for _ in range(0, self.s, block)]
        for token in range(self.s):
            begin, end = self.visible(token)
            rows[token // block].update(range(begin // block, -(-end // block)))
        return rows

    def density(self) -> float:
        """The share of blocks of BLOCK x BLOCK positions that have an attended one."""
        return _density(self)

    def flops(self) -> int:
        """Multiplications and additions of Q·K^T and P·V in the blocks that `density` counts."""
        return int(4 * self.d * self.h_q * self.b * self.s**2 * self.density())

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: q, k and v read once, out, lse and max_scores written."""
        values = 2 * self.d * 2 * (self.h_q + self.h_kv)
        return self.b * self.s * (values + (8 * self.h_q if self.further else 0))

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "flex_attention", **asdict(self)}


@cache  # pages and tables ask for it again and again
def _density(case: FlexCase) -> float:
    rows = case.attended(BLOCK)
    return sum(map(len, rows)) / len(rows) ** 2


@dataclass(frozen=True)
class BlockMaskCase:
    """`create_block_mask` of a causal Python function over s query tokens and s keys."""

    s: int

    @property
    def id(self) -> str:
        """The name of the case."""
        return f"flex-block-mask-causal-s{self.s}"

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        return "block masks"

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "create_block_mask", "mask": "causal", **asdict(self)}


def flex_cases() -> list[FlexCase]:
    """The masks and score functions that torch's flex attention runs beside, then others, and the causal mask
    in other forms.
    """
    base = FlexCase()
    return [
        replace(base, mask="full"),
        base,
        replace(base, h_kv=2),
        replace(base, mask="window", extent=1024),
        replace(base, score="alibi"),
        replace(base, score="softcap"),
        replace(base, mask="documents", extent=900),
        replace(base, d=64),
        replace(base, score="bias"),
        replace(base, mask="prefix", extent=2048),
        replace(base, cuda_text=True),
        replace(base, block_size=64),
        replace(base, further=True),
    ]


def block_mask_cases() -> list[BlockMaskCase]:
    """One mask, as large as those of the cases."""
    return [BlockMaskCase(8192)]
