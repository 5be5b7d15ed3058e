"""Reads the ptxas report in a program log, and says what in it costs speed."""

from __future__ import annotations

import re

_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")
_LOCAL = re.compile(r"(\d+) bytes (?:lmem|cumulative stack size)")
# C7504 to C7507: setmaxnreg ignored. C7510 to C7515 and C7518: wgmma instructions serialised.
_ADVISORY = re.compile(r"^.*\(C75(?:0[4-9]|1[0-58])\).*$", re.MULTILINE)


def _largest(pattern: re.Pattern[str], log: str) -> int:
    return max((int(value) for value in pattern.findall(log)), default=0)


def resources(log: str) -> dict[str, int]:
    """Registers, spills, local, shared memory (bytes) and named barriers, from a log of ``ptxas -v``."""
    frames = [tuple(int(value) for value in match) for match in _FRAME.findall(log)]
    return {
        "registers": _largest(_REGISTERS, log),
        "barriers": _largest(_BARRIERS, log),
        "spill_stores": sum(frame[1] for frame in frames),
        "spill_loads": sum(frame[2] for frame in frames),
        "local_bytes": max(sum(frame[0] for frame in frames), _largest(_LOCAL, log)),
        "static_shared_bytes": _largest(_SHARED, log),
    }


def has_report(log: str) -> bool:
    """Whether the log says how many registers and how much local memory the kernel uses."""
    return bool(_REGISTERS.search(log) and _FRAME.search(log))


def losses(log: str) -> list[str]:
    """What slows the compiled code down: spills, local memory, serialised WGMMA; empty for a good kernel."""
    found = [f"ptxas: {line.strip()}" for line in dict.fromkeys(_ADVISORY.findall(log))]
    used = resources(log)
    if used["spill_stores"] or used["spill_loads"]:
        found.append(
            f"register spills: {used['spill_stores']} bytes stored, {used['spill_loads']} bytes loaded"
        )
    if used["local_bytes"]:
        found.append(f"local memory: {used['local_bytes']} bytes of stack frame")
    return found
