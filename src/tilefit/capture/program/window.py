"""The part of a run that is the step, and the step that is made of it."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilefit.capture.inputs import batch_of
from tilefit.capture.program.distributed import per_machine, ranks
from tilefit.capture.program.habits import Habits
from tilefit.capture.program.invariants import check_step
from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.program.words import described
from tilefit.ops import Settings, Step
from tilefit.ops.program import Program


class Window:
    """What is recorded from :meth:`begin` on.

    Args:
        modes: What the run is under.
    """

    def __init__(self, modes: ProgramModes) -> None:
        self._modes = modes
        self._inputs: Any = None
        self._called_at = ""
        #: Of the forward passes that a backward pass followed, how many there were of each model with its
        #: parameters as they were at the first: passes on weights that have changed are over the same samples
        #: again, as of SAM or of a line search.
        self._passes: dict[int, dict[int, int]] = {}
        self._habits = Habits(modes.sites.source_line, lambda: (modes.recorder.ops, modes.meetings.events))

    def watching(self) -> AbstractContextManager[None]:
        """Within the block, which is to be around the whole run, habits of the program are noticed."""
        return self._habits.watching()

    def begin(self) -> None:
        """The step begins here."""
        self._modes.start()
        call = nn.Module.__call__
        sites = self._modes.sites

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module.training and sites.is_outermost(module) and torch.is_grad_enabled():
                self._passes.setdefault(id(module), {}).setdefault(self._habits.backwards, _version(module))
                if self._inputs is None:
                    self._called_at = sites.source_line()
                    self._inputs = _named(module, args, kwargs)
            return call(module, *args, **kwargs)

        nn.Module.__call__ = called  # type: ignore[method-assign]

    def step(self, name: str, command: str, stepped: list[torch.optim.Optimizer], steps: int) -> Step:
        """The step, which ends here.

        Args:
            name: What to call it.
            command: As the program was started.
            stepped: The optimizers that stepped in it.
            steps: How many of theirs were run.

        Raises:
            CaptureError: a part of it was not seen.
        """
        modes = self._modes
        modes.recorder.muted = True
        check_step(modes, stepped)
        batch = batch_of(self._inputs, modes.recorder.ops)
        passes = max(map(_on_first_weights, self._passes.values()), default=1) if len(stepped) <= 1 else 1
        modes.count_optimizer_state()
        settings = Settings(
            training=any(entry.phase != "forward" for entry in modes.recorder.ops),
            amp=modes.amp_seen,
            tf32=modes.recorder.tf32_matmul,
            optimizer=modes.steps.name,
            fused_optimizer=modes.steps.fused,
            channels_last=modes.channels_last_seen,
            compiled=modes.compiling.share >= 0.5,
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cuda_graph=modes.meetings.graphs,
        )
        step = modes.step(settings, name, self._inputs, modes.unseen_notes)
        habits = self._habits.found()  # names events, too
        program = Program(
            command=command,
            step=described(step, stepped, passes, batch),
            steps=steps,
            events=tuple(modes.meetings.events),
            assumptions=modes.meetings.assumptions,
            habits=habits,
            model=self._called_at,
            exchanges=tuple(modes.meetings.exchanges),
            order=tuple(modes.meetings.order),
            host_work=tuple((+modes.meetings.host_work).items()),
            ranks=ranks(),
            per_machine=per_machine(),
        )
        return replace(step, program=program, batch=batch * passes)


def _version(module: nn.Module) -> int:
    """Changes when an optimizer, or what goes a step to and fro, writes to a model's parameters."""
    return next((p._version for p in module.parameters() if p.requires_grad), 0)


def _on_first_weights(versions: dict[int, int]) -> int:
    first = next(iter(versions.values()))
    return sum(version == first for version in versions.values())


def _named(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A model's inputs by the names of its arguments."""
    if isinstance(module.__dict__.get("_modules", {}).get("module"), nn.Module):
        module = module.module  # type: ignore[assignment]  # what a replica wraps
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return kwargs or args
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        flat.update(value if isinstance(value, dict) and name not in ("args",) else {name: value})
    return flat
