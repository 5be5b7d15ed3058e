"""Shared by the GPU tests: torch and CuPy where there is a GPU, one way to call the public API, poison in
what the library allocates, and all that the tests know of the library's private names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import rawmla
from kit import (
    DenseInputs,
    SparseCase,
    SparseInputs,
    check_close,
    lse_tolerance,
    out_tolerance,
    prefill_lse_tolerance,
    prefill_out_tolerance,
    torch_reference,
)
from kit.generators import SHARP_FACTOR
from kit.gpu import missing_hopper_reason
from rawmla.call import frameworks, memo
from rawmla.jit import launch, loading
from rawmla.kernels import mha_forward, mla_metadata, mla_sparse, mla_sparse_prefill
from rawmla.kernels.mla_sparse import FEW_HEADS

if missing_hopper_reason() is None:
    import cupy
    import torch
else:  # collected to be skipped; importing the frameworks would only take time
    cupy = torch = None

__all__ = [
    "POISON_BYTE",
    "assert_poison",
    "assert_same_bits",
    "bits",
    "call_arguments",
    "check",
    "cupy",
    "decode",
    "forced_clusters",
    "forget_prepared_calls",
    "in_batch",
    "loaded_labels",
    "no_kernel_loaded",
    "plan",
    "plan_arguments",
    "poison",
    "poisonable_allocations",
    "prefill",
    "prefill_check",
    "prefill_kv",
    "prefill_reference",
    "reference",
    "replaced_launches",
    "rounds_keys",
    "small_plans",
    "sparse_arguments",
    "sparse_check",
    "sparse_decode",
    "sparse_in_batch",
    "sparse_lse_tolerance",
    "sparse_plan",
    "sparse_plan_arguments",
    "sparse_reference",
    "torch",
    "united_selections",
    "without_extra",
    "without_splits",
]


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


# ---- dense decoding


def plan(inputs: DenseInputs, form: str, **kwargs: Any) -> tuple[Any, Any]:
    """Scheduling metadata for a call: `form` "object" (filled in by the call) or "tensors"."""
    if form == "object":
        return rawmla.get_mla_metadata(**kwargs)
    return rawmla.get_mla_metadata(*plan_arguments(inputs), **kwargs)


def plan_arguments(inputs: DenseInputs) -> tuple[Any, int, int, int]:
    """The arguments of `get_mla_metadata` for a call."""
    case = inputs.case
    return inputs.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv, case.h_q


def decode(
    inputs: DenseInputs, form: str = "tensors", enable_batch_invariant: bool = False, **kwargs: Any
) -> tuple[Any, Any]:
    """Plan and decode."""
    metadata, num_splits = plan(inputs, form, enable_batch_invariant=enable_batch_invariant)
    kwargs["enable_batch_invariant"] = enable_batch_invariant
    return rawmla.flash_mla_with_kvcache(
        *call_arguments(inputs), metadata, num_splits, causal=inputs.case.causal, **kwargs
    )


def in_batch(inputs: DenseInputs, requests: list[int]) -> DenseInputs:
    """A batch of these requests, in this order, over the same cache."""
    rows = torch.tensor(requests, device=inputs.q.device)
    lengths = [inputs.lengths[i] for i in requests]
    return DenseInputs(
        case=replace(inputs.case, b=len(requests), lengths=tuple(lengths)),
        q=inputs.q[rows],
        k_cache=inputs.k_cache,
        block_table=inputs.block_table[rows],
        cache_seqlens=inputs.cache_seqlens[rows],
        lengths=lengths,
    )


def as_pair(q: Any) -> tuple[Any, Any]:
    """q in two arrays, each with an allocation of its own."""
    return q[..., :-64].contiguous(), q[..., -64:].contiguous()


def call_arguments(inputs: DenseInputs) -> tuple[Any, ...]:
    """The first five arguments of `flash_mla_with_kvcache`."""
    return inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512


def reference(inputs: DenseInputs, **kwargs: Any) -> tuple[Any, Any]:
    """The float64 reference of a call."""
    return torch_reference.flash_mla_with_kvcache(
        *call_arguments(inputs)[:4], causal=inputs.case.causal, **kwargs
    )


def check(inputs: DenseInputs, got: tuple[Any, Any], want: tuple[Any, Any] | None = None) -> None:
    """Compare a call's (out, lse) with the float64 reference; run after the kernel, never before."""
    case = inputs.case
    out, lse = got
    want_out, want_lse = reference(inputs) if want is None else want
    assert str(out.dtype) == f"torch.{case.dtype}" and lse.dtype == torch.float32
    check_close(f"{case.id} out", out, want_out, out_tolerance(case.dtype))
    check_close(f"{case.id} lse", lse, want_lse, lse_tolerance(SHARP_FACTOR if case.sharp else 1.0))


