"""Runs a model's step on shapes alone and returns what it executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Unpack
from unittest.mock import patch

import torch
from torch import nn

from tilefit.capture.copies import copied, on_device, to_channels_last
from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.capture.forward import call, loss_of_output, without_gradient
from tilefit.capture.modes import Modes
from tilefit.capture.optimizer import made_optimizer
from tilefit.capture.sites import called, made_at
from tilefit.errors import UsageError
from tilefit.ops import Step
from tilefit.options import StepKeywords, StepOptions

_NOTHING = "The step does nothing on the GPU: its model or its inputs are empty, or it only makes views."
_EAGER = "The model was compiled, and is looked at as it runs eagerly: add --compile (compile=True)."


def capture(
    model: nn.Module | Callable[..., Any],
    inputs: Any = None,
    *,
    options: StepOptions | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str = "",
    notes: Sequence[str] = (),
    **keywords: Unpack[StepKeywords],
) -> Step:
    """Capture one training step (forward, loss, backward, optimizer) or one inference call.

    Nothing is computed and no weight is allocated: the step runs on ``meta`` tensors, on a copy of the
    model, as CUDA would run it. The model passed in is not changed.

    Args:
        model: A module; or a callable that does a whole step itself, whose ``inputs`` are its arguments. Such
            a one does as it does: it is refused what would say otherwise of training, of the optimizer, of
            ``amp`` and of ``channels_last``.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments. Only shapes
            and element types matter (with ``on_cpu``, the values too).
        options: How the step runs. With ``compile`` the settings say that fusion is to be modelled (the cost
            model does it), and a model that asks whether it is being compiled is told that it is: some then
            take other paths.
        loss: Makes the loss of the model's output. Without it: the output's ``loss``; else the mean of
            the output, with a note.
        name: What to call the model.
        notes: Added to the step's notes.
        keywords: Fields of the options, by name.

    Raises:
        CaptureError: The step needs what shapes cannot give, or the model itself fails; names the line.
        UsageError: An option is not understood, or has no effect.
    """
    options = replace(options or StepOptions(), **keywords)
    _refuse_model(model, options.train)
    device = options.device
    is_module = isinstance(model, nn.Module)
    function = "" if is_module else getattr(model, "__name__", type(model).__name__)
    if function:
        _refuse_settings(
            {
                f"--amp {options.amp}": bool(options.autocast),
                f"--optimizer {options.optimizer}": options.optimizer != "adamw",
                "--fused-optimizer": options.fused_optimizer,
                f"--clip {options.clip}": options.clip is not None,
                "--channels-last": options.channels_last,
            },
            function,
        )
    inputs = on_device(inputs, device)
    is_compiled = isinstance(model, nn.Module) and _is_compiled(model)  # a copy is not
    if isinstance(model, nn.Module):
        model = copied(model, device)
        model.train(options.train)
        if options.channels_last:
            model, inputs = to_channels_last(model, inputs)
    modes = Modes(device, options.tf32, is_module)
    with modes.running():
        modes.hold(inputs)
        if isinstance(model, nn.Module):
            modes.sites.name_modules(model)
            _step(modes, model, inputs, options, loss)
        else:
            modes.returning(call(model, inputs))
            modes.check_something_ran()
    is_compiled = is_compiled or any(_is_compiled(root) for _, root in modes.sites.roots)
    said = {_EAGER: is_compiled and not options.compile, _NOTHING: not modes.recorder.ops}
    notes = (*notes, *(note for note, is_true in said.items() if is_true))
    trained = options.train if is_module else modes.trains
    _refuse_settings({"--infer (train=False)": trained and not options.train}, function)
    settings = modes.settings(
        training=trained,
        amp=options.autocast or modes.amp_seen,
        channels_last=options.channels_last or modes.channels_last_seen,
        compiled=options.compile,
    )
    step = modes.step(settings, name or function or type(model).__name__, inputs, notes)
    made = map(made_at, modes.steps.known) if function else ()
    models = (called(module, place, modes.steps.known) for module, place in modes.sites.calls)
    program = replace(step.program, optimizers=tuple(made), models=tuple(models))
    return replace(step, program=program)


def _refuse_model(model: Any, train: bool) -> None:
    """Refuse what cannot be captured.

    Raises:
        UsageError: it is no model, or one that was turned into something else.
    """
    if not callable(model):
        raise UsageError(
            f"the model is of type {type(model).__name__}, which cannot be called",
            hint="Give a torch.nn.Module, or a function that runs one step.",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel, whose communication shapes alone cannot do",
            hint="Give what it wraps, model.module.",
        )
    if train and isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model was scripted or traced, and its training step cannot be followed",
            hint="Give the model as it was before, or look at inference: --infer (train=False).",
        )


def _is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` made the model or a part of it, or compiled it in place."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())


def _refuse_settings(given: Mapping[str, bool], name: str) -> None:
    """Refuse settings of a model's step for a function, which makes its own.

    Raises:
        UsageError: one was given.
    """
    for setting in (setting for setting, is_given in given.items() if is_given):
        raise UsageError(
            f"{setting} has no effect: {name} is a function that does the whole step itself",
            hint="Leave it out, and say it in the function; or give a factory that returns (model, inputs).",
        )


def _optimizer(model: nn.Module, options: StepOptions) -> torch.optim.Optimizer | None:
    """What steps the model's parameters; None where there are none, or nothing is to."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not options.train or options.optimizer == "none" or not trainable:
        return None
    return made_optimizer(options.optimizer, trainable, fused=options.fused_optimizer)


def _step(
    modes: Modes,
    model: nn.Module,
    inputs: Any,
    options: StepOptions,
    loss_of: Callable[[Any], torch.Tensor] | None,
) -> None:
    optimizer = _optimizer(model, options)
    # Not inference mode: in it a dispatch mode sees ``conv2d`` and its like before they are taken apart.
    grad = torch.enable_grad() if options.train else torch.no_grad()
    autocast = torch.autocast("cuda", dtype=AMP_DTYPES[options.amp]) if options.autocast else ExitStack()
    # The flag behind torch.compiler.is_compiling(), which libraries import by name.
    compiling = patch.object(torch.compiler, "_is_compiling_flag", True) if options.compile else ExitStack()
    with grad:
        with autocast:
            before = modes.semantic.values_read
            with compiling:
                output = modes.returning(call(model, inputs))
            modes.note_graph_breaks(modes.semantic.values_read - before if options.compile else 0)
            if not options.train:
                return
            loss, note = loss_of_output(output, loss_of)
            modes.notes += [note] if note else []
            modes.without_gradient = without_gradient(output, loss)
        del output
        if options.amp == "fp16":
            loss = loss * 65536.0  # what GradScaler.scale does
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    if optimizer is not None:
        if options.amp == "fp16":
            modes.steps.unscale(optimizer)
        if options.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
