"""Small calls that reach every path of the kernels: the list to run under compute-sanitizer.

Inputs and reference are computed on the CPU, so that the sanitizer watches these kernels and little else:

    compute-sanitizer --tool memcheck python -m pytest -m sanitizer tests/gpu/test_sanitizer_cases.py
"""

from dataclasses import replace

import numpy as np
import pytest
from gpu_support import as_pair, call_arguments, torch

import rawmla
from kit import (
    DenseCase,
    DenseInputs,
    check_close,
    lse_tolerance,
    make_dense_inputs,
    out_tolerance,
)
from kit.plans import write_plan
from rawmla import reference

pytestmark = pytest.mark.sanitizer

CASES = (
    DenseCase(b=1, h_q=1, lengths=(1,)),
    DenseCase(b=2, h_q=16, lengths=(0, 0)),
    DenseCase(b=3, s_q=2, h_q=16, lengths=(0, 63, 129), causal=True),
    DenseCase(b=1, h_q=128, lengths=(700,)),
    DenseCase(b=2, s_q=2, h_q=128, lengths=(1, 400), causal=True, dtype="float16"),
    DenseCase(b=2, s_q=4, h_q=9, h_kv=3, lengths=(3, 200), causal=True, page_block_size=16),
    DenseCase(b=2, h_q=63, lengths=(65, 300), d_qk=512, page_block_size=32),
    DenseCase(b=3, h_q=64, lengths=(17, 0, 520), page_block_size=256, dtype="float16", d_qk=512),
    DenseCase(b=4, h_q=16, lengths=(100, 250, 64, 30), block_gap=8, table_gap=3),
)


def on_gpu(case: DenseCase) -> tuple[DenseInputs, DenseInputs]:
    """The inputs on the CPU and their copies on the GPU, with the strides they have."""
    host = make_dense_inputs(case, "torch", "cpu")
    cache = torch.empty((len(host.k_cache), case.page_block_size + case.block_gap, case.h_kv, case.d_qk))
    cache = cache.to(host.q.dtype).fill_(float("nan"))
    cache[:, : case.page_block_size] = host.k_cache
    device = replace(
        host,
        q=host.q.cuda(),
        k_cache=cache.cuda()[:, : case.page_block_size],
        block_table=host.block_table.contiguous().cuda(),
        cache_seqlens=host.cache_seqlens.cuda(),
    )
    return host, device


def check_on_host(host: DenseInputs, got: tuple["torch.Tensor", "torch.Tensor"]) -> None:
    """Compare with the NumPy reference."""
    case = host.case
    want_out, want_lse = reference.flash_mla_with_kvcache(
        host.q.double().numpy(),
        host.k_cache.double().numpy(),
        host.block_table.numpy(),
        host.cache_seqlens.numpy(),
        512,
        causal=case.causal,
    )
    out, lse = (x.cpu().double().numpy() for x in got)
    check_close(f"{case.id} out", out, want_out, out_tolerance(case.dtype))
    check_close(f"{case.id} lse", lse, want_lse, lse_tolerance())


@pytest.mark.parametrize("form", ("object", "tensors", "batch_invariant"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_call(case: DenseCase, form: str) -> None:
    """With a plan of tensors, q is a pair."""
    host, device = on_gpu(case)
    invariant = form == "batch_invariant"
    if form == "object":
        metadata, num_splits = rawmla.get_mla_metadata()
    else:
        metadata, num_splits = rawmla.get_mla_metadata(
            device.cache_seqlens,
            case.s_q * case.h_q // case.h_kv,
            case.h_kv,
            enable_batch_invariant=invariant,
        )
    q, *others = call_arguments(device)
    got = rawmla.flash_mla_with_kvcache(
        as_pair(q) if form == "tensors" else q,
        *others,
        metadata,
        num_splits,
        causal=case.causal,
        enable_batch_invariant=invariant,
    )
    check_on_host(host, got)


def test_split_at_every_block() -> None:
    lengths = (200, 64, 0, 330)
    host, device = on_gpu(DenseCase(b=4, s_q=2, h_q=80, lengths=lengths, causal=True))
    rows, num_splits = write_plan(
        lengths, [1] * 12, "tensors", idle_form="negative", idle_before=1, idle_after=2
    )
    got = rawmla.flash_mla_with_kvcache(
        *call_arguments(device),
        torch.from_numpy(rows).cuda(),
        torch.from_numpy(num_splits).cuda(),
        causal=True,
    )
    check_on_host(host, got)


@pytest.mark.parametrize("b", (1, 33, 1500))
def test_plan_alone(b: int) -> None:
    lengths = torch.from_numpy(np.random.default_rng(b).integers(0, 500, b, dtype=np.int32)).cuda()
    _, num_splits = rawmla.get_mla_metadata(lengths, 128, 1)
    assert int(num_splits[0]) == 0 and int(num_splits[-1]) >= b
