"""What the benchmark measures: dense decode cases and metadata batches, their lengths, operation and byte
counts.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

D_V = 512
"""Value head dimension: V is the first 512 columns of K."""

LENGTH_SEED = 0
"""Seed of the lengths of a varlen case."""

METADATA_BATCHES = (1, 32, 128, 512, 1024, 4096)


@dataclass(frozen=True)
class DecodeCase:
    """One dense decode call: b requests of about s_k tokens each, paged cache, V inside K."""

    b: int
    s_q: int
    s_k: int
    h_q: int
    causal: bool
    varlen: bool
    dtype: str = "bf16"
    h_kv: int = 1
    d_qk: int = 576
    page_block_size: int = 64
    batch_invariant: bool = False

    @property
    def id(self) -> str:
        """Readable name, the text that --cases searches."""
        mask = "-causal" if self.causal else ""
        kind = "varlen" if self.varlen else "fixed"
        mode = "-invariant" if self.batch_invariant else ""
        return f"decode-b{self.b}-q{self.s_q}-k{self.s_k}-h{self.h_q}{mask}-{self.dtype}-{kind}{mode}"

    def lengths(self) -> list[int]:
        """Tokens of each request: s_k, or with varlen drawn from a normal distribution (mean s_k, deviation
        s_k / 2), rounded down and at least s_q.
        """
        if not self.varlen:
            return [self.s_k] * self.b
        rng = random.Random(LENGTH_SEED)
        return [max(self.s_q, int(rng.normalvariate(self.s_k, self.s_k / 2))) for _ in range(self.b)]

    def flops(self) -> int:
        """Multiplications and additions of Q·K^T and P·V over every token of every request (a causal mask
        is not subtracted).
        """
        return 2 * self.s_q * self.h_q * sum(self.lengths()) * (self.d_qk + D_V)

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: each cache row read once, q read, out written (two bytes a
        value).
        """
        cache = sum(self.lengths()) * self.h_kv * self.d_qk
        q_and_out = self.b * self.s_q * self.h_q * (self.d_qk + D_V)
        return 2 * (cache + q_and_out)

    def fields(self) -> dict[str, Any]:
        """The case as the leading fields of a result row."""
        return {"op": "dense_decode", **asdict(self)}


@dataclass(frozen=True)
class MetadataCase:
    """One scheduling call for b requests with varlen lengths around 4096 tokens, one query token, 128
    heads.
    """

    b: int
    s_k: int = 4096
    h_q: int = 128

    @property
    def id(self) -> str:
        """Readable name, the text that --cases searches."""
        return f"metadata-b{self.b}"

    def lengths(self) -> list[int]:
        """Tokens of each request, drawn as for a varlen decode case."""
        return DecodeCase(self.b, 1, self.s_k, self.h_q, causal=False, varlen=True).lengths()

    def fields(self) -> dict[str, Any]:
        """The case as the leading fields of a result row."""
        return {"op": "metadata", **asdict(self)}


Case = DecodeCase | MetadataCase


def _decode(
    b: int, s_q: int, s_k: int, h_q: int, *, varlen: bool, causal: bool = False, dtype: str = "bf16"
) -> DecodeCase:
    return DecodeCase(b, s_q, s_k, h_q, causal=causal, varlen=varlen, dtype=dtype)


def decode_cases() -> list[DecodeCase]:
    """Large batches with varied lengths, then fixed lengths, then some of both in batch-invariant mode. Calls
    with several query tokens and fixed lengths are causal.
    """
    varlen = [
        _decode(128, 1, 4096, 128, varlen=True),
        _decode(128, 2, 4096, 128, varlen=True, causal=True),
        _decode(128, 1, 8192, 128, varlen=True),
        _decode(128, 2, 8192, 128, varlen=True),
        _decode(128, 2, 8192, 128, varlen=True, causal=True),
        _decode(128, 1, 16384, 128, varlen=True),
        _decode(128, 2, 16384, 128, varlen=True, causal=True),
        _decode(128, 1, 32768, 128, varlen=True),
        _decode(128, 2, 32768, 128, varlen=True, causal=True),
        _decode(128, 2, 8192, 128, varlen=True, causal=True, dtype="fp16"),
        _decode(128, 1, 8192, 16, varlen=True),
        _decode(128, 1, 8192, 64, varlen=True),
        _decode(64, 1, 4096, 16, varlen=True),
    ]
    fixed = [
        _decode(128, 1, 4096, 128, varlen=False),
        _decode(128, 1, 8192, 128, varlen=False),
        _decode(128, 2, 8192, 128, varlen=False, causal=True),
        _decode(128, 1, 8192, 64, varlen=False),
        _decode(128, 1, 8192, 16, varlen=False),
        _decode(128, 1, 8192, 8, varlen=False),
        _decode(64, 1, 4096, 16, varlen=False),
        _decode(32, 4, 4096, 16, varlen=False, causal=True),
        _decode(16, 1, 4096, 128, varlen=False),
        _decode(16, 2, 4096, 128, varlen=False, causal=True),
        _decode(16, 1, 4096, 16, varlen=False),
        _decode(4, 1, 8192, 128, varlen=False),
        _decode(1, 1, 8192, 128, varlen=False),
        _decode(1, 1, 32768, 128, varlen=False),
        _decode(1, 1, 131072, 128, varlen=False),
        _decode(1, 1, 8192, 16, varlen=False),
        _decode(1, 1, 131072, 16, varlen=False),
    ]
    invariant = [
        _decode(128, 1, 4096, 128, varlen=True),
        _decode(128, 1, 8192, 16, varlen=True),
        _decode(16, 1, 4096, 128, varlen=False),
        _decode(1, 1, 8192, 128, varlen=False),
    ]
    return varlen + fixed + [replace(case, batch_invariant=True) for case in invariant]


def all_cases() -> list[Case]:
    """Every case of the benchmark, in the order of the tables."""
    return [*decode_cases(), *(MetadataCase(b) for b in METADATA_BATCHES)]


def select(cases: Sequence[Case], pattern: str | None) -> list[Case]:
    """The cases whose id contains a match of the regular expression; all of them without one.

    Raises ValueError when nothing matches, so a typing error cannot pass for an empty run.
    """
    if pattern is None:
        return list(cases)
    chosen = [case for case in cases if re.search(pattern, case.id)]
    if not chosen:
        raise ValueError(f"--cases {pattern!r} matches none of: " + ", ".join(case.id for case in cases))
    return chosen


def group_of(row: dict[str, Any]) -> str:
    """The family that a result row's ratio is averaged in."""
    if row.get("op") == "metadata":
        return "metadata"
    if row["batch_invariant"]:
        return "batch-invariant"
    if row["b"] <= 4:
        return "b <= 4"
    if row["b"] < 64:
        return "b 16 to 32"
    return "b >= 64, h_q 128" if row["h_q"] >= 128 else "b >= 64, h_q 8 to 64"
