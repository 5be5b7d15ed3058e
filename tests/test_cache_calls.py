"""The calls around decoding: every wrong argument gets its error and nothing is launched; with stand-ins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from calls.fakes import FakeArray, FakeFramework, contiguous

import rawmla
from rawmla.call import arrays, frameworks
from rawmla.kernels import mla_cache_gather as cache_gather
from rawmla.kernels import mla_cache_write as cache_write
from rawmla.kernels import mla_convert_indices as convert_indices
from rawmla.kernels import mla_merge_states as merge_states

Arguments = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Array(FakeArray):
    """Can be cut and reshaped as an allocation of a cache is."""

    def __getitem__(self, key: tuple[slice, slice]) -> Array:
        everything, columns = key
        assert everything == slice(None) and columns.start is columns.step is None
        strides = self.strides or contiguous(self.shape)
        return dataclasses.replace(self, shape=(self.shape[0], columns.stop), strides=strides)

    def reshape(self, *shape: int) -> Array:
        assert self.strides is not None and shape[0] == self.shape[0]
        return dataclasses.replace(self, shape=shape, strides=(self.strides[0], *contiguous(shape)[1:]))


class Framework(FakeFramework):
    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Array:
        made = super().empty(shape, dtype, device)
        return Array(made.shape, made.dtype, device=device, ptr=made.ptr, framework=self)


@dataclasses.dataclass
class World:
    """The framework of all arrays and the launches of a test."""

    framework: Framework
    launches: list[Arguments]

    @property
    def untouched(self) -> bool:
        """Nothing was allocated, filled or launched."""
        return not (self.framework.allocated or self.framework.filled or self.launches)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(Framework(), [])

    def read(x: Array, name: str) -> frameworks.Fields:
        strides = contiguous(x.shape) if x.strides is None else x.strides
        return x.ptr, x.shape, strides, x.dtype, x.device, x.framework or made.framework, x

    def launch(*positional: Any, **arguments: Any) -> None:
        made.launches.append({"positional": positional, **arguments})

    monkeypatch.setitem(arrays.READERS, Array, read)
    for module in (cache_write, cache_gather, convert_indices, merge_states):
        monkeypatch.setattr(module, "launch", launch)
    return made


V32, MODEL1 = ("uint8", 656), ("uint8", 584)
WIDE, NARROW = ("bfloat16", 576), ("bfloat16", 512)


def cache(kind: tuple[str, int], num_blocks: int = 10, page: int = 16) -> Array:
    return Array((num_blocks, page, 1, kind[1]), kind[0], ptr=0xA000)


def quantize_arguments(layout: str = "v32") -> Arguments:
    columns, kind = (576, V32) if layout == "v32" else (512, MODEL1)
    return {
        "k_cache": Array((10, 16, 1, columns), "bfloat16", ptr=0x1000),
        "layout": layout,
        "out": cache(kind),
    }


def dequantize_arguments() -> Arguments:
    return {"cache": cache(V32), "layout": "v32"}


def write_arguments(kind: tuple[str, int] = V32) -> Arguments:
    d_nope = 512 if kind in (V32, WIDE) else 448
    return {
        "kv_c": Array((33, d_nope), "bfloat16", ptr=0x1000),
        "k_pe": Array((33, 64), "bfloat16", ptr=0x2000),
        "kv_cache": cache(kind),
        "slot_mapping": Array((33,), "int64", ptr=0x3000),
    }


def gather_arguments(kind: tuple[str, int] = V32) -> Arguments:
    return {
        "kv_cache": cache(kind),
        "block_table": Array((3, 7), ptr=0x2000),
        "cache_seqlens": Array((3,), ptr=0x3000),
        "out": Array((100, 576 if kind in (V32, WIDE) else 512), "bfloat16", ptr=0x4000),
        "workspace_starts": Array((3,), ptr=0x5000),
        "seq_starts": Array((3,), ptr=0x6000),
    }


def convert_arguments() -> Arguments:
    return {
        "indices": Array((5, 2, 100), ptr=0x1000),
        "block_table": Array((6, 7), ptr=0x2000),
        "page_block_size": 64,
        "request_ids": Array((5,), ptr=0x3000),
        "compact": True,
        "out": Array((5, 2, 100), ptr=0x4000),
    }


def merge_arguments(parts: int = 3) -> Arguments:
    return {
        "outs": [Array((2, 3, 8, 512), "bfloat16", ptr=0x1000 + 16 * i) for i in range(parts)],
        "lses": [Array((2, 8, 3), "float32", ptr=0x2000 + 4 * i) for i in range(parts)],
        "out": Array((2, 3, 8, 512), "bfloat16", ptr=0x3000),
    }


def change(name: str, **changes: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update({name: arguments[name].but(**changes)})


def put(name: str, value: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update({name: value})


def both(*edits: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        for edit in edits:
            edit(arguments)

    return apply


def change_part(name: str, i: int, **changes: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments[name][i] = arguments[name][i].but(**changes)

    return apply


OTHER = Framework("other", stream=0x99)
BAD_CACHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dtype": "float16"}, TypeError, "expected dtype .*, got float16"),
    ({"shape": (10, 16, 656)}, ValueError, r"expected shape \[num_blocks, .*got uint8 \[10, 16, 656\]"),
    ({"shape": (10, 16, 2, 656)}, ValueError, "expected shape"),
    ({"shape": (10, 16, 1, 640)}, ValueError, "expected shape .* 656"),
    ({"shape": (10, 0, 1, 656)}, ValueError, "page_block_size at least 1"),
    ({"strides": (16 * 656, 656, 656, 2)}, ValueError, "expected contiguous tokens"),
    ({"strides": (16 * 672, 672, 656, 1)}, ValueError, "expected contiguous tokens"),
    ({"strides": (16 * 656 - 16, 656, 656, 1)}, ValueError, "elements that do not overlap"),
    ({"strides": (-16 * 656, 656, 656, 1)}, ValueError, "strides not negative"),
    ({"strides": (16 * 656 + 8, 656, 656, 1)}, ValueError, "multiples of 16 bytes, .* got address"),
    ({"ptr": 0xA008}, ValueError, "multiples of 16 bytes, .* got address 0xa008"),
    ({"strides": (2**31, 656, 656, 1)}, ValueError, "blocks less than 2 GiB apart"),
    ({"shape": (2**28, 16, 1, 656)}, ValueError, "expected at most 2147483647 tokens"),
]
BAD_CALLS: list[tuple[Callable[[], Arguments], str, Any, type[Exception], str]] = [
    (quantize_arguments, "quantize_k_cache", edit, error, text)
    for edit, error, text in (
        (put("layout", 1), TypeError, "layout: expected 'v32' or 'model1', got int"),
        (put("layout", "v4"), ValueError, "layout: expected 'v32' or 'model1', got 'v4'"),
        (put("layout", "model1"), ValueError, r"k_cache: expected shape .* 512\]"),
        (put("k_cache", 3), TypeError, "k_cache: expected a torch tensor"),
        (change("k_cache", dtype="float16"), TypeError, "k_cache: expected dtype bfloat16, got float16"),
        (change("k_cache", shape=(10, 16, 576)), ValueError, "k_cache: expected shape"),
        (change("k_cache", shape=(10, 0, 1, 576)), ValueError, "k_cache: .*page_block_size at least 1"),
        (
            change("k_cache", strides=(9999, 600, 576, 2)),
            ValueError,
            "k_cache: expected a contiguous last dimension",
        ),
        (
            change("k_cache", strides=(2**31, 576, 576, 1)),
            ValueError,
            r"k_cache: expected strides below 2\*\*31",
        ),
        (
            change("k_cache", shape=(2**28, 16, 1, 576)),
            ValueError,
            "k_cache: expected at most 2147483647 tokens",
        ),
        (
            both(
                put("out", None),
                change("k_cache", shape=(1, 3_273_604, 1, 576), strides=(576, 576, 576, 1)),
            ),
            ValueError,
            "k_cache: expected pages of less than 2 GiB in 'v32', got page_block_size 3273604",
        ),
        (change("out", shape=(9, 16, 1, 656)), ValueError, r"out: expected shape \[10, 16, 1, 656\]"),
        (
            change("out", dtype="bfloat16"),
            TypeError,
            "out: expected dtype float8_e4m3fn or uint8 or int8, got",
        ),
        (change("out", device=1), ValueError, "out: expected .* cuda:0, the device of k_cache"),
        (change("out", framework=OTHER), ValueError, "out: expected a fake array, as k_cache is"),
    )
]
BAD_CALLS += [
    (dequantize_arguments, "dequantize_k_cache", edit, error, text)
    for edit, error, text in (
        (put("layout", "bf16"), ValueError, "layout: expected"),
        (put("layout", "model1"), ValueError, r"cache: expected shape .* 584\]"),
        (
            put("cache", cache(WIDE)),
            TypeError,
            "cache: expected dtype float8_e4m3fn or uint8 or int8, got bfloat16",
        ),
    )
]
BAD_CALLS += [
    (make, name, change(argument, **changes), error, f"{argument}: .*{text}")
    for make, name, argument in (
        (quantize_arguments, "quantize_k_cache", "out"),
        (dequantize_arguments, "dequantize_k_cache", "cache"),
        (write_arguments, "write_kv_cache", "kv_cache"),
        (gather_arguments, "gather_kv_cache", "kv_cache"),
    )
    for changes, error, text in BAD_CACHES
]
BAD_CALLS += [
    (write_arguments, "write_kv_cache", edit, error, text)
    for edit, error, text in (
        (change("kv_c", dtype="float32"), TypeError, "kv_c: expected dtype bfloat16, got float32"),
        (change("k_pe", dtype="float32"), TypeError, "k_pe: expected dtype bfloat16, got float32"),
        (change("kv_c", shape=(33, 448)), ValueError, r"kv_c: expected shape \[T, 512\] .* dimension 656"),
        (put("kv_cache", cache(MODEL1)), ValueError, r"kv_c: expected shape \[T, 448\] .* dimension 584"),
        (put("kv_cache", cache(NARROW)), ValueError, r"kv_c: expected shape \[T, 448\]"),
        (change("kv_c", shape=(33, 1, 512)), ValueError, "kv_c: expected shape"),
        (change("k_pe", shape=(32, 64)), ValueError, r"k_pe: expected shape \[33, 64\]"),
        (change("kv_c", strides=(1024, 2)), ValueError, "kv_c: expected a contiguous last dimension"),
        (change("k_pe", strides=(128, 2)), ValueError, "k_pe: expected a contiguous last dimension"),
        (change("kv_c", strides=(2**31, 1)), ValueError, r"kv_c: expected strides below 2\*\*31"),
        (
            change("slot_mapping", dtype="int16"),
            TypeError,
            "slot_mapping: expected dtype int32 or int64, got int16",
        ),
        (change("slot_mapping", shape=(34,)), ValueError, r"slot_mapping: expected shape \[33\]"),
        (change("slot_mapping", strides=(2,)), ValueError, "slot_mapping: expected a contiguous array"),
        (change("kv_c", device=1), ValueError, "kv_c: expected .* cuda:0, the device of kv_cache"),
        (change("k_pe", device=1), ValueError, "k_pe: expected an array on device cuda:0"),
        (change("slot_mapping", framework=OTHER), ValueError, "slot_mapping: expected a fake array"),
    )
]
BAD_CALLS += [
    (gather_arguments, "gather_kv_cache", edit, error, text)
    for edit, error, text in (
        (change("block_table", dtype="int64"), TypeError, "block_table: expected dtype int32, got int64"),
        (change("block_table", shape=(21,)), ValueError, r"block_table: expected shape \[b, max_blocks\]"),
        (
            change("block_table", shape=(3, 2**31), strides=(0, 1)),
            ValueError,
            r"block_table: expected shape \[b, max_blocks\], both below 2\*\*31",
        ),
        (
            change("block_table", strides=(14, 2)),
            ValueError,
            "block_table: expected a contiguous last dimension",
        ),
        (change("cache_seqlens", dtype="int64"), TypeError, "cache_seqlens: expected dtype int32, got int64"),
        (change("cache_seqlens", shape=(4,)), ValueError, r"cache_seqlens: expected shape \[3\]"),
        (change("workspace_starts", shape=(4,)), ValueError, r"workspace_starts: expected shape \[3\]"),
        (change("seq_starts", strides=(2,)), ValueError, "seq_starts: expected a contiguous array"),
        (change("out", dtype="float16"), TypeError, "out: expected dtype bfloat16, got float16"),
        (change("out", shape=(100, 512)), ValueError, r"out: expected shape \[rows, 576\]"),
        (change("out", strides=(1, 100)), ValueError, "out: expected a contiguous last dimension"),
        (change("out", strides=(570, 1)), ValueError, "out: expected positive strides and elements that"),
        (
            change("out", strides=(580, 1)),
            ValueError,
            "out: expected a 16-byte aligned address and a row stride",
        ),
        (change("out", ptr=0x4008), ValueError, "out: expected a 16-byte aligned address"),
        (change("out", device=1), ValueError, "out: expected .* cuda:0, the device of kv_cache"),
        (change("block_table", device=1), ValueError, "block_table: expected an array on device cuda:0"),
    )
]
BAD_CALLS += [
    (convert_arguments, "convert_indices", edit, error, text)
    for edit, error, text in (
        (change("indices", dtype="int64"), TypeError, "indices: expected dtype int32, got int64"),
        (change("indices", shape=(100,)), ValueError, r"indices: expected shape \[T, topk\] or"),
        (
            change("indices", strides=(400, 200, 2)),
            ValueError,
            "indices: expected a contiguous last dimension",
        ),
        (change("block_table", dtype="int64"), TypeError, "block_table: expected dtype int32, got int64"),
        (
            change("block_table", shape=(42,)),
            ValueError,
            r"block_table: expected shape \[num_requests, max_bl",
        ),
        (
            change("block_table", strides=(14, 2)),
            ValueError,
            "block_table: expected a contiguous last dimension",
        ),
        (
            lambda a: a.update(request_ids=None, block_table=a["block_table"].but(shape=(4, 7))),
            ValueError,
            r"block_table: expected shape \[at least 5, max_blocks\]",
        ),
        (put("page_block_size", 0), ValueError, "page_block_size: expected an int of at least 1, got 0"),
        (put("page_block_size", 64.0), TypeError, "page_block_size: expected an int"),
        (put("page_block_size", 2**31), ValueError, r"page_block_size: expected less than 2\*\*31"),
        (put("compact", 1), TypeError, "compact: expected a bool"),
        (change("request_ids", dtype="int64"), TypeError, "request_ids: expected dtype int32, got int64"),
        (change("request_ids", shape=(6,)), ValueError, r"request_ids: expected shape \[5\]"),
        (change("out", dtype="int64"), TypeError, "out: expected dtype int32, got int64"),
        (
            change("out", shape=(5, 2, 99)),
            ValueError,
            r"out: expected shape \[5, 2, 100\] \(b of indices, s_q of in",
        ),
        (change("out", strides=(200, 90, 1)), ValueError, "out: expected positive strides and elements that"),
        (change("out", device=1), ValueError, "out: expected .* cuda:0, the device of indices"),
    )
]
BAD_CALLS += [
    (merge_arguments, "merge_attn_states", edit, error, text)
    for edit, error, text in (
        (
            put("outs", Array((3, 2, 3, 8, 512), "bfloat16")),
            TypeError,
            "outs: expected a list or tuple of arrays",
        ),
        (put("lses", None), TypeError, "lses: expected a list or tuple of arrays, got NoneType"),
        (lambda a: a.update(outs=[], lses=[]), ValueError, "lses: expected at least 1"),
        (lambda a: a["lses"].pop(), ValueError, "lses: .*as many as outs, got 2 lses and 3 outs"),
        (
            change_part("outs", 0, dtype="float64"),
            TypeError,
            r"outs\[0\]: expected dtype bfloat16 or float16 or",
        ),
        (
            change_part("outs", 0, shape=(2, 3, 8, 576)),
            ValueError,
            r"outs\[0\]: expected shape \[b, s_q, h_q, 512\]",
        ),
        (
            change_part("outs", 1, dtype="float16"),
            TypeError,
            r"outs\[1\]: expected dtype bfloat16, the dtype of outs\[0\]",
        ),
        (
            change_part("outs", 2, shape=(2, 3, 9, 512)),
            ValueError,
            r"outs\[2\]: expected shape \[2, 3, 8, 512\]",
        ),
        (
            change_part("outs", 1, ptr=0x1008),
            ValueError,
            r"outs\[1\]: expected an address and strides that are mul",
        ),
        (
            change_part("outs", 1, strides=(12288, 4096, 516, 1)),
            ValueError,
            r"outs\[1\]: expected an address and str",
        ),
        (
            change_part("outs", 1, strides=(24576, 8192, 1024, 2)),
            ValueError,
            r"outs\[1\]: expected a contiguous last",
        ),
        (
            change_part("outs", 1, device=1),
            ValueError,
            r"outs\[1\]: expected .* cuda:0, the device of outs",
        ),
        (
            change_part("lses", 1, dtype="float16"),
            TypeError,
            r"lses\[1\]: expected dtype float32, got float16",
        ),
        (
            change_part("lses", 1, shape=(2, 3, 8)),
            ValueError,
            r"lses\[1\]: expected shape \[2, 8, 3\] \(b of outs",
        ),
        (change_part("lses", 1, device=1), ValueError, r"lses\[1\]: expected an array on device cuda:0"),
        (
            change("out", dtype="float32"),
            TypeError,
            r"out: expected dtype bfloat16, the dtype of outs\[0\], got float32",
        ),
        (change("out", shape=(2, 3, 7, 512)), ValueError, r"out: expected shape \[2, 3, 8, 512\]"),
        (
            change("out", strides=(0, 4096, 512, 1)),
            ValueError,
            "out: expected positive strides and elements that",
        ),
    )
]


@pytest.mark.parametrize(("make", "name", "edit", "error", "text"), BAD_CALLS)
def test_bad_call(
    world: World, make: Callable[[], Arguments], name: str, edit: Any, error: type[Exception], text: str
) -> None:
    arguments = make()
    edit(arguments)
    with pytest.raises(error, match=f"^{text}"):
        getattr(rawmla, name)(**arguments)
    assert world.untouched


PLACE = {"device": 0, "stream": 0x51}


def only_launch(world: World) -> Arguments:
    (launched,) = world.launches
    assert launched.pop("capturing")() is False
    assert {name: launched.pop(name) for name in PLACE} == PLACE
    return launched


class TestQuantize:
    @pytest.mark.parametrize(
        ("layout", "page", "block_bytes"),
        [("v32", 53, 53 * 656), ("model1", 53, 31104), ("model1", 72, 42048)],
    )
    def test_allocates(self, world: World, layout: str, page: int, block_bytes: int) -> None:
        columns, token_bytes = (576, 656) if layout == "v32" else (512, 584)
        source = Array((10, page, 1, columns), "bfloat16", strides=(99_999, 600, 7, 1), ptr=0x1002)
        made = rawmla.quantize_k_cache(source, layout)
        (allocated,) = world.framework.allocated
        assert (allocated.shape, allocated.dtype) == ((10, block_bytes), "uint8")
        assert (made.shape, made.dtype) == ((10, page, 1, token_bytes), "uint8")
        assert made.strides == (block_bytes, token_bytes, token_bytes, 1)
        launched = only_launch(world)
        assert launched.pop("positional")[0].name == layout
        assert launched == {
            "kv_c": 0x1002,
            "k_pe": 0x1002 + 2 * (columns - 64),
            "slots": 0,
            "slots_are_64bit": False,
            "cache": allocated.ptr,
            "kv_c_stride": 600,
            "k_pe_stride": 600,
            "source_block_stride": 99_999,
            "block_stride": block_bytes,
            "token_stride": 656 if layout == "v32" else 576,
            "num_slots": 10 * page,
            "tokens": 10 * page,
            "page_block_size": page,
            "sources_are_aligned": False,
        }

    @pytest.mark.parametrize("dtype", ("uint8", "int8", "float8_e4m3fn"))
    def test_given(self, world: World, dtype: str) -> None:
        arguments = quantize_arguments("model1")
        arguments["out"] = arguments["out"].but(dtype=dtype, strides=(16 * 584 + 8, 584, 584, 1), ptr=0xA008)
        assert rawmla.quantize_k_cache(**arguments) is arguments["out"]
        launched = only_launch(world)
        assert not world.framework.allocated
        assert (launched["cache"], launched["block_stride"]) == (0xA008, 16 * 584 + 8)
        assert launched["sources_are_aligned"]

    def test_no_blocks(self, world: World) -> None:
        assert rawmla.quantize_k_cache(Array((0, 4, 1, 512), "bfloat16"), "model1").shape == (0, 4, 1, 584)
        assert not world.launches

    def test_dequantize(self, world: World) -> None:
        source = cache(MODEL1, 10, 9).but(strides=(9 * 584 + 32, 584, 584, 1))
        made = rawmla.dequantize_k_cache(source, "model1")
        assert (made.shape, made.dtype) == ((10, 9, 1, 512), "bfloat16")
        launched = only_launch(world)
        wanted = {"cache": 0xA000, "block_table": 0, "out": made.ptr, "out_stride": 512, "rows": 90, "b": 0}
        wanted |= {"block_stride": 9 * 584 + 32, "token_stride": 576, "num_blocks": 10, "page_block_size": 9}
        assert {name: launched[name] for name in wanted} == wanted

    def test_ml_dtypes_missing(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        def empty(shape: tuple[int, ...], dtype: str, device: int) -> Array:
            raise ImportError("No module named 'ml_dtypes'")

        monkeypatch.setattr(world.framework, "empty", empty)
        with pytest.raises(rawmla.MissingDependencyError, match="needs ml_dtypes"):
            rawmla.dequantize_k_cache(**dequantize_arguments())


class TestWrite:
    @pytest.mark.parametrize(
        ("kind", "name", "token_stride"),
        [(V32, "v32", 656), (MODEL1, "model1", 576), (WIDE, "bf16 576", 1152), (NARROW, "bf16 512", 1024)],
    )
    def test_layout_is_inferred(
        self, world: World, kind: tuple[str, int], name: str, token_stride: int
    ) -> None:
        arguments = write_arguments(kind)
        assert rawmla.write_kv_cache(**arguments) is None
        assert not world.framework.allocated
        launched = only_launch(world)
        assert launched.pop("positional")[0].name == name
        assert launched == {
            "kv_c": 0x1000,
            "k_pe": 0x2000,
            "slots": 0x3000,
            "slots_are_64bit": True,
            "cache": 0xA000,
            "kv_c_stride": arguments["kv_c"].shape[1],
            "k_pe_stride": 64,
            "source_block_stride": 0,
            "block_stride": 16 * kind[1] * (2 if kind[0] == "bfloat16" else 1),
            "token_stride": token_stride,
            "num_slots": 160,
            "tokens": 33,
            "page_block_size": 16,
            "sources_are_aligned": True,
        }

    def test_strides(self, world: World) -> None:
        arguments = write_arguments(WIDE)
        change("kv_cache", strides=(1_000_000, 1160, 7, 1))(arguments)
        change("kv_c", strides=(577, 1))(arguments)
        change("k_pe", strides=(-64, 1))(arguments)
        change("slot_mapping", dtype="int32")(arguments)
        rawmla.write_kv_cache(**arguments)
        launched = only_launch(world)
        wanted = {"block_stride": 2_000_000, "token_stride": 2320, "kv_c_stride": 577, "k_pe_stride": -64}
        wanted |= {"slots_are_64bit": False, "sources_are_aligned": False}
        assert {name: launched[name] for name in wanted} == wanted

    def test_no_tokens(self, world: World) -> None:
        arguments = write_arguments()
        change("kv_c", shape=(0, 512))(arguments)
        change("k_pe", shape=(0, 64))(arguments)
        change("slot_mapping", shape=(0,))(arguments)
        rawmla.write_kv_cache(**arguments)
        assert world.untouched


class TestGather:
    def test_launch(self, world: World) -> None:
        arguments = gather_arguments(MODEL1)
        change("block_table", strides=(40, 1))(arguments)
        change("out", strides=(520, 1))(arguments)
        assert rawmla.gather_kv_cache(**arguments) is None
        launched = only_launch(world)
        format, is_paged = launched.pop("positional")
        assert format.name == "model1" and is_paged
        assert launched == {
            "cache": 0xA000,
            "block_table": 0x2000,
            "cache_seqlens": 0x3000,
            "workspace_starts": 0x5000,
            "seq_starts": 0x6000,
            "out": 0x4000,
            "table_stride": 40,
            "out_stride": 520,
            "block_stride": 16 * 584,
            "token_stride": 576,
            "b": 3,
            "table_width": 7,
            "num_blocks": 10,
            "rows": 100,
            "page_block_size": 16,
        }

    def test_table_of_no_blocks(self, world: World) -> None:
        """Its address is 0; no token has a page, which is not the same as a cache without requests."""
        arguments = gather_arguments()
        change("block_table", shape=(3, 0), ptr=0)(arguments)
        rawmla.gather_kv_cache(**arguments)
        launched = only_launch(world)
        _, is_paged = launched["positional"]
        assert is_paged and (launched["block_table"], launched["table_width"]) == (0, 0)

    def test_without_starts(self, world: World) -> None:
        rawmla.gather_kv_cache(**gather_arguments() | {"seq_starts": None})
        assert only_launch(world)["seq_starts"] == 0

    def test_nothing_to_do(self, world: World) -> None:
        arguments = gather_arguments()
        change("out", shape=(0, 576))(arguments)
        rawmla.gather_kv_cache(**arguments)
        arguments = gather_arguments() | {"seq_starts": None}
        change("block_table", shape=(0, 7))(arguments)
        change("cache_seqlens", shape=(0,))(arguments)
        change("workspace_starts", shape=(0,))(arguments)
        rawmla.gather_kv_cache(**arguments)
        assert world.untouched


class TestConvert:
    def test_launch(self, world: World) -> None:
        arguments = convert_arguments()
        change("indices", strides=(800, 300, 1))(arguments)
        slots, counts = rawmla.convert_indices(**arguments)
        assert slots is arguments["out"] and (counts.shape, counts.dtype) == ((5, 2), "int32")
        assert only_launch(world) == {
            "positional": (),
            "indices": 0x1000,
            "block_table": 0x2000,
            "request_ids": 0x3000,
            "out": 0x4000,
            "counts": counts.ptr,
            "indices_strides": (800, 300),
            "out_strides": (200, 100),
            "table_stride": 7,
            "rows": 10,
            "s_q": 2,
            "topk": 100,
            "num_requests": 6,
            "table_width": 7,
            "page_block_size": 64,
        }

    def test_two_dimensions(self, world: World) -> None:
        indices = Array((6, 100), strides=(128, 1), ptr=0x1000)
        slots = rawmla.convert_indices(indices, Array((6, 7)), 53)
        assert (slots.shape, slots.dtype) == ((6, 100), "int32")
        launched = only_launch(world)
        wanted = {"indices_strides": (128, 0), "out_strides": (100, 100), "rows": 6, "s_q": 1}
        wanted |= {"counts": 0, "request_ids": 0, "out": slots.ptr}
        assert {name: launched[name] for name in wanted} == wanted

    def test_nothing_to_do(self, world: World) -> None:
        slots, counts = rawmla.convert_indices(Array((6, 0)), Array((6, 7)), 53, compact=True)
        assert slots.shape == (6, 0) and world.framework.filled == [(counts, 0)] and not world.launches


class TestMerge:
    def test_launch(self, world: World) -> None:
        arguments = merge_arguments()
        change_part("lses", 1, strides=(24, 1, 8))(arguments)
        out, lse = rawmla.merge_attn_states(**arguments)
        assert out is arguments["out"] and (lse.shape, lse.dtype) == ((2, 8, 3), "float32")
        launched = only_launch(world)
        parts, merged, *dtypes = launched.pop("positional")
        assert dtypes == ["bfloat16", "bfloat16"] and launched == {"n": 2, "s": 3, "h": 8}
        assert [part.out for part in parts] == [0x1000, 0x1010, 0x1020]
        assert [part.lse for part in parts] == [0x2000, 0x2004, 0x2008]
        assert {part.out_strides for part in parts} == {(12288, 4096, 512)}
        assert [part.lse_strides for part in parts] == [(24, 1, 3), (24, 8, 1), (24, 1, 3)]
        assert merged == merge_states.State(0x3000, lse.ptr, (12288, 4096, 512), (24, 1, 3))

    def test_three_dimensions(self, world: World) -> None:
        outs = [Array((3, 8, 512), "float32", strides=(8192, 1024, 1)) for _ in range(2)]
        out, lse = rawmla.merge_attn_states(outs, [Array((3, 8), "float32") for _ in range(2)])
        assert (out.shape, out.dtype, lse.shape) == ((3, 8, 512), "float32", (3, 8))
        launched = only_launch(world)
        parts, merged, *_ = launched.pop("positional")
        assert launched == {"n": 1, "s": 3, "h": 8}
        assert parts[1].out_strides == (0, 8192, 1024) and parts[1].lse_strides == (0, 8, 1)
        assert merged.out_strides[1:] == (4096, 512) and merged.lse_strides[1:] == (8, 1)

    @pytest.mark.parametrize(("parts", "groups"), [(32, []), (33, [2]), (1025, [33, 2])])
    def test_many_parts(self, world: World, parts: int, groups: list[int]) -> None:
        """Each state in scratch is written once, before it is read, and none meets another."""
        out, _ = rawmla.merge_attn_states(*list(merge_arguments(parts).values())[:2])
        state_bytes = 48 * 2048 + 48 * 4
        scratch = [array for array in world.framework.allocated if array.dtype == "uint8"]
        assert [array.shape for array in scratch] == ([(sum(groups) * state_bytes,)] if groups else [])
        assert len(world.launches) == sum(groups) + 1
        ready = set()
        for launched in world.launches:
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
        assert len(ready) == sum(groups) and world.launches[-1]["positional"][1].out == out.ptr

    def test_no_rows(self, world: World) -> None:
        empty = [Array((2, 0, 8, 512), "float16")], [Array((2, 8, 0), "float32")]
        out, lse = rawmla.merge_attn_states(*empty)
        assert out.shape == (2, 0, 8, 512) and lse.shape == (2, 8, 0) and not world.launches


FUNCTIONS = (
    ("quantize_k_cache", quantize_arguments),
    ("dequantize_k_cache", dequantize_arguments),
    ("write_kv_cache", write_arguments),
    ("gather_kv_cache", gather_arguments),
    ("convert_indices", convert_arguments),
    ("merge_attn_states", merge_arguments),
)


def moved(value: Any) -> Any:
    """Arrays of the same kinds at other addresses."""
    if isinstance(value, list):
        return [moved(one) for one in value]
    return value.but(ptr=value.ptr + 0x100000) if isinstance(value, Array) else value


def addresses(value: Any) -> set[int]:
    """Every integer in the arguments of a launch."""
    if isinstance(value, int):
        return {value}
    if isinstance(value, dict):
        value = tuple(value.values())
    return set().union(*map(addresses, value)) if isinstance(value, (tuple, list)) else set()


@pytest.mark.parametrize(("function", "make"), FUNCTIONS)
class TestRepeatedCalls:
    def test_addresses_are_those_of_the_call(
        self, world: World, function: str, make: Callable[[], Arguments]
    ) -> None:
        given = make()
        getattr(rawmla, function)(**given)
        getattr(rawmla, function)(**{name: moved(value) for name, value in given.items()})
        arrays_given = [
            x for value in given.values() for x in (value if isinstance(value, list) else [value])
        ]
        pointers = {x.ptr for x in arrays_given if isinstance(x, Array)}
        first, second = map(addresses, world.launches)
        assert pointers <= first and {pointer + 0x100000 for pointer in pointers} <= second

    def test_another_kind_is_checked(
        self, world: World, function: str, make: Callable[[], Arguments]
    ) -> None:
        getattr(rawmla, function)(**make())
        for name, value in make().items():
            if isinstance(value, Array):
                with pytest.raises(ValueError, match=f"^{name}: "):
                    getattr(rawmla, function)(**{**make(), name: value.but(shape=(*value.shape, 1))})
        assert len(world.launches) == 1
