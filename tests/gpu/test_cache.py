"""Caches on the GPU: quantised, written, gathered, and indices into them; bit for bit as the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_support import cupy, poisoned_allocations, torch

import rawmla
from rawmla import reference

LAYOUTS = ("v32", "model1")
KINDS = (*LAYOUTS, "bf16 576", "bf16 512")
COLUMNS = {"v32": 576, "model1": 512, "bf16 576": 576, "bf16 512": 512}
POISON = 0xFF  # NaN as e4m3, as e8m0 and, twice, as bfloat16
PAGES = (1, 2, 53, 61, 64, 256)


def values(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Random bfloat16 with zero tiles and wide ranges."""
    draw = np.random.default_rng(seed)
    numbers = draw.standard_normal(shape) * scale * np.exp2(draw.integers(-6, 7, (*shape[:-1], 1)))
    numbers[..., :200] *= draw.random((*shape[:-1], 1)) < 0.9
    return numbers.astype(ml_dtypes.bfloat16)


def to_gpu(array: np.ndarray) -> Any:
    """A torch tensor; bfloat16 goes over as integers."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def to_host(tensor: Any) -> np.ndarray:
    """A NumPy array; bfloat16 and float8 come back as integers."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    return tensor.cpu().numpy()


def host_cache(kind: str, num_blocks: int, page: int) -> np.ndarray:
    """A cache of poison, for the reference to write to."""
    if kind in LAYOUTS:
        return np.full((num_blocks, page, 1, reference.LAYOUTS[kind].token_bytes), POISON, np.uint8)
    return np.full((num_blocks, page, 1, COLUMNS[kind]), -1, np.int16).view(ml_dtypes.bfloat16)


