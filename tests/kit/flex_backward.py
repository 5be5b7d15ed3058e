"""Backward of flex attention: gradients to start from, the reference on the device, the comparison.

The reference computes what `rawmla.reference` computes (the tests hold one against the other), with the
derivatives of score functions by torch's autograd in float64, and how much the roundings of a kernel may move
its results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from rawmla.reference._flex import FAR_LSE

from . import flex
from .flex import (
    FlexCase,
    FlexInputs,
    block_mask_of_case,
    empty_array,
    listed_positions,
    make_flex_inputs,
    reference,
)
from .mha import LEAST
from .mha_backward import FLOAT32, NAMES, BackwardResults, Gradients, check_kinds, norms, problems_of_rows

OF_SCORE = 2.0**-22
"""Relative error of scores and of lse in float32."""
DRAWS = 16
"""Of random signs, which tell what the errors of the terms of a captured gradient come to."""
DEVIATIONS = 4.0
"""By how many standard deviations float32 may move an element of a captured gradient. They are made of bounds
of errors, which are several times what errors usually are; 16 draws may find a third of one.
"""
OF_VALUE = 2.0**-17
"""Error of a captured gradient relative to its value: a function's own errors that all terms share, and the
rounding of partial sums.
"""
OF_LARGEST = 2.0**-16
"""Error of an element relative to the largest floor of its array: in a fixed order kernels sum integers, and
their unit follows from the largest term.
"""
UNDERFLOW = 2.0**-80
"""Bound of a sum of terms that are below the smallest numbers of float32."""


@dataclass
class Captured:
    """What the reference says of the gradient of a captured tensor.

    Attributes:
        value: float64, of the tensor's shape.
        floor: float64, of the tensor's shape: standard deviations that follow from the errors of dot
            products, scores and lse in float32.
    """

    value: Any
    floor: Any


@dataclass
class FlexBackwardResults:
    """dq, dk and dv as `BackwardResults` has them, and the gradients of captured tensors by name."""

    rows: BackwardResults
    captured: dict[str, Captured]


# ---- inputs


def make_flex_backward_inputs(case: FlexCase, device: str = "cuda") -> FlexInputs:
    """Inputs whose block mask has lists by columns. What the score function reads requires grad."""
    inputs = make_flex_inputs(case, device)
    for tensor in captured_tensors(inputs).values():
        tensor.requires_grad_()
    if inputs.mask is None:
        return inputs
    return replace(inputs, block_mask=block_mask_of_case(case, inputs.mask, device, by_columns=True))


def make_flex_gradients(inputs: FlexInputs, of: str = "out") -> Gradients:
    """Normal random gradients of "out", of "lse" (dout is 0) or of "both".

    dout has the case's layout. Both are the case's `gap` wherever a row has nothing to attend.
    """
    import torch

    case, device = inputs.case, inputs.q.device
    draw = torch.Generator(device).manual_seed(case.seed + 2)
    empty = reference(inputs)[1] == -inf
    shape = (case.b, case.h_q, case.s_q, case.d_v)
    values = torch.randn(shape, generator=draw, device=device) * (of != "lse")
    dout = empty_array(shape, case.layout, case.gap, inputs.q.dtype, str(device))
    dout.copy_(values.masked_fill(empty[..., None], case.gap))
    dlse = None
    if of != "out":
        dlse = torch.randn(shape[:-1], generator=draw, device=device).masked_fill(empty, case.gap)
    return Gradients(dout, dlse)


def exact_results(inputs: FlexInputs) -> tuple[Any, Any]:
    """out and lse as an exact forward returns them."""
    out, lse, _ = reference(inputs)
    return out.to(inputs.q.dtype), lse.float()


def captured_tensors(inputs: FlexInputs) -> dict[str, Any]:
    """The tensors that the score function reads and that have gradients, by name."""
    if inputs.score is None:
        return {}
    return {name: inputs.score.captures[name] for name in inputs.score.capture_grads}


# ---- reference


def reference_backward(
    inputs: FlexInputs, gradients: Gradients, results: tuple[Any, Any] | None = None
) -> FlexBackwardResults:
    """The gradients of a call in float64.

    They follow from the out and lse given as `results`, as `flex_attention_backward` defines it, or else from
    exact ones.
    """
    import torch

    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = reference(inputs)[:2] if results is None else results
    arrays = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, k, v)]
    squares = [[x.new_zeros(x.shape[:-1]) for x in arrays] for _ in range(2)]
    captures = _Captures(inputs)
    (b, h_q, s_q, _), (b_kv, h_kv, s_k, _) = q.shape, v.shape
    if prod((b, s_q, s_k)):
        lists = None if inputs.block_mask is None else listed_positions(inputs.block_mask)
        pairs = torch.arange(b * h_q, device=q.device)
        for part in pairs.split(max(1, flex.CHUNK_SCORES // (4 * s_q * s_k))):
            own = part // h_q, part % h_q
            shared = own[0] % b_kv, own[1] // (h_q // h_kv)
            _add_gradients(inputs, gradients, (out, lse), lists, own, shared, arrays, squares, captures)
    sizes, floors = (tuple(x.sqrt() for x in part) for part in squares)
    return FlexBackwardResults(BackwardResults(tuple(arrays), sizes, floors), captures.results())


class _Captures:
    """The sums of captured gradients: exact ones, and of errors of their terms, with random signs."""

    def __init__(self, inputs: FlexInputs) -> None:
        import torch

        found = captured_tensors(inputs)
        self.tensors = {name: x.detach().double().requires_grad_() for name, x in found.items()}
        self._draw = torch.Generator(inputs.q.device).manual_seed(0)
        self._sums = [[x.new_zeros(x.shape) for x in self.tensors.values()] for _ in range(1 + DRAWS)]

    def add(self, scores: Any, grad: Any, lost: Any, of_rows: tuple[Any, ...]) -> None:
        """What these gradients of scores give, and these errors of them: `lost` of each, and of rows."""
        import torch

        if not self.tensors:
            return

        def signs(shape: tuple[int, ...]) -> Any:
            return 2 * torch.randint(0, 2, shape, generator=self._draw, device=grad.device) - 1

        for i, total in enumerate(self._sums):
            kind = grad
            if i:
                kind = lost * signs(lost.shape)
                for one in of_rows:
                    kind = kind + one * signs((*one.shape[:-1], 1))
            parts = torch.autograd.grad(scores, list(self.tensors.values()), kind, retain_graph=True)
            for one, part in zip(total, parts, strict=True):
                one += part

    def results(self) -> dict[str, Captured]:
        """By name. The squared sum of errors with random signs is, in the mean, the sum of their squares."""
        found = {}
        for i, name in enumerate(self.tensors):
            drawn = sum(total[i].square() for total in self._sums[1:])
            found[name] = Captured(self._sums[0][i], (drawn / DRAWS).sqrt())
        return found


def _add_gradients(
    inputs: FlexInputs,
    gradients: Gradients,
    results: tuple[Any, Any],
    lists: tuple[Any, Any] | None,
    own: tuple[Any, Any],
    shared: tuple[Any, Any],
    arrays: list[Any],
    squares: list[list[Any]],
    captures: _Captures,
) -> None:
    """Add the gradients of these heads `(request, head)`, whose keys and values are `shared`."""
    import torch

    case = inputs.case
    s_q, s_k = case.s_q, case.s_k
    scale = case.d_qk**-0.5 if case.scale is None else case.scale
    device = inputs.q.device
    at = (
        own[0][:, None, None],
        own[1][:, None, None],
        torch.arange(s_q, device=device)[:, None],
        torch.arange(s_k, device=device),
    )
    lse = results[1][own].double()
    visible = (lse > -inf)[..., None].expand(-1, -1, s_k)
    if lists is not None:
        some, full = (x[own[0] % x.shape[0], own[1] % x.shape[1]] for x in lists)
        visible = visible & (full if inputs.mask is None else full | some & inputs.mask.torch()(*at))
    rows, keys_seen = visible.any(2), visible.any(1)

    def part(x: Any, heads: tuple[Any, Any], used: Any) -> Any:
        return x[heads].double().masked_fill(~used[..., None], 0.0)

    queries, dout, out = (part(x, own, rows) for x in (inputs.q, gradients.dout, results[0]))
    keys, values = (part(x, shared, keys_seen) for x in (inputs.k, inputs.v))
    with torch.enable_grad():
        # What is masked may be NaN, and is not asked for.
        products = torch.where(visible, queries @ keys.mT * scale, 1.0).requires_grad_()
        scores = products * 1.0
        if inputs.score is not None:
            scores = inputs.score.torch(captures.tensors)(products, *at)
    p = probabilities(scores.detach(), visible, lse)
    delta = (dout * out).sum(-1)
    terms = p * norms(dout) * (norms(values).mT + norms(out))
    of_delta = p * norms(dout) * norms(out)
    if gradients.dlse is not None:
        dlse = gradients.dlse[own].double().masked_fill(~rows, 0.0)
        delta, terms = delta - dlse, terms + p * dlse.abs()[..., None]
        of_delta = of_delta + p * dlse.abs()[..., None]
    factors = dout @ values.mT - delta[..., None]  # of P times the derivative, which is rounded, in dS
    grad = p * factors

    def to_products(x: Any) -> Any:
        (found,) = torch.autograd.grad(scores, products, x, retain_graph=True)
        return torch.where(visible, found, 0.0)

    ds, lost = to_products(grad), to_products(terms).abs()
    # Errors of products, of scores and of lse move P. Scores that are far are fills, which are exact.
    at_score, at_lse = (
        torch.where(visible & (x.abs() <= FAR_LSE), x.abs(), 0.0) for x in (scores.detach(), lse[..., None])
    )
    of_products = abs(scale) * norms(queries) * norms(keys).mT * ds.abs()
    captures.add(
        scores,
        grad,
        FLOAT32 * (terms + of_products) + OF_SCORE * at_score * grad.abs(),
        (FLOAT32 * of_delta, OF_SCORE * at_lse * grad),
    )
    _add(arrays[0], own, scale * (ds @ keys))
    _add(arrays[1], shared, scale * (ds.mT @ queries))
    _add(arrays[2], shared, p.mT @ dout)
    # An approximate derivative is off by a part of what it is at most, 1.
    off = torch.maximum(ds.abs(), grad.abs()) if _is_approximate(inputs) else ds
    least = LEAST[case.dtype]
    smallest = least * visible.double()
    lost = FLOAT32 * abs(scale) * lost + (max(abs(scale), 1.0) + abs(scale) * factors.abs()) * smallest
    for square, of_ds, of_p in ((squares[0], scale * off, p), (squares[1], lost, smallest)):
        _add(square[0], own, (of_ds.square() @ norms(keys).square())[..., 0])
        _add(square[1], shared, (of_ds.square().mT @ norms(queries).square())[..., 0])
        _add(square[2], shared, (of_p.square().mT @ norms(dout).square())[..., 0])


def probabilities(scores: Any, visible: Any, lse: Any) -> Any:
    """`exp(scores - lse)` where a score is visible, else 0; without lse where float32 rounds it too much."""
    import torch

    scores, lse = scores.masked_fill(~visible, -inf), lse[..., None]
    p = torch.where(lse.abs() > FAR_LSE, torch.softmax(scores, -1), torch.exp(scores - lse))
    return torch.where(visible, p, 0.0)


def _add(total: Any, heads: tuple[Any, Any], x: Any) -> None:
    """Add x `[heads, ...]` to these heads `(request, head)`, of which some may be the same."""
    total.index_put_(heads, x, accumulate=True)


def _is_approximate(inputs: FlexInputs) -> bool:
    return inputs.score is not None and inputs.score.approximate


# ---- comparison


def check_flex_backward(
    inputs: FlexInputs,
    gradients: Gradients,
    results: tuple[Any, Any],
    got: tuple[Any, Any, Any, dict[str, Any]],
) -> None:
    """Raise AssertionError unless gradients are as exact as products in the inputs' dtype allow.

    `results` are the out and lse that the backward pass was given, `got` dq, dk, dv and captured gradients by
    name. dq, dk and dv have the bounds of `check_mha_backward`, but a row may be off by twice as much
    where all of q and k are positive: its terms, and so their errors, then point the same way. All may be off
    by 4 times as much for functions of which kernels have approximate instructions. An element of a captured
    gradient is off by at most a half-step of its own dtype, and by what float32 leaves: its terms are never
    rounded to the inputs' dtype. Rows that attend nothing or that nothing attends are 0, and so is dv without
    a gradient of out.
    """
    import torch

    case = inputs.case
    with torch.no_grad():  # the inputs may require grad
        want = reference_backward(inputs, gradients, results)
    times = 4.0 if _is_approximate(inputs) else 1.0
    rows = 2.0 if inputs.score is not None and inputs.score.positive else 1.0
    *row_gradients, captured = got
    check_kinds(case.id, NAMES, row_gradients, (inputs.q, inputs.k, inputs.v))
    unused = [floor == 0 for floor in want.rows.floors]
    dout = gradients.dout[results[1] > -inf]
    problems = problems_of_rows(row_gradients, want.rows, unused, dout, case.dtype, times, rows)
    sources = captured_tensors(inputs)
    if set(captured) != set(sources):
        raise AssertionError(f"{case.id}: gradients of {sorted(captured)} instead of {sorted(sources)}")
    for name, source in sources.items():
        one, wanted = captured[name], want.captured[name]
        if one.dtype != source.dtype or one.shape != source.shape or not one.is_contiguous():
            raise AssertionError(f"{case.id}: gradient of {name} of {one.dtype} and shape {tuple(one.shape)}")
        problems += _problems_of_captured(name, one, wanted)
    if problems:
        raise AssertionError(f"{case.id}: {'; '.join(problems)}")


def _problems_of_captured(name: str, got: Any, want: Captured) -> list[str]:
    """What is wrong with a captured gradient: an error of more than its dtype's rounding and float32's."""
    import torch

    if not got.numel():
        return []
    own = torch.finfo(got.dtype)
    floor = DEVIATIONS * want.floor + OF_LARGEST * want.floor.max()
    least = max(own.smallest_normal * own.eps, UNDERFLOW)
    allowed = (own.eps / 2 + OF_VALUE) * want.value.abs() + floor + least
    excess = ((got.double() - want.value).abs() / allowed).nan_to_num(nan=inf)
    worst = float(excess.max())
    if worst <= 1:
        return []
    return [f"error of the gradient of {name} {worst:.3g} times what is allowed"]
