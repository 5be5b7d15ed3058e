"""MLA on the emulated device: decoding and prefill with plans and combines, and the kernels around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gpu_support import forced_clusters, united_selections
from test_prefill_sanitizer import CASES as PREFILL_CASES
from test_prefill_sanitizer import ROWS
from test_sparse_sanitizer import CASES as SPARSE_CASES

import rawmla
from kit import DenseCase, SparseCase, check_close, out_tolerance
from operations.caches import COLUMNS, LAYOUTS, values
from rawmla import reference

if TYPE_CHECKING:
    from emulator import Emulator

torch = pytest.importorskip("torch")

DENSE_CASES = {
    "mla_dense_decode[BOX_ROWS=64,CLUSTER=1": DenseCase(b=2, s_k=300, s_q=2, h_q=16, causal=True),
    "mla_dense_decode[BOX_ROWS=64,CLUSTER=2": DenseCase(b=2, s_k=300, lengths=(300, 70)),
    "mla_dense_decode[BOX_ROWS=32,CLUSTER=1": DenseCase(
        b=2, s_k=300, d_qk=512, dtype="float16", page_block_size=32
    ),
    "mla_dense_decode_few_rows[BOX_ROWS=64": DenseCase(b=3, s_k=300, h_q=8, lengths=(1, 0, 300)),
}
"""By the beginning of their variants' labels."""


def check(family: str, case: Any, emulator: Emulator) -> list[str]:
    """Labels of the kernels that ran."""
    from emulator import cases

    emulator.sm_count = 8
    cases.check(family, case)
    return emulator.launched


def names(labels: list[str]) -> set[str]:
    return {label.partition("[")[0] for label in labels}


@pytest.mark.parametrize("kernel", DENSE_CASES)
def test_dense_decode(emulator: Emulator, kernel: str) -> None:
    labels = check("dense_decode", DENSE_CASES[kernel], emulator)
    assert [label for label in labels if label.startswith(kernel)], labels


SPARSE_KERNELS = (
    *("mla_sparse_fp8_few_heads", "mla_sparse_fp8", "mla_sparse_fp8"),
    *("mla_sparse_bf16", "mla_sparse_bf16"),
)


@pytest.mark.parametrize(
    ("kernel", "case"),
    [*zip(SPARSE_KERNELS, SPARSE_CASES[1:3] + SPARSE_CASES[4:5] + SPARSE_CASES[6:], strict=True)],
    ids=lambda x: x if isinstance(x, str) else x.id,
)
def test_sparse_decode(emulator: Emulator, kernel: str, case: SparseCase) -> None:
    assert kernel in names(check("sparse_decode", case, emulator))


@pytest.mark.parametrize("case", SPARSE_CASES[2:4], ids=lambda case: case.id)
def test_sparse_decode_in_clusters(emulator: Emulator, case: SparseCase) -> None:
    with forced_clusters():
        assert "mla_sparse_fp8_cluster" in names(check("sparse_decode", case, emulator))


def test_other_schedules(emulator: Emulator) -> None:
    with forced_clusters():
        for emulator.seed in (2, 3, 4):
            check("sparse_decode", SparseCase(b=1, h_q=128, s_k=200, topk=140, layout="v32"), emulator)


@pytest.mark.parametrize(
    ("kernel", "case"),
    (
        ("mla_sparse_bf16", PREFILL_CASES[2]),
        ("mla_sparse_fp8", PREFILL_CASES[7]),
        ("mla_cache_gather", PREFILL_CASES[8]),
    ),
    ids=lambda x: x if isinstance(x, str) else x.id,
)
def test_sparse_prefill(emulator: Emulator, kernel: str, case: SparseCase) -> None:
    assert kernel in names(check("sparse_prefill", case, emulator))


def test_united_selections(emulator: Emulator) -> None:
    case = SparseCase(b=13, h_q=16, s_k=41, topk=70, duplicates=0.3, lengths="random", sink=True, **ROWS)
    with united_selections(scratch_bytes=1 << 15, tokens=1):
        ran = names(check("sparse_prefill", case, emulator))
    assert {"mla_unite_selections", "mla_find_not_finite"} <= ran


def of_bits(bits: np.ndarray) -> Any:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches(emulator: Emulator, layout: str) -> None:
    """To the bit."""
    k_cache = values((3, 5, 1, COLUMNS[layout]))
    want = reference.quantize_k_cache(k_cache, layout)
    cache = rawmla.quantize_k_cache(of_bits(k_cache), layout)
    np.testing.assert_array_equal(cache.view(torch.uint8).numpy(), want)
    rows = reference.dequantize_k_cache(want, layout).astype(k_cache.dtype)
    np.testing.assert_array_equal(
        rawmla.dequantize_k_cache(cache, layout).view(torch.int16).numpy(), rows.view(np.int16)
    )
    assert names(emulator.launched) == {"mla_cache_write", "mla_cache_gather"}


@pytest.mark.parametrize("compact", (False, True))
def test_indices(emulator: Emulator, compact: bool) -> None:
    draw = np.random.default_rng(1)
    positions = draw.integers(-9, 700, (3, 333)).astype(np.int32)
    table = draw.integers(-1, 50, (3, 10)).astype(np.int32)
    got = rawmla.convert_indices(torch.from_numpy(positions), torch.from_numpy(table), 64, compact=compact)
    want = reference.convert_indices(positions, table, 64, compact=compact)
    for one, wanted in zip(got if compact else (got,), want if compact else (want,), strict=True):
        np.testing.assert_array_equal(one.numpy(), wanted)
    assert names(emulator.launched) == {"mla_convert_indices"}


def test_merge(emulator: Emulator) -> None:
    draw = torch.Generator().manual_seed(0)
    outs = [torch.randn(2, 3, 5, 512, generator=draw).bfloat16() for _ in range(9)]
    lses = [torch.randn(2, 5, 3, generator=draw) * 4 for _ in range(9)]
    lses[3][0], outs[3][0] = float("inf"), float("nan")
    got_out, got_lse = rawmla.merge_attn_states(outs, lses)
    want_out, want_lse = reference.merge_attn_states(
        [out.double().numpy() for out in outs], [lse.double().numpy() for lse in lses]
    )
    check_close("out", got_out.double().numpy(), want_out, out_tolerance("bfloat16"))
    np.testing.assert_allclose(got_lse.numpy(), want_lse, rtol=1e-6, atol=1e-6)
    assert names(emulator.launched) == {"mla_merge_states"}
