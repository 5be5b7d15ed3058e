"""What every case has: its name, its counts, and how it is made ready to be timed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

Row = dict[str, Any]
"""What was measured of a case."""

Call = Callable[[int], Any]
"""Makes one call, given its number."""

OURS = "rawmla"
CUDNN, FLASH_ATTENTION_4 = "cuDNN", "FlashAttention-4"

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

    `call` takes the number of one of `sets` of data, for runs whose data must not stay in L2. `ordered` is
    the deterministic call, `without` the call without the gradient of what a score function reads. `peers`
    make the calls of other libraries on the same inputs. `more` measures what only some cases have.
    """

    call: Call
    error: float
    sets: int = 1
    ordered: Call | None = None
    without: Call | None = None
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    more: Callable[[int], Row] = lambda replays: {}


class Case:
    """A benchmark case. `id` is its only name: --cases searches it, tables and the record show it."""

    @property
    def id(self) -> str:
        """The name."""
        raise NotImplementedError

    def flops(self) -> int:
        """Multiplications and additions of the matrix products."""
        return 0

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory."""
        return 0

    def prepare(self) -> Prepared:
        """Make inputs on the GPU, and check a first call."""
        raise NotImplementedError


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
