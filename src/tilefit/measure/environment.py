"""What a measurement depends on besides the operation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilefit import gpus
from tilefit.errors import UsageError
from tilefit.measure.clocks import driver_version

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Environment:
    """The GPU and the software a measurement was made with; ``cpu`` and empty texts without a GPU."""

    gpu: str
    driver: str
    torch: str
    cuda: str
    cudnn: str


def current(device: torch.device) -> Environment:
    """The environment of measurements on a device."""
    import torch

    if device.type != "cuda":
        return Environment("cpu", "", torch.__version__, "", "")
    return Environment(
        _name(torch.cuda.get_device_properties(device)),
        driver_version(),
        torch.__version__,
        torch.version.cuda or "",
        str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    )


def now() -> str:
    """The time, UTC, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _name(properties: Any) -> str:
    """What the driver calls the GPU, or its title where that is another product's name, too."""
    name = str(properties.name)
    try:
        usual = gpus.get(name)
    except UsageError:
        return name
    found = gpus.of_device(name, properties.total_memory)
    return name if found is usual else found.title
