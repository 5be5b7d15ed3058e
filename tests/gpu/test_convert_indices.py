"""Token positions to slots, as the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_support import torch

import rawmla
from operations.caches import to_device, to_host
from rawmla import reference


def check_slots(got: Any, want: Any, compact: bool) -> None:
    """Slots and, of compacted ones, their numbers are as wanted."""
    for one, wanted in zip(got if compact else (got,), want if compact else (want,), strict=True):
        np.testing.assert_array_equal(to_host(one), wanted)


@pytest.mark.parametrize("compact", (False, True))
@pytest.mark.parametrize("topk", (1, 63, 64, 257, 2051, 10_000))
def test_as_the_reference(topk: int, compact: bool) -> None:
    """With rows of one request each, and with numbers of requests; also in place."""
    width = 9
    for page in (1, 2, 53, 64, 576):
        draw = np.random.default_rng(topk + page)
        table = draw.integers(0, 50, (7, width + 2)).astype(np.int32)
        table[1, 3], table[2, 0], table[:, width:] = -1, 2**31 - 1, 77
        for shape, ids in (((7, topk), None), ((5, topk), [6, -1, 2, 2, 7]), ((3, 2, topk), [0, 4, 1])):
            positions = draw.integers(-page, (width + 1) * page, shape).astype(np.int32)
            buffer = torch.full((*shape[:-1], topk + 3), 12345, dtype=torch.int32, device="cuda")
            given, pages = buffer[..., :topk], to_device(table)[:, :width]
            given.copy_(to_device(positions))
            want = reference.convert_indices(
                positions, table[:, :width], page, request_ids=ids, compact=compact
            )
            options: dict[str, Any] = {"compact": compact}
            if ids is not None:
                options["request_ids"] = torch.tensor(ids, dtype=torch.int32, device="cuda")
            check_slots(rawmla.convert_indices(given, pages, page, **options), want, compact)
            check_slots(rawmla.convert_indices(given, pages, page, out=given, **options), want, compact)
            assert bool((buffer[..., topk:] == 12345).all())
