"""The cases of dense attention with a K and a V of their own, and of its backward."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

import rawmla

from . import reference
from .cases import (
    CUDNN,
    DTYPES,
    FLASH_ATTENTION_4,
    LENGTH_SEED,
    Arrays,
    Call,
    Case,
    Prepared,
    worst_error,
)


@dataclass(frozen=True)
class DenseCase(Case):
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
        heads = f"h{self.h_q}" if self.h_kv == self.h_q else f"h{self.h_q}kv{self.h_kv}"
        d = f"d{self.d_qk}" if self.d_v == self.d_qk else f"d{self.d_qk}v{self.d_v}"
        parts = ["mha", f"b{self.b}", f"s{self.s}", heads, d]
        parts += ["causal"] if self.causal else []
        parts += [f"window{self.window}"] if self.window is not None else []
        parts += [f"softcap{self.softcap:g}"] if self.softcap else []
        parts += ["sink"] if self.sink else []
        return "-".join([*parts, self.dtype, "varlen" if self.varlen else "fixed"])

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

    def _pairs(self, queries: int, keys: int) -> float:
        if self.window is not None:
            own = range(keys - queries, keys)  # the key that each query stands at
            return sum((key + 1 if self.causal else keys) - max(0, key - self.window) for key in own)
        return queries * keys - (queries**2 / 2 if self.causal else 0)

    def flops(self) -> int:
        """Q·K^T and P·V over the keys that each query sees; a causal mask hides half of the square at its
        end.
        """
        pairs = sum(self._pairs(queries, keys) for queries, keys in self.lengths())
        return int(2 * self.h_q * pairs * (self.d_qk + self.d_v))

    def bytes_moved(self) -> int:
        """q, k and v read once, out written (two bytes a value)."""
        queries, keys = (sum(lengths) for lengths in zip(*self.lengths(), strict=True))
        return 2 * (queries * self.h_q + keys * self.h_kv) * (self.d_qk + self.d_v)

    def make_inputs(self, device: str = "cuda") -> Arrays:
        """All normal(0, 1): q, k and v `[b, s, h, d]`, or with varlen `[tokens, h, d]`."""
        torch.manual_seed(0)
        queries, keys = zip(*self.lengths(), strict=True)

        def array(tokens: tuple[int, ...], heads: int, d: int) -> Any:
            shape = (sum(tokens),) if self.varlen else (self.b, self.s)
            return torch.randn(*shape, heads, d, device=device, dtype=getattr(torch, DTYPES[self.dtype]))

        def starts(tokens: tuple[int, ...]) -> Any:
            if not self.varlen:
                return None
            return torch.tensor([0, *accumulate(tokens)], dtype=torch.int32, device=device)

        return Arrays(
            q=array(queries, self.h_q, self.d_qk),
            k=array(keys, self.h_kv, self.d_qk),
            v=array(keys, self.h_kv, self.d_v),
            cu_seqlens_q=starts(queries),
            cu_seqlens_k=starts(keys),
            attn_sink=torch.randn(self.h_q, device=device, dtype=torch.bfloat16) if self.sink else None,
        )

    def options(self, inputs: Arrays, sink: str = "attn_sink") -> dict[str, Any]:
        """Keyword arguments, for rawmla and FlashAttention alike but for the name of the sink."""
        chosen = {
            "causal": self.causal,
            "window_size": (self.window, 0 if self.causal else None),
            "softcap": self.softcap,
            sink: inputs.attn_sink,
        }
        if self.varlen:
            queries, keys = (max(lengths) for lengths in zip(*self.lengths(), strict=True))
            chosen |= {
                "cu_seqlens_q": inputs.cu_seqlens_q,
                "cu_seqlens_k": inputs.cu_seqlens_k,
                "max_seqlen_q": queries,
                "max_seqlen_k": keys,
            }
        return chosen

    def of_request(self, array: Any, request: int, side: int) -> Any:
        """The tokens of a request in q, out (side 0), or k and v (side 1)."""
        if not self.varlen:
            return array[request]
        lengths = [one[side] for one in self.lengths()]
        begin = sum(lengths[:request])
        return array[begin : begin + lengths[request]]

    def seen(self, request: int, rows: Any, columns: Any, device: Any) -> Any:
        """Which of these keys each of these query tokens of a request attends."""
        queries, keys = self.lengths()[request]
        own = torch.arange(keys - queries, keys, device=device)[rows, None]
        key = torch.arange(keys, device=device)[columns]
        seen = key <= own if self.causal else torch.ones_like(key + own, dtype=torch.bool)
        return seen if self.window is None else seen & (key >= own - self.window)

    def score(self, scores: Any) -> Any:
        """The scores with softcap."""
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def check(self, inputs: Arrays, out: Any) -> float:
        """Error of the first, a middle and the last query token of the first and the last request."""
        found: list[Any] = []
        for request in {0, self.b - 1}:
            queries, _ = self.lengths()[request]
            rows = sorted({0, queries // 2, queries - 1})
            q, k, v, got = (
                self.of_request(array, request, side)
                for array, side in ((inputs.q, 0), (inputs.k, 1), (inputs.v, 1), (out, 0))
            )
            seen = self.seen(request, rows, slice(None), q.device)
            want, _, _ = reference.attend(q[rows], k, v, seen, self.score, inputs.attn_sink)
            names = (f"token {row} of request {request}" for row in rows)
            found += zip(names, got[rows], want, strict=True)
        return worst_error(self, found)

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        function = rawmla.flash_attn_varlen_func if self.varlen else rawmla.flash_attn_func
        keywords = self.options(inputs)

        def call(_: int) -> Any:
            return function(inputs.q, inputs.k, inputs.v, **keywords)[0]

        peers = {
            CUDNN: lambda: self.cudnn(inputs),
            FLASH_ATTENTION_4: lambda: self.flash_attention_4(inputs),
        }
        return Prepared(call, self.check(inputs, call(0)), peers=peers)

    def cudnn(self, inputs: Arrays) -> Call:
        """cuDNN by torch, which hands it neither varied lengths nor windows, softcaps and sinks."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if self.varlen or self.window is not None or self.softcap or self.sink:
            raise ValueError("torch hands it neither varied lengths nor windows, softcaps and sinks")
        q, k, v = (array.transpose(1, 2) for array in (inputs.q, inputs.k, inputs.v))
        gqa = self.h_kv != self.h_q

        def call(_: int) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa)

        return call

    def flash_attention_4(self, inputs: Arrays) -> Call:
        """FlashAttention-4."""
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        function = flash_attn_varlen_func if self.varlen else flash_attn_func
        keywords = self.options(inputs, "learnable_sink")
        return lambda _: function(inputs.q, inputs.k, inputs.v, **keywords)


