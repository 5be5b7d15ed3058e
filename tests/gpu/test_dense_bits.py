"""What batch-invariant dense decoding must not depend on besides the batch (test_bits.py)."""

import pytest
from gpu_support import assert_same_bits, decode, torch

from kit import DenseCase, make_dense_inputs
from kit.generators import GARBAGE_PAGE
from operations.mla_decode import DENSE_INVARIANT_CASES


@pytest.mark.parametrize("case", DENSE_INVARIANT_CASES[-2:], ids=lambda case: case.id)
def test_batch_invariance_does_not_depend_on_table_width_or_form(case: DenseCase) -> None:
    inputs = make_dense_inputs(case)
    want_out, want_lse = decode(inputs, "object", enable_batch_invariant=True)
    width = inputs.block_table.shape[1]
    wide = torch.full((case.b, 3 * width), GARBAGE_PAGE, dtype=torch.int32, device="cuda")
    wide[:, :width] = inputs.block_table
    inputs.block_table = wide
    out, lse = decode(inputs, "tensors", enable_batch_invariant=True)
    assert_same_bits("out", out, want_out)
    assert_same_bits("lse", lse, want_lse)
