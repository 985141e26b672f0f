"""A close look at one step: every operation that PyTorch runs passes by the observers.

A dispatch mode sees operations below autograd and autocast, so with the element types they really run in. It
is pushed when a step ends and popped when the next one does. It changes nothing: every operation runs as it
is.

Within a backward pass it is off, except for what is not the engine's own: Functions of the user's, and
modules that activation checkpointing runs again. What else a backward pass does is told by hooks on those
nodes of its graph that matter.

A step is hundreds of operations, and the host's time is what most of them cost. So an operation that nobody
looks at in its phase is counted, and nothing else is done.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from tilefit.emulation.device import Device
from tilefit.emulation.values import Schema
from tilefit.precision import graph
from tilefit.precision.ledger import Hooked, Hooks, Ledger, Running, capturing, has_hooks
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches
from tilefit.precision.recorder import Recorder
from tilefit.precision.tensors import HALF, name_of, tensors_in
from tilefit.report.watched import Table

#: When an operation runs: outside of backward passes, while no gradient carries a scale or while some do, or
#: as part of an optimizer of PyTorch's or the like; within one; and within one in a module, which activation
#: checkpointing runs again.
FORWARD, OPEN, LIBRARY, BACKWARD, RECOMPUTED = PHASES = range(5)
#: What operations are counted under; within a backward pass the nodes of the graph are counted instead.
_COUNTED = {FORWARD: "forward", OPEN: "forward", LIBRARY: "forward", RECOMPUTED: "recomputed"}


@dataclass(slots=True)
class Call:
    """One operation that has run.

    Attributes:
        func: The ATen overload.
        name: Its name without namespace and overload: ``mm``.
        args, kwargs, out: What went in and what came out.
        backward: It ran within a backward pass.
        look: The step's close look.
    """

    look: Look
    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    backward: bool
    out: Any = None

    @property
    def source(self) -> str:
        """The user's line; of a backward operation that of the forward one, if it is known."""
        if self.backward:
            node = torch._C._current_autograd_node()
            return (node is not None and self.look.lines.get(node._sequence_nr())) or user_line()
        return user_line()

    @property
    def module(self) -> str:
        """The innermost module that is running, or empty."""
        return self.look.names.get(id(self.look.running), "")

    @property
    def targets(self) -> list[Tensor]:
        """The tensors it writes to."""
        return list(Schema.of(self.func).written(self.args, self.kwargs))

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        found = tensors_in(self.args)
        return found + tensors_in(self.kwargs.values()) if self.kwargs else found


class Observer:
    """Looks at operations, and at the nodes of the graphs that backward passes go through.

    ``wants`` is asked once per operation, ``wants_node`` once per kind; the rest is called for those wanted.

    Attributes:
        phases: The phases it looks at operations in.
    """

    phases: ClassVar[Iterable[int]] = PHASES

    def wants(self, func: Any, name: str) -> bool:
        """Whether operations of this kind matter."""
        return False

    def wants_node(self, node: Any, kind: graph.Kind) -> bool:
        """Whether nodes of this kind matter."""
        return False

    def hook(self, node: Any) -> RemovableHandle | None:
        """A backward pass is about to begin that goes through a node, which may be hooked until it ends.

        The hook must not hold the node: it is held by it. It may be called on another thread.
        """
        return None

    def before(self, call: Call) -> None:
        """The operation is about to run."""

    def after(self, call: Call) -> None:
        """It has run."""

    def met(self, model: nn.Module) -> None:
        """A module begins to run outside of any other, for the first time in the step."""

    def ran(self, module: nn.Module, name: str, output: Any) -> None:
        """A module has run."""

    def end(self) -> None:
        """The step is over: read what was collected. Waiting for the device is allowed here."""


