"""New tokens written into caches, bit for bit as the reference."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_support import torch

import rawmla
from operations.caches import (
    COLUMNS,
    KINDS,
    LAYOUTS,
    PaddedCache,
    host_cache,
    same_values,
    to_device,
    to_host,
    values,
)
from rawmla import reference


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
        source = to_device(rows)
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
        rows = to_device(k_cache.reshape(-1, COLUMNS[kind]))
        order = torch.randperm(20 * 64, device="cuda")
        cache = PaddedCache(kind, 20, 64)
        rawmla.write_kv_cache(rows[order, :-64], rows[order, -64:], cache.view, order)
        if kind in LAYOUTS:
            assert torch.equal(cache.view, rawmla.quantize_k_cache(to_device(k_cache), kind))
        else:
            assert torch.equal(cache.view.view(torch.int16), to_device(k_cache).view(torch.int16))

    def test_far_block(self, kind: str) -> None:
        """Block 2066 at a stride of 1,039,680 bytes begins past 2**31."""
        stride, num_blocks, page = 1_039_680, 2070, 64
        room = torch.zeros(num_blocks, stride, dtype=torch.uint8, device="cuda")
        shape = host_cache(kind, 1, page).shape[1:]
        blocks = room if kind in LAYOUTS else room.view(torch.bfloat16)
        cache = blocks[:, : page * shape[2]].unflatten(1, shape)
        rows = values((3, COLUMNS[kind]))
        given = to_device(rows)
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
            rows.copy_(to_device(numbers))
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
