"""Equal calls of the dense backward give equal bits in dk, dv and dsink, in a fixed order in dq too."""

from __future__ import annotations

import pytest
from gpu_support import bits, torch

from kit.mha import MhaCase, make_mha_inputs
from operations.dense_backward import assert_same_gradients, backward_inputs, backward_of, check_backward

REPEATS = 1000
TOGETHER = 10  # calls in flight between two comparisons
SIZES = ((1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (257, 257), (2048, 2048))
CASES = (
    *[
        (MhaCase(b=60, s_q=s_q, s_k=s_k, h_kv=4, d_qk=64, d_v=64, causal=causal, sink="float32"), "out")
        for (s_q, s_k), causal in zip(SIZES, (True, False) * 4, strict=True)
    ],
    (MhaCase(b=60, s_q=1024, s_k=128, h_kv=4, causal=True, sink="float32"), "out"),
    (MhaCase(b=60, s_q=257, s_k=257, h_kv=1, causal=True, sink="float32"), "both"),
    (MhaCase(b=60, s_q=97, s_k=300, h_kv=4, d_qk=96, d_v=96, sink="bfloat16", dtype="float16"), "both"),
    (
        MhaCase(b=20, s_q=257, s_k=257, d_qk=64, d_v=64, window=(50, 3), softcap=15.0, alibi="requests"),
        "both",
    ),
    (MhaCase(b=8, s_q=300, s_k=457, d_qk=192, causal=True), "out"),
    (MhaCase(b=8, s_q=300, s_k=457, d_qk=256, d_v=256, window=(200, 30), h_kv=1, layout="slice"), "both"),
    (
        MhaCase(
            q_lengths=(1, 400, 0, 33, 64, 130) * 10, k_lengths=(300, 401, 90, 0, 64, 17) * 10, causal=True
        ),
        "both",
    ),
)


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("case", "of"), CASES, ids=lambda x: x if isinstance(x, str) else x.id)
@pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "fixed order"))
def test_backward_repeats(deterministic: bool, case: MhaCase, of: str) -> None:
    """Results of 1,000 calls are compared on the device. Without poison, whose fills would keep the launches
    from overlapping.
    """
    call = backward_inputs(make_mha_inputs(case), of)
    first = backward_of(call, deterministic=deterministic)
    check_backward(call, first)
    skipped = 0 if deterministic else 1
    wanted = [bits(x) for x in first[skipped:]]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS // TOGETHER):
        for results in [backward_of(call, deterministic=deterministic) for _ in range(TOGETHER)]:
            for one, want in zip(results[skipped:], wanted, strict=True):
                different += (bits(one) != want).any()
    assert int(different) == 0, f"{case.id}: {int(different)} of {REPEATS * len(wanted)} results differ"


def test_backward_under_deterministic_algorithms_of_torch() -> None:
    """torch.use_deterministic_algorithms has the effect of `deterministic=True`."""
    call = backward_inputs(make_mha_inputs(MhaCase(b=8, s_q=300, s_k=900, causal=True, d_qk=192)))
    want = backward_of(call, deterministic=True)
    check_backward(call, want)
    torch.use_deterministic_algorithms(True)
    try:
        results = [backward_of(call) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    for got in results:
        assert_same_gradients("under torch's switch", got, want, exact_dq=True)
