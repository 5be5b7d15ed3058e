"""Parameter structs of kernels, declared member by member as in their C++.

Offsets follow from the declaration by the alignment rules of C++; tests/test_params.py compares them with
what the compiler says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class CType(NamedTuple):
    """The C++ type of a member. Called with names, it declares members of this type.

    ``code`` is the type in a `struct` format. ``members`` has the members of a struct with their types.
    """

    name: str
    code: str
    size: int
    alignment: int
    members: tuple[tuple[str, CType], ...] = ()

    def __call__(self, *names: str, length: int = 0) -> list[Member]:
        """Declare members, or arrays of ``length`` elements if it is given."""
        return [Member(name, self, length) for name in names]


class Member(NamedTuple):
    """A member of a parameter struct, or before its offset is known the declaration of one.

    ``length`` 0: it is no array.
    """

    name: str
    type: CType
    length: int
    changes: bool = False
    offset: int = 0

    @property
    def code(self) -> str:
        """The whole member in a `struct` format."""
        return self.type.code * (self.length or 1)


def changing(*declarations: Iterable[Member]) -> list[Member]:
    """Declare members that change from launch to launch: pointers, numbers, tensor maps, bytes, or arrays.

    They are the first of their struct. `PreparedLaunch.launch` takes them in this order, arrays element by
    element.
    """
    return [one._replace(changes=True) for several in declarations for one in several]


POINTER = CType("pointer", "Q", 8, 8)
I64 = CType("long long", "q", 8, 8)
I32 = CType("int", "i", 4, 4)
U32 = CType("unsigned int", "I", 4, 4)
F32 = CType("float", "f", 4, 4)
TENSOR_MAP = CType("TensorMap", "128s", 128, 64)


def bytes_type(name: str, size: int) -> CType:
    """The type of a C++ struct of which only the bytes are known, a multiple of 8."""
    return CType(name, f"{size}s", size, 8)


def struct_type(kind: Any, *types: CType) -> CType:
    """The type of a C++ struct that has the name and the fields of ``kind``, a NamedTuple."""
    members = tuple(zip(kind._fields, types, strict=True))
    _, code, size, alignment = _layout([(type, 0) for type in types])
    return CType(kind.__name__, code, size, alignment, members)


def _layout(members: Sequence[tuple[CType, int]]) -> tuple[list[int], str, int, int]:
    """The offsets of members of these types and lengths, and the code, size and alignment of the struct."""
    offsets: list[int] = []
    code, end = "", 0
    for type, length in members:
        offset = _aligned(end, type.alignment)
        offsets.append(offset)
        code += "x" * (offset - end) + type.code * (length or 1)
        end = offset + type.size * (length or 1)
    alignment = max(type.alignment for type, _ in members)
    size = _aligned(end, alignment)
    return offsets, code + "x" * (size - end), size, alignment


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class ParamStruct:
    """The parameter struct of a kernel.

    Parameters
    ----------
    declarations : iterables of Member
        The members in order: ``changing(POINTER("q")), I64("q_stride_b"), I32("topk", length=2), ...``.

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
        A member that changes follows one that does not.
    """

    pack: Callable[..., bytes]

    def __init__(self, *declarations: Iterable[Member]) -> None:
        declared = [one for several in declarations for one in several]
        number = sum(one.changes for one in declared)
        if not all(one.changes for one in declared[:number]):
            names = [one.name for one in declared if one.changes]
            raise ValueError(f"changing: expected the first members of the struct, got {names}")
        offsets, code, self.size, _ = _layout([(one.type, one.length) for one in declared])
        self.members = tuple(
            one._replace(offset=offset) for one, offset in zip(declared, offsets, strict=True)
        )
        first, fixed = self.members[:number], self.members[number:]
        # The native size_t packs in half the time of "Q".
        codes = ["N" * (one.length or 1) if one.type is POINTER else one.code for one in first]
        self.changing = struct.Struct("@" + "".join(codes))
        self.pack = _packer(struct.Struct("<" + code), first, fixed)


def _packer(
    packs: struct.Struct, changing: tuple[Member, ...], fixed: tuple[Member, ...]
) -> Callable[..., bytes]:
    """A function that takes the fixed members by keyword.

    It is made from text, like the methods of a dataclass, so that a launch needs no loop over the names.
    """
    values = []
    for member in changing:
        values += [repr(b"") if member.code.endswith("s") else "0"] * (member.length or 1)
    for member in fixed:
        values.append(f"*{member.name}" if member.length or member.type.members else member.name)
    names = ", ".join(member.name for member in fixed)
    made: dict[str, Any] = {"_packs": packs.pack}
    exec(f"def pack({'*, ' * bool(fixed)}{names}):\n    return _packs({', '.join(values)})", made)
    pack: Callable[..., bytes] = made["pack"]
    return pack
