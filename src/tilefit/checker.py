"""The whole check: capture a step, price it on a GPU, find what to change, report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tilefit import rules
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.cost.priced import PricedGpu, resolve
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.report import Comparison, Report, build
from tilefit.report.build import batch_curve

if TYPE_CHECKING:
    import torch

#: Smallest gain worth a finding, as a share of the step.
MIN_GAIN = 0.005


def check(
    model: torch.nn.Module | Callable[..., Any],
    inputs: Any = None,
    *,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    train: bool = True,
    amp: str = "",
    tf32: bool | None = None,
    optimizer: str = "adamw",
    fused_optimizer: bool = False,
    channels_last: bool = False,
    compile: bool = False,
    on_cpu: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str = "",
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    min_gain: float = MIN_GAIN,
    per_module_ignores: Mapping[str, Sequence[str]] | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> Report | Comparison:
    """Check a model: what a step executes, how long it takes on a GPU, and what is worth changing.

    No GPU is needed and nothing is computed: the step runs on shapes alone, on a copy of the model.

    Args:
        model: A module; or a callable that does a whole training step, whose ``inputs`` are its arguments.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments. Only shapes
            and element types matter; ``meta`` tensors will do.
        gpu: The GPU, such as ``"h200"``; several are compared side by side; None is the GPU of this machine.
        train: Forward, loss, backward and optimizer; otherwise forward alone.
        amp: ``"bf16"`` or ``"fp16"`` autocast; empty for none.
        tf32: fp32 products may use TF32; None for PyTorch's defaults.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"none"``.
        fused_optimizer: The optimizer runs with ``fused=True``.
        channels_last: Model and images are in NHWC.
        compile: Price the step with the fusion of ``torch.compile``.
        on_cpu: Capture with real tensors, for code that depends on values. Use a small batch.
        loss: Makes the loss of the model's output; without it the output's ``loss``, or its mean.
        name: What to call the model in the report.
        select, ignore: Codes of rules or their beginnings: ``["ALN"]``, ``["ALN002"]``.
        min_gain: Smallest gain worth a finding, as a share of the step.
        per_module_ignores: Rules not to report, by pattern of module path: ``{"encoder.*": ["QNT"]}``.
        profile: A file that ``tilefit calibrate`` wrote, for the estimates on its GPU; None is the user's own
            calibration of a GPU, else the one that ships.

    Returns:
        A :class:`~tilefit.report.Report`; with several GPUs a :class:`~tilefit.report.Comparison`.

    Raises:
        TilefitError: A name is not known, or the step cannot be captured; says what to do.
    """
    devices = resolve(gpu, profile)
    from tilefit.capture import capture

    step = capture(
        model,
        inputs,
        train=train,
        amp=amp,
        tf32=tf32,
        optimizer=optimizer,
        fused_optimizer=fused_optimizer,
        channels_last=channels_last,
        compiled=compile,
        on_cpu=on_cpu,
        loss=loss,
        name=name,
    )
    return assess(
        step,
        devices,
        select=select,
        ignore=ignore,
        min_gain=min_gain,
        per_module_ignores=per_module_ignores,
    )


def assess(
    step: Step,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    min_gain: float = MIN_GAIN,
    per_module_ignores: Mapping[str, Sequence[str]] | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> Report | Comparison:
    """The report of a step that was captured before; arguments and result as of :func:`check`."""
    if step.settings.compiled:
        step = fuse(step)
    reports = [
        report_on(
            step,
            device,
            select=select,
            ignore=ignore,
            min_gain=min_gain,
            per_module_ignores=per_module_ignores,
        )
        for device in resolve(gpu, profile)
    ]
    return reports[0] if len(reports) == 1 else Comparison(tuple(reports))


def report_on(
    step: Step,
    gpu: PricedGpu,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    min_gain: float = MIN_GAIN,
    per_module_ignores: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """The report of exactly these operations: nothing is fused any more; arguments as of :func:`check`."""
    estimate = estimate_step(step, gpu)
    found = rules.find(
        step,
        gpu,
        estimate,
        select=select,
        ignore=ignore,
        min_gain=min_gain,
        per_module_ignores=per_module_ignores,
    )
    return build(
        step,
        gpu,
        estimate,
        [each.finding for each in found],
        gpu.calibration_title,
        batch_curve=batch_curve(step, gpu, estimate),
        environment=_versions(),
        safe_gain_s=rules.safe_gain_s(step, gpu, estimate, found),
    )


def _versions() -> dict[str, str]:
    """Of Python, of PyTorch, and of the libraries of models that are installed."""
    installed = {"Python": platform.python_version(), "torch": metadata.version("torch")}
    for name in ("torchvision", "timm", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
