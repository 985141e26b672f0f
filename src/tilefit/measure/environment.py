"""What a measurement depends on besides the operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        torch.cuda.get_device_properties(device).name,
        driver_version(),
        torch.__version__,
        torch.version.cuda or "",
        str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    )
