"""The ledger: which loss scale every gradient carries, exactly, without looking at a single value.

A scaled loss leaves a mark, its scaler and that scaler's generation (a number that ``update()`` counts up),
on its node of the autograd graph. When a backward pass has ended, every gradient it changed has the marks of
its roots added. What consumes gradients (``unscale_``, an optimizer's step) is then judged by the marks:
gradients that are cleared before anybody uses them do not matter. A gradient that is changed by code the
ledger cannot follow is *unknown*, and nothing is said of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tilefit.precision import graph
from tilefit.precision.events import (
    GradientsClipped,
    MixedLoss,
    RepeatedStep,
    ScaledStep,
    ScaleHistory,
    ScalerRefused,
    WrongDivision,
)
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches, with_subclasses
from tilefit.precision.recorder import Recorder

#: A scaler's number and its generation.
Mark = tuple[int, int]
#: The marks of the parts that make up a gradient; None stands for a part without a scale.
Marks = frozenset[Mark | None]
PLAIN: Marks = frozenset([None])
EMPTY: Marks = frozenset()

#: From so many skipped steps in a row on, the losses are looked at.
MANY_SKIPS = 3
_ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "LAMB", "Lamb", "Adafactor", "Lion")


class Gradient:
    """What is known of one parameter's gradient.

    Attributes:
        parameter: A weak reference to the parameter.
        marks: The marks of its parts; None where they are not known.
        fresh: It has changed since an optimizer used it.
        consumed: An optimizer used it, or was to use it and was skipped.
        divided: The mark that ``unscale_`` has divided it by, until it changes again.
        stepped_in: The autocast region in which its parameter was stepped last; 0 for none.
    """

    __slots__ = (
        "consumed",
        "divided",
        "fresh",
        "marks",
        "next_version",
        "parameter",
        "reference",
        "stepped_in",
        "version",
    )

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.stepped_in = 0
        self.reference: weakref.ref[Tensor] | None = None
        self.version = self.next_version = -1
        self.marks: Marks | None = EMPTY
        self.fresh = False
        self.consumed = False
        self.divided: Mark | None = None
        gradient = parameter.grad
        if gradient is not None:
            # It is older than the watch.
            self.reference = weakref.ref(gradient)
            self.version = self.next_version = gradient._version
            self.marks = None
            self.fresh = True

    def clear(self) -> None:
        """There is no gradient."""
        self.reference = None
        self.version = self.next_version = -1
        self.marks = EMPTY
        self.fresh = False
        self.consumed = False
        self.divided = None

    @property
    def value(self) -> Tensor | None:
        """The gradient itself, as it was seen last."""
        return self.reference() if self.reference is not None else None

    @property
    def scaled(self) -> bool:
        """Some part of it carries a scale that is known."""
        return bool(self.marks) and self.marks != PLAIN

    def observe(self, marks: Marks | None) -> bool:
        """Look whether it has changed; ``marks`` are those of the backward pass that may have changed it.

        Args:
            marks: None outside of a backward pass: then whatever has changed was changed by hand.

        Returns:
            Whether it has changed.
        """
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            if self.reference is not None:
                self.clear()
            return False
        before = self.value
        version = gradient._version
        if before is gradient and version in (self.version, self.next_version):
            self.version, self.next_version = version, version
            return False
        if marks is None:
            # Clipping and the like after unscale_ leaves a gradient plain; all else is beyond us here.
            if not (self.marks == PLAIN and before is gradient and not self.consumed):
                self.marks = None
        elif self.reference is None:
            self.marks = marks
        elif self.marks is not None:
            self.marks |= marks
        if self.reference is None or before is not gradient:
            self.reference = weakref.ref(gradient)
        self.version = self.next_version = version
        self.fresh = True
        if marks is not None:
            self.consumed = False
        return True

    def accept(self, marks: Marks | None) -> None:
        """What was written since is known: the gradient now has these marks."""
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self.clear()
            return
        if self.value is not gradient:
            self.reference = weakref.ref(gradient)
        self.version = self.next_version = gradient._version
        self.marks = marks

    def written(self, marks: Marks | None) -> None:
        """An operation that is just ending has written to it, after which it has these marks."""
        self.accept(marks)
        # Autograd counts the write when the operation has returned, unless it went through ``.data``.
        self.next_version = self.version + 1


@dataclass(slots=True)
class Scaler:
    """A gradient scaler.

    Attributes:
        number: Its number among the scalers seen.
        generation: How often it was updated.
        previous: The scale before the last update, where gradients were left that carry it.
        skipped: Steps skipped in a row.
        bad_losses: Losses in a row, since the last step that was made, that were not finite.
        stepped: Names of the optimizers stepped since the last update, and those before it.
        scaled_at: The line of the last ``scale``.
        loaded: ``load_state_dict`` was called.
        used: It has scaled something.
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
    used: bool = False

    @property
    def mark(self) -> Mark:
        """The mark of what it scales now."""
        return self.number, self.generation


