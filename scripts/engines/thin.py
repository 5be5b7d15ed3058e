"""Thin the device code of a CUDA library to what one architecture needs.

usage: thin.py LIBRARY [REGEX]

A library's section .nv_fatbin is a row of containers, one for each source file that was compiled, and
a container holds one image for each architecture. All that is not a binary for ARCH is taken out; with
REGEX, so is every binary in which it finds nothing (the names of kernels are readable there, unless the
image is compressed). Containers keep their places, and one that lost everything stays as an empty one:
the library loads as before, and only a launch of a kernel that was taken out fails. The file keeps its
size, but what was taken out is zeros, which compress to nothing.
"""

import mmap
import re
import struct
import sys
from collections.abc import Iterator

ARCH = 90
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the images
IMAGE = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header, bytes of the code, .., architecture
MAGIC = 0xBA55ED50
BINARY = 2  # the kind of an image that is not PTX


def find_section(data: mmap.mmap, wanted: bytes) -> tuple[int, int]:
    """Return where a section of an ELF file begins and ends."""
    (table,) = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    rows = [struct.unpack_from("<II16xQQ", data, table + 64 * i) for i in range(count)]
    for name, _, start, size in rows:
        first = rows[names][2] + name
        if data[first : data.find(b"\0", first)] == wanted:
            return start, start + size
    raise SystemExit(f"there is no section {wanted.decode()}")


def list_containers(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the images of each container begin and end."""
    while at < end:
        magic, _, header, size = CONTAINER.unpack_from(data, at)
        if magic == MAGIC:
            yield at + header, at + header + size
            at += header + size
        else:
            at += 8  # containers are aligned to 8 bytes


def choose_images(data: mmap.mmap, at: int, end: int, pattern: re.Pattern[bytes] | None) -> bytes:
    """Return a container's images that stay, one after another."""
    kept = b""
    while at < end:
        kind, _, header, size, arch = IMAGE.unpack_from(data, at)
        image = data[at : at + header + size]
        if kind == BINARY and arch == ARCH and (pattern is None or pattern.search(image)):
            kept += image
        at += header + size
    return kept


def thin_library(path: str, pattern: re.Pattern[bytes] | None) -> tuple[int, int, int]:
    """Rewrite a library in place; return its containers, those not empty, and the bytes that are left."""
    containers = filled = left = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for start, end in list(list_containers(data, *find_section(data, b".nv_fatbin"))):
            kept = choose_images(data, start, end, pattern)
            data[start:end] = kept.ljust(end - start, b"\0")
            struct.pack_into("<Q", data, start - 8, len(kept))
            containers, filled, left = containers + 1, filled + bool(kept), left + len(kept)
    return containers, filled, left


def main() -> None:
    """Thin the library that is named on the command line."""
    pattern = re.compile(sys.argv[2].encode()) if len(sys.argv) > 2 else None
    containers, filled, left = thin_library(sys.argv[1], pattern)
    if not filled:
        raise SystemExit(f"nothing is left of {sys.argv[1]}")
    print(f"{sys.argv[1]}: {filled} of {containers} containers, {left / 1e6:.1f} MB of device code")


if __name__ == "__main__":
    main()
