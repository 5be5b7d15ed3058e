"""The kernels around decoding: what their C++ and their Python side have to agree on, and their launches."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_probe import assert_in_header, assert_in_kernel
from kernel_params import read_params

from rawmla import jit, reference
from rawmla.jit import KernelSpec
from rawmla.kernels import (
    all_specs,
    common,
    mla_cache_gather,
    mla_cache_rows,
    mla_cache_write,
    mla_convert_indices,
    mla_merge_states,
)
from rawmla.kernels.common import divisor, exact_divisor

SPECS = {
    name: [spec for spec in all_specs() if spec.name == name]
    for name in ("mla_cache_write", "mla_cache_gather", "mla_convert_indices", "mla_merge_states")
}
CPP_NAMES = {"v32": "kV32", "model1": "kModel1", "bf16 576": "kBf16Wide", "bf16 512": "kBf16Narrow"}


def test_variants() -> None:
    def defines(kernel: str) -> set[tuple[int, ...]]:
        return {tuple(value for _, value in spec.defines) for spec in SPECS[kernel]}

    assert defines("mla_cache_write") == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 1)}
    assert defines("mla_cache_gather") == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 1)}
    assert defines("mla_convert_indices") == {(0, 1), (0, 8), (1, 1), (1, 8)}
    assert defines("mla_merge_states") == {(0, 0), (0, 2), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)}


def test_constants_agree() -> None:
    for format in mla_cache_rows.CACHE_FORMATS:
        spec = mla_cache_write.spec(format, True)
        row = f"CacheRow<CacheFormat::{CPP_NAMES[format.name]}>"
        conditions = [
            f"kFormat == CacheFormat::{CPP_NAMES[format.name]}",
            f"{row}::kDimQk == {format.d_qk} && {row}::kDimNope == {format.d_nope}",
            f"{row}::kQuantized == {str(format.is_quantized).lower()}",
            f"{row}::kRowBytes == {format.row_bytes} && {row}::kAlignment == {format.alignment}",
            f"kWarps * kUnitTokens == {mla_cache_write._TOKENS_PER_CTA}",
            f"kV32MinScale == {reference.V32_MIN_SCALE!r}",
            f"kModel1MinAmax == {float(np.float32(1e-4))!r} && kE4m3Max == {reference.E4M3_MAX!r}",
            f"kMinCorrectableScale == {2.0**-90!r} && kTwoTo60 == {2.0**60!r}",
        ]
        if format.is_quantized:
            known = reference.LAYOUTS[format.name]
            assert (known.d_nope, known.token_bytes) == (format.d_nope, format.token_bytes)
            conditions.append(f"{row}::kTile == {known.tile}")
            if format is mla_cache_rows.MODEL1:
                conditions.append(f"{row}::kRowBytes + {row}::kScalesBytes == {format.token_bytes}")
        assert_in_kernel(spec, conditions)
        for is_paged in (True, False) if format.is_quantized else (True,):
            rows = mla_cache_gather._rows_per_cta(is_paged)
            assert_in_kernel(mla_cache_gather.spec(format, is_paged), [f"kRows == {rows}"])
    for spec in SPECS["mla_convert_indices"]:
        assert_in_kernel(
            spec,
            [f"kWarps == {mla_convert_indices._WARPS}", f"kChunk == {mla_convert_indices._WARP_COLUMNS}"],
        )
    for spec in SPECS["mla_merge_states"]:
        codes = {code: name for name, code in mla_merge_states.OUT_DTYPES.items()}
        values = dict(spec.defines)
        assert_in_kernel(
            spec,
            [
                f"kMaxParts == {mla_merge_states.MAX_PARTS} && kDimV == {common.D_V}",
                f"kValueBytes == {mla_merge_states.ITEM_BYTES[codes[values['DTYPE']]]}",
                f"kOutValueBytes == {mla_merge_states.ITEM_BYTES[codes[values['OUT_DTYPE']]]}",
                f"kRows == {mla_merge_states.rows_per_cta(codes[values['DTYPE']])}",
            ],
        )


def test_division() -> None:
    """By the C++ function for some numbers, by its formula for many."""
    draw = random.Random(0)
    divisors = [1, 2, 3, 7, 53, 64, 61, 576, 65535, 65536, 2**30, 2**30 + 1, 2**31 - 1]
    divisors += [draw.randrange(1, 2 ** draw.randint(1, 31)) for _ in range(200)]
    conditions = []
    for d in divisors:
        magic, shift = divisor(d)
        assert magic < 2**32
        near = [k * d + e for k in (1, 2, (2**31 - 1) // d) for e in (-1, 0, 1)]
        numbers = [0, 2**31 - 1, *near, *(draw.randrange(2**31) for _ in range(50))]
        inverse, exact_shift = exact_divisor(d)
        for n in numbers:
            if 0 <= n < 2**31:
                assert n * magic >> shift == n // d
                assert (n * d >> exact_shift) * inverse % 2**32 == n
                if d in divisors[:13] and n in near:
                    conditions.append(f"divide({n}, {magic}u, {shift}) == {n // d}")
                    conditions.append(f"divide_exactly({n * d}ll, {inverse}u, {exact_shift}) == {n}")
    assert_in_header("common/division.cuh", conditions, constexpr=("divide", "divide_exactly"))


# What a launch hands over, read by the names that the kernel has for it


class Launch(NamedTuple):
    """What one launch was given; `params` by the names of the kernel's members."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    params: dict[str, Any]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Collects launches instead of making them."""
    made: list[Launch] = []

    class Recorder:
        def __init__(self, spec: KernelSpec) -> None:
            self.spec = spec

        def launch(self, grid: tuple[int, int, int], params: bytes, stream: int, *, pdl: bool) -> None:
            assert stream == 0x51 and pdl and self.spec in all_specs()
            made.append(Launch(self.spec, grid, read_params(self.spec, params)))

    def get_kernel(spec: KernelSpec, device: int, *, capturing: Callable[[], bool]) -> Recorder:
        assert device == 3 and capturing is not_capturing
        return Recorder(spec)

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    monkeypatch.setattr(jit, "device_info", lambda device: SimpleNamespace(sm_count=10))
    return made


