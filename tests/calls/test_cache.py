"""The calls around decoding: what they alone refuse, and what their launches get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rawmla
from calls.fakes import Arguments, FakeArray, World, change, put
from calls.refusals import Refusal, check_all_refused

V32, MODEL1 = ("uint8", 656), ("uint8", 584)
WIDE, NARROW = ("bfloat16", 576), ("bfloat16", 512)
INT32_MAX = 2**31 - 1


def cache(kind: tuple[str, int], num_blocks: int = 10, page: int = 16) -> FakeArray:
    """A cache of a kind: its dtype and its columns."""
    dtype, columns = kind
    return FakeArray((num_blocks, page, 1, columns), dtype, ptr=0xA000)


def quantize_arguments(layout: str = "v32") -> Arguments:
    columns, kind = (576, V32) if layout == "v32" else (512, MODEL1)
    return {
        "k_cache": FakeArray((10, 16, 1, columns), "bfloat16", ptr=0x1000),
        "layout": layout,
        "out": cache(kind),
    }


def dequantize_arguments() -> Arguments:
    return {"cache": cache(V32), "layout": "v32"}


def write_arguments(kind: tuple[str, int] = V32) -> Arguments:
    d_nope = 512 if kind in (V32, WIDE) else 448
    return {
        "kv_c": FakeArray((33, d_nope), "bfloat16", ptr=0x1000),
        "k_pe": FakeArray((33, 64), "bfloat16", ptr=0x2000),
        "kv_cache": cache(kind),
        "slot_mapping": FakeArray((33,), "int64", ptr=0x3000),
    }


def gather_arguments(kind: tuple[str, int] = V32) -> Arguments:
    return {
        "kv_cache": cache(kind),
        "block_table": FakeArray((3, 7), ptr=0x2000),
        "cache_seqlens": FakeArray((3,), ptr=0x3000),
        "out": FakeArray((100, 576 if kind in (V32, WIDE) else 512), "bfloat16", ptr=0x4000),
        "workspace_starts": FakeArray((3,), ptr=0x5000),
        "seq_starts": FakeArray((3,), ptr=0x6000),
    }


def convert_arguments() -> Arguments:
    return {
        "indices": FakeArray((5, 2, 100), ptr=0x1000),
        "block_table": FakeArray((6, 7), ptr=0x2000),
        "page_block_size": 64,
        "request_ids": FakeArray((5,), ptr=0x3000),
        "compact": True,
        "out": FakeArray((5, 2, 100), ptr=0x4000),
    }


def merge_arguments(parts: int = 3) -> Arguments:
    return {
        "outs": [FakeArray((2, 3, 8, 512), "bfloat16", ptr=0x1000 + 16 * i) for i in range(parts)],
        "lses": [FakeArray((2, 8, 3), "float32", ptr=0x2000 + 4 * i) for i in range(parts)],
        "out": FakeArray((2, 3, 8, 512), "bfloat16", ptr=0x3000),
    }


# ---- what is refused


def int64(*names: str) -> list[Refusal]:
    """The dtype that indices have by mistake."""
    return [(name, TypeError, "int32, got int64", {"dtype": "int64"}) for name in names]


def check_refused(world: World, make: Callable[[], Arguments], function: str, rows: list[Refusal]) -> None:
    """The rows, for one of the functions here."""
    check_all_refused(world, getattr(rawmla, function), make, rows)


# What is refused of a cache of format "v32": the exception, the text, and the change.
BAD_CACHES: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "got float16", {"dtype": "float16"}),
    (ValueError, "got uint8 [10, 16, 656]", {"shape": (10, 16, 656)}),
    (ValueError, "shape [num_blocks, ", {"shape": (10, 16, 2, 656)}),
    (ValueError, "656", {"shape": (10, 16, 1, 640)}),
    (ValueError, "page_block_size at least 1", {"shape": (10, 0, 1, 656)}),
    (ValueError, "contiguous tokens", {"strides": (16 * 656, 656, 656, 2)}),
    (ValueError, "contiguous tokens", {"strides": (16 * 672, 672, 656, 1)}),
    (ValueError, "elements that do not overlap", {"strides": (16 * 656 - 16, 656, 656, 1)}),
    (ValueError, "strides not negative", {"strides": (-16 * 656, 656, 656, 1)}),
    (ValueError, "multiples of 16 bytes", {"strides": (16 * 656 + 8, 656, 656, 1)}),
    (ValueError, "got address 0xa008", {"ptr": 0xA008}),
    (ValueError, "blocks less than 2 GiB apart", {"strides": (2**31, 656, 656, 1)}),
    (ValueError, f"at most {INT32_MAX} tokens", {"shape": (2**28, 16, 1, 656)}),
]


@pytest.mark.parametrize(
    ("make", "function", "name"),
    (
        (quantize_arguments, "quantize_k_cache", "out"),
        (dequantize_arguments, "dequantize_k_cache", "cache"),
        (write_arguments, "write_kv_cache", "kv_cache"),
        (gather_arguments, "gather_kv_cache", "kv_cache"),
    ),
)
def test_caches(world: World, make: Callable[[], Arguments], function: str, name: str) -> None:
    check_refused(world, make, function, [(name, *row) for row in BAD_CACHES])


def pages_of_2_gib(arguments: Arguments) -> None:
    """One page, whose result is not given."""
    arguments["out"] = None
    change("k_cache", shape=(1, 3_273_604, 1, 576), strides=(576, 576, 576, 1))(arguments)


def test_quantizing(world: World) -> None:
    rows: list[Refusal] = [
        ("layout", TypeError, "'v32' or 'model1', got int", 1),
        ("layout", ValueError, "'v32' or 'model1', got 'v4'", "v4"),
        ("k_cache", ValueError, "512]", put("layout", "model1")),
        ("k_cache", ValueError, "page_block_size at least 1", {"shape": (10, 0, 1, 576)}),
        ("k_cache", ValueError, "strides below 2**31", {"strides": (2**31, 576, 576, 1)}),
        ("k_cache", ValueError, f"at most {INT32_MAX} tokens", {"shape": (2**28, 16, 1, 576)}),
        ("k_cache", ValueError, "less than 2 GiB in 'v32', got page_block_size 3273604", pages_of_2_gib),
        ("out", ValueError, "[10, 16, 1, 656]", {"shape": (9, 16, 1, 656)}),
    ]
    check_refused(world, quantize_arguments, "quantize_k_cache", rows)
    rows = [
        ("layout", ValueError, "'v32' or 'model1'", "bf16"),
        ("cache", ValueError, "584]", put("layout", "model1")),
        ("cache", TypeError, "float8_e4m3fn or uint8 or int8, got bfloat16", cache(WIDE)),
    ]
    check_refused(world, dequantize_arguments, "dequantize_k_cache", rows)


def test_writing(world: World) -> None:
    rows: list[Refusal] = [
        ("kv_c", TypeError, "bfloat16, got float32", {"dtype": "float32"}),
        ("k_pe", TypeError, "bfloat16, got float32", {"dtype": "float32"}),
        ("slot_mapping", TypeError, "int32 or int64, got int16", {"dtype": "int16"}),
        ("kv_c", ValueError, "[T, 512] for a cache of uint8 with last dimension 656", {"shape": (33, 448)}),
        *[
            (
                "kv_c",
                ValueError,
                "[T, 448]",
                lambda arguments, kind=kind: arguments.update(kv_cache=cache(kind)),
            )
            for kind in (MODEL1, NARROW)
        ],
        ("k_pe", ValueError, "[33, 64]", {"shape": (32, 64)}),
        ("kv_c", ValueError, "strides below 2**31", {"strides": (2**31, 1)}),
        ("slot_mapping", ValueError, "[33]", {"shape": (34,)}),
    ]
    check_refused(world, write_arguments, "write_kv_cache", rows)


def test_gathering(world: World) -> None:
    rows: list[Refusal] = [
        *int64("block_table", "cache_seqlens", "workspace_starts", "seq_starts"),
        ("out", TypeError, "bfloat16, got float16", {"dtype": "float16"}),
        ("block_table", ValueError, "both below 2**31", {"shape": (3, 2**31), "strides": (0, 1)}),
        ("cache_seqlens", ValueError, "[3]", {"shape": (4,)}),
        ("workspace_starts", ValueError, "[3]", {"shape": (4,)}),
        ("out", ValueError, "[rows, 576]", {"shape": (100, 512)}),
        ("out", ValueError, "contiguous last dimension", {"strides": (1, 100)}),
        ("out", ValueError, "do not overlap", {"strides": (570, 1)}),
        ("out", ValueError, "row stride that is a multiple of 8", {"strides": (580, 1)}),
        ("out", ValueError, "16-byte aligned address", {"ptr": 0x4008}),
    ]
    check_refused(world, gather_arguments, "gather_kv_cache", rows)


def table_too_short(arguments: Arguments) -> None:
    """Without request_ids the i-th of the requests has row i."""
    arguments.update(request_ids=None, block_table=arguments["block_table"].but(shape=(4, 7)))


def test_converting(world: World) -> None:
    rows: list[Refusal] = [
        *int64("indices", "block_table", "request_ids", "out"),
        ("indices", ValueError, "[T, topk] or", {"shape": (100,)}),
        ("block_table", ValueError, "[at least 5, max_blocks]", table_too_short),
        ("page_block_size", ValueError, "at least 1, got 0", 0),
        ("page_block_size", ValueError, "less than 2**31", 2**31),
        ("request_ids", ValueError, "[5]", {"shape": (6,)}),
        ("out", ValueError, "[5, 2, 100] (b of indices, s_q of in", {"shape": (5, 2, 99)}),
        ("out", ValueError, "do not overlap", {"strides": (200, 90, 1)}),
    ]
    check_refused(world, convert_arguments, "convert_indices", rows)


def part(name: str, i: int, **changes: Any) -> Callable[[Arguments], None]:
    """Change one of the parts."""

    def apply(arguments: Arguments) -> None:
        arguments[name][i] = arguments[name][i].but(**changes)

    return apply


def test_merging(world: World) -> None:
    rows: list[Refusal] = [
        ("outs", TypeError, "a list or tuple of arrays", FakeArray((3, 2, 3, 8, 512), "bfloat16")),
        ("lses", TypeError, "a list or tuple of arrays, got NoneType", None),
        ("lses", ValueError, "at least 1", lambda arguments: arguments.update(outs=[], lses=[])),
        ("lses", ValueError, "got 2 lses and 3 outs", lambda arguments: arguments["lses"].pop()),
        ("outs[0]", TypeError, "bfloat16 or float16 or", part("outs", 0, dtype="float64")),
        ("outs[0]", ValueError, "[b, s_q, h_q, 512]", part("outs", 0, shape=(2, 3, 8, 576))),
        ("outs[1]", TypeError, "the dtype of outs[0]", part("outs", 1, dtype="float16")),
        ("outs[2]", ValueError, "[2, 3, 8, 512]", part("outs", 2, shape=(2, 3, 9, 512))),
        ("outs[1]", ValueError, "multiples of 16 bytes", part("outs", 1, ptr=0x1008)),
        ("outs[1]", ValueError, "multiples of 16 bytes", part("outs", 1, strides=(12288, 4096, 516, 1))),
        ("lses[1]", TypeError, "float32, got float16", part("lses", 1, dtype="float16")),
        ("lses[1]", ValueError, "[2, 8, 3] (b of outs", part("lses", 1, shape=(2, 3, 8))),
        ("out", TypeError, "the dtype of outs[0], got float32", {"dtype": "float32"}),
        ("out", ValueError, "[2, 3, 8, 512]", {"shape": (2, 3, 7, 512)}),
        ("out", ValueError, "do not overlap", {"strides": (0, 4096, 512, 1)}),
    ]
    check_refused(world, merge_arguments, "merge_attn_states", rows)


# ---- what launches get


PLACE = {"device": 0, "stream": 0x51}


def only_launch(world: World) -> Arguments:
    """The launch without its place, which is always the same."""
    (launched,) = world.around
    assert launched.pop("capturing")() is False
    assert {name: launched.pop(name) for name in PLACE} == PLACE
    return launched


class TestQuantize:
    def test_ml_dtypes_missing(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def empty(shape: tuple[int, ...], dtype: str, device: int) -> FakeArray:
            raise ImportError("No module named 'ml_dtypes'")

        monkeypatch.setattr(world.framework, "empty", empty)
        with pytest.raises(rawmla.MissingDependencyError, match="needs ml_dtypes"):
            rawmla.dequantize_k_cache(**dequantize_arguments())


class TestGather:
    def test_table_of_no_blocks(self, world: World) -> None:
        """Its address is 0; no token has a page, which is not the same as a cache without requests."""
        arguments = gather_arguments()
        change("block_table", shape=(3, 0), ptr=0)(arguments)
        rawmla.gather_kv_cache(**arguments)
        launched = only_launch(world)
        _, is_paged = launched["positional"]
        assert is_paged and (launched["block_table"], launched["table_width"]) == (0, 0)


class TestConvert:
    def test_nothing_to_do(self, world: World) -> None:
        slots, counts = rawmla.convert_indices(FakeArray((6, 0)), FakeArray((6, 7)), 53, compact=True)
        assert slots.shape == (6, 0) and world.framework.filled == [(counts, 0)] and not world.around


class TestMerge:
    @pytest.mark.parametrize(("parts", "groups"), [(32, []), (33, [2]), (1025, [33, 2])])
    def test_many_parts(self, world: World, parts: int, groups: list[int]) -> None:
        """Each state in scratch is written once, before it is read, and none meets another."""
        out, _ = rawmla.merge_attn_states(*list(merge_arguments(parts).values())[:2])
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
