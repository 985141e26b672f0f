"""What a changed module does when it is called, and what takes back a change.

A module is changed by giving it a behaviour, which runs in place of its ``forward`` or around it. The module
stays the object it is, of the class it is, with its parameters; ``copy.deepcopy`` and ``pickle`` take the
behaviour along.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, update_wrapper
from typing import Any, ClassVar, cast

import torch
from torch import nn

from tilefit.errors import TilefitError
from tilefit.fixes.changes.assumed import OF_CHANGED, Assumed


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

    #: It computes the module's function itself, as long as that is the one it was, in place of one that did
    #: so before. Others call ``forward``, and run around such a one.
    is_innermost: ClassVar[bool] = False
    #: On a GPU the compiler makes the module's kernels; on shapes alone it runs as it was written.
    is_compiled: ClassVar[bool] = False

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


class Changed:
    """What a changed module has more than a plain one: behaviours, within which its class's ``forward`` runs.

    Args:
        module: The module.

    Attributes:
        assumed: The module as it was. Where the class has another ``forward`` by now, nothing is known of
            what the module computes, and it runs as it is; where that reads other attributes, or calls other
            functions, it is run itself.
        behaviours: From the innermost to the outermost.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.assumed = Assumed(module)
        self.behaviours: tuple[Behaviour, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Changed:
        """That of a module; it gets one if it has none."""
        changed = changes(module)
        if changed is None:
            changed = cls(module)
            # The first of the attributes: what is loaded has to know the names of the others.
            vars(module)["_tilefit"] = changed
            module._replicate_for_data_parallel = changed.replicate  # type: ignore[method-assign]
            vars(module)["__prepare_scriptable__"] = changed.script
            _teach()
            module.forward = module._within_behaviours  # type: ignore[assignment]
        return changed

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _teach()

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
        if not is_replaced(self.module):
            for name in OF_CHANGED:
                delattr(self.module, name)

    def replicate(self) -> Any:
        """What ``nn.DataParallel`` runs on another GPU: the module as it was."""
        # A replica has all that is in the module's ``vars``, and this would run the module itself.
        replica = type(self.module)._replicate_for_data_parallel(self.module)  # type: ignore[no-untyped-call]
        for name in OF_CHANGED:
            delattr(replica, name)
        return replica

    def script(self) -> Any:
        """What TorchScript asks for before it compiles a module."""
        raise TilefitError("TorchScript cannot compile a changed module: tilefit.strip(model) first")


def _run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    own = type(module).forward
    forward: Callable[..., Any] = partial(own, module)
    changed: Changed = module._tilefit  # type: ignore[assignment]
    for behaviour in changed.behaviours if own is changed.assumed.forward else ():
        if not behaviour.is_innermost or changed.assumed.holds(module):
            forward = partial(behaviour, module, forward)
    return forward(*args, **kwargs)


@cache
def _function(own: Callable[..., Any]) -> types.FunctionType:
    """``_run`` with the signature of a class's ``forward``. All share their code, so that the compiler, which
    asks for that of a module's own ``forward``, takes what it has compiled of one layer for the next."""
    made = types.FunctionType(_run.__code__, _run.__globals__, "_within_behaviours")
    return cast(types.FunctionType, update_wrapper(made, own, ("__module__", "__doc__")))


class _WithinBehaviours:
    """An attribute of every module: the ``forward`` that it has when it is changed. No property, since
    TorchScript compiles these."""

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        return self if module is None else types.MethodType(_function(kind.forward), module)


def _teach() -> None:
    """Let modules be copied and loaded with what they are given here: ``copy.copy`` asks a method of the
    class alone, and ``pickle`` writes a bound method as its name."""
    nn.Module.__copy__ = _shallow_copy  # type: ignore[attr-defined]
    nn.Module._within_behaviours = _WithinBehaviours()  # type: ignore[attr-defined]


def _shallow_copy(module: nn.Module) -> Any:
    """What ``copy.copy`` makes of a module: it shares all but what would run the original in its place."""
    made: Any = module.__reduce_ex__(4)
    make, args, *rest = made
    other = make(*args)
    for state in rest[:1]:
        if isinstance(state, dict) and "_tilefit" in state:
            state = {name: value for name, value in state.items() if name not in OF_CHANGED}
        other.__setstate__(state)
    return other


def changes(module: nn.Module) -> Changed | None:
    """How a module was changed."""
    return vars(module).get("_tilefit")


def behaviours(module: nn.Module) -> tuple[Behaviour, ...]:
    """A module's behaviours."""
    changed = changes(module)
    return changed.behaviours if changed is not None else ()


def behaves(module: nn.Module, kind: type[Behaviour]) -> bool:
    """Whether a module has a behaviour of a kind."""
    return any(isinstance(each, kind) for each in behaviours(module))


def is_replaced(module: nn.Module) -> bool:
    """Whether somebody else has put something in place of the module's ``forward``."""
    forward = vars(module).get("forward")
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    return forward is not None and not (code is _run.__code__ and forward.__self__ is module)


def require_changeable(module: nn.Module, path: str) -> None:
    """Check that some behaviour can be given to a module.

    Raises:
        RefusedError: it is compiled by TorchScript, or its ``forward`` was replaced.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise RefusedError(f"{path or 'the model'} is compiled by TorchScript")
    refuse(is_replaced(module), f"the forward method of {path or 'the model'} was replaced")


# ---- what takes it back ------------------------------------------------------------------------


class Edits:
    """Changes of live objects in their order; whoever changes one notes here what takes it back: functions of
    files with their arguments, so that a plan can be pickled, and what is copied takes back the copy's."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], Any]] = []

    def give(self, module: nn.Module, path: str, behaviour: Behaviour) -> None:
        """Give a module a behaviour.

        Raises:
            RefusedError: it cannot be given to it.
        """
        behaviour.require(module, path)
        changed = Changed.of(module)
        first, *others = changed.behaviours or (None,)
        if behaviour.is_innermost and first is not None and first.is_innermost:
            self.set(changed, "behaviours", (behaviour, *others))
            return
        changed.add(behaviour)
        self.undone_by(partial(changed.remove, behaviour))

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute, which the target need not have had."""
        is_new = hasattr(target, "__dict__") and name not in vars(target)
        kept = () if is_new else (getattr(target, name),)
        setattr(target, name, value)
        self.undone_by(partial(delattr if is_new else setattr, target, name, *kept))

    def undone_by(self, undo: Callable[[], Any]) -> None:
        """Note what takes back the change that was just made."""
        self._undos.append(undo)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What the block notes is taken back if it raises."""
        before = len(self._undos)
        try:
            yield
        except BaseException:
            self.undo(before)
            raise

    def undo(self, left: int = 0) -> None:
        """Take all of it back, the last first, but for so many changes."""
        while len(self._undos) > left:
            self._undos.pop()()
