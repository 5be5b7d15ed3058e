"""Token positions to slots, as the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_support import torch

import rawmla
from rawmla import reference


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
