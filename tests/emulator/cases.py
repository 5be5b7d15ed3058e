"""Calls on the emulated device, checked as in the GPU tests: by `rawmla.testing`, at its tolerances.

The cases are those of rawmla.testing, and the calls are made by the helpers of tests/gpu. Memory that no
result may depend on is NaN, and so is what the library allocates.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import rawmla
from rawmla.testing import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from rawmla.testing.flex import FlexCase, check_flex, make_flex_inputs
from rawmla.testing.flex_backward import make_flex_backward_inputs
from rawmla.testing.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs
from rawmla.testing.prefix import PrefixCase, make_prefix_inputs

from .device import Emulator

GPU_TESTS = str(Path(__file__).parents[1] / "gpu")
if GPU_TESTS not in sys.path:  # pytest has it already
    sys.path.append(GPU_TESTS)

import flex_backward_calls  # noqa: E402
import flex_calls  # noqa: E402
import gpu_support  # noqa: E402
import mha_backward_calls  # noqa: E402
import mha_calls  # noqa: E402
import prefix_calls  # noqa: E402
import test_prefill_sanitizer as prefill_calls  # noqa: E402
import test_sparse_sanitizer as sparse_calls  # noqa: E402


@contextlib.contextmanager
def running_on(emulator: Emulator) -> Iterator[Emulator]:
    """Inside, `check` can be called."""
    with_torch = (gpu_support, mha_calls, prefix_calls, flex_calls, mha_backward_calls, flex_backward_calls)
    with contextlib.ExitStack() as stack:
        for module in with_torch:  # without a GPU they have none
            stack.enter_context(mock.patch.object(module, "torch", torch))
        yield stack.enter_context(emulator.installed())


def check(family: str, case: Any, **options: Any) -> None:
    """Make the call of a case and raise AssertionError unless its results are right."""
    _CHECKS[family](case, **options)


def check_mha_inputs(inputs: MhaInputs) -> None:
    """The same of inputs that were changed."""
    buffer, given = mha_calls.out_buffer(inputs)
    out, lse = mha_calls.attend(inputs, out=given)
    assert out is given
    written = torch.full(lse.shape, float("nan"))  # rows of no request are not
    rows = covered_rows(inputs)
    written[rows] = lse[rows]
    check_mha(inputs, (out, written))
    mha_calls.assert_untouched_around(buffer, given)


def _check_mha(case: MhaCase) -> None:
    check_mha_inputs(make_mha_inputs(case, "cpu"))


def _check_prefix(case: PrefixCase) -> None:
    prefix_calls.checked(make_prefix_inputs(case, "cpu"))


def _check_flex(case: FlexCase, form: str = "python") -> None:
    """`form`: functions of Python, which are traced, or "cuda": their text."""
    inputs = make_flex_inputs(case, "cpu")
    buffer, given = flex_calls.out_buffer(inputs)
    check_flex(inputs, flex_calls.attend(inputs, form, max_scores=True, out=given))
    flex_calls.assert_untouched_around(buffer, given)


def check_block_mask(case: FlexCase, form: str = "python") -> None:
    """The lists that the kernels make of the case's mask, against those made by torch."""
    inputs = make_flex_inputs(case, "cpu")
    known, made = inputs.block_mask, flex_calls.created_mask(inputs, form)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        one, wanted = getattr(made, name), getattr(known, name)
        assert (one is None) == (wanted is None), name
        assert one is None or torch.equal(one, wanted), name


def _check_mha_backward(case: MhaCase, of: str = "out", deterministic: bool = False) -> None:
    """`of`: what gradients begin with: "out", "lse" or "both"."""
    call = mha_backward_calls.backward_inputs(make_mha_inputs(case, "cpu"), of)
    mha_backward_calls.check_backward(call, mha_backward_calls.backward_of(call, deterministic=deterministic))


def _check_flex_backward(
    case: FlexCase, of: str = "out", deterministic: bool = False, form: str = "python"
) -> None:
    call = flex_backward_calls.backward_inputs(case, of, make_flex_backward_inputs(case, "cpu"))
    got = flex_backward_calls.backward_of(call, form, deterministic=deterministic)
    flex_backward_calls.check_backward(call, got)


def _check_dense_decode(case: DenseCase) -> None:
    inputs = make_dense_inputs(case, "torch", "cpu")
    gpu_support.check(inputs, gpu_support.decode(inputs, "object"))


def _check_sparse_decode(case: SparseCase) -> None:
    inputs = make_sparse_inputs(case, "torch", "cpu")
    sparse_calls.check_on_host(inputs, gpu_support.sparse_decode(inputs))


def _check_sparse_prefill(case: SparseCase) -> None:
    inputs = make_sparse_inputs(case, "torch", "cpu")
    got = rawmla.flash_mla_sparse_fwd(*prefill_calls.arguments(inputs), **prefill_calls.keywords(inputs))
    prefill_calls.check_prefill_on_host(inputs, got)


_CHECKS: dict[str, Any] = {
    "mha": _check_mha,
    "prefix": _check_prefix,
    "flex": _check_flex,
    "mha_backward": _check_mha_backward,
    "flex_backward": _check_flex_backward,
    "dense_decode": _check_dense_decode,
    "sparse_decode": _check_sparse_decode,
    "sparse_prefill": _check_sparse_prefill,
}
