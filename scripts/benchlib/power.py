"""Power and SM clock of the current GPU while it works."""

import importlib.util
import statistics
import subprocess
import threading
from types import TracebackType

SECONDS_BETWEEN = 0.1
SMI_TIMEOUT_SECONDS = 10


def read_nvml() -> tuple[float, float]:
    """Watts and MHz, through torch and NVML (pip install nvidia-ml-py)."""
    import torch

    return torch.cuda.power_draw() / 1e3, float(torch.cuda.clock_rate())


def read_smi() -> tuple[float, float] | None:
    """Watts and MHz from one run of nvidia-smi; None where it does not answer with both."""
    import cupy

    command = [
        "nvidia-smi",
        f"--id={cupy.cuda.Device().pci_bus_id}",
        "--query-gpu=power.draw,clocks.sm",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SMI_TIMEOUT_SECONDS
        )
        watts, mhz = answer.stdout.split(",")
        return float(watts), float(mhz)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


class Meter:
    """Reads power and clock in a thread of its own, from `delay` seconds after its start until it is stopped:
    ten times a second through NVML, or once by nvidia-smi where Python has no NVML or NVML does not answer.
    A reading that ends after the stop is dropped: the GPU may have idled during it.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._nvml = importlib.util.find_spec("pynvml") is not None
        self._stop = threading.Event()
        self._readings: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(SMI_TIMEOUT_SECONDS)

    def _run(self) -> None:
        if self._stop.wait(self._delay):
            return
        while self._nvml:
            try:
                self._keep(read_nvml())
            except Exception:  # NVML's errors are its own types
                break
            if self._stop.wait(SECONDS_BETWEEN):
                return
        if not self._readings and not self._stop.is_set():
            self._keep(read_smi())

    def _keep(self, reading: tuple[float, float] | None) -> None:
        if reading is not None and not self._stop.is_set():
            self._readings.append(reading)

    def figures(self) -> dict[str, float]:
        """`watts` and `mhz`, the means of what was read; nothing where nothing could be read."""
        if not self._readings:
            return {}
        watts, mhz = zip(*self._readings, strict=True)
        return {"watts": statistics.fmean(watts), "mhz": statistics.fmean(mhz)}
