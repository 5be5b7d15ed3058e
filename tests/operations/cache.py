"""Writing, gathering, quantising and dequantising caches, and converting indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

from rawmla import reference

from .caches import (
    COLUMNS,
    KINDS,
    LAYOUTS,
    PaddedCache,
    filled,
    host_cache,
    same_values,
    to_device,
    to_host,
    values,
)
from .core import Call, Operation, Sizes, spoilt, without, wrong_value
from .memory import CANARY

PAGE, NUM_BLOCKS = 64, 8


def renew(target: Any, array: np.ndarray) -> None:
    """New numbers in place."""
    target.copy_(to_device(array, target.device))


CACHE_CASES = tuple(Sizes(kind.replace(" ", "_"), kind) for kind in KINDS)
QUANTIZE_CASES = tuple(Sizes(kind, kind) for kind in LAYOUTS)
SMALL_CACHE_CASES = (*CACHE_CASES, *(Sizes(f"{case.id}_pages_of_5", case.kind, 5) for case in CACHE_CASES))
SMALL_QUANTIZE_CASES = (*QUANTIZE_CASES, *(Sizes(f"{kind}_pages_of_5", kind, 5) for kind in LAYOUTS))


def page_of(case: Sizes) -> int:
    """Tokens per page."""
    return case.n or PAGE


def new_slots(seed: int, tokens: int, page: int) -> np.ndarray:
    """Slots of a cache, some of them to be skipped."""
    slots = np.random.default_rng(seed).permutation(NUM_BLOCKS * page)[:tokens]
    slots[2::7], slots[3::11] = -1, NUM_BLOCKS * page
    return slots


def write_call(case: Sizes, device: str = "cuda", tokens: int = 40) -> Call:
    """The call of `write_kv_cache`; the inputs are the cache that it starts from."""
    rows = to_device(values((tokens, COLUMNS[case.kind])), device)
    arguments = {
        "kv_c": rows[:, :-64].contiguous(),
        "k_pe": rows[:, -64:].contiguous(),
        "slot_mapping": to_device(new_slots(0, tokens, page_of(case)), device),
    }

    def check_cache(got: tuple[Any, ...]) -> None:
        want = host_cache(case.kind, NUM_BLOCKS, page_of(case))
        host = [to_host(arguments[name]) for name in ("kv_c", "k_pe")]
        kv_c, k_pe = (x.view(ml_dtypes.bfloat16) for x in host)
        reference.write_kv_cache(kv_c, k_pe, want, to_host(arguments["slot_mapping"]))
        np.testing.assert_array_equal(to_host(got[0]).view(np.uint8), want.view(np.uint8))

    return Call(
        "write_kv_cache",
        arguments,
        ("kv_cache",),
        check_cache,
        case,
        written="kv_cache",
        fresh=lambda: PaddedCache(case.kind, NUM_BLOCKS, page_of(case), device=device).view,
    )


def write_changes(call: Call) -> Iterator[None]:
    """New rows and slots."""
    kv_c, k_pe, slots = (call.arguments[name] for name in ("kv_c", "k_pe", "slot_mapping"))
    for seed in (1, 2, 3):
        rows = values((len(slots), COLUMNS[call.inputs.kind]), seed=seed)
        renew(kv_c, rows[:, :-64].copy())
        renew(k_pe, rows[:, -64:].copy())
        renew(slots, new_slots(seed, len(slots), page_of(call.inputs)))
        yield


WRITE = Operation(
    name="write_kv_cache",
    make=write_call,
    cases=CACHE_CASES,
    small_cases=SMALL_CACHE_CASES,
    kernels=("mla_cache_write",),
    arrays=("kv_c", "k_pe", "slot_mapping"),
    any_integer=("slot_mapping",),
    floats=lambda case: ("kv_c", "k_pe"),
    strides={"kv_c": ("columns", "unaligned", "odd"), "k_pe": ("columns", "unaligned", "odd")},
    empty={"no tokens": (without("kv_c", "k_pe", "slot_mapping"), {})},
    bad={
        "another number of rows": spoilt("k_pe", lambda x: x[:-1]),
        "one slot too few": spoilt("slot_mapping", lambda x: x[:-1]),
        "another width": spoilt("kv_c", lambda x: x[:, :-8].contiguous()),
        "cache on the CPU": spoilt("kv_cache", lambda x: x.cpu()),
        "cache of int16": spoilt("kv_cache", lambda x: x.short(), TypeError),
        "cache of 3 dimensions": spoilt("kv_cache", lambda x: x[0]),
    },
    changes=write_changes,
    writes=True,
)


def gather_call(case: Sizes, device: str = "cuda", b: int = 3) -> Call:
    """The call of `gather_kv_cache`."""
    kind = case.kind
    rows = values((NUM_BLOCKS, PAGE, 1, COLUMNS[kind]))
    host = filled(kind, rows)
    draw = np.random.default_rng(0)
    table = draw.permutation(b * 2).reshape(b, 2).astype(np.int32)
    vectors = {
        "cache_seqlens": np.array([100, 0, 128], np.int32),
        "workspace_starts": np.array([1, 0, 101], np.int32),
        "seq_starts": np.array([0, 0, 7], np.int32),
    }
    arguments = {
        "kv_cache": PaddedCache.of(kind, host, device).view,
        "block_table": to_device(table, device),
        **{name: to_device(vector, device) for name, vector in vectors.items()},
    }
    shape = (b * 2 * PAGE + 2, COLUMNS[kind])

    def check_rows(got: tuple[Any, ...]) -> None:
        want = np.full(shape, CANARY, np.float32)
        lengths, starts, places = (
            to_host(arguments[name]) for name in ("cache_seqlens", "seq_starts", "workspace_starts")
        )
        now = to_host(arguments["block_table"])
        reference.gather_kv_cache(host, now, lengths, want, workspace_starts=places, seq_starts=starts)
        same_values(got[0], want)

    return Call(
        "gather_kv_cache",
        arguments,
        ("out",),
        check_rows,
        case,
        written="out",
        fresh=lambda: torch.full(shape, float(CANARY), dtype=torch.bfloat16, device=device),
    )


def gather_changes(call: Call) -> Iterator[None]:
    """New lengths, places and pages."""
    table, lengths, places, starts = (
        call.arguments[name] for name in ("block_table", "cache_seqlens", "workspace_starts", "seq_starts")
    )
    for seed, new in enumerate(((0, 0, 0), (128, 128, 128), (5, 100, 1))):
        pages = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: table.numel()]
        renew(table, pages.reshape(tuple(table.shape)).astype(np.int32))
        renew(lengths, np.array(new, np.int32))
        renew(places, np.array([0, 128, 256], np.int32))
        renew(starts, np.array([0, seed, 0], np.int32))
        yield


GATHER = Operation(
    name="gather_kv_cache",
    make=gather_call,
    cases=CACHE_CASES,
    kernels=("mla_cache_gather",),
    arrays=("kv_cache", "block_table", "cache_seqlens", "workspace_starts", "seq_starts"),
    floats=lambda case: () if case.kind in LAYOUTS else ("kv_cache",),
    strides={"block_table": ("columns", "odd")},
    out=lambda out: ((1, 1), (0, 24)),
    empty={
        "no requests": (without("block_table", "cache_seqlens", "workspace_starts", "seq_starts"), {}),
        "no rows": (without("out"), {"out": 0}),
    },
    bad={
        "one length too few": spoilt("cache_seqlens", lambda x: x[:-1]),
        "one place too few": spoilt("workspace_starts", lambda x: x[:-1]),
        "one start too few": spoilt("seq_starts", lambda x: x[:-1]),
    },
    changes=gather_changes,
    writes=True,
)


def quantize_call(case: Sizes, device: str = "cuda") -> Call:
    """The call of `quantize_k_cache`."""
    source = to_device(values((NUM_BLOCKS, page_of(case), 1, COLUMNS[case.kind])), device)

    def check_bytes(got: tuple[Any, ...]) -> None:
        want = reference.quantize_k_cache(to_host(source).view(ml_dtypes.bfloat16), case.kind)
        np.testing.assert_array_equal(to_host(got[0]), want)

    return Call("quantize_k_cache", {"k_cache": source, "layout": case.kind}, ("cache",), check_bytes, case)


def quantize_changes(call: Call) -> Iterator[None]:
    """New values."""
    source = call.arguments["k_cache"]
    for seed in (1, 2):
        renew(source, values(tuple(source.shape), seed=seed))
        yield


QUANTIZE = Operation(
    name="quantize_k_cache",
    make=quantize_call,
    cases=QUANTIZE_CASES,
    small_cases=SMALL_QUANTIZE_CASES,
    kernels=("mla_cache_write",),
    arrays=("k_cache",),
    floats=lambda case: ("k_cache",),
    strides={"k_cache": ("wide", "columns", "permuted", "unaligned", "odd")},
    out=lambda out: ((1, 1), (0, 0), (0, 0), (0, 0)),
    empty={"no blocks": (without("k_cache"), {"cache": 0})},
    bad={
        "another layout": wrong_value("layout", "v33"),
        "layout of another width": spoilt("k_cache", lambda x: x[..., :448]),
    },
    changes=quantize_changes,
)


def dequantize_call(case: Sizes, device: str = "cuda") -> Call:
    """The call of `dequantize_k_cache`."""
    host = reference.quantize_k_cache(values((NUM_BLOCKS, page_of(case), 1, COLUMNS[case.kind])), case.kind)
    source = PaddedCache.of(case.kind, host, device).view

    def check_rows(got: tuple[Any, ...]) -> None:
        rows = NUM_BLOCKS * page_of(case)
        want = np.zeros((rows, COLUMNS[case.kind]), np.float32)
        table = np.arange(NUM_BLOCKS)[None]
        reference.gather_kv_cache(to_host(source), table, [rows], want, workspace_starts=[0])
        same_values(got[0].reshape(rows, -1), want)

    return Call("dequantize_k_cache", {"cache": source, "layout": case.kind}, ("k_cache",), check_rows, case)


def dequantize_changes(call: Call) -> Iterator[None]:
    """New values."""
    source, case = call.arguments["cache"], call.inputs
    for seed in (1, 2):
        shape = (NUM_BLOCKS, page_of(case), 1, COLUMNS[case.kind])
        renew(source, reference.quantize_k_cache(values(shape, seed=seed), case.kind))
        yield


DEQUANTIZE = Operation(
    name="dequantize_k_cache",
    make=dequantize_call,
    cases=QUANTIZE_CASES,
    small_cases=SMALL_QUANTIZE_CASES,
    kernels=("mla_cache_gather",),
    arrays=("cache",),
    floats=lambda case: (),
    empty={"no blocks": (without("cache"), {"k_cache": 0})},
    bad={"another layout": wrong_value("layout", "v33")},
    changes=dequantize_changes,
)


# ---- indices

CONVERT_CASES = (Sizes("slots", n=0), Sizes("compact", n=1))


def convert_call(case: Sizes, device: str = "cuda") -> Call:
    """The call of `convert_indices`."""
    compact = bool(case.n)
    draw = np.random.default_rng(0)
    positions = draw.integers(-9, 700, (3, 2, 300)).astype(np.int32)
    arguments = {
        "indices": to_device(positions, device),
        "block_table": to_device(draw.integers(-1, 50, (5, 10)).astype(np.int32), device),
        "page_block_size": PAGE,
        "request_ids": to_device(np.array([4, 0, 1], np.int32), device),
        "compact": compact,
    }

    def check_slots(got: tuple[Any, ...]) -> None:
        indices, table, ids = (to_host(arguments[x]) for x in ("indices", "block_table", "request_ids"))
        want = reference.convert_indices(indices, table, PAGE, request_ids=ids, compact=compact)
        for one, wanted in zip(got, want if compact else (want,), strict=True):
            np.testing.assert_array_equal(to_host(one), wanted)

    return Call(
        "convert_indices", arguments, ("slots", "counts") if compact else ("slots",), check_slots, case
    )


def convert_changes(call: Call) -> Iterator[None]:
    """New positions and pages."""
    indices, table = call.arguments["indices"], call.arguments["block_table"]
    for seed in (1, 2):
        draw = np.random.default_rng(seed)
        renew(indices, draw.integers(-9, 700, tuple(indices.shape)).astype(np.int32))
        renew(table, draw.integers(-1, 50, tuple(table.shape)).astype(np.int32))
        yield


CONVERT = Operation(
    name="convert_indices",
    make=convert_call,
    cases=CONVERT_CASES,
    kernels=("mla_convert_indices",),
    arrays=("indices", "block_table", "request_ids"),
    floats=lambda case: (),
    strides={
        "indices": ("wide", "columns", "permuted", "unaligned", "odd"),
        "block_table": ("columns", "unaligned", "odd"),
    },
    out=lambda out: ((1, 1), (1, 2), (3, 4)),
    empty={
        "no rows": (without("indices", "request_ids"), {"slots": 0, "counts": 0}),
        "no columns": (without("indices", axis=2), {"slots": 2}),
    },
    bad={
        "page of 0 tokens": wrong_value("page_block_size", 0),
        "another number of requests": spoilt("request_ids", lambda x: x[:-1]),
    },
    changes=convert_changes,
)
