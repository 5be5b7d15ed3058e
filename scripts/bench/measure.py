"""Measuring a case every way, with the libraries beside it; the ceilings of a run.

Needs torch with a Hopper GPU. Times are in microseconds.
"""

import statistics
import time
from typing import Any

import torch

from .cases import OURS, Call, Case, Prepared, Row, one_line
from .timing import (
    CALLS_PER_GRAPH,
    REST_AFTER_LOAD_SECONDS,
    Enqueued,
    Graph,
    repeat,
    rest,
    time_graph,
)

IN_TURNS = 3
"""Rounds where libraries run beside, in the same process."""

MATMUL_SIZE = 8192
COPY_BYTES = 2 << 30
GRAPH_FLOPS = 5 * 10**12
"""Operations of one graph at most, unless one call has more: 8 ms or so. Replays of ten calls of 4 ms would
mostly run at the power limit, and the GPU would idle for seconds after them."""
GRAPH_FLOPS_IN_TURNS = 15 * 10**11
"""The same where libraries take turns: each replay waits for its own rest, nine times a row or more."""


def calls_per_graph(case: Case, most: int) -> int:
    """CALLS_PER_GRAPH, or fewer calls, as many as `most` operations allow."""
    return max(1, min(CALLS_PER_GRAPH, most // max(case.flops(), 1)))


def _beside(ready: Prepared, kind: type[Graph], count: int) -> tuple[dict[str, Graph], Row]:
    """The timers of the libraries beside, and what went wrong with others. One that is not installed is no
    failure.
    """
    timers: dict[str, Graph] = {}
    failures: Row = {}
    for name, make in ready.peers.items():
        try:
            timers[name] = kind(repeat(make(), count), count)
        except ImportError:
            continue
        except Exception as error:  # a peer's failure is a result to report, whatever its kind
            failures[name] = one_line(error)
    return timers, failures


def _backward_figures(ready: Prepared, count: int, replays: int) -> Row:
    """The deterministic time of a backward, and its ratio to the plain one."""
    if ready.ordered is None:
        return {}

    def us(call: Call) -> float:
        return time_graph(repeat(call, count), count, replays)["us"]

    plain, ordered = us(ready.call), us(ready.ordered)
    return {"deterministic_us": ordered, "deterministic_ratio": ordered / plain}


def time_attention(case: Case, rounds: int, replays: int, sustain_seconds: float) -> Row:
    """Measure a case and the libraries beside it: medians of rounds in which all take turns in this process,
    rested, then without rests, then under load, which is shared out over the rounds.

    A backward beside a library is timed as calls: theirs, by autograd, cannot be captured in a graph.
    """
    ready = case.prepare()
    count = calls_per_graph(case, GRAPH_FLOPS_IN_TURNS if rounds > 1 else GRAPH_FLOPS)
    if ready.in_turn:  # every set as often as the others
        count = -(-count // ready.sets) * ready.sets
    kind = Enqueued if ready.ordered is not None and ready.peers else Graph
    timers, failures = _beside(ready, kind, count)
    kind, rounds = (kind, IN_TURNS) if timers else (Graph, rounds)

    def ours(kind: type[Graph], count: int) -> Graph:
        return kind(repeat(ready.call if ready.in_turn else lambda _: ready.call(0), count), count)

    timers = {OURS: ours(kind, count), **timers}
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in timers}

    def note(name: str, prefix: str, figures: dict[str, float]) -> None:
        for key, value in figures.items():
            samples[name].setdefault(prefix + key, []).append(value)

    if rounds == 1:  # nothing rests between set-up and replays; ten calls, as in most published figures
        ten = timers[OURS] if count == CALLS_PER_GRAPH else ours(Graph, CALLS_PER_GRAPH)
        note(OURS, "unrested_", {"us": ten.without_rests(replays)["us"]})
        del ten
    rest()
    for _ in range(rounds):
        for name, timer in timers.items():
            note(name, "", timer.rested(replays))
    more = _backward_figures(ready, count, replays) | ready.more(replays)
    if ready.sets > 1 and not ready.in_turn:
        more["cold_us"] = time_graph(repeat(ready.call, ready.sets), ready.sets, replays)["us"]
    if rounds > 1:
        # Untimed: without it the first alone would be timed after a rest.
        next(reversed(timers.values())).without_rests(replays)
        for _ in range(rounds):
            for name, timer in timers.items():
                note(name, "unrested_", {"us": timer.without_rests(replays)["us"]})
    if sustain_seconds:
        for _ in range(rounds):
            for name, timer in timers.items():
                note(name, "sustained_", timer.sustained(sustain_seconds / rounds))
        time.sleep(REST_AFTER_LOAD_SECONDS)
    figures: dict[str, Row] = {
        name: {key: statistics.median(values) for key, values in own.items()} for name, own in samples.items()
    }
    row = {"case": case.id, **figures[OURS], "rel_l2": ready.error, **more}
    row |= {"us_min": min(samples[OURS]["us_min"]), "us_max": max(samples[OURS]["us_max"])}
    row["tflops"] = case.flops() / row["us"] / 1e6
    row["gbps"] = case.bytes_moved() / row["us"] / 1e3
    if len(timers) > 1:
        row["beside"] = figures
    if failures:
        row["not_compared"] = failures
    return row


def time_moving(case: Case, rounds: int, replays: int, sustain_seconds: float) -> Row:
    """Measure a case that only moves data, rested."""
    ready = case.prepare()
    rest()
    timing = time_graph(repeat(ready.call, CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays)
    row: Row = {"case": case.id, **timing, **ready.more(replays)}
    if case.bytes_moved():
        row["gbps"] = case.bytes_moved() / timing["us"] / 1e3
    return row


def measure_ceilings(replays: int) -> dict[str, float]:
    """This device, now: bf16 matrix product of two 8192 x 8192 matrices (TFLOP/s) and an elementwise copy
    (GB/s, bytes read plus bytes written).
    """

    def us(call: Call) -> Any:
        return time_graph(repeat(call, CALLS_PER_GRAPH), CALLS_PER_GRAPH, replays)["us"]

    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    rest()
    matmul = us(lambda _: torch.mm(a, b, out=product))
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = us(lambda _: torch.add(source, 0.0, out=target))
    return {
        "matmul_tflops": 2 * MATMUL_SIZE**3 / matmul / 1e6,
        "copy_gbps": 2 * COPY_BYTES / copy / 1e3,
    }
