"""Parameter structs: what they pack, and that C++ lays them out alike."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from cuda_probe import assert_in_kernel
from kernel_params import PARAMS
from kernel_variants import BY_KERNEL

from rawmla.jit.params import (
    F32,
    I32,
    I64,
    POINTER,
    TENSOR_MAP,
    U32,
    CType,
    Member,
    ParamStruct,
    changing,
    struct_type,
)


class Pair(NamedTuple):
    first: int
    second: int


MIXED = ParamStruct(
    changing(TENSOR_MAP("map"), POINTER("q"), POINTER("cache", length=2)),
    I32("b"),
    I64("stride"),
    U32("magic", length=3),
    struct_type(Pair, I32, I64)("pair"),
    F32("scale"),
    I64("mask"),
)


def pack_mixed(**changes: object) -> bytes:
    given = dict(b=-7, stride=-(2**40), magic=(1, 2, 2**32 - 1), pair=Pair(3, -4), scale=0.5, mask=-(2**62))
    return MIXED.pack(**{**given, **changes})


def test_packed_bytes() -> None:
    """In the alignment of C++. Members that change are the first; `pack` fills the others alone."""
    rest = struct.pack("<i4x q 3I4x i4xq f4xq40x", -7, -(2**40), 1, 2, 2**32 - 1, 3, -4, 0.5, -(2**62))
    assert pack_mixed() == bytes(152) + rest
    params = bytearray(pack_mixed())
    MIXED.changing.pack_into(params, 0, b"\x11" * 128, 1, 2, 2**64 - 1)
    assert params == b"\x11" * 128 + struct.pack("<3Q", 1, 2, 2**64 - 1) + rest


def test_what_does_not_fit_is_refused() -> None:
    """Numbers out of range, other counts of them, members of no such name, those that change, and too few."""
    for changes in ({"b": 2**31}, {"stride": 2**63}, {"magic": (1, 2)}, {"magic": (1, 2, -1)}):
        with pytest.raises(struct.error):
            pack_mixed(**changes)
    for name in ("sm_scale", "q"):
        with pytest.raises(TypeError, match=name):
            pack_mixed(**{name: 1})
    with pytest.raises(TypeError, match="'mask'"):
        MIXED.pack(b=1, stride=2, magic=(1, 2, 3), pair=(3, 4), scale=0.5)


@pytest.mark.parametrize("first", [[TENSOR_MAP("map")], [changing(TENSOR_MAP("map")), I32("b")]])
def test_changing_members_are_the_first(first: list[list[Member]]) -> None:
    with pytest.raises(ValueError, match="^changing: expected the first members of the struct, got .*'q'"):
        ParamStruct(*first, changing(POINTER("q")))


def conditions_of(path: str, type: CType, length: int, offset: int) -> Iterator[str]:
    """What has to hold in C++ for a member: its offset, its type and that of its members."""
    member = f"static_cast<Params*>(nullptr)->{path}"
    yield f"__INTADDR__(&{member}) == {offset}"
    yield f"sizeof({member}) == {type.size * (length or 1)}"
    # A cast that the types do not allow is an error; sizeof keeps it from being evaluated.
    if type is POINTER:
        yield f"sizeof(static_cast<const void*>({member}{'[0]' * bool(length)})) == 8"
    else:
        array = f"(*)[{length}]" if length else "*"
        yield f"sizeof(static_cast<{type.name} {array}>(&{member})) == 8"
    inner = 0
    for name, kind in type.members:
        inner = -(-inner // kind.alignment) * kind.alignment
        yield from conditions_of(f"{path}.{name}", kind, 0, offset + inner)
        inner += kind.size


def has_members(count: int) -> str:
    """Declares a concept: a struct has at least so many members, one for each initializer."""
    values = ", ".join(["{}"] * count)
    return f"template <class T> concept Has{count} = requires {{ T{{{values}}}; }};"


@pytest.mark.parametrize("kernel", PARAMS, ids=lambda kernel: f"{kernel[0]}{' prefill' * kernel[1]}")
def test_cpp_has_the_same_members(kernel: tuple[str, bool]) -> None:
    declared = PARAMS[kernel]
    count = len(declared.members)
    conditions = [f"sizeof(Params) == {declared.size}"]
    conditions.append(f"Has{count}<Params> && !Has{count + 1}<Params>")
    for member in declared.members:
        conditions += conditions_of(member.name, member.type, member.length, member.offset)
    assert_in_kernel(BY_KERNEL[kernel], conditions, has_members(count) + has_members(count + 1))


@pytest.mark.parametrize(
    "wrong",
    [
        "sizeof(static_cast<int*>(&static_cast<Params*>(nullptr)->page_magic)) == 8",
        "__INTADDR__(&static_cast<Params*>(nullptr)->out) == 32",
        "Has18<Params>",
    ],
)
def test_the_comparison_can_fail(wrong: str) -> None:
    kernel = ("mla_cache_gather", False)
    assert len(PARAMS[kernel].members) == 17
    with pytest.raises(AssertionError, match=r"gather.cu\(\d+\): error: (static assert|invalid type)"):
        assert_in_kernel(BY_KERNEL[kernel], [wrong], has_members(18))
