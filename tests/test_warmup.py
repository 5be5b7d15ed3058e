"""`rawmla.warmup` and `compile --all`: which variants they load, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_params import DENSE_DECODE, PARAMS, SPARSE_DECODE, family

import rawmla
from rawmla import jit
from rawmla.jit import KernelSpec
from rawmla.kernels import (
    all_specs,
    default_specs,
    mha_backward_variants,
    mha_forward_variants,
    mla_cache_gather,
    mla_cache_rows,
    mla_combine,
    mla_metadata,
    mla_sparse,
    mla_unite_selections,
)
from rawmla.kernels.operations import OPERATIONS, OPTIONS, specs_of

SPECS = all_specs()
BACKWARD = {name for name, _ in PARAMS if name.startswith("mha_backward")}


def loaded_by(monkeypatch: pytest.MonkeyPatch, *operations: str, **options: Any) -> list[KernelSpec]:
    """What warmup loads."""
    loaded: list[KernelSpec] = []
    with monkeypatch.context() as patched:
        patched.setattr(jit, "get_kernel", lambda spec, device: loaded.append(spec))
        rawmla.warmup(*operations, **options, device=0)
    assert len(set(loaded)) == len(loaded) and set(loaded) <= set(SPECS)
    return loaded


def test_defaults_and_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is dense decoding in bfloat16. Numbers of NumPy and iterators are options too."""
    assert loaded_by(monkeypatch) == default_specs()
    found = {(spec.name, dict(spec.defines).get("DTYPE", 0)) for spec in default_specs()}
    names = ("mla_metadata", "mla_combine", "mla_merge_states", *DENSE_DECODE)
    assert found == {*((name, 0) for name in names), ("mla_merge_states", 2)}
    given: dict[str, Any] = {"d_qk": np.array([576]), "page_block_sizes": iter([np.int32(64)])}
    assert loaded_by(monkeypatch, **given) == default_specs()
    assert set(loaded_by(monkeypatch, dtypes=["bfloat16"], page_block_sizes=[192])) == set(default_specs())
    every = {name: option.every for name, option in OPTIONS.items()}
    assert loaded_by(monkeypatch, **every) == loaded_by(monkeypatch, *OPERATIONS, **every) == SPECS
    assert {family(spec) for spec in SPECS} == set(PARAMS)


