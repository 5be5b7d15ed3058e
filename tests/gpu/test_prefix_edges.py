"""Prefix prefill at the borders of what it takes: lengths, tables, caches, windows, scales, outputs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch

from kit.mha import flash_attn_func
from kit.prefix import (
    E4M3_LARGEST,
    PrefixCase,
    PrefixInputs,
    check_prefix,
    decode_out,
    encode_out,
    make_prefix_inputs,
    written_rows,
)
from operations.prefix import Target, attend, checked, run_cases

# The kernel's sources of pages: TMA, and a warpgroup that gathers them, as they are or as FP8.
SOURCES: dict[str, dict[str, Any]] = {
    "by TMA": {},
    "gathered": {"x": 16},
    # Scales that bfloat16 has exactly: sharp scores would show the rounding of keys.
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "x": 16, "k_scale": 0.5, "v_scale": 2.0},
}
each_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
MANY: dict[str, Any] = {
    "query_lengths": (100, 1, 0, 257, 16, 128, 300),
    "contexts": (333, 40, 100, 0, 1000, 512, 77),
    "rows_around": 2,
}


# ---- one table of cases


def borders() -> list[dict[str, Any]]:
    """Lengths around borders of tiles of 64 and 128 query rows, of pages, and of 48 to 128 keys."""
    queries = [border + step for border in (16, 32, 64, 128, 256) for step in (-1, 0, 1)]
    contexts = [border + step for border in (16, 48, 80, 96, 128, 256, 384) for step in (-1, 0, 1)]
    draw, cases = random.Random(2), []
    for window in (0, 100, 0, 100):
        draw.shuffle(queries)
        draw.shuffle(contexts)
        chosen = tuple(contexts[: len(queries)])
        cases.append({"query_lengths": tuple(queries), "contexts": chosen, "h_q": 2, "window": window})
    return cases


def many_requests() -> dict[str, Any]:
    """More than a warp looks at in one step, most of them short or empty."""
    draw = random.Random(5)
    return {
        "query_lengths": tuple(draw.choice((0, 0, 1, 2, 17, 150)) for _ in range(333)),
        "contexts": tuple(draw.choice((0, 1, 5, 90, 300)) for _ in range(333)),
    }


FEWER = {"query_lengths": (130, 4, 64, 70, 1, 5), "contexts": (-1, -4, -63, 20, -1, -2)}
WINDOWS = (1, 2, 15, 16, 17, 48, 64, 80, 127, 128, 129, 600, 1016, 1300, 2**30, 2**40)
# Changes of MANY, by what they have in common
EDGES: dict[str, list[dict[str, Any]]] = {
    "short requests": [
        {"query_lengths": queries, "contexts": contexts}
        for queries, contexts in (
            ((1,), (0,)),
            ((1,), (1,)),
            ((1,), (700,)),
            ((0,), (50,)),
            ((0, 0, 3), (50, 0, 0)),
            ((1, 1, 1, 1), (0, 1, 15, 16)),
            ((2, 0, 1, 0), (17, 5, 0, 0)),
            ((150, 0, 64), (0, 90, 0)),
        )
    ],
    "borders of tiles": borders(),
    "fewer tokens than queries": [
        {**FEWER, "own_cached": own, "causal": causal} for own in (False, True) for causal in (False, True)
    ],
    "many requests": [many_requests(), {**many_requests(), "h_q": 8, "h_kv": 2}],
    "long contexts": [
        {"query_lengths": (3, 130), "contexts": (40_000, 9_000), "window": window} for window in (0, 100)
    ],
    "groups of heads": [
        {"h_q": h_q, "h_kv": h_kv, "sinks": "float32"}
        for h_q, h_kv in ((1, 1), (6, 2), (5, 1), (64, 1), (128, 1), (96, 32))
    ],
    "head dimensions": [
        {"d": d, "x": x, "layout": layout}
        for layout in ("plain", "slice")
        for d, x in ((1, 1), (17, 17), (17, 1), (111, 37), (160, 8), (160, 32))
    ],
    "sizes of pages": [
        {"block_size": size, "window": window}
        for size in (1, 2, 3, 7, 12, 16, 17, 48, 100, 112, 544, 1056)
        for window in (0, 100)
    ],
    "groups of dimensions": [{"x": x} for x in (1, 2, 4, 8, 16, 32, 64, 128)],
    "interleaved values": [
        {"block_size": 48, "pack": pack, "padded": padded}
        for pack in (1, 2, 4, 8, 16, 24, 48)
        for padded in (False, True)
    ],
    "own tokens in the cache": [
        {"own_cached": True, "causal": causal, "block_size": size}
        for causal in (True, False)
        for size in (16, 48)
    ],
    "windows": [{"window": window, "causal": causal} for window in WINDOWS for causal in (True, False)],
    "scales of softmax": [{"sm_scale": scale} for scale in (1e-30, 1e-4, 3.0)],
    "scales of o": [{"out_scale": scale} for scale in (1e-6, 3e-4, 0.7, 40.0)],
}


@each_source
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge: str, source: dict[str, Any]) -> None:
    """With every source of pages. A mismatch does not hide the next one."""
    run_cases([PrefixCase(**{**MANY, **source, **changes}) for changes in EDGES[edge]])


# ---- lengths


@pytest.mark.parametrize("arrays_of_k", (True, False), ids=("own", "cached"))
@pytest.mark.parametrize("b", (0, 2))
def test_nothing_to_do(b: int, arrays_of_k: bool) -> None:
    """No requests, or none with a token; all rows of o are of no request."""
    for table in ("int32", "pointers"):
        inputs = make_prefix_inputs(
            PrefixCase((0,) * b, (40,) * b, rows_around=2, own_cached=not arrays_of_k, table=table)
        )
        assert not written_rows(inputs).numel()
        for longest in (0, 5):  # without a launch, and with one
            checked(inputs, max_input_len=longest)
    inputs = make_prefix_inputs(PrefixCase((0,) * b, (0,) * b))
    assert inputs.q.numel() == 0
    checked(inputs)


def test_more_than_65535_heads_of_requests() -> None:
    """b * h of 68,160, and 4,096 heads."""
    b = 22720
    # Scores near 0, so that all keys count: where one or two do, the rounding of their probabilities alone
    # takes what a row may be off by, in some of 204,480 rows.
    inputs = make_prefix_inputs(PrefixCase((3,) * b, (5,) * b, h_q=3, h_kv=3, d=64, sm_scale=0.02))
    pages = inputs.b_loc[:, 0].long()
    older = (
        inputs.k_cache[pages, :, :, :5].permute(0, 3, 1, 2, 4).flatten(3),
        inputs.v_cache[pages, :, :, :5].permute(0, 3, 1, 2),
    )
    keys, values = (
        torch.cat([cached, own.unflatten(0, (b, 3))], dim=1)
        for cached, own in zip(older, (inputs.k, inputs.v), strict=True)
    )
    want, _ = flash_attn_func(
        inputs.q.unflatten(0, (b, 3)), keys, values, softmax_scale=inputs.case.sm_scale, causal=True
    )
    checked(inputs, want=want.flatten(0, 1))
    checked(make_prefix_inputs(PrefixCase((2,), (70,), h_q=4096, h_kv=2048, d=64)))


@pytest.mark.parametrize("axis", (0, 1), ids=("tokens", "heads"))
def test_strides_past_2_31_elements(axis: int) -> None:
    """The last token, or the second head, of q, k, v and o is 2**31 elements behind the first."""
    tokens = 129
    inputs = make_prefix_inputs(PrefixCase((tokens,), (70,), h_q=2, h_kv=2))
    step = 2**31 // (tokens - 1) if axis == 0 else 2**31
    strides = (step, 128, 1) if axis == 0 else (128, step, 1)
    room = 1 << 20
    memory = torch.full((2**31 + 4 * room,), nan, dtype=torch.bfloat16, device="cuda")
    q, k, v, o = (memory.as_strided((tokens, 2, 128), strides, i * room) for i in range(4))
    for array, own in ((q, inputs.q), (k, inputs.k), (v, inputs.v)):
        array.copy_(own)
    check_prefix(inputs, attend(replace(inputs, q=q, k=k, v=v), o))


# ---- pages


@each_source
def test_blocks_apart(source: dict[str, Any]) -> None:
    """Memory between blocks and heads; V's stride of blocks is not K's."""
    for table in ("int32", "pointers"):
        inputs = make_prefix_inputs(PrefixCase(**MANY, padded=True, table=table, **source))
        want = checked(inputs)
        apart = replace(inputs, v_cache=inputs.v_cache.contiguous())
        assert apart.v_cache.stride() != inputs.v_cache.stride()
        assert_same_bits("V in another layout", checked(apart), want)


@each_source
def test_tables(source: dict[str, Any]) -> None:
    """int32, int64 and addresses, rows apart or not, give the same bits; so do numbers among addresses."""
    case = PrefixCase(**MANY, **source)
    want = checked(make_prefix_inputs(case))
    for table in ("int32", "int64", "pointers"):
        for padded in (False, True):
            inputs = make_prefix_inputs(replace(case, table=table, padded=padded))
            assert_same_bits(f"{table} {padded}", checked(inputs), want)
    numbers = make_prefix_inputs(replace(case, table="int64"))
    as_addresses = replace(numbers, case=replace(case, table="pointers"))
    with_zero = replace(as_addresses, b_loc=torch.where(numbers.b_loc == 0, 0, addresses_of(numbers)))
    assert_same_bits("block 0 by its number", checked(with_zero), want)
    all_addresses = replace(as_addresses, b_loc=addresses_of(numbers))
    assert_same_bits("block 0 by its address", checked(all_addresses), want)


def addresses_of(inputs: PrefixInputs) -> Any:
    """The table with addresses in place of numbers."""
    cache = inputs.k_cache
    step = cache.stride(0) * cache.element_size()
    return torch.where(
        inputs.b_loc < cache.shape[0],
        cache.data_ptr() + inputs.b_loc * step,
        torch.full_like(inputs.b_loc, 2**62),
    )


@pytest.mark.parametrize("own_cached", (False, True))
def test_no_blocks(own_cached: bool) -> None:
    """A cache without blocks, and a table without columns, for requests without cached tokens."""
    lengths = (0, 0) if own_cached else (70, 3)
    inputs = make_prefix_inputs(PrefixCase(lengths, (0, 0), own_cached=own_cached))
    for cache in ("auto", "fp8_e4m3"):
        kind = inputs.q.dtype if cache == "auto" else torch.uint8
        checked(
            replace(
                inputs,
                case=replace(inputs.case, kv_cache_dtype=cache),
                k_cache=inputs.k_cache[:0].to(kind),
                v_cache=inputs.v_cache[:0].to(kind),
                b_loc=inputs.b_loc[:, :0],
            )
        )


@each_source
def test_caches_past_4_gib(source: dict[str, Any]) -> None:
    """Pages at both ends of caches that reach past 2**32 bytes, and 2**31 elements of two bytes. The
    blocks of K and V take turns in the same memory.
    """
    case = PrefixCase((100, 1, 257), (333, 40, 1000), table="int64", **source)
    small = make_prefix_inputs(case)
    want = checked(small)
    held = small.k_cache.shape[0]
    block_bytes = small.k_cache[0].numel() * small.k_cache.element_size()
    many = 2**32 // (2 * block_bytes) + 2 * held
    memory = torch.full((many, 2, block_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    k_cache, v_cache = (
        memory[:, i].view(x.dtype).unflatten(1, x.shape[1:])
        for i, x in enumerate((small.k_cache, small.v_cache))
    )
    assert k_cache.stride(0) * k_cache.element_size() * (many - 2 * held) >= 2**32
    as_bytes = torch.uint8 if k_cache.element_size() == 1 else k_cache.dtype
    half = held // 2
    for big, own in ((k_cache, small.k_cache), (v_cache, small.v_cache)):
        big.view(as_bytes)[:half] = own.view(as_bytes)[:half]
        big.view(as_bytes)[half - held :] = own.view(as_bytes)[half:]
    b_loc = small.b_loc
    b_loc = torch.where((b_loc >= half) & (b_loc < held), b_loc + (many - held), b_loc)
    assert int((b_loc[b_loc < many]).max()) > many - held
    moved = replace(small, k_cache=k_cache, v_cache=v_cache, b_loc=b_loc)
    for table in (b_loc, b_loc.clamp(max=2**31 - 1).int(), None):
        if table is None:
            call = replace(moved, case=replace(case, table="pointers"), b_loc=addresses_of(moved))
        else:
            call = replace(moved, b_loc=table)
        assert_same_bits("far apart", checked(call), want)


@each_source
@pytest.mark.parametrize("window", (0, 60))
def test_what_lies_around_tokens_has_no_effect(window: int, source: dict[str, Any]) -> None:
    """Bits are the same whether it is NaN, infinite or 1: in pages, between them, in rows of no request."""
    for own_cached in (False, True):
        case = PrefixCase(
            **MANY, window=window, own_cached=own_cached, block_size=32, padded=True, layout="slice", **source
        )
        want = checked(make_prefix_inputs(replace(case, gap=1.0)))
        for gap in (nan, inf):
            assert_same_bits(f"{gap}", checked(make_prefix_inputs(replace(case, gap=gap))), want)


@each_source
def test_a_spoilt_request(source: dict[str, Any]) -> None:
    """NaN in a request's cached tokens, q, k and v: the others keep their bits."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, **source))
    want = attend(inputs)
    start, end = (int(n) for n in inputs.b_start_loc[3:5])
    other = int(inputs.b_start_loc[4])
    inputs.q[start:end], inputs.k[start:end], inputs.v[start:end] = nan, nan, nan
    pages = inputs.b_loc[5, :32].long()
    for cache in (inputs.k_cache, inputs.v_cache):
        if cache.element_size() == 1:
            cache.view(torch.uint8)[pages] = 0x7F
        else:
            cache[pages] = nan
    got = attend(inputs)
    spoilt = torch.zeros(len(got), dtype=torch.bool, device=got.device)
    spoilt[start:end] = spoilt[other + 16 : other + 16 + 128] = True
    assert bool(got[spoilt].isnan().all())
    sound = torch.ones(len(got), dtype=torch.bool, device=got.device)
    sound[spoilt], sound[:2], sound[-2:] = False, False, False
    assert_same_bits("the others", got[sound], want[sound])


