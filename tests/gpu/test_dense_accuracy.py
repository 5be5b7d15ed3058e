"""Error against float64, held to the error that FlashMLA's kernels have on the same kind of input."""

import pytest
from gpu_support import decode, reference

from kit import DenseCase, lse_tolerance, make_dense_inputs, measure, out_tolerance

# FlashMLA (commit 9241ae3, one H200): relative L2 error of `out`. Both kernels round the probabilities and
# the result to the cache's type. How much the former costs moves by 3 % with where the probabilities lie
# between two powers of two, that is, with the running maximum they are relative to; SLACK allows for that.
FLASHMLA_REL_L2 = (
    (DenseCase(b=4, s_q=1, s_k=4096), 0.002149),
    (DenseCase(b=4, s_q=2, s_k=4096), 0.002152),
    (DenseCase(b=4, s_q=1, s_k=32768), 0.002110),
    (DenseCase(b=4, s_q=1, s_k=4096, dtype="float16"), 0.0002674),
)
SLACK = 1.03
LSE_MAX_ABS = 2e-6


@pytest.mark.parametrize(("case", "bound"), FLASHMLA_REL_L2, ids=lambda x: getattr(x, "id", ""))
def test_error_against_float64(case: DenseCase, bound: float, record_property: pytest.FixtureRequest) -> None:
    inputs = make_dense_inputs(case)
    out, lse = decode(inputs)
    want_out, want_lse = reference(inputs)
    out_error = measure(out, want_out, out_tolerance(case.dtype))
    lse_error = measure(lse, want_lse, lse_tolerance())
    print(
        f"\n{case.id}: out relative L2 {out_error.rel_l2:.4g} (FlashMLA {bound:.4g}), "
        f"max abs {out_error.max_abs:.3g}, lse max abs {lse_error.max_abs:.3g}"
    )
    record_property("rel_l2", out_error.rel_l2)
    record_property("lse_max_abs", lse_error.max_abs)
    assert out_error.rel_l2 <= bound * SLACK
    assert lse_error.max_abs <= LSE_MAX_ABS
