"""Power and SM clock of the current GPU while it works, through NVML (pip install nvidia-ml-py)."""

import statistics
import threading
from typing import Any

SECONDS_BETWEEN = 0.02


def read_nvml() -> tuple[float, float]:
    """Watts at this moment and MHz. Power that NVML gives without a field is a mean over the last second, in
    which the GPU may have idled.
    """
    import cupy
    import pynvml

    pynvml.nvmlInit()  # which counts its calls after the first
    device = pynvml.nvmlDeviceGetHandleByPciBusId(cupy.cuda.Device().pci_bus_id)
    (power,) = pynvml.nvmlDeviceGetFieldValues(device, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if power.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(power.nvmlReturn)
    return power.value.uiVal / 1e3, float(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))


class Meter:
    """Reads power and clock fifty times a second in a thread of its own, from `delay` seconds after its start
    until it is stopped. A reading that ends after the stop is dropped: the GPU may have idled during it.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._stop = threading.Event()
        self._readings: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Meter":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        wait = self._delay
        while not self._stop.wait(wait):
            try:
                reading = read_nvml()
            except Exception:  # no pynvml, or NVML's errors, which are its own types
                return
            if not self._stop.is_set():
                self._readings.append(reading)
            wait = SECONDS_BETWEEN

    def figures(self) -> dict[str, float]:
        """`watts` and `mhz`, the means of what was read; nothing where nothing could be read."""
        if not self._readings:
            return {}
        watts, mhz = zip(*self._readings, strict=True)
        return {"watts": statistics.fmean(watts), "mhz": statistics.fmean(mhz)}
