"""The ledger: which loss scale every gradient carries, without a threshold.

A scaled loss leaves a mark on its node of the autograd graph. When a backward pass has ended, every gradient
that it changed has the marks of its roots added. What uses gradients (``unscale_``, clipping, an optimizer's
step) is then judged by their states; gradients that are cleared before anybody uses them do not matter. What
follows is said only where the gradients' own values, of which some are kept on steps that are looked at
closely, show that nothing has touched them in between: a write through ``.data`` leaves no other trace.

Each thread has books of its own: what another thread does to gradients is, to it, what nobody saw.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tilefit.emulation.tensor import CudaTensor
from tilefit.precision import graph
from tilefit.precision.gradients import HAND, Cause, Gradient, Happens, Kind, Mark, State, move, sample
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patch
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules import PrecisionRule
from tilefit.precision.rules.protocol import misuse
from tilefit.precision.tensors import has_values, parameters_of

Marks = frozenset[Mark]
Running = Generator[None, Any, None]
Rule = type[PrecisionRule]
#: What a rule says of gradients that carry marks, beside where, how many and what is wrong.
Figures = Callable[[Marks], dict[str, Any]]

_ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "LAMB", "Lamb", "Adafactor", "Lion")
#: Optimizers that treat every element by itself, so that a sample of elements behaves as the whole tensor
#: does.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")
#: How near a factor is to a scale that it is taken for.
NEAR = 1e-4


@dataclass(slots=True)
class Region:
    """An outermost autocast region: its number, a new one where the cache is cleared; the line that entered
    it; and whether its cache is on."""

    number: int
    source: str
    cache: bool


class Pass(NamedTuple):
    """A backward pass that was looked at: its line, what its loss was multiplied by if it is a mean, and the
    ``id`` of each parameter that it reaches; None where these are not known."""

    source: str
    factor: float | None
    reached: frozenset[int] | None


@dataclass(slots=True)
class Cycle:
    """What has happened on a thread since the last step of any optimizer.

    Attributes:
        scale_met: A scaled loss was met.
        inferred: Something may have brought a scale along unseen, and
        unclean: a loss was a product with a tensor that may have.
        multiplied: What the user multiplied each gradient by, by ``id``.
        pending: Clips and writes of gradients that a constant may be divided out of yet, and what emits them.
        passes: The backward passes, on steps that are looked at.
        fp16: fp16 gradients flowed through a graph that was looked at.
        gave: A backward pass returned gradients that carry a scale.
        hand_scaled: A loss was multiplied by something that may be a scale made by hand.
        dtypes: Element types of the autocast regions entered with gradients on, outside of backward passes.
        source: The line that entered the last of them.
    """

    scale_met: bool = False
    inferred: bool = False
    unclean: bool = False
    multiplied: defaultdict[int, float] = field(default_factory=lambda: defaultdict(lambda: 1.0))
    pending: list[tuple[float, PrecisionRule]] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    fp16: bool = False
    gave: bool = False
    hand_scaled: bool = False
    dtypes: set[torch.dtype] = field(default_factory=set)
    source: str = ""


@dataclass(slots=True, eq=False)
class Here:
    """What runs on a thread that trains, and what is known there.

    Attributes:
        thread: Its number.
        gradients: The gradients followed, by ``id`` of their parameter.
        of: The gradients of each optimizer seen.
        open: Some gradient was changed by a backward pass and has not been used yet.
        cycle: What has happened since the last step.
        regions: The autocast regions that are open, and how many were entered so far.
        region: The outermost of them, None without one.
        depth: Backward passes that are running, one inside another.
        reached: Marks met by the outermost of them; ``unknown`` where it was given gradients.
        unscaled: Parameters, by ``id``, whose hooks have divided the scale out.
        given: The gradients given to the backward pass that is about to begin.
        chain, scan: What the graph of the last backward pass says, on steps that are looked at closely.
        leaves: The ``id`` of each parameter that it reaches; None where there may be more.
        stepping: Optimizers whose step runs, one inside another.
        in_use: An optimizer or a scaler is at work: what it writes is its own.
        scaler_step: The scaler and the optimizer of the ``scaler.step`` that runs.
        ran: The optimizer's own step was called within it.
    """

    thread: int
    gradients: dict[int, Gradient] = field(default_factory=dict)
    of: WeakKeyDictionary[Optimizer, list[Gradient]] = field(default_factory=WeakKeyDictionary)
    open: bool = False
    cycle: Cycle = field(default_factory=Cycle)
    regions: list[Any] = field(default_factory=list)
    entered: int = 0
    region: Region | None = None
    depth: int = 0
    reached: set[Mark] = field(default_factory=set)
    unscaled: set[int] = field(default_factory=set)
    unknown: bool = False
    given: tuple[Any, ...] = ()
    chain: graph.Chain = field(default_factory=graph.Chain)
    scan: graph.Scan = field(default_factory=graph.Scan)
    leaves: frozenset[int] | None = None
    stepping: list[Optimizer] = field(default_factory=list)
    in_use: int = 0
    scaler_step: tuple[Any, Optimizer] | None = None
    ran: bool = False

    @property
    def cached_in(self) -> int:
        """The number of the present outermost autocast region, 0 if there is none or its cache is off."""
        return self.region.number if self.region is not None and self.region.cache else 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the block, writes to gradients are an optimizer's or a scaler's own."""
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use = max(0, self.in_use - 1)

    @property
    def librarys(self) -> bool:
        """An optimizer of PyTorch's, a scaler or the like is at work."""
        return self.in_use > 0 and not (self.stepping and twin_of(type(self.stepping[0])) is None)  # type: ignore[arg-type]


