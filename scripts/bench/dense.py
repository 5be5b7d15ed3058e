"""The cases of dense attention with a K and a V of their own, and of its backward."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import rawmla

from .cases import CUDNN, DTYPES, FLASH_ATTENTION_4, LENGTH_SEED, Arrays, Call, Prepared
from .reference import AttentionCase, Request


def drawn_lengths(rng: random.Random, count: int, mean: int) -> list[int]:
    """Lengths from a normal distribution (deviation mean / 2), scaled to this mean, rounded down, at least
    1.
    """
    drawn = [max(1.0, rng.normalvariate(mean, mean / 2)) for _ in range(count)]
    return [max(1, int(one * count * mean / sum(drawn))) for one in drawn]


@dataclass(eq=False)
class DenseCase(AttentionCase):
    """One forward call: b requests of s query tokens and s keys each, or with varlen of about as many.

    With `window`, a query sees the `window` keys to the left of its own; `softcap` 0 is none; `sink`: each
    head has one.
    """

    template = (
        "mha-b{b}-s{s}-h{h_q}[kv{h_kv}]-d{d_qk}[v{d_v}][-{causal}][-window{window}][-softcap{softcap}]"
        "[-{sink}]-{dtype:bf16|fp16}-(fixed|{varlen})"
    )
    s: int
    h_q: int
    d_qk: int
    dtype: str
    h_kv: int = 0
    d_v: int = 0
    causal: bool = False
    window: int | None = None
    softcap: float = 0.0
    sink: bool = False
    varlen: bool = False

    def __post_init__(self) -> None:
        self.h_kv, self.d_v = self.h_kv or self.h_q, self.d_v or self.d_qk

    def lengths(self) -> list[tuple[int, int]]:
        """Query tokens and keys of each request: s and s; or with varlen both drawn from a normal
        distribution (deviation s / 2), scaled to the mean s, rounded down, and no fewer keys than queries.
        """
        if not self.varlen:
            return [(self.s, self.s)] * self.b
        rng = random.Random(LENGTH_SEED)
        drawn = zip(*(drawn_lengths(rng, self.b, self.s) for _ in range(2)), strict=True)
        return [(queries, max(queries, keys)) for queries, keys in drawn]

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
            return torch.tensor([0, *accumulate(tokens)], dtype=torch.int32, device=device)

        return Arrays(
            q=array(queries, self.h_q, self.d_qk),
            k=array(keys, self.h_kv, self.d_qk),
            v=array(keys, self.h_kv, self.d_v),
            cu_seqlens_q=starts(queries) if self.varlen else None,
            cu_seqlens_k=starts(keys) if self.varlen else None,
            attn_sink=torch.randn(self.h_q, device=device, dtype=torch.bfloat16) if self.sink else None,
        )

    def options(self, inputs: Arrays, sink: str = "attn_sink") -> dict[str, Any]:
        """Keyword arguments, for rawmla and FlashAttention alike but for the name of the sink."""
        chosen: dict[str, Any] = {
            "causal": self.causal,
            "window_size": (self.window, 0 if self.causal else None),
            "softcap": float(self.softcap),
            sink: inputs.attn_sink,
        }
        if self.varlen:
            queries, keys = (max(lengths) for lengths in zip(*self.lengths(), strict=True))
            chosen |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
            chosen |= {"max_seqlen_q": queries, "max_seqlen_k": keys}
        return chosen

    def of_request(self, array: Any, number: int, keys: bool = False) -> Any:
        lengths = [one[keys] for one in self.lengths()]
        return array.split(lengths)[number] if self.varlen else array[number]

    def request(self, inputs: Arrays, number: int) -> Request:

        def seen(own: Any, keys: Any) -> Any:
            seen = keys <= own if self.causal else keys < own + len(k)
            return seen if self.window is None else seen & (keys >= own - self.window)

        def score(scores: Any, own: Any, keys: Any) -> Any:
            return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

        q, k, v = (self.of_request(x, number, x is not inputs.q) for x in (inputs.q, inputs.k, inputs.v))
        results: tuple[Any, ...] = ()
        if "dout" in vars(inputs):
            out, dout, lse = (self.of_request(x, number) for x in (inputs.out, inputs.dout, inputs.lse))
            results = out, dout, lse.T if self.varlen else lse
        return Request(q, k, v, seen, score, inputs.attn_sink, results)

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        function = rawmla.flash_attn_varlen_func if self.varlen else rawmla.flash_attn_func
        keywords = self.options(inputs)

        def call(_: int) -> Any:
            return function(inputs.q, inputs.k, inputs.v, **keywords)[0]

        libraries = {CUDNN: self.cudnn, FLASH_ATTENTION_4: self.flash_attention_4}
        peers = {name: partial(make, inputs) for name, make in libraries.items()}
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


@dataclass(eq=False)
class DenseBackwardCase(DenseCase):
    """The backward call of a forward case, with a gradient of out."""

    template = DenseCase.template.replace("mha-", "mha-backward-")

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

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        self.check(inputs, inputs.out)
        function = rawmla.flash_attn_varlen_backward if self.varlen else rawmla.flash_attn_backward
        keywords = self.options(inputs)
        arrays = inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse

        def backward(deterministic: bool) -> Call:
            return lambda _: function(*arrays, deterministic=deterministic, **keywords)

        check = partial(self.check_gradients, inputs)
        call, ordered = backward(False), backward(True)
        error = max(check(call(0)), check(ordered(0)))
        peers = {
            CUDNN: lambda: backward_of(self.cudnn, inputs, inputs.dout.transpose(1, 2), check),
            FLASH_ATTENTION_4: lambda: backward_of(self.flash_attention_4, inputs, inputs.dout, check),
        }
        return Prepared(call, error, ordered=ordered, peers=peers)
