"""The functions of Python's users: a model, or a step, in; a report out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

from tilefit.cost.priced import resolve
from tilefit.errors import UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Step
from tilefit.options import (
    CheckKeywords,
    Selection,
    SelectionKeywords,
    StepOptions,
    TargetKeywords,
    TargetOptions,
    taken,
)
from tilefit.report import Comparison, Report
from tilefit.session.session import Session

if TYPE_CHECKING:
    import torch

    Model = torch.nn.Module | Callable[..., Any]

_Path = str | os.PathLike[str]
_Several = list[str | Gpu] | list[str] | list[Gpu] | tuple[str | Gpu, ...]


class _OfTarget(TargetKeywords, total=False):
    calibration: _Path | None


class _OfModel(CheckKeywords, total=False):
    calibration: _Path | None
    loss: Callable[[Any], torch.Tensor] | None
    name: str
    datamodule: Any


@overload
def check(model: str, *, gpu: str | Gpu | None = None, **keywords: Unpack[_OfTarget]) -> Report: ...
@overload
def check(model: str, *, gpu: _Several, **keywords: Unpack[_OfTarget]) -> Report | Comparison: ...
@overload
def check(
    model: Model, inputs: Any = None, *, gpu: str | Gpu | None = None, **keywords: Unpack[_OfModel]
) -> Report: ...
@overload
def check(
    model: Model, inputs: Any = None, *, gpu: _Several, **keywords: Unpack[_OfModel]
) -> Report | Comparison: ...
def check(
    model: Model | str,
    inputs: Any = None,
    *,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    calibration: _Path | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str = "",
    datamodule: Any = None,
    **keywords: Any,
) -> Report | Comparison:
    """Check a model: what a step executes, how long it takes on a GPU, and what is worth changing.

    No GPU is needed and nothing is computed: the step runs on shapes alone, on a copy of the model.

    Args:
        model: A module; or a callable that does a whole training step, whose ``inputs`` are its arguments;
            or a target as on the command line, such as ``"hf:gpt2"``, which brings its own inputs (keywords
            ``batch``, ``seq``, ``image_size``, ``input``); or a Trainer of transformers or a LightningModule,
            checked with their own optimizer, precision and first batch.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments. Only shapes
            and element types matter; ``meta`` tensors will do.
        gpu: The GPU, such as ``"h200"``; several are compared side by side; None is the GPU of this machine.
        calibration: A file that ``tilefit calibrate`` wrote, for the estimates on its GPU; None is the user's
            own of a GPU, else the one that ships.
        loss: Makes the loss of the model's output; without it the output's ``loss``, or its mean.
        name: What to call the model in the report.
        datamodule: Of a LightningModule: where its data come from.
        keywords: How the step runs (the fields of :class:`~tilefit.options.StepOptions`: ``train``, ``amp``,
            ``tf32``, ``optimizer``, ``fused_optimizer``, ``clip``, ``channels_last``, ``compile``,
            ``on_cpu``) and which findings are wanted (those of :class:`~tilefit.options.Selection`:
            ``select``, ``ignore``, ``min_gain``, ``per_module_ignores``).

    Returns:
        A :class:`~tilefit.report.Report`; with several GPUs a :class:`~tilefit.report.Comparison`.

    Raises:
        TilefitError: A name is not known, or the step cannot be captured; says what to do.
    """
    kind = TargetOptions if isinstance(model, str) else StepOptions
    options, selection = taken("check", keywords, kind, Selection)
    gpus = resolve(gpu, calibration)
    if isinstance(model, str):
        if inputs is not None or loss is not None or name:
            raise UsageError("a target that is named has its own inputs, loss and name", where=model)
        from tilefit.capture.child import capture_in_child

        return Session(partial(capture_in_child, model, options), gpus, selection).report
    from tilefit.capture import capture
    from tilefit.session.trainers import training_of

    training = training_of(model, inputs, datamodule)
    if training is None:
        captured = partial(capture, model, inputs, options=options, loss=loss, name=name)
    else:
        training.loss, training.name = loss or training.loss, name or training.name
        captured = partial(training.capture, options, keywords, gpus[0].name)
    return Session(captured, gpus, selection).report


def assess(
    step: Step,
    gpu: str | Gpu | Sequence[str | Gpu] | None = None,
    *,
    calibration: _Path | None = None,
    **keywords: Unpack[SelectionKeywords],
) -> Report | Comparison:
    """The report of a step that was captured before; arguments and result as of :func:`check`."""
    (selection,) = taken("assess", keywords, Selection)
    return Session(lambda: step, resolve(gpu, calibration), selection).report