KERNELS = {
    "dense_decode": {"mla_metadata", "mla_combine", *DENSE_DECODE},
    "sparse_decode": {"mla_metadata", "mla_combine", *SPARSE_DECODE},
    "sparse_prefill": {
        *("mla_metadata", "mla_combine", "mla_cache_gather", "mla_find_not_finite"),
        *("mla_unite_selections", *SPARSE_DECODE),
    },
    "cache": {"mla_cache_write", "mla_cache_gather"},
    "indices": {"mla_convert_indices"},
    "merge": {"mla_merge_states"},
    "metadata": {"mla_metadata"},
    "mha": {"mha_forward", "mha_combine"},
    "mha_backward": BACKWARD,
    "prefix": {"mha_forward", "mha_combine"},
    "kvcache": {"mha_decode", "mha_decode_combine", "mha_forward", "mha_combine"},
    "flex": {"block_mask_lists", "block_mask_ranks", "block_mask_scatter", "flex_captured_finish"},
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Its kernels alone, of every format unless some are given."""
    loaded = loaded_by(monkeypatch, operation)
    assert {spec.name for spec in loaded} == KERNELS[operation]
    if operation == "sparse_decode":
        assert loaded == loaded_by(monkeypatch, operation, sparse_formats=["v32", "model1", "bf16"])
        assert set(loaded) > set(loaded_by(monkeypatch, operation, sparse_formats=["v32"]))


def test_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a prefill call over caches of these formats launches is loaded."""
    assert set(loaded_by(monkeypatch, dtypes=[], prefill_formats=["v32", "bf16"])) == {
        *mla_metadata.specs(),
        *mla_combine.specs("bfloat16", max_logits=True),
        *mla_sparse.specs("v32", max_logits=True),
        *mla_sparse.specs("bf16", max_logits=True),
        *[mla_sparse.spec("bf16", d_qk, 16, True, n) for d_qk in (512, 576) for n in (2, 4, 8)],
        *mla_unite_selections.specs(),
        mla_cache_gather.spec(mla_cache_rows.V32, False),
    }


def test_head_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of MHA, which loads flex too, of its backward, and of prefix prefill; none by default."""
    others = set(loaded_by(monkeypatch, dtypes=["float16"]))
    pairs = [(128, 128), (192, 128)]
    backward = [*mha_backward_variants.specs("float16", 96, 96), mha_backward_variants.CLEAR_SPEC]
    forward = mha_forward_variants.specs("float16", pairs)
    for operation, options, wanted, more in (
        ("mha", {"mha_head_dims": pairs}, forward, specs_of(["flex"])),
        ("mha_backward", {"mha_backward_head_dims": [(96, 96)]}, backward, []),
    ):
        given: dict[str, Any] = {**options, "dtypes": ["float16"]}
        assert loaded_by(monkeypatch, operation, **given) == wanted
        assert set(loaded_by(monkeypatch, **given)) - others == {*wanted, *more}
    assert loaded_by(monkeypatch, "prefix", prefix_head_dims=[64]) == mha_forward_variants.specs(
        "bfloat16", [(64, 64)], mha_forward_variants.USUAL_CACHES
    )


@pytest.mark.parametrize(
    ("operations", "options", "error", "text"),
    [
        ((), {"dtypes": "bfloat16"}, TypeError, ": expected an iterable of str, got 'bfloat16'"),
        ((), {"d_qk": 576}, TypeError, ": expected an iterable of int, got 576"),
        ((), {"d_qk": ["576"]}, TypeError, ": expected an iterable of int, got '576' in it"),
        ((), {"d_qk": [True]}, TypeError, ": expected an iterable of int, got True in it"),
        ((), {"dtypes": ["fp8"]}, ValueError, ": expected 'bfloat16' or 'float16', got 'fp8'"),
        ((), {"d_qk": [192]}, ValueError, ": expected 576 or 512, got 192"),
        ((), {"page_block_sizes": [0]}, ValueError, ": expected 16, 32 or a multiple of 64"),
        ((), {"page_block_sizes": [48]}, ValueError, ": expected 16, 32 or a multiple of 64"),
        ((), {"prefill_formats": ["fp8"]}, ValueError, ": expected 'v32' or 'model1'"),
        ((), {"mha_head_dims": [64, 64]}, TypeError, ": .* of tuple, got 64 in it"),
        ((), {"mha_head_dims": [(64, 257)]}, ValueError, r": .* 1 to 256, got \(64, 257\)"),
        ((), {"mha_head_dims": [(0, 64)]}, ValueError, r": .* 1 to 256, got \(0, 64\)"),
        ((), {"mha_head_dims": [(64, 64, 64)]}, ValueError, ": expected pairs"),
        ((), {"mha_head_dims": [(64, 64.0)]}, ValueError, ": .* of ints"),
        ((), {"prefix_head_dims": [257]}, ValueError, ": .* 1 to 256, got 257"),
        (("mha",), {"mha_backward_head_dims": [(64, 64)]}, ValueError, ": expected None, as no operation"),
        (("merge",), {"sparse_formats": ["v32"]}, ValueError, r": expected None, .* got \['v32'\]"),
        (("decode",), {}, ValueError, "operations: expected names among dense_decode, .*, got 'decode'"),
        ((["bfloat16"],), {}, TypeError, r"operations: expected names, got \['bfloat16'\]"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    operations: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    """An option's text begins with its name. No device is looked for before."""
    monkeypatch.setattr(jit, "current_device", lambda: pytest.fail("a device was looked for"))
    with pytest.raises(error, match=f"^{''.join(options)}{text}"):
        rawmla.warmup(*operations, **options)
