"""Profiles the step of a target on this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tilefit.capture.child import capture_target
from tilefit.capture.copies import to_channels_last
from tilefit.capture.forward import call
from tilefit.capture.real import RealStep, tf32
from tilefit.capture.targets import load
from tilefit.cost.fusion import fuse
from tilefit.options import TargetOptions
from tilefit.profiling.session import PLAIN_STEPS, PROFILED_STEPS, SKIPPED_STEPS, Profile, require_gpu


def profile_target(
    target: str,
    options: TargetOptions,
    *,
    steps: int = PROFILED_STEPS,
    skip: int = SKIPPED_STEPS,
    plain: int = PLAIN_STEPS,
    device: str = "cuda",
    **judged: Any,
) -> Profile:
    """Run a target's step a few times and profile it; every kernel is joined to the captured step.

    Args:
        target, options: As of :func:`tilefit.capture.child.capture_target`; ``compile`` compiles the model
            with ``torch.compile``.
        steps, skip, plain: As of :class:`~tilefit.profiling.session.Profile`.
        device: Where to run; on the CPU only to see whether the step runs.
        judged: What it is judged by, as of ``Profile``: ``gpu``, ``calibration``, ``selection``.

    Raises:
        TilefitError: the target cannot be built or captured, or there is no GPU.
    """
    if device == "cuda":
        require_gpu()
    captured = capture_target(target, options)
    loaded = load(target, replace(options, on_cpu=True))
    if options.compile:
        captured = fuse(captured)
    profile = Profile(steps=steps, skip=skip, plain=plain, name=loaded.name, captured=captured, **judged)
    with tf32(options.tf32), profile:
        step = real_step(loaded.model, loaded.inputs, loaded.loss, options, device)
        for _ in range(skip + plain + steps):
            step()
            profile.step()
    return profile


def real_step(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    loss_of: Callable[[Any], torch.Tensor] | None,
    options: TargetOptions,
    device: str,
) -> Callable[[], None]:
    """The step that :func:`tilefit.capture.capture` captures, with real tensors on a device."""
    inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, inputs)
    if not isinstance(model, nn.Module):
        return partial(call, model, inputs)
    module = model.to(device).train(options.train)
    if options.channels_last:
        module, inputs = to_channels_last(module, inputs)
    return RealStep(module, inputs, loss_of, options, torch.device(device))
