"""Power and SM clock of the current GPU while it works."""

import functools
import importlib.util
import statistics
import subprocess
import threading
from types import TracebackType
from typing import Any

SECONDS_BETWEEN = 0.02
SMI_TIMEOUT_SECONDS = 10


@functools.cache
def _nvml_device(pci_bus_id: str) -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)


def read_nvml() -> tuple[float, float]:
    """Watts at this moment and MHz, through NVML (pip install nvidia-ml-py). Power that NVML gives without a
    field is a mean over the last second, in which the GPU may have idled.
    """
    import cupy
    import pynvml

    device = _nvml_device(cupy.cuda.Device().pci_bus_id)
    (power,) = pynvml.nvmlDeviceGetFieldValues(device, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if power.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(power.nvmlReturn)
    return power.value.uiVal / 1e3, float(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))


def read_smi() -> tuple[float, float] | None:
    """Watts and MHz from one run of nvidia-smi; None where it does not answer with both."""
    import cupy

    command = [
        "nvidia-smi",
        f"--id={cupy.cuda.Device().pci_bus_id}",
        "--query-gpu=power.draw.instant,clocks.sm",
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
    fifty times a second through NVML, or once by nvidia-smi where Python has no NVML or NVML does not answer.
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
