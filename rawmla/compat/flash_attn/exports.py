"""Wheels and kernel folders that lead other programs' look-ups of flash-attn to rawmla."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

from .install import GENERATIONS, SITE

KERNELS = {
    "kernels-community/flash-attn2": "fa2",
    "kernels-community/flash-attn3": "fa3",
    "kernels-community/vllm-flash-attn3": "fa3",
}
"""Names of Hugging Face's hub of kernels, and the modules that stand for them."""

_WHEEL = "Wheel-Version: 1.0\nGenerator: rawmla\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheels(target: Path, versions: Iterable[int]) -> list[Path]:
    """Write one wheel for each generation, with the files of its folder, and return their paths."""
    target.mkdir(parents=True, exist_ok=True)
    return [_write_wheel(target, SITE / GENERATIONS[version].folder) for version in versions]


def _write_wheel(target: Path, folder: Path) -> Path:
    (metadata,) = folder.glob("*.dist-info")
    sources = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sources}
    files[f"{metadata.name}/WHEEL"] = _WHEEL.encode()
    record = f"{metadata.name}/RECORD"
    rows = [f"{name},{_digest(data)},{len(data)}\n" for name, data in files.items()]
    files[record] = "".join([*rows, f"{record},,\n"]).encode()
    wheel = target / f"{metadata.name.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # without a time: equal files make equal wheels
    return wheel


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"


def write_kernels(target: Path) -> str:
    """Write a folder for each name in `KERNELS` and return the value of LOCAL_KERNELS that leads to them."""
    entries = []
    for repository, module in KERNELS.items():
        name = repository.partition("/")[2]
        folder = target.absolute() / name
        folder.mkdir(parents=True, exist_ok=True)
        identity = f"rawmla_{name.replace('-', '_')}"
        metadata = {
            "id": identity,
            "name": name,
            "version": 1,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": "cuda", "archs": ["9.0"]},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
        (folder / "__init__.py").write_text(
            f'"""{repository} computed by rawmla."""\n\nfrom rawmla.compat.flash_attn.{module} import *\n'
            f"from rawmla.compat.flash_attn import {module} as flash_attn_interface\n"  # for diffusers
        )
        entries.append(f"{repository}={os.fspath(folder)}")
    return ":".join(entries)
