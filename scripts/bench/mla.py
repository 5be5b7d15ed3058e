"""The cases of MLA: dense and sparse decoding, sparse prefill, and the plan of a decoding step."""

import random
from dataclasses import dataclass
from typing import Any

import torch

import rawmla
from kit import torch_reference
from kit.generators import GARBAGE_PAGE
from kit.sparse import SparseCase as Layout
from kit.sparse import SparseInputs, make_cache, row_format

from .cases import DTYPES, LENGTH_SEED, Arrays, Call, Case, Prepared, Row, worst_error
from .timing import slope

D_QK, D_V = 576, 512
"""Head dimensions of dense decoding: V is the first 512 columns of K."""

PAGE = 64
"""Tokens of a page, but of caches of MODEL1."""

EXTRA_TOKENS = {
    **{(2, 64): 1247, (64, 64): 31069, (128, 64): 69350, (256, 64): 133224},
    **{(2, 128): 1247, (64, 128): 32857, (128, 128): 65131, (256, 128): 123131},
}
"""Sums of extra_topk_length by b and h_q, in the runs of other libraries, as their published rates imply."""

COLD_L2_FACTOR = 3
MAX_ROTATED_SETS = 64
METADATA_GRAPH_CALLS = (20, 120)

SAMPLED_QUERIES = 8


