"""The NumPy reference of quantised caches, gathering, indices and merging, against ml_dtypes and by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawmla import reference

torch = pytest.importorskip("torch")
from operations.caches import COLUMNS, KINDS, LAYOUTS, host_cache  # noqa: E402

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
ALL_CODES = np.arange(256, dtype=np.uint8)


def bf16_values(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(BF16)


class TestNumbers:
    @pytest.mark.parametrize("name", ("e4m3", "e5m2"))
    def test_decode(self, name: str) -> None:
        kind = {"e4m3": E4M3, "e5m2": ml_dtypes.float8_e5m2}[name]
        want = ALL_CODES.view(kind).astype(np.float32)
        got = getattr(reference, f"decode_{name}")(ALL_CODES)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got)[want == 0], np.signbit(want)[want == 0])

    def test_encode_e4m3_of_every_number_and_every_tie(self) -> None:
        positive = np.unique(ALL_CODES[:127].view(E4M3).astype(np.float32))
        middles = (positive[1:] + positive[:-1]) / 2
        near = np.concatenate([np.nextafter(middles, np.float32(side)) for side in (0, 1e9)])
        values = np.concatenate([positive, middles, near]).astype(np.float32)
        for signed in (values, -values):
            want = signed.astype(E4M3).view(np.uint8)
            np.testing.assert_array_equal(reference.encode_e4m3(signed), want)
            np.testing.assert_array_equal(reference.encode_e4m3(signed.astype(np.float64)), want)

        values = np.array([449, 1e30, np.inf, -465, -np.inf, np.nan, -np.nan, -0.0], np.float32)
        want = [0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x7F, 0x80]
        assert reference.encode_e4m3(values).tolist() == want

    def test_e8m0(self) -> None:
        values = reference.decode_e8m0(ALL_CODES)
        want = ALL_CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        np.testing.assert_array_equal(values, want)

    def test_bf16(self) -> None:
        bits = np.arange(65536, dtype=np.uint16)
        np.testing.assert_array_equal(reference.decode_bf16(bits), bits.view(BF16).astype(np.float32))
        np.testing.assert_array_equal(np.isnan(reference.decode_bf16(reference.bf16_bits([np.nan]))), [True])
        values = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
        values = values[np.isfinite(values)]
        np.testing.assert_array_equal(reference.round_to_bf16(values), values.astype(BF16).astype(np.float32))


class TestQuantising:
    def test_v32_by_ml_dtypes(self) -> None:
        k_cache = bf16_values((2, 7, 1, 576), seed=1, scale=10)
        tiles = k_cache[..., :512].astype(np.float32).reshape(2, 7, 4, 128)
        scales = np.abs(tiles).max(-1) / np.float32(448)
        codes = (tiles / scales[..., None]).astype(E4M3).view(np.uint8).reshape(2, 7, 512)
        cache = reference.quantize_k_cache(k_cache, "v32")[:, :, 0]
        np.testing.assert_array_equal(cache[..., :512], codes)
        np.testing.assert_array_equal(np.ascontiguousarray(cache[..., 512:528]).view(np.float32), scales)
        rope = np.ascontiguousarray(k_cache[:, :, 0, 512:]).view(np.uint8)
        np.testing.assert_array_equal(cache[..., 528:], rope)

    def test_model1_by_ml_dtypes(self) -> None:
        page = 7
        k_cache = bf16_values((2, page, 1, 512), seed=2, scale=1e-3)
        k_cache[1, 3, 0, :64] = 0
        tiles = k_cache[..., :448].astype(np.float32).reshape(2, page, 7, 64)
        wanted = np.maximum(np.abs(tiles).max(-1), np.float32(1e-4)) / np.float32(448)
        scales = np.exp2(np.ceil(np.log2(wanted.astype(np.float64)))).astype(np.float32)
        codes = (tiles / scales[..., None]).astype(E4M3).view(np.uint8).reshape(2, page, 448)
        blocks = reference.quantize_k_cache(k_cache, "model1").reshape(2, -1)
        rows = blocks[:, : page * 576].reshape(2, page, 576)
        np.testing.assert_array_equal(rows[..., :448], codes)
        rope = np.ascontiguousarray(k_cache[:, :, 0, 448:]).view(np.uint8)
        np.testing.assert_array_equal(rows[..., 448:], rope)
        powers = blocks[:, page * 576 :].reshape(2, page, 8)
        np.testing.assert_array_equal(
            powers[..., :7].view(ml_dtypes.float8_e8m0fnu).astype(np.float32), scales
        )
        assert not powers[..., 7].any()

    def test_model1_scale_of_every_magnitude(self) -> None:
        """A power of two, not below max(amax, 1e-4) / 448, its half below."""
        magnitudes = np.arange(0x0001, 0x7F81, dtype=np.uint16)  # infinity is the last
        k_cache = np.zeros((len(magnitudes), 1, 1, 512), np.uint16)
        k_cache[:, 0, 0, 5] = magnitudes
        blocks = reference.quantize_k_cache(k_cache.view(BF16), "model1").reshape(len(magnitudes), -1)
        scales = reference.decode_e8m0(blocks[:, 576]).astype(np.float64)
        amax = reference.decode_bf16(magnitudes).astype(np.float64)
        wanted = np.maximum(np.minimum(amax, 2.0**128), reference.MODEL1_MIN_AMAX) / 448
        assert (scales >= wanted).all() and (scales / 2 < wanted).all()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_zero_and_nan(self, layout: str) -> None:
        k_cache = np.zeros((1, 2, 1, COLUMNS[layout]), BF16)
        k_cache[0, 1, 0, 3] = np.nan
        k_cache[0, 1, 0, 4] = 448
        back = reference.dequantize_k_cache(reference.quantize_k_cache(k_cache, layout), layout)
        np.testing.assert_array_equal(back, k_cache.astype(np.float64))

    @pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.float8_e4m3fn))
    def test_bytes_of_every_dtype(self, dtype: Any) -> None:
        k_cache = bf16_values((3, 5, 1, 576), scale=20)
        cache = reference.quantize_k_cache(k_cache, "v32")
        out = torch.zeros(cache.shape, dtype=torch.uint8).view(dtype)
        reference.quantize_k_cache(k_cache, "v32", out=out)
        np.testing.assert_array_equal(out.view(torch.uint8).numpy(), cache)
        back = reference.dequantize_k_cache(out, "v32").double().numpy()
        np.testing.assert_array_equal(
            back, reference.round_to_bf16(reference.dequantize_k_cache(cache, "v32"))
        )


@pytest.mark.parametrize("kind", KINDS)
class TestWritingAndGathering:
    def test_written_in_slot_order_is_quantised(self, kind: str) -> None:
        columns = COLUMNS[kind]
        k_cache = bf16_values((3, 4, 1, columns), seed=3)
        rows = k_cache.reshape(12, columns)
        order = np.random.default_rng(0).permutation(12)
        cache = host_cache(kind, 3, 4)
        skipped = [-1, 12, -(2**40), 2**40]
        reference.write_kv_cache(rows[:4, :-64], rows[:4, -64:], cache, skipped)
        np.testing.assert_array_equal(cache.view(np.uint8), host_cache(kind, 3, 4).view(np.uint8))
        reference.write_kv_cache(rows[order, :-64], rows[order, -64:], cache, order)
        want = reference.quantize_k_cache(k_cache, kind) if kind in LAYOUTS else k_cache
        np.testing.assert_array_equal(cache, want)

    def test_gather(self, kind: str) -> None:
        columns = COLUMNS[kind]
        page = 4
        k_cache = bf16_values((6, page, 1, columns), seed=4)
        cache, values = k_cache, k_cache.astype(np.float64)
        if kind in LAYOUTS:
            cache = reference.quantize_k_cache(k_cache, kind)
            values = reference.round_to_bf16(reference.dequantize_k_cache(cache, kind))
        table = np.array([[5, 2, 99], [1, -1, 2147480000], [3, 0, 4]])
        out = np.full((16, columns), -7.0, np.float32)
        reference.gather_kv_cache(
            cache, table, [7, 5, 3], out, workspace_starts=[8, 2, -1], seq_starts=[2, 0, 1]
        )
        want = np.full_like(out, -7)
        for row, token in enumerate(range(2, 7)):
            want[8 + row] = values[(5, 2)[token // page], token % page, 0]
        want[2:6], want[6] = values[1, :, 0], 0
        want[0] = values[3, 2, 0]
        np.testing.assert_array_equal(out, want)


class TestIndices:
    TABLE = np.array([[4, 9, -1], [2**30, 3, 0]])

    def test_by_hand(self) -> None:
        indices = np.array([[0, 9, 10, 20, -1, 30], [0, 19, 10, 20, -5, 2**31 - 1]], np.int32)
        slots = reference.convert_indices(indices, self.TABLE, 10)
        assert slots.tolist() == [[40, 49, 90, -1, -1, -1], [-1, 39, 30, 0, -1, -1]]
        slots, counts = reference.convert_indices(indices, self.TABLE, 10, compact=True)
        assert slots.tolist() == [[40, 49, 90, -1, -1, -1], [39, 30, 0, -1, -1, -1]]
        assert counts.tolist() == [3, 3] and slots.dtype == counts.dtype == np.int32

    def test_in_place(self) -> None:
        indices = torch.tensor([[0, 9, 30], [19, -1, 20]], dtype=torch.int32)
        table = torch.from_numpy(self.TABLE.astype(np.int32))
        assert reference.convert_indices(indices, table, 10, out=indices) is indices
        assert indices.tolist() == [[40, 49, -1], [39, -1, 0]]


def test_merged_parts_make_the_whole() -> None:
    """Of batches, and of tokens in a row. The first part has no keys, and what it holds does not count."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((2, n, 5, 512)) for n in (3, 200, 200))
    cuts = (0, 1, 50, 130)
    parts = [np.split(x, cuts, axis=1) for x in (k, v)]
    states = [reference.flash_attn_func(q, *part) for part in zip(*parts, strict=True)]
    states[0][0][...] = np.nan
    want = reference.flash_attn_func(q, k, v)
    of_tokens = [(out.reshape(6, 5, 512), lse.swapaxes(1, 2).reshape(6, 5)) for out, lse in (*states, want)]
    for given, wanted in ((states, want), (of_tokens[:-1], of_tokens[-1])):
        merged = reference.merge_attn_states(*zip(*given, strict=True))
        for one, other in zip(merged, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
