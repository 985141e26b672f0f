"""A close look at one step: every operation that PyTorch runs passes by the observers.

A dispatch mode sees operations below autograd and autocast, so with the element types they really run in. It
is pushed when a step ends and popped when the next one does. It changes nothing: every operation runs as it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tilefit.precision.ledger import Ledger
from tilefit.precision.lines import user_line


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
    """Looks at operations. ``wants`` is asked once per operation; the rest is called for those wanted."""

    def wants(self, func: Any, name: str) -> bool:
        """Whether operations of this kind matter."""
        raise NotImplementedError

    def before(self, call: Call) -> None:
        """The operation is about to run."""

    def after(self, call: Call) -> None:
        """It has run."""

    def end(self) -> None:
        """The step is over: read what was collected. Waiting for the device is allowed here."""


#: An operation's name, and what is called before and after it.
_Plan = tuple[str, tuple[Callable[[Call], None], ...], tuple[Callable[[Call], None], ...]]


class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode of a close look.

    Args:
        ledger: Knows whether a backward pass runs.
        observers: Who looks.
        all_lines: Remember the line of every forward operation, not only of scalars.
        names, parameter_names: Names of modules and of parameters by ``id``; what is not in them is named
            when it runs.
    """

    def __init__(
        self,
        ledger: Ledger,
        observers: Iterable[Observer],
        names: dict[int, str],
        parameter_names: dict[int, str],
        *,
        all_lines: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._observers = tuple(observers)
        #: By ``id`` of the operation: these live on, and their own hash is computed in Python.
        self._plans: dict[int, _Plan] = {}
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
            for observer in self._observers:
                observer.end()
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
        if module in self._modules:
            while self._modules.pop() is not module:
                pass
        for listener in self.on_module:
            listener(module, self._names.get(id(module), ""), output)

    # ---- operations ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or self._capturing():
            return func(*args, **kwargs)
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._plans[id(func)] = self._plan(func)
        name, before, after = plan
        backward = self._ledger.depth > 0
        call = Call(self, func, name, args, kwargs, backward)
        for look_before in before:
            look_before(call)
        call.out = out = func(*args, **kwargs)
        if not backward and (self._all_lines or _is_scalar(out)) and torch.is_grad_enabled():
            self._lines.setdefault(torch.autograd._get_sequence_nr() - 1, user_line())  # type: ignore[attr-defined]
        for look_after in after:
            look_after(call)
        return out

    def _plan(self, func: Any) -> _Plan:
        name = func._schema.name.rpartition("::")[2]
        wanted = [observer for observer in self._observers if observer.wants(func, name)]
        before = [observer.before for observer in wanted if type(observer).before is not Observer.before]
        return name, tuple(before), tuple(observer.after for observer in wanted)


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


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is just that: it has values, dense ones, and is of no subclass that stands for "
    "more."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
    )


def sampled(tensor: Tensor, most: int) -> Tensor:
    """About ``most`` elements, evenly spread over memory; a view, except of unusual layouts."""
    values, number = tensor.detach(), tensor.numel()
    step = max(1, number // most)
    dense = values.is_contiguous() or (
        values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last)
    )
    # One operation, of which there is one for every gradient.
    return values.as_strided((-(-number // step),), (step,)) if dense else values.reshape(-1)[::step]


def _is_scalar(out: Any) -> bool:
    return isinstance(out, Tensor) and out.numel() == 1
