"""A model's training step on the emulated GPU, in a copy of this process: the model here stays as it is."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tilefit import gpus
from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.capture.forward import call, loss_of_output
from tilefit.capture.optimizer import made_optimizer
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step
from tilefit.options import StepOptions

_POLL_S = 0.05


@dataclass(frozen=True)
class Loop:
    """What a trainer does between two steps of its optimizer.

    Attributes:
        model: What runs forward.
        inputs: A micro-batch.
        options: How it runs.
        loss: Makes the loss of the output; None for the output's own.
        name: What to call it.
        accumulates: Micro-batches of a step.
        clips: Largest norm of the gradients; 0 for none.
        notes: Added to the step's.
    """

    model: nn.Module
    inputs: Any
    options: StepOptions
    loss: Callable[[Any], torch.Tensor] | None = None
    name: str = ""
    accumulates: int = 1
    clips: float = 0.0
    notes: tuple[str, ...] = ()


def can_fork() -> bool:
    """Whether a copy of this process can be made that has the emulated GPU, and none else."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def capture_forked(loop: Loop, gpu: str, timeout_s: float = 300.0) -> Step:
    """Run a trainer's loop on the emulated GPU in a fork of this process, and capture its second step.

    Args:
        loop: What is run.
        gpu: Name of the GPU that it is told that it runs on.
        timeout_s: How long that may take.

    Raises:
        CaptureError: it failed, or took longer.
    """
    with tempfile.TemporaryDirectory(prefix="tilefit-", ignore_cleanup_errors=True) as folder:
        result = Path(folder) / "step.json"
        child = os.fork()
        if not child:
            _captured(loop, gpu, result)
        status = _ended(child, time.monotonic() + timeout_s)
        if status is None:
            raise CaptureError(f"the step did not finish within {timeout_s:.0f} s")
        if not result.exists():
            raise CaptureError(f"the process that ran the step ended with status {status}")
        text = result.read_text()
    if text.startswith('{"error"'):
        raise CaptureError(**{name: value for name, value in json.loads(text).items() if name != "error"})
    return Step.from_json(text)


def _ended(child: int, deadline: float) -> int | None:
    """How a process ended; None where it had to be ended."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _captured(loop: Loop, gpu: str, result: Path) -> NoReturn:
    """The copy's side, which ends here."""
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            text = _step(loop, gpu).to_json()
    except TilefitError as error:
        text = json.dumps({"error": "", "what": error.what, "where": error.where, "hint": error.hint})
    except BaseException as error:  # noqa: BLE001 - told by the process that goes on
        text = json.dumps({"error": "", "what": f"the step raised {type(error).__name__}: {error}"})
    finally:
        partial = result.with_suffix(".part")
        partial.write_text(text)
        partial.rename(result)
        os._exit(0)


def _step(loop: Loop, gpu: str) -> Step:
    from tilefit.capture.program.modes import ProgramModes
    from tilefit.capture.program.window import Window

    torch.set_num_threads(1)  # the threads of a process are not in its copy
    modes = ProgramModes(gpus.get(gpu))
    with modes.running():
        modes.compiling.whole = loop.options.compile
        model = loop.model.to("cuda").train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = made_optimizer(loop.options.optimizer, parameters)
        for group in optimizer.param_groups:
            group["fused"] = loop.options.fused_optimizer or None
        scaler = torch.amp.GradScaler("cuda", enabled=loop.options.amp == "fp16")
        # How batches get there is the loader's matter, and not seen.
        inputs = tree_map(lambda x: x.to("cuda") if isinstance(x, torch.Tensor) else x, loop.inputs)
        loop = replace(loop, inputs=inputs)
        window = Window(modes)
        with window.watching():
            _optimize(loop, model, optimizer, scaler)  # makes the optimizer's state
            window.begin()
            _optimize(loop, model, optimizer, scaler)
            with torch._C.DisableTorchFunction():
                step = window.step(loop.name, loop.name, [optimizer], 2)
    return replace(step, notes=(*step.notes, *loop.notes))


def _optimize(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """From one step of the optimizer to the next."""
    options = loop.options
    for _ in range(loop.accumulates):
        amp = torch.autocast("cuda", AMP_DTYPES[options.amp]) if options.autocast else nullcontext()
        with amp:
            loss, _note = loss_of_output(call(model, loop.inputs), loop.loss)
        scaler.scale(loss / loop.accumulates if loop.accumulates > 1 else loss).backward()
    if loop.clips:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], loop.clips)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
