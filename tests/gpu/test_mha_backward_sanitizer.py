"""Small backward calls of dense attention that reach every role and path of its kernels: to run under
compute-sanitizer, as test_sparse_sanitizer.py. Inputs are made, and results compared, on the CPU.
"""

from typing import Any

import pytest
from gpu_support import torch
from mha_backward_calls import BackwardInputs, backward_of
from mha_calls import attend
from test_mha_sanitizer import on_gpu

from rawmla.testing.mha import MhaCase, make_mha_inputs
from rawmla.testing.mha_backward import MhaGradients, check_mha_backward, exact_results, make_mha_gradients

pytestmark = pytest.mark.sanitizer

RAGGED: dict[str, Any] = {"q_lengths": (5, 0, 1, 140), "k_lengths": (3, 7, 0, 270)}
CASES = (
    (MhaCase(b=1, s_q=1, s_k=1, h_q=1, h_kv=1), "out"),
    (MhaCase(b=2, s_q=150, s_k=300, h_q=2, h_kv=2, causal=True, layout="heads"), "out"),
    (MhaCase(b=1, s_q=150, s_k=40, h_q=4, h_kv=2, causal=True, sink="infinite"), "both"),
    (MhaCase(b=1, s_q=200, s_k=300, h_q=2, h_kv=1, window=(30, 5), layout="slice", d_qk=64, d_v=64), "out"),
    (MhaCase(b=1, s_q=140, s_k=270, h_q=2, h_kv=2, softcap=15.0, alibi="heads", d_qk=64, d_v=64), "both"),
    (MhaCase(b=2, s_q=70, s_k=90, h_q=2, h_kv=2, d_qk=96, d_v=96, dtype="float16", sink="bfloat16"), "out"),
    (MhaCase(**RAGGED, causal=True, sink="float32"), "both"),
    (MhaCase(**RAGGED, q_used=(2, 0, 1, 100), k_used=(3, 0, 0, 141), rows_around=70, layout="slice"), "lse"),
    (MhaCase(**RAGGED, d_qk=59, d_v=111, layout="slice"), "out"),
    (MhaCase(q_lengths=(1, 0, 2) * 15, k_lengths=(3, 1, 2) * 15, d_qk=32, d_v=32), "both"),
)


def copied(x: Any) -> Any:
    """A copy on the GPU, with the strides and the allocation it has."""
    if x is None:
        return None
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).cuda().view(x.dtype)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize(("case", "of"), CASES, ids=lambda x: x if isinstance(x, str) else x.id)
def test_small_mha_backward_call(case: MhaCase, of: str) -> None:
    host = make_mha_inputs(case, "cpu")
    gradients = make_mha_gradients(host, of)
    device = on_gpu(host)
    given = MhaGradients(copied(gradients.dout), copied(gradients.dlse))
    if case.softcap:  # its tanh is approximate: the results have to be the kernel's
        # initcheck does not see what TMA writes.
        on_device = attend(device, out=torch.zeros_like(given.dout))
        results = tuple(x.cpu() for x in on_device)
    else:
        results = exact_results(host)
        on_device = tuple(map(copied, results))
    got = backward_of(BackwardInputs(device, given, on_device))
    check_mha_backward(host, gradients, results, tuple(x.cpu() for x in got))