def rotated_sets(case: Case, l2: int | None = None) -> int:
    """How many page sets keep successive calls out of L2; 1 when one call's data already exceeds it."""
    l2 = int(torch.cuda.get_device_properties(0).L2_cache_size) if l2 is None else l2
    if case.bytes_moved() >= l2:
        return 1
    return min(MAX_ROTATED_SETS, -(-COLD_L2_FACTOR * l2 // case.bytes_moved()) + 1)


def _time_plan(replays: int, *arguments: Any, invariant: bool = False) -> float:
    """Microseconds of one metadata kernel."""
    plan = rawmla.get_mla_metadata(*arguments, enable_batch_invariant=invariant)

    def call(_: int) -> None:
        rawmla.get_mla_metadata(*arguments, enable_batch_invariant=invariant, out=plan)

    return slope(call, *METADATA_GRAPH_CALLS, replays)


def _prepare(case: "DecodeCase | SparseCase") -> Prepared:
    """A case of decoding with its plan, which is timed too."""
    sets = rotated_sets(case)
    inputs = case.make_inputs(sets)
    call = case.calls(inputs)

    def more(replays: int) -> Row:
        return {"meta_us": _time_plan(replays, *case.plan_arguments(inputs), invariant=case.invariant)}

    return Prepared(call, case.check(inputs, call(0)[0]), sets, more=more)


@dataclass(eq=False)
class DecodeCase(Case):
    """One dense decode call: b requests of about s_k tokens each, paged cache, V inside K."""

    template = "decode-b{b}-q{s_q}-k{s_k}-h{h_q}[-{causal}]-{dtype:bf16|fp16}-(fixed|{varlen})[-{invariant}]"
    b: int
    s_q: int
    s_k: int
    h_q: int
    dtype: str
    causal: bool = False
    varlen: bool = False
    invariant: bool = False

    def lengths(self) -> list[int]:
        """Tokens of each request: s_k, or with varlen drawn from a normal distribution (mean s_k, deviation
        s_k / 2), rounded down and at least s_q.
        """
        if not self.varlen:
            return [self.s_k] * self.b
        rng = random.Random(LENGTH_SEED)
        return [max(self.s_q, int(rng.normalvariate(self.s_k, self.s_k / 2))) for _ in range(self.b)]

    def flops(self) -> int:
        """Q·K^T and P·V over every token of every request (a causal mask is not subtracted)."""
        return 2 * self.s_q * self.h_q * sum(self.lengths()) * (D_QK + D_V)

    def bytes_moved(self) -> int:
        """Each cache row read once, q read, out written (two bytes a value)."""
        cache = sum(self.lengths()) * D_QK
        return 2 * (cache + self.b * self.s_q * self.h_q * (D_QK + D_V))

    def make_inputs(self, sets: int = 1, device: str = "cuda") -> Arrays:
        """q normal(0, 1) clamped to [-1, 1], cache normal(0, 0.1), pages in a random order. `sets` disjoint
        sets of pages hold as many caches.
        """
        torch.manual_seed(0)
        dtype = getattr(torch, DTYPES[self.dtype])
        lengths = self.lengths()
        pages = [-(-length // PAGE) for length in lengths]
        q = torch.randn(self.b, self.s_q, self.h_q, D_QK, device=device, dtype=dtype).clamp_(-1, 1)
        k_cache = torch.empty(sets * sum(pages), PAGE, 1, D_QK, device=device, dtype=dtype)
        k_cache.normal_(0, 0.1)
        numbers = iter(torch.randperm(len(k_cache)).int().split(pages * sets))
        tables = []
        for _ in range(sets):
            table = torch.full((self.b, max(pages)), GARBAGE_PAGE, dtype=torch.int32)
            for row, count in zip(table, pages, strict=True):
                row[:count] = next(numbers)
            tables.append(table.to(device))
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
        return Arrays(q=q, k_cache=k_cache, block_tables=tables, cache_seqlens=seqlens)

    def check(self, inputs: Arrays, out: Any) -> float:
        """Error of the first and the longest request."""
        lengths = self.lengths()
        chosen = sorted({0, lengths.index(max(lengths))})
        want, _ = torch_reference.flash_mla_with_kvcache(
            inputs.q[chosen],
            inputs.k_cache,
            inputs.block_tables[0][chosen],
            inputs.cache_seqlens[chosen],
            causal=self.causal,
        )
        found = zip(chosen, out[chosen], want, strict=True)
        return worst_error(self, ((f"request {number}", got, one) for number, got, one in found))

    def plan_arguments(self, inputs: Arrays) -> tuple[Any, ...]:
        return inputs.cache_seqlens, self.s_q * self.h_q, 1, self.h_q

    def calls(self, inputs: Arrays) -> Call:
        """Calls by the number of a set of pages."""
        ours = {"enable_batch_invariant": self.invariant}
        plan = rawmla.get_mla_metadata(*self.plan_arguments(inputs), **ours)

        def call(table: int) -> Any:
            arguments = inputs.q, inputs.k_cache, inputs.block_tables[table], inputs.cache_seqlens, D_V
            return rawmla.flash_mla_with_kvcache(*arguments, *plan, causal=self.causal, **ours)

        return call

    def prepare(self) -> Prepared:
        return _prepare(self)


@dataclass(eq=False)
class SparseCase(Case):
    """One sparse decode call: every query token attends `topk` tokens of its request's s_k, a random subset,
    and `extra_topk` of the same number in an extra cache.

    With `lengths`, EXTRA_TOKENS of those count; else all.
    """

    template = (
        "sparse-{layout:v32|model1|bf16}[d{d_qk}]-b{b}-q{s_q}-k{s_k}-h{h_q}-top{topk}"
        "[-extra{extra_topk}page{extra_page}][-{lengths}][-{invariant}]"
    )
    layout: str
    b: int
    s_q: int
    s_k: int
    h_q: int
    topk: int
    d_qk: int = 0
    extra_topk: int = 0
    extra_page: int = 0
    lengths: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        self.d_qk = self.d_qk or (512 if self.layout == "model1" else 576)
        self.page = 256 if self.layout == "model1" else PAGE
        self.extra_tokens = EXTRA_TOKENS[self.b, self.h_q] if self.lengths else self.b * self.extra_topk

    def extra_lengths(self) -> list[int] | None:
        """extra_topk_length: drawn evenly from 0 to extra_topk, then moved one by one to their sum."""
        if not self.lengths:
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
        return self.s_q * (self.b * self.topk + self.extra_tokens)

    def flops(self) -> int:
        """Q·K^T and P·V over every selected token."""
        return 2 * self.h_q * self.tokens() * (self.d_qk + D_V)

    def bytes_moved(self) -> int:
        """Each selected token as often as it is selected, q and out."""
        q_and_out = self.b * self.s_q * self.h_q * (self.d_qk + D_V)
        return self.tokens() * row_format(self.layout, self.d_qk).token_bytes + 2 * q_and_out

    def layout_of_tests(self) -> Layout:
        """The case as tests/kit knows it. Blocks of MODEL1 are padded to a multiple of 576 bytes."""
        gap = 1 if self.layout == "model1" else 0
        return Layout(b=self.b, s_q=self.s_q, h_q=self.h_q, layout=self.layout, d_qk=self.d_qk, block_gap=gap)

    def make_inputs(self, sets: int = 1, device: str = "cuda") -> Arrays:
        """q normal(0, 1) clamped to [-1, 1], caches normal(0, 0.1) and quantised, pages in a random order,
        indices a random subset of the request's tokens. `sets` disjoint sets of pages hold as many caches.
        """
        torch.manual_seed(0)
        q = torch.randn(self.b, self.s_q, self.h_q, self.d_qk, device=device).clamp_(-1, 1).bfloat16()
        k_cache, indices = self._cache(self.page, self.topk, sets, device)
        extra_cache, extra_indices = None, [None] * sets
        if self.extra_topk:
            extra_cache, extra_indices = self._cache(self.extra_page, self.extra_topk, sets, device)
        lengths = self.extra_lengths()
        length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
        return Arrays(
            q=q,
            k_cache=k_cache,
            extra_k_cache=extra_cache,
            index_sets=list(zip(indices, extra_indices, strict=True)),
            extra_topk_length=length,
        )

    def _cache(self, page: int, topk: int, sets: int, device: str) -> tuple[Any, list[Any]]:
        pages = -(-self.s_k // page)
        k_cache = make_cache(self.layout_of_tests(), sets * self.b * pages, page, device)
        found = []
        for table in torch.randperm(len(k_cache), device=device).view(sets, self.b, 1, pages):
            order = torch.rand(self.b, self.s_q, self.s_k, device=device).argsort(dim=2)
            token = order[..., :topk]
            block = table.expand(-1, self.s_q, -1).gather(2, token // page)
            found.append((block * page + token % page).int())
        return k_cache, found

    def check(self, inputs: Arrays, out: Any) -> float:
        """Error of the first and the last request."""
        found = []
        for request in {0, self.b - 1}:
            part = slice(request, request + 1)
            indices, extra = (None if one is None else one[part] for one in inputs.index_sets[0])
            length = inputs.extra_topk_length
            chosen = SparseInputs(
                self.layout_of_tests(),
                q=inputs.q[part],
                k_cache=inputs.k_cache,
                indices=indices,
                extra_k_cache=inputs.extra_k_cache,
                extra_indices=extra,
                extra_topk_length=None if length is None else length[part],
            )
            found.append((f"request {request}", out[part], torch_reference.sparse_decode(chosen)[0]))
        return worst_error(self, found)

    def plan_arguments(self, inputs: Arrays) -> tuple[Any, ...]:
        """What rawmla takes from the arguments of a sparse call."""
        requests = torch.zeros(self.b, dtype=torch.int32, device=inputs.q.device)
        slots = 64 * (-(-self.topk // 64) + -(-self.extra_topk // 64))
        return requests, self.s_q * self.h_q, 1, self.h_q, self.layout != "bf16", slots

    def calls(self, inputs: Arrays) -> Call:
        """Calls by the number of a set of pages."""
        plan, _ = rawmla.get_mla_metadata(enable_batch_invariant=self.invariant)

        def call(number: int) -> Any:
            indices, extra_indices = inputs.index_sets[number]
            return rawmla.flash_mla_with_kvcache(
                *(inputs.q, inputs.k_cache, None, None, D_V, plan, None),
                is_fp8_kvcache=self.layout != "bf16",
                indices=indices,
                extra_k_cache=inputs.extra_k_cache,
                extra_indices_in_kvcache=extra_indices,
                extra_topk_length=inputs.extra_topk_length,
            )

        return call

    def prepare(self) -> Prepared:
        return _prepare(self)


@dataclass(eq=False)
class PrefillCase(Case):
    """One sparse prefill call: every query token attends `topk` of the same s_kv tokens, a random subset.

    `layout` is bf16, tokens in consecutive rows, or v32, a paged FP8 cache.
    """

    template = "prefill-{layout:bf16|v32}[d{d_qk}]-q{s_q}-kv{s_kv}-h{h_q}-top{topk}[-{invariant}]"
    layout: str
    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int = 576
    invariant: bool = False

    def flops(self) -> int:
        """Q·K^T and P·V over every selected token."""
        return 2 * self.s_q * self.h_q * self.topk * (self.d_qk + D_V)

    def bytes_moved(self) -> int:
        """Each token that is selected once, however often it is, q and out."""
        tokens = min(self.s_kv, self.s_q * self.topk)
        q_and_out = self.s_q * self.h_q * (self.d_qk + D_V)
        return tokens * row_format(self.layout, self.d_qk).token_bytes + 2 * q_and_out

    def make_inputs(self, sets: int = 1, device: str = "cuda") -> Arrays:
        """q normal(0, 1) clamped to [-1, 1], tokens normal(0, 0.1), of a paged cache quantised and in pages
        in a random order. `indices` are the rows or slots of a random subset of the tokens. `sets` times as
        many tokens serve runs whose data must not stay in L2.
        """
        torch.manual_seed(0)
        q = torch.randn(self.s_q, self.h_q, self.d_qk, device=device).clamp_(-1, 1).bfloat16()
        # The places of the largest random numbers: any subset, in any order, equally likely.
        positions = torch.rand(self.s_q, 1, self.s_kv, device=device).topk(self.topk).indices.int()
        if self.layout == "bf16":
            shape = sets, self.s_kv, 1, self.d_qk
            kv = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.1)
            return Arrays(q=q, kv_sets=list(kv), indices=positions)
        pages = -(-self.s_kv // PAGE)
        k_cache = make_cache(self._layout(1), sets * pages, PAGE, device)
        table = torch.randperm(pages, device=device)
        indices = (table[positions // PAGE] * PAGE + positions % PAGE).int()
        return Arrays(q=q, kv_sets=list(k_cache.split(pages)), indices=indices)

    def _layout(self, b: int) -> Layout:
        """The case as tests/kit knows it: `b` query tokens as requests that share a cache."""
        return Layout(b=b, h_q=self.h_q, layout=self.layout, d_qk=self.d_qk)

    def check(self, inputs: Arrays, out: Any) -> float:
        """Error of some query tokens, the first and the last among them."""
        count = min(SAMPLED_QUERIES, self.s_q)
        queries = torch.linspace(0, self.s_q - 1, count, dtype=torch.float64).round().long().to(out.device)
        kv = inputs.kv_sets[0]
        chosen = SparseInputs(
            self._layout(count),
            q=inputs.q[queries][:, None],
            k_cache=kv[None] if self.layout == "bf16" else kv,
            indices=inputs.indices[queries],
        )
        want, _ = torch_reference.sparse_decode(chosen)
        found = zip(queries.tolist(), out[queries], want[:, 0], strict=True)
        return worst_error(self, ((f"query token {token}", got, one) for token, got, one in found))

    def prepare(self) -> Prepared:
        sets = rotated_sets(self)
        inputs = self.make_inputs(sets)

        def call(number: int) -> Any:
            return rawmla.flash_mla_sparse_fwd(
                inputs.q,
                inputs.kv_sets[number],
                inputs.indices,
                self.d_qk**-0.5,
                is_fp8_kvcache=self.layout != "bf16",
                enable_batch_invariant=self.invariant,
            )[0]

        return Prepared(call, self.check(inputs, call(0)), sets)


@dataclass(eq=False)
class MetadataCase(Case):
    """One scheduling call for b requests with varlen lengths around 4096 tokens, one query token, 128
    heads.
    """

    template = "metadata-b{b}"
    b: int


def time_metadata(case: MetadataCase, rounds: int, replays: int, sustain_seconds: float) -> Row:
    """Measure the metadata kernel alone. Its graphs are too short for a rest, so that both figures are the
    same.
    """
    lengths = DecodeCase("", case.b, 1, 4096, 128, "bf16", varlen=True).lengths()
    us = _time_plan(replays, torch.tensor(lengths, dtype=torch.int32, device="cuda"), 128, 1, 128)
    return {"case": case.id, "us": us, "unrested_us": us}
