"""Array arguments as data: the arrays of an operation in a table, and the check of arrays against it.

The dimensions of an array are a text such as "b s_q h_q 512". A number is an extent. A name stands for the
extent of the first array that has it, with which later arrays must agree.

Rules that a table cannot have are functions of the operation: ranges of extents, formats of a cache, and the
strides that a kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .checks import check_place, usable_strides
from .frameworks import Fields
from .memo import Memo


class Sizes(dict[str, int]):
    """Extents by the names of dimensions; ``origins`` has the arrays that they come from, for errors."""

    def __init__(self, **extents: int) -> None:
        super().__init__(extents)
        self.origins: dict[str, str] = {}


_NO_ALIASES: Mapping[str, str] = {}

SECOND_NAMES = {
    "cu_seqlens_qo": "cu_seqlens_q",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_qo": "max_seqlen_q",
    "max_seqlen_kv": "max_seqlen_k",
    "learnable_sink": "attn_sink",
}
"""The second names of arguments of dense attention, and their first names."""


class Arg(NamedTuple):
    """An array argument of an operation."""

    name: str
    dtypes: str
    """Such as "bfloat16 float16", or "=q" for the dtype of the argument q."""
    dims: str
    has_rows: bool = False
    """The last dimension must be contiguous."""


def check_arguments(
    table: Iterable[Arg],
    views: Mapping[str, Fields | None],
    sizes: Sizes | None = None,
    aliases: Mapping[str, str] = _NO_ALIASES,
) -> Sizes:
    """Check arrays by name against a table; returns ``sizes`` with the extents of their dimensions.

    An array that is not there is left out: readers have refused None where it is needed. ``aliases`` has the
    names that a user knows arrays by, where they differ.
    """
    sizes = Sizes() if sizes is None else sizes
    for argument, dtypes, dims, has_rows in table:
        view = views.get(argument)
        if view is None:
            continue
        name = aliases.get(argument, argument)
        if dtypes.startswith("="):
            other = dtypes[1:]
            like = views[other]
            assert like is not None
            check_dtype(name, view, like[3], f", the dtype of {aliases.get(other, other)}")
        else:
            check_dtype(name, view, dtypes)
        check_shape(name, view, dims, sizes)
        if has_rows:
            row_strides(name, view)
    return sizes


def check_dtype(name: str, view: Fields, dtypes: str, reason: str = "") -> None:
    """Check the dtype of an array against names of dtypes; ``reason`` says why it is one of these."""
    if view[3] not in dtypes.split():
        raise TypeError(f"{name}: expected dtype {dtypes.replace(' ', ' or ')}{reason}, got {view[3]}")


def check_shape(name: str, view: Fields, dims: str, sizes: Sizes, reason: str = "") -> None:
    """Check the shape of an array, and bind the names of its dimensions that are not in ``sizes``."""
    shape, names = view[1], dims.split()
    wanted = [int(dim) if dim.isdecimal() else sizes.get(dim, dim) for dim in names]
    fits = [extent in (given, dim) for extent, given, dim in zip(wanted, shape, names, strict=False)]
    if len(shape) != len(names) or not all(fits):
        origins = [f"{dim} of {sizes.origins[dim]}" for dim in names if dim in sizes.origins]
        meaning = f" ({', '.join(origins)})" if origins else ""
        raise ValueError(
            f"{name}: expected shape [{', '.join(map(str, wanted))}]{meaning}{reason}, got {list(shape)}"
        )
    for dim, extent in zip(names, shape, strict=True):
        if not dim.isdecimal() and dim not in sizes:
            sizes[dim], sizes.origins[dim] = extent, name


def row_strides(name: str, view: Fields) -> tuple[int, ...]:
    """Check that the last dimension is contiguous; returns usable strides of the others."""
    _, shape, strides, *_ = view
    usable = usable_strides(shape, strides)
    if usable[-1] != 1:
        if len(shape) == 1:
            raise ValueError(f"{name}: expected a contiguous array, got stride {strides[0]} (elements)")
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {list(strides)} (elements)"
        )
    return usable[:-1]


def check_places(views: Mapping[str, Fields | None], aliases: Mapping[str, str] = _NO_ALIASES) -> None:
    """Check that all arrays are on the device of the first and, if they are of another framework, on its
    stream; ``aliases`` as in `check_arguments`.
    """
    (reference, first), *others = views.items()
    assert first is not None
    for name, view in others:
        if view is not None:
            names = [aliases.get(argument, argument) for argument in (name, reference)]
            check_place(names[0], view, first[4], first[5], names[1])


def mixes_frameworks(views: Mapping[str, Fields | None]) -> bool:
    """Whether arrays are of more than one framework, so that every call has to check their streams."""
    return len({view[5] for view in views.values() if view is not None}) > 1


_passed: Memo[tuple[Any, bool]] = Memo(shared=True)


def check_once(check: Callable[..., Any], views: dict[str, Any], *options: Any) -> Any:
    """Check arrays by name, unless arrays of these kinds passed before; returns the result of ``check``.

    ``check`` takes the arrays and the options. Its result may depend on the alignment of an address alone.
    """
    key = (check, options, *[view and (view[0] & 15, view[1:6]) for view in views.values()])
    found = _passed.get(key)
    if found is None:
        found = _passed.keep(key, (check(views, *options), mixes_frameworks(views)))
    result, is_mixed = found
    if is_mixed:
        check_places(views)
    return result
