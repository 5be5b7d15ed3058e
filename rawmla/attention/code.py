"""Names in the code of a function."""

from __future__ import annotations

from functools import lru_cache
from types import CodeType

__all__ = ["CodeNames", "names_in"]

_LAYOUT = frozenset(("data_ptr", "is_contiguous", "layout", "storage_offset", "stride"))


class CodeNames:
    """One for all code that is equal: known by identity, which costs less than to hash code.

    Attributes
    ----------
    names : tuple of str
        Those that the code, or that of a function in it, may look up among the globals.
    of_layout : bool
        Whether an attribute that says how a tensor lies in memory may be among them.
    """

    __slots__ = ("names", "of_layout")

    names: tuple[str, ...]
    of_layout: bool

    def __init__(self, code: CodeType) -> None:
        names = list(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                names += names_in(constant).names
        self.names = tuple(names)
        self.of_layout = not _LAYOUT.isdisjoint(names)


names_in = lru_cache(maxsize=1024)(CodeNames)
