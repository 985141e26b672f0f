"""The part of a run that is the step, and the step that is made of it."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tilefit.capture.inputs import batch_of
from tilefit.capture.program.distributed import per_machine, rank, ranks, split_modules, version
from tilefit.capture.program.events import Captured
from tilefit.capture.program.habits import Habits
from tilefit.capture.program.invariants import check_step
from tilefit.capture.program.late import changed
from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.program.repeats import Repeats
from tilefit.capture.program.words import described
from tilefit.capture.sites import called, made_at
from tilefit.capture.trees import tensors, untransformed
from tilefit.cost.uncompiled import COMPILED_SHARE
from tilefit.emulation.tensor import CudaTensor
from tilefit.emulation.torch_cuda import refuse_script
from tilefit.ops import Called, Habit, Site, Step
from tilefit.ops.program import WAIT, Program


@dataclass(frozen=True, slots=True)
class _Call:
    """A forward pass.

    Attributes:
        number: Calls before it.
        module: Of which model.
        chunk: The micro-batch of a pipeline's stage.
        version: Of the model's parameters.
        place: Where it is written in the program (:meth:`~tilefit.capture.sites.SiteTracker.source_call`).
        learns: The model has parameters that may be trained: a loss may have buffers alone.
        method: Of a module that it is a part of, which calls it instead of being called itself.
        inputs: By name.
    """

    number: int
    module: int
    chunk: int | None
    version: int
    place: str
    learns: bool
    method: str
    inputs: Any


class Window:
    """What is recorded from :meth:`begin` on.

    Args:
        modes: What the run is under.
    """

    def __init__(self, modes: ProgramModes) -> None:
        self._modes = modes
        #: The first call of all, and the one that is trained on.
        self._first: _Call | None = None
        self._call: _Call | None = None
        #: The models of the step, each with its first call.
        self._models: dict[int, tuple[nn.Module, str]] = {}
        #: The operations of each call of a model.
        self._within: list[range] = []
        #: The micro-batch that a stage of a pipeline goes forward with.
        self._chunk: int | None = None
        #: Whether a gradient reached what that call, of a model that learns, returned; what any call did.
        self._is_trained = self._reached = False
        #: Of the forward passes that a backward pass followed, how many there were of each model with its
        #: parameters as they were at the first: passes on weights that have changed are over the same samples
        #: again, as of SAM or of a line search. Those that one backward pass follows are one, as of two views
        #: of the same samples; several may go forward before the first goes backward.
        self._passes: dict[int, dict[Any, int]] = {}
        self._placed: set[int] = set()
        self._numbers = count()
        #: What was called in the step, by class.
        self._called: Counter[str] = Counter()
        #: Inputs of the last call that are beams of one sample.
        self._beams = 1
        self._habits = Habits(modes.sites.source_line, lambda: (modes.recorder.ops, modes.meetings.events))

    @contextmanager
    def watching(self, told: Callable[[object], None] = lambda model: None) -> Iterator[None]:
        """Within the block, which is to be around the whole run, habits of the program and its calls of
        models are noticed; ``told`` gets each model, or CUDA graph, that is about to run."""
        window, call, modes, sites = self, nn.Module.__call__, self._modes, self._modes.sites
        repeats = Repeats(modes.meetings.took)

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """PyTorch's profiler, recording stacks, takes what is named ``self`` here for the module."""
            if not sites.is_outermost(self):
                if not sites.within and any(True for _ in self.children()):  # a part, more than a layer
                    window._models.setdefault(id(self), (self, sites.source_call()))
                return call(self, *args, **kwargs)
            if isinstance(self, torch.jit.ScriptModule):
                refuse_script()
            told(self)
            if modes.recorder.muted:
                return repeats.result(call, self, sites.source_stack(), args, kwargs)
            trains, graph = self.training and torch.is_grad_enabled(), modes.meetings.capturing
            if graph is None:
                window._called[type(_unwrapped(self)).__name__] += 1
            inputs = None if window._is_trained and graph is None else _named(self, args, kwargs)
            number, place = next(window._numbers), sites.source_call()
            learns = trains and any(each.requires_grad for each in self.parameters())
            by = _method_calling(self)
            made = _Call(number, id(self), window._chunk, version(self), place, learns, by, inputs)
            since = len(modes.recorder.ops)
            out = call(self, *args, **kwargs)
            window._within.append(range(since, len(modes.recorder.ops)))
            if trains:
                _when_trained(out, partial(window._trained, made))
            window._first = window._first or made
            window._models.setdefault(id(self), (self, place))
            if trains:
                window._call = window._call or made
            if graph is not None:
                graph.calls.append(made)
            return out

        def replaying(graph: Captured) -> None:
            told(graph)
            window._called["a CUDA graph"] += 1
            if graph.calls:
                window._first = window._first or graph.calls[0]
            modes.autocast.seen = modes.autocast.seen or graph.autocast
            modes.saved_bytes = max(modes.saved_bytes, graph.saved_bytes)

        with (
            self._habits.watching(),
            changed({"transformers.generation.utils": self._note_beams}),
            patch.object(nn.Module, "__call__", run),
            patch.object(self._modes.meetings, "replaying", replaying),
        ):
            yield

    def _note_beams(self, module: Any) -> None:
        search = module.GenerationMixin._beam_search

        @wraps(search)
        def beam_search(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
            self._beams = generation_config.num_beams
            out = search(*args, generation_config=generation_config, **kwargs)
            self._beams = 1
            return out

        module.GenerationMixin._beam_search = beam_search

    def begin(self) -> None:
        """The step begins here."""
        gc.collect()  # what only reference cycles hold is freed sooner or later, and is no part of a step
        self._modes.start()
        self._first = self._call = None
        self._is_trained = self._reached = False
        self._passes.clear()
        self._placed.clear()
        self._called.clear()
        self._models.clear()
        self._within.clear()
        stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None:
            self._follow(stages._PipelineStageBase)

    def _follow(self, stage: Any) -> None:
        """Notice which micro-batch goes through: several go forward before one goes backward."""
        forward = stage.forward_one_chunk

        def forward_one_chunk(self_: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with patch.object(self, "_chunk", chunk):
                return forward(self_, chunk, *args, **kwargs)

        stage.forward_one_chunk = forward_one_chunk

    def _trained(self, call: _Call) -> None:
        """A gradient reaches what a call returned: its samples are trained on, unlike those of an agent that
        only acts."""
        if call.number not in self._placed:
            self._placed.add(call.number)
            place = self._habits.backwards, call.chunk
            self._passes.setdefault(call.module, {}).setdefault(place, call.version)
        if not self._is_trained and (call.learns or not self._reached):
            self._call, self._is_trained = call, call.learns
        self._reached = True

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
        modes.recorder.returned |= modes.recorder.alive  # what the program may still read
        check_step(modes, stepped)
        call = (self._call if modes.trains else None) or self._first
        inputs = call.inputs if call else None
        batch = batch_of(inputs, modes.recorder.ops)
        passes = max(map(_on_first_weights, self._passes.values()), default=1) if len(stepped) <= 1 else 1
        modes.count_optimizer_state()
        modes.recorder.mark_replayed_backward()
        compiled = modes.compiling.share >= COMPILED_SHARE
        reads = sum(event.kind == WAIT and event.within for event in modes.meetings.events)
        modes.note_graph_breaks(reads if compiled else 0)
        settings = modes.settings(compiled=compiled, cuda_graph=compiled and modes.compiling.graphed)
        if settings.training:
            modes.recorder.let_inputs_grow(t for t in tensors(inputs) if isinstance(t, CudaTensor))
        else:
            modes.recorder.let_grow(batch)
        step = modes.step(settings, name, inputs, modes.unseen_notes)
        habits = self._habits.found()  # names events, too
        if call is not None and call.method:
            line = call.place.rpartition(":")[0]
            habits = (*habits, Habit("called_by_a_method", Site("", line), detail=call.method))
        updates = bool(stepped) or _updates(step)
        program = Program(
            command=command,
            step=described(step, stepped, passes, batch, self._called, updates, self._beams),
            steps=steps,
            updates=updates,
            beams=self._beams,
            micro_batches=passes,
            in_models=modes.compiling.share_of(self._within),
            events=tuple(modes.meetings.events),
            assumptions=modes.meetings.assumptions,
            habits=habits,
            optimizers=tuple(map(made_at, stepped)),
            models=tuple(self._models_called(call, stepped)),
            exchanges=tuple(modes.meetings.exchanges),
            order=tuple(modes.meetings.order),
            host_work=tuple((+modes.meetings.host_work).items()),
            ranks=ranks(),
            rank=rank(),
            per_machine=per_machine(),
            split=tuple(dict.fromkeys(split_modules(modes.sites.roots))),
        )
        return replace(step, program=program, batch=batch * passes // self._beams)

    def _models_called(self, call: _Call | None, stepped: list[torch.optim.Optimizer]) -> Iterator[Called]:
        """That of a call, and the others that have parameters."""
        places = {} if call is None else {call.module: call.place}
        for number, (model, place) in self._models.items():
            if any(True for _ in model.parameters()):
                places.setdefault(number, place)
        for number, place in places.items():
            model, _ = self._models.get(number, (nn.Module(), ""))
            yield called(model, place, stepped)


def second(modes: ProgramModes, run: Callable[[], Any], name: str, *, steps: int = 2) -> Step:
    """The step that ``run`` does the second time: the first makes the optimizer's state.

    Raises:
        CaptureError: a part of it was not seen.
    """
    window = Window(modes)
    with window.watching():
        run()
        stepped = modes.steps.known[:]
        window.begin()
        modes.returning(run())
    with torch._C.DisableTorchFunction():
        return window.step(name, name, stepped, steps)


def _when_trained(out: Any, told: Callable[[], None]) -> None:
    """Have it told when a backward pass reaches what a model returned; at once where that is never known."""
    made: list[Any] = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if not made or torch._C._functorch.peek_interpreter_stack() is not None:
        told()
        return
    for leaf in made:
        if leaf.requires_grad:
            leaf.register_hook(lambda gradient: told())


def _method_calling(module: nn.Module) -> str:
    """``Class.method`` of the module that a part of it is called in; a trainer's compiles what it calls."""
    frame, found = sys._getframe(1).f_back, ""
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and owner is not module and any(p is module for p in owner.modules()):
            is_trainers = hasattr(owner, "training_step")
            found = "" if is_trainers else f"{type(owner).__name__}.{code.co_name}"
        frame = frame.f_back
    return found


def _updates(step: Step) -> bool:
    """Whether a step writes to its parameters, as a loop over them does. Where no module holds any, gradients
    are those of the program's own tensors, which are then what it trains."""
    return not step.parameters or any(ref.parameter for entry in step.ops for ref in entry.outputs)


def _on_first_weights(versions: dict[int, int]) -> int:
    first = next(iter(versions.values()))
    return sum(version == first for version in versions.values())


def _unwrapped(module: nn.Module) -> nn.Module:
    """What a replica wraps; any other as it is."""
    inner = module.__dict__.get("_modules", {}).get("module")
    return inner if isinstance(inner, nn.Module) else module


def _named(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A model's inputs by the names of its arguments."""
    try:
        bound = inspect.signature(_unwrapped(module).forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return kwargs or args
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        flat.update(value if isinstance(value, dict) and name not in ("args",) else {name: value})
    return tree_map(lambda value: untransformed(_of_array(value)), flat)


def _of_array(value: Any) -> Any:
    """What is an array of NumPy's, and is copied by the model itself, as a tensor."""
    is_array = type(value).__name__ == "ndarray" and value.dtype.kind in "biuf"
    return torch.as_tensor(value) if is_array else value
