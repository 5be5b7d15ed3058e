"""Small calls of the kernels around decoding: to run under compute-sanitizer, as test_sanitizer_cases.py."""

import numpy as np
import pytest
from gpu_support import torch

import rawmla
from operations.caches import (
    COLUMNS,
    KINDS,
    LAYOUTS,
    PaddedCache,
    filled,
    host_cache,
    same_values,
    to_device,
    to_host,
    values,
)
from operations.merge import check_merged, make_parts
from rawmla import reference

pytestmark = pytest.mark.sanitizer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_blocks", "page"), ((1, 1), (3, 5), (2, 64)))
def test_quantize(layout: str, num_blocks: int, page: int) -> None:
    k_cache = values((num_blocks, page, 1, COLUMNS[layout]))
    cache = rawmla.quantize_k_cache(to_device(k_cache), layout)
    want = reference.quantize_k_cache(k_cache, layout)
    np.testing.assert_array_equal(to_host(cache), want)
    rawmla.dequantize_k_cache(cache, layout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot_dtype", (np.int32, np.int64))
def test_write_and_gather(kind: str, slot_dtype: type) -> None:
    """Rows at odd addresses, skipped slots, padded blocks; two requests and one without tokens."""
    rows = values((11, COLUMNS[kind] + 1))[:, 1:]
    slots = np.array([0, 14, -1, 15, 3, 4, 5, 6, 7, 99, 8], slot_dtype)
    want = host_cache(kind, 3, 5)
    reference.write_kv_cache(rows[:, :-64], rows[:, -64:], want, slots)
    cache = PaddedCache(kind, 3, 5)
    given = to_device(np.ascontiguousarray(rows))
    rawmla.write_kv_cache(given[:, :-64], given[:, -64:], cache.view, torch.from_numpy(slots).cuda())
    cache.check(want)

    host = filled(kind, values((3, 5, 1, COLUMNS[kind])))
    table = np.array([[2, 0, 77], [1, 77, 77], [77, 77, 77]], np.int32)
    lengths, places = np.array([9, 3, 0], np.int32), np.array([4, 0, 2], np.int32)
    rows_wanted = np.full((14, COLUMNS[kind]), -7, np.float32)
    reference.gather_kv_cache(host, table, lengths, rows_wanted, workspace_starts=places)
    out = torch.full(rows_wanted.shape, -7.0, dtype=torch.bfloat16, device="cuda")
    arrays = [torch.from_numpy(x).cuda() for x in (table, lengths, places)]
    rawmla.gather_kv_cache(to_device(host), arrays[0], arrays[1], out, workspace_starts=arrays[2])
    same_values(out, rows_wanted)


@pytest.mark.parametrize("compact", (False, True))
@pytest.mark.parametrize("topk", (1, 70, 2100))
def test_convert(topk: int, compact: bool) -> None:
    positions = np.random.default_rng(topk).integers(-9, 700, (3, topk)).astype(np.int32)
    table = np.random.default_rng(0).integers(-1, 50, (3, 10)).astype(np.int32)
    got = rawmla.convert_indices(to_device(positions), to_device(table), 64, compact=compact)
    want = reference.convert_indices(positions, table, 64, compact=compact)
    for one, wanted in zip(got if compact else (got,), want if compact else (want,), strict=True):
        np.testing.assert_array_equal(to_host(one), wanted)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("parts", (1, 9, 33))
def test_merge(parts: int, dtype: str) -> None:
    outs, lses = make_parts(parts, (1, 2, 3, 512), dtype)
    got = rawmla.merge_attn_states(outs, lses)
    on_host = [[x.cpu() for x in arrays] for arrays in (outs, lses, got)]
    check_merged(on_host[0], on_host[1], tuple(on_host[2]))
