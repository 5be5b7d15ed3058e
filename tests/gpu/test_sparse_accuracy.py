"""Error against float64, held to the error that FlashMLA's kernel has on the same kind of input."""

import pytest
from gpu_support import sparse_decode, sparse_lse_tolerance, sparse_reference

from kit import SparseCase, make_sparse_inputs, measure, out_tolerance

# FlashMLA (commit 9241ae3, one H200), V3.2 layout: relative L2 error of `out` and largest error of `lse`. It
# rounds the scales to bfloat16 too.
FLASHMLA_REL_L2 = 0.00318
FLASHMLA_LSE_MAX_ABS = 1.051e-5

# Where bfloat16 holds the keys exactly, what is left is what dense decoding has too: probabilities and
# result are rounded. Nothing is published for these layouts.
DENSE_REL_L2 = 0.00215 * 1.03
DENSE_LSE_MAX_ABS = 2e-6

SHAPE = {"b": 4, "s_q": 2, "h_q": 128, "s_k": 8192, "topk": 2048, "invalid": 0.0}
BOUNDS = (
    (SparseCase(**SHAPE), FLASHMLA_REL_L2, FLASHMLA_LSE_MAX_ABS),
    (SparseCase(**{**SHAPE, "h_q": 16}), FLASHMLA_REL_L2, FLASHMLA_LSE_MAX_ABS),
    (SparseCase(**SHAPE, power_of_two_scales=True), DENSE_REL_L2, DENSE_LSE_MAX_ABS),
    (SparseCase(**SHAPE, layout="model1"), DENSE_REL_L2, DENSE_LSE_MAX_ABS),
    (SparseCase(**SHAPE, layout="bf16"), DENSE_REL_L2, DENSE_LSE_MAX_ABS),
)


@pytest.mark.parametrize(("case", "rel_l2", "lse_max_abs"), BOUNDS, ids=lambda x: getattr(x, "id", ""))
def test_error_against_float64(
    case: SparseCase, rel_l2: float, lse_max_abs: float, record_property: pytest.FixtureRequest
) -> None:
    inputs = make_sparse_inputs(case)
    out, lse = sparse_decode(inputs)
    want_out, want_lse = sparse_reference(inputs, exact_keys=True)
    out_error = measure(out, want_out, out_tolerance("bfloat16"))
    lse_error = measure(lse, want_lse, sparse_lse_tolerance(inputs))
    print(
        f"\n{case.id}: out relative L2 {out_error.rel_l2:.4g} (allowed {rel_l2:.4g}), "
        f"max abs {out_error.max_abs:.3g}, lse max abs {lse_error.max_abs:.3g} (allowed {lse_max_abs:.3g})"
    )
    record_property("rel_l2", out_error.rel_l2)
    record_property("lse_max_abs", lse_error.max_abs)
    assert out_error.rel_l2 <= rel_l2
    assert lse_error.max_abs <= lse_max_abs
