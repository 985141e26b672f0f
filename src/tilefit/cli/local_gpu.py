"""This machine's GPU, for the commands that measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tilefit import gpus
from tilefit.errors import TilefitError, UsageError

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


def local_gpus() -> tuple[str, int, str]:
    """The name of this machine's CUDA GPUs, how many there are, and PyTorch's kind of device.

    Raises:
        TilefitError: there is none, or one, or they are not alike.
    """
    import torch

    first = local_gpu().environment.gpu
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if len(names) < 2:
        raise TilefitError(
            f"collectives need two GPUs or more, and this machine has one: {first}",
            hint="Run it where several GPUs of one machine are visible.",
        )
    if len(set(names)) > 1:
        raise TilefitError(
            f"this machine's GPUs are not alike: {', '.join(dict.fromkeys(names))}",
            hint="Choose those to measure: CUDA_VISIBLE_DEVICES=0,1.",
        )
    return first, len(names), "cuda"


def devices(name: str | None, measure: bool, calibration: Path | None) -> tuple[PricedGpu, LocalGpu | None]:
    """The GPU that times are predicted for, and the one of this machine where they are measured too.

    Raises:
        TilefitError: as of :func:`predicted_gpu`; or there is none to measure.
    """
    local = local_gpu() if measure else None
    return predicted_gpu(name, local, calibration), local


def predicted_gpu(name: str | None, local: LocalGpu | None, calibration: Path | None) -> PricedGpu:
    """The GPU that times are predicted for: the one named, which has to be the one that is measured, if any.

    Raises:
        UsageError: the name is unknown, or another GPU is measured.
    """
    from tilefit.cost.priced import resolve

    (gpu,) = resolve(name or (local.environment.gpu if local else None), calibration)
    if local and gpus.get(local.environment.gpu).name != gpu.name:
        raise UsageError(
            f"--measure measures this machine's GPU, {local.environment.gpu}, not {gpu.title}",
            hint="Leave out --gpu, or --measure.",
        )
    return gpu
