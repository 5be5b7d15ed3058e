"""Families of calls by name: what their cases are, and how one is made and checked as in the tests.

Memory that no result may depend on is NaN, and so is what the library allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from kit import DenseCase, SparseCase, compare
from kit.flex import FlexCase
from kit.kvcache import KvCacheCase
from kit.mha import MhaCase
from kit.prefix import PrefixCase
from operations import (
    Call,
    cache,
    dense,
    dense_backward,
    flex,
    flex_backward,
    kvcache,
    mla_decode,
    mla_prefill,
    mla_sparse,
    prefix,
)
from operations.core import Sizes


def make_backward(make: Callable[..., Call], case: Any, device: str) -> Call:
    """The backward call of a case of the forward, of the gradient of out."""
    return make(dense_backward.BackwardCase(case, deterministic=False), device)


FAMILIES: dict[str, tuple[Callable[..., Any], Callable[[Any, str], Call]]] = {
    "mha": (MhaCase, dense.make_dense_call),
    "mha_backward": (MhaCase, partial(make_backward, dense_backward.make_dense_backward_call)),
    "kvcache": (KvCacheCase, kvcache.make_kvcache_call),
    "prefix": (PrefixCase, prefix.make_prefix_call),
    "flex": (FlexCase, flex.make_traced_call),
    "flex_backward": (
        FlexCase,
        partial(make_backward, partial(flex_backward.make_flex_backward_call, form="python")),
    ),
    "block_mask": (FlexCase, partial(flex.make_mask_call, form="python")),
    "cache": (partial(Sizes, "tokens"), cache.quantize_call),
    "dense_decode": (DenseCase, mla_decode.make_dense_call),
    "sparse_decode": (SparseCase, mla_sparse.make_sparse_call),
    "sparse_prefill": (SparseCase, mla_prefill.make_prefill_call),
}
"""What makes a case of fields, and the call of a case."""


def check(family: str, case: Any) -> float:
    """Make the call of a case and raise AssertionError unless its results are right. Returns the largest L2
    error of a result, relative to the norm of its float64 reference; 0 where results are equal to it.
    """
    errors = [0.0]
    measure = compare._measure

    def noted(*arguments: Any) -> Any:
        found = measure(*arguments)
        errors.append(found.rel_l2)
        return found

    call = FAMILIES[family][1](case, "cpu")
    got = call.run()
    with mock.patch.object(compare, "_measure", noted):
        call.check(got)
    return max(errors)
