"""The calls around decoding: what they alone refuse, and what their launches get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

import rawmla
from calls.fakes import Arguments, FakeArray, World, change, put
from calls.refusals import Refusal, check_all_refused
from calls.suite import all_arguments, run, tensors_of
from operations import Operation
from operations.cache import CONVERT, DEQUANTIZE, GATHER, QUANTIZE, WRITE
from operations.merge import MERGE

INT32_MAX = 2**31 - 1
V32 = FakeArray((8, 64, 1, 656), "uint8", ptr=0xA000)


def check_refused(world: World, operation: Operation, rows: list[Refusal], **more: Any) -> None:
    """Check rows for the first case of an operation; ``more``: further arguments, or others."""
    function = getattr(rawmla, tensors_of(operation).function)
    check_all_refused(world, function, lambda: {**all_arguments(operation), **more}, rows)


def of_dtype(dtype: str, *names: str) -> list[Refusal]:
    """The dtype that arrays have by mistake."""
    return [(name, TypeError, f", got {dtype}", {"dtype": dtype}) for name in names]


# ---- what is refused


# What is refused of a cache of format "v32": the text, and the change.
BAD_CACHES: list[tuple[str, Any]] = [
    ("page_block_size at least 1", {"shape": (8, 0, 1, 656)}),
    ("contiguous tokens", {"strides": (64 * 672, 672, 656, 1)}),
    ("elements that do not overlap", {"strides": (64 * 656 - 16, 656, 656, 1)}),
    ("strides not negative", {"strides": (-64 * 656, 656, 656, 1)}),
    ("multiples of 16 bytes", {"strides": (64 * 656 + 8, 656, 656, 1)}),
    ("got address 0xa008", {"ptr": 0xA008}),
    ("blocks less than 2 GiB apart", {"strides": (2**31, 656, 656, 1)}),
    (f"at most {INT32_MAX} tokens", {"shape": (2**28, 16, 1, 656)}),
    ("shape [num_blocks, ", {"shape": (8, 64, 2, 656)}),
    ("656", {"shape": (8, 64, 1, 640)}),
]


@pytest.mark.parametrize(
    ("operation", "name"),
    ((QUANTIZE, "out"), (DEQUANTIZE, "cache"), (WRITE, "kv_cache"), (GATHER, "kv_cache")),
    ids=lambda x: getattr(x, "name", x),
)
def test_caches(world: World, operation: Operation, name: str) -> None:
    rows = [(name, ValueError, *row) for row in BAD_CACHES]
    check_refused(world, operation, [*of_dtype("float16", name), *rows], **{name: V32})


def pages_of_2_gib(arguments: Arguments) -> None:
    """One page, whose result is not given."""
    arguments["out"] = None
    change("k_cache", shape=(1, 3_273_604, 1, 576), strides=(576, 576, 576, 1))(arguments)


def test_quantizing(world: World) -> None:
    rows: list[Refusal] = [
        ("layout", TypeError, "'v32' or 'model1', got int", 1),
        ("k_cache", ValueError, "page_block_size at least 1", {"shape": (8, 0, 1, 576)}),
        ("k_cache", ValueError, "strides below 2**31", {"strides": (2**31, 576, 576, 1)}),
        ("k_cache", ValueError, f"at most {INT32_MAX} tokens", {"shape": (2**28, 16, 1, 576)}),
        ("k_cache", ValueError, "less than 2 GiB in 'v32', got page_block_size 3273604", pages_of_2_gib),
        ("out", ValueError, "[8, 64, 1, 656]", {"shape": (9, 64, 1, 656)}),
    ]
    check_refused(world, QUANTIZE, rows, out=V32)
    rows = [*of_dtype("bfloat16", "cache"), ("cache", ValueError, "584]", put("layout", "model1"))]
    check_refused(world, DEQUANTIZE, rows)


def over(dtype: str, columns: int) -> Callable[[Arguments], None]:
    """The same call over a cache of another kind."""
    return change("kv_cache", shape=(8, 64, 1, columns), dtype=dtype)


def test_writing(world: World) -> None:
    rows: list[Refusal] = [
        *of_dtype("float32", "kv_c", "k_pe"),
        *of_dtype("int16", "slot_mapping"),
        ("kv_c", ValueError, "[T, 448]", over("uint8", 584)),
        ("kv_c", ValueError, "[T, 448]", over("bfloat16", 512)),
        ("kv_c", ValueError, "strides below 2**31", {"strides": (2**31, 1)}),
    ]
    check_refused(world, WRITE, rows, kv_cache=V32)


def test_gathering(world: World) -> None:
    rows: list[Refusal] = [
        *of_dtype("int64", "block_table", "cache_seqlens", "workspace_starts", "seq_starts"),
        *of_dtype("float16", "out"),
        ("block_table", ValueError, "both below 2**31", {"shape": (3, 2**31), "strides": (0, 1)}),
        ("out", ValueError, "do not overlap", {"strides": (570, 1)}),
        ("out", ValueError, "row stride that is a multiple of 8", {"strides": (580, 1)}),
        ("out", ValueError, "16-byte aligned address", {"ptr": 0x4008}),
    ]
    check_refused(world, GATHER, rows)


def table_too_short(arguments: Arguments) -> None:
    """Without request_ids the i-th of the requests has row i."""
    arguments.update(request_ids=None, block_table=arguments["block_table"].but(shape=(2, 10)))


def test_converting(world: World) -> None:
    rows: list[Refusal] = [
        *of_dtype("int64", "indices", "block_table", "request_ids", "out"),
        ("block_table", ValueError, "[at least 3, max_blocks]", table_too_short),
        ("page_block_size", ValueError, "less than 2**31", 2**31),
        ("out", ValueError, "do not overlap", {"strides": (600, 290, 1)}),
    ]
    check_refused(world, CONVERT, rows, out=FakeArray((3, 2, 300)))


def part(name: str, i: int, **changes: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments[name][i] = arguments[name][i].but(**changes)

    return apply


def test_merging(world: World) -> None:
    rows: list[Refusal] = [
        ("lses", TypeError, "a list or tuple of arrays, got NoneType", None),
        ("outs[0]", TypeError, "bfloat16 or float16 or", part("outs", 0, dtype="float64")),
        ("outs[0]", ValueError, "[b, s_q, h_q, 512]", part("outs", 0, shape=(2, 3, 16, 576))),
        ("outs[1]", TypeError, "the dtype of outs[0]", part("outs", 1, dtype="float16")),
        ("outs[1]", ValueError, "multiples of 16 bytes", part("outs", 1, ptr=0x1008)),
        ("outs[1]", ValueError, "multiples of 16 bytes", part("outs", 1, strides=(24768, 8256, 516, 1))),
        ("lses[1]", TypeError, "float32, got float16", part("lses", 1, dtype="float16")),
        ("lses[1]", ValueError, "[2, 16, 3] (b of outs", part("lses", 1, shape=(2, 3, 16))),
        ("out", TypeError, "the dtype of outs[0], got float32", {"dtype": "float32"}),
    ]
    check_refused(world, MERGE, rows, out=FakeArray((2, 3, 16, 512), "bfloat16", ptr=0x3000))


# ---- what launches get


def test_ml_dtypes_missing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ImportError("No module named 'ml_dtypes'")
    monkeypatch.setattr(world.framework, "empty", Mock(side_effect=missing))
    with pytest.raises(rawmla.MissingDependencyError, match="needs ml_dtypes"):
        run(DEQUANTIZE, all_arguments(DEQUANTIZE))


def test_gather_over_a_table_of_no_blocks(world: World) -> None:
    """Its address is 0; no token has a page, which is not the same as a cache without requests."""
    run(GATHER, all_arguments(GATHER) | {"block_table": FakeArray((3, 0), ptr=0)})
    (launched,) = world.around
    _, is_paged = launched["positional"]
    assert is_paged and (launched["block_table"], launched["table_width"]) == (0, 0)


def test_no_indices_to_convert(world: World) -> None:
    slots, counts = rawmla.convert_indices(FakeArray((6, 0)), FakeArray((6, 7)), 53, compact=True)
    assert slots.shape == (6, 0) and world.framework.filled == [(counts, 0)] and not world.around


@pytest.mark.parametrize(("parts", "groups"), [(32, []), (33, [2]), (1025, [33, 2])])
def test_merge_of_many_parts(world: World, parts: int, groups: list[int]) -> None:
    """Each state in scratch is written once, before it is read, and none meets another."""
    outs = [FakeArray((2, 3, 8, 512), "bfloat16", ptr=0x1000 + 16 * i) for i in range(parts)]
    lses = [FakeArray((2, 8, 3), "float32", ptr=0x2000 + 4 * i) for i in range(parts)]
    out, _ = rawmla.merge_attn_states(outs, lses)
    state_bytes = 48 * 2048 + 48 * 4
    scratch = [array for array in world.framework.allocated if array.dtype == "uint8"]
    assert [array.shape for array in scratch] == ([(sum(groups) * state_bytes,)] if groups else [])
    assert len(world.around) == sum(groups) + 1
    ready = set()
    for launched in world.around:
        inputs, merged, dtype, out_dtype = launched["positional"]
        assert 1 <= len(inputs) <= 32
        if inputs[0].out >= 1 << 24:
            assert dtype == "float32" and {one.out for one in inputs} <= ready
        else:
            assert dtype == "bfloat16"
        if merged.out != out.ptr:
            assert out_dtype == "float32" and (merged.out - scratch[0].ptr) % state_bytes == 0
            assert merged.lse == merged.out + 48 * 2048 and merged.out not in ready
            ready.add(merged.out)
    assert len(ready) == sum(groups) and world.around[-1]["positional"][1].out == out.ptr
