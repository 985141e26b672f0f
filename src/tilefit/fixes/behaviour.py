"""What a changed module does when it is called.

A module is changed by giving it a behaviour, which runs in place of its ``forward`` or around it. The module
stays the object it is, of the class it is, with its parameters; ``copy.deepcopy`` and ``pickle`` take the
behaviour along.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from tilefit.errors import TilefitError
from tilefit.fixes.assumed import OF_CHANGED, Assumed


class RefusedError(TilefitError):
    """A fix cannot be applied here without risk; the message is the reason, as a sentence without a stop."""


def refuse(when: Any, why: str) -> None:
    """Refuse a change where something speaks against it.

    Raises:
        RefusedError: it does.
    """
    if when:
        raise RefusedError(why)


class Behaviour(ABC):
    """A way to compute what a module computes. Instances are data that can be copied, compared and pickled,
    and keep nothing from one call to the next."""

    #: It computes the module's function itself, as long as that is the one it was. Others call ``forward``,
    #: and run around such a one.
    is_innermost: ClassVar[bool] = False
    #: From one seed the changed module draws the same random numbers (dropout) as the original.
    same_random_numbers: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``forward(*args, **kwargs)``, the module's own, would return."""

    def require(self, module: nn.Module, path: str) -> None:
        """Check that it can be given to a module.

        Raises:
            RefusedError: it cannot.
        """
        require_changeable(module, path)
        refuse(behaves(module, type(self)), f"{path or 'the model'} was changed in this way before")

    def beside(self, module: nn.Module) -> tuple[Behaviour, Behaviour | None]:
        """What a module is given, and of what it has that which it takes the place of."""
        return self, None


@dataclass(frozen=True)
class Part:
    """In the data of a behaviour that is not given yet: a module of the model."""

    path: str


class Changed:
    """The ``forward`` of a changed module, in its ``vars``: its class's, within behaviours.

    Args:
        module: The module.

    Attributes:
        assumed: The module as it was. Where the class has another ``forward`` by now, nothing is known of
            what the module computes, and it runs as it is; where that reads other attributes, or calls other
            functions, it is run itself.
        behaviours: From the innermost to the outermost.
    """

    def __init__(self, module: nn.Module) -> None:
        self.__self__ = module
        self.assumed = Assumed.of(module)
        self.behaviours: tuple[Behaviour, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Changed:
        """That of a module; it gets one if it has none."""
        changed = vars(module).get("forward")
        if not isinstance(changed, Changed):
            # A method of the class is the only one that ``copy.copy`` asks.
            nn.Module.__copy__ = _shallow_copy  # type: ignore[attr-defined]
            changed = module.forward = cls(module)
            module._replicate_for_data_parallel = changed.replicate  # type: ignore[method-assign]
        return changed

    def add(self, behaviour: Behaviour) -> None:
        """Give the module one more behaviour."""
        if behaviour.is_innermost:
            self.behaviours = (behaviour, *self.behaviours)
        else:
            self.behaviours = (*self.behaviours, behaviour)

    def remove(self, behaviour: Behaviour) -> None:
        """Take a behaviour from the module; without any it is as it was."""
        self.behaviours = tuple(other for other in self.behaviours if other is not behaviour)
        if not self.behaviours:
            self.leave()

    def leave(self) -> None:
        """Take every behaviour from the module."""
        self.behaviours = ()
        # Somebody may have put something of theirs around this in the meantime.
        if vars(self.__self__).get("forward") is self:
            for name in OF_CHANGED:
                delattr(self.__self__, name)

    def replicate(self) -> Any:
        """What ``nn.DataParallel`` runs on another GPU: the module as it was."""
        # A replica has all that is in the module's ``vars``, and this would run the module itself.
        replica = type(self.__self__)._replicate_for_data_parallel(self.__self__)  # type: ignore[no-untyped-call]
        for name in OF_CHANGED:
            delattr(replica, name)
        return replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        own = type(module).forward
        forward: Callable[..., Any] = partial(own, module)
        for behaviour in self.behaviours if own is self.assumed.forward else ():
            if not behaviour.is_innermost or self.assumed.holds(module):
                forward = partial(behaviour, module, forward)
        return forward(*args, **kwargs)

    # ---- what people ask of a method -----------------------------------------------------------

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(type(self.__self__).forward, self.__self__))

    def __getattr__(self, name: str) -> Any:
        if name in ("__self__", "assumed", "behaviours") or name.startswith("__deepcopy__"):
            raise AttributeError(name)
        # The compiler of TorchScript reads the source of functions, and resolves its names first.
        if name == "__globals__" and sys._getframe(1).f_globals["__name__"] == "torch._jit_internal":
            raise TilefitError("TorchScript cannot compile a changed module: tilefit.strip(model) first")
        return getattr(type(self.__self__).forward, name)


def _shallow_copy(module: nn.Module) -> Any:
    """What ``copy.copy`` makes of a module: it shares all but what would run the original in its place."""
    made: Any = module.__reduce_ex__(4)
    make, args, *rest = made
    other = make(*args)
    for state in rest[:1]:
        if isinstance(state, dict) and isinstance(state.get("forward"), Changed):
            state = {name: value for name, value in state.items() if name not in OF_CHANGED}
        other.__setstate__(state)
    return other


def behaviours(module: nn.Module) -> tuple[Behaviour, ...]:
    """A module's behaviours."""
    changed = vars(module).get("forward")
    return changed.behaviours if isinstance(changed, Changed) else ()


def behaves(module: nn.Module, kind: type[Behaviour]) -> bool:
    """Whether a module has a behaviour of a kind."""
    return any(isinstance(each, kind) for each in behaviours(module))


def is_replaced(module: nn.Module) -> bool:
    """Whether somebody else has put something in place of the module's ``forward``."""
    return not isinstance(vars(module).get("forward"), Changed | None)


def require_changeable(module: nn.Module, path: str) -> None:
    """Check that some behaviour can be given to a module.

    Raises:
        RefusedError: it is compiled by TorchScript, or its ``forward`` was replaced.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise RefusedError(f"{path or 'the model'} is compiled by TorchScript")
    refuse(is_replaced(module), f"the forward method of {path or 'the model'} was replaced")