# ---- masks, sinks, numbers


@each_source
def test_a_window_of_one_token_is_its_value(source: dict[str, Any]) -> None:
    case = PrefixCase(**MANY, window=1, h_kv=4, **source)
    inputs = make_prefix_inputs(case)
    rows = written_rows(inputs)
    assert_same_bits("o", attend(inputs)[rows], inputs.v[rows])


@each_source
def test_sinks_at_the_ends(source: dict[str, Any]) -> None:
    """-inf has no effect, +inf makes o 0; large finite ones are as in the reference."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, **source))
    rows = written_rows(inputs)
    plain = attend(inputs)[rows]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value, want in ((-inf, plain), (inf, torch.zeros_like(plain))):
            sinks = torch.full((4,), value, dtype=dtype, device=plain.device)
            assert bool((attend(inputs, sinks=sinks)[rows] == want).all())
    for value in (-3e38, -100.0, 5.0, 12.0):
        checked(replace(inputs, sinks=torch.full((4,), value, device=plain.device)))


@each_source
@pytest.mark.parametrize("spread", (0.0, 1e-3, 4.0, 30.0))
def test_flat_and_sharp_scores(spread: float, source: dict[str, Any]) -> None:
    inputs = make_prefix_inputs(PrefixCase(**MANY, **source))
    inputs.q.mul_(spread)
    checked(inputs)


@each_source
def test_slopes(source: dict[str, Any]) -> None:
    inputs = make_prefix_inputs(PrefixCase(**MANY, alibi=True, **source))
    for slopes in ((0.0, 0.0, 0.0, 0.0), (8.0, -0.001, 0.5, 100.0)):
        inputs.alibi_slopes.copy_(torch.tensor(slopes))
        checked(inputs)


# ---- FP8 caches


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("cache", ("fp8_e4m3", "fp8_e5m2"))
def test_every_byte_of_a_cache(cache: str, dtype: str) -> None:
    """With a window of one token o is its value: every finite byte gives its number, times a power of 2."""
    case = PrefixCase(
        (64,), (64,), h_q=2, h_kv=2, kv_cache_dtype=cache, bytes_dtype="uint8", own_cached=True, window=1,
        dtype=dtype, v_scale=0.25,
    )  # fmt: skip
    inputs = make_prefix_inputs(case)
    kind = getattr(torch, case.float8)
    codes = torch.arange(256, device="cuda").to(torch.uint8)
    codes = codes[codes.view(kind).float().isfinite()]
    values = codes[torch.arange(2 * 64 * 128, device="cuda") % len(codes)].view(64, 2, 128)
    for page in range(4):
        block = inputs.b_loc[0, 4 + page]
        inputs.v_cache[block] = values[16 * page : 16 * (page + 1)].permute(1, 2, 0)
    want = (values.view(kind).float() * 0.25).to(inputs.q.dtype)
    for changes in ({}, {"v_scale": torch.tensor(0.25, device="cuda")}):
        assert bool((attend(inputs, **changes) == want).all())  # 0 of either sign


@pytest.mark.parametrize("cache", ("fp8", "fp8_e5m2"))
def test_scales_of_caches(cache: str) -> None:
    """Tiny ones, which clip the cached tokens, and large ones, which leave few bits of them."""
    run_cases(
        [
            PrefixCase(**MANY, kv_cache_dtype=cache, x=16, k_scale=k_scale, v_scale=v_scale)
            for scale in (2.0**-60, 2.0**-20, 1e-4, 3.7, 1e2, 1e20)
            for k_scale, v_scale in ((scale, 1.0), (1.0, scale), (scale, scale))
        ]
    )


@pytest.mark.parametrize("name", ("k_scale", "v_scale"))
def test_scales_of_zero(name: str) -> None:
    """On the device, where nothing can refuse them: all scores of the context, or all its values, are 0."""
    case = PrefixCase(**MANY, kv_cache_dtype="fp8_e4m3", x=16, device_scales=True)
    inputs = make_prefix_inputs(case)
    getattr(inputs, name).zero_()
    checked(inputs)


# ---- o


@each_source
@pytest.mark.parametrize("fp8_out", (False, True))
def test_o_in_other_layouts(fp8_out: bool, source: dict[str, Any]) -> None:
    """Heads first, part of a projection, and slices whose strides are odd multiples of 16 bytes, or none."""
    inputs = make_prefix_inputs(PrefixCase(**MANY, out_scale=0.01 if fp8_out else None, **source))
    tokens, heads, d = inputs.q.shape
    want = checked(inputs)
    dtype = torch.float8_e4m3fn if fp8_out else inputs.q.dtype
    step = 16 if fp8_out else 8
    for memory, view in (
        ((heads, tokens + 1, d), lambda x: x.transpose(0, 1)[:tokens]),
        ((tokens, 3, heads, d), lambda x: x[:, 1]),
        ((tokens, heads, d + step), lambda x: x[..., step:]),
        ((tokens, heads, d + 3), lambda x: x[..., 3:]),
    ):
        whole = torch.empty(memory, dtype=dtype, device="cuda")
        whole.view(torch.uint8).fill_(0x5A)
        o = attend(inputs, view(whole))
        rows = written_rows(inputs)
        as_bytes = whole.view(torch.uint8) if fp8_out else whole
        part = view(as_bytes)
        assert_same_bits("o", part[rows], want)
        part[rows] = part[0, 0, 0]  # of a row of no request
        assert o.shape == inputs.q.shape and bool((whole.view(torch.uint8) == 0x5A).all())


def exact_values(values: Any, dtype: str, out_scale: float, **source: Any) -> Any:
    """The bytes of o for own tokens with these values `[n]`, each as a request of its own."""
    count = -(-len(values) // 128)
    case = PrefixCase((1,) * count, (0,) * count, h_q=1, h_kv=1, dtype=dtype, out_scale=out_scale, **source)
    inputs = make_prefix_inputs(case)
    inputs.v.zero_()
    inputs.v.view(-1)[: len(values)] = values.to(inputs.v.dtype)
    o = Target(inputs).o
    attend(inputs, o)
    return o.view(torch.uint8).flatten()[: len(values)]


@pytest.mark.parametrize("scale", (1.0, 0.125, 16.0))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_bytes_of_o(dtype: str, scale: float) -> None:
    """A request of one token has its value: the numbers of e4m3, what lies between them, and next to that."""
    codes = torch.arange(0x7F, dtype=torch.uint8, device="cuda")
    numbers = decode_out(codes)
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, middles, middles * (1 + 2.0**-7), middles * (1 - 2.0**-7)]) * scale
    values = torch.cat([values, -values])
    kind = getattr(torch, dtype)
    exact = values.to(kind).double()
    assert bool((exact[: len(numbers)] == numbers * scale).all())
    for source in SOURCES.values() if dtype == "bfloat16" else ({},):
        got = exact_values(values, dtype, scale, **source)
        want = encode_out(exact / scale)
        zero = decode_out(want) == 0  # either sign
        assert bool((decode_out(got)[zero] == 0).all())
        assert_same_bits("bytes", got[~zero], want[~zero])


@each_source
def test_bytes_of_large_numbers(source: dict[str, Any]) -> None:
    """At most 448, also for what is infinite; NaN stays NaN."""
    large = torch.tensor([448.0, 449, 463, 464, 465, 480, 512, 1e4, 3e38, inf], device="cuda")
    got = exact_values(torch.cat([large, -large]), "bfloat16", 1.0, **source)
    assert decode_out(got).tolist() == [E4M3_LARGEST] * 10 + [-E4M3_LARGEST] * 10
    got = exact_values(torch.tensor([1.0, nan, 2.0, -nan], device="cuda"), "bfloat16", 1.0, **source)
    assert decode_out(got)[::2].tolist() == [1, 2]
    assert bool((got[1::2] & 0x7F == 0x7F).all())