@dataclass(slots=True)
class Stepped:
    """What listeners are told about an optimizer's step.

    Attributes:
        optimizer: The optimizer.
        skipped: The scaler skipped it; None where only the device knows.
        scaler: The scaler it went through, or None.
        plain: All of its gradients were without a scale from the start, and no scale was met since the last
            step.
    """

    optimizer: Optimizer
    skipped: bool | None
    scaler: Any
    plain: bool


class Ledger:
    """Follows scales through backward passes, scalers and optimizers.

    Args:
        recorder: Where events go.
        patches: Where replaced attributes are kept.

    Attributes:
        depth: Backward passes that are running, one inside another.
        on_backward: Called with the roots before, and with None after, an outermost backward pass.
        on_stepping: Called before an optimizer's step on gradients that carry no scale any more.
        on_stepped: Called after an optimizer's step, or one that was skipped.
        region: The number of the present outermost autocast region with a cache; 0 for none.
        in_use: An optimizer or a scaler is at work: what it writes is its own.
        accumulating: The backward pass that begins adds to gradients that nobody has used yet; kept up on
            steps that are looked at closely.
        chain, scan: What the graph of the last backward pass says, on such steps.
        open: Some gradient carries a scale and has not been used yet.
        before_observing: Called before gradients that were changed by hand are looked for.
        passing: Entered around each backward pass, with its roots and the inputs it goes to, none for all.
            It gives what the graph says, where it has gone through it.
    """

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self._recorder = recorder
        self._gradients: dict[int, Gradient] = {}
        self._of: weakref.WeakKeyDictionary[Optimizer, list[Gradient]] = weakref.WeakKeyDictionary()
        self._group_sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._scalers: weakref.WeakKeyDictionary[Any, Scaler] = weakref.WeakKeyDictionary()
        self._reached: set[Mark] = set()
        self._stepping: list[Optimizer] = []
        self._evaluates = False  # the optimizer that steps calls a closure
        self._scaler_step: tuple[Any, Optimizer] | None = None
        self._ran = False
        self._skipped_last: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._patches = patches
        self._handles: list[Any] = []
        self.depth = 0
        self.in_use = 0
        self.open = False
        self.accumulating = False
        self.chain = graph.Chain()
        self.scan = graph.Scan()
        self._scale_seen = False
        self.region: Callable[[], int] = lambda: 0
        self.before_observing: Callable[[], None] = lambda: None
        self.passing: Callable[[Sequence[Any], Sequence[Any]], AbstractContextManager[graph.Scan | None]] = (
            unseen
        )
        self.on_backward: list[Callable[[Sequence[Tensor] | None], None]] = []
        self.on_stepping: list[Callable[[Optimizer], None]] = []
        self.on_stepped: list[Callable[[Stepped], None]] = []
        self._ignoring = False

    # ---- what is known ---------------------------------------------------------------------

    @property
    def gradients(self) -> Iterator[Gradient]:
        """All gradients."""
        return iter(self._gradients.values())

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers seen."""
        return list(self._of)

    def values_of(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """The gradients of an optimizer, those there are."""
        return (value for gradient in self.of(optimizer) if (value := gradient.value) is not None)

    def of(self, optimizer: Optimizer) -> list[Gradient]:
        """The gradients of an optimizer."""
        return self._of.get(optimizer, [])

    def scaler(self, scaler: Any) -> Scaler:
        """What is known of a scaler."""
        found = self._scalers.get(scaler)
        if found is None:
            found = self._scalers[scaler] = Scaler(len(self._scalers))
        return found

    @property
    def scalers(self) -> list[tuple[Any, Scaler]]:
        """The scalers seen."""
        return list(self._scalers.items())

    def scale_of(self, marks: Marks | None) -> float:
        """The scale of the first mark: waits for the device."""
        for scaler, known in self._scalers.items():
            if any(mark is not None and mark[0] == known.number for mark in marks or ()):
                return _scale(scaler)
        return 1.0

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter that is followed, or the gradient of one."""
        return self.is_parameter(tensor) or any(g.value is tensor for g in self._gradients.values())

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter that is followed."""
        known = self._gradients.get(id(tensor))
        return known is not None and known.parameter() is tensor

    def adopt(self, optimizer: Optimizer) -> None:
        """Follow the parameters of an optimizer."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._group_sizes.get(optimizer) == size:
            return
        self._group_sizes[optimizer] = size
        self._of[optimizer] = [
            self.follow(parameter) for group in optimizer.param_groups for parameter in group["params"]
        ]

    def follow(self, parameter: Tensor) -> Gradient:
        """Follow a parameter."""
        known = self._gradients.get(id(parameter))
        if known is None or known.parameter() is not parameter:
            known = self._gradients[id(parameter)] = Gradient(parameter)
        return known

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Optimizers made within the block are the debugger's own."""
        self._ignoring = True
        try:
            yield
        finally:
            self._ignoring = False

    # ---- watching --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        wrap = self._patches.wrap
        wrap(torch.autograd, "_engine_run_backward", self._around_backward)
        for scaler_class in with_subclasses(torch.amp.GradScaler):
            for name, around in (
                ("scale", self._around_scale),
                ("unscale_", self._around_unscale),
                ("step", self._around_scaler_step),
                ("update", self._around_update),
                ("load_state_dict", self._around_load),
            ):
                if name in vars(scaler_class):
                    wrap(scaler_class, name, around)
        for owner in (Optimizer, torch.nn.Module):
            wrap(owner, "zero_grad", self._around_zero_grad)
        wrap(Optimizer, "add_param_group", self._around_add_param_group)
        wrap(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._around_clip)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def stop(self) -> None:
        """End."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- backward passes -------------------------------------------------------------------

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(roots: Sequence[Tensor], *args: Any, **kw: Any) -> Any:
            if any(isinstance(root, FakeTensor | FunctionalTensor) for root in roots):
                return original(roots, *args, **kw)  # a compiler traces
            # The fourth of the engine's arguments after the roots are the inputs, none for all.
            inputs = args[3] if len(args) > 3 else kw.get("inputs")
            try:
                with self.passing(roots, inputs or ()) as scan:
                    if self.depth == 0:
                        self._begin(roots, scan)
                    self.depth += 1
                    try:
                        return original(roots, *args, **kw)
                    finally:
                        self.depth -= 1
            finally:
                if self.depth == 0:
                    self._end()

        return run

    def _begin(self, roots: Sequence[Tensor], scan: graph.Scan | None) -> None:
        if self._stepping and not self._evaluates:
            # No step is running: the last one raised.
            self._stepping.clear()
            self.in_use = 0
        self._reached.clear()
        self.observe()
        self.chain, self.scan = graph.Chain(), graph.Scan()
        if self._recorder.looking:
            self.chain, self.scan = graph.chain(roots), scan or graph.scan(roots)
            self.accumulating = any(gradient.fresh and gradient.marks != EMPTY for gradient in self.gradients)
            if self.chain.marks and self.chain.plain:
                marks: Marks = frozenset(self.chain.marks)
                source = user_line()
                self._recorder.emit_once(
                    ("mixed loss", source), lambda: MixedLoss(source=source, scale=self.scale_of(marks))
                )
        for listener in self.on_backward:
            listener(roots)

    def _end(self) -> None:
        marks = self._marks()
        for gradient in self._gradients.values():
            gradient.observe(marks)
        self.open |= bool(self._reached)
        for listener in self.on_backward:
            listener(None)

    def _note_open(self) -> None:
        self.open = self.open and any(g.scaled and not g.consumed for g in self._gradients.values())

    def _marks(self) -> Marks:
        return frozenset(self._reached) if self._reached else PLAIN

    def observe(self) -> None:
        """Look which gradients were changed by hand since the last look."""
        self.before_observing()
        touched = False
        for gradient in self._gradients.values():
            scaled = gradient.scaled
            touched |= gradient.observe(None) and scaled
        # Only a close look can tell whether what was done to them matters.
        self._recorder.look_soon |= touched

    def replay_ran(self) -> None:
        """A CUDA graph was replayed: gradients may have changed without a trace."""
        for gradient in self._gradients.values():
            gradient.marks = None
            gradient.fresh = True

    # ---- scalers ---------------------------------------------------------------------------

    def _around_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if not _enabled(scaler):
                return scaled
            known = self.scaler(scaler)
            known.used = True
            known.scaled_at = user_line()
            mark = known.mark
            if known.skipped and isinstance(outputs, Tensor):
                # The step before was skipped, for which the scaler has waited for the device already.
                finite = bool(torch.isfinite(outputs.detach()).all())
                known.bad_losses = 0 if finite else known.bad_losses + 1
            for tensor in _tensors(scaled):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    node: Any = tensor.grad_fn
                    node.metadata[graph.MARK] = mark
                    tensor.register_hook(lambda _, mark=mark: self._reach(mark))  # type: ignore[no-untyped-call]
            return scaled

        return scale

    def _reach(self, mark: Mark) -> None:
        if self.depth:
            self._reached.add(mark)
        self._scale_seen = True

    def _around_unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_(scaler: Any, optimizer: Optimizer) -> None:
            if not _enabled(scaler):
                original(scaler, optimizer)
                return
            self.adopt(optimizer)
            self.observe()
            self._judge_division(scaler, optimizer)
            with self._at_work():
                self._explained("unscale_", optimizer, original, scaler, optimizer)
            mark = self.scaler(scaler).mark
            for gradient in self.of(optimizer):
                if gradient.reference is not None:
                    gradient.marks, gradient.divided = PLAIN, mark
            self._note_open()

        return unscale_

    def _around_scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kw: Any) -> Any:
            if not _enabled(scaler):
                return original(scaler, optimizer, *args, **kw)
            self.adopt(optimizer)
            known = self.scaler(scaler)
            self._scaler_step, self._ran = (scaler, optimizer), False
            fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
            try:
                with self._at_work():
                    result = self._explained("step", optimizer, original, scaler, optimizer, *args, **kw)
            finally:
                self._scaler_step = None
            skipped = None if fused else not self._ran
            if skipped is not None:
                known.skipped = known.skipped + 1 if skipped else 0
                if not skipped:
                    known.bad_losses = 0
            known.stepped[id(optimizer)] = type(optimizer).__name__
            self._consumed(optimizer, skipped)
            self._told(Stepped(optimizer, skipped, scaler, plain=False))
            return result

        return step

    def _around_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: Any, *args: Any, **kw: Any) -> None:
            if not _enabled(scaler):
                original(scaler, *args, **kw)
                return
            known = self.scaler(scaler)
            left = any(
                gradient.marks is not None and known.mark in gradient.marks and not gradient.consumed
                for gradient in self._gradients.values()
            )
            known.previous = scaler._scale.clone() if left and scaler._scale is not None else None
            self._explained("update", None, original, scaler, *args, **kw)
            known.generation += 1
            known.stepped_before, known.stepped = known.stepped, {}
            if known.skipped >= MANY_SKIPS:
                self._judge_history(scaler, known)

        return update

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(scaler: Any, *args: Any, **kw: Any) -> None:
            original(scaler, *args, **kw)
            self.scaler(scaler).loaded = True

        return load_state_dict

    def judge_scale(self, scaler: Any, scale: float) -> None:
        """Judge a scale where steps are skipped on the device, as fused optimizers do."""
        known = self.scaler(scaler)
        if known.skipped < MANY_SKIPS and scale < 1:
            self._judge_history(scaler, known)

    def _judge_history(self, scaler: Any, known: Scaler) -> None:
        scale = _scale(scaler)
        bad = known.bad_losses >= MANY_SKIPS - 1
        if bad or scale < 1:
            self._recorder.look_soon = True
            self._recorder.emit(
                ScaleHistory(
                    source=known.scaled_at,
                    scale=scale,
                    skipped=known.skipped,
                    loss_finite=False if bad else None,
                )
            )

    def _judge_division(self, scaler: Any, optimizer: Optimizer) -> None:
        known = self.scaler(scaler)
        kinds: dict[str, int] = {}
        carried: Mark | None = None
        used = [gradient for gradient in self.of(optimizer) if gradient.reference is not None]
        if used and all(gradient.consumed and not gradient.fresh for gradient in used):
            self._repeated(optimizer, scaler=True)
            return
        for gradient in used:
            marks = gradient.marks
            if not marks or marks == {known.mark} or (gradient.consumed and not gradient.fresh):
                continue
            if None in marks:
                kind = "mixed" if len(marks) > 1 else "again" if gradient.divided else "plain"
            elif len(marks) > 1:
                kind = "generations"
            else:
                kind = "older"
                (carried,) = marks
            kinds[kind] = kinds.get(kind, 0) + 1
        source = user_line()
        name = type(optimizer).__name__
        other = next((n for key, n in known.stepped_before.items() if key != id(optimizer)), "")
        for kind, count in kinds.items():
            own = carried is not None and carried[0] == known.number
            previous = known.previous if kind == "older" and own else None

            def event(
                kind: str = kind, count: int = count, previous: Tensor | None = previous
            ) -> WrongDivision:
                return WrongDivision(
                    source=source,
                    module=name,
                    kind=kind,
                    scale=_scale(scaler),
                    carried=None if previous is None else float(previous),
                    other=other if kind == "older" else "",
                    parameters=count,
                )

            if kind == "older":
                # Whether the scale has changed decides how bad it is, each time.
                self._recorder.emit(event())
            else:
                self._recorder.emit_once((kind, source, name), event)

    def _explained(
        self, method: str, optimizer: Optimizer | None, original: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """Call the original; where it raises, say why before it does."""
        try:
            return original(*args, **kw)
        except (RuntimeError, ValueError, AssertionError) as error:
            weights = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
            self._recorder.emit(
                ScalerRefused(
                    source=user_line(),
                    method=method,
                    error=str(error),
                    half_weights=sum(weight.dtype == torch.float16 for weight in weights),
                    weights=len(weights),
                )
            )
            raise

    # ---- optimizers ------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kw: Any) -> tuple[Any, Any] | None:
        if optimizer in self._stepping:
            self._stepping.clear()  # its last step raised
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return None  # an optimizer inside another one
        self._evaluates = False
        self._ran = True
        self.adopt(optimizer)
        closure = kw.get("closure") if "closure" in kw else args[1] if len(args) > 1 else None
        if not callable(closure):
            self._judge_step(optimizer)
            self.in_use += 1
            return None
        self._evaluates = True
        judged = False

        def evaluate() -> Any:
            nonlocal judged
            value = closure()
            if not judged:
                judged = True
                self._judge_step(optimizer)
            return value

        if "closure" in kw:
            return args, {**kw, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kw

    def _after_step(self, optimizer: Optimizer, args: Any, kw: Any) -> None:
        if optimizer not in self._stepping:
            return
        outermost = self._stepping[0] is optimizer
        del self._stepping[self._stepping.index(optimizer) :]
        if not outermost:
            return
        closure = kw.get("closure") if "closure" in kw else args[1] if len(args) > 1 else None
        if not callable(closure):
            self.in_use = max(0, self.in_use - 1)
        if self._scaler_step is not None and self._scaler_step[1] is optimizer:
            return  # the scaler's own step ends after it
        plain = not self._scale_seen and all(
            gradient.marks == PLAIN for gradient in self.of(optimizer) if gradient.reference is not None
        )
        self._consumed(optimizer, skipped=False)
        self._told(Stepped(optimizer, False, None, plain))

    def _judge_step(self, optimizer: Optimizer) -> None:
        self._judge_marks(optimizer)
        if getattr(optimizer, "grad_scale", None) is None:
            for listener in self.on_stepping:
                listener(optimizer)

    def _judge_marks(self, optimizer: Optimizer) -> None:
        divides = getattr(optimizer, "grad_scale", None) is not None
        if self.depth:  # an optimizer that steps within the backward pass
            marks = self._marks()
            for gradient in self.of(optimizer):
                gradient.observe(marks)
        elif self._scaler_step is None or divides:
            self.observe()
        if self._scaler_step is not None:
            scaler = self._scaler_step[0]
            if divides:
                self._judge_division(scaler, optimizer)
                for gradient in self.of(optimizer):
                    if gradient.reference is not None:
                        gradient.marks, gradient.divided = PLAIN, self.scaler(scaler).mark
            return
        if divides:
            return  # it unscales by itself
        used = [gradient for gradient in self.of(optimizer) if gradient.reference is not None]
        if used and all(gradient.consumed and not gradient.fresh for gradient in used):
            self._repeated(optimizer, scaler=False)
            return
        scaled = [gradient for gradient in used if gradient.scaled and not gradient.consumed]
        if not scaled:
            return
        source, name = user_line(), type(optimizer).__name__
        marks = frozenset().union(*(gradient.marks or () for gradient in scaled))
        if None in marks:
            self._recorder.emit_once(
                ("mixed", source, name),
                lambda: WrongDivision(
                    source=source,
                    module=name,
                    kind="mixed",
                    scale=self.scale_of(marks),
                    parameters=len(scaled),
                ),
            )
            return
        group = optimizer.param_groups[0]
        self._recorder.emit_once(
            ("scaled step", source, name),
            lambda: ScaledStep(
                source=source,
                module=name,
                scale=self.scale_of(marks),
                lr=_number(group.get("lr")),
                eps=_number(group.get("eps")),
                weight_decay=_number(group.get("weight_decay")),
                adaptive=name.startswith(_ADAPTIVE),
            ),
        )

    def _repeated(self, optimizer: Optimizer, scaler: bool) -> None:
        self._recorder.emit(
            RepeatedStep(
                source=user_line(),
                module=type(optimizer).__name__,
                skipped=self._skipped_last.get(optimizer, False),
                scaler=scaler,
            )
        )

    def _consumed(self, optimizer: Optimizer, skipped: bool | None) -> None:
        self._skipped_last[optimizer] = bool(skipped)
        region = self.region()
        for gradient in self.of(optimizer):
            if gradient.reference is None:
                continue
            if not self.depth:
                # Whatever the optimizer did to it is no news.
                gradient.accept(gradient.marks)
            gradient.fresh = False
            gradient.consumed = True
            if region and not skipped:
                gradient.stepped_in = region
        self._note_open()

    def _told(self, stepped: Stepped) -> None:
        self._scale_seen = False
        for listener in self.on_stepped:
            listener(stepped)

    def _around_add_param_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_param_group(optimizer: Optimizer, *args: Any, **kw: Any) -> None:
            original(optimizer, *args, **kw)
            if not self._ignoring:
                self.adopt(optimizer)

        return add_param_group

    def _around_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            with self._at_work():
                original(owner, set_to_none)
            if set_to_none:
                return  # that there is no gradient will be seen
            parameters: Iterable[Tensor] = (
                (p for group in owner.param_groups for p in group["params"])
                if isinstance(owner, Optimizer)
                else owner.parameters()
            )
            for parameter in parameters:
                known = self._gradients.get(id(parameter))
                if known is not None:
                    known.accept(EMPTY)
                    known.fresh = known.consumed = False
                    known.divided = None
            self._note_open()

        return zero_grad

    def _around_clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kw: Any) -> None:
            if not self.open:
                # What is done to gradients without a scale is the user's business.
                original(parameters, max_norm, total_norm, *args, **kw)
                return
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.observe()
            known = [g for p in parameters if (g := self._gradients.get(id(p))) is not None]
            scaled = [gradient for gradient in known if gradient.scaled and not gradient.consumed]
            if scaled:
                source = user_line()
                marks = scaled[0].marks
                self._recorder.emit_once(
                    ("clip", source),
                    lambda: GradientsClipped(
                        source=source, limit=float(max_norm), scale=self.scale_of(marks)
                    ),
                )
            with self._at_work():
                original(parameters, max_norm, total_norm, *args, **kw)
            for gradient in known:
                if gradient.reference is not None:
                    gradient.accept(gradient.marks)

        return clip

    def _at_work(self) -> _AtWork:
        return _AtWork(self)


def unseen(roots: Sequence[Any], inputs: Sequence[Any]) -> AbstractContextManager[graph.Scan | None]:
    """Nobody looks at backward passes."""
    return nullcontext()


class _AtWork:
    """While it is entered, writes to gradients are an optimizer's or a scaler's own."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        self._ledger.in_use += 1

    def __exit__(self, *_: object) -> None:
        self._ledger.in_use = max(0, self._ledger.in_use - 1)


def _enabled(scaler: Any) -> bool:
    return bool(scaler._enabled) and not torch.compiler.is_compiling()


def _scale(scaler: Any) -> float:
    """The scale; waits for the device."""
    return float(scaler.get_scale())


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | Tensor) else None


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples; an iterator is left alone, as it can be read once only."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _tensors(output)
