"""Calls whose lengths, tables and indices may be anything: they end, and touch nothing outside of the arrays.
To run under compute-sanitizer, as test_sanitizer.py; tests/test_emulated_lengths.py makes the same
calls with arrays beside memory that nobody may touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch, united_selections

import rawmla

pytestmark = pytest.mark.sanitizer

Place = Callable[[Any], Any]
"""Makes a copy of a CPU tensor, on the GPU or in guarded memory."""
Calls = dict[str, Callable[[], None]]
LEAST, MOST = -(2**31), 2**31 - 1
TOKENS = 160  # so that arrays of a call are whole pages of memory, as in other sizes here
D = 128
FEW_HEADS = 8  # kernels whose calls take the least time have the plans
SEGMENTS = {  # cu_seqlens of three requests in arrays of TOKENS tokens
    "past the end": (0, 40, 150, 230),
    "begin past the end": (500, 600, 700, 70_000),
    "negative": (-50, -20, 60, 160),
    "end before the begin": (0, 30, -5, 160),
    "decreasing": (160, 60, 20, 0),
    "overlapping": (0, 160, 10, 160),
    "begin before the ones before": (63, 160, 0, 160),
    "extreme": (LEAST, MOST, LEAST, MOST),
    "as one": (0, 0, MOST, MOST),
}
USED = ((MOST, -5, LEAST), (LEAST, MOST, 7), (1000, 161, 160))
BLOCKS = (-1, LEAST, MOST, 10**6, 2, 0)  # numbers of blocks, a few of which exist


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def numbers(*shape: int, dtype: Any = None) -> Any:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(dtype or torch.bfloat16)


def cut(segments: tuple[int, ...]) -> tuple[int, ...] | None:
    """What the same requests have inside of the arrays; None where that is no list of segments."""
    inside = tuple(min(max(x, 0), TOKENS) for x in segments)
    return inside if list(inside) == sorted(inside) else None


# ---- dense attention


def varlen_calls(place: Place, call: Callable[..., Any]) -> Calls:
    """Calls with SEGMENTS for q, for k, and for both. `call(q, k, longest, used_q, used_k)` returns arrays of
    query rows. Requests that the ends of arrays cut have the results of shorter ones.
    """
    good = (0, 40, 40, 160)
    longest, used = cycle((TOKENS, 10**6, 1)), cycle(USED)

    def compared(q: tuple[int, ...], k: tuple[int, ...], most: int, used: Any) -> None:
        got = call(place(int32(*q)), place(int32(*k)), most, *used)
        inside_q, inside_k = cut(q), cut(k)
        if inside_q is None or inside_k is None or most < TOKENS:
            return
        want = call(place(int32(*inside_q)), place(int32(*inside_k)), most, *used)
        rows = slice(inside_q[0], inside_q[-1])
        for one, other in zip(got, want, strict=True):
            assert_same_bits("a row", one[rows], other[rows])

    calls: Calls = {}
    for name, bad in SEGMENTS.items():
        calls[f"q {name}"] = partial(compared, bad, good, next(longest), (None, None))
        calls[f"k {name}"] = partial(compared, good, bad, next(longest), (None, None))
        lengths = [place(int32(*next(used))) for _ in range(2)]
        calls[f"q and k {name}, seqused"] = partial(compared, bad, bad, next(longest), lengths)
    return calls


def forward_calls(place: Place, heads: int = 2, keys: int = TOKENS, **options: Any) -> Calls:
    q, k, v = (place(numbers(n, h, D)) for n, h in ((TOKENS, heads), (keys, 1), (keys, 1)))

    def call(cu_q: Any, cu_k: Any, longest: int, used_q: Any, used_k: Any) -> Any:
        out = place(torch.full((TOKENS, heads, D), float("nan"), dtype=torch.bfloat16))
        longest_k = max(longest, keys) if keys > TOKENS else longest
        return rawmla.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, longest, longest_k, seqused_q=used_q, seqused_k=used_k, out=out, **options
        )

    return varlen_calls(place, call)


def split_calls(place: Place) -> Calls:
    """So few tiles that their keys are split, and combined."""
    calls = forward_calls(place, heads=1, keys=1200)
    return {name: call for name, call in calls.items() if name.startswith("q ") and "past" in name}


def few_calls(place: Place) -> Calls:
    """With query heads that share a tile, and a mask."""
    calls = forward_calls(place, heads=4, causal=True)
    return {name: call for name, call in calls.items() if "seqused" in name}


def backward_calls(place: Place, **options: Any) -> Calls:
    q, k, v, out, dout = (place(numbers(TOKENS, heads, D)) for heads in (2, 1, 1, 2, 2))
    lse, sink = place(numbers(TOKENS, 2, dtype=torch.float32) + 9), place(numbers(2, dtype=torch.float32))

    def call(cu_q: Any, cu_k: Any, longest: int, used_q: Any, used_k: Any) -> Any:
        dq, dk, dv = (place(torch.full_like(x, float("nan"), device="cpu")) for x in (q, k, v))
        rawmla.flash_attn_varlen_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, longest, longest, dq, dk, dv, attn_sink=sink,
            seqused_q=used_q, seqused_k=used_k, **options,
        )  # fmt: skip
        return (dq,) if options else ()

    return varlen_calls(place, call)


def turn_calls(place: Place) -> Calls:
    """Tiles that wait for each other."""
    calls = backward_calls(place, deterministic=True, causal=True)
    return {name: call for name, call in calls.items() if "seqused" in name or "before" in name}


# ---- prefix prefill


def prefix_calls(place: Place, **options: Any) -> Calls:
    """Positions, lengths, and pages of int32, int64 and of addresses."""
    fp8, x = options.get("kv_cache_dtype", "auto") != "auto", options.pop("x", 8)
    q, k, v = (place(numbers(TOKENS, heads, D)) for heads in (2, 1, 1))
    caches = numbers(4, 1, D // x, 16, x), numbers(4, 1, D, 16)
    k_cache, v_cache = (
        place(one.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else one) for one in caches
    )

    def call(start: tuple[int, ...], lengths: tuple[int, ...], table: Any, **more: Any) -> None:
        own = {"k": k, "v": v} if not more.pop("own_cached", False) else {"k": None, "v": None}
        rawmla.context_attention_fwd(
            q=q, **own, o=place(torch.full((TOKENS, 2, D), float("nan"), dtype=torch.bfloat16)),
            k_cache=k_cache, v_cache=v_cache, b_loc=place(table), b_start_loc=place(int32(*start)),
            b_seq_len=place(int32(*lengths)), max_seq_len=None, max_input_len=TOKENS,
            k_scale=1.0, v_scale=1.0, **{"kv_cache_dtype": "auto", **options, **more},
        )  # fmt: skip

    pages = torch.tensor([BLOCKS[:4], BLOCKS[2:], BLOCKS[:4]])
    wide = pages + (pages > 3) * 2**40
    addresses = (
        k_cache.data_ptr() + torch.tensor([[-(2**40), 2**40, 8, 32 * D], [0, -1, 1, 4 * 32 * D]] * 2)[:3]
    )
    good = (0, 40, 40, 160)
    calls: Calls = {}
    for (name, start), lengths, own in zip(
        SEGMENTS.items(), cycle(((MOST, -5, LEAST), (90, MOST, 130))), cycle((False, True)), strict=False
    ):
        calls[f"rows {name}"] = partial(call, start, lengths, pages.int(), own_cached=own)
    for own in (False, True):
        calls[f"wide pages, {own}"] = partial(call, good, (90, 30, MOST), wide, own_cached=own)
        calls[f"addresses, {own}"] = partial(
            call, good, (90, 30, 130), addresses, own_cached=own, is_block_table_ptr=True
        )
    calls["no pages"] = partial(call, good, (MOST, 30, 130), pages[:, :0].int())
    return calls


# ---- attention over a cache


def kvcache_calls(place: Place, page: int | None, appends: bool, fp8: bool = False, **options: Any) -> Calls:
    """Calls with SEGMENTS for q, new tokens and lengths, with lengths and tables of any values, and forms of
    these. Requests that the ends of arrays cut have the results of shorter ones.
    """
    kind, columns = torch.float8_e4m3fn if fp8 else torch.bfloat16, 192 // (page or 192)
    q, k, v = (place(numbers(TOKENS, h, D, dtype=t)) for h, t in ((2, torch.bfloat16), (1, kind), (1, kind)))
    good_table = torch.arange(3 * columns).view(3, columns).int()
    bad_table = torch.tensor(BLOCKS).repeat(3 * columns)[: 3 * columns].view(3, columns).int()

    def call(starts: tuple[int, ...], new: tuple[int, ...], most: int, table: Any, **more: Any) -> Any:
        caches = [place(numbers(3 * columns, page or 192, 1, D, dtype=kind)) for _ in "kv"]
        out = place(torch.full((TOKENS, 2, D), float("nan"), dtype=torch.bfloat16))
        given = {name: place(x) if torch.is_tensor(x) else x for name, x in more.items()}
        if appends:
            given |= {"k": k, "v": v, "cu_seqlens_k_new": place(int32(*new))}
        return rawmla.flash_attn_with_kvcache(
            q, *caches, block_table=None if page is None else place(table),
            cu_seqlens_q=place(int32(*starts)), max_seqlen_q=most, out=out, **options | given,
        )  # fmt: skip

    def compared(starts: tuple[int, ...], new: tuple[int, ...], most: int) -> None:
        lengths = {"cache_seqlens": int32(20, 7, 0)}
        got = call(starts, new, most, good_table, **lengths)
        inside, inside_new = cut(starts), cut(new)
        if inside is None or inside_new is None or most < TOKENS:
            return
        want = call(inside, inside_new, most, good_table, **lengths)
        rows = slice(inside[0], inside[-1])
        for one, other in zip(got, want, strict=True):
            assert_same_bits("a row", one[rows], other[rows])

    def numbers_past_int32() -> None:
        for length, most in ((2**40 + 5, 192), (10**30, 192), (-(2**32) + 5, -TOKENS)):
            got, want = (
                call(good, good, TOKENS, good_table, cache_seqlens=given)[0] for given in (length, most)
            )
            assert_same_bits(f"{length}", got, want)

    good, longest = (0, 40, 40, 160), cycle((TOKENS, 10**6, 1))
    calls: Calls = {}
    for name, bad in SEGMENTS.items():
        calls[f"q {name}"] = partial(compared, bad, good, next(longest))
        if appends:
            calls[f"new {name}"] = partial(compared, good, bad, next(longest))
        calls[f"lengths {name}"] = partial(call, good, bad, TOKENS, good_table, cu_seqlens_k=int32(*bad))
    for lengths in (*USED, (192, 193, -40)):
        of_device = {"cache_seqlens": int32(*lengths)}
        calls[f"{lengths}"] = partial(call, good, good, TOKENS, bad_table, **of_device)
        calls[f"{lengths}, rows"] = partial(
            call, good, good, TOKENS, good_table, **of_device, cache_batch_idx=int32(MOST, 2, LEAST)
        )
        calls[f"{lengths}, padding"] = partial(
            call, good, good, TOKENS, good_table, **of_device, cache_leftpad=int32(LEAST, 30, MOST)
        )
    if page is not None:
        calls["a table without rows"] = partial(
            call, good, good, TOKENS, good_table[:0], cache_seqlens=int32(5, 150, 192),
            cache_batch_idx=int32(0, 1, 3 * columns - 1),
        )  # fmt: skip
    calls["numbers past int32"] = numbers_past_int32
    if appends and not fp8:
        for positions in (int32(LEAST, MOST, 5), None):
            angles = {"rotary_cos": numbers(9, 32), "rotary_sin": numbers(9, 32), "rotary_seqlens": positions}
            calls[f"rotated from {positions}"] = partial(
                call, good, good, TOKENS, good_table, cache_seqlens=int32(-3, MOST, 100), **angles
            )
    return calls


# ---- flex attention


def flex_calls(place: Place) -> Calls:
    """Counts and numbers of blocks, of keys and of queries, for one size of blocks and for others."""
    q, k, v = (place(numbers(1, 1, n, D)) for n in (224, 288, 288))
    bias = place(numbers(224, 288))

    def is_seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return bias[i, j] > -1

    # Tracing makes a context of CUDA where there is a GPU. A process that was forked cannot.
    mask = rawmla.trace_mod(is_seen, "mask_mod")

    def lists(lines: int, count: int) -> tuple[Any, Any]:
        """Make counts, of which the first is `count`, and numbers of blocks: each of BLOCKS is in a line."""
        blocks = torch.tensor(BLOCKS).roll(count % 5).repeat(lines)[: lines * 3].view(1, 1, lines, 3)
        counts = torch.tensor([count, 2, MOST, LEAST]).repeat(lines)[:lines].view(1, 1, lines)
        return place(counts.int()), place(blocks.int())

    def call(size: int, count: int) -> None:
        rows, columns = -(-224 // size), -(-288 // size)
        block_mask = rawmla.BlockMask(
            (224, 288), *lists(rows, count), *lists(rows, -count), *lists(columns, count),
            *lists(columns, -count), BLOCK_SIZE=size, mask_mod=mask,
        )  # fmt: skip
        # initcheck does not see what TMA writes.
        given = torch.zeros_like(q)
        out, lse = rawmla.flex_attention(q, k, v, block_mask=block_mask, return_lse=True, out=given)
        for deterministic in (False, True):
            rawmla.flex_attention_backward(
                out, q, k, v, out, lse, block_mask=block_mask, deterministic=deterministic
            )

    return {f"blocks of {size}": partial(call, size, count) for size, count in ((128, MOST), (64, 3))}


# ---- MLA


def hostile_plans(place: Place, b: int) -> Iterator[tuple[Any, Any]]:
    """Plans as tensors: begin_req, begin_block, end_req, end_block, begin_split, .., mark."""
    invariant = 0x62690001
    rows = (
        (0, 0, b - 1, MOST, 0, 0, 0, 0),
        (-1, MOST, MOST, MOST, MOST, 0, 0, 0),
        (0, MOST, MOST, MOST, MOST, 0, 0, invariant),
        (0, LEAST, LEAST, LEAST, LEAST, 0, 0, 0),
        (0, LEAST, 0, MOST, 0, 0, 0, invariant),
        (0, 1, MOST, MOST, LEAST, 0, 0, 0),
    )
    for mark, splits in (
        (0, (0, MOST, LEAST, 3)),
        (invariant, (-1, 5, 2**30 - 60, 2**30 + 60)),
        (invariant, (7, 7, 900, 0)),
    ):
        plan = torch.tensor([(*row[:7], row[7] or mark) for row in rows], dtype=torch.int32)
        yield place(plan), place(int32(*splits))


def dense_decode_calls(place: Place, h_q: int) -> Calls:
    q, cache = place(numbers(3, 1, h_q, 576)), place(numbers(4, 64, 1, 576))
    table = place(torch.tensor([BLOCKS[:3], BLOCKS[3:], (1, 2, 3)], dtype=torch.int32))

    def call(lengths: tuple[int, ...], plan: Any, num_splits: Any = None) -> Any:
        return rawmla.flash_mla_with_kvcache(
            q, cache, table, place(int32(*lengths)), 512, plan, num_splits, causal=True
        )

    def compared() -> None:
        got = call((MOST, 70_000, -5), rawmla.FlashMLASchedMeta())
        want = call((192, 192, 0), rawmla.FlashMLASchedMeta())
        torch.testing.assert_close(got, want, atol=5e-3, rtol=1e-2)

    calls: Calls = {"lengths": compared}
    for i, (plan, num_splits) in enumerate(hostile_plans(place, 3)):
        if h_q == FEW_HEADS:
            calls[f"plan {i}"] = partial(call, (193, 100, MOST), plan, num_splits)
    return calls


def selected(*shape: int) -> Any:
    """Slots, of which some exist."""
    values, count = torch.tensor((*BLOCKS, 255, 256, 3)), torch.Size(shape).numel()
    return values[torch.arange(count) % len(values)].view(shape).int()


def sparse_decode_calls(place: Place, layout: str, h_q: int) -> Calls:
    d_qk = 512 if layout == "model1" else 576
    q = place(numbers(3, 1, h_q, d_qk))
    rows = numbers(4, 64, 1, d_qk)
    if layout != "bf16":
        rows = rawmla.reference.quantize_k_cache(rows, layout)
    cache = place(rows)

    def call(lengths: tuple[int, ...], plan: Any, num_splits: Any = None) -> None:
        rawmla.flash_mla_with_kvcache(
            q, cache, None, None, 512, plan, num_splits, is_fp8_kvcache=layout != "bf16",
            indices=place(selected(3, 1, 70)), topk_length=place(int32(*lengths)), extra_k_cache=cache,
            extra_indices_in_kvcache=place(selected(3, 1, 20)),
            extra_topk_length=place(int32(*lengths[::-1])),
        )  # fmt: skip

    calls: Calls = {"lengths": partial(call, (MOST, 60, LEAST), rawmla.FlashMLASchedMeta())}
    for i, (plan, num_splits) in enumerate(hostile_plans(place, 3)):
        if h_q == FEW_HEADS:
            calls[f"plan {i}"] = partial(call, (MOST, 60, LEAST), plan, num_splits)
    return calls


def prefill_calls(place: Place) -> Calls:
    """Each token by itself, and tokens in groups."""
    q, kv = (place(numbers(n, h, 576)) for n, h in ((16, 16), (256, 1)))
    lengths = place(int32(*(MOST, LEAST, 30, -1) * 4))

    def call() -> None:
        rawmla.flash_mla_sparse_fwd(q, kv, place(selected(16, 1, 70)), 0.04, topk_length=lengths)

    def united() -> None:
        with united_selections(scratch_bytes=1 << 15, tokens=1):
            call()

    return {"tokens": call, "groups": united}


def metadata_calls(place: Place) -> Calls:
    """Batches of requests of one length, whose blocks have sums beyond 32 bits."""

    def call(lengths: Any) -> None:
        for invariant in (False, True):
            rawmla.get_mla_metadata(place(lengths), 1, 1, enable_batch_invariant=invariant)

    equal = {f"{b} of {n}": torch.full((b,), n).int() for b, n in ((2, MOST), (64, MOST), (4096, 2**30))}
    return {
        name: partial(call, x) for name, x in {**equal, "unequal": int32(MOST, LEAST, -1, 0, MOST)}.items()
    }


def cache_calls(place: Place, layout: str) -> Calls:
    """Slots that are written, tokens that are gathered, and positions that become slots."""
    cache = place(rawmla.reference.quantize_k_cache(numbers(4, 16, 1, 576), layout))
    kv_c, k_pe = (place(numbers(12, n)) for n in (512, 64))
    slots = torch.tensor((*BLOCKS, 63, 64, 65, 2**40, -(2**40), 2**32 + 3))
    table = place(torch.tensor([BLOCKS[:3], BLOCKS[3:]], dtype=torch.int32))

    def write(slots: Any) -> None:
        rawmla.write_kv_cache(kv_c, k_pe, cache, place(slots))

    def gather(starts: tuple[int, int], lengths: tuple[int, int], firsts: tuple[int, int]) -> None:
        out = place(torch.full((50, 576), float("nan"), dtype=torch.bfloat16))
        rawmla.gather_kv_cache(
            cache, table, place(int32(*lengths)), out, workspace_starts=place(int32(*starts)),
            seq_starts=place(int32(*firsts)),
        )  # fmt: skip

    def convert(compact: bool) -> None:
        ids = place(int32(MOST, -1, 0, 1, LEAST))
        rawmla.convert_indices(place(selected(5, 2, 70)), table, 16, request_ids=ids, compact=compact)

    calls: Calls = {"int64 slots": partial(write, slots), "int32 slots": partial(write, slots.int())}
    for i, numbers_of in enumerate(
        (
            ((0, 20), (MOST, 60), (0, LEAST)),
            ((LEAST, MOST), (MOST, MOST), (LEAST, 0)),
            ((-30, 49), (60, MOST), (-20, MOST - 5)),
        )
    ):
        calls[f"gather {i}"] = partial(gather, *numbers_of)
    return {**calls, "convert": partial(convert, False), "compact": partial(convert, True)}


OPERATIONS: dict[str, Callable[[Place], Calls]] = {
    "forward": forward_calls,
    "forward, heads together": few_calls,
    "forward, splits": split_calls,
    "backward": backward_calls,
    "backward, in turns": turn_calls,
    "prefix, by TMA": prefix_calls,
    "prefix, gathered": partial(prefix_calls, x=16),
    "prefix, fp8": partial(prefix_calls, x=16, kv_cache_dtype="fp8"),
    "cache of rows": partial(kvcache_calls, page=None, appends=False),
    "cache of rows, new tokens": partial(kvcache_calls, page=None, appends=True, causal=True),
    "pages of 16": partial(kvcache_calls, page=16, appends=True, window_size=(50, 9)),
    "pages of 12": partial(kvcache_calls, page=12, appends=True, num_splits=1, causal=True),
    "pages of 12, fp8": partial(kvcache_calls, page=12, appends=True, fp8=True),
    "flex": flex_calls,
    "dense decode": partial(dense_decode_calls, h_q=64),
    "dense decode, few rows": partial(dense_decode_calls, h_q=FEW_HEADS),
    "sparse decode, bf16": partial(sparse_decode_calls, layout="bf16", h_q=64),
    "sparse decode, v32": partial(sparse_decode_calls, layout="v32", h_q=64),
    "sparse decode, few heads": partial(sparse_decode_calls, layout="model1", h_q=FEW_HEADS),
    "sparse prefill": prefill_calls,
    "metadata": metadata_calls,
    "caches": partial(cache_calls, layout="v32"),
}


@pytest.mark.parametrize("make", OPERATIONS.values(), ids=OPERATIONS)
def test_lengths_and_tables_of_any_values(make: Callable[[Place], Calls]) -> None:
    for call in make(lambda x: x.cuda()).values():
        call()
    torch.cuda.synchronize()
