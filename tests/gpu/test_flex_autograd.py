"""What flex attention has beyond dense attention in autograd: captures, and gradients as exact as those
of torch's flex_attention. The rest is in test_autograd.py.
"""

from __future__ import annotations

from typing import Any

import flex_page
import pytest
from full_cases import full_unless
from gpu_support import torch
from test_autograd import compiled, quiet

import rawmla


def test_a_result_that_does_not_depend_on_the_score() -> None:
    """dq and dk are 0; dv and the gradient of the table are the gradients of softmax(table) V."""
    draw = torch.Generator("cuda").manual_seed(6)
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", generator=draw).bfloat16() for _ in range(3))
    table = torch.randn(2, 300, 300, device="cuda", generator=draw)
    leaves = [x.requires_grad_() for x in (q, k, v, table)]
    out = rawmla.flex_attention(q, k, v, lambda s, b, h, q, k: table[h, q, k])
    dout = torch.randn(out.shape, device="cuda", generator=draw).bfloat16()
    dq, dk, dv, dtable = torch.autograd.grad(out, leaves, dout)
    exact_v, exact_table = (x.detach().double().requires_grad_() for x in (v, table))
    exact = torch.softmax(exact_table, -1) @ exact_v
    want_dv, want_dtable = torch.autograd.grad(exact, (exact_v, exact_table), dout.double())
    assert not dq.any() and not dk.any()
    assert relative_error(dv, want_dv) < 0.01 and relative_error(dtable, want_dtable) < 0.01


def relative_error(got: Any, want: Any) -> float:
    """L2."""
    return float((got.double() - want).norm() / want.norm())


def test_parts_of_one_parameter_and_expanded_keys() -> None:
    """Two captured views of a bfloat16 parameter, one of them permuted, and K and V of one head for all: the
    gradients come back to what they are views of.
    """
    tokens, dim = 300, 64
    draw = torch.Generator("cuda").manual_seed(5)

    def leaf(*shape: int) -> Any:
        values = torch.randn(shape, device="cuda", generator=draw).bfloat16()
        return values.requires_grad_()

    q, one_k, one_v = leaf(2, 4, tokens, dim), leaf(2, 1, tokens, dim), leaf(2, 1, tokens, dim)
    whole, dout = leaf(2, 4, tokens), leaf(2, 4, tokens, dim).detach()
    first, turned = whole[0], whole[1].t()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + first[h, j] - turned[i, h] * s

    k, v = (x.expand(-1, 4, -1, -1) for x in (one_k, one_v))
    out = rawmla.flex_attention(q, k, v, score)
    leaves = (q, one_k, one_v, whole)
    got = torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    scores = exact[0] @ exact[1].mT * dim**-0.5
    scores = scores + exact[3][0][:, None] - exact[3][1][..., None] * scores
    wanted = torch.autograd.grad(scores.softmax(-1) @ exact[2], exact, dout.double())
    for name, one, want in zip(("q", "k", "v", "whole"), got, wanted, strict=True):
        assert one.shape == want.shape and relative_error(one, want) < 2.0**-7, name


