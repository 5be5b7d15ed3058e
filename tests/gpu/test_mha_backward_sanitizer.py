"""Small backward calls of dense attention that reach every role and path of its kernels: to run under
compute-sanitizer, as test_sparse_sanitizer.py. Inputs are made, and results compared, on the CPU.
"""

from typing import Any

import pytest
from gpu_support import torch
from mha_backward_calls import BackwardInputs, backward_of, gradients_of_some
from mha_calls import attend
from test_mha_sanitizer import on_gpu

import rawmla
from kit.mha import MhaCase, make_mha_inputs
from kit.mha_backward import (
    MhaGradients,
    check_mha_backward,
    exact_results,
    make_mha_gradients,
    reference_backward,
)
from rawmla.kernels.mha_backward_variants import Needs

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
# By keys in the wide form, and by product.
OTHER_FORMS = (
    (MhaCase(b=1, s_q=140, s_k=270, h_q=2, h_kv=1, d_qk=192, causal=True), "out"),
    (MhaCase(**RAGGED, k_used=(3, 5, 0, 200), h_q=2, h_kv=2, d_qk=192, window=(90, 5)), "both"),
    (MhaCase(b=1, s_q=140, s_k=150, h_q=2, h_kv=1, d_qk=256, d_v=256, causal=True), "both"),
    (MhaCase(**RAGGED, q_used=(2, 0, 1, 100), h_q=2, h_kv=2, d_qk=256, d_v=256), "out"),
)
FIXED_ORDER = (
    (MhaCase(b=2, s_q=150, s_k=300, h_q=2, h_kv=2, causal=True), "out"),
    (MhaCase(**RAGGED, h_q=2, h_kv=1, d_qk=192), "out"),
    (MhaCase(**RAGGED, h_q=2, h_kv=1, d_qk=256, d_v=256, window=(90, 5)), "both"),
    (MhaCase(**RAGGED, h_q=2, h_kv=1, d_qk=64, d_v=64, causal=True), "out"),
)
SAME: dict[str, Any] = {"q_lengths": (5, 0, 1, 140), "k_lengths": (5, 0, 1, 140), "h_q": 2, "h_kv": 2}
PACKED = (
    MhaCase(**SAME, packed="qkv", d_qk=192, causal=True),
    MhaCase(**SAME, packed="qkv4"),
    MhaCase(**RAGGED, h_q=2, h_kv=1, packed="kv4", d_qk=256, d_v=256),
    MhaCase(**SAME, packed="qkv4", d_qk=64, d_v=64, dtype="float16"),
)
PARTIAL = tuple(
    (MhaCase(b=1, s_q=70, s_k=140, h_q=2, h_kv=1, d_qk=d_qk, d_v=d_v, causal=True), "out", needs)
    for d_qk, d_v in ((64, 64), (128, 128), (192, 128), (256, 256))
    for needs in (
        *(Needs(True, False, False, False), Needs(False, True, True, False)),
        # The wide form is none of dv alone.
        *((Needs(False, True, False, False), Needs(False, False, True, False)) if d_qk == 192 else ()),
    )
)


def copied(x: Any) -> Any:
    """A copy on the GPU, with the strides and the allocation it has."""
    if x is None:
        return None
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).cuda().view(x.dtype)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def check_small_call(case: MhaCase, of: str, **more: Any) -> None:
    """The gradients that the plain functions make."""
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
    got = backward_of(BackwardInputs(device, given, on_device), **more)
    check_mha_backward(host, gradients, results, tuple(x.cpu() for x in got))


@pytest.mark.parametrize(
    ("case", "of"), (*CASES, *OTHER_FORMS), ids=lambda x: x if isinstance(x, str) else x.id
)
def test_small_mha_backward_call(case: MhaCase, of: str) -> None:
    check_small_call(case, of)


@pytest.mark.parametrize(("case", "of"), FIXED_ORDER, ids=lambda x: x if isinstance(x, str) else x.id)
def test_small_mha_backward_call_in_a_fixed_order(case: MhaCase, of: str) -> None:
    """Tiles wait for the turns of others."""
    check_small_call(case, of, deterministic=True)


@pytest.mark.parametrize(
    ("case", "of", "needs"),
    [pytest.param(*call, id=f"{call[0].id}-{''.join('01'[need] for need in call[2])}") for call in PARTIAL],
)
def test_small_mha_gradients_of_some(case: MhaCase, of: str, needs: Needs) -> None:
    """As autograd asks for them; in place of the others stand the reference's."""
    host = make_mha_inputs(case, "cpu")
    start = make_mha_gradients(host, of)
    results = exact_results(host)
    arrays = [copied(x) for x in (start.dout, host.q, host.k, host.v, *results)]
    keywords = {"causal": case.causal, "dlse": copied(start.dlse)}
    got = gradients_of_some(needs, rawmla.flash_attn_backward, *arrays, **keywords)
    want = reference_backward(host, start, results).values
    made = tuple(
        one.cpu() if needed else other.to(host.q.dtype)
        for one, other, needed in zip(got, want, needs, strict=False)
    )
    check_mha_backward(host, start, results, made)


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_small_mha_gradients_of_packed_arrays(case: MhaCase) -> None:
    """They are written into one array."""
    parts = torch.full_like(make_mha_inputs(case, "cpu").parts, float("nan")).cuda()
    names = ("dq", "dk", "dv")[-3 if case.packed.startswith("qkv") else -2 :]
    if case.packed.endswith("4"):
        views = parts.unbind(1)
    else:
        views = parts.split([case.d_qk] * (len(names) - 1) + [case.d_v], dim=-1)
    check_small_call(case, "out", **dict(zip(names, views, strict=True)))
    assert bool(parts.cpu().isfinite().all())
