"""Whole caches quantised and dequantised, bit for bit as the reference; cache functions on CuPy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu_support import cupy, torch

import rawmla
from operations.caches import (
    COLUMNS,
    LAYOUTS,
    PAGES,
    PaddedCache,
    to_device,
    to_host,
    values,
)
from rawmla import reference


class TestQuantising:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("page", PAGES)
    @pytest.mark.parametrize("num_blocks", (1, 7, 40))
    def test_bits(self, layout: str, page: int, num_blocks: int) -> None:
        k_cache = values((num_blocks, page, 1, COLUMNS[layout]), seed=page)
        cache = rawmla.quantize_k_cache(to_device(k_cache), layout)
        back = rawmla.dequantize_k_cache(cache, layout)
        want = reference.quantize_k_cache(k_cache, layout)
        np.testing.assert_array_equal(to_host(cache), want)
        assert cache.dtype == torch.uint8
        assert num_blocks == 1 or layout == "v32" or cache.stride(0) % 576 == 0
        assert back.is_contiguous() and back.shape == k_cache.shape
        np.testing.assert_array_equal(to_host(back).view(np.uint16), self.dequantized(want, layout))

    @staticmethod
    def dequantized(cache: np.ndarray, layout: str) -> np.ndarray:
        """As bits, by the reference's gather."""
        num_blocks, page = cache.shape[:2]
        out = np.zeros((num_blocks * page, COLUMNS[layout]), np.float32)
        table = np.arange(num_blocks)[None]
        reference.gather_kv_cache(cache, table, [num_blocks * page], out, workspace_starts=[0])
        return reference.bf16_bits(out).reshape(num_blocks, page, 1, -1)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_magnitude(self, layout: str) -> None:
        """Every positive bfloat16 as the largest of a tile of random smaller ones, infinity among them."""
        amax = np.arange(1, 0x7F81, dtype=np.uint16)
        draw = np.random.default_rng(0)
        bits = draw.integers(0, 0x8000, (len(amax), 1, 1, COLUMNS[layout]), dtype=np.uint16)
        near = amax[:, None, None, None] - np.minimum(bits & 0x7FF, amax[:, None, None, None])
        bits = near | (draw.integers(0, 2, bits.shape, dtype=np.uint16) << 15)
        bits[:, 0, 0, :: reference.LAYOUTS[layout].tile] = amax[:, None]
        k_cache = bits.view(ml_dtypes.bfloat16)
        cache = rawmla.quantize_k_cache(to_device(k_cache), layout)
        np.testing.assert_array_equal(to_host(cache), reference.quantize_k_cache(k_cache, layout))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_nan_and_infinity(self, layout: str) -> None:
        k_cache = values((3, 5, 1, COLUMNS[layout]))
        k_cache[0, 0, 0, 5], k_cache[1, 2, 0, 300], k_cache[2, 4, 0, 130] = np.nan, np.inf, -np.inf
        k_cache[1, 1, 0, :128], k_cache[1, 3, 0, -3:] = np.nan, np.nan
        cache = to_host(rawmla.quantize_k_cache(to_device(k_cache), layout))
        want = reference.quantize_k_cache(k_cache, layout)
        np.testing.assert_array_equal(cache, want)
        got, wanted = (reference.dequantize_k_cache(x, layout) for x in (cache, want))
        np.testing.assert_array_equal(got, wanted)
        assert np.isnan(got[1, 1, 0, :128]).all() and np.isnan(got[1, 3, 0, -3:]).all()

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shift", (0, 1, 8))
    def test_strided_source_and_padded_target(self, layout: str, shift: int) -> None:
        page, columns = 9, COLUMNS[layout]
        k_cache = values((6, page, 1, columns))
        buffer = torch.full((6, page + 2, columns + 16), float("nan"), dtype=torch.bfloat16, device="cuda")
        source = buffer[:, 1 : page + 1, None, shift : shift + columns]
        source.copy_(to_device(k_cache))
        target = PaddedCache(layout, 6, page)
        assert rawmla.quantize_k_cache(source, layout, out=target.view) is target.view
        target.check(reference.quantize_k_cache(k_cache, layout))

    @pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
    def test_other_byte_types(self, dtype: str) -> None:
        k_cache = values((2, 64, 1, 576))
        given = torch.zeros(2, 64, 1, 656, dtype=torch.uint8, device="cuda").view(getattr(torch, dtype))
        rawmla.quantize_k_cache(to_device(k_cache), "v32", out=given)
        want = reference.quantize_k_cache(k_cache, "v32")
        np.testing.assert_array_equal(to_host(given).view(np.uint8), want)
        back = rawmla.dequantize_k_cache(given, "v32")
        np.testing.assert_array_equal(to_host(back).view(np.uint16), self.dequantized(want, "v32"))

    def test_blocks_of_eight_byte_alignment(self) -> None:
        """An unpadded MODEL1 cache of an odd page."""
        k_cache = values((5, 53, 1, 512))
        cache = torch.zeros(5, 53, 1, 584, dtype=torch.uint8, device="cuda")
        rawmla.quantize_k_cache(to_device(k_cache), "model1", out=cache)
        want = reference.quantize_k_cache(k_cache, "model1")
        np.testing.assert_array_equal(to_host(cache), want)
        back = rawmla.dequantize_k_cache(cache, "model1")
        np.testing.assert_array_equal(to_host(back).view(np.uint16), self.dequantized(want, "model1"))


def test_cupy_arrays() -> None:
    k_cache = values((6, 64, 1, 576))
    given = cupy.asarray(k_cache)
    cache = rawmla.quantize_k_cache(given, "v32")
    want = reference.quantize_k_cache(k_cache, "v32")
    assert isinstance(cache, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(cache), want)
    padded = rawmla.quantize_k_cache(cupy.asarray(values((6, 7, 1, 512))), "model1")
    assert padded.strides[0] % 576 == 0
    np.testing.assert_array_equal(
        cupy.asnumpy(padded), reference.quantize_k_cache(values((6, 7, 1, 512)), "model1")
    )
    back = rawmla.dequantize_k_cache(cache, "v32")
    assert isinstance(back, cupy.ndarray) and back.dtype == ml_dtypes.bfloat16
    rows = given.reshape(-1, 576)
    slots = cupy.arange(384, dtype=cupy.int64)[::-1].copy()
    rawmla.write_kv_cache(rows[::-1, :512], rows[::-1, 512:], cache.view(cupy.int8), slots)
    np.testing.assert_array_equal(cupy.asnumpy(cache), want)
    out = cupy.zeros((384, 576), ml_dtypes.bfloat16)
    table = cupy.arange(6, dtype=cupy.int32)[None]
    length, start = cupy.full(1, 384, cupy.int32), cupy.zeros(1, cupy.int32)
    rawmla.gather_kv_cache(cache, table, length, out, workspace_starts=start)
    np.testing.assert_array_equal(
        cupy.asnumpy(out.view(cupy.int16)), cupy.asnumpy(back.view(cupy.int16).reshape(384, 576))
    )
    slots, counts = rawmla.convert_indices(cupy.asarray([[5, -1, 70]], cupy.int32), table, 64, compact=True)
    assert slots.get().tolist() == [[5, 70, -1]] and counts.get().tolist() == [2]