def test_a_derivative_of_ones_own() -> None:
    """A score function may call a torch.autograd.Function."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return 3 * grad  # not the derivative, so that it shows

    q, k, v, dout = torch.randn(4, 2, 4, 200, 64, device="cuda", dtype=torch.float16)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients(score: Any) -> Any:
        return torch.autograd.grad(rawmla.flex_attention(*leaves, score), leaves, dout)

    got = gradients(lambda s, b, h, i, j: Twice.apply(s))
    want = gradients(lambda s, b, h, i, j: 2 * s)
    for name, one, other, factor in zip("qkv", got, want, (1.5, 1.5, 1.0), strict=True):
        assert relative_error(one, factor * other.double()) < 2.0**-10, name


# ---- against torch


def scores_of(kind: str, learned: Any, tokens: int) -> Any:
    """A score function that reads a learned tensor, if it reads one."""
    return {
        "plain": None,
        "table": lambda s, b, h, i, j: s + learned[h, i - j + tokens],
        "gate": lambda s, b, h, i, j: s * torch.sigmoid(learned[h]),
        "bias": lambda s, b, h, i, j: s + learned[h, i, j],
        "slopes": lambda s, b, h, i, j: s - learned[h] * (i - j),
        "rows": lambda s, b, h, i, j: s * learned[h, i],
        "square": lambda s, b, h, i, j: s * s,
        "silu": lambda s, b, h, i, j: torch.nn.functional.silu(s),
        "softcap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
        "trigonometric": lambda s, b, h, i, j: 2 * torch.sin(s) + torch.cos(s),
    }[kind]


LEARNED: dict[str, Any] = {  # their shapes
    "table": lambda heads, tokens: (heads, 2 * tokens),
    "gate": lambda heads, tokens: (heads,),
    "bias": lambda heads, tokens: (heads, tokens, tokens),
    "slopes": lambda heads, tokens: (heads,),
    "rows": lambda heads, tokens: (heads, tokens),
}
WITHOUT = ("plain", "square", "silu", "softcap", "trigonometric")


@quiet
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", full_unless(lambda kind: kind in ("softcap", "table"), (*WITHOUT, *LEARNED)))
def test_against_torch(kind: str) -> None:
    """The mean error is at most 2.1 times that of torch's flex_attention in bfloat16, both from torch's in
    float64. It has no gradient, without being compiled, of a tensor without dimensions or one of vectors.
    """
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    heads, tokens, dim = 4, 500, 64
    draw = torch.Generator("cuda").manual_seed(3)
    documents = torch.arange(tokens, device="cuda") // 180

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents[q] == documents[k])

    shape = LEARNED[kind](heads, tokens) if kind in LEARNED else ()
    captured = torch.randn(shape, device="cuda", generator=draw)
    values = torch.randn(4, 2, heads, tokens, dim, device="cuda", generator=draw).bfloat16()

    def gradients(function: Any, block_mask: Any, dtype: Any) -> dict[str, Any]:
        q, k, v = (x.to(dtype).requires_grad_() for x in values[:3].detach().clone())
        learned = captured.to(dtype if dtype == torch.float64 else torch.float32).clone().requires_grad_()
        out = function(q, k, v, scores_of(kind, learned, tokens), block_mask)
        out.backward(values[3].to(dtype))
        found = {"q": q.grad, "k": k.grad, "v": v.grad}
        return {**found, "captured": learned.grad} if kind in LEARNED else found

    theirs = flex.create_block_mask(visible, None, None, tokens, tokens, device="cuda")
    ours = rawmla.create_block_mask(visible, None, None, tokens, tokens)
    exact = gradients(flex.flex_attention, theirs, torch.float64)
    plain = gradients(flex.flex_attention, theirs, torch.bfloat16)
    for block_mask in (ours, theirs):
        got = gradients(rawmla.flex_attention, block_mask, torch.bfloat16)
        for name, want in exact.items():
            error, allowed = ((x[name].double() - want).abs().mean() for x in (got, plain))
            assert float(error) <= 2.1 * float(allowed), f"{name}: {float(error):.3g} {float(allowed):.3g}"


# ---- the page


@pytest.mark.parametrize("name", flex_page.GRADIENTS)
def test_example_of_the_page(name: str) -> None:
    """The page's step of training, held against autograd of plain attention in float64 from the same gradient
    of out.
    """
    torch.manual_seed(0)
    names, call = flex_page.run(name)
    got = {"q": names["q"].grad, "table": names["table"].grad}
    out = names["out"].detach()
    leaves = {x: names[x].detach().double().requires_grad_() for x in got}
    names["table"] = leaves["table"]  # the function reads the name
    exact = flex_page.reference(call._replace(query=leaves["q"]))
    dout = (2 * out.float() / out.numel()).to(out.dtype).double()
    want = dict(zip(leaves, torch.autograd.grad(exact, list(leaves.values()), dout), strict=True))
    for x, wanted in want.items():
        assert got[x].dtype == (out.dtype if x == "q" else torch.float32)
        assert float((got[x].double() - wanted).norm()) <= 2**-7 * float(wanted.norm())


# ---- torch.compile


@quiet
@compiled
def test_compiled_module_trains() -> None:
    """Steps of an optimizer, over a parameter that the score function of a module reads."""

    class Layer(torch.nn.Module if torch else object):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(64, 3 * 64)
            self.bias = torch.nn.Parameter(torch.zeros(2, 512))

        def forward(self, x: Any, block_mask: Any) -> Any:
            bias = self.bias

            def biased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
                return s + bias[h, q - k + 256]

            q, k, v = self.qkv(x).bfloat16().unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            out = rawmla.flex_attention(q, k, v, biased, block_mask, deterministic=True)
            return out.float().square().mean()

    losses = []
    block_mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    for compile_it in (False, True):
        torch.manual_seed(0)
        layer = Layer().cuda()
        x = torch.randn(2, 256, 64, device="cuda")
        step = torch.compile(layer, backend="aot_eager") if compile_it else layer
        optimizer = torch.optim.SGD(layer.parameters(), lr=10.0)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = step(x, block_mask)
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
        assert bool((layer.bias.grad != 0).any())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # torch rounds its own operators otherwise
    assert losses[0][-1] < 0.6 * losses[0][0]