# ---- sparse decoding


def sparse_plan_arguments(inputs: SparseInputs) -> tuple[Any, ...]:
    """The arguments of `get_mla_metadata` for a sparse call.

    Bare tensors are planned for a number of indices, the same for every request. Those of an extra cache
    begin a block of their own, so the indices before them count in whole blocks.
    """
    case = inputs.case
    topk = case.topk
    if inputs.extra_k_cache is not None:
        topk = -(-topk // 64) * 64 + case.extra_topk
    lengths = torch.zeros(case.b, dtype=torch.int32, device=inputs.q.device)  # only their number counts
    return lengths, case.s_q * case.h_q, 1, case.h_q, case.layout != "bf16", topk


def sparse_plan(inputs: SparseInputs, form: str, **kwargs: Any) -> tuple[Any, Any]:
    """Scheduling metadata for a sparse call: `form` "object" (filled in by the call) or "tensors"."""
    if form == "object":
        return rawmla.get_mla_metadata(**kwargs)
    return rawmla.get_mla_metadata(*sparse_plan_arguments(inputs), **kwargs)


def sparse_arguments(inputs: SparseInputs) -> tuple[Any, ...]:
    """The first five arguments of `flash_mla_with_kvcache`; the others are `inputs.keywords()`."""
    return inputs.q, inputs.k_cache, None, None, 512


def sparse_decode(
    inputs: SparseInputs, form: str = "object", enable_batch_invariant: bool = False, **kwargs: Any
) -> tuple[Any, Any]:
    """Plan and decode."""
    metadata, num_splits = sparse_plan(inputs, form, enable_batch_invariant=enable_batch_invariant)
    kwargs = {**inputs.keywords(), **kwargs, "enable_batch_invariant": enable_batch_invariant}
    return rawmla.flash_mla_with_kvcache(*sparse_arguments(inputs), metadata, num_splits, **kwargs)


def without_extra(inputs: SparseInputs) -> SparseInputs:
    """The same call without its extra cache."""
    return replace(inputs, extra_k_cache=None, extra_indices=None, extra_topk_length=None)


def sparse_in_batch(inputs: SparseInputs, requests: list[int]) -> SparseInputs:
    """A batch of these requests, in this order, over the same caches."""
    rows = torch.tensor(requests, device=inputs.q.device)
    case = inputs.case
    given = {name: "random" for name in ("lengths", "extra_lengths") if getattr(case, name) is not None}
    names = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
    chosen = {name: getattr(inputs, name) for name in names}
    chosen = {name: None if array is None else array[rows] for name, array in chosen.items()}
    return replace(inputs, case=replace(case, b=len(requests), **given), **chosen)


def rounds_keys(case: SparseCase) -> bool:
    """Whether the kernel of a case multiplies keys rounded to bfloat16; else it multiplies exact ones."""
    return not (case.layout == "v32" and case.h_q <= FEW_HEADS)


def sparse_reference(
    inputs: SparseInputs, softmax_scale: float | None = None, *, exact_keys: bool = False
) -> tuple[Any, Any]:
    """The float64 reference of a sparse call, with its sinks; of the keys that its kernel multiplies, or of
    exact ones.
    """
    rounded = rounds_keys(inputs.case) and not exact_keys
    out, lse = torch_reference.sparse_decode(inputs, softmax_scale, rounded_keys=rounded)
    if inputs.attn_sink is not None:
        out = torch_reference.apply_sink(out, lse, inputs.attn_sink)
    return out, lse


def sparse_lse_tolerance(inputs: SparseInputs) -> Any:
    """Tolerance of a sparse call's log-sum-exp."""
    return lse_tolerance(SHARP_FACTOR if inputs.case.sharp else 1.0)


def sparse_check(inputs: SparseInputs, got: tuple[Any, Any], want: tuple[Any, Any] | None = None) -> None:
    """Compare a sparse call's (out, lse) with the float64 reference; run after the kernel, never before.

    Keys are those that the kernel multiplies; test_sparse_accuracy.py has exact ones for all.
    """
    out, lse = got
    want_out, want_lse = sparse_reference(inputs) if want is None else want
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    check_close(f"{inputs.case.id} out", out, want_out, out_tolerance("bfloat16"))
    check_close(f"{inputs.case.id} lse", lse, want_lse, sparse_lse_tolerance(inputs))


# ---- sparse prefill


def prefill_kv(inputs: SparseInputs) -> Any:
    """The kv of a prefill call: rows of a bf16 cache of pages of one token, else the whole cache."""
    return inputs.k_cache[:, 0] if inputs.case.layout == "bf16" else inputs.k_cache


def prefill(inputs: SparseInputs, sm_scale: float | None = None, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Prefill the requests of a sparse case, of one query token each."""
    given = {
        "attn_sink": inputs.attn_sink,
        "topk_length": inputs.topk_length,
        "is_fp8_kvcache": inputs.case.layout != "bf16",
    }
    scale = inputs.case.width**-0.5 if sm_scale is None else sm_scale
    return rawmla.flash_mla_sparse_fwd(
        inputs.q[:, 0], prefill_kv(inputs), inputs.indices, scale, **{**given, **kwargs}
    )


def prefill_reference(inputs: SparseInputs, sm_scale: float | None = None) -> tuple[Any, Any, Any]:
    """The float64 reference of a prefill call, of the keys that its kernel multiplies."""
    return torch_reference.sparse_prefill(inputs, sm_scale, rounded_keys=rounds_keys(inputs.case))


def prefill_check(
    inputs: SparseInputs, got: tuple[Any, Any, Any], want: tuple[Any, Any, Any] | None = None
) -> None:
    """Compare a prefill call's (out, max_logits, lse) with the float64 reference; run after the kernel, never
    before.
    """
    case = inputs.case
    want = prefill_reference(inputs) if want is None else want
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32, torch.float32]
    assert got[1].is_contiguous() and got[2].is_contiguous()
    scores = prefill_lse_tolerance(SHARP_FACTOR if case.sharp else 1.0)
    tolerances = (prefill_out_tolerance(), scores, scores)
    for name, one, wanted, tolerance in zip(("out", "max_logits", "lse"), got, want, tolerances, strict=True):
        check_close(f"{case.id} {name}", one, wanted, tolerance)


# ---- bits


def bits(tensor: Any) -> Any:
    """The tensor's bits as integers, so that NaN equals NaN and 0 differs from -0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def assert_same_bits(name: str, got: Any, want: Any) -> None:
    """Raise unless two tensors are equal bit for bit."""
    different = bits(got) != bits(want)
    count = int(different.sum())
    if count:
        place = tuple(int(c) for c in different.nonzero()[0])
        raise AssertionError(
            f"{name}: {count} of {different.numel()} elements differ; first at {place}: "
            f"{float(got[place])!r} and {float(want[place])!r}"
        )
