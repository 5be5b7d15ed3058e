"""The cases of flex attention and of its backward, and of making block masks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

import rawmla

from .cases import Arrays, Call, Case, Prepared, worst_error
from .dense import backward_of
from .reference import ALL, AttentionCase, Request

BLOCK = 128
"""Tokens of a block by which operations are counted, whatever the blocks of a case's mask are."""

SOFTCAP = 30.0


@dataclass(eq=False)
class FlexCase(AttentionCase):
    """One forward call: b requests of s keys each, and as many query tokens, or s_q, which are the last.

    `mask`: "full", "causal"; causal and besides "window", the `extent` keys before a query's own, or
    "documents" of `extent` tokens each; or "prefix", causal after `extent` tokens that everyone attends.
    `score`: "alibi", "softcap" (30), "bias" (a table by head and distance), "scale" (a factor for each
    head), "scalar" (one factor), or None. `cuda`: the mask is CUDA text instead of a Python function;
    `further`: lse and max_scores are results too.
    """

    template = (
        "flex-b{b}-(s|q{s_q}-k){s}-h{h_q}[kv{h_kv}]-d{d}-{mask:full|causal|window|documents|prefix}[{extent}]"
        "[-{score:alibi|softcap|bias|scale|scalar}][-block{block_size}][-{cuda}][-{further:lse-max}]"
    )
    s: int
    h_q: int
    d: int
    mask: str
    s_q: int = 0
    h_kv: int = 0
    extent: int = 0
    score: str | None = None
    block_size: int = BLOCK
    cuda: bool = False
    further: str = ""

    def __post_init__(self) -> None:
        self.h_kv = self.h_kv or self.h_q
        self.s_q = self.s_q or self.s

    def flops(self) -> int:
        """Q·K^T and P·V in the blocks of BLOCK x BLOCK positions of which any is attended."""
        rows = blocks_of(self.s, self.mask, self.extent)[0][(self.s - self.s_q) // BLOCK :]
        return int(4 * self.d * self.h_q * self.b * self.s_q * self.s * float(rows.double().mean()))

    def bytes_moved(self) -> int:
        """q, k and v read once, out, lse and max_scores written."""
        keys = self.s * self.h_kv * 4 * self.d
        return self.b * (keys + self.s_q * self.h_q * (4 * self.d + (8 if self.further else 0)))

    def make_inputs(self, device: str = "cuda") -> Arrays:
        """q, k, v `[b, h, s, d]` normal(0, 1); and the `table` that the score function reads: a slope or a
        factor for each head, one factor, or a bias `[h_q, 2 s - 1]` by distance, normal(0, 1).
        """
        torch.manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        slopes = [2 ** (-8 * (head + 1) / self.h_q) for head in range(self.h_q)]
        tables: dict[str | None, Callable[[], Any]] = {
            "alibi": lambda: torch.tensor(slopes, device=device),
            "bias": lambda: normal(self.h_q, 2 * self.s - 1),
            "scale": lambda: 1 + torch.rand(self.h_q, device=device),
            "scalar": lambda: torch.tensor(1.5, device=device),
        }
        return Arrays(
            q=normal(self.b, self.h_q, self.s_q, self.d),
            k=normal(self.b, self.h_kv, self.s, self.d),
            v=normal(self.b, self.h_kv, self.s, self.d),
            table=tables.get(self.score, lambda: None)(),
        )

    def score_function(self, table: Any, first: int = 0) -> Any:
        """The score function in Python, or None; query 0 stands at key `first`."""
        last = self.s - 1
        functions: dict[str | None, Any] = {
            "alibi": lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx),
            "softcap": lambda score, b, h, q_idx, kv_idx: SOFTCAP * torch.tanh(score / SOFTCAP),
            "bias": lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + last],
            "scale": lambda score, b, h, q_idx, kv_idx: score * table[h],
            "scalar": lambda score, b, h, q_idx, kv_idx: score * table,
        }
        function = functions.get(self.score)
        if function is None or not first:
            return function
        return lambda score, b, h, q_idx, kv_idx: function(score, b, h, q_idx + first, kv_idx)

    def of_request(self, array: Any, number: int, keys: bool = False) -> Any:
        return array[number].transpose(0, 1)

    def request(self, inputs: Arrays, number: int, heads: slice = ALL, table: Any = None) -> Request:
        """See AttentionCase; of some heads, with another table."""
        function = self.score_function(inputs.table if table is None else table)
        mask = mask_function(self.mask, self.extent, self.s, inputs.q.device)
        every = torch.arange(self.h_q, device=inputs.q.device)[heads]
        kv_heads = (every // (self.h_q // self.h_kv)).unique()

        def seen(own: Any, keys: Any) -> Any:
            return own + keys >= 0 if mask is None else mask(number, 0, own, keys)

        def score(scores: Any, own: Any, keys: Any) -> Any:
            return scores if function is None else function(scores, number, every[:, None, None], own, keys)

        q = self.of_request(inputs.q, number)[:, heads]
        k, v = (self.of_request(x, number)[:, kv_heads] for x in (inputs.k, inputs.v))
        results: tuple[Any, ...] = ()
        if "dout" in vars(inputs):
            out, dout = (self.of_request(x, number)[:, heads] for x in (inputs.out, inputs.dout))
            results = out, dout, inputs.lse[number, heads]
        return Request(q, k, v, seen, score, results=results)

    def functions(self, inputs: Arrays) -> tuple[Any, Any]:
        """The score and the mask function of the call, or None."""
        first = self.s - self.s_q
        mask = mask_function(self.mask, self.extent, self.s, inputs.q.device, first)
        return self.score_function(inputs.table, first), mask

    def block_mask(self, inputs: Arrays) -> Any:
        """rawmla's block mask, or None."""
        mask = self.functions(inputs)[1]
        if self.cuda:
            mask = rawmla.CudaMod("q_idx >= kv_idx")
        if mask is None:
            return None
        return rawmla.create_block_mask(
            mask, None, None, self.s_q, self.s, device="cuda", BLOCK_SIZE=self.block_size
        )

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        score, block_mask = self.functions(inputs)[0], self.block_mask(inputs)
        wanted = rawmla.AuxRequest(lse=True, max_scores=True) if self.further else None
        arrays, gqa = (inputs.q, inputs.k, inputs.v), self.h_kv != self.h_q

        def call(_: int) -> Any:
            return rawmla.flex_attention(*arrays, score, block_mask, enable_gqa=gqa, return_aux=wanted)

        error = self.check(inputs, *(call(0) if self.further else (call(0),)))
        return Prepared(call, error, peers=self.peers(lambda make: make(inputs)))

    def peers(self, calls: Callable[[Callable[[Any], Call]], Call]) -> dict[str, Any]:
        """torch's flex attention by both of its backends; `calls` takes what makes a forward call."""
        plain = self.block_size == BLOCK and not self.cuda and not self.further
        if not plain or self.mask == "prefix" or self.score in ("bias", "scale", "scalar"):
            return {}
        return {
            "torch's Triton": lambda: calls(lambda inputs: self.torch_flex(inputs, None)),
            "torch's FLASH": lambda: calls(lambda inputs: self.torch_flex(inputs, {"BACKEND": "FLASH"})),
        }

    def torch_flex(self, inputs: Arrays, kernel_options: dict[str, Any] | None) -> Call:
        """torch's flex attention, compiled; its result is checked."""
        if kernel_options is not None:
            import flash_attn.cute  # noqa: F401  (torch's error for want of it is none of an import)
        from torch.nn.attention import flex_attention as module

        score, mask = self.functions(inputs)
        block_mask = None
        if mask is not None:
            device = inputs.q.device.type
            block_mask = module.create_block_mask(mask, None, None, self.s_q, self.s, device=device)
        # Else it would stop compiling after some cases, since they share a function.
        torch._dynamo.reset()
        compiled = torch.compile(module.flex_attention, dynamic=False, fullgraph=True)
        arrays, gqa = (inputs.q, inputs.k, inputs.v), self.h_kv != self.h_q

        def call(_: int) -> Any:
            return compiled(*arrays, score, block_mask, enable_gqa=gqa, kernel_options=kernel_options)

        self.check(inputs, call(0))
        return call


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The mask that shows a query the keys up to its own."""
    return q_idx >= kv_idx


def mask_function(mask: str, extent: int, s: int, device: Any, first: int = 0) -> Any:
    """The mask function of this name in Python, None for "full"; query 0 stands at key `first`.

    It reads tensors, numbers and modules only: else rawmla could not know it again, and would trace it at
    every call.
    """
    documents = torch.arange(s, dtype=torch.int32, device=device) // max(extent, 1)
    functions = {
        "causal": causal,
        "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= extent),
        "documents": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx]),
        "prefix": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < extent),
    }
    function = functions.get(mask)
    if function is None or not first:
        return function
    return lambda b, h, q_idx, kv_idx: function(b, h, q_idx + first, kv_idx)


@cache
def blocks_of(s: int, mask: str, extent: int) -> tuple[Any, Any]:
    """Which blocks of BLOCK x BLOCK positions have an attended one, and which have no other."""
    every = torch.arange(s)
    function = mask_function(mask, extent, s, "cpu")
    seen = torch.ones(s, s, dtype=torch.bool) if function is None else function(0, 0, every[:, None], every)
    blocks = seen.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)
    return blocks.any(2), blocks.all(2)


@dataclass(eq=False)
class FlexBackwardCase(FlexCase):
    """The backward call of a forward case, with a gradient of out. `captured`: what the score
    function reads has a gradient too.
    """

    template = FlexCase.template.replace("flex-", "flex-backward-") + "[-{captured}]"
    captured: bool = False

    def flops(self) -> int:
        """Five products, of which the forward case counts two."""
        return super().flops() * 5 // 2

    def bytes_moved(self) -> int:
        """q, k, v, out, dout and lse read once, dq, dk and dv written."""
        return 2 * super().bytes_moved() + 4 * self.b * self.s_q * self.h_q

    def gradient_of_table(self, inputs: Arrays) -> Any:
        """The gradient of what the score function reads: a sum over all pairs, one head at a time."""
        table = inputs.table.detach().double().requires_grad_()
        total = torch.zeros_like(table)
        for number in range(self.b):
            for head in range(self.h_q):
                request = self.request(inputs, number, slice(head, head + 1), table)
                total += request.backpropagate(ALL, ALL, table)[3]
        return total

    def check_gradients(self, inputs: Arrays, gradients: Any) -> float:
        """See AttentionCase; also of what the score function reads."""
        worst = super().check_gradients(inputs, gradients)
        if not self.captured:
            return worst
        (got,) = gradients[3].values()
        found = [("gradient of the table", got, self.gradient_of_table(inputs))]
        return max(worst, worst_error(self, found))

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        block_mask = self.block_mask(inputs)
        if self.captured:
            inputs.table.requires_grad_()
        score, gqa = self.functions(inputs)[0], self.h_kv != self.h_q
        with torch.no_grad():  # else autograd would keep what a captured tensor needs
            out, lse = rawmla.flex_attention(
                *(inputs.q, inputs.k, inputs.v, score, block_mask), enable_gqa=gqa, return_lse=True
            )
        self.check(inputs, out)
        inputs = inputs.but(dout=torch.randn_like(out), out=out, lse=lse)
        arrays = inputs.dout, inputs.q, inputs.k, inputs.v, out, lse

        def backward(deterministic: bool) -> Call:
            given = {"enable_gqa": gqa, "deterministic": deterministic}
            no_grad = torch.no_grad()
            return no_grad(lambda _: rawmla.flex_attention_backward(*arrays, score, block_mask, **given))

        check = partial(self.check_gradients, inputs)
        call, ordered = backward(False), backward(True)
        error = max(check(call(0)), check(ordered(0)))
        peers = self.peers(lambda make: backward_of(make, inputs, inputs.dout, check))
        return Prepared(call, error, ordered=ordered, peers=peers)


@dataclass(eq=False)
class BlockMaskCase(Case):
    """`create_block_mask` of a causal Python function over s query tokens and s keys."""

    template = "flex-block-mask-causal-s{s}"
    s: int

    def call(self, _: int = 0) -> Any:
        """Make the mask."""
        return rawmla.create_block_mask(causal, None, None, self.s, self.s, device="cuda")

    def check(self, made: Any) -> None:
        """Raises AssertionError where the blocks, or how many of them are full, are not the mask's."""
        attended, full = blocks_of(self.s, "causal", 0)
        assert torch.equal(made.to_dense()[0, 0].bool().cpu(), attended), f"{self.id}: other blocks"
        counts = made.full_kv_num_blocks[0, 0].long().cpu()
        assert torch.equal(counts, full.sum(1)), f"{self.id}: other full blocks"

    def prepare(self) -> Prepared:
        self.check(self.call())
        return Prepared(self.call, 0.0)
