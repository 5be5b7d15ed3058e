"""Which kernel variants each operation needs: for `rawmla.warmup` and for compiling ahead.

An operation is an entry of `OPERATIONS`: a function whose parameters are the `OPTIONS` that its variants
depend on. A new operation is one more entry, which `rawmla.warmup` then knows by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, NamedTuple

from ..jit import KernelSpec
from . import (
    block_mask,
    flex_captured,
    mha_backward_variants,
    mha_decode,
    mha_forward_variants,
    mla_cache_gather,
    mla_cache_write,
    mla_combine,
    mla_convert_indices,
    mla_dense_decode,
    mla_merge_states,
    mla_metadata,
    mla_sparse,
    mla_sparse_prefill,
)
from .common import BLOCK_TOKENS, D_QK, DTYPES
from .mla_cache_rows import FORMATS


class Option(NamedTuple):
    """A choice among the variants of operations.

    ``every`` selects all variants. ``allows`` says which values are allowed; None: the values in ``every``.
    """

    default: tuple[Any, ...]
    every: tuple[Any, ...]
    expected: str
    allows: Callable[[Any], bool] | None = None


def _one_of(default: tuple[Any, ...], every: Iterable[Any]) -> Option:
    values = tuple(every)
    return Option(default, values, " or ".join(map(repr, values)))


_HEAD_DIMS = Option(
    (),
    ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)),
    "pairs (d_qk, d_v) of ints from 1 to 256",
    lambda pair: len(pair) == 2 and all(type(d) is int and 1 <= d <= 256 for d in pair),
)
OPTIONS = {
    "dtypes": _one_of(("bfloat16",), DTYPES),
    "d_qk": _one_of((576,), D_QK),
    "page_block_sizes": Option(
        (BLOCK_TOKENS,),
        mla_dense_decode.BOX_ROWS,
        f"16, 32 or a multiple of {BLOCK_TOKENS}",
        lambda size: size in (16, 32) or size > 0 and size % BLOCK_TOKENS == 0,
    ),
    "sparse_formats": _one_of((), FORMATS),
    "prefill_formats": _one_of((), FORMATS),
    "mha_head_dims": _HEAD_DIMS,
    "mha_backward_head_dims": _HEAD_DIMS,
    "kvcache_head_dims": _HEAD_DIMS,
    "prefix_head_dims": Option(
        (), (64, 128), "ints from 1 to 256", lambda d: type(d) is int and 1 <= d <= 256
    ),
}


def _dense_decode(
    dtypes: Iterable[str], d_qk: Iterable[int], page_block_sizes: Iterable[int]
) -> Iterator[KernelSpec]:
    yield from mla_metadata.specs()
    for dtype in dtypes:
        yield from mla_combine.specs(dtype)
        for width in d_qk:
            yield from mla_dense_decode.specs(dtype, width, page_block_sizes)


def _sparse_decode(sparse_formats: Iterable[str]) -> Iterator[KernelSpec]:
    yield from mla_metadata.specs()
    for format in sparse_formats:
        yield from mla_sparse.specs(format)
        yield from mla_combine.specs("bfloat16")


def _sparse_prefill(prefill_formats: Iterable[str]) -> Iterator[KernelSpec]:
    yield from mla_metadata.specs()
    for format in prefill_formats:
        yield from mla_sparse_prefill.specs(format)
        yield from mla_combine.specs("bfloat16", max_logits=True)


def _cache(sparse_formats: Iterable[str]) -> Iterator[KernelSpec]:
    for name in sparse_formats:
        for format in FORMATS[name]:
            for spec in (mla_cache_write.spec, mla_cache_gather.spec):
                yield spec(format, True)
                if format.is_quantized:  # also without slots or pages
                    yield spec(format, False)


def _indices(sparse_formats: Iterable[str]) -> Iterator[KernelSpec]:
    # No variant depends on the format, but without sparse attention nothing is converted.
    if sparse_formats:
        yield from mla_convert_indices.specs()


def _merge(dtypes: Iterable[str]) -> Iterator[KernelSpec]:
    for dtype in dtypes:
        yield from mla_merge_states.specs(dtype)


def _mha(dtypes: Iterable[str], mha_head_dims: Iterable[tuple[int, int]]) -> Iterator[KernelSpec]:
    for dtype in dtypes:
        yield from mha_forward_variants.specs(dtype, mha_head_dims)


def _mha_backward(
    dtypes: Iterable[str], mha_backward_head_dims: Iterable[tuple[int, int]]
) -> Iterator[KernelSpec]:
    for dtype in dtypes:
        for dims in mha_backward_head_dims:
            yield from mha_backward_variants.specs(dtype, *dims)
    if dtypes and mha_backward_head_dims:
        yield mha_backward_variants.CLEAR_SPEC


def _prefix(dtypes: Iterable[str], prefix_head_dims: Iterable[int]) -> Iterator[KernelSpec]:
    head_dims = [(d, d) for d in prefix_head_dims]
    for dtype in dtypes:
        yield from mha_forward_variants.specs(dtype, head_dims, mha_forward_variants.USUAL_CACHES)


def _kvcache(dtypes: Iterable[str], kvcache_head_dims: Iterable[tuple[int, int]]) -> Iterator[KernelSpec]:
    for dtype in dtypes:
        for dims in kvcache_head_dims:
            for rows in mha_decode.TILE_ROWS:
                yield from mha_decode.specs(dtype, rows, *dims)
        yield from mha_forward_variants.rows_specs(dtype, kvcache_head_dims)


def _flex(mha_head_dims: Iterable[tuple[int, int]]) -> Iterator[KernelSpec]:
    # Those without functions, which depend on no option; the others are of a call.
    if mha_head_dims:
        yield from (block_mask.LISTS_SPEC, block_mask.SCATTER_SPEC, block_mask.RANKS_SPEC)
        yield flex_captured.FINISH_SPEC


OPERATIONS: dict[str, Callable[..., Iterable[KernelSpec]]] = {
    "dense_decode": _dense_decode,
    "sparse_decode": _sparse_decode,
    "sparse_prefill": _sparse_prefill,
    "cache": _cache,
    "indices": _indices,
    "merge": _merge,
    "metadata": mla_metadata.specs,
    "mha": _mha,
    "mha_backward": _mha_backward,
    "prefix": _prefix,
    "kvcache": _kvcache,
    "flex": _flex,
}


def specs_of(operations: Sequence[str], **given: Any) -> list[KernelSpec]:
    """The variants that operations need, each once.

    ``operations`` are names in `OPERATIONS`; none: all of them. ``given`` are values of `OPTIONS`; where one
    is None, its default holds. An option without a default takes every value when operations are named.

    Raises TypeError and ValueError for what is not known.
    """
    for name in operations:
        if not isinstance(name, str):
            raise TypeError(f"operations: expected names, got {name!r}")
        if name not in OPERATIONS:
            raise ValueError(f"operations: expected names among {', '.join(OPERATIONS)}, got {name!r}")
    taken = {option for name in operations or OPERATIONS for option in _options_of(name)}
    for name, values in given.items():
        if values is not None and name not in taken:
            raise ValueError(f"{name}: expected None, as no operation named has this option, got {values!r}")
    options = {}
    for name, option in OPTIONS.items():
        if given.get(name) is None:
            options[name] = option.default or (option.every if operations else ())
        else:
            options[name] = _checked(name, given[name])
    found: dict[KernelSpec, None] = {}
    for name in operations or OPERATIONS:
        needs = OPERATIONS[name]
        specs = needs(**{option: options[option] for option in _options_of(name)})
        found.update(dict.fromkeys(specs))
    return list(found)


def _options_of(operation: str) -> list[str]:
    return list(inspect.signature(OPERATIONS[operation]).parameters)


def all_specs() -> list[KernelSpec]:
    """The variants of every option. Dense attention and prefix prefill have others: of softcap, ALiBi, FP8
    output, some gradients, other head dimensions; flex attention has variants for each function.
    """
    return specs_of((), **{name: option.every for name, option in OPTIONS.items()})


def default_specs() -> list[KernelSpec]:
    """The variants that `rawmla.warmup` loads when it is called without arguments."""
    return specs_of(())


def _checked(name: str, values: Any) -> tuple[Any, ...]:
    option = OPTIONS[name]
    kind = type(option.every[0])
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected an iterable of {kind.__name__}, got {values!r}")
    checked = []
    for value in values:
        if kind is int and not isinstance(value, bool):
            try:
                value = index(value)  # of NumPy, too
            except TypeError:
                pass
        if type(value) is not kind:
            raise TypeError(f"{name}: expected an iterable of {kind.__name__}, got {value!r} in it")
        if not (value in option.every if option.allows is None else option.allows(value)):
            raise ValueError(f"{name}: expected {option.expected}, got {value!r}")
        checked.append(value)
    return tuple(checked)
