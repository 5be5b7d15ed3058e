"""The cases of dense and sparse decoding, of sparse prefill and of the metadata kernel: their lengths,
operation and byte counts. The operations around decoding are in `cache_cases`, the families in `families`.

Every case has an `id`, its only name: what --list prints, --cases searches, tables and JSON show. `fields()`
are what identifies it in results of other libraries, and `group` is what its ratios are averaged in.
"""

import random
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
        """The name of the case."""
        mask = "-causal" if self.causal else ""
        kind = "varlen" if self.varlen else "fixed"
        mode = "-invariant" if self.batch_invariant else ""
        return f"decode-b{self.b}-q{self.s_q}-k{self.s_k}-h{self.h_q}{mask}-{self.dtype}-{kind}{mode}"

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        if self.batch_invariant:
            return "batch-invariant"
        if self.b <= 4:
            return "b <= 4"
        if self.b < 64:
            return "b 16 to 32"
        return "b >= 64, h_q 128" if self.h_q >= 128 else "b >= 64, h_q 8 to 64"

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
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "dense_decode", **asdict(self)}


TOKEN_BYTES = {("v32", 576): 656, ("model1", 512): 584, ("bf16", 576): 1152, ("bf16", 512): 1024}
"""Bytes of a cached token by layout and d_qk."""


@dataclass(frozen=True)
class SparseCase:
    """One sparse decode call: every query token attends `topk` tokens of its request's s_k, a random subset,
    and `extra_topk` of the same number in an extra cache.

    `extra_tokens` is None when all of those count, else the sum over the requests of `extra_topk_length`.
    """

    b: int
    s_q: int
    s_k: int
    h_q: int
    topk: int
    layout: str
    d_qk: int
    page_block_size: int = 64
    extra_topk: int = 0
    extra_page_block_size: int = 0
    extra_tokens: int | None = None
    batch_invariant: bool = False

    @property
    def id(self) -> str:
        """The name of the case."""
        extra = f"-extra{self.extra_topk}page{self.extra_page_block_size}" if self.extra_topk else ""
        length = "" if self.extra_tokens is None else "-lengths"
        mode = "-invariant" if self.batch_invariant else ""
        shape = f"b{self.b}-q{self.s_q}-k{self.s_k}-h{self.h_q}-top{self.topk}"
        layout = f"bf16d{self.d_qk}" if self.layout == "bf16" else self.layout
        return f"sparse-{layout}-{shape}{extra}{length}{mode}"

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        if self.batch_invariant:
            return "batch-invariant"
        if self.h_q < 64:
            return "h_q 8 to 32"
        return "b >= 64" if self.b >= 64 else "b <= 16"

    def extra_lengths(self) -> list[int] | None:
        """extra_topk_length: drawn evenly from 0 to extra_topk, then moved one by one to their sum."""
        if self.extra_tokens is None:
            return None
        rng = random.Random(LENGTH_SEED)
        lengths = [rng.randint(0, self.extra_topk) for _ in range(self.b)]
        missing = self.extra_tokens - sum(lengths)
        while missing:
            request = rng.randrange(self.b)
            moved = lengths[request] + (1 if missing > 0 else -1)
            if 0 <= moved <= self.extra_topk:
                missing += lengths[request] - moved
                lengths[request] = moved
        return lengths

    def tokens(self) -> int:
        """Selected tokens of all query tokens together."""
        extra = self.b * self.extra_topk if self.extra_tokens is None else self.extra_tokens
        return self.s_q * (self.b * self.topk + extra)

    def flops(self) -> int:
        """Multiplications and additions of Q·K^T and P·V over every selected token."""
        return 2 * self.h_q * self.tokens() * (self.d_qk + D_V)

    def bytes_moved(self) -> int:
        """Bytes of each selected token as often as it is selected, q and out."""
        q_and_out = self.b * self.s_q * self.h_q * (self.d_qk + D_V)
        return self.tokens() * TOKEN_BYTES[self.layout, self.d_qk] + 2 * q_and_out

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        values = asdict(self)
        del values["layout"]
        extra_length = values.pop("extra_tokens") is not None
        return {"op": f"sparse_decode_{self.layout}", **values, "extra_length": extra_length}


