"""Tokens gathered from caches, bit for bit as the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu_support import torch

import rawmla
from kit.generators import GARBAGE_PAGE
from operations.caches import (
    COLUMNS,
    KINDS,
    PAGES,
    PaddedCache,
    filled,
    same_values,
    to_device,
    values,
)
from rawmla import reference


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
        table = np.full((b, width + 3), GARBAGE_PAGE, np.int32)
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
        cache.view.copy_(to_device(host))
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
        rawmla.gather_kv_cache(
            to_device(host), *arrays, out, workspace_starts=torch.from_numpy(places).cuda()
        )
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
            to_device(host), table, lengths, room[10:-10], workspace_starts=places, seq_starts=starts
        )
        same_values(room, want)
