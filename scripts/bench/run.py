"""Benchmark of rawmla's dense and sparse decoding, sparse prefill, dense attention, decoding over caches,
prefix prefill, flex attention, their backward, and of what goes with them.

On a machine with a Hopper GPU and torch: compiles what is not compiled yet and times every case (or those
that --cases selects) next to the ceilings of the same run, and beside the libraries that can be imported. A
case that fails is reported, and the others still run. Elsewhere a small case of each family runs on an
emulated device, beside the float64 reference, and its kernels are compiled, with their registers and spills;
nothing is timed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be before anything runs. `chosen` are the cases."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", metavar="REGEX", help="run the cases whose name matches, e.g. 'b128-q1' or 'metadata'")
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--replays", type=int, default=5, help="graph replays per figure, at least 5 (default 5)")
    load = "seconds of load without rest for the sustained figure of an attention case (default 2)"
    add("--sustain-seconds", type=float, default=2.0, metavar="S", help=load)
    add("--json", type=Path, metavar="FILE", help="write a record to FILE, anew after each case")
    options = parser.parse_args(arguments)
    if options.replays < 5:
        parser.error("argument --replays: expected at least 5")
    if not (math.isfinite(options.sustain_seconds) and options.sustain_seconds >= 0):
        parser.error("argument --sustain-seconds: expected 0 or more")
    from . import families

    try:
        options.chosen = families.select(options.cases)
    except ValueError as error:
        parser.error(str(error))
    return options


def compile_kernels() -> list[str]:
    """Every kernel, ready before anything is timed. What does not compile."""
    from rawmla.kernels import all_specs

    from .emulated import compile_specs

    problems = (kernel["problem"] for kernel in compile_specs(all_specs()) if "problem" in kernel)
    return [f"does not compile: {problem.splitlines()[0]}" for problem in problems]


def measure(options: argparse.Namespace, part: dict[str, Any], save: Callable[[], None]) -> bool:
    """Compile, then measure ceilings, cases and ceilings again into a part of a record, which is saved after
    each. True when nothing failed.

    What fails is one line of `part["errors"]`, and the rest goes on. Only without the first ceilings, which
    need no kernel of rawmla, nothing is measured.
    """
    import torch

    from .ahead import compiled_ahead
    from .cases import one_line
    from .families import family_of
    from .measure import measure_ceilings
    from .tables import add_shares

    with compiled_ahead(options.chosen):
        part["errors"] = compile_kernels()
    replays, seconds = options.replays, options.sustain_seconds
    part |= {"replays": replays, "sustain_seconds": seconds, "ceilings": [measure_ceilings(replays)]}
    rows, begin = part["rows"], time.monotonic()
    for number, case in enumerate(options.chosen, 1):
        family = family_of(case.id)
        try:
            torch.cuda.empty_cache()
            rows.append(family.measure(case, family.rounds, replays, seconds))
            said = f"{rows[-1]['us']:8.1f} µs  {case.id}"
        except Exception as error:  # whatever went wrong, the other cases are still worth their time
            rows.append({"case": case.id, "error": one_line(error)})
            part["errors"].append(f"{case.id}: {one_line(error)}")
            said = f"FAILED  {part['errors'][-1]}"
        add_shares(rows, part["ceilings"])
        save()
        elapsed = time.monotonic() - begin
        print(f"[{number}/{len(options.chosen)}] {elapsed:5.0f} s  {said}", file=sys.stderr, flush=True)
    try:
        part["ceilings"].append(measure_ceilings(replays))
    except Exception as error:  # as for a case
        part["errors"].append(f"ceilings after the cases: {one_line(error)}")
    add_shares(rows, part["ceilings"])
    save()
    return not part["errors"]


def run_timed(options: argparse.Namespace) -> int:
    """Measure, print the tables, and with --json write a record of one part."""
    from . import record, tables

    part = record.new_part("bench", vars(options) | {"bench_args": " ".join(sys.argv[1:])})
    good = measure(options, part, lambda: record.write([part], options.json) if options.json else None)
    if options.json:
        record.write([{**part, "ended": True, "good": good}], options.json)
    rows, stored = part["rows"], tables.peers(part["machine"]["device"])
    print(", ".join(f"{key} {value}" for key, value in part["machine"].items()))
    print(tables.describe_ceilings(part["ceilings"]))
    print(f"\n{tables.text_report(rows, stored)}\n")
    failures = dict.fromkeys(item for row in rows for item in row.get("not_compared", {}).items())
    for name, text in failures:
        print(f"not compared with {name}: {text}")
    for error in part["errors"]:
        print(f"FAILED: {error}")
    return 0 if good else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 0 unless a case fails or a kernel does not compile."""
    options = parse_arguments(arguments)
    from . import emulated, families, record

    if options.list:
        print("\n".join(case.id for case in options.chosen))
        return 0
    reason = record.why_no_timing()
    if reason is None:
        return run_timed(options)
    return emulated.run(reason, list(dict.fromkeys(families.family_of(case.id) for case in options.chosen)))
