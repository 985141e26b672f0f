"""What is handed on inside a module, from part to part, and that the module is still the one it was found in.

Which parts hand what to whom is read off the module's ``forward``, traced symbolically in training and in
evaluation mode: a trace has no branches that depend on data or sizes. It does depend on what the module is
made of and on its attributes, and these are compared whenever the module is called: if somebody has replaced
a part, watches one or flipped a flag, the call runs as if nothing had been changed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from types import NoneType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.nn.modules import module as nn_module

from tilefit.fixes.behaviour import OF_CHANGED, OF_MODULES, Behaviour, Changed, behaviours
from tilefit.fixes.calls import is_followed
from tilefit.fixes.region import Region

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FORWARDS = frozenset((NoneType, Changed))
_GLOBAL_HOOKS = (
    nn_module._global_forward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody else sees, and may change, what goes in or out."""
    return any(vars(module)[name] for name in _HOOKS)


# ---- tracing -----------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    # A branch on a buffer stops the trace, as one on a parameter does.
    proxy_buffer_attributes = True

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(m) or has_hooks(m) or super().is_leaf_module(m, module_qualified_name)


def traced(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> tuple[fx.Graph, fx.Graph] | None:
    """A module's ``forward`` in training and in evaluation mode; None where it cannot be traced.

    Nor is anything known of one that takes optional arguments, keeps something in an attribute (a feature,
    which others may read), or asks whether gradients or autocast are on.

    Args:
        module: The module.
        is_leaf: Whether a part is not looked into, besides those of ``torch.nn`` and those with hooks.
    """
    arguments = inspect.signature(module.forward).parameters.values()
    # With a default or a variable number of arguments it may do different things.
    if any(a.default is not a.empty or a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments):
        return None
    parts = list(module.modules())
    modes = [part.training for part in parts]
    kept = [_Attributes.of(part) for part in parts]
    before = [dict(vars(part)) for part in parts]
    graphs = []
    try:
        for mode in (True, False):
            for part in parts:
                part.training = mode
            with _without_switches():
                graphs.append(_Tracer(is_leaf).trace(module))
            if not all(each.are_same() for each in kept):
                return None
    except Exception:  # noqa: BLE001 - whatever stops the tracer, nothing is known of such a module
        return None
    finally:
        for part, mode, attributes, each in zip(parts, modes, before, kept, strict=True):
            vars(part).clear()
            vars(part).update(attributes)
            part.training = mode
            each.restore()
    return graphs[0], graphs[1]


@contextmanager
def _without_switches() -> Iterator[None]:
    """Within the block nobody learns what may be another time."""

    here = threading.get_ident()

    def hidden(ask: Callable[..., bool]) -> Callable[..., bool]:
        def asked(*args: Any) -> bool:
            if threading.get_ident() == here:
                raise RuntimeError("that depends on who calls")
            return ask(*args)

        return asked

    with ExitStack() as stack:
        for name in ("is_grad_enabled", "is_autocast_enabled"):
            stack.enter_context(patch.object(torch, name, hidden(getattr(torch, name))))
        yield


# ---- whether a module is as it was -------------------------------------------------------------


def _contents(value: Any) -> Any:
    """What an attribute's value holds, one level deep, if that can be changed; None otherwise."""
    if isinstance(value, list | dict | set):
        return value
    if isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return None
    return getattr(value, "__dict__", None)


@dataclass(frozen=True, eq=False)
class _Attributes:
    """What a module is made of beyond what every module has, as it was."""

    module: nn.Module
    forward: Any
    size: int
    get: Callable[[Any], Any] | None
    values: Any
    holding: tuple[tuple[Any, Any], ...]
    behaviours: tuple[Behaviour, ...]
    children: tuple[nn.Module | None, ...]

    @classmethod
    def of(cls, module: nn.Module) -> _Attributes:
        attributes = vars(module)
        own = [name for name in attributes if name not in OF_MODULES]
        get = itemgetter(*own) if own else None
        holding = [(v, c.copy()) for v in map(attributes.get, own) if (c := _contents(v)) is not None]
        return cls(
            module,
            type(module).forward,
            len(attributes.keys() - OF_CHANGED),
            get,
            get(attributes) if get else None,
            tuple(holding),
            _acting(module),
            tuple(module._modules.values()),
        )

    def are_same(self) -> bool:
        attributes = vars(self.module)
        forward = attributes.get("forward")
        size = self.size if forward is None else self.size + len(OF_CHANGED)
        if len(attributes) != size or type(forward) not in _FORWARDS:
            return False
        if type(self.module).forward is not self.forward:
            return False
        if tuple(attributes["_modules"].values()) != self.children or _acting(self.module) != self.behaviours:
            return False
        try:
            if self.get is not None and self.get(attributes) != self.values:
                return False
            return all(_contents(value) == copy for value, copy in self.holding)
        except (
            KeyError,
            RuntimeError,
            ValueError,
        ):  # another name; tensors and arrays compare to many values
            return False

    def restore(self) -> None:
        for value, copy in self.holding:
            held = _contents(value)
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(copy)


def _acting(module: nn.Module) -> tuple[Behaviour, ...]:
    """Behaviours that do more than open a space."""
    return tuple(each for each in behaviours(module) if not isinstance(each, Region | Interior))


@dataclass(frozen=True, eq=False)
class Interior(Behaviour):
    """A call of the module opens a region, if the module is as it was when its parts were changed.

    Attributes:
        region: Held by the parts, too.
    """

    region: Region
    _hooks: tuple[dict[Any, Any], ...]
    _leaves: tuple[tuple[nn.Module, Any], ...]
    _attributes: tuple[_Attributes, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Interior:
        """Of a module as it is now."""
        parts = list(module.modules())
        # The module's own hooks see what they always saw, and where there were hooks nothing is handed on.
        hooks = [vars(part)[name] for part in parts[1:] for name in _HOOKS]
        leaves = {
            id(part): (part, type(part).forward)
            for part in parts[1:]
            if _is_torchs(part) and not part._modules
        }
        attributes = tuple(_Attributes.of(part) for part in parts if id(part) not in leaves)
        return cls(Region(), tuple(each for each in hooks if not each), tuple(leaves.values()), attributes)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_followed() or not self._holds():
            return forward(*args, **kwargs)
        return self.region(module, forward, *args, **kwargs)

    def _holds(self) -> bool:
        if any(self._hooks):
            return False
        for leaf, own in self._leaves:
            attributes = vars(leaf)
            if type(attributes.get("forward")) not in _FORWARDS or "_compiled_call_impl" in attributes:
                return False
            if type(leaf).forward is not own:
                return False
        if any(_GLOBAL_HOOKS) and any(map(_is_foreign, _GLOBAL_HOOKS)):
            return False
        modes = {each.module.training for each in self._attributes if not _is_torchs(each.module)}
        return len(modes) < 2 and all(each.are_same() for each in self._attributes)


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is one of ``torch.nn``, whose ``forward`` depends on nothing that people change."""
    return type(module).__module__.startswith("torch.nn.")


def _is_foreign(hooks: dict[Any, Any]) -> bool:
    """Whether there are hooks on all modules that are not those of this package, which change nothing."""
    return any(not getattr(hook, "__module__", "").startswith("tilefit.") for hook in hooks.values())
