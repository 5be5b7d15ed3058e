"""Timing a case and the libraries beside it in turns: every figure of a row in a few seconds.

Needs torch with a Hopper GPU. Times are in microseconds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .against import WAYS
from .columns import OURS, Row
from .families import Settings
from .flex_backward_cases import FlexBackwardCase
from .measure import ROUNDS_BESIDE, Prepared
from .mha_backward_cases import MhaBackwardCase
from .peers import Call, Peer
from .report import one_line
from .timing import CALLS_PER_GRAPH, REST_AFTER_LOAD_SECONDS, Graph, repeat, rest, time_graph

GRAPH_FLOPS = 15 * 10**11
"""Operations of one graph at most, unless one call has more: 3 ms or so. Longer ones would need longer
rests."""

CYCLES_PER_SECOND = 2 * 10**9
"""A GPU's clock, rounded up."""

BackwardCase = MhaBackwardCase | FlexBackwardCase


class Enqueued(Graph):
    """`calls` enqueued anew where a graph would be replayed."""

    def __init__(self, calls: Callable[[], None], count: int) -> None:
        self.count = count
        self.calls = calls
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        self._host_seconds = 0.0

    def replay(self) -> None:
        """Enqueue the calls."""
        begin = time.perf_counter()
        self.calls()
        self._host_seconds = time.perf_counter() - begin

    def hold_back(self) -> None:
        """Let the GPU wait twice as long as the host took to enqueue the calls the last time. Else the host's
        time up to the first kernel counts, which differs by a quarter of a millisecond between libraries.
        """
        torch.cuda._sleep(int(2 * self._host_seconds * CYCLES_PER_SECOND))


def calls_per_graph(case: BackwardCase) -> int:
    """CALLS_PER_GRAPH, or fewer calls, as many as GRAPH_FLOPS allows."""
    return max(1, min(CALLS_PER_GRAPH, GRAPH_FLOPS // case.flops()))


def prepared(
    case: BackwardCase,
    inputs: Any,
    backward: Callable[[bool], Call],
    check: Callable[[Any], float],
    without: Call | None = None,
) -> Prepared:
    """A case that is ready to be timed. `backward` gives its calls, deterministic or not; the results of both
    are checked. `without`: the call without the gradient of a captured tensor.
    """
    call, deterministic = backward(False), backward(True)
    error = max(check(call(0)), check(deterministic(0)))
    count = calls_per_graph(case)

    def more(replays: int) -> Row:
        def us(one: Call) -> float:
            return time_graph(repeat(one, count), count, replays).us

        plain, ordered = us(call), us(deterministic)
        row = {"deterministic_us": ordered, "deterministic_ratio": ordered / plain}
        return row if without is None else {**row, "captured_ratio": plain / us(without)}

    return Prepared(inputs, call, 1, error, more, count)


def time_in_turns(
    case: BackwardCase,
    prepare: Callable[[Any], Prepared],
    settings: Settings,
    peers: Sequence[Peer],
) -> Row:
    """Measure one case and each importable peer: medians of rounds in which all take turns in this process,
    rested, then without rests, then under load, which is shared out over the rounds. What went wrong with a
    peer is in the row. Beside a peer all are timed as calls. The peers' backward by autograd could not be
    captured in a graph so far, and torch gives freed memory out no more once a capture has failed.
    """
    ready = prepare(case)
    calls: dict[str, Call] = {OURS: ready.call}
    failures: dict[str, str] = {}
    for peer in peers:
        try:
            (calls[peer.name],) = peer.calls(case, ready.inputs)
        except ImportError:
            failures[peer.name] = f"{peer.modules}: not importable here"
        except Exception as error:  # a peer's failure is a result to report, whatever its kind
            failures[peer.name] = one_line(error)
    row: Row = {"case": case.id, **case.fields()}
    kind: type[Graph] = Enqueued if len(calls) > 1 else Graph
    turns = {name: kind(repeat(call, ready.calls), ready.calls) for name, call in calls.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in turns}

    def note(name: str, **figures: float) -> None:
        for key, value in figures.items():
            found[name].setdefault(key, []).append(value)

    rest()
    for _ in range(ROUNDS_BESIDE):
        for name, timer in turns.items():
            note(name, **vars(timer.rested(settings.replays)))
    more = ready.more(settings.replays)
    # Untimed: without it the first alone would be timed after a rest.
    next(reversed(turns.values())).without_rests(settings.replays)
    for _ in range(ROUNDS_BESIDE):
        for name, timer in turns.items():
            note(name, **{WAYS["no rests"]: timer.without_rests(settings.replays).us})
    if settings.sustain_seconds:
        for _ in range(ROUNDS_BESIDE):
            for name, timer in turns.items():
                load = timer.sustained(settings.sustain_seconds / ROUNDS_BESIDE, rest_after=0)
                note(name, **{f"sustained_{key}": value for key, value in load.items()})
        time.sleep(REST_AFTER_LOAD_SECONDS)
    figures: dict[str, Row] = {
        name: {key: statistics.median(values) for key, values in own.items()} for name, own in found.items()
    }
    row |= figures[OURS]
    row |= {"us_min": min(found[OURS]["us_min"]), "us_max": max(found[OURS]["us_max"])}
    row |= {"rel_l2": ready.rel_l2, **more}
    row["tflops"] = case.flops() / row["us"] / 1e6
    row["gbps"] = case.bytes_moved() / row["us"] / 1e3
    if len(turns) > 1:
        row["beside"] = figures
    if failures:
        row["not_compared"] = failures
    return row
