"""Power and SM clock of the current GPU while it works, through NVML (pip install nvidia-ml-py)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
