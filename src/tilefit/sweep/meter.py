"""Whole steps of a target, measured on a GPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tilefit.capture.real import tf32
from tilefit.capture.targets import load
from tilefit.errors import TargetError
from tilefit.fixes.changes.run import Run
from tilefit.fixes.planning.measuring import RunningStep
from tilefit.options import TargetOptions
from tilefit.sweep.best import Trial

#: A trial takes so many turns of several steps each; the steps of a turn run back to back, as in training.
_TURNS = 5
_TURN_S = 0.1
_MOST_STEPS = 20


class Meter:
    """Runs the steps of one target on one device, with any batch.

    The model is built once, with random weights; inputs are random. Steps run back to back, as in training,
    with a learning rate of zero.

    Args:
        target: As of ``tilefit check``.
        options: The step; its batch is given later.
        device: Where to run.
        clock: Returns seconds.

    Raises:
        TargetError: the target is no module, but a function that does a whole step.
    """

    def __init__(
        self,
        target: str,
        options: TargetOptions,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._options = options
        self._device = device
        self._clock = clock
        loaded = load(target, self._options_at(1, real=True))
        if not isinstance(loaded.model, nn.Module):
            raise TargetError(
                f"{target} does a whole step itself, and its batch cannot be varied",
                hint="Give a function that returns the model, or (model, inputs).",
            )
        self._model = loaded.model.to(device)
        if options.channels_last:
            self._model = self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def __call__(self, batch: int) -> Trial | None:
        """Measure the step with a batch; None where the device's memory does not hold it."""
        try:
            with tf32(self._options.tf32):
                return self._measured(batch)
        except torch.OutOfMemoryError:
            return None
        finally:
            self._model.zero_grad()
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _measured(self, batch: int) -> Trial:
        options, cuda = self._options, self._device.type == "cuda"
        torch._dynamo.reset()  # each batch is compiled for itself, as a training run with it would be
        shapes = load(self._target, self._options_at(batch, real=False))
        self._require(batch, shapes.inputs)
        run = Run(
            self._model.train(options.train), tree_map(self._filled, shapes.inputs), options, loss=shapes.loss
        )
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        step = RunningStep(run)
        step.fill(_TURN_S, _MOST_STEPS, self._clock)
        times = [step.turn_s(self._clock) for _ in range(_TURNS)]
        cuts = statistics.quantiles(times, n=5, method="inclusive")
        memory = torch.cuda.max_memory_allocated(self._device) if cuda else 0
        return Trial(batch, statistics.median(times), cuts[0], cuts[-1], memory)

    def _options_at(self, batch: int, *, real: bool) -> TargetOptions:
        return replace(self._options, batch=batch, varied="batch", on_cpu=real)

    def _require(self, batch: int, inputs: Any) -> None:
        """Check that inputs which the target gives have that many samples, first or second in their shape.

        Raises:
            TargetError: they have not, and what would be measured is another batch than the one named.
        """
        first = next(
            (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()), None
        )
        if first is not None and batch not in first.shape[:2]:
            raise TargetError(
                f"the inputs of {self._target} are given, {list(first.shape)}: a batch of {batch} cannot be "
                "measured",
                hint="Give a function that returns the model alone, with --image-size or --seq; or leave out "
                "--measure.",
            )

    def _filled(self, leaf: Any) -> Any:
        """Random values of an input's shape: tokens that every vocabulary has."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return torch.randint(0, 2, leaf.shape, device=self._device).to(leaf.dtype)
        made = torch.randn(leaf.shape, device=self._device).to(leaf.dtype)
        if self._options.channels_last and leaf.dim() == 4:
            made = made.to(memory_format=torch.channels_last)
        return made
