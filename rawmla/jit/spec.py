"""The identity of one compiled variant of a kernel."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9_]+([./-][A-Za-z0-9_]+)*")  # no "..", not absolute, no quotes or spaces
MAX_SMEM_BYTES = 232_448  # dynamic shared memory one CTA can have on sm_90 (227 KiB)


@dataclass(frozen=True, eq=True)
class KernelSpec:
    """One variant of one kernel; hashable, and cheap to look up.

    Raises `ValueError` for a name that is no C identifier or no relative path, a name given twice, or a
    number out of range.
    """

    name: str  # of cuda_src/kernels/<name>.cu, and of its `extern "C"` entry point
    defines: tuple[tuple[str, int], ...]  # -DNAME=VALUE compiler options; stored sorted
    threads: int  # of one CTA. The kernel has them as THREADS
    smem_bytes: int  # dynamic shared memory of one CTA. The kernel has them as SMEM_BYTES
    headers: tuple[tuple[str, str], ...] = ()
    """Generated headers, which hold what a user wrote: the name in #include lines, and the text."""
    may_lose: bool = False
    """The variant may spill or serialise WGMMA, which is a warning then, see `get_kernel`. So may every one
    with headers.
    """
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        defines: Iterable[tuple[str, int]] = self.defines
        normal = tuple(sorted((str(key), int(value)) for key, value in defines))
        headers = tuple(sorted((str(name), str(text)) for name, text in self.headers))
        for word in (self.name, *(key for key, _ in normal)):
            if not _IDENTIFIER.fullmatch(word):
                raise ValueError(f"KernelSpec: expected a C identifier, got {word!r}")
        if len({key for key, _ in normal} - {"SMEM_BYTES", "THREADS"}) != len(normal):
            raise ValueError(f"defines: expected each name once, and no SMEM_BYTES or THREADS, got {normal}")
        names = [name for name, _ in headers]
        if len(set(names)) != len(names):
            raise ValueError(f"headers: each name may occur once, got {names}")
        for name in names:
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"headers: expected a relative path as name, got {name!r}")
        if not 1 <= self.threads <= 1024:
            raise ValueError(f"threads: expected 1 to 1024, got {self.threads}")
        if not 0 <= self.smem_bytes <= MAX_SMEM_BYTES:
            raise ValueError(f"smem_bytes: expected 0 to {MAX_SMEM_BYTES}, got {self.smem_bytes}")
        object.__setattr__(self, "defines", normal)
        object.__setattr__(self, "headers", headers)
        object.__setattr__(self, "_hash", hash((self.name, normal, self.threads, self.smem_bytes, headers)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Built anew: the stored hash of a string is true in one process only.
        return KernelSpec, (
            self.name, self.defines, self.threads, self.smem_bytes, self.headers, self.may_lose
        )  # fmt: skip

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """What the compiler defines: ``defines``, and the launch, which a kernel compares with its own."""
        return (*self.defines, ("SMEM_BYTES", self.smem_bytes), ("THREADS", self.threads))

    @property
    def user_text(self) -> bool:
        """Whether text that a user wrote is part of the kernel."""
        return bool(self.headers)

    @property
    def label(self) -> str:
        """Name and defines for people: ``mla_dense_decode[DTYPE=0,D_QK=576]``.

        With headers, eight digits of their SHA-256 stand at the end: ``name[D=128,text=1f0c9a3b]``.
        """
        parts = [f"{key}={value}" for key, value in self.defines]
        if self.headers:
            parts.append(f"text={hashlib.sha256(json.dumps(self.headers).encode()).hexdigest()[:8]}")
        return f"{self.name}[{','.join(parts)}]" if parts else self.name
