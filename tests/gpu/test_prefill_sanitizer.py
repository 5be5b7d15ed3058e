"""Small prefill calls that reach every path of the kernels: to run under compute-sanitizer, as
test_sparse_sanitizer.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_support import as_pair, prefill_kv, small_plans, united_selections
from test_sparse_sanitizer import on_gpu

import rawmla
from kit import (
    SparseCase,
    SparseInputs,
    check_close,
    prefill_lse_tolerance,
    prefill_out_tolerance,
)
from rawmla import reference

pytestmark = pytest.mark.sanitizer

ROWS: dict[str, Any] = {"page_block_size": 1, "layout": "bf16", "shared": True}
CASES = (
    SparseCase(b=1, h_q=1, s_k=1, topk=1, invalid=0.0, **ROWS),
    SparseCase(b=3, h_q=16, s_k=90, topk=70, lengths=(0, 70, 1), index_gap=1, **ROWS),
    SparseCase(b=2, h_q=66, s_k=300, topk=200, sink=True, block_gap=1, empty_rows=0.5, seed=1, **ROWS),
    SparseCase(b=1, h_q=128, d_qk=512, s_k=700, topk=650, **ROWS),
    SparseCase(b=150, h_q=9, s_k=60, topk=65, lengths="random", sink=True, **ROWS),
    SparseCase(b=2, h_q=16, s_k=300, topk=200, page_block_size=7, shared=True, power_of_two_scales=True),
    SparseCase(b=2, h_q=63, s_k=300, topk=133, page_block_size=53, layout="model1", shared=True, sink=True),
    SparseCase(
        b=2, h_q=64, s_k=100, topk=33, page_block_size=2, block_gap=1, shared=True, power_of_two_scales=True
    ),
    SparseCase(b=30, h_q=33, s_k=50, topk=40, page_block_size=7, layout="model1", block_gap=1, shared=True),
    SparseCase(b=3, h_q=80, s_k=200, topk=150, shared=True, sink=True, power_of_two_scales=True),
    SparseCase(b=3, h_q=128, s_k=200, topk=150, layout="model1", lengths=(0, 150, 60), shared=True),
)


def check_prefill_on_host(host: SparseInputs, got: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Compare with the NumPy reference; returns out and what it should be."""

    def as_numpy(tensor: Any) -> Any:
        if tensor is None:
            return None
        return tensor.double().numpy() if tensor.element_size() == 2 else tensor.numpy()

    names = ("q", "k_cache", "indices", "topk_length", "attn_sink")
    arrays = replace(host, **{name: as_numpy(getattr(host, name)) for name in names})
    want = reference.flash_mla_sparse_fwd(*arguments(arrays), **keywords(arrays))
    tolerances = (prefill_out_tolerance(), prefill_lse_tolerance(), prefill_lse_tolerance())
    for name, one, wanted, tolerance in zip(("out", "max_logits", "lse"), got, want, tolerances, strict=True):
        check_close(f"{host.case.id} {name}", one.cpu().double().numpy(), wanted, tolerance)
    return got[0].cpu().double().numpy(), want[0]


def arguments(inputs: SparseInputs) -> tuple[Any, ...]:
    """The positional arguments of `flash_mla_sparse_fwd`."""
    return inputs.q[:, 0], prefill_kv(inputs), inputs.indices, inputs.case.width**-0.5


def keywords(inputs: SparseInputs) -> dict[str, Any]:
    """The others."""
    return {
        "attn_sink": inputs.attn_sink,
        "topk_length": inputs.topk_length,
        "is_fp8_kvcache": inputs.case.layout != "bf16",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("pair", (False, True), ids=("one q", "pair"))
def test_small_prefill_call(case: SparseCase, pair: bool) -> None:
    host, device = on_gpu(case)
    q, *others = arguments(device)
    got = rawmla.flash_mla_sparse_fwd(as_pair(q) if pair else q, *others, **keywords(device))
    check_prefill_on_host(host, got)


def test_prefill_in_chunks() -> None:
    """Plans of a few tokens each, which use the same scratch one after the other."""
    case = SparseCase(b=13, h_q=17, d_qk=512, s_k=150, topk=140, lengths="random", sink=True, **ROWS)
    host, device = on_gpu(case)
    with small_plans(max_batch=5):
        got = rawmla.flash_mla_sparse_fwd(*arguments(device), **keywords(device))
    check_prefill_on_host(host, got)
    assert not any(np.isnan(x.cpu().numpy()).any() for x in got[1:])


@pytest.mark.parametrize(("h_q", "layout"), ((8, "bf16"), (16, "v32"), (32, "model1")))
def test_united_selections(h_q: int, layout: str) -> None:
    """Query tokens that share the rows of a tile, rows that are selected twice, and chunks."""
    case = SparseCase(
        b=37, h_q=h_q, s_k=41, topk=70, duplicates=0.3, layout=layout, page_block_size=1, lengths="random",
        shared=True, sink=True, power_of_two_scales=layout == "v32",
    )  # fmt: skip
    host, device = on_gpu(case)
    with united_selections(scratch_bytes=1 << 15, tokens=1):
        got = rawmla.flash_mla_sparse_fwd(*arguments(device), **keywords(device))
    check_prefill_on_host(host, got)