def not_capturing() -> bool:
    return False


PLACE: dict[str, Any] = {"device": 3, "stream": 0x51, "capturing": not_capturing}


def distinct(*names: str) -> dict[str, int]:
    """A value of its own for each name."""
    return {name: 1000 + 7 * i for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("format", "slots"),
    [(format, 0x5000) for format in mla_cache_rows.CACHE_FORMATS]
    + [(format, 0) for format in mla_cache_rows.QUANTIZED.values()],
)
def test_write_launch(launches: list[Launch], format: mla_cache_rows.CacheFormat, slots: int) -> None:
    given = distinct(
        "kv_c", "k_pe", "cache", "kv_c_stride", "k_pe_stride", "source_block_stride", "block_stride",
        "token_stride", "num_slots", "page_block_size",
    )  # fmt: skip
    given |= {"slots": slots, "tokens": 33, "slots_are_64bit": True, "sources_are_aligned": False}
    mla_cache_write.launch(format, **PLACE, **given)  # type: ignore[arg-type]
    (launch,) = launches
    magic, shift = divisor(given["page_block_size"])
    assert launch.params == given | {"page_magic": magic, "page_shift": shift}
    assert launch.grid == (5, 1, 1)  # eight tokens each
    assert dict(launch.spec.defines) == {"FORMAT": format.code, "SLOTS": int(slots != 0)}


@pytest.mark.parametrize(("rows", "ctas"), [(1, 1), (100, 13), (2**31 - 1, 2**28)])
def test_gather_launch(launches: list[Launch], rows: int, ctas: int) -> None:
    given = distinct(
        "cache", "block_table", "cache_seqlens", "workspace_starts", "seq_starts", "out", "table_stride",
        "out_stride", "block_stride", "token_stride", "b", "table_width", "num_blocks", "page_block_size",
    ) | {"rows": rows}  # fmt: skip
    mla_cache_gather.launch(mla_cache_rows.V32, True, **PLACE, **given)
    (launch,) = launches
    magic, shift = divisor(given["page_block_size"])
    assert launch.params == given | {"page_magic": magic, "page_shift": shift}
    assert launch.grid == (ctas, 1, 1) and dict(launch.spec.defines) == {"FORMAT": 0, "PAGED": 1}


@pytest.mark.parametrize(("topk", "row_warps", "ctas"), [(1, 1, 2), (256, 1, 2), (257, 8, 12)])
@pytest.mark.parametrize("counts", (0, 0x9000))
def test_convert_launch(launches: list[Launch], topk: int, row_warps: int, ctas: int, counts: int) -> None:
    given = distinct(
        "indices", "block_table", "request_ids", "out", "table_stride", "num_requests", "table_width",
        "page_block_size",
    ) | {"rows": 12, "s_q": 3, "topk": topk, "counts": counts}  # fmt: skip
    mla_convert_indices.launch(**PLACE, **given, indices_strides=(50, 60), out_strides=(70, 80))
    (launch,) = launches
    magic, shift = divisor(given["page_block_size"])
    strides = {"indices_stride_n": 50, "indices_stride_s": 60, "out_stride_n": 70, "out_stride_s": 80}
    assert launch.params == given | strides | {"page_magic": magic, "page_shift": shift}
    assert launch.grid == (ctas, 1, 1)
    assert dict(launch.spec.defines) == {"COMPACT": int(counts != 0), "ROW_WARPS": row_warps}


@pytest.mark.parametrize(("dtype", "rows_per_cta"), [("bfloat16", 2), ("float32", 1)])
def test_merge_launch(launches: list[Launch], dtype: str, rows_per_cta: int) -> None:
    parts = [
        mla_merge_states.State(100 + i, 200 + i, (300 + i, 400 + i, 500 + i), (600 + i, 700 + i, 800 + i))
        for i in range(5)
    ]
    merged = mla_merge_states.State(1, 2, (3, 4, 5), (6, 7, 8))
    dims = {"n": 3, "s": 5, "h": 7}
    mla_merge_states.launch(parts, merged, dtype, "bfloat16", **PLACE, **dims)
    (launch,) = launches
    arrays = ("outs", "lses", *(f"{kind}_strides_{axis}" for kind in ("out", "lse") for axis in "nsh"))
    for base, name in enumerate(arrays, start=1):
        assert launch.params.pop(name) == (*(100 * base + i for i in range(5)), *[0] * 27), name
    scalars = ("out", "lse", *(f"{kind}_stride_{axis}" for kind in ("out", "lse") for axis in "nsh"))
    assert launch.params == dict(zip(scalars, range(1, 9), strict=True)) | {
        "rows": prod(dims.values()), "s": 5, "h": 7, "parts": 5,
    }  # fmt: skip
    assert launch.grid == (-(-105 // rows_per_cta), 1, 1)
