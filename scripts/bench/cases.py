"""What every case has: its name, its counts, and how it is made ready to be timed."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

Row = dict[str, Any]
"""What was measured of a case."""

Call = Callable[[int], Any]
"""Makes one call, given its number."""

OURS, CUDNN, FLASH_ATTENTION_3, FLASH_ATTENTION_4 = "rawmla", "cuDNN", "FlashAttention-3", "FlashAttention-4"
CONTIGUOUS = f"{OURS} contiguous"
"""Another call of ours, beside which a case is timed."""

LENGTH_SEED = 0
"""Seed of lengths that are drawn."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class Arrays(SimpleNamespace):
    """Device arrays of a case, by the names of the function's arguments. What it does not have is None."""

    def but(self, **others: Any) -> "Arrays":
        """The same with some others."""
        return Arrays(**{**vars(self), **others})


@dataclass(frozen=True)
class Prepared:
    """A case that is ready to be timed: a first call gave the right result, up to the relative L2 `error`.

    `call` takes the number of one of `sets` of data, for runs whose data must not stay in L2. With `in_turn`
    all figures are of such runs: `call` and `peers` take any number, and the sets in turn. `ordered` is the
    deterministic call. `peers` make the calls of other libraries on the same inputs. `more` measures what
    only some cases have.
    """

    call: Call
    error: float
    sets: int = 1
    in_turn: bool = False
    ordered: Call | None = None
    peers: Mapping[str, Callable[[], Call]] = field(default_factory=dict)
    more: Callable[[int], Row] = lambda replays: {}


@cache
def pattern(template: str) -> re.Pattern[str]:
    """The regular expression of a template: `{b}` is a number or the word b, `{dtype:bf16|fp16}` one of these
    texts, and what stands in brackets may be missing.
    """

    def group(found: re.Match[str]) -> str:
        return f"(?P<{found[1]}>{found[2] or rf'[0-9]+|{found[1]}'})"

    return re.compile(re.sub(r"{(\w+):?([^}]*)}", group, template.replace("[", "(?:").replace("]", ")?")))


Kind = TypeVar("Kind", bound="Case")


@dataclass(eq=False)
class Case:
    """A benchmark case. `id` is its name: --cases searches it, tables and the record show it. The fields of a
    kind of cases are what `template` finds in a name: numbers, texts, and True for a word that is there.
    """

    template: ClassVar[str] = ""
    id: str

    @classmethod
    def named(cls: type[Kind], name: str) -> Kind | None:
        """The case of this name; None where this kind of cases has other names."""
        found = pattern(cls.template).fullmatch(name)
        if found is None:
            return None
        given = {key: value for key, value in found.groupdict().items() if value is not None}
        fields = {key: value == key or _number(value) for key, value in given.items()}
        return cls(name, **fields)

    def flops(self) -> int:
        """Multiplications and additions of the matrix products."""
        return 0

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory."""
        return 0

    def prepare(self) -> Prepared:
        """Make inputs on the GPU, and check a first call."""
        raise NotImplementedError


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def worst_error(case: Case, found: Iterable[tuple[str, Any, Any]], bound: float = 0.01) -> float:
    """Return the largest relative L2 error of (name, result, expected). Raises AssertionError at the bound or
    NaN: the time of a wrong result means nothing.
    """
    worst = 0.0
    for name, got, want in found:
        error = float((got.double() - want).norm() / want.norm())
        assert error < bound, f"{case.id}: {name} has a relative error of {error}"
        worst = max(worst, error)
    return worst


def one_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}".rstrip(": ")
