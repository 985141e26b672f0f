"""A close look at one step: every operation that PyTorch runs passes by the observers.

A dispatch mode sees operations below autograd and autocast, so with the element types they really run in. It
is pushed when a step ends and popped when the next one does. It changes nothing: every operation runs as it
is.

A step is hundreds of operations, and the host's time is what most of them cost. So an operation that nobody
looks at in its phase is counted, and nothing else is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tilefit.precision.ledger import Ledger
from tilefit.precision.lines import user_line
from tilefit.precision.statistics import Statistics

HALF = (torch.float16, torch.bfloat16)

#: When an operation runs: outside of backward passes, while no gradient carries a scale or while some do;
#: within one; and within one in a module, which activation checkpointing runs again.
FORWARD, OPEN, BACKWARD, RECOMPUTED = PHASES = range(4)


class Call:
    """One operation that has run.

    Attributes:
        func: The ATen overload.
        name: Its name without namespace and overload: ``mm``.
        args, kwargs, out: What went in and what came out.
        backward: It ran within a backward pass.
        look: The step's close look.
    """

    __slots__ = ("args", "backward", "func", "kwargs", "look", "name", "out")

    def __init__(
        self,
        look: Look,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        backward: bool,
    ) -> None:
        self.look = look
        self.func = func
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.backward = backward
        self.out: Any = None

    @property
    def source(self) -> str:
        """The user's line; of a backward operation that of the forward one, if it is known."""
        if self.backward:
            node = torch._C._current_autograd_node()
            line = self.look.line_of(node._sequence_nr()) if node is not None else ""
            return line or user_line()
        return user_line()

    @property
    def module(self) -> str:
        """The innermost module that is running, or empty."""
        return self.look.module

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return [*tensors_in(self.args), *tensors_in(tuple(self.kwargs.values()))]


class Observer:
    """Looks at operations. ``wants`` is asked once per operation; the rest is called for those wanted.

    Attributes:
        phases: The phases it looks at operations in.
    """

    phases: ClassVar[Iterable[int]] = PHASES

    def wants(self, func: Any, name: str) -> bool:
        """Whether operations of this kind matter."""
        raise NotImplementedError

    def before(self, call: Call) -> None:
        """The operation is about to run."""

    def after(self, call: Call) -> None:
        """It has run."""

    def end(self) -> None:
        """The step is over: read what was collected. Waiting for the device is allowed here."""


#: What runs an operation, its name, what is called before and after it, and how often it had which element
#: type.
_Plan = tuple[
    Callable[..., Any],
    str,
    tuple[Callable[[Call], None], ...],
    tuple[Callable[[Call], None], ...],
    Counter[torch.dtype],
]


class Observers:
    """Who looks at operations, and what was found out about each operation.

    Args:
        statistics: Where operations are counted.
        observers: Who looks.
    """

    def __init__(self, statistics: Statistics, observers: Iterable[Observer]) -> None:
        self._statistics = statistics
        self._observers = tuple(observers)
        #: By phase and by ``id`` of the operation: these live on, and their own hash is computed in Python.
        self.plans: tuple[dict[int, _Plan], ...] = tuple({} for _ in PHASES)

    def plan(self, func: Any, phase: int) -> _Plan:
        """Whom to call for an operation that runs in a phase for the first time."""
        name = func._schema.name.rpartition("::")[2]
        wanted = [o for o in self._observers if phase in o.phases and o.wants(func, name)]
        before = [observer.before for observer in wanted if type(observer).before is not Observer.before]
        counts = self._statistics.of(name, phase >= BACKWARD)
        plan = func._op, name, tuple(before), tuple(observer.after for observer in wanted), counts
        self.plans[phase][id(func)] = plan
        return plan

    def end(self) -> None:
        """The step is over."""
        for observer in self._observers:
            observer.end()


