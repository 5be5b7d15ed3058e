"""Parameter structs of kernels, declared member by member as in their C++.

Offsets follow from the declaration by the alignment rules of C++; tests/test_params.py compares them with
what the compiler says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "F32",
    "I32",
    "I64",
    "POINTER",
    "TENSOR_MAP",
    "U32",
    "CType",
    "Member",
    "ParamStruct",
    "bytes_type",
    "struct_type",
]


class CType(NamedTuple):
    """The C++ type of a member. Called with names, it declares members of this type.

    ``code`` is the type in a `struct` format. ``members`` has the members of a struct with their types.
    """

    name: str
    code: str
    size: int
    alignment: int
    members: tuple[tuple[str, CType], ...] = ()

    def __call__(self, *names: str, length: int = 0, elements: Sequence[str] = ()) -> list[Declaration]:
        """Declare members, or arrays of ``length`` elements if it is given.

        The elements of an array that changes from launch to launch have names: ``elements``.
        """
        return [Declaration(name, self, length or len(elements), tuple(elements)) for name in names]


class Declaration(NamedTuple):
    """A member before its offset is known; ``length`` 0: it is no array."""

    name: str
    type: CType
    length: int
    elements: tuple[str, ...]


class Member(NamedTuple):
    """A member of a parameter struct; ``code`` is the whole member in a `struct` format."""

    name: str
    type: CType
    length: int
    offset: int
    code: str


POINTER = CType("pointer", "Q", 8, 8)
I64 = CType("long long", "q", 8, 8)
I32 = CType("int", "i", 4, 4)
U32 = CType("unsigned int", "I", 4, 4)
F32 = CType("float", "f", 4, 4)
TENSOR_MAP = CType("TensorMap", "128s", 128, 64)


def bytes_type(name: str, size: int) -> CType:
    """The type of a C++ struct of which only the bytes are known, a multiple of 8."""
    return CType(name, f"{size}s", size, 8)


# The native size_t packs in half the time of "Q".
_CHANGING_CODES = {POINTER: "N", TENSOR_MAP: TENSOR_MAP.code}


def struct_type(kind: Any, *types: CType) -> CType:
    """The type of a C++ struct that has the name and the fields of ``kind``, a NamedTuple."""
    members = tuple(zip(kind._fields, types, strict=True))
    code, size = "", 0
    for type in types:
        aligned = _aligned(size, type.alignment)
        code += "x" * (aligned - size) + type.code
        size = aligned + type.size
    alignment = max(type.alignment for type in types)
    code += "x" * (_aligned(size, alignment) - size)
    return CType(kind.__name__, code, _aligned(size, alignment), alignment, members)


class ParamStruct:
    """The parameter struct of a kernel.

    Parameters
    ----------
    declarations : iterables of Declaration
        The members in order: ``I64("q_stride_b", "q_stride_s"), I32("topk", length=2), ...``.
    changing : sequence of str
        Names of the members that change from launch to launch, in the order in which
        `PreparedLaunch.launch` takes them; of an array, the names of its elements. They have to be the first
        members, and pointers, tensor maps or bytes.

    Attributes
    ----------
    members : tuple of Member
    size : int
        Bytes of the struct: its `sizeof`.
    changing : struct.Struct
        Packs the members that change.
    pack : callable
        Takes all other members by keyword and returns the bytes of the struct:
        ``pack(q_stride_b=512, topk=(64, 0), ...)``. Arrays and structs take tuples. The members that change
        are zeros. A missing or an unknown name is a TypeError.

    Raises
    ------
    ValueError
        ``changing`` does not name the first members in their order.
    """

    pack: Callable[..., bytes]

    def __init__(self, *declarations: Iterable[Declaration], changing: Sequence[str] = ()) -> None:
        declared = [one for several in declarations for one in several]
        members: list[Member] = []
        codes, offset = "<", 0
        for name, type, length, _ in declared:
            aligned = _aligned(offset, type.alignment)
            code = type.code * (length or 1)
            members.append(Member(name, type, length, aligned, code))
            codes += "x" * (aligned - offset) + code
            offset = aligned + type.size * (length or 1)
        self.size = _aligned(offset, max(type.alignment for _, type, _, _ in declared))
        codes += "x" * (self.size - offset)
        self.members = tuple(members)
        fixed = _split(declared, list(changing))
        self.changing = struct.Struct(
            "@"
            + "".join(
                _CHANGING_CODES.get(one.type, one.type.code) * (one.length or 1) for one in declared[:fixed]
            )
        )
        self.pack = _packer(struct.Struct(codes), self.members[:fixed], self.members[fixed:])


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _split(declared: list[Declaration], changing: list[str]) -> int:
    """How many members `changing` names; they have to be the first ones."""
    names: list[str] = []
    number = 0
    while len(names) < len(changing) and number < len(declared):
        names += declared[number].elements or (declared[number].name,)
        number += 1
    if names != changing:
        raise ValueError(f"changing: expected the first members {names}, got {changing}")
    return number


def _packer(
    packs: struct.Struct, changing: tuple[Member, ...], fixed: tuple[Member, ...]
) -> Callable[..., bytes]:
    """A function that takes the fixed members by keyword.

    It is made from text, like the methods of a dataclass, so that a launch needs no loop over the names.
    """
    values = []
    for member in changing:
        values += ["0" if member.type is POINTER else repr(b"")] * (member.length or 1)
    for member in fixed:
        values.append(f"*{member.name}" if member.length or member.type.members else member.name)
    names = ", ".join(member.name for member in fixed)
    made: dict[str, Any] = {"_packs": packs.pack}
    exec(f"def pack({'*, ' * bool(fixed)}{names}):\n    return _packs({', '.join(values)})", made)
    pack: Callable[..., bytes] = made["pack"]
    return pack
