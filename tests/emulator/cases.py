"""Calls of one case on the emulated device, by the names that the command `python -m tests.emulator` has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit import measure, out_tolerance
from operations import (
    cache,
    dense,
    dense_backward,
    flex,
    flex_backward,
    mla_decode,
    mla_prefill,
    mla_sparse,
    prefix,
)
from operations.core import Call, Sizes
from operations.dense_backward import BackwardCase

Make = Callable[[Any], tuple[Call, ...]]


def _one(make: Callable[..., Call], **options: Any) -> Make:
    return lambda case: (make(case, "cpu", **options),)


def _backward(make: Callable[..., Call], **options: Any) -> Make:
    return lambda case: (make(BackwardCase(case, "out", False), "cpu", **options),)


def _cache_calls(case: Any) -> tuple[Call, ...]:
    sizes = Sizes(case.layout, case.layout)
    return cache.quantize_call(sizes, "cpu"), cache.dequantize_call(sizes, "cpu")


MAKE: dict[str, Make] = {
    "block_mask": _one(flex.make_mask_call, form="python"),
    "cache": _cache_calls,
    "mha": _one(dense.make_dense_call),
    "prefix": _one(prefix.make_prefix_call),
    "flex": _one(flex.make_traced_call),
    "mha_backward": _backward(dense_backward.make_dense_backward_call),
    "flex_backward": _backward(flex_backward.make_flex_backward_call, form="python"),
    "dense_decode": _one(mla_decode.make_dense_call),
    "sparse_decode": _one(mla_sparse.make_sparse_call),
    "sparse_prefill": _one(mla_prefill.make_prefill_call),
}
"""Makes the calls of a case, by its family."""


def check(family: str, case: Any) -> float:
    """Make the calls of a case; raise AssertionError unless their results are right. Returns the largest L2
    error of a result, relative to the norm of its float64 reference; 0 where results have to be exact.
    """
    largest = 0.0
    for call in MAKE[family](case):
        got = call.run()
        call.check(got)
        for one, want in zip(got, () if call.want is None else call.want(), strict=False):
            largest = max(largest, measure(one, want, out_tolerance("bfloat16")).rel_l2)
    return largest
