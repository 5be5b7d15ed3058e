"""Dense attention (MHA): cases, their inputs, and the reference on the device in torch.

The reference computes what `rawmla.reference` computes (the tests hold one against the other), for several
heads, or some query tokens of one, at a time, so that its memory stays bounded whatever the lengths. In the
inputs' own dtype it is the plain torch that bounds of errors are measured by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from .compare import Tolerance, in_parts, measure
from .generators import Case

CHUNK_SCORES = 1 << 25
"""Scores, and numbers of keys and values, of one step of the reference (256 MiB in float64), unless the keys
of a single head are more.
"""

HALF_STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
LEAST = {"bfloat16": 2.0**-123, "float16": 2.0**-25}
"""What results below the smallest normal number may be off by. bfloat16 has the range of float32, in which a
row's factor below 2**-126 becomes 0 before it multiplies values of up to 8.
"""
_ANY = Tolerance(absolute=inf, relative=inf)


@dataclass(frozen=True)
class MhaCase(Case):
    """One call.

    Attributes:
        b: requests, of `s_q` query tokens and `s_k` keys.
        q_lengths, k_lengths: lengths of the requests instead, as segments of one array.
        q_used, k_used: seqused of these.
        rows_around: rows of the arrays before the first and after the last segment.
        causal, window, softcap, softmax_scale: as in the call.
        sink: dtype of the sink, or "infinite": +inf, -inf and finite values, head after head.
        alibi: slopes of the heads ("heads"), or of the heads of each request ("requests").
        layout: of q, k and v: "plain" (contiguous), "slice" (of a larger array, all dimensions), "heads" (the
            tokens of a head one after the other).
        packed: "qkv", "kv": three dimensions and head_dim_qk; "qkv4", "kv4": four; "": arrays of their own.
        spread: standard deviation of q, k and v.
        gap: what memory that belongs to no token holds.
    """

    b: int = 2
    s_q: int = 0
    s_k: int = 0
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    q_used: tuple[int, ...] | None = None
    k_used: tuple[int, ...] | None = None
    rows_around: int = 0
    h_q: int = 4
    h_kv: int = 2
    d_qk: int = 128
    d_v: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: str | None = None
    alibi: str | None = None
    layout: str = "plain"
    packed: str = ""
    spread: float = 1.0
    gap: float = float("nan")
    seed: int = 0


@dataclass
class MhaInputs:
    """The arrays of a call; `parts` is the packed array, of which k and v, and q too, are views."""

    case: MhaCase
    q: Any
    k: Any
    v: Any
    parts: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    attn_sink: Any
    alibi_slopes: Any

    def options(self) -> dict[str, Any]:
        """The keywords of the call that say how scores are made."""
        case = self.case
        return {
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
            "window_size": case.window,
            "softcap": case.softcap,
            "attn_sink": self.attn_sink,
            "alibi_slopes": self.alibi_slopes,
        }


def make_mha_inputs(case: MhaCase, device: str = "cuda") -> MhaInputs:
    """Inputs of normal random numbers; q is multiplied by softcap / 4 with a softcap."""
    import torch

    draw = torch.Generator(device).manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def integers(values: Sequence[int] | None) -> Any:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    def randn(*shape: int) -> Any:
        return torch.randn(shape, generator=draw, device=device)

    if case.q_lengths is None or case.k_lengths is None:
        sizes_q: tuple[int, ...] = (case.b, case.s_q)
        sizes_k: tuple[int, ...] = (case.b, case.s_k)
        cu_q = cu_k = None
        rows_of_tokens: tuple[Any, Any] = ..., ...
    else:
        cu_q, cu_k = (bounds_of(lengths, case.rows_around) for lengths in (case.q_lengths, case.k_lengths))
        sizes_q, sizes_k = (cu_q[-1] + case.rows_around,), (cu_k[-1] + case.rows_around,)
        rows_of_tokens = used_rows(cu_q, case.q_used, device), used_rows(cu_k, case.k_used, device)

    def empty(sizes: tuple[int, ...], *columns: int) -> Any:
        return in_gaps((*sizes, *columns), case.layout, case.gap, dtype, device)

    d_qk, d_v = case.d_qk, case.d_v
    count = 3 if case.packed.startswith("qkv") else 2
    parts = None
    if case.packed.endswith("4"):
        parts = torch.full((*sizes_k, count, case.h_kv, d_qk), case.gap, dtype=dtype, device=device)
        views = list(parts.unbind(1))
    elif case.packed:
        widths = [d_qk] * (count - 1) + [d_v]
        parts = empty(sizes_k, case.h_kv, sum(widths))
        views = list(parts.split(widths, dim=-1))
    else:
        views = [empty(sizes_k, case.h_kv, d_qk), empty(sizes_k, case.h_kv, d_v)]
    if len(views) == 2:
        views.insert(0, empty(sizes_q, case.h_q, d_qk))
    q, k, v = views
    for array, rows in zip((q, k, v), (*rows_of_tokens, rows_of_tokens[1]), strict=True):
        spread = case.spread * (case.softcap / 4 if array is q and case.softcap else 1)
        shape = array.shape if rows is ... else (len(rows), *array.shape[1:])
        array[rows] = randn(*shape).mul_(spread).to(dtype)

    sink = None if case.sink is None else sink_of(case.sink, randn(case.h_q))
    slopes = None
    if case.alibi is not None:
        requests = case.b if case.q_lengths is None else len(case.q_lengths)
        shape = (case.h_q,) if case.alibi == "heads" else (requests, case.h_q)
        slopes = randn(*shape).abs() * 0.2
    return MhaInputs(
        case, q, k, v, parts, integers(cu_q), integers(cu_k), integers(case.q_used), integers(case.k_used),
        sink, slopes,
    )  # fmt: skip


def sink_of(kind: str, numbers: Any) -> Any:
    """Sinks of a dtype, or "infinite": +inf, -inf and finite values, head after head."""
    import torch

    if kind != "infinite":
        return numbers.to(getattr(torch, kind))
    numbers[::3], numbers[1::3] = inf, -inf
    return numbers


def bounds_of(lengths: Sequence[int], first: int) -> list[int]:
    """Where segments begin and end, one after the other from row `first` on."""
    bounds = [first]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def used_rows(bounds: list[int], used: Sequence[int] | None, device: str) -> Any:
    """The rows that hold tokens."""
    import torch

    ends = bounds[1:] if used is None else [start + n for start, n in zip(bounds, used, strict=False)]
    rows = [torch.arange(*pair) for pair in zip(bounds, ends, strict=False)]
    return torch.cat(rows or [torch.arange(0)]).to(device)


def in_gaps(shape: tuple[int, ...], layout: str, gap: float, dtype: Any, device: str) -> Any:
    """An array `[..., tokens, heads, columns]` full of `gap`, and around its rows as the layout has it."""
    import torch

    *batch, tokens, heads, columns = shape
    aligned = -(-columns // 8) * 8
    if layout == "plain":
        return torch.full(shape, gap, dtype=dtype, device=device)
    if layout == "slice":
        whole = torch.full((*batch, tokens + 3, heads + 1, aligned + 8), gap, dtype=dtype, device=device)
    else:
        whole = torch.full((*batch, heads, tokens + 3, aligned), gap, dtype=dtype, device=device)
        whole = whole.transpose(-3, -2)
    return whole[..., :tokens, :heads, :columns]


# ---- reference


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    attn_sink: Any = None,
    dtype: Any = None,
    missing_keys: int = 0,
) -> tuple[Any, Any]:
    """out `[b, s_q, h_q, d_v]` and lse `[b, h_q, s_q]`, as `rawmla.reference` defines them.

    torch tensors on any device, any strides. Every step has the type `dtype`, None: float64, which is not
    subject to TF32. Keys that no query of any request sees may hold anything. Masks count `missing_keys` more
    keys after the last one, which do not exist. What requires grad gets a graph.
    """
    import torch

    dtype = torch.float64 if dtype is None else dtype
    b, s_q, h_q, d_qk = q.shape
    s_k, h_kv = k.shape[1:3]
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros((b, s_q, h_q, v.shape[-1]), dtype=dtype, device=q.device)
    lse = torch.full((b, h_q, s_q), -inf, dtype=torch.float64, device=q.device)
    if not s_q or not s_k:
        return out, lse
    left, right = (None if bound == -1 else bound for bound in window_size)
    right = 0 if causal else right
    shift = s_k + missing_keys - s_q
    keys = torch.arange(s_k, device=q.device)
    first = shift - keys  # positions from a key to the first query token
    seen = torch.ones_like(keys, dtype=torch.bool)
    if left is not None:
        seen &= first <= left
    if right is not None:
        seen &= (first + s_q > -right) & (left is None or left >= -right)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    slopes = None if alibi_slopes is None else alibi_slopes.to(exact).expand(b, h_q)
    pairs = torch.arange(b * h_q, device=q.device)
    rows_at_once = max(1, CHUNK_SCORES // s_k)
    for rows in torch.arange(s_q, device=q.device).split(rows_at_once):
        behind = rows[:, None] + first
        hidden = hidden_pairs(behind, causal, window_size)
        empty = hidden.all(1)
        for part in pairs.split(max(1, CHUNK_SCORES // (s_k * max(len(rows), d_qk + v.shape[-1])))):
            request, head = part // h_q, part % h_q
            head_k = head // (h_q // h_kv)
            at = request[:, None], rows, head[:, None]
            scores = q[at].to(dtype) @ k[request, :, head_k].to(dtype).transpose(1, 2)
            scores *= scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[request, head, None, None] * behind.abs()
            scores = scores.masked_fill_(hidden, -inf)
            log_sum = torch.logsumexp(scores.to(exact), dim=-1)
            weights = torch.softmax(scores, dim=-1).masked_fill(empty[:, None], 0.0)
            del scores
            if attn_sink is not None:
                kept = torch.sigmoid(log_sum - attn_sink.to(exact)[head, None])
                weights = weights * kept.masked_fill(empty, 0.0)[..., None].to(weights.dtype)
            values = v[request, :, head_k].masked_fill(~seen[:, None], 0.0)
            out[at] = weights.to(dtype) @ values.to(dtype)
            lse[request[:, None], head[:, None], rows] = log_sum.double()
    return out, lse


def distances(s_q: int, s_k: int, missing_keys: int, device: Any) -> Any:
    """The number of positions from a key to a query, `[s_q, s_k]`."""
    import torch

    first = s_k + missing_keys - s_q
    return torch.arange(s_q, device=device)[:, None] + first - torch.arange(s_k, device=device)


def hidden_pairs(behind: Any, causal: bool, window_size: tuple[int | None, int | None]) -> Any:
    """The pairs of a query and a key that a mask hides, by their distances."""
    import torch

    left, right = (None if bound == -1 else bound for bound in window_size)
    right = 0 if causal else right
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left is not None:
        hidden |= behind > left
    if right is not None:
        hidden |= behind < -right
    return hidden


def reference(inputs: MhaInputs, dtype: Any = None) -> tuple[Any, Any]:
    """out and lse of a call in `dtype`, None: float64. In rows of no request out and lse are NaN."""
    import torch

    options = inputs.options()
    if inputs.cu_seqlens_q is None:
        return flash_attn_func(inputs.q, inputs.k, inputs.v, **options, dtype=dtype)
    total_q, h_q, _ = inputs.q.shape
    kind = torch.float64 if dtype is None else dtype
    out = torch.full((total_q, h_q, inputs.v.shape[-1]), float("nan"), dtype=kind, device=inputs.q.device)
    lse = torch.full((total_q, h_q), float("nan"), dtype=torch.float64, device=inputs.q.device)
    slopes = options.pop("alibi_slopes")
    first, last = int(inputs.cu_seqlens_q[0]), int(inputs.cu_seqlens_q[-1])
    out[first:last], lse[first:last] = 0, -inf
    for r, (rows_q, rows_k) in enumerate(tokens_of(inputs)):
        own = slopes[r : r + 1] if slopes is not None and slopes.ndim == 2 else slopes
        one_q, one_k, one_v = (x[None] for x in (inputs.q[rows_q], inputs.k[rows_k], inputs.v[rows_k]))
        one, one_lse = flash_attn_func(one_q, one_k, one_v, **options, alibi_slopes=own, dtype=dtype)
        out[rows_q], lse[rows_q] = one[0], one_lse[0].T
    return out, lse


def tokens_of(inputs: MhaInputs) -> list[tuple[slice, slice]]:
    """The rows of q, and the rows of k, that hold the tokens of each segment."""
    sides = []
    for cu_seqlens, used in (
        (inputs.cu_seqlens_q, inputs.seqused_q),
        (inputs.cu_seqlens_k, inputs.seqused_k),
    ):
        bounds = cu_seqlens.tolist()
        lengths = (cu_seqlens.diff() if used is None else used).tolist()
        sides.append(
            [
                slice(start, min(start + max(length, 0), end))
                for start, length, end in zip(bounds, lengths, bounds[1:], strict=False)
            ]
        )
    return list(zip(*sides, strict=True))


def covered_rows(inputs: MhaInputs) -> Any:
    """The rows of q that segments cover, as an index."""
    if inputs.cu_seqlens_q is None:
        return ...
    return slice(int(inputs.cu_seqlens_q[0]), int(inputs.cu_seqlens_q[-1]))


# ---- comparison


def check_mha(
    inputs: MhaInputs, got: tuple[Any, Any], want: tuple[Any, Any] | None = None, *, plain: bool = False
) -> None:
    """Raise AssertionError unless a call's out and lse are as exact as products in the inputs' dtype allow.

    Compared are the rows of requests. The L2 error of out, relative to its norm, is at most half a step of
    the dtype; the error of each row of 64 columns or more is at most 1.25 half-steps, and besides, where a
    sink outweighs all scores, what is below the dtype's normal numbers. The error of lse is at most 1e-4 and
    2e-6 of its value. A softcap, whose tanh is approximate, makes the bounds 4 times as large, and 1e-2 for
    lse. With `plain` the largest error of out is also compared with plain torch in the inputs' dtype.
    """
    import torch

    case = inputs.case
    name = case.id
    out, lse = got
    want_out, want_lse = reference(inputs) if want is None else want
    if out.dtype != getattr(torch, case.dtype) or lse.dtype != torch.float32:
        raise AssertionError(f"{name}: dtypes {out.dtype}, {lse.dtype}")
    if out.shape != want_out.shape or lse.shape != want_lse.shape:
        raise AssertionError(f"{name}: shapes {tuple(out.shape)}, {tuple(lse.shape)}")
    rows = covered_rows(inputs)
    out, want_out, lse, want_lse = out[rows], want_out[rows], lse[rows], want_lse[rows]
    if not out.numel():
        return
    problems = problems_of_out(out, want_out, case.dtype, 4.0 if case.softcap else 1.0)
    if plain:
        error, allowed = measure(out, want_out, _ANY).max_abs, _error_of_plain_torch(inputs, rows, want_out)
        if not error <= allowed:
            problems.append(f"largest error of out {error:.3g}, allowed by plain torch {allowed:.3g}")
    problems += problems_of_lse("lse", lse, want_lse, approximate=case.softcap != 0)
    if problems:
        raise AssertionError(f"{name}: {'; '.join(problems)}")


def problems_of_lse(name: str, got: Any, want: Any, *, approximate: bool) -> list[str]:
    """What is wrong with lse or largest scores: more than 1e-4 and 2e-6 of it, or approximate 1e-2."""
    problems = []
    if measure(got, want, _ANY).misplaced:
        problems.append(f"{name} is infinite or NaN elsewhere than in the reference")
    finite = want.isfinite() & got.isfinite()
    excess = (got.double() - want)[finite].abs()
    if not approximate:
        excess -= 2e-6 * want[finite].abs()
    most = float(excess.max()) if excess.numel() else 0.0
    if not most <= (1e-2 if approximate else 1e-4):
        problems.append(f"error of {name} {most:.3g}")
    return problems


def problems_of_out(out: Any, want: Any, dtype: str, times: float = 1.0) -> list[str]:
    """What is wrong with out: an error of more than `times` half-steps, or in a row a quarter more."""
    factor = HALF_STEP[dtype] * times
    difference = measure(out, want, _ANY)
    problems = []
    if difference.misplaced:
        problems.append(f"{difference.misplaced} elements of out are infinite or NaN")
    if not difference.rel_l2 <= factor:
        problems.append(f"relative L2 error of out {difference.rel_l2:.3g}, allowed {factor:.3g}")
    if out.shape[-1] >= 64:
        worst = worst_row(out, want, 1.25 * factor, LEAST[dtype])
        if not worst <= 1:
            problems.append(f"L2 error of a row of out {worst:.3g} times what is allowed")
    return problems


def worst_row(out: Any, want: Any, relative: float, least: float) -> float:
    """The largest L2 error of a row, by what is allowed."""
    import torch

    worst = []
    for x, y in in_parts(out, want):
        error = (x.double() - y).norm(dim=-1)
        allowed = relative * y.norm(dim=-1) + least * y.shape[-1] ** 0.5
        worst.append((error / allowed).max())
    return float(torch.stack(worst).max())


def _error_of_plain_torch(inputs: MhaInputs, rows: Any, want: Any) -> float:
    """What FlashAttention's tests accept: a multiple of torch's error, and of the error of adding 0.3."""
    plain = reference(inputs, inputs.q.dtype)[0][rows]
    rounded = want.to(inputs.q.dtype)
    step = (rounded + 0.3 - 0.3 - rounded).abs().max()
    error = (plain.double() - want).abs().max()
    return float((3 if inputs.case.softcap else 2) * error + 2 * step.double())
