"""This machine's GPU, for the commands that measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tilefit.errors import UsageError

if TYPE_CHECKING:
    import torch

    from tilefit.cost.priced import PricedGpu
    from tilefit.measure import timer
    from tilefit.measure.environment import Environment


class LocalGpu(NamedTuple):
    """Where measurements run: the timer's device, PyTorch's, and what they are stored with."""

    device: timer.Device
    place: torch.device
    environment: Environment


def local_gpu() -> LocalGpu:
    """The first CUDA GPU of this machine.

    Raises:
        TilefitError: there is none.
    """
    import torch

    from tilefit.measure import timer
    from tilefit.measure.environment import current

    device, place = timer.CudaDevice(), torch.device("cuda", 0)
    return LocalGpu(device, place, current(place))


def predicted_gpu(name: str | None, local: LocalGpu | None, calibration: Path | None = None) -> PricedGpu:
    """The GPU that times are predicted for: the one named, which has to be the one that is measured, if any.

    Raises:
        UsageError: the name is unknown, or another GPU is measured.
    """
    from tilefit import gpus
    from tilefit.cost.priced import resolve

    (gpu,) = resolve(name or (local.environment.gpu if local else None), calibration)
    if local and gpus.get(local.environment.gpu).name != gpu.name:
        raise UsageError(
            f"--measure measures this machine's GPU, {local.environment.gpu}, not {gpu.title}",
            hint="Leave out --gpu, or --measure.",
        )
    return gpu
