"""MLA decoding and prefill with their plans and combines, on the emulated device: all kernels that attend but
those for clusters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_prefill_sanitizer import CASES as PREFILL_CASES
from test_sparse_sanitizer import CASES as SPARSE_CASES

from rawmla.testing import DenseCase, SparseCase

if TYPE_CHECKING:
    from emulator import Emulator

pytest.importorskip("torch")

DENSE_CASES = (
    DenseCase(b=2, s_k=300, s_q=2, h_q=16, causal=True),
    DenseCase(b=3, s_k=300, s_q=1, h_q=8, lengths=(1, 0, 300)),
    DenseCase(b=2, s_k=300, s_q=2, d_qk=512, dtype="float16", page_block_size=32),
)


def check(family: str, case: Any, emulator: Emulator) -> set[str]:
    """The kernels that ran."""
    from emulator import cases

    emulator.sm_count = 8
    cases.check(family, case)
    return {label.partition("[")[0] for label in emulator.launched}


@pytest.mark.parametrize("case", DENSE_CASES, ids=lambda case: case.id)
def test_dense_decode(emulator: Emulator, case: DenseCase) -> None:
    few = {"mla_dense_decode", "mla_dense_decode_few_rows"}
    assert check("dense_decode", case, emulator) & few


@pytest.mark.parametrize(
    "case", SPARSE_CASES[1:3] + SPARSE_CASES[4:5] + SPARSE_CASES[6:], ids=lambda case: case.id
)
def test_sparse_decode(emulator: Emulator, case: SparseCase) -> None:
    check("sparse_decode", case, emulator)


@pytest.mark.parametrize(
    "case", (PREFILL_CASES[2], PREFILL_CASES[7], PREFILL_CASES[8]), ids=lambda case: case.id
)
def test_sparse_prefill(emulator: Emulator, case: SparseCase) -> None:
    check("sparse_prefill", case, emulator)