@dataclass(frozen=True)
class PrefillCase:
    """One sparse prefill call: every query token attends `topk` of the same s_kv tokens, a random subset.

    `layout` is bf16, tokens in consecutive rows, or v32, a paged FP8 cache in pages of `page_block_size`.
    """

    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    topk: int
    layout: str = "bf16"
    page_block_size: int = 0
    batch_invariant: bool = False

    @property
    def id(self) -> str:
        """The name of the case."""
        layout = f"bf16d{self.d_qk}" if self.layout == "bf16" else self.layout
        mode = "-invariant" if self.batch_invariant else ""
        return f"prefill-{layout}-q{self.s_q}-kv{self.s_kv}-h{self.h_q}-top{self.topk}{mode}"

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        if self.batch_invariant:
            return "batch-invariant"
        if self.layout == "v32":
            return "V3.2 cache"
        if self.h_q < 64:
            return "h_q 8 to 16"
        return "s_q >= 512" if self.s_q >= 512 else "s_q <= 64"

    def flops(self) -> int:
        """Multiplications and additions of Q·K^T and P·V over every selected token."""
        return 2 * self.s_q * self.h_q * self.topk * (self.d_qk + D_V)

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: each token that is selected once, however often it is, q and
        out.
        """
        tokens = min(self.s_kv, self.s_q * self.topk)
        q_and_out = self.s_q * self.h_q * (self.d_qk + D_V)
        return tokens * TOKEN_BYTES[self.layout, self.d_qk] + 2 * q_and_out

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        values = asdict(self)
        layout = values.pop("layout")
        return {"op": "sparse_prefill" if layout == "bf16" else f"sparse_prefill_{layout}", **values}


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
        """The name of the case."""
        return f"metadata-b{self.b}"

    @property
    def group(self) -> str:
        """The cases that its ratios are averaged with."""
        return "all batches"

    def lengths(self) -> list[int]:
        """Tokens of each request, drawn as for a varlen decode case."""
        return DecodeCase(self.b, 1, self.s_k, self.h_q, causal=False, varlen=True).lengths()

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {"op": "metadata", **asdict(self)}


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


def _v32(b: int, s_q: int, h_q: int, topk: int = 2048) -> SparseCase:
    return SparseCase(b, s_q, 32768, h_q, topk, "v32", 576)


def _model1(
    b: int, h_q: int, extra_topk: int, extra_page: int, extra_tokens: int | None = None
) -> SparseCase:
    return SparseCase(b, 2, 16384, h_q, 128, "model1", 512, 256, extra_topk, extra_page, extra_tokens)


# (b, h_q): sum of extra_topk_length in the runs of other libraries, as their published rates imply it.
MODEL1_EXTRA_TOKENS = {
    (2, 64): 1247,
    (64, 64): 31069,
    (128, 64): 69350,
    (256, 64): 133224,
    (2, 128): 1247,
    (64, 128): 32857,
    (128, 128): 65131,
    (256, 128): 123131,
}


def sparse_cases() -> list[SparseCase]:
    """V3.2 (8 to 32 heads are what a GPU has under tensor parallelism), MODEL1 with its two caches, and bf16
    caches; then some of them in batch-invariant mode.
    """
    v32 = [
        *(_v32(b, 2, 128) for b in (2, 16, 64, 74, 128)),
        _v32(128, 1, 128),
        _v32(128, 1, 64),
        _v32(128, 1, 32),
        _v32(128, 1, 16),
        _v32(128, 1, 8),
        _v32(1, 1, 128),
        _v32(1, 1, 16),
        _v32(148, 2, 128, topk=16384),
        _v32(148, 2, 64, topk=16384),
    ]
    model1 = [
        *(_model1(b, 64, 512, 64) for b in (2, 64, 128, 256)),
        *(_model1(b, 128, 1024, 64) for b in (2, 64, 128, 256)),
        *(_model1(b, h_q, 1024, 2, tokens) for (b, h_q), tokens in MODEL1_EXTRA_TOKENS.items()),
    ]
    bf16 = [replace(_v32(b, s_q, 128), layout="bf16") for b, s_q in ((2, 2), (64, 2), (128, 2), (128, 1))]
    bf16.append(replace(bf16[-1], d_qk=512))
    invariant = [_v32(128, 2, 128), _v32(128, 1, 16), _v32(2, 2, 128)]
    return v32 + model1 + bf16 + [replace(case, batch_invariant=True) for case in invariant]


def prefill_cases() -> list[PrefillCase]:
    """bf16 tokens in consecutive rows, few query tokens and few heads among them; a cache in the layout of
    V3.2; then some of the bf16 ones in batch-invariant mode.
    """
    bf16 = [
        *(PrefillCase(4096, s_kv, 128, 576, 2048) for s_kv in (8192, 32768, 131072)),
        *(PrefillCase(4096, s_kv, 64, 512, 512) for s_kv in (8192, 65536)),
        *(PrefillCase(4096, s_kv, 128, 512, 1024) for s_kv in (8192, 65536)),
        *(PrefillCase(s_q, 8192, 128, 576, 2048) for s_q in (1, 64, 512)),
        *(PrefillCase(4096, 8192, h_q, 576, 2048) for h_q in (64, 16, 8)),
        PrefillCase(4096, 32768, 128, 576, 512),
    ]
    v32 = [PrefillCase(s_q, 8192, 128, 576, 2048, "v32", 64) for s_q in (4096, 64)]
    invariant = [(1, 128), (64, 128), (4096, 128), (4096, 16)]
    return (
        bf16 + v32 + [PrefillCase(s_q, 8192, h_q, 576, 2048, batch_invariant=True) for s_q, h_q in invariant]
    )
