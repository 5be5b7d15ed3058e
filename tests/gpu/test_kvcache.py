"""Attention over caches: random calls, lengths, large caches, bits of batches, replays."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import assert_same_bits, torch

from kit.kvcache import (
    FP8,
    KvCacheCase,
    KvCacheInputs,
    check_kvcache,
    covered_rows,
    make_kvcache_inputs,
    named_arguments,
    new_tokens_of,
    rows_of,
)
from operations.kvcache import kvcache_call
from operations.memory import strided


def attend(inputs: KvCacheInputs, **changes: Any) -> tuple[Any, Any]:
    """out and lse."""
    out, lse = kvcache_call(inputs).run(**changes)
    return out, lse


def checked(case: KvCacheCase) -> tuple[Any, Any]:
    """out and lse of a case, after they and the caches were compared with the reference."""
    inputs = make_kvcache_inputs(case)
    got = attend(inputs)
    check_kvcache(inputs, got)
    return got


def assert_same(text: str, got: Any, want: Any, rows: Any = ..., wanted_rows: Any = ...) -> None:
    """Raise unless rows of out and lse have the same bits."""
    for name, one, other in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(f"{name}, {text}", one[rows], other[wanted_rows])


# ---- random calls

DIMS = ((64, 64), (128, 128), (128, 128), (256, 256), (96, 96), (192, 128), (40, 72), (56, 104))
PAGES = (None, None, None, 1, 2, 4, 8, 12, 16, 16, 32, 64, 100, 128, 256)
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True})


def random_case(number: int) -> KvCacheCase:
    """Any combination of what calls have, of at most 60,000 tokens."""
    draw = random.Random(number)

    def some(probability: float) -> bool:
        return draw.random() < probability

    h_kv, group = draw.choice((1, 2, 3, 8)), draw.choice((1, 2, 4, 5, 8, 16, 64))
    (d_qk, d_v), page = draw.choice(DIMS), draw.choice(PAGES)
    longest = draw.choice((20, 130, 700, 3000, 9000))
    b = min(draw.choice((1, 1, 2, 3, 7, 20, 60)), 60_000 // longest)
    s_q = draw.choice((1, 1, 1, 2, 3, 5, 17, 130))
    case: dict[str, Any] = {"page": page, "h_q": min(h_kv * group, 64 // h_kv * h_kv), "h_kv": h_kv}
    case |= {"d_qk": d_qk, "d_v": d_v, "s_q": s_q, "seed": number, "batch_idx": some(0.3)}
    new = [0] * b
    if some(0.5):
        most = draw.choice((1, 1, 3, s_q))
        new = [most] * b
        case["new"] = most
        if some(0.4):
            new = [draw.randint(0, most) for _ in range(b)]
            case["new_lengths"] = tuple(new)
        case |= {"rotary": draw.choice((0.0, 0.5, 1.0)), "interleaved": some(0.5)}
        if case["rotary"] and some(0.3):
            case["rotary_from"] = tuple(draw.randint(0, longest) for _ in range(b))
    lengths = [draw.choice((0, 1, draw.randint(0, longest), longest)) for _ in range(b)]
    if some(0.3):
        lengths = [-new[r] - draw.randint(0, 2) if some(0.3) else n for r, n in enumerate(lengths)]
    elif not any(new) and some(0.3):
        case["lengths_as"] = "bounds"
    case["lengths"] = tuple(lengths)
    if some(0.4):
        case["q_lengths"] = tuple(draw.choice((0, 1, 1, s_q)) for _ in range(b))
        case["rows_around"] = draw.choice((0, 2))
    case |= draw.choice((*MASKS, {"window": (draw.choice((0, 5, 63, 1000)), draw.choice((-1, 0, 9)))}))
    options = {
        "leftpad": tuple(draw.randint(0, max(length, 3)) for length in lengths),
        "cache_layout": "interleaved",
        "sink": draw.choice(("float32", "bfloat16", "infinite")),
        "alibi": draw.choice(("heads", "requests")),
        "softcap": 15.0,
    }
    case |= {name: value for name, value in options.items() if some(0.25)}
    case |= {"dtype": draw.choice(("bfloat16", "float16")), "num_splits": draw.choice((0, 0, 1, 3))}
    if some(0.3) and not case.get("rotary") and d_qk % 16 == d_v % 16 == 0:
        case |= {"cache_dtype": FP8, "descales": some(0.7), "dtype": draw.choice((case["dtype"], FP8))}
    return KvCacheCase(**case)


@pytest.mark.parametrize("tens", full_unless(lambda tens: tens < 10, range(50)))
def test_random_calls(tens: int) -> None:
    """A mismatch does not hide the next one."""
    failures = []
    for number in range(10 * tens, 10 * tens + 10):
        try:
            checked(random_case(number))
        except AssertionError as error:
            failures.append(f"{number}: {error}")
    assert not failures, "\n".join(failures)


# ---- lengths

APPENDING: dict[str, Any] = {"new": 2, "rotary": 1.0, "causal": True}
KINDS: dict[str, dict[str, Any]] = {
    "paged": {},
    "rows": {"page": None},
    "page 1": {"page": 1},
    "new tokens": APPENDING,
    "segments": {"q_lengths": (1, 3, 0, 2, 1), "rows_around": 2},
    "segments, new tokens": {"q_lengths": (1, 3, 0, 2, 1), "new_lengths": (1, 3, 2, 2, 1), "causal": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@each_kind
def test_lengths_of_0_and_below(kind: dict[str, Any]) -> None:
    """Some requests, and all of them, are padding: out 0, lse -inf, and nothing is read or written."""
    for lengths in ((0, 300, -3, 1, -9), (0,) * 5, (-3,) * 5, (-(2**31),) * 5, (-3, -3, -3, 700, -3)):
        inputs = make_kvcache_inputs(KvCacheCase(lengths=lengths, **kind))
        out, lse = (x[covered_rows(inputs)] for x in checked(inputs.case))
        assert max(lengths) >= 0 or not bool(out.any()) and bool((lse == -inf).all())


@each_kind
def test_padding_that_is_longer_than_a_request(kind: dict[str, Any]) -> None:
    checked(KvCacheCase(lengths=(5, 300, 70, 0, 16), leftpad=(7, 300, 69, 3, 16), **kind))


def test_other_forms_of_lengths() -> None:
    """An int, the differences of bounds, and none: all tokens of the cache."""
    for page in (None, 16):
        for s_q, new in ((1, 0), (3, 2)):
            checked(KvCacheCase(lengths=(75,) * 3, lengths_as="int", s_q=s_q, new=new, page=page))
        checked(KvCacheCase(lengths=(75, 0, 300), lengths_as="bounds", s_q=3, page=page))
        checked(KvCacheCase(lengths=(160,) * 3, lengths_as="all", s_q=3, page=page, causal=True))


def test_no_requests() -> None:
    for kind in ({}, {"page": None}, {"q_lengths": (), "rows_around": 3}):
        checked(KvCacheCase(lengths=(), **kind))


@pytest.mark.parametrize("spoiler", (nan, inf))
@each_kind
def test_what_no_query_sees_has_no_effect(kind: dict[str, Any], spoiler: float) -> None:
    """Beyond the lengths, before windows and padding, in other pages, in requests without tokens."""
    for more in ({}, {"window": (40, 0), "causal": False}, {"leftpad": (0, 37, 0, 3, 60), "softcap": 15.0}):
        case = KvCacheCase(**{"lengths": (0, 300, -3, 130, 77), **kind, **more})
        want = checked(replace(case, gap=1.0))
        inputs = make_kvcache_inputs(replace(case, gap=spoiler))
        got = attend(inputs)
        assert_same(case.id, got, want, covered_rows(inputs), covered_rows(inputs))


def test_places_that_are_not_there() -> None:
    """Entries out of range and lengths past the table: other requests keep their bits, nothing is written."""
    inputs = make_kvcache_inputs(KvCacheCase((300, 200, 77), s_q=3, new=2, room=400, num_splits=1))
    want = attend(inputs)
    check_kvcache(inputs, want)
    new = new_tokens_of(inputs)[2]
    for memory, before in zip(inputs.memory, inputs.before, strict=True):
        memory.copy_(before)
    inputs.block_table[0, 3::2], inputs.block_table[0, 4::2] = -1, 2**31 - 1
    inputs.cache_seqlens[1] = 5000
    got = attend(inputs)
    assert_same("request 2", got, want, 2, 2)
    for memory, before, tokens in zip(inputs.memory, inputs.before, (new.keys, new.values), strict=True):
        before[new.places] = tokens
        assert_same_bits("cache", memory, before)


# ---- layouts


@pytest.mark.parametrize("page", (None, 16, 12, 1))
@pytest.mark.parametrize("layout", ("plain", "interleaved"))
def test_strides_of_caches(layout: str, page: int | None) -> None:
    """Of blocks, tokens and heads, others for V than for K. New tokens go to the same places."""
    inputs = make_kvcache_inputs(KvCacheCase((300, 77), s_q=2, cache_layout=layout, page=page, **APPENDING))
    want = attend(inputs)
    check_kvcache(inputs, want)
    for name in ("k_cache", "v_cache"):
        for kind in ("wide", "columns", "permuted"):
            for way in strided(getattr(inputs, name), kind):
                got = attend(inputs, **{name: way})
                assert_same(f"{name}, {kind}", got, want)
                assert_same_bits(f"{name}, {kind}", way, getattr(inputs, name))


@pytest.mark.parametrize("page", (None, 16, 1))
def test_caches_past_2_31_elements(page: int | None) -> None:
    """Requests at both ends of caches. Blocks, or rows, of K and V take turns in the same memory."""
    inputs = make_kvcache_inputs(KvCacheCase(lengths=(700, 90), s_q=3, page=page, **APPENDING))
    want = attend(inputs)
    check_kvcache(inputs, want)
    held = len(inputs.k_cache)
    many = 2**31 // (2 * inputs.k_cache[0].numel()) + 2 * held
    memory = torch.full((many, 2, *inputs.k_cache.shape[1:]), nan, dtype=torch.bfloat16, device="cuda")
    caches = {"k_cache": memory[:, 0], "v_cache": memory[:, 1]}
    half = held // 2
    at = torch.arange(held, device="cuda")
    at[half:] += many - held
    for cache, before in zip(caches.values(), inputs.before, strict=True):
        assert cache.stride(0) * int(at[half]) > 2**31
        cache[at] = before
    places = {"cache_batch_idx": at.int()}
    if page is not None:
        table = inputs.block_table
        is_block = (table >= 0) & (table < held)
        places = {"block_table": torch.where(is_block, at[table.clamp(0, held - 1).long()], -1).int()}
    got = attend(inputs, **caches, **places)
    assert_same("far apart", got, want)
    for name, cache in caches.items():
        assert_same_bits(name, cache[at], getattr(inputs, name))
    for piece in memory[half : half + many - held].split(1 << 10):
        assert bool(piece.isnan().all())


# ---- bits


def part(inputs: KvCacheInputs, requests: list[int]) -> tuple[dict[str, Any], Any]:
    """Arguments of the call with these requests alone, and the index of their rows."""
    index = rows = torch.tensor(requests, device="cuda")
    names = ("cache_seqlens", "cache_batch_idx", "cache_leftpad")
    changes = {name: getattr(inputs, name)[index] for name in names}
    if inputs.cu_seqlens_q is not None:
        every = torch.arange(len(inputs.q), device="cuda")
        rows = torch.cat([every[rows_of(inputs.cu_seqlens_q, r)] for r in requests])
        lengths = inputs.cu_seqlens_q.diff()[index]
        changes["cu_seqlens_q"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {**named_arguments(inputs), **changes, "q": inputs.q[rows]}, rows


@pytest.mark.parametrize("page", (None, 16, 64, 1))
@pytest.mark.parametrize("queries", (1, 4, 40, "segments"))
def test_one_split_gives_the_same_bits_in_any_batch(queries: Any, page: int | None) -> None:
    """Alone, several times, among others, in any order."""
    draw = random.Random(1)
    lengths = (5000, 0, 1, 64, 65, -1, 700, *(draw.randint(1, 900) for _ in range(25)))
    more: dict[str, Any] = {"s_q": queries}
    if queries == "segments":
        more = {"q_lengths": tuple(draw.choice((1, 1, 2, 70)) for _ in lengths)}
    leftpad = tuple(draw.choice((0, 0, max(n, 0) // 3)) for n in lengths)
    case = KvCacheCase(
        lengths=lengths, leftpad=leftpad, batch_idx=True, page=page, num_splits=1, causal=True, **more
    )
    inputs = make_kvcache_inputs(case)
    whole = attend(inputs)
    check_kvcache(inputs, whole)
    everyone = list(range(case.b))
    batches = [[0], [2], [6], [0, 0, 0], [3, 0, 5], everyone[::-1]]
    batches += [draw.sample(everyone, size) for size in (2, 5, 16)]
    for requests in (*batches, draw.choices(everyone, k=200)):
        arguments, rows = part(inputs, requests)
        got = attend(inputs, **arguments)
        assert_same(f"batch of {len(requests)}", got, whole, wanted_rows=rows)


# ---- graphs


@pytest.mark.parametrize("num_splits", (0, 1))
@pytest.mark.parametrize("page", (None, 16, 1))
def test_decoding_in_a_graph(page: int | None, num_splits: int) -> None:
    """One graph for many steps: lengths grow, requests end and begin, pages are added."""
    case = KvCacheCase(lengths=(300, 0, -1, 63, 120), room=420, page=page, new=1, rotary=1.0)
    inputs = make_kvcache_inputs(replace(case, num_splits=num_splits))
    if page is not None:
        table, blocks = inputs.block_table, torch.arange(len(inputs.k_cache), device="cuda").int()
        is_free = ~torch.isin(table, blocks)
        table[is_free] = blocks[~torch.isin(blocks, table)][: int(is_free.sum())]
    call = kvcache_call(inputs)
    call.run()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call.run()
    for step in range(60):
        inputs.before = [x.clone() for x in inputs.memory]
        graph.replay()
        check_kvcache(inputs, got)
        for array in (inputs.q, inputs.k, inputs.v):
            array.normal_()
        inputs.cache_seqlens[inputs.cache_seqlens >= 0] += 1
        if step % 20 == 19:
            inputs.cache_seqlens[step // 20] = -1
            inputs.cache_seqlens[2] = 0
