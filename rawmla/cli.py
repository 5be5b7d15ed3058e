"""Command line: ``python -m rawmla info``, ``doctor``, ``compile [--all | --only REGEX] [--out DIR]``,
``flash-mla -- script.py`` and ``flash-attn -- script.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NoReturn

from rawmla import __version__
from rawmla.errors import CompileError, RawMLAError
from rawmla.jit import Builder, CompiledKernel, KernelSpec, default_builder, export

POLL_S = 0.2  # how long Ctrl-C may go unnoticed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, or 1 after an error.

    Wrong usage exits with 2, Ctrl-C with 130.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rawmla", description="Attention kernels for Hopper: MLA, dense and flex attention."
    )
    parser.add_argument("--version", action="version", version=f"rawmla {__version__}")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser(
        "info",
        help="what works on this machine, what does not and why",
        description="What works on this machine, what does not and why: text for a bug report.",
    )
    commands.add_parser(
        "doctor",
        help="whether vLLM, SGLang and LMDeploy use rawmla here, and what to do",
        description="Whether vLLM, SGLang and LMDeploy use rawmla in this environment, and what to do. Exit "
        "status 1 when something that was asked for is not in effect or cannot work.",
    )
    compiling = commands.add_parser(
        "compile",
        help="compile the kernels ahead; needs no GPU",
        description="Compile the kernels into the cache, so that no program waits for it. Needs no GPU.",
    )
    chosen = compiling.add_mutually_exclusive_group()
    chosen.add_argument(
        "--all",
        action="store_true",
        help="all kernels of MLA, and of dense attention and prefix prefill with the usual head dimensions; "
        "not kernels with softcap, ALiBi, FP8 output, or functions of yours, which are compiled at their "
        "first call",
    )
    chosen.add_argument(
        "--only",
        metavar="REGEX",
        help="the kernels of --all whose names match, such as 'mha_forward.*D_QK=128'",
    )
    compiling.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write the cubins to DIR, for machines without NVRTC that set RAWMLA_CUBIN_DIR=DIR",
    )
    running = commands.add_parser(
        "flash-mla",
        help="run a program whose flash_mla is rawmla",
        usage="%(prog)s [-h] [--api {object,tensors}] (--path | -- script.py [args])",
        description="Run a Python program in which `import flash_mla` gives rawmla, also in processes that "
        "it starts. After -- comes what would follow `python`: a script, or -m and a module, and arguments.",
    )
    running.add_argument("--path", action="store_true", help="print the folder for PYTHONPATH and do nothing")
    running.add_argument(
        "--api",
        choices=("object", "tensors"),
        help="what flash_mla.get_mla_metadata(...) returns: a plan object (default) or two tensors",
    )
    attending = commands.add_parser(
        "flash-attn",
        help="run a program whose flash_attn is rawmla",
        usage="%(prog)s [-h] [--fa 2,3] [--dropout {error,ignore}] (--path | --check | --wheel DIR | "
        "--kernels DIR | -- script.py [args])",
        description="Run a Python program in which `import flash_attn` and `import flash_attn_interface` "
        "give rawmla, also in processes that it starts. After -- comes what would follow `python`: a script, "
        "or -m and a module, and arguments.",
    )
    attending.add_argument(
        "--fa",
        type=_versions,
        default=(2, 3),
        metavar="2,3",
        help="generations of FlashAttention, by default 2 (flash_attn) and 3 (flash_attn_interface); 4 is "
        "flash_attn.cute",
    )
    attending.add_argument("--dropout", choices=("error", "ignore"), help="what a dropout_p above 0 does")
    attending.add_argument("--path", action="store_true", help="print the folders for PYTHONPATH")
    attending.add_argument("--check", action="store_true", help="print what transformers' checks answer")
    attending.add_argument(
        "--wheel",
        type=Path,
        metavar="DIR",
        help="write wheels for this machine, for packages that require flash-attn",
    )
    attending.add_argument(
        "--kernels",
        type=Path,
        metavar="DIR",
        help="write folders for Hugging Face's kernels library and print the value of LOCAL_KERNELS",
    )
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    program = given[end + 1 :]
    arguments, unknown = parser.parse_known_args(given[:end])
    if program and arguments.command not in ("flash-mla", "flash-attn"):
        unknown += ["--", *program]
    if unknown:  # first: a command may be missing as well
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.error(f"expected a command: {', '.join(commands.choices)}")
    try:
        if arguments.command == "info":
            return _info()
        if arguments.command == "doctor":
            return _doctor()
        if arguments.command == "flash-mla":
            if arguments.path == bool(program):
                running.error("expected --path, or -- before a program")
            if arguments.path and arguments.api:
                running.error("--api goes with a program; beside --path set RAWMLA_FLASH_MLA_API")
            return _flash_mla(program, arguments.api)
        if arguments.command == "flash-attn":
            wanted = (arguments.path, arguments.check, arguments.wheel, arguments.kernels, program)
            if sum(map(bool, wanted)) != 1:
                attending.error("expected --path, --check, --wheel, --kernels, or -- before a program")
            if arguments.dropout and not program:
                attending.error("--dropout goes with a program; else set RAWMLA_FLASH_ATTN_DROPOUT")
            return _flash_attn(program, arguments)
        return _compile(every=arguments.all, only=arguments.only, out=arguments.out)
    except (RawMLAError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)  # the ordinary end would wait for the kernels that are being compiled


def _info() -> int:
    from rawmla.report import collect

    _print_sections(collect())
    return 0


def _doctor() -> int:
    from rawmla.engines.doctor import examine

    found = examine()
    _print_sections(found.sections)
    problems = [f"problem: {problem}" for problem in found.problems]
    hints = [f"hint: {hint}" for hint in found.hints]
    print("what to do", *(problems + hints or ["nothing"]), sep="\n  ")
    return 1 if found.problems else 0


def _print_sections(sections: dict[str, list[tuple[str, str]]]) -> None:
    width = max(len(label) for rows in sections.values() for label, _ in rows)
    for title, rows in sections.items():
        print(title)
        for label, value in rows:
            print(f"  {label:<{width}}  {value}")


def _flash_mla(program: Sequence[str], api: str | None) -> int:
    from rawmla import compat

    if not program:
        print(compat.SITE)
        return 0
    _run([os.fspath(compat.SITE)], program, {} if api is None else {"RAWMLA_FLASH_MLA_API": api})


def _versions(text: str) -> tuple[int, ...]:
    """Return the value of --fa; argparse shows the error's text."""
    from rawmla.compat.flash_attn.install import as_versions

    try:
        return as_versions(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected some of 2, 3 and 4, as in 2,3, got {text!r}") from None


def _flash_attn(program: Sequence[str], arguments: argparse.Namespace) -> int:
    from rawmla.compat.flash_attn import check, exports
    from rawmla.compat.flash_attn.install import folders

    places = folders(arguments.fa)
    if program:
        mode = arguments.dropout
        _run(places, program, {"RAWMLA_FLASH_ATTN_DROPOUT": mode} if mode else {})
    if arguments.wheel:
        lines = [os.fspath(wheel) for wheel in exports.write_wheels(arguments.wheel, arguments.fa)]
    elif arguments.kernels:
        lines = [exports.write_kernels(arguments.kernels)]
    elif arguments.check:
        sys.path[:0] = places
        lines = list(check.answers())
    else:
        lines = [os.pathsep.join(places)]
    print(*lines, sep="\n")
    return 0


def _run(folders: list[str], program: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """Run a program that finds modules in these folders first, and whose environment has these variables."""
    package = Path(__file__).resolve().parents[1]
    if os.fspath(package) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        folders.append(os.fspath(package))  # a checkout: found here because it is the current folder
    environment = {**os.environ, **variables}
    if environment.get("PYTHONPATH"):
        folders.append(environment["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    sys.stdout.flush()
    # The program takes the place of this process and sees no trace of it; its children inherit the path.
    os.execve(sys.executable, [sys.executable, *program], environment)


def _chosen_specs(every: bool, only: str | None) -> list[KernelSpec]:
    from rawmla import kernels

    if only is None:
        return kernels.all_specs() if every else kernels.default_specs()
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ValueError(f"--only: expected a regular expression, got {only!r} ({error})") from None
    specs = [spec for spec in kernels.all_specs() if pattern.search(spec.label)]
    if not specs:
        raise ValueError(f"--only: expected a match with a kernel that --all compiles, got {only!r}")
    return specs


def _compile(*, every: bool, only: str | None, out: Path | None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    specs = _chosen_specs(every, only)
    if out is not None:
        _require_writable(out)
    builder = default_builder()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    built: dict[KernelSpec, CompiledKernel] = {}
    failures: list[CompileError] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("compiling", total=len(specs))
        for spec, future in _build_all(builder, specs, out):
            try:
                built[spec] = future.result()
            except CompileError as error:
                failures.append(error)
            progress.update(task, advance=1, description=spec.label)
    for line in _table([built[spec] for spec in specs if spec in built]):
        print(line)
    for failure in failures:
        print(f"\nerror: {failure}", file=sys.stderr)
    if out is not None:
        print(f"{len(built)} of {len(specs)} kernels written to {out}")
    else:
        origins = Counter(str(kernel.meta["origin"]) for kernel in built.values())
        how = ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items()))
        print(f"{len(built)} of {len(specs)} kernels ready ({how}); cache: {builder.cache.path}")
        lost = sum(kernel.path is None for kernel in built.values())
        if lost:
            print(f"error: {lost} of them could not be kept, see the warning", file=sys.stderr)
            return 1
    return 1 if failures else 0


def _require_writable(folder: Path) -> None:
    """Raise ``OSError`` before any work is done if `export` could not write into the folder."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        raise OSError(f"--out: {folder} cannot be written ({error})") from None


def _build_all(
    builder: Builder, specs: Sequence[KernelSpec], out: Path | None
) -> Iterator[tuple[KernelSpec, Future[CompiledKernel]]]:
    """Build on all cores (NVRTC runs without the interpreter lock); yields in the order of completion."""

    def job(spec: KernelSpec) -> CompiledKernel:
        compiled = builder.build(spec, keep=out is None)
        if out is not None:
            export(compiled, out)
        return compiled

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        futures = {pool.submit(job, spec): spec for spec in specs}
        pending = set(futures)
        while pending:
            # NVRTC sets SA_RESTART for SIGINT, so a wait without a limit would go on after Ctrl-C.
            done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                yield futures[future], future
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _table(kernels: Sequence[CompiledKernel]) -> list[str]:
    """Aligned text, one line per kernel: registers per thread, bytes per thread or CTA, seconds."""
    rows = [("kernel", "regs", "spill B", "local B", "smem B", "compile s", "from")]
    for kernel in kernels:
        meta = kernel.meta
        spilled = meta["spill_stores"] + meta["spill_loads"]
        shared = meta["static_shared_bytes"] + meta["dynamic_shared_bytes"]
        numbers = map(str, (meta["registers"], spilled, meta["local_bytes"], shared))
        rows.append((kernel.spec.label, *numbers, f"{meta['compile_seconds']:.2f}", meta["origin"]))
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in rows]
