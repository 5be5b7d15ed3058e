"""Prefix prefill: cases, their inputs, and the reference on the device in torch.

The reference reads tables, lengths, caches and scales from the arrays of the call, so it follows what a test
changes in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .compare import in_parts
from .generators import Case
from .mha import HALF_STEP, LEAST, bounds_of, flash_attn_func, in_gaps, problems_of_out, sink_of, used_rows

GARBAGE = {"int32": 2**31 - 1, "int64": 2**62 + 1, "pointers": 2**62 + 1}
"""Entries of tables that name no page; int64 ones are far past 32 bits."""
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class PrefixCase(Case):
    """One call.

    Attributes:
        query_lengths: new tokens of the requests.
        contexts: their older tokens; below 0 b_seq_len is so much less than the new tokens.
        rows_around: rows of q, k, v and o before the first and after the last request.
        room: tokens that table and cache have room for, in every request; 0: those that there are.
        kv_cache_dtype: as in the call.
        bytes_dtype: of FP8 arrays, caches and o: "float8", "uint8" or "int8".
        x, block_size, pack: of the cache; pack is the call's interleaved_v_pack_factor.
        own_cached: the new tokens are in the cache, and k and v are None.
        table: "int32", "int64" or "pointers".
        padded: there is memory between the blocks, the heads of a block, and the rows of the table.
        window: sliding_window; 0: off.
        causal, skip_decode, sm_scale: as in the call.
        sinks: their dtype, or "infinite": +inf, -inf and finite values, head after head.
        alibi: whether there are slopes.
        k_scale, v_scale, out_scale: as in the call; None: o is of the dtype of q.
        device_scales: scales are arrays.
        layout: of q, k and v, as in `MhaCase`.
        uniform: q, k and v are uniform numbers up to this; 0: normal ones.
        gap: what memory that belongs to no token holds; FP8 caches hold the nearest byte.
    """

    query_lengths: tuple[int, ...] = (5, 0, 1, 140)
    contexts: tuple[int, ...] = (30, 7, 90, 270)
    rows_around: int = 0
    room: int = 0
    h_q: int = 4
    h_kv: int = 2
    d: int = 128
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    bytes_dtype: str = "float8"
    x: int = 8
    block_size: int = 16
    pack: int = 0
    own_cached: bool = False
    table: str = "int32"
    padded: bool = False
    window: int = 0
    causal: bool = True
    skip_decode: bool = False
    sm_scale: float | None = None
    sinks: str | None = None
    alibi: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    out_scale: float | None = None
    device_scales: bool = False
    layout: str = "plain"
    uniform: float = 0.0
    gap: float = float("nan")
    seed: int = 0

    @property
    def float8(self) -> str | None:
        """The dtype that bytes of the cache stand for; None: the cache is of the dtype of q."""
        return _FP8.get(self.kv_cache_dtype)


@dataclass
class PrefixInputs:
    """The arrays of a call but o; a scale is a number or an array."""

    case: PrefixCase
    q: Any
    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    b_loc: Any
    b_start_loc: Any
    b_seq_len: Any
    k_scale: Any
    v_scale: Any
    alibi_slopes: Any
    out_scale: Any
    sinks: Any

    def keywords(self, o: Any) -> dict[str, Any]:
        """The arguments of the call."""
        case = self.case
        names = ("q", "k", "v", "k_cache", "v_cache", "b_loc", "b_start_loc", "b_seq_len", "k_scale")
        return {
            **{name: getattr(self, name) for name in (*names, "v_scale", "alibi_slopes", "sinks")},
            "o": o,
            "kv_cache_dtype": case.kv_cache_dtype,
            "max_seq_len": None,
            "max_input_len": max(case.query_lengths, default=0),
            "sliding_window": case.window,
            "sm_scale": case.sm_scale,
            "skip_decode": case.skip_decode,
            "fp8_out_scale": self.out_scale,
            "is_block_table_ptr": case.table == "pointers",
            "interleaved_v_pack_factor": case.pack,
            "causal": case.causal,
        }


def make_prefix_inputs(case: PrefixCase, device: str = "cuda") -> PrefixInputs:
    """Inputs with the cached tokens that some query sees, in pages in random order.

    The cache holds the gap in every other place, and the table garbage in every entry of another page.
    """
    import torch

    draw = torch.Generator(device).manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def numbers(*shape: int) -> Any:
        if case.uniform:
            return (torch.rand(shape, generator=draw, device=device) * 2 - 1) * case.uniform
        return torch.randn(shape, generator=draw, device=device)

    def integers(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    d, size = case.d, case.block_size
    bounds = bounds_of(case.query_lengths, case.rows_around)
    rows = used_rows(bounds, None, device)
    q, k, v = (
        in_gaps((bounds[-1] + case.rows_around, heads, d), case.layout, case.gap, dtype, device)
        for heads in (case.h_q, case.h_kv, case.h_kv)
    )
    for array in (q, k, v):
        array[rows] = numbers(*array[rows].shape).to(dtype)
    seq_lens = [n + context for n, context in zip(case.query_lengths, case.contexts, strict=True)]

    # Tokens in the cache, with their requests and positions; then the pages, and the table.
    spans = [_cached_span(case, n, seq_len) for n, seq_len in zip(case.query_lengths, seq_lens, strict=True)]
    pages = [range(first // size, -(-end // size)) if end > first else range(0) for first, end in spans]
    columns = max([-(-max(case.room, *seq_lens) // size)] if seq_lens else [0]) + 2
    num_blocks = 3 + (columns * len(pages) if case.room else sum(len(own) for own in pages))
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(case.seed)).tolist()
    table = torch.full((len(pages), columns), -1, dtype=torch.int64)
    for r, own in enumerate(pages):
        for column in own:
            table[r, column] = free.pop()
    request = torch.cat(
        [torch.full((end - first,), r) for r, (first, end) in enumerate(spans)] or [rows.cpu()]
    )
    position = torch.cat([torch.arange(*span) for span in spans] or [rows.cpu()])
    block, offset = table[request, position // size].to(device), (position % size).to(device)

    caches = []
    for scale, shape in ((case.k_scale, (d // case.x, size, case.x)), (case.v_scale, (d, size))):
        values = numbers(len(request), case.h_kv, d)
        if case.float8 is None:
            values, gap = values.to(dtype), torch.full((), case.gap, dtype=dtype)
        else:
            kind = getattr(torch, case.float8)
            largest = torch.finfo(kind).max
            values = (values / scale).clamp(-largest, largest).to(kind).view(torch.uint8)
            gap = torch.full((), case.gap).to(kind).view(torch.uint8)
        cache = _empty_cache((num_blocks, case.h_kv, *shape), case.padded, gap, device)
        if len(shape) == 3:
            cache[block, :, :, offset] = values.unflatten(2, (d // case.x, case.x))
        else:
            view, index = _v_places(cache, case.pack, block, offset)
            view[index] = values
        if case.float8 is not None:
            name = case.float8 if case.bytes_dtype == "float8" else case.bytes_dtype
            cache = cache.view(getattr(torch, name))
        caches.append(cache)

    k_cache, v_cache = caches
    b_loc = _table(case, table.to(device), k_cache)
    sinks = None if case.sinks is None else sink_of(case.sinks, numbers(case.h_q))
    slopes = torch.rand(case.h_q, generator=draw, device=device) * 0.2 if case.alibi else None

    def scale_of(number: float | None, *shape: int) -> Any:
        if number is None or not case.device_scales:
            return number
        return torch.full(shape, number, device=device)

    if case.own_cached:
        k = v = None
    return PrefixInputs(
        case, q, k, v, k_cache, v_cache, b_loc, integers(bounds), integers(seq_lens),
        scale_of(case.k_scale, 1), scale_of(case.v_scale), slopes, scale_of(case.out_scale, 1), sinks,
    )  # fmt: skip


def _cached_span(case: PrefixCase, query_len: int, seq_len: int) -> tuple[int, int]:
    """First and last + 1 position of the cached tokens that some query of a request sees."""
    ctx_len = max(seq_len - query_len, 0)
    first = max(ctx_len - case.window + 1, 0) if case.window > 0 else 0
    end = seq_len if case.own_cached else ctx_len
    return (first, end) if query_len and first < end else (0, 0)


def _empty_cache(shape: tuple[int, ...], padded: bool, gap: Any, device: str) -> Any:
    """A cache full of the gap, between its blocks and heads too. Heads are multiples of 16 elements."""
    import torch

    num_blocks, heads, *inner = shape
    strides = [1]
    for extent in inner[:0:-1]:
        strides.insert(0, extent * strides[0])
    head = -(-strides[0] * inner[0] // 16) * 16 + (16 if padded else 0)
    block = head * heads + (32 if padded else 0)
    memory = torch.empty(num_blocks * block, dtype=gap.dtype, device=device).fill_(gap.to(device))
    return memory.as_strided(shape, (block, head, *strides))


def _v_places(v_cache: Any, pack: int, block: Any, offset: Any) -> tuple[Any, Any]:
    """A view of v_cache and the index of tokens' values `[n, h_kv, d]` in it."""
    if not pack:
        return v_cache, (block, slice(None), slice(None), offset)
    num_blocks, heads, d, size = v_cache.shape
    strides = (*v_cache.stride()[:2], d * pack, pack, 1)
    view = v_cache.as_strided((num_blocks, heads, size // pack, d, pack), strides)
    return view, (block, slice(None), offset // pack, slice(None), offset % pack)


def _table(case: PrefixCase, numbers: Any, k_cache: Any) -> Any:
    """b_loc for a table of blocks' numbers, below 0 where an entry is garbage. Among pointers block 0 stands
    as its number.
    """
    import torch

    table = numbers
    if case.table == "pointers":
        step = k_cache.stride(0) * k_cache.element_size()
        table = torch.where(numbers > 0, k_cache.data_ptr() + numbers * step, numbers)
    table = torch.where(numbers < 0, GARBAGE[case.table], table)
    dtype = torch.int32 if case.table == "int32" else torch.int64
    rows, columns = table.shape
    whole = torch.full(
        (rows, columns + (3 if case.padded else 0)), GARBAGE[case.table], dtype=dtype, device=table.device
    )
    whole[:, :columns] = table
    return whole[:, :columns]


# ---- reference


def reference(inputs: PrefixInputs) -> Any:
    """The result of a call in float64, before an FP8 output's scale. NaN in the rows that are not written."""
    import torch

    case = inputs.case
    out = torch.full(inputs.q.shape, float("nan"), dtype=torch.float64, device=inputs.q.device)
    bounds, seq_lens = inputs.b_start_loc.tolist(), inputs.b_seq_len.tolist()
    for r, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        query_len = end - start
        if query_len < (2 if case.skip_decode else 1):
            continue
        ctx_len = max(seq_lens[r] - query_len, 0)
        first, cached_end = _cached_span(case, query_len, seq_lens[r])
        keys, values = cached_tokens(inputs, r, torch.arange(first, cached_end, device=inputs.q.device))
        total = seq_lens[r] if case.own_cached else ctx_len + query_len
        if not case.own_cached:
            keys, values = (
                torch.cat([older, own[start:end].double()])
                for older, own in ((keys, inputs.k), (values, inputs.v))
            )
        one, _ = flash_attn_func(
            inputs.q[None, start:end],
            keys[None],
            values[None],
            softmax_scale=case.sm_scale,
            causal=case.causal,
            window_size=(case.window - 1 if case.window > 0 else -1, -1),
            alibi_slopes=inputs.alibi_slopes,
            attn_sink=inputs.sinks,
            missing_keys=ctx_len + query_len - total,
        )
        out[start:end] = one[0]
    return out


def cached_tokens(inputs: PrefixInputs, request: int, positions: Any) -> tuple[Any, Any]:
    """Keys and values `[n, h_kv, d]` of tokens of a request in the cache, in float64."""
    import torch

    case = inputs.case
    entries, offset = inputs.b_loc[request, positions // case.block_size].long(), positions % case.block_size
    if case.table == "pointers":
        step = inputs.k_cache.stride(0) * inputs.k_cache.element_size()
        entries = torch.where(entries > 0, (entries - inputs.k_cache.data_ptr()) // step, entries)
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    if case.float8 is not None:  # indexing does not know float8
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    view, index = _v_places(v_cache, case.pack, entries, offset)
    keys, values = k_cache[entries, :, :, offset].flatten(2), view[index]
    if case.float8 is None:
        return keys.double(), values.double()
    kind = getattr(torch, case.float8)
    # As float32, which kernels get.
    k_scale, v_scale = (
        float(torch.as_tensor(x, dtype=torch.float32)) for x in (inputs.k_scale, inputs.v_scale)
    )
    return keys.view(kind).float().double() * k_scale, values.view(kind).float().double() * v_scale


def written_rows(inputs: PrefixInputs) -> Any:
    """The rows of o that the call writes, as an index."""
    bounds = inputs.b_start_loc.tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    if inputs.case.skip_decode:
        lengths = [0 if n == 1 else n for n in lengths]
    return used_rows(bounds, lengths, inputs.q.device)


# ---- comparison


def check_prefix(inputs: PrefixInputs, o: Any, want: Any = None) -> None:
    """Raise AssertionError unless a call's o is as exact as products in the dtype of q allow.

    Compared are the rows that are written, as by `check_mha`. An FP8 o may besides be off by half a step of
    e4m3 in each element, and as a whole by as much as the rounded reference.
    """
    import torch

    case = inputs.case
    rows = written_rows(inputs)
    want = (reference(inputs) if want is None else want)[rows]
    got = o[rows] if o.element_size() > 1 else o.view(torch.uint8)[rows]
    if not got.numel():
        return
    if case.out_scale is None:
        problems = problems_of_out(got, want, case.dtype)
    else:
        problems = _problems_of_fp8(got, want / float(inputs.out_scale), case.dtype)
    if problems:
        raise AssertionError(f"{case.id}: {'; '.join(problems)}")


def encode_out(want: Any) -> Any:
    """The bytes of the e4m3 numbers nearest to `want`, at most 448, ties to even, by way of no other type."""
    import torch

    magnitude = want.abs().clamp(max=E4M3_LARGEST)
    step = (torch.frexp(magnitude.clamp(min=2.0**-6)).exponent.double() - 4).exp2()
    nearest = torch.copysign((magnitude / step).round() * step, want)
    return nearest.float().to(torch.float8_e4m3fn).view(torch.uint8)


def decode_out(codes: Any) -> Any:
    """float64 of bytes of e4m3."""
    import torch

    return codes.view(torch.float8_e4m3fn).float().double()


def _problems_of_fp8(codes: Any, want: Any, dtype: str) -> list[str]:
    import torch

    parts = torch.stack([_figures_of_fp8(x, y, dtype) for x, y in in_parts(codes, want)])
    wrong, error, nearest, products = parts[:, :4].sum(0).tolist()
    if wrong:
        return [f"{int(wrong)} elements of o are NaN"]
    problems = []
    excess = float(parts[:, 4].max())
    if not excess <= 1:
        problems.append(f"error of an element of o {excess:.3g} times what is allowed")
    # As a whole, where rounding does not end at the largest number.
    allowed = nearest**0.5 + HALF_STEP[dtype] * products**0.5
    if not error**0.5 <= allowed:
        problems.append(f"L2 error of o {error**0.5:.3g}, allowed {allowed:.3g}")
    return problems


def _figures_of_fp8(codes: Any, want: Any, dtype: str) -> Any:
    """Of some rows: elements that are NaN; squared norms of the error, of the rounded reference's, and of
    what half-steps of the products are counted in; and the largest error of an element by what is allowed.
    """
    import torch

    got, nearest = decode_out(codes), decode_out(encode_out(want))
    # What the products may be off by, in a single element: some half-steps of the row's typical value.
    typical = want.square().mean(-1, keepdim=True).sqrt()
    slack = 4 * HALF_STEP[dtype] * typical + LEAST[dtype]
    want = want.clamp(-E4M3_LARGEST, E4M3_LARGEST)
    step = (want.abs() + slack).clamp(min=2.0**-6, max=E4M3_LARGEST).log2().floor().exp2() / 8
    excess = ((got - want).abs() / (step / 2 + slack)).max()
    inner = want.abs() < E4M3_LARGEST
    squares = [x.square().sum() for x in (got - want, nearest - want, inner * typical)]
    return torch.stack([(~got.isfinite()).sum().double(), *squares, excess])