@cache
def twin_of(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The class of PyTorch's that an optimizer steps as, where a sample steps as the whole does."""
    base = next((c for c in kind.__mro__ if c.__module__.startswith("torch.optim.")), None)
    return base if base is not None and base.__name__ in _ELEMENTWISE else None


def is_pytorchs(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer is PyTorch's own code."""
    return type(optimizer).__module__.startswith("torch.optim.")


class _Local(threading.local):
    def __init__(self) -> None:
        self.here = Here(threading.get_ident())


class Begins(NamedTuple):
    """An outermost backward pass begins."""

    roots: Sequence[Any]
    here: Here


class Ended(NamedTuple):
    """An outermost backward pass has ended."""


class Gave(NamedTuple):
    """An outermost backward pass returned gradients instead of adding them to ``.grad``."""

    gradients: Sequence[Any]
    marks: Marks


class Scales(NamedTuple):
    """A scaler has multiplied by its scale."""

    outputs: Any


class Hooks(NamedTuple):
    """A hook of the user's begins to run on a gradient, within a backward pass that is looked at closely."""

    parameter: Tensor
    gradient: Tensor


class Hooked(NamedTuple):
    """It has run, and gave a result."""

    parameter: Tensor
    gradient: Tensor
    result: Any


class Stepping(NamedTuple):
    """An optimizer is about to step on gradients that carry no scale any more."""

    optimizer: Optimizer


class Stepped(NamedTuple):
    """An optimizer has stepped.

    Attributes:
        optimizer: The optimizer.
        skipped: The scaler skipped it; None where only the device knows.
        scaler: The scaler it went through, or None.
        plain: All of its gradients were without a scale from the start, and none was met since the last step.
    """

    optimizer: Optimizer
    skipped: bool | None
    scaler: Any
    plain: bool


@dataclass(slots=True)
class Scaler:
    """A gradient scaler.

    Attributes:
        number: Its number among the scalers seen.
        generation: How often it was updated.
        previous: The scale before the last update.
        skipped: Steps skipped in a row.
        bad_losses: Losses in a row, since the last step that was made, that were not finite.
        stepped: Names of the optimizers stepped since the last update, and those before it.
        scaled_at: The line of the last ``scale``.
        loaded: ``load_state_dict`` was called.
    """

    number: int
    generation: int = 0
    previous: Tensor | None = None
    skipped: int = 0
    bad_losses: int = 0
    stepped: dict[int, str] = field(default_factory=dict)
    stepped_before: dict[int, str] = field(default_factory=dict)
    scaled_at: str = ""
    loaded: bool = False

    @property
    def mark(self) -> Mark:
        """The mark of what it scales now."""
        return Mark(self.number, self.generation)


class Ledger:
    """Follows scales through backward passes and optimizers.

    Args:
        recorder: Where events go.

    Attributes:
        before_observing: Called before gradients that were changed by hand are looked for.
        look: The close look at this step (:class:`~tilefit.precision.look.Look`); None where nobody looks.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._scalers: WeakKeyDictionary[Any, Scaler] = WeakKeyDictionary()
        #: Of each optimizer, the thread of its last step, and whether that was skipped.
        self._last: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        self._local = _Local()
        #: What runs on the threads of the backward passes that run, and by autograd's number of each.
        self._passes: list[Here] = []
        self._tasks: dict[int, Here] = {}
        self._ends = ExitStack()
        self.look: Any = None
        self.before_observing: Callable[[], None] = lambda: None

    # ---- what is known ---------------------------------------------------------------------

    @property
    def here(self) -> Here:
        """What runs on this thread; on one of autograd's own, on the thread that its backward pass is of."""
        mine, task = self._local.here, -1
        if self._passes and not mine.depth:
            task = torch._C._current_graph_task_id()
        if task < 0:
            return mine
        # On a GPU autograd runs nodes on threads of its own; the hooks of a root come before those that tell
        # which pass it is of.
        known, running = self._tasks.get(task), list(self._passes)
        if known is None and any(here is not running[0] for here in running):
            for here in running:
                here.unknown = True  # it may be any one's
            self._recorder.cannot_check("backward passes of several threads on a GPU", "AMP00", "AMP019")
            return mine
        return known or running[0]

    @property
    def closely(self) -> bool:
        """Every operation of this thread passes by, so that nothing can write to a gradient unseen."""
        return self.look is not None and self.look.thread == self.here.thread

    @property
    def gradients(self) -> list[Gradient]:
        """All gradients that are followed here."""
        return list(self.here.gradients.values())  # hooks may add some

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are followed here."""
        return [parameter for g in self.gradients if (parameter := g.parameter()) is not None]

    def present(self, optimizer: Optimizer) -> list[Gradient]:
        """The gradients of an optimizer, those there are."""
        return [gradient for gradient in self.here.of.get(optimizer, []) if gradient.present]

    def scaler(self, scaler: Any) -> Scaler:
        """What is known of a scaler."""
        return self._scalers.setdefault(scaler, Scaler(len(self._scalers)))

    @property
    def scalers(self) -> list[tuple[Any, Scaler]]:
        """The scalers seen."""
        return list(self._scalers.items())

    def scale_of(self, marks: Iterable[Mark]) -> float:
        """The scale of the first mark, or the constant: waits for the device."""
        factors = {mark.scaler: mark.factor for mark in marks}
        scales = (scale_of(s) for s, known in self._scalers.items() if known.number in factors)
        return next(scales, factors.get(HAND, 1.0))

    def followed(self, parameters: Iterable[Tensor]) -> list[Gradient]:
        """The gradients of those of the parameters that are followed."""
        known = ((self.here.gradients.get(id(p)), p) for p in parameters)
        return [gradient for gradient, p in known if gradient is not None and gradient.parameter() is p]

    def follow(self, parameter: Tensor) -> Gradient:
        """Follow a parameter."""
        gradients = self.here.gradients
        known = gradients.get(id(parameter))
        if known is None or known.parameter() is not parameter:
            known = gradients[id(parameter)] = Gradient(ref(parameter))
            known.speaks(len(gradients) - 1)
        return known

    def adopt(self, optimizer: Optimizer) -> None:
        """Follow the parameters of an optimizer."""
        of = self.here.of
        if len(of.get(optimizer, [])) == sum(len(group["params"]) for group in optimizer.param_groups) > 0:
            return
        of[optimizer] = [self.follow(parameter) for parameter in parameters_of(optimizer)]
        for number, gradient in enumerate(of[optimizer]):
            gradient.speaks(number)

    # ---- watching --------------------------------------------------------------------------

    def patches(self) -> list[Patch]:
        """What it follows; optimizers' steps as well, from now on."""
        self._ends.enter_context(register_optimizer_step_pre_hook(self._before_step))
        self._ends.enter_context(register_optimizer_step_post_hook(self._after_step))
        return [
            (torch.autograd, "_make_grads", self._gradients_are_given),
            (torch.autograd, "_engine_run_backward", self._backward),
            (Optimizer, "zero_grad", self._zero_grad),
            (torch.nn.Module, "zero_grad", self._zero_grad),
            (torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._clip),
        ]

    def stop(self) -> None:
        """End."""
        self._ends.close()

    def observe(self, here: Here, marks: Marks | None = None) -> None:
        """Look which gradients have changed: by a backward pass with marks, or by hand."""
        if marks is None:
            self.before_observing()
        touched = [gradient for gradient in self.gradients if gradient.change() is Cause.WRITTEN]
        for gradient in touched:
            gradient.sample = None
        if marks is not None:
            self._add(here, touched, marks)
        else:
            # Only a close look can tell whether what was done to them matters.
            if any(gradient.state.scaled for gradient in touched):
                self._recorder.suspect()
            move(touched, Cause.WRITTEN)
        if self._recorder.looking and not capturing():
            sample(self.gradients, compare=True)

    def _add(self, here: Here, gradients: list[Gradient], marks: Marks) -> None:
        closely = self.closely
        by_cause: defaultdict[Cause | None, list[Gradient]] = defaultdict(list)
        for gradient in gradients:
            parameter = gradient.parameter()
            blind = here.unknown or (not closely and parameter is not None and has_hooks(parameter))
            plain = Cause.ADD_PLAIN if id(parameter) in here.unscaled else None
            by_cause[Cause.ADD_UNKNOWN if blind else plain].append(gradient)
        for cause, those in by_cause.items():
            move(those, cause or (lambda state: state.adding(marks)), marks if cause is None else frozenset())

    # ---- backward passes -------------------------------------------------------------------

    def _gradients_are_given(self, outputs: Any, grads: Sequence[Any], *args: Any, **kw: Any) -> Running:
        here = self.here
        yield
        here.given = tuple(grads)

    def _backward(self, roots: Sequence[Tensor], grads: Any = (), *args: Any, **kw: Any) -> Running:
        if torch._C._are_functorch_transforms_active():
            return  # a function's derivative, which no parameter receives
        if any(isinstance(root, FakeTensor | FunctionalTensor) for root in roots):
            return  # a compiler traces
        here = self.here
        given, here.given = here.given, ()
        inputs = args[2] if len(args) > 2 else kw.get("inputs")

        def runs(_: Any) -> None:
            task = torch._C._current_graph_task_id()
            self._tasks[task] = here
            ends.callback(self._tasks.pop, task, None)

        with ExitStack() as ends:
            here.depth += 1
            self._passes.append(here)
            ends.callback(self._end, here)
            for node in graph.starts(roots):
                ends.callback(node.register_prehook(runs).remove)
            # A look is one thread's.
            scan = ends.enter_context(self.look.passing(roots, inputs or ())) if self.closely else None
            if here.depth == 1:
                self._begin(here, roots, given, scan)
            result = yield
        if here.depth == 0 and here.reached and result:
            here.cycle.gave = True
            self._recorder.tell(Gave(result, frozenset(here.reached)))

    def _begin(self, here: Here, roots: Sequence[Tensor], given: Any, scan: graph.Scan | None) -> None:
        if here.stepping and here.in_use:
            # No step is running that evaluates a closure: the last one raised.
            here.stepping.clear()
            here.in_use = 0
        here.reached.clear()
        here.unscaled.clear()
        self.observe(here)
        here.chain, here.scan = graph.Chain(), graph.Scan()
        looking = self._recorder.looking
        factor = _constant(given, looking)
        here.unknown = factor is None
        if looking:
            here.chain, here.scan = graph.chain(roots), scan or graph.scan(roots)
            here.leaves = frozenset(map(id, here.scan.leaves)) if here.scan.whole else None
            # Also what no optimizer holds: its gradients may be copied, or used by hand.
            while here.scan.leaves:
                self.follow(here.scan.leaves.pop())
            chain = here.chain
            here.cycle.inferred |= not self.closely
            here.cycle.unclean |= not chain.clean
            chain.factor = factor = None if chain.factor is None or factor is None else chain.factor * factor
            if chain.marks and chain.plain:
                what = {"source": user_line(), "scale": self.scale_of(chain.marks)}
                self._recorder.emit(misuse("loss", **what))
        if factor not in (None, 1.0) and not here.chain.marks:
            here.reached.add(Mark(HAND, 0, factor))
        self._recorder.tell(Begins(roots, here))

    def _end(self, here: Here) -> None:
        here.depth -= 1
        self._passes.remove(here)
        if here.depth == 0:
            self.observe(here, frozenset(here.reached))
            here.open = True
            self._recorder.tell(Ended())

    def reach(self, mark: Mark) -> None:
        """A backward pass goes through a scaled loss."""
        here = self.here
        if here.depth:
            here.reached.add(mark)
        here.cycle.scale_met = True

    def replay_ran(self) -> None:
        """A CUDA graph was replayed: gradients may have changed without a trace."""
        move(self.gradients, Cause.WRITTEN)

    # ---- judging ---------------------------------------------------------------------------

    def judge(
        self, gradients: Sequence[Gradient], cause: Happens, figures: Figures, module: str = ""
    ) -> None:
        """Let something use gradients, and say what is wrong with it where that is certain.

        Args:
            gradients: The gradients.
            cause: What it is to them.
            figures: What there is to say of it.
            module: What the event is about.
        """
        here, recorder, source = self.here, self._recorder, user_line()
        before = [gradient.state for gradient in gradients]
        for wrong, those in move(gradients, cause).items():
            # What carries no scale is never seen to carry none.
            absent = wrong in ("plain", "mixed")
            seen = not (absent and here.cycle.inferred)

            def event(wrong: str = wrong, those: list[Gradient] = those, seen: bool = seen) -> PrecisionRule:
                marks: Marks = frozenset().union(*(gradient.state.marks for gradient in those))
                partly = not {state.kind for state in before} <= {Kind.LEFT, Kind.USED, Kind.NONE}
                more = {"parameters": len(those), "partly": partly, **figures(marks)}
                return misuse(wrong, source=source, module=module, seen=seen, **more)

            if wrong == "hand":
                self.wait(those[0].state.by_hand, event())
                continue
            if wrong == "plain" and self._are_scales({state.by_hand for state in before}):
                continue
            key = (wrong, source, module, seen)
            certain = recorder.looking and any(gradient.sure for gradient in those)
            if recorder.knows(key) or (certain and not (absent and here.cycle.unclean)):
                # Whether the scale has changed decides how bad an older one is, each time.
                recorder.once(key, event, again=wrong == "older")
            elif not recorder.looking:
                recorder.suspect()

    def _are_scales(self, constants: set[float]) -> bool:
        scales = [scale_of(scaler) for scaler, _ in self.scalers] if any(constants) else []
        return any(abs(constant / scale - 1) < NEAR for constant in constants for scale in scales if scale)

    def divide(self, scaler: Any, optimizer: Optimizer) -> None:
        """Judge that a scaler divides an optimizer's gradients by its scale, which they lose."""
        known, figures = self.scaler(scaler), self._of_step(optimizer, scaler=True)
        carried_now = (mark for gradient in self.present(optimizer) for mark in gradient.state.marks)
        foreign = not any(mark.scaler == known.number for mark in carried_now)
        other = next((n for key, n in known.stepped_before.items() if key != id(optimizer)), "")

        def of_division(marks: Marks) -> dict[str, Any]:
            carried = None if known.previous is None else float(known.previous)
            more = {"carried": carried, "other": other, "foreign": foreign}
            return figures(marks) | {"scale": scale_of(scaler), **more}

        def cause(state: State) -> Cause:
            return Cause.UNSCALE_OWN if state.marks == {known.mark} else Cause.UNSCALE_OTHER

        self.judge(self.present(optimizer), cause, of_division, type(optimizer).__name__)

    def steps(self, optimizer: Optimizer, *, scaler: bool) -> None:
        """Judge that an optimizer steps on gradients as they are, by itself or through a scaler."""
        figures = self._of_step(optimizer, scaler=scaler)
        self.judge(self.present(optimizer), Cause.STEPPED, figures, type(optimizer).__name__)

    def _of_step(self, optimizer: Optimizer, *, scaler: bool) -> Figures:
        def figures(marks: Marks) -> dict[str, Any]:
            group, adaptive = optimizer.param_groups[0], type(optimizer).__name__.startswith(_ADAPTIVE)
            numbers = {key: _number(group.get(key)) for key in ("lr", "eps", "weight_decay")}
            _, skipped = self._last.get(optimizer, (0, False))
            how = {"adaptive": adaptive, "skipped": skipped, "scaler": scaler}
            return {"scale": self.scale_of(marks), **numbers, **how}

        return figures

    def _judge_step(self, here: Here, optimizer: Optimizer) -> None:
        divides = getattr(optimizer, "grad_scale", None) is not None
        if here.depth:  # an optimizer that steps within the backward pass
            changed = [g for g in here.of[optimizer] if g.change() is Cause.WRITTEN]
            self._add(here, changed, frozenset(here.reached))
            # Where every operation passes by, so did what hooks of the user's did to them.
            for gradient in self.present(optimizer) if self.closely else changed:
                gradient.sure = self.closely
        elif here.scaler_step is None or divides:
            self.observe(here)
        if divides and here.scaler_step is not None:
            self.divide(here.scaler_step[0], optimizer)
        elif not divides:
            if here.scaler_step is None:
                self.steps(optimizer, scaler=False)
            self._recorder.tell(Stepping(optimizer))

    # ---- optimizers ------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kw: Any) -> tuple[Any, Any] | None:
        here = self.here
        if optimizer in here.stepping:
            here.stepping.clear()  # its last step raised
        here.stepping.append(optimizer)
        if len(here.stepping) > 1:
            return None  # an optimizer inside another one
        here.ran = True
        self.adopt(optimizer)
        closure = _closure(args, kw)
        if closure is None:
            self._judge_step(here, optimizer)
            here.in_use += 1
            return None
        unjudged = [optimizer]

        def evaluate() -> Any:
            value = closure()
            if unjudged:
                self._judge_step(here, unjudged.pop())
            return value

        if "closure" in kw:
            return args, {**kw, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kw

    def _after_step(self, optimizer: Optimizer, args: Any, kw: Any) -> None:
        here = self.here
        if optimizer not in here.stepping:
            return
        outermost = here.stepping[0] is optimizer
        del here.stepping[here.stepping.index(optimizer) :]
        if not outermost:
            return
        if _closure(args, kw) is None:
            here.in_use = max(0, here.in_use - 1)
        if here.scaler_step is not None and here.scaler_step[1] is optimizer:
            return  # the scaler's own step ends after it
        plain = not here.cycle.scale_met and all(g.state.kind is Kind.PLAIN for g in self.present(optimizer))
        self.used(here, Stepped(optimizer, False, None, plain))

    def used(self, here: Here, stepped: Stepped) -> None:
        """An optimizer used its gradients, or was to use them and was skipped."""
        optimizer = stepped.optimizer
        if self._last.get(optimizer, (here.thread,))[0] != here.thread:
            self._recorder.cannot_check("gradients that several threads use", "AMP00", "AMP019")
        self._last[optimizer] = here.thread, bool(stepped.skipped)
        gradients = self.present(optimizer)
        if self._recorder.looking and not here.depth:
            self.written(gradients)  # whatever the optimizer did to them is no news
        move(gradients, Cause.USED)
        for gradient in () if stepped.skipped else gradients:
            gradient.stepped_in = here.cached_in
        here.open = any(gradient.state.fresh for gradient in self.gradients)
        self._recorder.tell(stepped)
        here.cycle = Cycle()

    def written(self, gradients: Sequence[Gradient], *, ending: bool = False, alike: bool = False) -> None:
        """What was written to gradients just now is known.

        Args:
            gradients: The gradients.
            ending: Autograd has yet to count the write.
            alike: One operation wrote to all. Those on lists of tensors count no write, so that there is
                nothing to see: the first tells, as to ask every one takes time.
        """
        sampled = self._recorder.looking and not capturing()
        for number, gradient in enumerate(gradients):
            before = gradient.version
            gradient.accept(ending=ending)
            if number == 0 and alike and not sampled and gradient.version == before:
                return
        if sampled:
            sample(gradients)

    def _zero_grad(self, owner: Any, set_to_none: bool = True) -> Running:
        if isinstance(owner, Optimizer):
            self.adopt(owner)  # its gradients are known from the first backward pass on
        with self.here.at_work():
            yield
        if not set_to_none:  # else it will be seen that there is none
            optimizer = isinstance(owner, Optimizer)
            known = self.followed(parameters_of(owner) if optimizer else owner.parameters())
            for gradient in known:
                gradient.accept()
            move(known, Cause.CLEARED)

    def _clip(self, parameters: Any, max_norm: float, *args: Any, **kw: Any) -> Running:
        here = self.here
        if not here.open or not (self._recorder.looking or any(g.state.scaled for g in self.gradients)):
            return
        self.observe(here)
        known = self.followed([parameters] if isinstance(parameters, Tensor) else list(parameters))
        present = [gradient for gradient in known if gradient.present]
        limit = float(max_norm)
        self.judge(present, Cause.CLIPPED, lambda marks: {"threshold": limit, "scale": self.scale_of(marks)})
        with here.at_work():
            yield
        self.written(present)

    def wait(self, constant: float, event: PrecisionRule) -> None:
        """What was done to gradients is wrong if a constant that their loss was multiplied by is a scale."""
        if constant:
            self.here.cycle.pending.append((constant, event))

    def settle(self, factor: float) -> None:
        """Gradients are multiplied by hand: if it undoes a constant, what was done before is wrong."""
        for constant, event in self.here.cycle.pending:
            if abs(constant * factor - 1) < NEAR:
                self._recorder.emit(event)


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks of the user's may change a parameter's gradient within a backward pass."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def capturing() -> bool:
    """Whether a CUDA graph is captured, while which nothing may be read."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def enabled(scaler: Any) -> bool:
    """Whether a scaler does anything that is to be followed."""
    return bool(scaler._enabled) and not torch.compiler.is_compiling()


def scale_of(scaler: Any) -> float:
    """The scale; waits for the device."""
    return float(scaler.get_scale())


def _closure(args: Any, kw: Any) -> Callable[[], Any] | None:
    closure = kw.get("closure") if "closure" in kw else args[1] if len(args) > 1 else None
    return closure if callable(closure) else None


def _constant(given: Sequence[Any], looking: bool) -> float | None:
    """The number that the gradients given to a backward pass all are; None where that is not known."""
    numbers: set[float] = set()
    for gradient in given:
        values = gradient.known() if isinstance(gradient, CudaTensor) else gradient
        if gradient is None:
            numbers.add(1.0)
            continue
        if values is None or not has_values(values):
            return None
        if values.device.type != "cpu" and (not looking or capturing()):
            return None
        with torch._C._DisableTorchDispatch():
            numbers.update(float(end) for end in values.detach().aminmax())
    return numbers.pop() if len(numbers) == 1 else None if numbers else 1.0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | Tensor) else None


class Tracker:
    """What follows a run beside the ledger, told of the events that it has a method for: ``on_stepped``.

    Args:
        recorder: Where events go.
        ledger: Knows backward passes, gradients, optimizers and scalers.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self.set_up()
        for kind in (Begins, Ended, Gave, Scales, Hooks, Hooked, Stepping, Stepped):
            listener = getattr(self, f"on_{kind.__name__.lower()}", None)
            if listener is not None:
                recorder.on(kind, listener)

    def set_up(self) -> None:
        """Make what it keeps."""

    def found(self, rule: Rule, source: str | None = None, module: str = "", /, **what: Any) -> None:
        """Something that may break a rule has happened, on the line that runs where no other is given."""
        self._recorder.emit(rule(user_line() if source is None else source, module, **what))

    def patches(self) -> list[Patch]:
        """What of PyTorch's it runs around."""
        return []

    def finish(self) -> None:
        """The watch ends."""
