"""Records of a call of dense attention: its arrays, its options, and how q, k and v are packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..call.arguments import mixes_frameworks
from ..call.checks import as_bool, as_softmax_scale
from ..call.frameworks import NewArray
from .arguments import NO_WINDOW, as_length, as_softcap, as_window, check_chunk, check_dropout

Window = tuple[int | None, int | None]


_ALL = as_window(NO_WINDOW)


class DenseArrays(NamedTuple):
    """Arrays of a call by argument name, as the caller gave them or as `Fields`; None: not given."""

    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    attn_sink: Any
    alibi_slopes: Any
    out: Any  # to be written


class Gradients(NamedTuple):
    """Further arrays of a backward call, in the same way."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any


class Packing(NamedTuple):
    """A packed array in `DenseArrays`: qkv as q, with one cu_seqlens, or kv as k."""

    name: str
    parts: int  # in the array: 3, or 2
    head_dim_qk: Any


class Prepared(NamedTuple):
    """The work of one kind of call, whose arrays and numbers passed all checks."""

    allocate: Callable[[], list[Any]]
    """Makes the results that the caller did not give, in order, and the scratch, or None, after them."""
    launch: Callable[..., None] | None
    """Enqueues the kernels: (stream, addresses, address of the scratch). None: nothing to compute."""
    copied: tuple[bool, ...] | None
    """Which inputs kernels cannot walk, in the order of their addresses; None: none."""
    mixes_frameworks: bool
    """Some arrays are of another framework than q."""
    reads_starts: bool = True
    """The kernel reads cu_seqlens."""

    @classmethod
    def of(
        cls,
        views: Mapping[str, Any],
        results: list[NewArray],
        kernels: Any,
        copied: tuple[bool, ...],
        reads_starts: bool = True,
    ) -> Prepared:
        """Prepare a call that launches ``kernels``, which have `scratch_bytes` and `launch`, or None."""
        _, _, _, _, device, framework, _ = views["q"]
        scratch_bytes, launch = (0, None) if kernels is None else (kernels.scratch_bytes, kernels.launch)
        allocate = framework.allocator(results, scratch_bytes, device)
        is_mixed = mixes_frameworks(views)
        return cls(allocate, launch, copied if any(copied) else None, is_mixed, reads_starts)


class DenseOptions(NamedTuple):
    """Checked options of a call, which `options_of` makes."""

    max_seqlens: tuple[int, int] | None
    """The longest request, in queries and in keys; None: all have one length, the arrays' dimension."""
    softmax_scale: float | None
    causal: bool
    window: tuple[int, int]
    """Keys to the left and to the right of the diagonal that a query sees; `NO_BOUND` for all."""
    softcap: float
    is_varlen: bool
    deterministic: bool


def options_of(
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    deterministic: Any,
    is_varlen: Any,
    window_size: Any,
    softcap: Any,
    attention_chunk: Any,
    max_seqlens: tuple[Any, Any] | None,
    max_names: tuple[str, str] = ("max_seqlen_q", "max_seqlen_k"),
) -> DenseOptions:
    """Check the options of a public function; ``max_names`` are the arguments of ``max_seqlens``."""
    # The common values are accepted without a call: this is on the path of every call.
    if dropout_p.__class__ is not float or dropout_p:
        check_dropout(dropout_p)
    if attention_chunk.__class__ is not int or attention_chunk:
        check_chunk(attention_chunk)
    if deterministic.__class__ is not bool:
        deterministic = as_bool("deterministic", deterministic)
    if causal.__class__ is not bool:
        causal = as_bool("causal", causal)
    if is_varlen.__class__ is not bool:
        is_varlen = as_bool("is_varlen", is_varlen)
    window = _ALL if window_size is NO_WINDOW else as_window(window_size)
    if softcap.__class__ is not float or softcap != 0.0:
        softcap = as_softcap(softcap)
    if softmax_scale is not None:
        softmax_scale = as_softmax_scale(softmax_scale)
    if max_seqlens is not None:
        (longest_q, longest_k), (name_q, name_k) = max_seqlens, max_names
        max_seqlens = as_length(name_q, longest_q), as_length(name_k, longest_k)
    options = (max_seqlens, softmax_scale, causal, window, softcap, is_varlen, deterministic)
    return tuple.__new__(DenseOptions, options)  # in half the time of a call of the class