def backward_of(
    forward: Callable[[Any], Call], inputs: Any, dout: Any, check: Callable[[Any], float]
) -> Call:
    """Return the gradients of q, k and v by a library, whose `forward` takes inputs and returns calls of out,
    or of a tuple that begins with it. They are checked as ours are.
    """
    from torch._functorch import config

    q, k, v = (array.detach().requires_grad_() for array in (inputs.q, inputs.k, inputs.v))
    results: dict[Any, Any] = {}  # by stream: autograd enqueues a backward where its forward ran
    # Else the backward of a compiled forward may overwrite what it reads, and runs once; autograd stays in
    # this thread, which alone has the setting.
    with config.patch(donated_buffer=False):
        forward_call = forward(inputs.but(q=q, k=k, v=v))

    def call(_: int) -> Any:
        stream = torch.cuda.current_stream()
        with config.patch(donated_buffer=False), torch.autograd.set_multithreading_enabled(False):
            if stream not in results:
                result = forward_call(0)
                results[stream] = result[0] if isinstance(result, tuple) else result
            return torch.autograd.grad(results[stream], (q, k, v), dout, retain_graph=True)

    check(call(0))
    return call


@dataclass(frozen=True)
class DenseBackwardCase(DenseCase):
    """The backward call of a forward case, with a gradient of out."""

    @property
    def id(self) -> str:
        return super().id.replace("mha-", "mha-backward-", 1)

    def flops(self) -> int:
        """Q·K^T, dS·K and dS^T·Q over d_qk, and dO·V^T and P^T·dO over d_v, for the pairs that the forward
        case counts.
        """
        return super().flops() // (self.d_qk + self.d_v) * (3 * self.d_qk + 2 * self.d_v)

    def bytes_moved(self) -> int:
        """q, k, v, out, dout and lse read once, dq, dk and dv written (two bytes a value, four of lse)."""
        queries = sum(queries for queries, _ in self.lengths())
        return 2 * super().bytes_moved() + 4 * queries * self.h_q

    def make_inputs(self, device: str = "cuda") -> Arrays:
        """All normal(0, 1), and the results of the forward call."""
        given = super().make_inputs(device)
        function = rawmla.flash_attn_varlen_func if self.varlen else rawmla.flash_attn_func
        out, lse = function(given.q, given.k, given.v, **self.options(given))
        return given.but(dout=torch.randn_like(out), out=out, lse=lse)

    def check_gradients(self, inputs: Arrays, gradients: Any) -> float:
        """Error of dq of a middle and the last query token of the first and the last request, and of dk and
        dv of the keys that the first, a middle and the last one stand at.
        """
        sides = (0, 1, 1, 0, 0, 0, 1, 1)
        found: list[Any] = []
        for request in {0, self.b - 1}:
            queries, keys = self.lengths()[request]
            arrays = (inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout, *gradients[:3])
            q, k, v, out, dout, dq, dk, dv = (
                self.of_request(array, request, side) for array, side in zip(arrays, sides, strict=True)
            )
            lse = self.of_request(inputs.lse, request, 0).T if self.varlen else inputs.lse[request]

            def of(rows: Any, columns: Any, every: Any = (request, q, k, v, out, dout, lse)) -> Any:
                request, q, k, v, out, dout, lse = every
                seen = self.seen(request, rows, columns, q.device)
                results = out[rows], dout[rows], lse[:, rows]
                given = q[rows], k[columns], v[columns], seen, results
                return reference.backpropagate(*given, self.score, inputs.attn_sink)

            rows = sorted({queries // 2, queries - 1})
            columns = sorted({keys - queries, keys - queries + queries // 2, keys - 1})
            wanted = of(rows, slice(None))[0], *of(slice(None), columns)[1:3]
            places = (("dq", dq, rows), ("dk", dk, columns), ("dv", dv, columns))
            for (name, got, tokens), want in zip(places, wanted, strict=True):
                names = (f"{name} of token {token} of request {request}" for token in tokens)
                found += zip(names, got[tokens], want, strict=True)
        return worst_error(self, found)

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        self.check(inputs, inputs.out)
        function = rawmla.flash_attn_varlen_backward if self.varlen else rawmla.flash_attn_backward
        keywords = self.options(inputs)
        arrays = inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse

        def backward(deterministic: bool) -> Call:
            return lambda _: function(*arrays, deterministic=deterministic, **keywords)

        def check(gradients: Any) -> float:
            return self.check_gradients(inputs, gradients)

        call, ordered = backward(False), backward(True)
        error = max(check(call(0)), check(ordered(0)))
        peers = {
            CUDNN: lambda: backward_of(self.cudnn, inputs, inputs.dout.transpose(1, 2), check),
            FLASH_ATTENTION_4: lambda: backward_of(self.flash_attention_4, inputs, inputs.dout, check),
        }
        return Prepared(call, error, ordered=ordered, peers=peers)


def forward_cases() -> list[DenseCase]:
    """Long and short rows of d 128 and 192/128, then other head dimensions, fp16, score steps, a window, and
    batches of varied lengths.
    """
    base = DenseCase(2, 8192)
    mixed = replace(base, d_qk=192)
    d64, d96 = (replace(base, d_qk=d, d_v=d) for d in (64, 96))
    d256 = replace(base, d_qk=256, d_v=256, h_q=8, h_kv=8)
    return [
        base,
        replace(base, causal=False),
        DenseCase(1, 16384),
        DenseCase(8, 2048),
        DenseCase(32, 512),
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
        DenseCase(8, 2048, varlen=True),
        DenseCase(32, 512, varlen=True),
    ]


def backward_cases() -> list[DenseBackwardCase]:
    """Rows of d 128, 192/128 and 64, other head dimensions, fp16, score steps, a window, varied lengths."""
    base = DenseBackwardCase(2, 8192)
    mixed = replace(base, d_qk=192)
    return [
        base,
        replace(base, causal=False),
        replace(base, b=1, s=16384),
        replace(base, b=8, s=2048),
        replace(base, h_kv=2),
        mixed,
        replace(mixed, causal=False),
        replace(mixed, h_kv=2),
        replace(base, d_qk=64, d_v=64),
        replace(base, d_qk=96, d_v=96),
        replace(base, d_qk=256, d_v=256, h_q=8, h_kv=8),
        replace(base, dtype="fp16"),
        replace(base, softcap=30.0),
        replace(base, sink=True),
        replace(base, window=1024),
        replace(base, varlen=True),
    ]
