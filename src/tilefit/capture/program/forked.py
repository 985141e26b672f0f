"""A model's training step on the emulated GPU, in a copy of this process: the model here stays as it is."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tilefit import gpus
from tilefit.capture.optimizer import made_optimizer
from tilefit.capture.real import loss_of_forward, scaled_step
from tilefit.capture.results import read, written
from tilefit.capture.worker import write
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step
from tilefit.options import StepOptions

_POLL_S = 0.05
_RESULT = "step.json"


@dataclass
class Loop:
    """What a trainer does between two steps of its optimizer.

    Attributes:
        model: What runs forward.
        inputs: A micro-batch.
        name: What to call it.
        loss: Makes the loss of the output; None for the output's own.
        accumulates: Micro-batches of a step.
        clips: Largest norm of the gradients; 0 for none.
        notes: Added to the step's.
    """

    model: nn.Module
    inputs: Any
    name: str = ""
    loss: Callable[[Any], torch.Tensor] | None = None
    accumulates: int = 1
    clips: float = 0.0
    notes: list[str] = field(default_factory=list)


def can_fork() -> bool:
    """Whether a copy of this process can be made that has the emulated GPU, and none else."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def capture_forked(loop: Loop, options: StepOptions, gpu: str, timeout_s: float = 300.0) -> Step:
    """Run a trainer's loop on the emulated GPU in a fork of this process, and capture its second step.

    Args:
        loop: What is run.
        options: How it runs.
        gpu: Name of the GPU that it is told that it runs on.
        timeout_s: How long that may take.

    Raises:
        CaptureError: it failed, or took longer.
    """
    with tempfile.TemporaryDirectory(prefix="tilefit-", ignore_cleanup_errors=True) as folder:
        child = os.fork()
        if not child:
            _captured(partial(_step, loop, options, gpu), Path(folder))
        status = _ended(child, time.monotonic() + timeout_s)
        if status is None:
            raise CaptureError(f"the step did not finish within {timeout_s:.0f} s")
        if not (file := Path(folder) / _RESULT).exists():
            raise CaptureError(f"the process that ran the step ended with status {status}")
        result = read(file.read_text())
    if isinstance(result, TilefitError):
        raise result
    return result


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


def _captured(capture: Callable[[], Step], folder: Path) -> NoReturn:
    """The copy's side, which ends here."""
    result: Step | TilefitError
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            result = capture()
    except TilefitError as error:
        result = error
    except BaseException as error:  # noqa: BLE001 - told by the process that goes on
        result = CaptureError(f"the step raised {type(error).__name__}: {error}")
    finally:
        write(folder, _RESULT, written(result))
        os._exit(0)


def _step(loop: Loop, options: StepOptions, gpu: str) -> Step:
    from tilefit.capture.program.modes import ProgramModes
    from tilefit.capture.program.window import second

    torch.set_num_threads(1)  # the threads of a process are not in its copy
    modes = ProgramModes(gpus.get(gpu))
    with modes.running():
        modes.compiling.whole = options.compile
        model = loop.model.to("cuda").train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = made_optimizer(options.optimizer, parameters, fused=options.fused_optimizer)
        scaler: Any = torch.amp.GradScaler("cuda", enabled=options.amp == "fp16")
        # How batches get there is the loader's matter, and not seen.
        inputs = tree_map(lambda x: x.to("cuda") if isinstance(x, torch.Tensor) else x, loop.inputs)

        def optimize() -> None:
            """From one step of the optimizer to the next."""
            for _ in range(loop.accumulates):
                loss = loss_of_forward(model, inputs, options, loop.loss, "cuda")
                assert loss is not None  # of a training step
                scaler.scale(loss / loop.accumulates if loop.accumulates > 1 else loss).backward()
            scaled_step(optimizer, scaler, loop.clips or None)
            optimizer.zero_grad()

        step = second(modes, optimize, loop.name)
    return replace(step, notes=(*step.notes, *loop.notes))
