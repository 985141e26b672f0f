"""SM clock, power, temperature and throttling, through NVML where it is installed (the ``gpu`` extra)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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


def nvml(device: torch.device | None = None) -> tuple[Any, Any] | None:
    """NVML's module and the handle of a GPU, by default the machine's first one; None where there is no NVML
    or no such GPU. CUDA's numbers are not NVML's: the place on the bus tells a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        if device is None:
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        import torch

        at: Any = torch.cuda.get_device_properties(device)
        place = f"{at.pci_domain_id:08x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(place)
    except pynvml.NVMLError:
        return None


def sample(pynvml: Any, handle: Any) -> ClockSample:
    """A reading through the module and a handle."""
    return ClockSample(
        time.time_ns(),
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )


def read_clocks(device: torch.device | None = None) -> ClockSample | None:
    """One reading; None where NVML or the GPU is missing."""
    found = nvml(device)
    return sample(*found) if found else None


def driver_version() -> str:
    """The display driver's version; empty where NVML is missing."""
    found = nvml()
    return str(found[0].nvmlSystemGetDriverVersion()) if found else ""
