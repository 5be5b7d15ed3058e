"""The cases of flex attention and of its backward, and of making block masks."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import torch

import rawmla

from . import reference
from .cases import Arrays, Call, Case, Prepared, worst_error
from .dense import backward_of
from .timing import host_figures

BLOCK = 128
"""Tokens of a block by which operations are counted, whatever the blocks of a case's mask are."""

SOFTCAP = 30.0
HOST_TOKENS = 1024  # more tiles than an H200 has SMs, as most calls have: scratch is made and cleared then


@dataclass(frozen=True)
class FlexCase(Case):
    """One forward call: b requests of s query tokens and s keys each.

    `mask`: "full", "causal"; causal and besides "window", the `extent` keys before a query's own, or
    "documents" of `extent` tokens each; or "prefix", causal after `extent` tokens that everyone attends.
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
        heads = f"h{self.h_q}" if self.h_kv == self.h_q else f"h{self.h_q}kv{self.h_kv}"
        parts = ["flex", f"b{self.b}", f"s{self.s}", heads, f"d{self.d}"]
        parts += [f"{self.mask}{self.extent}" if self.extent else self.mask]
        parts += [self.score] if self.score is not None else []
        parts += [f"block{self.block_size}"] if self.block_size != BLOCK else []
        parts += ["cuda"] if self.cuda_text else []
        return "-".join([*parts, *(["lse-max"] if self.further else [])])

    @property
    def is_compared(self) -> bool:
        """Whether torch's flex attention runs beside."""
        plain = self.block_size == BLOCK and not self.cuda_text and not self.further
        return plain and self.mask != "prefix" and self.score not in ("bias", "scale", "scalar")

    def flops(self) -> int:
        """Q·K^T and P·V in the blocks of BLOCK x BLOCK positions of which any is attended."""
        share = blocks_of(self.s, self.mask, self.extent)[0].double().mean()
        return int(4 * self.d * self.h_q * self.b * self.s**2 * float(share))

    def bytes_moved(self) -> int:
        """q, k and v read once, out, lse and max_scores written."""
        values = 2 * self.d * 2 * (self.h_q + self.h_kv)
        return self.b * self.s * (values + (8 * self.h_q if self.further else 0))

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
            q=normal(self.b, self.h_q, self.s, self.d),
            k=normal(self.b, self.h_kv, self.s, self.d),
            v=normal(self.b, self.h_kv, self.s, self.d),
            table=tables.get(self.score, lambda: None)(),
        )

    def score_function(self, table: Any) -> Any:
        """The score function in Python, or None."""
        last = self.s - 1
        functions: dict[str | None, Any] = {
            "alibi": lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx),
            "softcap": lambda score, b, h, q_idx, kv_idx: SOFTCAP * torch.tanh(score / SOFTCAP),
            "bias": lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + last],
            "scale": lambda score, b, h, q_idx, kv_idx: score * table[h],
            "scalar": lambda score, b, h, q_idx, kv_idx: score * table,
        }
        return functions.get(self.score)

    def rows(
        self, inputs: Arrays, request: int, rows: Any, columns: Any, table: Any, heads: slice
    ) -> tuple[tuple[Any, Any, Any, Any], Any]:
        """Arguments of `reference`: these rows of q and of k and v, which keys are seen, the score."""
        device, every = inputs.q.device, torch.arange(self.s, device=inputs.q.device)
        q_idx, kv_idx = every[rows][:, None], every[columns]
        group = self.h_q // self.h_kv
        kv_heads = slice(heads.start // group, -(-heads.stop // group))
        q = inputs.q[request, heads, rows].transpose(0, 1)
        k, v = (x[request, kv_heads, columns].transpose(0, 1) for x in (inputs.k, inputs.v))
        mask, function = mask_function(self.mask, self.extent, self.s, device), self.score_function(table)
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=device)
        h = torch.arange(self.h_q, device=device)[heads, None, None]

        def score(scores: Any) -> Any:
            return scores if function is None else function(scores, request, h, q_idx, kv_idx)

        return (q, k, v, seen if mask is None else seen & mask(request, 0, q_idx, kv_idx)), score

    @torch.no_grad()
    def check(self, inputs: Arrays, out: Any, further: Any = None) -> float:
        """Error of the first, a middle and the last query token of the first and the last request.
        `further`: what has lse and max_scores, of which 0.001 are allowed.
        """
        found: list[Any] = []
        tokens = [0, self.s // 2, self.s - 1]
        for request in {0, self.b - 1}:
            given, score = self.rows(inputs, request, tokens, slice(None), inputs.table, slice(0, self.h_q))
            want, *wanted = reference.attend(*given, score)
            got = out[request, :, tokens].transpose(0, 1)
            names = (f"token {token} of request {request}" for token in tokens)
            found += zip(names, got, want, strict=True)
            for name, one in zip(("lse", "max_scores"), wanted if further else (), strict=False):
                error = float((getattr(further, name)[request, :, tokens].double() - one).abs().max())
                assert error < 0.001, f"{self.id}: {name} of request {request} has an error of {error}"
        return worst_error(self, found)

    def block_mask(self, inputs: Arrays) -> Any:
        """rawmla's block mask, or None."""
        mask = mask_function(self.mask, self.extent, self.s, inputs.q.device)
        if self.cuda_text:
            mask = rawmla.CudaMod("q_idx >= kv_idx")
        if mask is None:
            return None
        return rawmla.create_block_mask(
            mask, None, None, self.s, self.s, device="cuda", BLOCK_SIZE=self.block_size
        )

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        score, block_mask = self.score_function(inputs.table), self.block_mask(inputs)
        wanted = rawmla.AuxRequest(lse=True, max_scores=True) if self.further else None
        arrays, gqa = (inputs.q, inputs.k, inputs.v), self.h_kv != self.h_q

        def call(_: int) -> Any:
            return rawmla.flex_attention(*arrays, score, block_mask, enable_gqa=gqa, return_aux=wanted)

        error = self.check(inputs, *(call(0) if self.further else (call(0),)))
        return Prepared(call, error, peers=self.peers(lambda make: make(inputs)))

    def peers(self, calls: Callable[[Callable[[Any], Call]], Call]) -> dict[str, Any]:
        """torch's flex attention by both of its backends; `calls` takes what makes a forward call."""
        if not self.is_compared:
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

        score = self.score_function(inputs.table)
        mask = mask_function(self.mask, self.extent, self.s, inputs.q.device)
        block_mask = None
        if mask is not None:
            device = inputs.q.device.type
            block_mask = module.create_block_mask(mask, None, None, self.s, self.s, device=device)
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


def mask_function(mask: str, extent: int, s: int, device: Any) -> Any:
    """The mask function of this name in Python, None for "full".

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
    return functions.get(mask)


@cache
def blocks_of(s: int, mask: str, extent: int) -> tuple[Any, Any]:
    """Which blocks of BLOCK x BLOCK positions have an attended one, and which have no other."""
    every = torch.arange(s)
    function = mask_function(mask, extent, s, "cpu")
    seen = torch.ones(s, s, dtype=torch.bool) if function is None else function(0, 0, every[:, None], every)
    blocks = seen.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)
    return blocks.any(2), blocks.all(2)


@dataclass(frozen=True)
class FlexBackwardCase(FlexCase):
    """The backward call of a forward case, with a gradient of out. `captured`: what the score
    function reads has a gradient too.
    """

    captured: bool = False

    @property
    def id(self) -> str:
        name = super().id.replace("flex-", "flex-backward-", 1)
        return f"{name}-captured" if self.captured else name

    def flops(self) -> int:
        """Five products, of which the forward case counts two."""
        return super().flops() * 5 // 2

    def bytes_moved(self) -> int:
        """q, k, v, out, dout and lse read once, dq, dk and dv written."""
        return 2 * super().bytes_moved() + 4 * self.b * self.s * self.h_q

    def _gradients(
        self, inputs: Arrays, request: int, rows: Any, columns: Any, heads: slice, table: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        wanted = inputs.table if table is None else table
        given, score = self.rows(inputs, request, rows, columns, wanted, heads)
        out, dout = (x[request, heads, rows].transpose(0, 1) for x in (inputs.out, inputs.dout))
        results = out, dout, inputs.lse[request, heads, rows]
        return reference.backpropagate(*given, results, score, captured=table)

    def gradient_of_table(self, inputs: Arrays) -> Any:
        """The gradient of what the score function reads: a sum over all pairs, one head at a time."""
        table = inputs.table.detach().double().requires_grad_()
        total = torch.zeros_like(table)
        for request in range(self.b):
            for head in range(self.h_q):
                one = slice(head, head + 1)
                total += self._gradients(inputs, request, slice(None), slice(None), one, table)[3]
        return total

    def check_gradients(self, inputs: Arrays, gradients: Any) -> float:
        """Error of dq of a middle and the last token of the first and the last request (with one visible key
        dq is 0), of dk and dv of the first, a middle and the last; and of what the score function reads.
        """
        every, heads = slice(None), slice(0, self.h_q)
        found: list[Any] = []
        dq, dk, dv = gradients[:3]
        for request in {0, self.b - 1}:
            tokens = [self.s // 2, self.s - 1]
            want = self._gradients(inputs, request, tokens, every, heads)[0]
            names = (f"dq of token {token} of request {request}" for token in tokens)
            found += zip(names, dq[request, :, tokens].transpose(0, 1), want, strict=True)
            tokens = [0, *tokens]
            wanted = self._gradients(inputs, request, every, tokens, heads)[1:3]
            for name, got, want in zip(("dk", "dv"), (dk, dv), wanted, strict=True):
                names = (f"{name} of token {token} of request {request}" for token in tokens)
                found += zip(names, got[request, :, tokens].transpose(0, 1), want, strict=True)
        if self.captured:
            (got,) = gradients[3].values()
            found.append(("gradient of the table", got, self.gradient_of_table(inputs)))
        return worst_error(self, found)

    def prepare(self) -> Prepared:
        inputs = self.make_inputs()
        block_mask = self.block_mask(inputs)
        if self.captured:
            inputs.table.requires_grad_()
        score, gqa = self.score_function(inputs.table), self.h_kv != self.h_q
        with torch.no_grad():  # else autograd would keep what a captured tensor needs
            out, lse = rawmla.flex_attention(
                *(inputs.q, inputs.k, inputs.v, score, block_mask), enable_gqa=gqa, return_lse=True
            )
        self.check(inputs, out)
        inputs = inputs.but(dout=torch.randn_like(out), out=out, lse=lse)
        arrays = inputs.dout, inputs.q, inputs.k, inputs.v, out, lse

        def backward(deterministic: bool, score: Any) -> Call:
            def call(_: int) -> Any:
                with torch.no_grad():
                    return rawmla.flex_attention_backward(
                        *arrays, score, block_mask, enable_gqa=gqa, deterministic=deterministic
                    )

            return call

        def check(gradients: Any) -> float:
            return self.check_gradients(inputs, gradients)

        call, ordered, without = backward(False, score), backward(True, score), None
        if self.captured:
            without = backward(False, self.score_function(inputs.table.detach()))
        error = max(check(call(0)), check(ordered(0)))
        peers = self.peers(lambda make: backward_of(make, inputs, inputs.dout, check))
        return Prepared(call, error, ordered=ordered, without=without, peers=peers)


@dataclass(frozen=True)
class BlockMaskCase(Case):
    """`create_block_mask` of a causal Python function over s query tokens and s keys."""

    s: int

    @property
    def id(self) -> str:
        return f"flex-block-mask-causal-s{self.s}"

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
        """See Case. Measures one call with the wait for its end, too."""
        self.check(self.call())

        def call_and_wait() -> None:
            self.call()
            torch.cuda.synchronize()

        return Prepared(
            self.call, 0.0, more=lambda _: {"call_us": host_figures("mask", call_and_wait)["mask_call_us"]}
        )


def time_host() -> dict[str, float]:
    """Host microseconds of one eager flex call on a small case, warm, with a score and a mask function of
    Python; and the seconds that the first call of another score function takes, whose kernel no cache has.
    """
    case = FlexCase(s=HOST_TOKENS, score="alibi")
    inputs = case.make_inputs()
    score, block_mask = case.score_function(inputs.table), case.block_mask(inputs)

    def call(score_mod: Any = score) -> None:
        rawmla.flex_attention(inputs.q, inputs.k, inputs.v, score_mod, block_mask)

    figures = host_figures("flex", call)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, RAWMLA_CACHE_DIR=folder):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(lambda score, b, h, q_idx, kv_idx: score + torch.sin(q_idx - kv_idx))
        torch.cuda.synchronize()
        figures["flex_first_call_s"] = time.perf_counter() - begin
    return figures


def forward_cases() -> list[FlexCase]:
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


def backward_cases() -> list[FlexBackwardCase]:
    """The masks and score functions that torch's flex attention runs beside, then a table without and with a
    gradient of its own, and gradients that are sums over all pairs of a head, and over all pairs.
    """
    base = FlexBackwardCase()
    bias = replace(base, score="bias")
    return [
        replace(base, mask="full"),
        base,
        replace(base, h_kv=2),
        replace(base, mask="window", extent=1024),
        replace(base, score="alibi"),
        replace(base, score="softcap"),
        replace(base, mask="documents", extent=900),
        replace(base, d=64),
        bias,
        replace(bias, captured=True),
        replace(base, score="scale", captured=True),
        replace(base, score="scalar", captured=True),
    ]
