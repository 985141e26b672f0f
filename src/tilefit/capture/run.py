"""Runs a model's step on shapes alone and returns what it executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tilefit.capture.copies import copied, on_device, to_channels_last
from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.capture.forward import call, loss_of_output
from tilefit.capture.modes import Modes
from tilefit.capture.optimizer import OPTIMIZERS, MakeOptimizer, made_optimizer
from tilefit.errors import UsageError
from tilefit.ops import Settings, Step


def capture(
    model: nn.Module | Callable[..., Any],
    inputs: Any = None,
    *,
    train: bool = True,
    amp: str = "",
    tf32: bool | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    fused_optimizer: bool = False,
    channels_last: bool = False,
    compiled: bool = False,
    on_cpu: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str = "",
    notes: Sequence[str] = (),
) -> Step:
    """Capture one training step (forward, loss, backward, optimizer) or one inference call.

    Nothing is computed and no weight is allocated: the step runs on ``meta`` tensors, on a copy of the
    model, as CUDA would run it. The model passed in is not changed.

    Args:
        model: A module; or a callable that does a whole step itself, whose ``inputs`` are its arguments.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments. Only shapes
            and element types matter (with ``on_cpu``, the values too).
        train: Include loss, backward and optimizer. A step callable does as it does: it is refused what
            would say otherwise of these, of ``amp`` and of ``channels_last``.
        amp: ``"bf16"``, ``"fp16"`` (with the gradient scaler's work) or empty.
        tf32: Let fp32 products use TF32; None means PyTorch's defaults: convolutions yes, matrix products no.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"none"``; or what makes one of a list of parameters.
        fused_optimizer: As with ``fused=True``.
        channels_last: Convert the model and 4-dimensional inputs to NHWC.
        compiled: Say in the settings that fusion is to be modelled (the cost model does it), and tell a model
            that asks whether it is being compiled that it is: some then take other paths.
        on_cpu: Run with real tensors on the CPU, for code that depends on values.
        loss: Makes the loss of the model's output. Without it: the output's ``loss``; else the mean of
            the output, with a note.
        name: What to call the model.
        notes: Added to the step's notes.

    Raises:
        CaptureError: The step needs what shapes cannot give, or the model itself fails; names the line.
        UsageError: An option is not understood, or has no effect.
    """
    _refuse_model(model, train)
    if amp not in ("", *AMP_DTYPES):
        raise UsageError(f"unknown autocast type {amp!r}", hint="Use bf16 or fp16.")
    if isinstance(optimizer, str) and optimizer not in ("none", "", *OPTIMIZERS):
        raise UsageError(
            f"unknown optimizer {optimizer!r}", hint=f"Use one of: {', '.join(OPTIMIZERS)}, none."
        )
    device = "cpu" if on_cpu else "meta"
    is_module = isinstance(model, nn.Module)
    function = "" if is_module else getattr(model, "__name__", type(model).__name__)
    if function:
        _refuse_settings(
            {
                f"--amp {amp}": bool(amp),
                f"--optimizer {optimizer}": optimizer != "adamw",
                "--fused-optimizer": fused_optimizer,
                "--channels-last": channels_last,
            },
            function,
        )
    inputs = on_device(inputs, device)
    is_compiled = isinstance(model, nn.Module) and _is_compiled(model)  # a copy is not
    if isinstance(model, nn.Module):
        model = copied(model, device)
        model.train(train)
        if channels_last:
            model, inputs = to_channels_last(model, inputs)
    modes = Modes(device, tf32, is_module)
    with modes.running():
        modes.hold(inputs)
        if isinstance(model, nn.Module):
            modes.sites.name_modules(model)
            stepped = _optimizer(model, optimizer, fused_optimizer) if train else None
            _step(modes, model, inputs, train, amp, stepped, compiled, loss)
        else:
            call(model, inputs)
            modes.check_something_ran()
    if not compiled and (is_compiled or any(_is_compiled(root) for _, root in modes.sites.roots)):
        notes = (
            *notes,
            "The model was compiled, and is looked at as it runs eagerly: add --compile (compile=True).",
        )
    trained = train if is_module else any(op.phase != "forward" for op in modes.recorder.ops)
    _refuse_settings({"--infer (train=False)": trained and not train}, function)
    settings = Settings(
        training=trained,
        amp=amp or modes.amp_seen,
        tf32=modes.recorder.tf32_matmul,
        optimizer=modes.steps.name,
        fused_optimizer=modes.steps.fused,
        channels_last=channels_last or modes.channels_last_seen,
        compiled=compiled,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        split=modes.split,
        recompiled=modes.recompiled,
    )
    return modes.step(settings, name or function or type(model).__name__, inputs, notes)


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


def _optimizer(model: nn.Module, make: str | MakeOptimizer, fused: bool) -> torch.optim.Optimizer | None:
    """What steps the model's parameters; None where there are none, or nothing is to."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if make in ("none", "") or not trainable:
        return None
    optimizer = made_optimizer(make, trainable)
    for group in optimizer.param_groups:
        group["fused"] = fused or None
    return optimizer


def _step(
    modes: Modes,
    model: nn.Module,
    inputs: Any,
    train: bool,
    amp: str,
    optimizer: torch.optim.Optimizer | None,
    compiled: bool,
    loss_of: Callable[[Any], torch.Tensor] | None,
) -> None:
    # Not inference mode: in it a dispatch mode sees ``conv2d`` and its like before they are taken apart.
    grad = torch.enable_grad() if train else torch.no_grad()
    autocast = torch.autocast("cuda", dtype=AMP_DTYPES[amp]) if amp else ExitStack()
    # The flag behind torch.compiler.is_compiling(), which libraries import by name.
    compiling = patch.object(torch.compiler, "_is_compiling_flag", True) if compiled else ExitStack()
    with grad:
        with autocast:
            before = modes.semantic.values_read
            with compiling:
                output = call(model, inputs)
            modes.note_graph_breaks(modes.semantic.values_read - before if compiled else 0)
            if not train:
                return
            loss, note = loss_of_output(output, loss_of)
            modes.notes += [note] if note else []
        del output
        if amp == "fp16":
            loss = loss * 65536.0  # what GradScaler.scale does
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    if optimizer is not None:
        if amp == "fp16":
            modes.steps.unscale(optimizer)
        optimizer.step()
