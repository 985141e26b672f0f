"""The part of a run that is the step, and the step that is made of it."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tilefit.capture.inputs import batch_of
from tilefit.capture.program.distributed import per_machine, rank, ranks, split_modules, version
from tilefit.capture.program.habits import Habits
from tilefit.capture.program.invariants import check_step
from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.program.words import described
from tilefit.ops import Settings, Step
from tilefit.ops.program import Program


@dataclass(frozen=True, slots=True)
class _Call:
    """A forward pass.

    Attributes:
        number: Calls before it.
        module: Of which model.
        chunk: The micro-batch of a pipeline's stage.
        version: Of the model's parameters.
        line: Of the program's, that called it.
        inputs: By name.
    """

    number: int
    module: int
    chunk: int | None
    version: int
    line: str
    inputs: Any


class Window:
    """What is recorded from :meth:`begin` on.

    Args:
        modes: What the run is under.
    """

    def __init__(self, modes: ProgramModes) -> None:
        self._modes = modes
        self._call: _Call | None = None
        #: The micro-batch that a stage of a pipeline goes forward with.
        self._chunk: int | None = None
        #: Whether a gradient reached what that call returned.
        self._is_trained = False
        #: Of the forward passes that a backward pass followed, how many there were of each model with its
        #: parameters as they were at the first: passes on weights that have changed are over the same samples
        #: again, as of SAM or of a line search. Those that one backward pass follows are one, as of two views
        #: of the same samples; several may go forward before the first goes backward.
        self._passes: dict[int, dict[Any, int]] = {}
        self._placed: set[int] = set()
        self._numbers = count()
        self._habits = Habits(modes.sites.source_line, lambda: (modes.recorder.ops, modes.meetings.events))

    def watching(self) -> AbstractContextManager[None]:
        """Within the block, which is to be around the whole run, habits of the program are noticed."""
        return self._habits.watching()

    def begin(self) -> None:
        """The step begins here."""
        gc.collect()  # what only reference cycles hold is freed sooner or later, and is no part of a step
        self._modes.start()
        call = nn.Module.__call__
        sites = self._modes.sites

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (module.training and sites.is_outermost(module) and torch.is_grad_enabled()):
                return call(module, *args, **kwargs)
            inputs = None if self._is_trained else _named(module, args, kwargs)
            made = _Call(
                next(self._numbers), id(module), self._chunk, version(module), sites.source_line(), inputs
            )
            out = call(module, *args, **kwargs)
            _when_trained(out, partial(self._trained, made))
            self._call = self._call or made
            return out

        nn.Module.__call__ = called  # type: ignore[method-assign]
        stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None:
            self._follow(stages._PipelineStageBase)

    def _follow(self, stage: Any) -> None:
        """Notice which micro-batch goes through: several go forward before one goes backward."""
        forward = stage.forward_one_chunk

        def forward_one_chunk(self_: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            self._chunk = chunk
            try:
                return forward(self_, chunk, *args, **kwargs)
            finally:
                self._chunk = None

        stage.forward_one_chunk = forward_one_chunk

    def _trained(self, call: _Call) -> None:
        """A gradient reaches what a call returned: its samples are trained on, unlike those of an agent that
        only acts."""
        if call.number not in self._placed:
            self._placed.add(call.number)
            place = self._habits.backwards, call.chunk
            self._passes.setdefault(call.module, {}).setdefault(place, call.version)
        if not self._is_trained:
            self._call, self._is_trained = call, True

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
        inputs = self._call.inputs if self._call else None
        batch = batch_of(inputs, modes.recorder.ops)
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
        step = modes.step(settings, name, inputs, modes.unseen_notes)
        habits = self._habits.found()  # names events, too
        program = Program(
            command=command,
            step=described(step, stepped, passes, batch),
            steps=steps,
            events=tuple(modes.meetings.events),
            assumptions=modes.meetings.assumptions,
            habits=habits,
            model=self._call.line if self._call else "",
            exchanges=tuple(modes.meetings.exchanges),
            order=tuple(modes.meetings.order),
            host_work=tuple((+modes.meetings.host_work).items()),
            ranks=ranks(),
            rank=rank(),
            per_machine=per_machine(),
            split=tuple(dict.fromkeys(split_modules(modes.sites.roots))),
        )
        return replace(step, program=program, batch=batch * passes)


def _when_trained(out: Any, told: Callable[[], None]) -> None:
    """Have it told when a backward pass reaches what a model returned; at once where that is never known."""
    made: list[Any] = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if not made or torch._C._functorch.peek_interpreter_stack() is not None:
        told()
        return
    for leaf in made:
        if leaf.requires_grad:
            leaf.register_hook(lambda gradient: told())


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