class Statistics:
    """Counts operations by the element type of their first result, and the nodes that whole backward passes
    go through by that of the gradient given to them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Counter[torch.dtype]] = {}

    def of(self, name: str, phase: str) -> Counter[torch.dtype]:
        """Where the operations of a name that run in a phase are counted: ``forward``, ``recomputed``, or
        ``backward`` for nodes of the autograd graph."""
        return self._counts.setdefault((name, phase), Counter())

    def passed(self, nodes: Mapping[graph.Kind, int]) -> None:
        """Count the nodes that a backward pass went through, by name and element type."""
        for (name, dtype), count in nodes.items():
            if dtype is not None:
                self.of(name.rpartition("::")[2], "backward")[dtype] += count

    def table(self) -> Table:
        """The floating-point operations, the most frequent first; no rows where none was seen."""
        rows = {
            key: {name_of(dtype): number for dtype, number in counts.items() if dtype.is_floating_point}
            for key, counts in self._counts.items()
        }
        types = sorted({dtype for row in rows.values() for dtype in row})
        ordered = sorted(filter(rows.get, rows), key=lambda key: -sum(rows[key].values()))
        title = (
            "Operations by element type, on the steps looked at closely; of whole backward passes, nodes of "
            "the autograd graph by the gradient given to them"
        )
        shown = tuple((*key, *(str(rows[key].get(dtype, "")) for dtype in types)) for key in ordered)
        return Table(title, ("operation", "phase", *types), shown)


_Listeners = tuple[Callable[[Call], None], ...]
#: What runs an operation, its name, what is called before and after it, and how often it had which element
#: type.
_Plan = tuple[Callable[..., Any], str, _Listeners, _Listeners, Counter[torch.dtype]]


class Observers:
    """Who looks at operations, and what was found out about each operation.

    Args:
        statistics: Where operations are counted.
        observers: Who looks.
    """

    def __init__(self, statistics: Statistics, observers: Iterable[Observer]) -> None:
        self.statistics = statistics
        self.all = tuple(observers)
        self.ran = [observer.ran for observer in self.all if type(observer).ran is not Observer.ran]
        #: By phase and by ``id`` of the operation: these live on, and their own hash is computed in Python.
        self.plans: tuple[dict[int, _Plan], ...] = tuple({} for _ in PHASES)
        #: Who hooks the nodes of a kind.
        self.hooks: dict[graph.Kind, list[Observer]] = {}

    def plan(self, func: Any, phase: int) -> _Plan:
        """Whom to call for an operation that runs in a phase for the first time."""
        name = func._schema.name.rpartition("::")[2]
        wanted = [one for one in self.all if phase in one.phases and one.wants(func, name)]
        before = tuple(one.before for one in wanted if type(one).before is not Observer.before)
        after = tuple(one.after for one in wanted)
        counts = self.statistics.of(name, _COUNTED[phase]) if phase in _COUNTED else Counter()
        plan = self.plans[phase][id(func)] = (func._op, name, before, after, counts)
        return plan

    def hook(self, ends: ExitStack, node: Any, kind: graph.Kind) -> None:
        """Have a node hooked, up to some end, by those that want its kind."""
        if kind not in self.hooks:
            self.hooks[kind] = [observer for observer in self.all if observer.wants_node(node, kind)]
        for observer in self.hooks[kind]:
            if (handle := observer.hook(node)) is not None:
                ends.callback(handle.remove)


class _Running(threading.local):
    """What runs on a thread: autograd has threads of its own, and checkpointing runs modules there.

    Attributes:
        modules: The modules that run, one inside another.
        pushed: The mode was pushed for the outermost of them, within a backward pass.
        hook: A hook on a parameter's gradient runs.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.pushed = False
        self.hook = False


