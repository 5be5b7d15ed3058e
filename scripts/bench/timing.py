"""Timing of calls through torch, rested, without rests and under load.

Needs torch with a CUDA GPU. Times are in microseconds.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

CALLS_PER_GRAPH = 10
WARMUP_REPLAYS = 2
# After memory was allocated, the first 5 to 10 ms of 27 us calls have been seen 2 us slower than the rest.
WARMUP_SECONDS = 0.02
REST_SECONDS = 0.2
# An H200 holds its full clock for 35 to 80 ms of dense decoding with 128 heads, then its power limit slows
# it. Warm-up and timed replays that last longer than this together are parted by a rest, so that the timed
# ones begin with the power budget of a chip at rest. Shorter ones do not reach the limit, and the first
# replay after a rest has been seen 3 us a call slower.
FULL_CLOCK_SECONDS = 0.03
# Of rest, times as long as what ran before it: two replays of warm-up; and the timed ones, for the next case.
COOL_DOWN = 10
# After a load, for the next case.
REST_AFTER_LOAD_SECONDS = 0.3
# Under load so much work waits on the GPU's queue: more than the host is ever late, less than a load lasts.
QUEUED_SECONDS = 0.02
# A GPU's clock, rounded up.
CYCLES_PER_SECOND = 2 * 10**9
SECONDS_BETWEEN = 0.02  # readings of power and clock


def read_nvml() -> tuple[float, float]:
    """Watts at this moment and MHz of the current GPU, through NVML (pip install nvidia-ml-py). Power that
    NVML gives without a field is a mean over the last second, in which the GPU may have idled.
    """
    import cupy
    import pynvml

    pynvml.nvmlInit()  # which counts its calls after the first
    device = pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.Device().pci_bus_id)
    (power,) = pynvml.nvmlDeviceGetFieldValues(device, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if power.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(power.nvmlReturn)
    return power.value.uiVal / 1e3, float(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))


@contextmanager
def meter(delay: float) -> Iterator[list[tuple[float, float]]]:
    """Readings of power and clock, fifty a second in a thread of its own, from `delay` seconds on until the
    block ends. A reading that ends later is dropped: the GPU may have idled during it. None where nothing can
    be read.
    """
    readings: list[tuple[float, float]] = []
    stop = threading.Event()

    def run() -> None:
        wait = delay
        while not stop.wait(wait):
            try:
                reading = read_nvml()
            except Exception:  # no pynvml, or NVML's errors, which are its own types
                return
            if not stop.is_set():
                readings.append(reading)
            wait = SECONDS_BETWEEN

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()


def timing_of(samples: list[float]) -> dict[str, float]:
    """The microseconds of a call over several graph replays: median, least and most."""
    return {"us": statistics.median(samples), "us_min": min(samples), "us_max": max(samples)}


def repeat(call: Callable[[int], Any], count: int) -> Callable[[], None]:
    """A function that makes `count` calls, giving each its number."""

    def calls() -> None:
        for i in range(count):
            call(i)

    return calls


def rest() -> None:
    """Let the GPU idle, so that the heat and power of one case do not slow the next."""
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)


class Graph:
    """`calls`, which enqueues `count` calls, captured in a CUDA graph."""

    def __init__(self, calls: Callable[[], None], count: int) -> None:
        self.count = count
        self.calls = calls  # what they read stays allocated
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            calls()
            self.stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                calls()

    def replay(self) -> None:
        """Enqueue the captured calls on the current stream."""
        self.graph.replay()

    def hold_back(self) -> None:
        """Enqueue nothing: a graph is on its way at once."""

    def rested(self, replays: int) -> dict[str, float]:
        """Warm up and time replays back to back. The GPU idles between them if they would last longer than
        FULL_CLOCK_SECONDS together, and afterwards for COOL_DOWN times as long as the timed replays.
        """
        with torch.cuda.stream(self.stream):
            spent, replay = self._warm_up()
            if spent + replays * replay > FULL_CLOCK_SECONDS:
                time.sleep(COOL_DOWN * WARMUP_REPLAYS * replay)
            samples = self._time(replays)
            time.sleep(COOL_DOWN * sum(samples) * self.count * 1e-6)
        return timing_of(samples)

    def without_rests(self, replays: int) -> dict[str, float]:
        """Warm up and time replays, all back to back."""
        with torch.cuda.stream(self.stream):
            self._warm_up()
            return timing_of(self._time(replays))

    def sustained(self, seconds: float) -> dict[str, float]:
        """Replay without a pause for `seconds`: `us` is the mean of a call over the second half. `watts`,
        `mhz` and `mj`, millijoules of a call, are of that half too, where power can be read.
        """
        with torch.cuda.stream(self.stream), meter(seconds / 2) as readings:
            _, replay = self._warm_up()
            allowed = max(2, round(QUEUED_SECONDS / replay))
            queued: deque[Any] = deque()
            middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            timed = 0  # replays of the second half
            begin = time.perf_counter()
            while timed == 0 or time.perf_counter() - begin < seconds:
                if timed == 0 and time.perf_counter() - begin >= seconds / 2:
                    middle.record()
                    timed = 1
                elif timed:
                    timed += 1
                self.replay()
                queued.append(torch.cuda.Event())
                queued[-1].record()
                if len(queued) > allowed:
                    queued.popleft().synchronize()
            end.record()
            end.synchronize()
        us = middle.elapsed_time(end) * 1e3 / (timed * self.count)
        if not readings:
            return {"us": us}
        watts, mhz = map(statistics.fmean, zip(*readings, strict=True))
        return {"us": us, "watts": watts, "mhz": mhz, "mj": watts * us / 1e3}

    def _warm_up(self) -> tuple[float, float]:
        """Replay at least WARMUP_REPLAYS times and WARMUP_SECONDS. The seconds of all and of one replay."""
        begin = time.perf_counter()
        done = 0
        while done < WARMUP_REPLAYS or time.perf_counter() - begin < WARMUP_SECONDS:
            self.replay()
            self.stream.synchronize()
            done += 1
        spent = time.perf_counter() - begin
        return spent, spent / done

    def _time(self, replays: int) -> list[float]:
        """Microseconds of a call in each of so many replays back to back."""
        samples = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.hold_back()
            start.record()
            self.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / self.count)
        return samples


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


def time_graph(calls: Callable[[], None], count: int, replays: int) -> dict[str, float]:
    """The rested time of a call of `calls`, which enqueues `count` of them."""
    return Graph(calls, count).rested(replays)


def slope(call: Callable[[int], Any], few: int, many: int, replays: int) -> float:
    """Microseconds of a short kernel: the slope between graphs of two lengths, free of their fixed cost."""
    short = time_graph(repeat(call, few), 1, replays)["us"]
    long = time_graph(repeat(call, many), 1, replays)["us"]
    return (long - short) / (many - few)
