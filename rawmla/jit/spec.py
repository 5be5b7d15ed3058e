"""What identifies one compiled variant of a kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["KernelSpec"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_SMEM_BYTES = 232_448  # dynamic shared memory one CTA can have on sm_90 (227 KiB)


@dataclass(frozen=True, eq=True)
class KernelSpec:
    """One variant of one kernel; hashable, and cheap to look up.

    Parameters
    ----------
    name : str
        The kernel lives in ``cuda_src/kernels/<name>.cu``; its ``extern "C"`` entry point has the same name.
    defines : iterable of (str, int)
        ``-DNAME=VALUE`` compiler options. Stored sorted, so the order given does not matter.
    threads : int
        Threads of one CTA.
    smem_bytes : int
        Dynamic shared memory of one CTA, in bytes.

    Raises
    ------
    ValueError
        A name that is no C identifier, a define given twice, or a number out of range.
    """

    name: str
    defines: tuple[tuple[str, int], ...]
    threads: int
    smem_bytes: int
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        defines: Iterable[tuple[str, int]] = self.defines
        normal = tuple(sorted((str(key), int(value)) for key, value in defines))
        for word in (self.name, *(key for key, _ in normal)):
            if not _IDENTIFIER.fullmatch(word):
                raise ValueError(f"KernelSpec: expected a C identifier, got {word!r}")
        if len({key for key, _ in normal}) != len(normal):
            raise ValueError(f"defines: each name may occur once, got {normal}")
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"threads: expected 1 to 1024, got {self.threads}")
        if not 0 <= self.smem_bytes <= MAX_SMEM_BYTES:
            raise ValueError(f"smem_bytes: expected 0 to {MAX_SMEM_BYTES}, got {self.smem_bytes}")
        object.__setattr__(self, "defines", normal)
        object.__setattr__(self, "_hash", hash((self.name, normal, self.threads, self.smem_bytes)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def label(self) -> str:
        """Name and defines for people: ``mla_dense_decode[DTYPE=0,D_QK=576]``."""
        if not self.defines:
            return self.name
        return f"{self.name}[{','.join(f'{key}={value}' for key, value in self.defines)}]"
