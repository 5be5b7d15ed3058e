"""Small calls of flex attention with functions of the user's, which reach the paths that dense attention does
not have: to run under compute-sanitizer, as test_mha_sanitizer.py. Inputs are made, and results compared, on
the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flex_calls import attend
from gpu_support import torch

import rawmla
from kit.flex import (
    FlexCase,
    FlexInputs,
    check_flex,
    make_flex_inputs,
    with_mask_mod,
)

pytestmark = pytest.mark.sanitizer

CASES = (
    FlexCase(b=1, h_q=2, h_kv=2, s_q=150, s_k=300, mask="causal"),
    FlexCase(b=2, h_q=2, h_kv=1, s_q=140, s_k=270, score="bias b h q k", layout="slice"),
    FlexCase(b=2, h_q=2, h_kv=2, s_q=140, s_k=270, mask="documents", score="nested", dtype="float16"),
    FlexCase(b=2, h_q=2, h_kv=2, s_q=140, s_k=270, score="filled", dtype="float16"),
    FlexCase(b=2, b_kv=1, h_q=4, h_kv=2, s_q=70, s_k=300, mask="per batch", score="paged"),
    FlexCase(b=1, h_q=2, h_kv=2, s_q=150, s_k=200, mask="random", block=(32, 64), score="distance"),
    FlexCase(b=1, h_q=2, h_kv=2, s_q=150, s_k=500, mask="window", block=(256, 256), separate=False),
    FlexCase(b=2, h_q=2, h_kv=2, s_q=70, s_k=90, mask="padding", d_qk=59, d_v=111, layout="tokens"),
    FlexCase(b=1, h_q=2, h_kv=2, s_q=140, s_k=270, mask="checkered", d_qk=256, d_v=256),
    FlexCase(b=1, h_q=2, h_kv=2, s_q=130, s_k=140, mask="empty", score="gathered"),
    FlexCase(b=1, h_q=2, h_kv=2, s_q=1, s_k=140, score="softcap", d_qk=128, d_v=64),
)


def on_gpu(host: FlexInputs) -> FlexInputs:
    """Copies of the arrays, with the strides and the allocations they have, and of what functions read."""

    def move(x: Any) -> Any:
        whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).cuda().view(x.dtype)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    def moved(function: Any) -> Any:
        if function is None:
            return None
        captures = {
            name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in function.captures.items()
        }
        return replace(function, captures=captures)

    block_mask = host.block_mask
    if block_mask is not None:
        block_mask = with_mask_mod(block_mask, block_mask.mask_mod).to("cuda")
    return replace(
        host, q=move(host.q), k=move(host.k), v=move(host.v), score=moved(host.score), mask=moved(host.mask),
        block_mask=block_mask,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_flex_call(case: FlexCase) -> None:
    """Functions are CUDA text: those of Python close over tensors of the CPU here."""
    host = make_flex_inputs(case, "cpu")
    device = on_gpu(host)
    # initcheck does not see what TMA writes.
    shape = (*device.q.shape[:-1], -(-case.d_v // 8) * 8)
    out = torch.full(shape, float("nan"), dtype=device.q.dtype, device="cuda")[..., : case.d_v]
    got = attend(device, "cuda", max_scores=True, out=out)
    check_flex(host, tuple(x.cpu() for x in got))


def test_small_block_mask() -> None:
    """The three kernels of a block mask, and a call with it, of more tiles than a GPU has multiprocessors."""
    case = FlexCase(b=80, h_q=2, h_kv=2, s_q=5, s_k=130, mask="prefix", score="head scale")
    host = make_flex_inputs(case, "cpu")
    device = on_gpu(host)
    assert device.mask is not None and host.block_mask is not None
    created = rawmla.create_block_mask(device.mask.cuda(), 80, 1, 5, 130)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(created, name).cpu(), getattr(host.block_mask, name))
    out = torch.full(device.q.shape, float("nan"), dtype=device.q.dtype, device="cuda")
    got = attend(device, "cuda", block_mask=created, out=out)
    check_flex(host, (got[0].cpu(), got[1].cpu(), None))


def test_a_traced_function() -> None:
    case = FlexCase(b=2, h_q=2, h_kv=2, s_q=70, s_k=140, mask="documents", score="alibi table")
    host = make_flex_inputs(case, "cpu")
    device = on_gpu(host)
    assert device.score is not None and device.mask is not None and device.block_mask is not None
    slopes, documents = device.score.captures["slopes"], device.mask.captures["documents"]

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slopes[h].float() * (q - k).abs()

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[b, q] == documents[b, k]) & (q >= k)

    out = torch.full(device.q.shape, float("nan"), dtype=device.q.dtype, device="cuda")
    lists = with_mask_mod(device.block_mask, mask)
    got = attend(device, "cuda", score_mod=score, block_mask=lists, out=out)
    check_flex(host, (got[0].cpu(), got[1].cpu(), None))