class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode of a close look.

    Args:
        recorder: Knows names.
        ledger: Knows whether a backward pass runs.
        observers: Who looks.
        thorough: Stay on in backward passes, and remember the line of every forward operation, not only of
            half-precision scalars.

    Attributes:
        names: Of modules, by ``id``.
        lines: The lines of forward operations, by autograd's number of each.
        thread: The thread that is looked at.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger, observers: Observers, *, thorough: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._ledger, self._observers = recorder, ledger, observers
        self._thorough, self.names = thorough, recorder.names
        self.lines: dict[int, str] = {}
        self._running = _Running()
        self._ends = ExitStack()
        self._paused = False
        self.thread = threading.get_ident()
        self._met: set[int] = set()

    # ---- entering and leaving --------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: what torch wraps around every call, to keep the compiler out, takes longer than the call."""
        return False

    @staticmethod
    def possible() -> bool:
        """Whether a mode can be pushed: not above one of the user's, who would then pop ours."""
        return all(isinstance(mode, Device) for mode in _get_current_dispatch_mode_stack())

    def begin(self) -> None:
        """Push the mode. No backward pass may be running."""
        self._ends.enter_context(nn_module.register_module_forward_pre_hook(self._entered))
        self._ends.enter_context(nn_module.register_module_forward_hook(self._left, always_call=True))
        self._ends.enter_context(Patches().applied((BackwardCFunction, "apply", self._function)))
        self._ledger.look = self
        self.switch_on()

    def finish(self) -> bool:
        """Pop the mode and let the observers read what they collected.

        Returns:
            False where something of the user's lies above the mode: it then stays, and does nothing.
        """
        self._ends.close()
        self._ledger.look = None
        self._paused = True
        self._switch_off()
        popped = self not in _get_current_dispatch_mode_stack()
        for observer in self._observers.all if popped else ():
            observer.end()
        return popped

    def switch_on(self) -> bool:
        """Push the mode where it is not on; whether that was so."""
        if self._paused or self in _get_current_dispatch_mode_stack():
            return False
        self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def _switch_off(self) -> bool:
        """Pop the mode where it is on, with nothing above it; whether that was so."""
        on_top = _get_current_dispatch_mode_stack()[-1:] == [self]
        if on_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return on_top

    # ---- modules and lines -----------------------------------------------------------------

    @property
    def running(self) -> nn.Module | None:
        """The innermost module that is running."""
        modules = self._running.modules
        return modules[-1] if modules else None

    @property
    def recomputes(self) -> bool:
        """A module runs within a backward pass: activation checkpointing."""
        return _in_backward() and bool(self._running.modules)

    def _entered(self, module: nn.Module, args: Any) -> None:
        running, outside = self._running, not self._running.modules
        if id(module) not in self.names or (outside and id(module) not in self._met):
            if outside and not _in_backward():
                self._met.add(id(module))
                for observer in self._observers.all:
                    observer.met(module)
            self._recorder.name(module)
        if outside and _in_backward():
            running.pushed = self.switch_on()
        running.modules.append(module)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._running
        modules = running.modules
        while module in modules and modules.pop() is not module:
            pass  # it has raised
        if running.pushed and not modules:
            running.pushed = False
            self._switch_off()
        for listener in self._observers.ran:
            listener(module, self.names.get(id(module), ""), output)

    # ---- backward passes -------------------------------------------------------------------

    @contextmanager
    def passing(self, roots: Sequence[Any], inputs: Sequence[Any]) -> Iterator[graph.Scan]:
        """Around a backward pass: the mode is off, and the nodes that matter are hooked.

        Args:
            roots: Where it starts.
            inputs: What it goes to alone, so not through all of the graph; none for all.

        Yields:
            What the graph says.
        """
        running = self._running
        outer = running.modules, running.pushed
        running.modules, running.pushed = [], False
        off = not self._thorough and self._switch_off()
        try:
            with ExitStack() as ends:
                self._hook_parameters(ends)
                # Nothing may be read while a CUDA graph is captured.
                hook = partial(self._observers.hook, ends)
                scan = graph.scan(roots) if capturing() else graph.scan(roots, inputs, graph.MOST, hook)
                yield scan
                if not inputs:
                    self._observers.statistics.passed(scan.nodes)
        finally:
            running.modules, running.pushed = outer
            if off:
                while self._switch_off():
                    pass  # where a module or a Function raised
                self.switch_on()

    @contextmanager
    def _on(self) -> Iterator[None]:
        """Within the block the mode is on."""
        pushed = self.switch_on()
        try:
            yield
        finally:
            if pushed:
                self._switch_off()

    def _function(self, node: Any, *args: Any) -> Running:
        """What a Function of the user's does going backward is seen as operations."""
        if function_of(node) is not None:
            with self._on():
                yield

    def _hook_parameters(self, ends: ExitStack) -> None:
        """Have the user's hooks on gradients seen as operations."""
        for parameter in filter(has_hooks, self._ledger.parameters):
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                reference, replaced = weakref.ref(parameter), hooks or {}
                for key, hook in list(replaced.items()):
                    replaced[key] = partial(self._run_hook, hook, reference)
                    ends.callback(_put_back, replaced, key, hook)

    def _run_hook(
        self, hook: Callable[[Any], Any], reference: Callable[[], Tensor | None], value: Tensor
    ) -> Any:
        parameter = reference()
        gradient = value.grad if parameter is value else value
        if parameter is None or gradient is None or self._running.hook:
            return hook(value)
        self._running.hook = True
        try:
            with self._on():
                self._recorder.tell(Hooks(parameter, gradient))
                result = hook(value)
                self._recorder.tell(Hooked(parameter, gradient, result if gradient is value else gradient))
                return result
        finally:
            self._running.hook = False

    # ---- operations ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if _in_backward() and not self._running.hook:
            phase = RECOMPUTED if self._running.modules else BACKWARD
        elif self._ledger.here.librarys:
            phase = LIBRARY
        else:
            phase = OPEN if self._running.hook or self._ledger.here.open else FORWARD
        plan = self._observers.plans[phase].get(id(func))
        if plan is None:
            plan = self._observers.plan(func, phase)
        run, name, before, after, counts = plan
        call = None
        if after:
            if capturing():  # nothing may be read
                return func(*args, **kwargs)
            call = Call(self, func, name, args, kwargs, phase >= BACKWARD)
            for look_before in before:
                look_before(call)
        out = run(*args, **kwargs)
        half_scalar = False
        first = out if type(out) is Tensor else next(iter(tensors_in((out,))), None)
        if first is not None:
            counts[first.dtype] += 1
            half_scalar = first is out and first.dtype in HALF and first.numel() == 1
        # A loss may be computed in half precision, and the line is asked for where it is.
        if phase < BACKWARD and (half_scalar or self._thorough) and torch.is_grad_enabled():
            self.lines.setdefault(torch.autograd._get_sequence_nr() - 1, user_line())  # type: ignore[attr-defined]
        if call is not None:
            call.out = out
            for look_after in after:
                look_after(call)
        return out


# The same once and for all: neither this function nor what it calls is compiled.
set_code_exec_strategy(
    Look.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
)


def _put_back(hooks: dict[Any, Any], key: Any, hook: Any) -> None:
    if key in hooks:  # the user may have removed it
        hooks[key] = hook


def _in_backward() -> bool:
    """Whether the engine runs a node on this thread; on another one a backward pass may run meanwhile."""
    return bool(torch._C._current_graph_task_id() != -1)


def function_of(node: Any) -> type | None:
    """The Function of the user's that a node of the graph is of; None for all other nodes."""
    function: type | None = getattr(node, "_forward_cls", None)
    return None if function is None or function.__module__.startswith("torch.") else function
