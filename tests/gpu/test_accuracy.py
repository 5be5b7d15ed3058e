"""Error of decoding against float64: at most the error of FlashMLA's kernels on the same kind of input.

FlashMLA is commit 9241ae3 on one H200. Both kernels round the probabilities and the result to the type of the
cache. How much the former costs moves by 3 % with where the probabilities lie between two powers of two, so
with the running maximum that they are relative to; SLACK allows for that.
"""

from typing import Any

import pytest

from kit import (
    DenseCase,
    SparseCase,
    lse_tolerance,
    make_dense_inputs,
    make_sparse_inputs,
    measure,
    out_tolerance,
)
from operations.mla_decode import decode, reference
from operations.mla_sparse import sparse_decode, sparse_reference

SLACK = 1.03
EXACT_LSE = 2e-6
SPARSE_SHAPE: dict[str, Any] = {"b": 4, "s_q": 2, "h_q": 128, "s_k": 8192, "topk": 2048, "invalid": 0.0}
# FlashMLA rounds the scales of V3.2 to bfloat16 too. Where bfloat16 holds the keys exactly, what is left is
# the error of dense decoding; nothing is published for these layouts.
V32, AS_DENSE = (0.00318, 1.051e-5), (0.00215 * SLACK, EXACT_LSE)
BOUNDS: tuple[tuple[DenseCase | SparseCase, tuple[float, float]], ...] = (
    (DenseCase(b=4, s_q=1, s_k=4096), (0.002149 * SLACK, EXACT_LSE)),
    (DenseCase(b=4, s_q=2, s_k=4096), (0.002152 * SLACK, EXACT_LSE)),
    (DenseCase(b=4, s_q=1, s_k=32768), (0.002110 * SLACK, EXACT_LSE)),
    (DenseCase(b=4, s_q=1, s_k=4096, dtype="float16"), (0.0002674 * SLACK, EXACT_LSE)),
    (SparseCase(**SPARSE_SHAPE), V32),
    (SparseCase(**{**SPARSE_SHAPE, "h_q": 16}), V32),
    (SparseCase(**SPARSE_SHAPE, power_of_two_scales=True), AS_DENSE),
    (SparseCase(**SPARSE_SHAPE, layout="model1"), AS_DENSE),
    (SparseCase(**SPARSE_SHAPE, layout="bf16"), AS_DENSE),
)


@pytest.mark.parametrize(("case", "bounds"), BOUNDS, ids=lambda x: getattr(x, "id", ""))
def test_error_against_float64(case: Any, bounds: tuple[float, float], record_property: Any) -> None:
    """Relative L2 error of `out`, largest error of `lse`."""
    if isinstance(case, DenseCase):
        dense = make_dense_inputs(case)
        got, want, dtype = decode(dense), reference(dense), case.dtype
    else:
        sparse = make_sparse_inputs(case)
        got, want, dtype = sparse_decode(sparse), sparse_reference(sparse, exact_keys=True), "bfloat16"
    out = measure(got[0], want[0], out_tolerance(dtype)).rel_l2
    lse = measure(got[1], want[1], lse_tolerance()).max_abs
    print(f"\n{case.id}: out relative L2 {out:.4g}, lse max abs {lse:.3g} (allowed {bounds})")
    record_property("rel_l2", out)
    record_property("lse_max_abs", lse)
    assert out <= bounds[0] and lse <= bounds[1]
