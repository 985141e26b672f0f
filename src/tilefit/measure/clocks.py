"""SM clock, power, temperature and throttling, through NVML where it is installed (the ``gpu`` extra)."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ClockSample:
    """A reading of the card at one time.

    Attributes:
        at_ns: Time since the epoch.
        sm_mhz: SM clock.
        power_w: Power drawn by the board.
        temperature_c: Of the GPU.
        throttle_reasons: NVML's bit mask of the reasons why the clock is below its maximum.
    """

    at_ns: int
    sm_mhz: int
    power_w: float
    temperature_c: int
    throttle_reasons: int


#: Bits of ``throttle_reasons`` that slow a computation (NVML's ``nvmlClocksThrottleReason*`` constants).
THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def _nvml(index: int) -> tuple[Any, Any] | None:
    """The module and a handle; None where there is no NVML or no such GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:
        return None


def _sample(pynvml: Any, handle: Any) -> ClockSample:
    return ClockSample(
        time.time_ns(),
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )


def read_clocks(index: int = 0) -> ClockSample | None:
    """One reading; None where NVML or the GPU is missing."""
    found = _nvml(index)
    return _sample(*found) if found else None


def driver_version() -> str:
    """The display driver's version; empty where NVML is missing."""
    found = _nvml(0)
    return str(found[0].nvmlSystemGetDriverVersion()) if found else ""


@dataclass
class ClockLog:
    """Readings taken by a thread while a measurement runs; stays empty where NVML is missing."""

    index: int = 0
    period_s: float = 0.05
    samples: list[ClockSample] = field(default_factory=list)

    def start(self) -> None:
        """Take readings until the process ends."""
        found = _nvml(self.index)
        if found is None:
            return
        pynvml, handle = found

        def run() -> None:
            while True:
                self.samples.append(_sample(pynvml, handle))
                time.sleep(self.period_s)

        threading.Thread(target=run, daemon=True).start()

    def sm_mhz(self, at_ns: int) -> int | None:
        """The SM clock at a time since the epoch; None without readings."""
        samples = self.samples
        if not samples:
            return None
        index = bisect_left(samples, at_ns, key=lambda sample: sample.at_ns)
        return samples[min(index, len(samples) - 1)].sm_mhz
