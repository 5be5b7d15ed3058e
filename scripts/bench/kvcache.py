"""The cases of attention over caches of keys and values: decoding, appending, and prefill in chunks."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import rawmla

from . import flash_attention_3, mla
from .cases import CONTIGUOUS, FLASH_ATTENTION_3, FLASH_ATTENTION_4, LENGTH_SEED, Arrays, Call, Prepared
from .dense import drawn_lengths
from .prefix import SCALES, page_table, stored
from .reference import AttentionCase, Request


@dataclass(eq=False)
class KvCacheCase(AttentionCase):
    """One causal call: b requests of s_q query tokens, the last of the s_k tokens that each has in the cache.

    `cache`: "bf16", or "fp8" (e4m3); `page` 0: contiguous caches. With `ragged` s_k is a mean. `append`: the
    call rotates the query tokens and their keys, and writes the keys and values to the cache. `segments`:
    query tokens of all requests are one array; the first `chunks` requests have `chunk` of them.
    """

    template = (
        "kvcache-b{b}-q{s_q}-k{s_k}-h{h_q}kv{h_kv}-d{d}-{cache:bf16|fp8}-(page{page}|contiguous)"
        "[-{ragged}][-{append}][-{segments}][-first{chunks}q{chunk}]"
    )
    s_q: int
    s_k: int
    h_q: int
    h_kv: int
    d: int
    cache: str
    page: int = 0
    ragged: bool = False
    append: bool = False
    segments: bool = False
    chunks: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        self.is_prefill = self.segments
        self.segments |= self.chunks > 0
        self.queries = [self.chunk] * self.chunks + [self.s_q] * (self.b - self.chunks)
        self.keys = [self.s_k] * self.b
        if self.ragged:
            drawn = drawn_lengths(random.Random(LENGTH_SEED), self.b, self.s_k)
            self.keys = [max(self.s_q, length) for length in drawn]

    def flops(self) -> int:
        """Q·K^T and P·V over the keys that each query sees."""
        seen = (n * keys - n * (n - 1) // 2 for n, keys in zip(self.queries, self.keys, strict=True))
        return 4 * self.d * self.h_q * sum(seen)

    def bytes_moved(self) -> int:
        """The caches and q read once, out written; new keys and values read, too."""
        cached = sum(self.keys) * self.h_kv * (2 if self.cache == "bf16" else 1)
        return 2 * self.d * (cached + 2 * sum(self.queries) * (self.h_q + self.append * self.h_kv))

    def make_inputs(self, sets: int = 1, device: str = "cuda") -> Arrays:
        """All normal(0, 1), pages in a random order. `sets` pairs of caches have one table."""
        torch.manual_seed(0)
        page, tokens = self.page or max(self.keys), sum(self.queries)
        pages = [-(-length // page) for length in self.keys]
        table = (page_table(pages) if self.page else torch.arange(self.b)[:, None]).to(device)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        def integers(values: Any) -> Any:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        def new(heads: int) -> Any:
            rows = (tokens,) if self.segments else (self.b, self.s_q)
            return normal(*rows, heads, self.d)

        caches = [
            [stored(normal(sum(pages), page, self.h_kv, self.d), self.cache, scale) for scale in SCALES]
            for _ in range(sets)
        ]
        k, v = (new(self.h_kv) if self.append else None for _ in range(2))
        turns = torch.arange(page * max(pages))[:, None] * 10000.0 ** torch.linspace(0, -1, self.d // 2)
        cos, sin = (x.to(device, torch.bfloat16) if self.append else None for x in (turns.cos(), turns.sin()))
        new_tokens = self.s_q if self.append else 0
        return Arrays(
            q=new(self.h_q),
            k=k,
            v=v,
            caches=caches,
            table=table,
            cos=cos,
            sin=sin,
            lengths=integers(self.keys),
            before=integers(length - new_tokens for length in self.keys),
            cu_seqlens_q=integers([0, *accumulate(self.queries)]),
            descales=[torch.full((self.b, self.h_kv), scale, device=device) for scale in SCALES],
        )

    def common(self, inputs: Arrays, table: str) -> dict[str, Any]:
        """Keyword arguments for rawmla and FlashAttention alike, but for the name of the table."""
        chosen = {"causal": True, table: inputs.table if self.page else None}
        if self.segments:
            chosen |= {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(self.queries)}
        return chosen

    def call(self, inputs: Arrays) -> Call:
        """Calls of rawmla by the number of a pair of caches, which come in turns."""
        keywords = self.common(inputs, "block_table")
        keywords |= {"k": inputs.k, "v": inputs.v, "cache_seqlens": inputs.before}
        if self.append:
            keywords |= {"rotary_cos": inputs.cos, "rotary_sin": inputs.sin, "rotary_interleaved": False}
        if self.cache == "fp8":
            keywords |= dict(zip(("k_descale", "v_descale"), inputs.descales, strict=True))
        function, count = rawmla.flash_attn_with_kvcache, len(inputs.caches)
        return lambda i: function(inputs.q, *inputs.caches[i % count], **keywords)[0]

    def of_request(self, array: Any, number: int, keys: bool = False) -> Any:
        """See AttentionCase: its query tokens, or new ones."""
        return array.reshape(-1, *array.shape[-2:]).split(self.queries)[number]

    def cached(self, inputs: Arrays, number: int) -> list[Any]:
        """Keys and values of a request, as the first pair of caches has them."""
        length = self.keys[number]
        pages = inputs.table[number, : -(-length // inputs.caches[0][0].shape[1])].long()
        return [array[pages].flatten(0, 1)[:length] for array in inputs.caches[0]]

    def request(self, inputs: Arrays, number: int) -> Request:
        """See AttentionCase."""
        q = self.of_request(inputs.q, number)
        scales = SCALES if self.cache == "fp8" else (1.0, 1.0)
        k, v = (x.double() * by for x, by in zip(self.cached(inputs, number), scales, strict=True))

        def rotated(x: Any) -> Any:
            cos, sin = (one[len(k) - len(x) : len(k), None].double() for one in (inputs.cos, inputs.sin))
            left, right = x.double().chunk(2, -1)
            return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

        if self.append:
            new = rotated(self.of_request(inputs.k, number))
            k = torch.cat([k[: -len(q)], new])
            v = torch.cat([v[: -len(q)], self.of_request(inputs.v, number).double()])
            q = rotated(q)
        return Request(q, k, v, lambda own, keys: keys <= own)

    def prepare(self) -> Prepared:
        """See Case. Nothing runs beside a call that appends: vLLM's build of FlashAttention-3 cannot, and
        FlashAttention-4 has no such function.
        """
        sets = mla.rotated_sets(self)
        inputs = self.make_inputs(sets)
        call = self.call(inputs)
        libraries: dict[str, Callable[[Arrays], Call]] = {}
        if not self.append:
            libraries = {FLASH_ATTENTION_3: self.flash_attention_3, FLASH_ATTENTION_4: self.flash_attention_4}
        if self.is_prefill:
            libraries[CONTIGUOUS] = self.contiguous
        peers = {name: partial(self.checked, make, inputs) for name, make in libraries.items()}
        return Prepared(call, self.check(inputs, call(0)), sets, peers=peers, in_turn=True)

    def checked(self, make: Callable[[Arrays], Call], inputs: Arrays) -> Call:
        """The calls of a library, whose result is checked. With FP8 caches its queries and probabilities may
        be FP8 too: 10 % are allowed.
        """
        call = make(inputs)
        self.check(inputs, call(0), bound=0.01 if self.cache == "bf16" else 0.1)
        return call

    def flash_attention_3(self, inputs: Arrays) -> Call:
        """FlashAttention-3 of vLLM, where it serves such a case."""
        flash_attention_3.library()
        flash_attention_3.run_alone(f"kvcache-b1-q1-k64-h8kv2-d{self.d}-{self.cache}-page16")
        return self.of_vllm(inputs)

    def of_vllm(self, inputs: Arrays) -> Call:
        """FlashAttention-3 of vLLM: queries are segments, and in the dtype of the caches."""
        q = inputs.q.reshape(-1, self.h_q, self.d)
        arguments = {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(self.queries)}
        arguments |= {"max_seqlen_k": max(self.keys), "page_table": inputs.table if self.page else None}
        if self.cache == "fp8":
            q = q.to(torch.float8_e4m3fn)
            arguments |= {"q_descale": torch.ones_like(inputs.descales[0])}
            arguments |= dict(zip(("k_descale", "v_descale"), inputs.descales, strict=True))
        attend = flash_attention_3.attention(
            q, inputs.lengths, self.page or None, h_kv=self.h_kv, **arguments
        )
        return lambda i: attend(*inputs.caches[i % len(inputs.caches)])

    def flash_attention_4(self, inputs: Arrays) -> Call:
        """FlashAttention-4."""
        from flash_attn.cute import flash_attn_varlen_func

        keywords = self.common(inputs, "page_table")
        keywords |= {"seqused_k": inputs.lengths, "max_seqlen_k": max(self.keys)}
        pairs = inputs.caches
        return lambda i: flash_attn_varlen_func(inputs.q, *pairs[i % len(pairs)], **keywords)[0]

    def contiguous(self, inputs: Arrays) -> Call:
        """rawmla over the same keys and values without pages."""
        k, v = map(torch.cat, zip(*(self.cached(inputs, n) for n in range(self.b)), strict=True))
        keywords = {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(self.queries), "causal": True}
        starts = torch.tensor([0, *accumulate(self.keys)], dtype=torch.int32, device=k.device)
        keywords |= {"cu_seqlens_k": starts, "max_seqlen_k": max(self.keys)}
        return lambda _: rawmla.flash_attn_varlen_func(inputs.q, k, v, **keywords)[0]