class PaddedCache:
    """A cache of poison with room between its blocks."""

    def __init__(self, kind: str, num_blocks: int, page: int, padding: int = 48) -> None:
        shape = host_cache(kind, 1, page).shape
        dtype = torch.uint8 if kind in LAYOUTS else torch.bfloat16
        used = shape[1] * shape[3]
        stride = -(-used // 16) * 16 + padding
        self.blocks = torch.full(
            (num_blocks, stride * dtype.itemsize), POISON, dtype=torch.uint8, device="cuda"
        )
        self.view = self.blocks.view(dtype)[:, :used].unflatten(1, shape[1:])
        self._used_bytes = used * dtype.itemsize

    def check(self, want: np.ndarray) -> None:
        """The cache is as wanted and what is between blocks is as it was."""
        np.testing.assert_array_equal(
            to_host(self.view), want.view(np.int16) if want.dtype != np.uint8 else want
        )
        assert bool((self.blocks[:, self._used_bytes :] == POISON).all())


def filled(kind: str, k_cache: np.ndarray) -> np.ndarray:
    """The cache of these values, on the host."""
    return reference.quantize_k_cache(k_cache, kind) if kind in LAYOUTS else k_cache


class TestQuantising:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("page", PAGES)
    @pytest.mark.parametrize("num_blocks", (1, 7, 40))
    def test_bits(self, layout: str, page: int, num_blocks: int) -> None:
        k_cache = values((num_blocks, page, 1, COLUMNS[layout]), seed=page)
        with poisoned_allocations():
            cache = rawmla.quantize_k_cache(to_gpu(k_cache), layout)
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
        cache = rawmla.quantize_k_cache(to_gpu(k_cache), layout)
        np.testing.assert_array_equal(to_host(cache), reference.quantize_k_cache(k_cache, layout))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_nan_and_infinity(self, layout: str) -> None:
        k_cache = values((3, 5, 1, COLUMNS[layout]))
        k_cache[0, 0, 0, 5], k_cache[1, 2, 0, 300], k_cache[2, 4, 0, 130] = np.nan, np.inf, -np.inf
        k_cache[1, 1, 0, :128], k_cache[1, 3, 0, -3:] = np.nan, np.nan
        cache = to_host(rawmla.quantize_k_cache(to_gpu(k_cache), layout))
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
        source.copy_(to_gpu(k_cache))
        target = PaddedCache(layout, 6, page)
        assert rawmla.quantize_k_cache(source, layout, out=target.view) is target.view
        target.check(reference.quantize_k_cache(k_cache, layout))

    @pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
    def test_other_byte_types(self, dtype: str) -> None:
        k_cache = values((2, 64, 1, 576))
        given = torch.zeros(2, 64, 1, 656, dtype=torch.uint8, device="cuda").view(getattr(torch, dtype))
        rawmla.quantize_k_cache(to_gpu(k_cache), "v32", out=given)
        want = reference.quantize_k_cache(k_cache, "v32")
        np.testing.assert_array_equal(to_host(given).view(np.uint8), want)
        back = rawmla.dequantize_k_cache(given, "v32")
        np.testing.assert_array_equal(to_host(back).view(np.uint16), self.dequantized(want, "v32"))

    def test_blocks_of_eight_byte_alignment(self) -> None:
        """An unpadded MODEL1 cache of an odd page."""
        k_cache = values((5, 53, 1, 512))
        cache = torch.zeros(5, 53, 1, 584, dtype=torch.uint8, device="cuda")
        rawmla.quantize_k_cache(to_gpu(k_cache), "model1", out=cache)
        want = reference.quantize_k_cache(k_cache, "model1")
        np.testing.assert_array_equal(to_host(cache), want)
        back = rawmla.dequantize_k_cache(cache, "model1")
        np.testing.assert_array_equal(to_host(back).view(np.uint16), self.dequantized(want, "model1"))


@pytest.mark.parametrize("kind", KINDS)
class TestWriting:
    @pytest.mark.parametrize("tokens", (1, 4, 5, 63, 300))
    @pytest.mark.parametrize("slot_dtype", (np.int32, np.int64))
    def test_bits(self, kind: str, tokens: int, slot_dtype: type) -> None:
        page, num_blocks = 53, 11
        rows = values((tokens, COLUMNS[kind]), seed=tokens)
        slots = np.random.default_rng(1).permutation(num_blocks * page)[:tokens].astype(slot_dtype)
        slots[2::7] = -1
        slots[3::11] = num_blocks * page
        slots[5::13] = np.iinfo(slot_dtype).min
        slots[6::17] = np.iinfo(slot_dtype).max
        want = host_cache(kind, num_blocks, page)
        reference.write_kv_cache(rows[:, :-64], rows[:, -64:], want, slots)
        source = to_gpu(rows)
        # Views of one buffer: contiguous, of aligned rows, of rows that are not.
        for columns, shift in ((0, 0), (16, 8), (5, 3)):
            buffer = torch.full(
                (tokens, COLUMNS[kind] + columns), float("nan"), dtype=torch.bfloat16, device="cuda"
            )
            given = buffer[:, shift : shift + COLUMNS[kind]]
            given.copy_(source)
            cache = PaddedCache(kind, num_blocks, page)
            rawmla.write_kv_cache(given[:, :-64], given[:, -64:], cache.view, torch.from_numpy(slots).cuda())
            cache.check(want)

    def test_equals_quantize(self, kind: str) -> None:
        k_cache = values((20, 64, 1, COLUMNS[kind]))
        rows = to_gpu(k_cache.reshape(-1, COLUMNS[kind]))
        order = torch.randperm(20 * 64, device="cuda")
        cache = PaddedCache(kind, 20, 64)
        rawmla.write_kv_cache(rows[order, :-64], rows[order, -64:], cache.view, order)
        if kind in LAYOUTS:
            assert torch.equal(cache.view, rawmla.quantize_k_cache(to_gpu(k_cache), kind))
        else:
            assert torch.equal(cache.view.view(torch.int16), to_gpu(k_cache).view(torch.int16))

    def test_far_block(self, kind: str) -> None:
        """Block 2066 at a stride of 1,039,680 bytes begins past 2**31."""
        stride, num_blocks, page = 1_039_680, 2070, 64
        room = torch.zeros(num_blocks, stride, dtype=torch.uint8, device="cuda")
        shape = host_cache(kind, 1, page).shape[1:]
        blocks = room if kind in LAYOUTS else room.view(torch.bfloat16)
        cache = blocks[:, : page * shape[2]].unflatten(1, shape)
        rows = values((3, COLUMNS[kind]))
        given = to_gpu(rows)
        slots = torch.tensor([2066 * page + 5, 2069 * page + 63, 7], device="cuda")
        rawmla.write_kv_cache(given[:, :-64], given[:, -64:], cache, slots)
        want = host_cache(kind, 3, page)
        want.view(np.uint8)[:] = 0
        reference.write_kv_cache(rows[:, :-64], rows[:, -64:], want, [5, page + 63, 2 * page + 7])
        written = torch.stack([cache[block] for block in (2066, 2069, 0)])
        np.testing.assert_array_equal(to_host(written).view(np.uint8), want.view(np.uint8))

        out = torch.zeros(3, COLUMNS[kind], dtype=torch.bfloat16, device="cuda")
        table = torch.tensor([[2066], [2069], [0]], dtype=torch.int32, device="cuda")
        starts = torch.tensor([5, 63, 7], dtype=torch.int32, device="cuda")
        places = torch.arange(3, dtype=torch.int32, device="cuda")
        rawmla.gather_kv_cache(cache, table, starts + 1, out, workspace_starts=places, seq_starts=starts)
        gathered = np.zeros((3, COLUMNS[kind]), np.float32)
        reference.gather_kv_cache(
            want, [[0], [1], [2]], [6, 64, 8], gathered, workspace_starts=[0, 1, 2], seq_starts=[5, 63, 7]
        )
        same_values(out, gathered)

    def test_inside_a_graph(self, kind: str) -> None:
        """Captured once; replays follow new values, slots and lengths, and gather what the graph wrote."""
        page, num_blocks, tokens = 64, 8, 40
        cache = PaddedCache(kind, num_blocks, page)
        rows = torch.zeros(tokens, COLUMNS[kind], dtype=torch.bfloat16, device="cuda")
        slots = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
        table = torch.arange(num_blocks, dtype=torch.int32, device="cuda")[None]
        lengths = torch.zeros(1, dtype=torch.int32, device="cuda")
        out = torch.zeros(num_blocks * page, COLUMNS[kind], dtype=torch.bfloat16, device="cuda")
        start = torch.zeros(1, dtype=torch.int32, device="cuda")

        def work() -> None:
            rawmla.write_kv_cache(rows[:, :-64], rows[:, -64:], cache.view, slots)
            rawmla.gather_kv_cache(cache.view, table, lengths, out, workspace_starts=start)

        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        want = host_cache(kind, num_blocks, page)
        for seed, length in enumerate((0, 100, num_blocks * page)):
            numbers = values((tokens, COLUMNS[kind]), seed=seed)
            places = np.random.default_rng(seed).permutation(num_blocks * page)[:tokens]
            rows.copy_(to_gpu(numbers))
            slots.copy_(torch.from_numpy(places))
            lengths.fill_(length)
            out.fill_(-7)
            graph.replay()
            reference.write_kv_cache(numbers[:, :-64], numbers[:, -64:], want, places)
            cache.check(want)
            gathered = np.full(out.shape, -7, np.float32)
            reference.gather_kv_cache(
                want, np.arange(num_blocks)[None], [length], gathered, workspace_starts=[0]
            )
            same_values(out, gathered)


def same_values(got: Any, want: np.ndarray) -> None:
    """Bit for bit, any NaN for any NaN."""
    numbers = reference.decode_bf16(to_host(got).view(np.uint16))
    np.testing.assert_array_equal(numbers, want)
    np.testing.assert_array_equal(np.signbit(numbers)[want == 0], np.signbit(want)[want == 0])


@pytest.mark.parametrize("kind", KINDS)
class TestGathering:
    @pytest.mark.parametrize("page", PAGES)
    @pytest.mark.parametrize("b", (1, 6, 50))
    @pytest.mark.parametrize("with_starts", (False, True))
    def test_bits(self, kind: str, page: int, b: int, with_starts: bool) -> None:
        draw = np.random.default_rng(page + b)
        width = -(-200 // page)
        num_blocks = b * width
        lengths = draw.integers(0, 201, b).astype(np.int32)
        starts = np.minimum(draw.integers(0, 100, b), lengths).astype(np.int32) * with_starts
        table = np.full((b, width + 3), 2147480000, np.int32)
        pages = draw.permutation(num_blocks).reshape(b, width)
        k_cache = np.full((num_blocks, page, 1, COLUMNS[kind]), np.nan, ml_dtypes.bfloat16)
        for i, length in enumerate(lengths):
            needed = -(-int(length) // page)
            table[i, :needed] = pages[i, :needed]
            tokens = values((int(length), COLUMNS[kind]), seed=i)
            for token in range(int(length)):
                k_cache[pages[i, token // page], token % page, 0] = tokens[token]
        counts = lengths - starts
        places = (np.cumsum(counts) - counts).astype(np.int32)
        want = np.full((int(counts.sum()) + 2, COLUMNS[kind]), -7, np.float32)
        host = filled(kind, k_cache)
        reference.gather_kv_cache(
            host, table, lengths, want[1:-1], workspace_starts=places, seq_starts=starts
        )

        cache = PaddedCache(kind, num_blocks, page)
        cache.view.copy_(to_gpu(host))
        room = torch.full((len(want), COLUMNS[kind] + 24), -7.0, dtype=torch.bfloat16, device="cuda")
        rawmla.gather_kv_cache(
            cache.view,
            torch.from_numpy(table).cuda()[:, :width],
            torch.from_numpy(lengths).cuda(),
            room[1:-1, : COLUMNS[kind]],
            workspace_starts=torch.from_numpy(places).cuda(),
            seq_starts=torch.from_numpy(starts).cuda() if with_starts else None,
        )
        assert not np.isnan(want).any()
        same_values(room[:, : COLUMNS[kind]], want)
        assert bool((room[:, COLUMNS[kind] :] == -7).all())

    @pytest.mark.parametrize("order", ("as numbered", "shuffled", "with gaps", "in a third"))
    def test_many_requests(self, kind: str, order: str) -> None:
        """More than are looked at in one go, by guesses at who has a row that are right, nearly, or not."""
        b, page = 2500, 4
        draw = np.random.default_rng(0)
        lengths = draw.integers(0, 7, b).astype(np.int32)
        table = draw.integers(0, 32, (b, 2)).astype(np.int32)
        host = filled(kind, values((32, page, 1, COLUMNS[kind])))
        numbers = draw.permutation(b) if order == "shuffled" else np.arange(b)
        steps = lengths[numbers] + (order == "with gaps")
        places = np.zeros(b, np.int32)
        places[numbers] = np.cumsum(steps) - steps
        rows = int(steps.sum()) * (3 if order == "in a third" else 1)
        want = np.full((rows, COLUMNS[kind]), -7, np.float32)
        reference.gather_kv_cache(host, table, lengths, want, workspace_starts=places)
        out = torch.full(want.shape, -7.0, dtype=torch.bfloat16, device="cuda")
        arrays = [torch.from_numpy(x).cuda() for x in (table, lengths)]
        rawmla.gather_kv_cache(to_gpu(host), *arrays, out, workspace_starts=torch.from_numpy(places).cuda())
        same_values(out, want)

    @pytest.mark.parametrize("others", (0, 100))
    @pytest.mark.parametrize(
        ("pages", "length", "place", "start"),
        [
            ((0, -1), 30, -3, 0),  # past the table, and rows before the first
            ((9, 2), 16, 35, 2),  # a page that is not there, and rows past the last
            ((1, 3), 2147483647, 20, 0),
            ((2, 0), -5, 0, -9),
            ((2, 0), 5, 0, -2147483648),
            ((2, 0), 2147483647, -2147483648, 0),
        ],
    )
    def test_nothing_outside(
        self, kind: str, pages: tuple[int, int], length: int, place: int, start: int, others: int
    ) -> None:
        """Zeros where there is a row but no token, and no write outside. With as many requests without tokens
        before it and behind it, where all requests are looked at.
        """
        host = filled(kind, values((4, 8, 1, COLUMNS[kind])))
        want = np.full((60, COLUMNS[kind]), -7, np.float32)
        room = torch.full(want.shape, -7.0, dtype=torch.bfloat16, device="cuda")
        first, last = max(start, start - place), min(length, start - place + 40)
        reference.gather_kv_cache(
            host, [pages], [last], want[10:-10], workspace_starts=[place + first - start], seq_starts=[first]
        )
        none, no_pages = [0] * others, [(0, 0)] * others
        table, lengths, places, starts = (
            torch.tensor(before + [own] + before, dtype=torch.int32, device="cuda")
            for own, before in ((pages, no_pages), (length, none), (place, none), (start, none))
        )
        rawmla.gather_kv_cache(
            to_gpu(host), table, lengths, room[10:-10], workspace_starts=places, seq_starts=starts
        )
        same_values(room, want)


class TestIndices:
    @pytest.mark.parametrize("compact", (False, True))
    @pytest.mark.parametrize("page", (1, 2, 53, 64, 576))
    @pytest.mark.parametrize("topk", (1, 63, 64, 133, 256, 257, 2048, 2051, 10_000))
    def test_as_the_reference(self, topk: int, page: int, compact: bool) -> None:
        draw = np.random.default_rng(topk + page)
        width = 9
        table = draw.integers(0, 50, (7, width + 2)).astype(np.int32)
        table[1, 3], table[2, 0], table[:, width:] = -1, 2**31 - 1, 77
        for shape, ids in (((7, topk), None), ((5, topk), [6, -1, 2, 2, 7]), ((3, 2, topk), [0, 4, 1])):
            positions = draw.integers(-page, (width + 1) * page, shape).astype(np.int32)
            buffer = torch.full((*shape[:-1], topk + 3), 12345, dtype=torch.int32, device="cuda")
            given = buffer[..., :topk]
            given.copy_(torch.from_numpy(positions))
            want = reference.convert_indices(
                positions, table[:, :width], page, request_ids=ids, compact=compact
            )
            options: dict[str, Any] = {"compact": compact}
            if ids is not None:
                options["request_ids"] = torch.tensor(ids, dtype=torch.int32, device="cuda")
            pages = torch.from_numpy(table).cuda()[:, :width]
            with poisoned_allocations():
                got = rawmla.convert_indices(given, pages, page, **options)
            in_place = rawmla.convert_indices(given, pages, page, out=given, **options)
            for found in (got, in_place):
                for one, wanted in zip(
                    found if compact else (found,), want if compact else (want,), strict=True
                ):
                    np.testing.assert_array_equal(one.cpu().numpy(), wanted)
            assert bool((buffer[..., topk:] == 12345).all())

    def test_many_rows(self) -> None:
        positions = torch.randint(-5, 4000, (5000, 64), dtype=torch.int32, device="cuda")
        table = torch.randint(0, 1000, (5000, 70), dtype=torch.int32, device="cuda")
        slots, counts = rawmla.convert_indices(positions, table, 64, compact=True)
        want = reference.convert_indices(positions.cpu().numpy(), table.cpu().numpy(), 64, compact=True)
        np.testing.assert_array_equal(slots.cpu().numpy(), want[0])
        np.testing.assert_array_equal(counts.cpu().numpy(), want[1])


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


def test_calls_do_not_synchronise() -> None:
    k_cache = to_gpu(values((64, 64, 1, 576)))
    cache = rawmla.quantize_k_cache(k_cache, "v32")
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    rawmla.quantize_k_cache(k_cache, "v32", out=cache)
    rawmla.dequantize_k_cache(cache, "v32")
    assert not torch.cuda.current_stream().query(), "a call waited for the device"


def test_on_another_stream() -> None:
    """Work is enqueued where torch's current stream is, behind what made the inputs."""
    k_cache = to_gpu(values((200, 64, 1, 512)))
    want = rawmla.quantize_k_cache(k_cache, "model1")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late = k_cache.clone()
        got = rawmla.quantize_k_cache(late, "model1")
        assert torch.equal(got, want)
