"""Small sparse calls that reach every path of the kernel: the list to run under compute-sanitizer.

Inputs and reference are computed on the CPU, so that the sanitizer watches this kernel and little else:

    compute-sanitizer --tool memcheck python -m pytest -m sanitizer tests/gpu/test_sparse_sanitizer.py
"""

from dataclasses import replace
from typing import Any

import pytest
from gpu_support import (
    as_pair,
    sparse_arguments,
    sparse_lse_tolerance,
    sparse_plan,
    torch,
)

import rawmla
from kit import SparseCase, SparseInputs, check_close, make_sparse_inputs, out_tolerance
from kit.plans import write_plan
from rawmla import reference

pytestmark = pytest.mark.sanitizer

CASES = (
    SparseCase(b=1, h_q=1, s_k=1, topk=1, page_block_size=1, invalid=0.0, power_of_two_scales=True),
    SparseCase(b=2, s_q=2, h_q=16, s_k=90, topk=70, page_block_size=2, lengths=(0, 70), index_gap=1),
    SparseCase(b=2, h_q=66, s_k=300, topk=200, layout="v32", sink=True, block_gap=1, empty_rows=0.5, seed=1),
    SparseCase(b=1, h_q=128, s_k=700, topk=650, layout="model1", page_block_size=53, sharp=True),
    SparseCase(
        b=3,
        s_q=2,
        h_q=9,
        s_k=200,
        topk=130,
        layout="model1",
        page_block_size=61,
        block_gap=1,
        lengths=(1, 0, 300),
        extra_s_k=100,
        extra_topk=65,
        extra_page_block_size=2,
        extra_lengths=(0, 0, 64),
        sink=True,
    ),
    SparseCase(b=2, h_q=64, s_k=100, topk=33, extra_s_k=70, extra_topk=1, extra_page_block_size=64),
    SparseCase(b=2, s_q=2, h_q=16, s_k=150, topk=133, layout="bf16", d_qk=576, page_block_size=7),
    SparseCase(b=2, h_q=63, s_k=150, topk=64, layout="bf16", d_qk=512, block_gap=1, sink=True),
)

NAMES = ("q", "k_cache", "indices", "topk_length", "extra_k_cache", "extra_indices", "extra_topk_length")


def on_gpu(case: SparseCase) -> tuple[SparseInputs, SparseInputs]:
    """The inputs on the CPU and their copies on the GPU, with the strides and the allocations they have."""
    host = make_sparse_inputs(case, "torch", "cpu")

    def move(tensor: Any) -> Any:
        if tensor is None:
            return None
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).cuda()
        return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return host, replace(host, **{name: move(getattr(host, name)) for name in (*NAMES, "attn_sink")})


def check_on_host(host: SparseInputs, got: tuple["torch.Tensor", "torch.Tensor"]) -> tuple[Any, Any]:
    """Compare with the NumPy reference; returns out and what it should be."""

    def as_numpy(tensor: Any) -> Any:
        if tensor is None:
            return None
        return tensor.double().numpy() if tensor.element_size() == 2 else tensor.numpy()

    arrays = replace(host, **{name: as_numpy(getattr(host, name)) for name in (*NAMES, "attn_sink")})
    want_out, want_lse = reference.flash_mla_with_kvcache(*sparse_arguments(arrays), **arrays.keywords())
    out, lse = (x.cpu().double().numpy() for x in got)
    check_close(f"{host.case.id} out", out, want_out, out_tolerance("bfloat16"))
    check_close(f"{host.case.id} lse", lse, want_lse, sparse_lse_tolerance(host))
    return out, want_out


@pytest.mark.parametrize("form", ("object", "tensors", "batch_invariant"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_small_sparse_call(case: SparseCase, form: str) -> None:
    """With a plan of tensors, q is a pair."""
    host, device = on_gpu(case)
    invariant = form == "batch_invariant"
    metadata, num_splits = sparse_plan(
        device, "object" if form == "object" else "tensors", enable_batch_invariant=invariant
    )
    q, *others = sparse_arguments(device)
    got = rawmla.flash_mla_with_kvcache(
        as_pair(q) if form == "tensors" else q,
        *others,
        metadata,
        num_splits,
        **device.keywords(),
        enable_batch_invariant=invariant,
    )
    check_on_host(host, got)


@pytest.mark.parametrize("layout", ("v32", "model1", "bf16"))
def test_sparse_call_split_at_every_block(layout: str) -> None:
    case = SparseCase(
        b=4,
        s_q=2,
        h_q=80,
        s_k=340,
        topk=330,
        layout=layout,
        lengths=(200, 64, 0, 330),
        extra_topk=70,
        extra_lengths=(70, 0, 0, 1),
        sink=True,
    )
    host, device = on_gpu(case)
    tokens = [256 + 128, 64, 0, 384 + 64]
    rows, num_splits = write_plan(
        tokens, [1] * 16, "tensors", idle_form="negative", idle_before=1, idle_after=2
    )
    got = rawmla.flash_mla_with_kvcache(
        *sparse_arguments(device),
        torch.from_numpy(rows).cuda(),
        torch.from_numpy(num_splits).cuda(),
        **device.keywords(),
    )
    check_on_host(host, got)


@pytest.mark.parametrize(("b", "topk"), ((1, 1), (33, 2051)))
def test_sparse_plan_alone(b: int, topk: int) -> None:
    lengths = torch.zeros(b, dtype=torch.int32).cuda()
    _, num_splits = rawmla.get_mla_metadata(lengths, 128, 1, 128, True, topk)
    assert int(num_splits[0]) == 0 and int(num_splits[-1]) >= b
