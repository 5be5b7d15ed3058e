"""Names in the code of a function."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

Chain = tuple[str, ...]
"""The attributes that follow a variable where it is read: ``("nn", "functional", "silu")``."""

_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))


class CodeNames:
    """The names in a code object and in the functions inside of it. Equal code shares one, which is compared
    by identity, because hashing code is slow.
    """

    __slots__ = ("attributes", "complete", "free", "globals")

    free: tuple[tuple[Chain, ...], ...]
    """For each closed-over variable, in the order of ``co_freevars``, the chains that it is read with."""
    globals: tuple[tuple[str, tuple[Chain, ...]], ...]
    """Names that are looked up among the globals and then among the builtins, with their chains."""
    attributes: frozenset[str]
    """All attributes that are read."""
    complete: bool
    """Whether names lead to all that the code reads. Imports, classes and patterns of classes lead to more,
    and so does code that sets a global or an attribute.
    """

    def __init__(self, code: CodeType) -> None:
        self.complete = True
        attributes: set[str] = set()
        of_globals: dict[str, set[Chain]] = {}
        of_free: dict[str, set[Chain]] = {}
        variables = {"LOAD_GLOBAL": of_globals, "LOAD_DEREF": of_free}
        variable: set[Chain] | None = None  # read by the instruction before, or by a chain that ends there
        chain: Chain = ()
        for instruction in dis.get_instructions(code):
            kind, name = instruction.opname, instruction.argval
            if kind == "EXTENDED_ARG":
                continue
            if kind in _ATTRIBUTES:
                attributes.add(name)
                chain = (*chain, name)
                continue
            if variable is not None:
                variable.add(chain)
            variable, chain = None, ()
            if kind in variables:
                variable = variables[kind].setdefault(name, set())
            elif instruction.opcode in dis.hasname or kind == "MATCH_CLASS":
                self.complete = False
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                inner = names_in(constant)
                self.complete = self.complete and inner.complete
                attributes |= inner.attributes
                for known, names in (
                    (of_globals, inner.globals),
                    (of_free, zip(constant.co_freevars, inner.free, strict=True)),
                ):
                    for name, more in names:
                        known.setdefault(name, set()).update(more)
        self.attributes = frozenset(attributes)
        self.globals = tuple((name, tuple(found)) for name, found in of_globals.items())
        self.free = tuple(tuple(of_free.get(name, ())) for name in code.co_freevars)


names_in = lru_cache(maxsize=1024)(CodeNames)
