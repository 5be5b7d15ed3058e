"""Calls on the emulated device, checked as in the GPU tests: by tests/kit, at its tolerances.

The cases are those of tests/kit, and the calls are made by the helpers of tests/gpu. Memory that no
result may depend on is NaN, and so is what the library allocates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import flex_backward_calls
import flex_calls
import gpu_support
import mha_backward_calls
import mha_calls
import numpy as np
import prefix_calls
import test_lengths_sanitizer as lengths_calls
import test_prefill_sanitizer as prefill_calls
import test_sparse_sanitizer as sparse_calls
import torch

import rawmla
from kit import (
    DenseCase,
    SparseCase,
    flex,
    flex_backward,
    make_dense_inputs,
    make_sparse_inputs,
    measure,
    mha,
    mha_backward,
    out_tolerance,
    prefix,
)
from kit.flex import FlexCase, check_flex, make_flex_inputs
from kit.flex_backward import make_flex_backward_inputs
from kit.mha import MhaCase, MhaInputs, check_mha, covered_rows, make_mha_inputs
from kit.prefix import PrefixCase, make_prefix_inputs
from operations import caches
from rawmla import reference

from .device import Emulator


@contextlib.contextmanager
def running_on(emulator: Emulator) -> Iterator[Emulator]:
    """Inside, `check` can be called."""
    with_torch = (
        *(gpu_support, mha_calls, prefix_calls, flex_calls, mha_backward_calls, flex_backward_calls),
        lengths_calls,
    )
    with contextlib.ExitStack() as stack:
        for module in with_torch:  # without a GPU they have none
            stack.enter_context(mock.patch.object(module, "torch", torch))
        yield stack.enter_context(emulator.installed())


Pairs = Callable[[], Sequence[tuple[Any, Any]]]
"""Computes results, each with its float64 reference."""


def check(family: str, case: Any, **options: Any) -> Callable[[], float]:
    """Make the call of a case and raise AssertionError unless its results are right. The function returned
    gives the largest L2 error of a result, relative to the norm of its float64 reference.
    """
    pairs = _CHECKS[family](case, **options)
    return lambda: max(measure(got, want, out_tolerance("bfloat16")).rel_l2 for got, want in pairs())


def check_mha_inputs(inputs: MhaInputs) -> Pairs:
    """The same of inputs that were changed."""
    want = mha.reference(inputs)
    buffer, given = mha_calls.out_buffer(inputs)
    out, lse = mha_calls.attend(inputs, out=given)
    assert out is given
    written = torch.full(lse.shape, float("nan"))  # rows of no request are not
    rows = covered_rows(inputs)
    written[rows] = lse[rows]
    check_mha(inputs, (out, written), want)
    attended = out[rows].clone()  # the next line spoils it
    mha_calls.assert_untouched_around(buffer, given)
    return lambda: [(attended, want[0][rows])]


def _check_mha(case: MhaCase) -> Pairs:
    return check_mha_inputs(make_mha_inputs(case, "cpu"))


def _check_prefix(case: PrefixCase) -> Pairs:
    inputs = make_prefix_inputs(case, "cpu")
    want = prefix.reference(inputs)
    written = prefix_calls.checked(inputs, want=want).clone()
    if case.out_scale is not None:
        written = prefix.decode_out(written) * float(inputs.out_scale)
    return lambda: [(written, want[prefix.written_rows(inputs)])]


def _check_flex(case: FlexCase, form: str = "python") -> Pairs:
    """`form`: functions of Python, which are traced, or "cuda": their text."""
    inputs = make_flex_inputs(case, "cpu")
    want = flex.reference(inputs)
    buffer, given = flex_calls.out_buffer(inputs)
    check_flex(inputs, flex_calls.attend(inputs, form, max_scores=True, out=given), want)
    out = given.clone()  # the next line spoils it
    flex_calls.assert_untouched_around(buffer, given)
    return lambda: [(out, want[0])]


def check_block_mask(case: FlexCase, form: str = "python") -> Pairs:
    """The lists that the kernels make of the case's mask, against those made by torch."""
    inputs = make_flex_inputs(case, "cpu")
    known, made = inputs.block_mask, flex_calls.created_mask(inputs, form)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        one, wanted = getattr(made, name), getattr(known, name)
        assert (one is None) == (wanted is None), name
        assert one is None or torch.equal(one, wanted), name
    return lambda: [(made.kv_num_blocks, known.kv_num_blocks)]


def _check_mha_backward(case: MhaCase, of: str = "out", deterministic: bool = False) -> Pairs:
    """`of`: what gradients begin with: "out", "lse" or "both"."""
    call = mha_backward_calls.backward_inputs(make_mha_inputs(case, "cpu"), of)
    got = mha_backward_calls.backward_of(call, deterministic=deterministic)
    mha_backward_calls.check_backward(call, got)
    given = (call.inputs, call.gradients, call.results)
    return lambda: [*zip(got, mha_backward.reference_backward(*given).values, strict=True)]


def _check_flex_backward(
    case: FlexCase, of: str = "out", deterministic: bool = False, form: str = "python"
) -> Pairs:
    call = flex_backward_calls.backward_inputs(case, of, make_flex_backward_inputs(case, "cpu"))
    got = flex_backward_calls.backward_of(call, form, deterministic=deterministic)
    flex_backward_calls.check_backward(call, got)
    given = (call.inputs, call.gradients, call.results)
    return lambda: [*zip(got[:3], flex_backward.reference_backward(*given).rows.values, strict=True)]


def _check_dense_decode(case: DenseCase) -> Pairs:
    inputs = make_dense_inputs(case, "torch", "cpu")
    got, want = gpu_support.decode(inputs, "object"), gpu_support.reference(inputs)
    gpu_support.check(inputs, got, want)
    return lambda: [(got[0], want[0])]


def _check_sparse_decode(case: SparseCase) -> Pairs:
    inputs = make_sparse_inputs(case, "torch", "cpu")
    pair = sparse_calls.check_on_host(inputs, gpu_support.sparse_decode(inputs))
    return lambda: [pair]


def _check_sparse_prefill(case: SparseCase) -> Pairs:
    inputs = make_sparse_inputs(case, "torch", "cpu")
    got = rawmla.flash_mla_sparse_fwd(*prefill_calls.arguments(inputs), **prefill_calls.keywords(inputs))
    pair = prefill_calls.check_prefill_on_host(inputs, got)
    return lambda: [pair]


def _check_cache(case: SparseCase) -> Pairs:
    """Quantise tokens to the case's layout, and dequantise them, both to the bit."""
    tokens = caches.values((case.b, case.s_k, 1, case.width))
    want = reference.quantize_k_cache(tokens, case.layout)
    given = torch.from_numpy(tokens.view(np.int16)).view(torch.bfloat16)
    cache = rawmla.quantize_k_cache(given, case.layout)
    np.testing.assert_array_equal(cache.view(torch.uint8).numpy(), want)
    rows = reference.dequantize_k_cache(want, case.layout).astype(tokens.dtype).astype(np.float64)
    got = rawmla.dequantize_k_cache(cache, case.layout).double().numpy()
    np.testing.assert_array_equal(got, rows)
    return lambda: [(got, rows)]


_CHECKS: dict[str, Any] = {
    "block_mask": check_block_mask,
    "cache": _check_cache,
    "mha": _check_mha,
    "prefix": _check_prefix,
    "flex": _check_flex,
    "mha_backward": _check_mha_backward,
    "flex_backward": _check_flex_backward,
    "dense_decode": _check_dense_decode,
    "sparse_decode": _check_sparse_decode,
    "sparse_prefill": _check_sparse_prefill,
}
