"""Small calls of dense attention that reach every role and path of its kernels: to run under
compute-sanitizer, as test_sparse_sanitizer.py. Inputs are made, and results compared, on the CPU.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
from gpu_support import torch
from mha_calls import attend

from kit.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs

pytestmark = pytest.mark.sanitizer

RAGGED: dict[str, Any] = {"q_lengths": (5, 0, 1, 140), "k_lengths": (3, 7, 0, 270)}
CASES = (
    MhaCase(b=1, s_q=1, s_k=1, h_q=1, h_kv=1),
    MhaCase(b=2, s_q=150, s_k=300, h_q=2, h_kv=2),
    MhaCase(b=2, s_q=150, s_k=300, h_q=2, h_kv=2, causal=True, layout="heads"),
    MhaCase(b=1, s_q=150, s_k=40, h_q=2, h_kv=2, causal=True),
    MhaCase(b=1, s_q=300, s_k=400, h_q=2, h_kv=1, window=(30, 5), layout="slice"),
    MhaCase(b=1, s_q=140, s_k=270, h_q=2, h_kv=2, softcap=15.0, dtype="float16"),
    MhaCase(b=2, s_q=140, s_k=270, h_q=2, h_kv=2, alibi="requests"),
    MhaCase(
        b=1, s_q=70, s_k=140, h_q=3, h_kv=1, window=(40, -1), softcap=15.0, alibi="heads", sink="infinite"
    ),
    MhaCase(b=1, s_q=70, s_k=140, sink="float32", causal=True),
    MhaCase(b=1, s_q=70, s_k=140, sink="bfloat16"),
    MhaCase(**RAGGED, causal=True),
    MhaCase(**RAGGED, q_used=(2, 0, 1, 100), k_used=(3, 0, 0, 141), rows_around=3, layout="slice"),
    MhaCase(**RAGGED, window=(20, 3), k_used=(1, 7, 0, 269)),
    MhaCase(q_lengths=(1, 0, 2) * 50, k_lengths=(3, 1, 2) * 50, h_q=4, h_kv=2),
    MhaCase(b=3, s_q=3, s_k=150, h_q=8, h_kv=1, causal=True),
    MhaCase(**RAGGED, h_q=8, h_kv=2, causal=True),
    MhaCase(b=1, s_q=200, s_k=300, h_q=2, h_kv=2, d_qk=64, d_v=64, causal=True),
    MhaCase(**RAGGED, d_qk=64, d_v=64, k_used=(3, 5, 0, 200)),
    MhaCase(b=1, s_q=140, s_k=270, h_q=2, h_kv=2, d_qk=192, d_v=128, causal=True),
    MhaCase(b=1, s_q=140, s_k=270, h_q=2, h_kv=2, d_qk=256, d_v=256),
    MhaCase(b=1, s_q=140, s_k=270, h_q=2, h_kv=2, d_qk=96, d_v=96, causal=True, dtype="float16"),
    MhaCase(b=1, s_q=200, s_k=300, h_q=2, h_kv=1, d_qk=64, d_v=64, softcap=15.0, alibi="heads"),
    MhaCase(b=2, s_q=70, s_k=90, h_q=2, h_kv=2, d_qk=59, d_v=111, layout="slice"),
    MhaCase(**RAGGED, d_qk=59, d_v=111),
    MhaCase(**{**RAGGED, "k_lengths": (5, 0, 1, 140)}, packed="qkv", h_q=2, h_kv=2, d_qk=192, causal=True),
    MhaCase(**{**RAGGED, "k_lengths": (5, 0, 1, 140)}, packed="qkv4", h_q=2, h_kv=2),
    MhaCase(**RAGGED, packed="kv4", d_qk=64, d_v=64),
)


def on_gpu(host: MhaInputs) -> MhaInputs:
    """Copies of the arrays, with the strides and the allocations they have."""
    moved: dict[int, Any] = {}

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in moved:
            moved[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).cuda()
        whole = moved[storage.data_ptr()].view(x.dtype)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return replace(host, **{field.name: move(getattr(host, field.name)) for field in fields(host)})


def check_small_call(case: MhaCase) -> None:
    host = make_mha_inputs(case, "cpu")
    device = on_gpu(host)
    # initcheck does not see what TMA writes.
    shape = (*device.q.shape[:-1], -(-case.d_v // 8) * 8)
    out = torch.full(shape, float("nan"), dtype=device.q.dtype, device="cuda")[..., : case.d_v]
    out, lse = attend(device, out=out)
    # Rows of no request are not written.
    rows, written = covered_rows(host), torch.full(lse.shape, float("nan"))
    written[rows] = lse[rows].cpu()
    check_mha(host, (out.cpu(), written))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_mha_call(case: MhaCase) -> None:
    check_small_call(case)


@pytest.mark.parametrize("causal", (False, True))
def test_more_tiles_than_sms(causal: bool) -> None:
    """Tiles that a CTA takes one after the other, by turns, or causal ones from the counter."""
    check_small_call(MhaCase(b=150, s_q=5, s_k=130, h_q=2, h_kv=2, causal=causal))
