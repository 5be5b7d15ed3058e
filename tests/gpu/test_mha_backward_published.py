"""The backward of dense attention on the published matrix of FlashMLA, which --full runs whole."""

from __future__ import annotations

from dataclasses import replace

from gpu_support import assert_same_bits
from test_mha_matrix import FLASH_MLA_OUT, flash_mla_case, on_flash_mla_matrix

from kit import check_close
from kit.mha import HALF_STEP, make_mha_inputs
from kit.mha_backward import make_mha_gradients, reference_backward
from operations.dense import attend
from operations.dense_backward import BackwardInputs, backward_of

HEADS_TOGETHER = 16  # query heads that are compared at a time, whole groups, which need less memory
NAMES = ("dq", "dk", "dv")


@on_flash_mla_matrix
def test_flash_mla_backward(s: int, ragged: bool, heads: tuple[int, int], d_qk: int, causal: bool) -> None:
    """Five backward passes give the same bits, but for those of dq, within the published bounds.
    Relative L2 errors are at most a whole step of the dtype. The forward is in test_mha_matrix.py.

    The published runs have no backward with groups of heads. There the first keys, whose weights are large,
    sum up so many roundings to bf16 of each that single elements of millions pass the absolute bound.
    """
    inputs = make_mha_inputs(flash_mla_case(s, ragged, heads, d_qk, causal))
    call = BackwardInputs(inputs, make_mha_gradients(inputs), attend(inputs, is_varlen=ragged))
    got = backward_of(call, is_varlen=ragged)
    for _ in range(4):
        again = backward_of(call, is_varlen=ragged)
        for name, one, want in zip(NAMES[1:], again[1:], got[1:], strict=True):
            assert_same_bits(name, one, want)
        del again, one
    group = heads[0] // heads[1]
    for first in range(0, heads[0], HEADS_TOGETHER):
        part = slice(first, first + HEADS_TOGETHER)
        part_k = slice(first // group, (first + HEADS_TOGETHER) // group)

        one = BackwardInputs(
            replace(inputs, q=inputs.q[:, part], k=inputs.k[:, part_k], v=inputs.v[:, part_k]),
            replace(call.gradients, dout=call.gradients.dout[:, part]),
            (call.results[0][:, part], call.results[1][:, part]),
        )
        found = (got[0][:, part], got[1][:, part_k], got[2][:, part_k])
        wanted = reference_backward(one.inputs, one.gradients).values
        for name, x, want in zip(NAMES, found, wanted, strict=True):
            tolerance = FLASH_MLA_OUT
            if name != "dq":  # sums over the heads of a group
                tolerance = replace(tolerance, absolute=tolerance.absolute * group**0.5)
            label = f"{inputs.case.id} {name} of heads from {first} on"
            difference = check_close(label, x, want, tolerance)
            assert difference.rel_l2 <= 2 * HALF_STEP[inputs.case.dtype], (label, difference)
