"""Backward of dense attention (MHA): gradients to start from, the reference on the device, the comparison.

The reference computes what `rawmla.reference` computes (the tests hold one against the other), for several
heads at a time, and how much the roundings of a kernel may move each row of its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from . import mha
from .mha import HALF_STEP, LEAST, MhaInputs, distances, hidden_pairs, in_gaps, reference, tokens_of

NAMES = ("dq", "dk", "dv", "dsink")
FLOAT32 = 2.0**-20
"""Error of a dot product in float32, relative to the norms of its vectors; tensor cores do not round to
nearest.
"""
TANH = 2.0**-11
"""Relative error of an approximate tanh."""


@dataclass
class Gradients:
    """The gradients of out and of lse that a backward pass starts from; `dlse` None: lse is not used."""

    dout: Any
    dlse: Any


@dataclass
class BackwardResults:
    """What the reference says of a backward pass.

    Attributes:
        values: dq, dk, dv, and with a sink dsink.
        sizes: of the terms that a row of dq, dk and dv is the sum of, as an L2 norm: `|dS| |k|`, `|dS| |q|`,
            `P |dout|`. Terms that are off by independent roundings leave the row off by so much of it. Where
            an approximate tanh is worth several half-steps, the terms count as often.
        floors: what the errors of dot products in float32, whose difference dS is, and what numbers below the
            dtype's leave the rows off by.
    """

    values: tuple[Any, ...]
    sizes: tuple[Any, Any, Any]
    floors: tuple[Any, Any, Any]


# ---- inputs


def make_mha_gradients(inputs: MhaInputs, of: str = "out") -> Gradients:
    """Normal random gradients of "out", of "lse" (dout is 0) or of "both", with the case's `spread`.

    dout has the case's layout. Both are the case's `gap` wherever a row has nothing to attend.
    """
    import torch

    case = inputs.case
    device = inputs.q.device
    draw = torch.Generator(device).manual_seed(case.seed + 1)
    attending = rows_in_use(inputs)[0]
    rows, h_q = inputs.q.shape[:-2], inputs.q.shape[-2]

    def randn(*columns: int) -> Any:
        return torch.randn((*rows, h_q, *columns), generator=draw, device=device) * case.spread

    dout = in_gaps((*rows, h_q, case.d_v), case.layout, case.gap, inputs.q.dtype, device)
    dout[attending] = (randn(case.d_v) if of != "lse" else dout.new_zeros(dout.shape)).to(dout)[attending]
    dlse = None
    if of != "out":
        dlse = randn().masked_fill(~attending[..., None], case.gap)
        dlse = stored_by_heads(dlse) if inputs.cu_seqlens_q is not None else dlse.mT.contiguous()
    return Gradients(dout, dlse)


def exact_results(inputs: MhaInputs) -> tuple[Any, Any]:
    """out and lse as an exact forward returns them, NaN in rows of no request. out has the case's layout.

    With a softcap a kernel wants the results of its own forward, which has the same approximate tanh: it
    cancels in `exp(score - lse)`, and what is left of it is more than plain torch errs by in float16.
    """
    out, lse = reference(inputs)
    given = in_gaps(out.shape, inputs.case.layout, inputs.case.gap, inputs.q.dtype, out.device)
    given.copy_(out)
    lse = lse.float()
    return given, lse if inputs.cu_seqlens_q is None else stored_by_heads(lse)


def stored_by_heads(x: Any) -> Any:
    """The same `[tokens, heads]`, of which the transpose is contiguous."""
    return x.T.contiguous().T


def rows_in_use(inputs: MhaInputs) -> tuple[Any, Any]:
    """Which rows of q attend something, and which rows of k something attends."""
    import torch

    device = inputs.q.device
    used_q, used_k = (
        torch.zeros(x.shape[:-2], dtype=torch.bool, device=device) for x in (inputs.q, inputs.k)
    )
    if inputs.cu_seqlens_q is None:
        places: list[Any] = [((..., slice(None)), (..., slice(None)))]
    else:
        places = tokens_of(inputs)
    for rows_q, rows_k in places:
        s_q, s_k = used_q[rows_q].shape[-1], used_k[rows_k].shape[-1]
        seen = ~hidden_pairs(distances(s_q, s_k, 0, device), inputs.case.causal, inputs.case.window)
        used_q[rows_q], used_k[rows_k] = seen.any(1), seen.any(0)
    return used_q, used_k


# ---- reference


def reference_backward(
    inputs: MhaInputs, gradients: Gradients, results: tuple[Any, Any] | None = None, dtype: Any = None
) -> BackwardResults:
    """The gradients of a call in `dtype`, None: float64.

    They follow from the out and lse given as `results`, as the backward functions define it, or else from
    those that the same steps give. All are 0 in rows that attend nothing or that nothing attends.
    """
    import torch

    dtype = torch.float64 if dtype is None else dtype
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": gradients.dout, "dlse": gradients.dlse}
    arrays["out"], arrays["lse"] = (None, None) if results is None else results
    slopes = inputs.alibi_slopes
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    values = [torch.zeros(x.shape, dtype=exact, device=x.device) for x in (inputs.q, inputs.k, inputs.v)]
    sizes, floors = ([x.new_zeros(x.shape[:-1]) for x in values] for _ in range(2))
    dsink = torch.zeros(inputs.q.shape[-2], dtype=torch.float64, device=inputs.q.device)
    if inputs.cu_seqlens_q is None:
        for name in ("lse", "dlse"):
            arrays[name] = None if arrays[name] is None else arrays[name].mT
        _add_gradients((values, sizes, floors), dsink, arrays, inputs, slopes, dtype)
    else:
        for r, (rows_q, rows_k) in enumerate(tokens_of(inputs)):
            own = {
                name: None if x is None else x[rows_k if name in ("k", "v") else rows_q][None]
                for name, x in arrays.items()
            }
            one_slopes = slopes[r : r + 1] if slopes is not None and slopes.ndim == 2 else slopes
            rows = (rows_q, rows_k, rows_k)
            parts = [
                [x[at][None] for x, at in zip(sums, rows, strict=True)] for sums in (values, sizes, floors)
            ]
            _add_gradients(parts, dsink, own, inputs, one_slopes, dtype)
    found = [x.to(dtype) for x in values]
    if inputs.attn_sink is not None:
        found.append(dsink if dtype == torch.float64 else dsink.to(inputs.attn_sink.dtype))
    return BackwardResults(tuple(found), *(tuple(x.sqrt() for x in part) for part in (sizes, floors)))


def _add_gradients(
    sums: Sequence[list[Any]], dsink: Any, arrays: dict[str, Any], inputs: MhaInputs, slopes: Any, dtype: Any
) -> None:
    """Add the gradients of requests of one length: all arrays are `[b, s, h, ...]`.

    `sums` are the values, and the squares of their sizes and floors, of q, k and v each. `dsink` is shared by
    all requests.
    """
    import torch

    case = inputs.case
    (dq, dk, dv), sizes, floors = sums
    q, k = arrays["q"], arrays["k"]
    b, s_q, h_q, d_qk = q.shape
    s_k, h_kv = k.shape[1:3]
    if not b or not s_q or not s_k:
        return
    scale = d_qk**-0.5 if case.softmax_scale is None else case.softmax_scale
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    behind = distances(s_q, s_k, 0, q.device)
    hidden = hidden_pairs(behind, case.causal, case.window)
    empty, unseen = hidden.all(1), hidden.all(0)
    slopes = None if slopes is None else slopes.to(exact).expand(b, h_q)
    pairs = torch.arange(b * h_q, device=q.device)
    for part in pairs.split(max(1, mha.CHUNK_SCORES // (4 * s_q * s_k))):
        request, head = part // h_q, part % h_q
        own, shared = (request, head), (request, head // (h_q // h_kv))

        queries, dout = (_heads(arrays[name], own, empty).to(dtype) for name in ("q", "dout"))
        keys, values = (_heads(arrays[name], shared, unseen).to(dtype) for name in ("k", "v"))
        scores = queries @ keys.mT * scale
        slope: Any = 1.0
        off_p: Any = 1.0  # by how many half-steps P and the slope are off, this in absolute terms
        off_slope: Any = 0.0
        if case.softcap:
            ratio = torch.tanh(scores / case.softcap)
            scores, slope = case.softcap * ratio, 1 - ratio * ratio
            steps = TANH / HALF_STEP[case.dtype]
            off_p, off_slope = 1 + steps * scores.abs(), 2 * steps * ratio * ratio
        if slopes is not None:
            scores = scores - slopes[request, head, None, None] * behind.abs()
        scores = scores.to(exact).masked_fill(hidden, -inf)
        if arrays["lse"] is None:
            lse = torch.logsumexp(scores, dim=-1).masked_fill(empty, 0.0)
        else:
            lse = _heads(arrays["lse"], own, empty).to(exact)
        weights = torch.exp(scores - lse[..., None])
        del scores  # here and below: a single head may have 1.6e8 scores
        kept, share = torch.ones_like(lse), torch.zeros_like(lse)
        if inputs.attn_sink is not None:
            sink = inputs.attn_sink.to(exact)[head, None]
            kept, share = torch.sigmoid(lse - sink), torch.sigmoid(sink - lse)
        p = (weights * kept[..., None]).to(dtype)
        dp = dout @ values.mT
        if arrays["out"] is None:
            out = (p @ values).to(exact)
        else:
            out = _heads(arrays["out"], own, empty).to(exact)
        dots = (dout * out).sum(-1)
        dp -= dots[..., None]
        ds, factors = p * dp, dp.abs()  # of P times the slope, which is rounded, in dS
        terms = p * norms(dout) * (norms(values).mT + norms(out))
        if arrays["dlse"] is not None:
            dlse = _heads(arrays["dlse"], own, empty).to(exact)[..., None]
            ds, terms = ds + weights * dlse, terms + weights * dlse.abs()
            factors = factors + dlse.abs()
        off_ds = (slope * off_p + off_slope) * ds
        ds, terms = (slope * ds).masked_fill(hidden, 0.0), slope * terms

        _add(dq, own, scale * (ds.to(dtype) @ keys))
        _add(dk, shared, scale * (ds.to(dtype).mT @ queries))
        _add(dv, shared, p.mT @ dout)
        dsink.index_add_(0, head, -(share * dots).sum(-1).double())
        if dtype != torch.float64:
            continue
        least = LEAST[case.dtype]
        del weights, dp, ds
        # dS is rounded before or after the scale.
        lost = least * (max(scale, 1.0) + scale * factors)
        lost += FLOAT32 * scale * terms
        del terms, factors
        smallest = torch.full_like(lost, least)
        for squares, of_ds, of_p in ((sizes, scale * off_ds, off_p * p), (floors, lost, smallest)):
            of_ds, of_p = (x.masked_fill(hidden, 0.0).square() for x in (of_ds, of_p))
            _add(squares[0], own, (of_ds @ norms(keys).square())[..., 0])
            _add(squares[1], shared, (of_ds.mT @ norms(queries).square())[..., 0])
            _add(squares[2], shared, (of_p.mT @ norms(dout).square())[..., 0])
        del p, off_p, off_ds, lost, smallest, of_ds, of_p


def _heads(x: Any, heads: tuple[Any, Any], without: Any) -> Any:
    """`[heads, rows, ...]` of these heads `(request, head)` of x, 0 in rows `without` a partner."""
    part = x[heads[0], :, heads[1]]
    return part.masked_fill(without[:, None] if part.ndim == 3 else without, 0.0)


def _add(total: Any, heads: tuple[Any, Any], x: Any) -> None:
    """Add x `[heads, rows, ...]` to these heads `(request, head)`, of which some may be the same."""
    total.transpose(1, 2).index_put_(heads, x.to(total.dtype), accumulate=True)


def norms(x: Any) -> Any:
    """L2 norms of rows, as a column."""
    return x.norm(dim=-1, keepdim=True)


# ---- comparison


def check_mha_backward(
    inputs: MhaInputs,
    gradients: Gradients,
    results: tuple[Any, Any],
    got: tuple[Any, ...],
    *,
    plain: bool = False,
) -> None:
    """Raise AssertionError unless gradients are as exact as products in the inputs' dtype allow.

    `results` are the out and lse that the backward pass was given. From them the L2 error of dq, of dk and of
    dv, relative to its norm, is at most a whole step of the dtype, 4 times as much with a softcap, whose tanh
    is approximate; besides, what float32 leaves of terms that cancel, as where a row has a single key and its
    gradient is 0. A row is off by at most 1.25 half-steps of itself and of its terms, which in dq and dk are
    rounded twice, and dsink by its rounding. Rows of d < 64 columns may be off by (64 / d)^(2/3) times as
    much: errors of few columns vary more, and are less independent. Rows that attend nothing or that nothing
    attends are 0, and so is dv without a gradient of out. With `plain` the largest error from the gradients
    of exact results, dsink's too, is also compared with plain torch in the inputs' dtype.
    """
    import torch

    case = inputs.case
    with torch.no_grad():  # the inputs may require grad
        want = reference_backward(inputs, gradients, results)
    if len(got) != len(want.values):
        raise AssertionError(f"{case.id}: {len(got)} gradients instead of {len(want.values)}")
    check_kinds(case.id, NAMES, got, (inputs.q, inputs.k, inputs.v, inputs.attn_sink))
    used_q, used_k = rows_in_use(inputs)
    unused = ~used_q, ~used_k, ~used_k
    times = 4.0 if case.softcap else 1.0
    problems = problems_of_rows(got[:3], want, unused, gradients.dout[used_q], case.dtype, times)
    if len(got) == 4:
        problems += _problems_of_dsink(got[3], want.values[3], gradients.dout[used_q], results[0][used_q])
    if plain:
        problems += _problems_by_plain_torch(inputs, gradients, want, got)
    if problems:
        raise AssertionError(f"{case.id}: {'; '.join(problems)}")


def check_kinds(case: str, names: Sequence[str], got: Sequence[Any], sources: Sequence[Any]) -> None:
    """Raise AssertionError unless gradients have the dtypes and shapes of what they belong to."""
    for name, one, source in zip(names, got, sources, strict=False):
        if one.dtype != source.dtype or one.shape != source.shape:
            raise AssertionError(f"{case}: {name} of {one.dtype} and shape {tuple(one.shape)}")


def problems_of_rows(
    got: Sequence[Any],
    want: BackwardResults,
    unused: Sequence[Any],
    dout: Any,
    dtype: str,
    times: float,
    rows: float = 1.0,
) -> list[str]:
    """What is wrong with dq, dk and dv, of which some rows are `unused`; `dout` has the other rows."""
    problems = []
    for i, (one, without) in enumerate(zip(got, unused, strict=True)):
        if not bool((one[without] == 0).all()):
            problems.append(f"{NAMES[i]} is not 0 in a row that takes no part")
        problems += _problems_of_gradient(i, one, want, dtype, times, rows)
    if not bool((dout != 0).any()) and not bool((got[2] == 0).all()):
        problems.append("dv is not 0 without a gradient of out")
    return problems


def _problems_of_gradient(
    i: int, got: Any, want: BackwardResults, dtype: str, times: float, rows: float
) -> list[str]:
    """What is wrong with dq, dk or dv: an error of `times` the rounding, in a row `rows` times as much."""
    name, values, size, floor = NAMES[i], want.values[i], want.sizes[i], want.floors[i]
    if not got.numel():
        return []
    problems = []
    if missing := int((~got.isfinite()).sum()):
        problems.append(f"{missing} elements of {name} are infinite or NaN")
    error = (got.double() - values).norm(dim=-1)
    norm = values.norm(dim=-1)
    floor = floor + LEAST[dtype] * got.shape[-1] ** 0.5
    factor = 2 * times * HALF_STEP[dtype]
    if not error.norm() <= factor * norm.norm() + floor.norm():
        problems.append(
            f"relative L2 error of {name} {float(error.norm() / norm.norm()):.3g}, allowed {factor:.3g}"
        )
    # P is rounded, and in dq and dk besides what follows from it, dS.
    rounded = (1 if name == "dv" else 2) * size.square() + norm.square()
    allowed = 1.25 * rows * times * HALF_STEP[dtype] * rounded.sqrt() + floor
    # With fewer columns an L2 error varies more, and roundings depend on the keys: by the score, close to one
    # column of them.
    allowed = max(1.0, (64 / got.shape[-1]) ** (2 / 3)) * allowed
    worst = float((error / allowed).max())
    if not worst <= 1:
        problems.append(f"L2 error of a row of {name} {worst:.3g} times what is allowed")
    return problems


def _problems_of_dsink(got: Any, want: Any, dout: Any, out: Any) -> list[str]:
    """What is wrong with dsink: an error of more than its dtype's rounding and float32's."""
    import torch

    kind = torch.finfo(got.dtype)
    terms = (dout.double() * out.double()).abs().sum((0, 2))
    error = (got.double() - want).abs()
    allowed = kind.eps / 2 * want.abs().clamp(min=kind.tiny) + FLOAT32 * terms
    worst = int((error / allowed).nan_to_num(nan=inf).argmax())
    if bool(error[worst] <= allowed[worst]):
        return []
    return [f"error of dsink {float(error[worst]):.3g}, allowed {float(allowed[worst]):.3g}"]


def _problems_by_plain_torch(
    inputs: MhaInputs, gradients: Gradients, given: BackwardResults, got: tuple[Any, ...]
) -> list[str]:
    """What FlashAttention's tests refuse: more than a multiple of the error of torch, and of adding 0.3.

    In dsink the rounding of out, of which `given` has made the best, is an error of torch as well: the errors
    of a few heads alone say too little of what is usual.
    """
    exact = reference_backward(inputs, gradients)
    plain = reference_backward(inputs, gradients, dtype=inputs.q.dtype).values
    problems = []
    for i, (one, want, other) in enumerate(zip(got, exact.values, plain, strict=True)):
        if not one.numel():
            continue
        rounded = want.to(one.dtype)
        step = float((rounded + 0.3 - 0.3 - rounded).abs().max())
        error, of_plain = (float((x.double() - want).abs().max()) for x in (one, other))
        if i == 3:
            of_plain = max(of_plain, float((given.values[i] - want).abs().max()))
        allowed = (3 * of_plain + 3e-4 if inputs.case.softcap else 2 * of_plain) + 2 * step
        if i < 3:  # plain torch finds 0 where float32 leaves something of terms that cancel
            allowed += float(exact.floors[i].max())
        if not error <= allowed:
            problems.append(f"largest error of {NAMES[i]} {error:.3g}, allowed by plain torch {allowed:.3g}")
    return problems
