"""Shared by the GPU tests: torch, CuPy where there is a GPU, poison in what the library allocates, and what
the tests know of the library's private names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kit.gpu import missing_hopper_reason
from operations.core import Call, assert_same_bits, bits
from rawmla.call import frameworks, memo
from rawmla.jit import launch, loading
from rawmla.kernels import mha_forward, mla_metadata, mla_sparse, mla_sparse_prefill

torch = pytest.importorskip("torch")
cupy: Any = None  # where there is no GPU, importing it would only take time
if missing_hopper_reason() is None:
    import cupy

__all__ = ["assert_same_bits", "bits", "cupy", "torch"]


# ---- poison

POISON_BYTE = 0xFF  # NaN in every float type, -1 in every integer type
_fresh_memory_is_poison = False


@contextmanager
def poison(on: bool) -> Iterator[None]:
    """Inside, whether every array that the library allocates (results, scratch, plans) is filled with poison.

    Without it, memory that a kernel forgot to write may still hold the right answer of the call before. With
    it, a fill stands on the stream between the launches of some calls, which can then not overlap.
    """
    global _fresh_memory_is_poison
    before, _fresh_memory_is_poison = _fresh_memory_is_poison, on
    try:
        yield
    finally:
        _fresh_memory_is_poison = before


@contextmanager
def poisonable_allocations() -> Iterator[None]:
    """Inside, `poison` works: both frameworks' `empty` and `allocator` are wrapped.

    The wrapped functions look at the switch when they allocate, so a prepared allocator that a call keeps
    obeys it too.
    """
    with pytest.MonkeyPatch.context() as patch:
        for framework in (frameworks.TorchFramework, frameworks.CupyFramework):
            patch.setattr(framework, "empty", _poisoned_empty(framework.empty))
            patch.setattr(framework, "allocator", _poisoned_allocator(framework.allocator))
        yield


def _poisoned_empty(empty: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned(self: Any, *arguments: Any, **keywords: Any) -> Any:
        made = empty(self, *arguments, **keywords)
        _fill_with_poison([made])
        return made

    return poisoned


def _poisoned_allocator(allocator: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned(self: Any, *arguments: Any, **keywords: Any) -> Callable[[], Any]:
        allocate = allocator(self, *arguments, **keywords)

        def allocate_poisoned() -> Any:
            made = allocate()
            _fill_with_poison([array for array in made if array is not None])
            return made

        return allocate_poisoned

    return poisoned


def _fill_with_poison(fresh: list[Any]) -> None:
    """On the stream that the arrays were allocated for; inside a capture, at every replay."""
    if not _fresh_memory_is_poison:
        return
    for array in fresh:
        if isinstance(array, torch.Tensor):
            if array.numel():  # the array may be strided, the bytes between its rows are fresh too
                memory = torch.empty(0, dtype=torch.uint8, device=array.device)
                memory.set_(array.untyped_storage()).fill_(POISON_BYTE)
        elif array.nbytes:  # of CuPy, whose `fill` may have to load a kernel: illegal in a capture
            steps = zip(array.shape, array.strides, strict=True)
            reach = array.itemsize + sum((extent - 1) * stride for extent, stride in steps)
            with cupy.cuda.Device(array.data.device_id):
                array.data.memset_async(POISON_BYTE, reach)


def assert_poison(name: str, array: Any) -> None:
    """Raise unless every byte of a torch tensor or CuPy array is poison."""
    if not isinstance(array, torch.Tensor):
        array = torch.from_dlpack(array)
    count = int((array.contiguous().view(torch.uint8) != POISON_BYTE).sum())
    assert not count, f"{name}: {count} of {array.numel() * array.element_size()} bytes are no poison"


def poison_or_fresh(call: Call, given: Any) -> None:
    """Make a given output what a call may begin with."""
    if call.fresh is None:
        given.view(torch.uint8).fill_(POISON_BYTE)
    else:
        given.copy_(call.fresh())


def to_cupy(x: Any) -> Any:
    """A CuPy array on the same memory; the CuPy array that it is."""
    return x if isinstance(x, cupy.ndarray) else cupy.from_dlpack(x)


# ---- private names of the library


def forget_prepared_calls() -> None:
    """The next call of each kind checks its arguments and prepares its launches anew."""
    memo.clear_all()


@contextmanager
def _patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace names of the library, and forget what was prepared before and meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in patches:
            patch.setattr(owner, name, value)
        forget_prepared_calls()
        yield
    forget_prepared_calls()


def forced_clusters() -> Any:
    """Inside, mla_sparse_fp8_cluster.cu takes every call that it can, also those with few blocks per part."""
    return _patched((mla_sparse, "_CLUSTER_MIN_BLOCKS", 0))


def united_selections(scratch_bytes: int, tokens: int | None = None) -> Any:
    """Inside, united selections have this much scratch, and are used from this many query tokens on."""
    patches: list[tuple[Any, str, Any]] = [(mla_sparse_prefill, "_UNITED_SCRATCH", scratch_bytes)]
    if tokens is not None:
        patches.append((mla_sparse_prefill, "_UNITED_TOKENS", tokens))
    return _patched(*patches)


def without_splits() -> Any:
    """Inside, prefix prefill does not split the keys of a call, however few tiles it has."""
    return _patched((mha_forward, "num_splits", lambda *sizes: 1))


def small_plans(max_batch: int) -> Any:
    """Inside, a plan takes so many requests only."""
    return _patched((mla_metadata, "MAX_BATCH", max_batch))


def no_kernel_loaded() -> Any:
    """Inside, it is as in a process that has not loaded a kernel yet."""
    return _patched((loading, "_kernels", {}), (loading, "_user_kernels", {}))


def loaded_labels() -> list[str]:
    """Labels of the kernels that were loaded inside `no_kernel_loaded`, those with a user's text too."""
    tables: list[Any] = [loading._kernels, loading._user_kernels]
    return sorted({spec.label for table in tables for spec, _ in table})


def replaced_launches(instead: Callable[[], None]) -> Any:
    """Inside, `instead` is called in place of every launch."""

    def enqueue(*arguments: Any, **keywords: Any) -> bool:
        instead()
        return True

    return _patched((launch.Kernel, "launch", enqueue), (launch.PreparedLaunch, "launch", enqueue))
