"""Attention over caches: cases, their inputs, and the reference on the device in torch.

The reference reads lengths, tables and tokens from the arrays of the call, so it follows what a test changes
in them, and the caches from copies made before any call: calls write new tokens to the caches themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from .compare import in_parts
from .generators import Case
from .mha import HALF_STEP, bounds_of, flash_attn_func, problems_of_lse, problems_of_out, sink_of

FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class KvCacheCase(Case):
    """One call.

    Attributes:
        lengths: tokens of the requests in the cache before the call; a padded request has -1 or less.
        lengths_as: "array" (cache_seqlens), "int" (one number for all requests), "bounds" (cu_seqlens_k) or
            "all" (None: every request fills its cache).
        s_q: query tokens of every request.
        q_lengths: query tokens of the requests instead, as segments of one array.
        rows_around: rows of such arrays before the first and after the last segment.
        new: new tokens of every request.
        new_lengths: new tokens of the requests instead, as segments of one array.
        room: tokens that tables and caches have room for, in every request; 0: as many as there are.
        page: tokens of a page; None: the caches are contiguous.
        batch_idx: caches or tables have more rows than there are requests, in another order.
        cache_layout: "plain", or "interleaved": keys and values in one array, whose heads come before its
            tokens, as vLLM's.
        cache_dtype: dtype of the caches and of new tokens; None: the dtype of q.
        leftpad: cache_leftpad.
        rotary: the part of the columns that is rotated; 0: no rotary embedding.
        interleaved: rotary_interleaved.
        rotary_from: rotary_seqlens, None: the lengths.
        causal, window, softcap, softmax_scale, num_splits: as in the call.
        sink, alibi: as in `MhaCase`.
        descales: whether keys, values and an FP8 q have factors.
        gap: what memory that nobody may read holds.
    """

    lengths: tuple[int, ...] = (300, 77)
    lengths_as: str = "array"
    s_q: int = 1
    q_lengths: tuple[int, ...] | None = None
    rows_around: int = 0
    new: int = 0
    new_lengths: tuple[int, ...] | None = None
    room: int = 0
    page: int | None = 16
    batch_idx: bool = False
    cache_layout: str = "plain"
    h_q: int = 8
    h_kv: int = 2
    d_qk: int = 128
    d_v: int = 128
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    leftpad: tuple[int, ...] | None = None
    rotary: float = 0.0
    interleaved: bool = True
    rotary_from: tuple[int, ...] | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    sink: str | None = None
    alibi: str | None = None
    descales: bool = False
    num_splits: int = 0
    gap: float = float("nan")
    seed: int = 0

    @property
    def b(self) -> int:
        """The number of requests."""
        return len(self.lengths)

    @property
    def query_tokens(self) -> tuple[int, ...]:
        """Query tokens of the requests."""
        return (self.s_q,) * self.b if self.q_lengths is None else self.q_lengths

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """New tokens of the requests."""
        return (self.new,) * self.b if self.new_lengths is None else self.new_lengths

    @property
    def appends(self) -> bool:
        """Whether the call takes new tokens."""
        return bool(self.new) or self.new_lengths is not None

    @property
    def rotary_dim(self) -> int:
        """The number of rotated columns."""
        return int(self.d_qk * self.rotary) // 16 * 16


@dataclass
class KvCacheInputs:
    """The arrays of a call but out.

    Attributes:
        memory: the arrays that k_cache and v_cache are views of.
        before: copies of them from before any call.
    """

    case: KvCacheCase
    q: Any
    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    cu_seqlens_k_new: Any
    rotary_seqlens: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    alibi_slopes: Any
    attn_sink: Any
    memory: list[Any]
    before: list[Any]


ARRAYS = (
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "block_table", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "rotary_seqlens",
    "q_descale", "k_descale", "v_descale", "alibi_slopes", "attn_sink",
)  # fmt: skip
"""Names of the arrays among the arguments."""


def named_arguments(inputs: KvCacheInputs) -> dict[str, Any]:
    """The arguments of the call."""
    case = inputs.case
    return {
        **{name: getattr(inputs, name) for name in ARRAYS},
        "max_seqlen_q": None if case.q_lengths is None else max(case.q_lengths, default=0),
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "rotary_interleaved": case.interleaved,
        "num_splits": case.num_splits,
    }


# ---- inputs


def make_kvcache_inputs(case: KvCacheCase, device: str = "cuda") -> KvCacheInputs:
    """Inputs of normal random numbers, with pages in random order.

    Caches hold the gap in every place but the places of older tokens that some query sees, and tables garbage
    in every entry of a page without such tokens or new ones. Tokens of a request that has none after the call
    are the gap in q, k and v. With a softcap q is multiplied by softcap / 4.
    """
    import torch

    draw = torch.Generator(device).manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    kind = getattr(torch, case.cache_dtype or case.dtype)

    def randn(*shape: int) -> Any:
        return torch.randn(shape, generator=draw, device=device)

    def integers(values: Sequence[int] | None) -> Any:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    def tokens(lengths: tuple[int, ...], are_segments: bool, heads: int, columns: int, to: Any) -> Any:
        """Tokens of all requests, and the rows where each request begins and ends."""
        bounds = bounds_of(lengths, case.rows_around if are_segments else 0)
        rows = bounds[-1] + (case.rows_around if are_segments else 0)
        flat = randn(rows, heads, columns)
        covered = torch.zeros(rows, dtype=torch.bool)
        for r, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            covered[start:end] = totals[r] > 0
        flat[~covered.to(device)] = case.gap
        flat = flat.to(to)
        return flat if are_segments else flat.unflatten(0, (case.b, rows // max(case.b, 1))), bounds

    totals = [n + new for n, new in zip(case.lengths, case.new_tokens, strict=True)]
    q, bounds_q = tokens(case.query_tokens, case.q_lengths is not None, case.h_q, case.d_qk, dtype)
    if case.softcap:
        q.copy_(q.float() * (case.softcap / 4))  # an FP8 array has no arithmetic
    k = v = cos = sin = bounds_new = None
    if case.appends:
        are_segments = case.new_lengths is not None
        k, bounds_new = tokens(case.new_tokens, are_segments, case.h_kv, case.d_qk, kind)
        v, _ = tokens(case.new_tokens, are_segments, case.h_kv, case.d_v, kind)

    table, batch_idx, memory = _empty_caches(case, totals, kind, device)
    if case.rotary:
        longest = max(1, case.room, *totals, *(n + max(totals) for n in case.rotary_from or ()))
        angles = torch.rand(longest, case.rotary_dim // 2, generator=draw, device=device) * 6.28
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    sink = None if case.sink is None else sink_of(case.sink, randn(case.h_q))
    slopes = None
    if case.alibi is not None:
        slopes = randn(*(case.h_q,) if case.alibi == "heads" else (case.b, case.h_q)).abs() * 0.2
    scales: list[Any] = [None] * 3
    if case.descales:
        scales = [torch.rand(case.b, case.h_kv, generator=draw, device=device) + 0.5 for _ in range(3)]
        scales[0] = scales[0] if case.dtype == FP8 else None
    lengths: Any = {"array": integers(case.lengths), "int": case.lengths[0] if case.b else 0}
    bounds_k = bounds_of([max(n, 0) for n in case.lengths], 0) if case.lengths_as == "bounds" else None
    k_cache, v_cache = _views(case, memory)
    inputs = KvCacheInputs(
        case, q, k_cache, v_cache, k, v, cos, sin, lengths.get(case.lengths_as), integers(batch_idx),
        integers(case.leftpad), None if table is None else table.to(device),
        None if case.q_lengths is None else integers(bounds_q), integers(bounds_k),
        None if case.new_lengths is None else integers(bounds_new), integers(case.rotary_from),
        scales[0], scales[1], scales[2], slopes, sink, memory, [],
    )  # fmt: skip
    for r, (n, length) in enumerate(zip(case.query_tokens, case.lengths, strict=True)):
        first, end = visible_span(case, r, n, totals[r])
        places = cached_at(inputs, r, torch.arange(first, max(first, min(end, length)), device=device))
        for cache in (k_cache, v_cache):
            put(cache, places, randn(len(places[0]), *cache.shape[2:]).to(kind))
    inputs.before = [x.clone() for x in memory]
    return inputs


def visible_span(case: KvCacheCase, r: int, queries: int, total: int) -> tuple[int, int]:
    """First and last + 1 position of the tokens that some query of a request sees."""
    first = case.leftpad[r] if case.leftpad else 0
    if case.window[0] >= 0:
        first = max(first, total - queries - case.window[0])
    return (first, total) if queries and first < total else (0, 0)


def _empty_caches(
    case: KvCacheCase, totals: list[int], kind: Any, device: str
) -> tuple[Any, list[int] | None, list[Any]]:
    """The table on the CPU, rows of requests, and caches that are full of the gap."""
    import torch

    order = torch.Generator().manual_seed(case.seed)
    rows = list(range(case.b))
    count = case.b + 3 if case.batch_idx else case.b
    if case.batch_idx:
        rows = torch.randperm(count, generator=order)[: case.b].tolist()
    capacity = max(case.room, 1, *totals, *case.lengths) if case.b else max(case.room, 1)
    table = None
    if case.page is None:
        sizes = (count, capacity)
    else:
        pages = -(-capacity // case.page)
        used = []
        for r, (n, length) in enumerate(zip(case.query_tokens, case.lengths, strict=True)):
            first, end = visible_span(case, r, n, totals[r])
            positions = [*range(first, end), *range(max(length, 0), totals[r])]
            used.append({j // case.page for j in positions})
        blocks = 3 + (pages * case.b if case.room else sum(len(own) for own in used))
        garbage = torch.tensor([-1, 2**31 - 1, blocks, -(2**31)], dtype=torch.int64)
        table = garbage[torch.arange(count * pages) % 4].view(count, pages).to(torch.int32)
        free = torch.randperm(blocks, generator=order).tolist()
        for row, own in zip(rows, used, strict=True):
            for column in sorted(own):
                table[row, column] = free.pop()
        sizes = (blocks, case.page)
    gap = torch.tensor(case.gap).to(kind)
    return table, rows if case.batch_idx else None, _memory(case, sizes, gap, device)


def _widths(case: KvCacheCase, element_size: int) -> tuple[int, int]:
    """Columns of keys and of values in memory: multiples of 16 bytes."""
    step = 16 // element_size
    return -(-case.d_qk // step) * step, -(-case.d_v // step) * step


def _memory(case: KvCacheCase, sizes: tuple[int, int], gap: Any, device: str) -> list[Any]:
    import torch

    first, tokens = sizes
    widths = _widths(case, gap.element_size())
    if case.cache_layout == "interleaved":
        shapes = [(first, case.h_kv, tokens, sum(widths))]
    else:
        shapes = [(first, tokens, case.h_kv, width) for width in widths]
    return [torch.empty(shape, dtype=gap.dtype, device=device).copy_(gap) for shape in shapes]


def _views(case: KvCacheCase, memory: list[Any]) -> tuple[Any, Any]:
    """k_cache and v_cache in their memory."""
    if case.cache_layout == "interleaved":
        keys, values = memory[0].transpose(1, 2).split(_widths(case, memory[0].element_size()), dim=-1)
    else:
        keys, values = memory
    return keys[..., : case.d_qk], values[..., : case.d_v]


# ---- places of tokens


def lengths_of(inputs: KvCacheInputs) -> list[int]:
    """Tokens of the requests in the cache before the call, as its arguments have them."""
    given = inputs.cache_seqlens
    if inputs.cu_seqlens_k is not None:
        return list(inputs.cu_seqlens_k.diff().tolist())
    if given is None:
        pages = 1 if inputs.block_table is None else inputs.block_table.shape[1]
        return [inputs.k_cache.shape[1] * pages] * inputs.case.b
    return [given] * inputs.case.b if isinstance(given, int) else list(given.tolist())


def cached_at(inputs: KvCacheInputs, r: int, positions: Any) -> tuple[Any, Any]:
    """Both indices in the caches of the tokens of a request at these positions."""
    import torch

    row = r if inputs.cache_batch_idx is None else int(inputs.cache_batch_idx[r])
    if inputs.block_table is None:
        return torch.full_like(positions, row), positions
    page = inputs.k_cache.shape[1]
    return inputs.block_table[row, positions // page].long(), positions % page


def put(array: Any, places: Any, values: Any) -> None:
    """`array[places] = values`, also of FP8, which indexing does not know."""
    import torch

    if array.element_size() == 1:
        array, values = array.view(torch.uint8), values.view(torch.uint8)
    array[places] = values


def take(array: Any, places: Any) -> Any:
    """`array[places]`, also of FP8."""
    import torch

    if array.element_size() == 1:
        return array.view(torch.uint8)[places].view(array.dtype)
    return array[places]


def rows_of(bounds: Any, r: int) -> Any:
    """The index of the tokens of a request in an array of requests, or of segments with these bounds."""
    return r if bounds is None else slice(int(bounds[r]), int(bounds[r + 1]))


def covered_rows(inputs: KvCacheInputs) -> Any:
    """The rows of q that requests cover, as an index."""
    bounds = inputs.cu_seqlens_q
    return ... if bounds is None else slice(int(bounds[0]), int(bounds[-1]))


# ---- reference


def rotated(inputs: KvCacheInputs, x: Any, positions: Any) -> Any:
    """Tokens `[n, heads, d]` rotated by their positions `[n]`, not rounded to their dtype.

    Sums are rounded to float32. Products of 16-bit numbers are exact there.
    """
    half = inputs.rotary_cos.shape[1]
    at = positions.clamp(0, len(inputs.rotary_cos) - 1)
    cos, sin = (y[at, None].float() for y in (inputs.rotary_cos, inputs.rotary_sin))
    columns = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if not inputs.case.interleaved:
        columns = slice(half), slice(half, 2 * half)
    out = x.float()
    one, other = (out[..., part].clone() for part in columns)
    out[..., columns[0]], out[..., columns[1]] = one * cos - other * sin, one * sin + other * cos
    return out


def is_local(inputs: KvCacheInputs) -> bool:
    """Whether each query is rotated by its own position: a mask hides keys of some of them."""
    case = inputs.case
    pages = 1 if inputs.block_table is None else inputs.block_table.shape[1]
    longest = max(case.query_tokens, default=0)
    left, right = case.window
    capacity = inputs.k_cache.shape[1] * pages
    return case.causal or 0 <= left < capacity - 1 or 0 <= right < longest - 1


@dataclass
class NewTokens:
    """New tokens of a request: both indices of them in the caches, and as the caches should hold them."""

    places: tuple[Any, Any]
    keys: Any
    values: Any


def new_tokens_of(inputs: KvCacheInputs) -> list[NewTokens]:
    """The new tokens of each request that have a place; keys are rotated and not rounded."""
    import torch

    found = []
    bases = lengths_of(inputs) if inputs.rotary_seqlens is None else inputs.rotary_seqlens.tolist()
    for r, length in enumerate(lengths_of(inputs)):
        own = rows_of(inputs.cu_seqlens_k_new, r)
        keys, values = inputs.k[own], inputs.v[own]
        steps = torch.arange(len(keys), device=keys.device)
        if inputs.rotary_cos is not None:
            keys = rotated(inputs, keys, bases[r] + steps)
        kept = steps + length >= 0
        places = cached_at(inputs, r, (steps + length)[kept])
        found.append(NewTokens(places, keys[kept], values[kept]))
    return found


def expected_caches(inputs: KvCacheInputs) -> list[Any]:
    """The memory of the caches after a call."""
    memory = [x.clone() for x in inputs.before]
    if inputs.k is not None:
        keys, values = _views(inputs.case, memory)
        for tokens in new_tokens_of(inputs):
            put(keys, tokens.places, tokens.keys.to(keys.dtype))
            put(values, tokens.places, tokens.values)
    return memory


def reference(inputs: KvCacheInputs) -> tuple[Any, Any]:
    """out and lse of a call in float64.

    In rows of no request they are NaN.
    """
    import torch

    case, q = inputs.case, inputs.q
    k_cache, v_cache = _views(case, expected_caches(inputs))
    out = torch.full((*q.shape[:-1], case.d_v), float("nan"), dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:-1], float("nan"), dtype=torch.float64, device=q.device)
    lengths, new = lengths_of(inputs), [0] * case.b
    bases = lengths if inputs.rotary_seqlens is None else inputs.rotary_seqlens.tolist()
    if inputs.k is not None:
        new = [len(inputs.k[rows_of(inputs.cu_seqlens_k_new, r)]) for r in range(case.b)]
    leftpads = [0] * case.b if inputs.cache_leftpad is None else inputs.cache_leftpad.tolist()
    group = case.h_q // case.h_kv
    for r in range(case.b):
        own = rows_of(inputs.cu_seqlens_q, r)
        out[own], lse[own] = 0, -inf
        total, queries = lengths[r] + new[r], q[own]
        if total <= leftpads[r] or not len(queries):
            continue
        if inputs.rotary_cos is not None:
            steps = torch.arange(len(queries), device=q.device) * is_local(inputs)
            queries = rotated(inputs, queries, bases[r] + steps).to(q.dtype)
        first = max(leftpads[r], total - len(queries) - case.window[0] if case.window[0] >= 0 else 0)
        places = cached_at(inputs, r, torch.arange(first, total, device=q.device))
        queries, keys, values = (
            x.to(torch.float64) for x in (queries, take(k_cache, places), take(v_cache, places))
        )
        if inputs.k_descale is not None:
            factors = inputs.k_descale[r].double()
            if inputs.q_descale is not None:
                factors = factors * inputs.q_descale[r].double()
            queries = queries * factors.repeat_interleave(group)[:, None]
            values = values * inputs.v_descale[r].double()[:, None]
        slopes = inputs.alibi_slopes
        one, one_lse = flash_attn_func(
            queries[None],
            keys[None],
            values[None],
            softmax_scale=case.softmax_scale,
            causal=case.causal,
            window_size=case.window,
            softcap=case.softcap,
            alibi_slopes=slopes[r : r + 1] if slopes is not None and slopes.ndim == 2 else slopes,
            attn_sink=inputs.attn_sink,
        )
        out[own], lse[own] = one[0], one_lse[0].T
    return out, lse.mT if case.q_lengths is None else lse


# ---- comparison


def check_kvcache(
    inputs: KvCacheInputs,
    results: tuple[Any, ...],
    want: tuple[Any, Any] | None = None,
    *,
    with_caches: bool = True,
) -> None:
    """Raise AssertionError unless a call's out and lse are as exact as `check_mha` wants them, and caches
    have the new tokens and are else as they were, bit for bit.

    Rotated keys may be off by half a step of their dtype and what float32 loses. Without `with_caches` the
    caches are not compared.
    """
    import torch

    case, name = inputs.case, inputs.case.id
    out, lse = results[:2]
    want_out, want_lse = reference(inputs) if want is None else want
    dtype = "bfloat16" if case.dtype == FP8 else case.dtype
    if out.dtype != getattr(torch, dtype) or lse.dtype != torch.float32:
        raise AssertionError(f"{name}: dtypes {out.dtype}, {lse.dtype}")
    if out.shape != want_out.shape or lse.shape != want_lse.shape:
        raise AssertionError(f"{name}: shapes {tuple(out.shape)}, {tuple(lse.shape)}")
    problems = problems_of_caches(inputs) if with_caches else []
    rows = covered_rows(inputs)
    out, want_out, lse, want_lse = out[rows], want_out[rows], lse[rows], want_lse[rows]
    if out.numel():
        problems += problems_of_out(out, want_out, dtype, 4.0 if case.softcap else 1.0)
        problems += problems_of_lse("lse", lse, want_lse, approximate=case.softcap != 0)
    if problems:
        raise AssertionError(f"{name}: {'; '.join(problems)}")


def problems_of_caches(inputs: KvCacheInputs) -> list[str]:
    """What is wrong with the caches after a call."""
    problems = []
    expected = expected_caches(inputs)
    if inputs.rotary_cos is not None:
        keys, _ = _views(inputs.case, expected)
        for r, tokens in enumerate(new_tokens_of(inputs)):
            got = take(inputs.k_cache, tokens.places)
            step = HALF_STEP.get(inputs.case.cache_dtype or inputs.case.dtype, 2.0**-4)
            allowed = step * tokens.keys.abs() + 1e-6
            if not bool(((got.float() - tokens.keys).abs() <= allowed).all()):
                problems.append(f"rotated keys of request {r} are wrong")
            put(keys, tokens.places, got)
    for number, (got, want) in enumerate(zip(inputs.memory, expected, strict=True)):
        wrong = sum(int((x != y).sum()) for x, y in in_parts(_bits(got), _bits(want)))
        if wrong:
            problems.append(f"{wrong} elements of array {number} of the caches are wrong")
    return problems


def _bits(x: Any) -> Any:
    import torch

    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16)