class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode of a close look.

    Args:
        ledger: Knows whether a backward pass runs.
        observers: Who looks.
        all_lines: Remember the line of every forward operation, not only of half-precision scalars.
        names, parameter_names: Names of modules and of parameters by ``id``; what is not in them is named
            when it runs.
    """

    def __init__(
        self,
        ledger: Ledger,
        observers: Observers,
        names: dict[int, str],
        parameter_names: dict[int, str],
        *,
        all_lines: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._observers = observers
        self._plans = observers.plans
        self._all_lines = all_lines
        self._names = names
        self._parameter_names = parameter_names
        self._lines: dict[int, str] = {}
        self._modules: list[nn.Module] = []
        self._handles: list[Any] = []
        self._paused = False
        #: While a CUDA graph is captured nothing may be read.
        self._capturing = _is_capturing()
        self.on_module: list[Callable[[nn.Module, str, Any], None]] = []

    # ---- entering and leaving --------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: what torch wraps around every call, to keep the compiler out, takes longer than the call."""
        return False

    @staticmethod
    def possible() -> bool:
        """Whether a mode can be pushed: not below one of the user's, who would then pop ours."""
        return not _get_current_dispatch_mode_stack()

    def begin(self) -> None:
        """Push the mode."""
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._entered),
            nn_module.register_module_forward_hook(self._left, always_call=True),
        ]
        self.__enter__()  # type: ignore[no-untyped-call]

    def finish(self) -> bool:
        """Pop the mode and let the observers read what they collected.

        Returns:
            False where something of the user's lies above the mode: it then stays, and does nothing.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._paused = True
        stack = _get_current_dispatch_mode_stack()
        popped = bool(stack) and stack[-1] is self
        if popped:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._observers.end()
        return popped

    # ---- modules and lines -----------------------------------------------------------------

    @property
    def module(self) -> str:
        """The innermost module that is running, or empty."""
        return self._names.get(id(self._modules[-1]), "") if self._modules else ""

    @property
    def running(self) -> nn.Module | None:
        """The innermost module that is running."""
        return self._modules[-1] if self._modules else None

    @property
    def recomputes(self) -> bool:
        """A module runs within a backward pass: activation checkpointing."""
        return self._ledger.depth > 0 and bool(self._modules)

    def line_of(self, sequence: int) -> str:
        """The line of the forward operation with an autograd sequence number, or empty."""
        return self._lines.get(sequence, "")

    def _entered(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            for name, inner in module.named_modules():
                self._names.setdefault(id(inner), name or type(module).__name__)
            for name, parameter in module.named_parameters():
                self._parameter_names.setdefault(id(parameter), name)
        self._modules.append(module)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._modules
        if running and running[-1] is module:
            running.pop()
        elif module in running:
            while running.pop() is not module:
                pass
        for listener in self.on_module:
            listener(module, self._names.get(id(module), ""), output)

    # ---- operations ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        ledger = self._ledger
        if ledger.depth:
            phase = RECOMPUTED if self._modules else BACKWARD
        else:
            phase = OPEN if ledger.open else FORWARD
        plan = self._plans[phase].get(id(func))
        if plan is None:
            plan = self._observers.plan(func, phase)
        run, name, before, after, counts = plan
        call = None
        if after:
            if self._capturing():
                return func(*args, **kwargs)
            call = Call(self, func, name, args, kwargs, phase >= BACKWARD)
            for look_before in before:
                look_before(call)
        out = run(*args, **kwargs)
        half_scalar = False
        if type(out) is Tensor:
            dtype = out.dtype
            counts[dtype] += 1
            half_scalar = dtype in HALF and out.numel() == 1
        elif (first := _first(out)) is not None:
            counts[first.dtype] += 1
        # A loss may be computed in half precision, and the line is asked for where it is.
        if phase < BACKWARD and (half_scalar or self._all_lines) and torch.is_grad_enabled():
            self._lines.setdefault(torch.autograd._get_sequence_nr() - 1, user_line())  # type: ignore[attr-defined]
        if call is not None:
            call.out = out
            for look_after in after:
                look_after(call)
        return out


# The same once and for all: neither this function nor what it calls is compiled.
set_code_exec_strategy(
    Look.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
)


def _is_capturing() -> Callable[[], bool]:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.is_current_stream_capturing
    return lambda: False


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values and in lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def mutated(func: Any) -> tuple[int, ...]:
    """Positions of the arguments an operation writes to."""
    return tuple(
        index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is just that: it has values, dense ones, and is of no subclass that stands for "
    "more."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def sampled(tensor: Tensor, most: int) -> Tensor:
    """About ``most`` elements, evenly spread over memory; a view, except of unusual layouts."""
    number = tensor.numel()
    step = max(1, number // most)
    dense = tensor.is_contiguous() or (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    # One operation, of which there is one for every gradient. Below autograd there is nothing to detach from.
    return tensor.as_strided((-(-number // step),), (step,)) if dense else tensor.reshape(-1)[::step]


def _first(out: Any) -> Tensor | None:
    """The first tensor among what an operation returns."""
    if isinstance(out, Tensor):
        return out
    if isinstance(out, tuple | list):
        return next((item for item in out if isinstance(item, Tensor)), None)
    return None
