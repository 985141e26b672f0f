"""What is handed on inside a module, from part to part, and that the module is still the one it was found in.

Which parts hand what to whom is read off the module's ``forward``, traced symbolically in training and in
evaluation mode: a trace has no branches that depend on data or sizes. It does depend on what the module is
made of and on its attributes, and these are compared whenever the module is called: if somebody has replaced
a part, watches one or flipped a flag, the call runs as if nothing had been changed.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from tilefit.fixes.changes.assumed import Assumed, is_torchs, restored
from tilefit.fixes.changes.behaviour import Behaviour, behaviours, is_replaced
from tilefit.fixes.changes.calls import PLAIN, is_followed
from tilefit.fixes.changes.edits import Edits
from tilefit.fixes.changes.hooks import HOOKS, are_all_watched, has_hooks
from tilefit.fixes.changes.region import Region
from tilefit.fixes.kinds.padding.elementwise import are_torchs

# ---- tracing -----------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    # A branch on a buffer stops the trace, as one on a parameter does.
    proxy_buffer_attributes = True

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf
        #: Somebody wanted to know what no trace tells; he may have gone on without.
        self.was_asked = False

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.was_asked = True
        return super().to_bool(obj)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(m) or has_hooks(m) or super().is_leaf_module(m, module_qualified_name)


def traced(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> tuple[fx.Graph, fx.Graph] | None:
    """A module's ``forward`` in training and in evaluation mode; None where it cannot be traced.

    Nor is anything known of one that takes optional arguments, keeps something in an attribute (a feature,
    which others may read), or calls what may say something else another time (:func:`_without_switches`).

    Args:
        module: The module.
        is_leaf: Whether a part is not looked into, besides those of ``torch.nn`` and those with hooks.
    """
    arguments = inspect.signature(module.forward).parameters.values()
    # With a default or a variable number of arguments it may do different things.
    if any(a.default is not a.empty or a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD) for a in arguments):
        return None
    graphs = []
    with restored(module) as is_kept:
        for mode in (True, False):
            for part in module.modules():
                part.training = mode
            tracer = _Tracer(is_leaf)
            try:
                with _without_switches() as asked:
                    graphs.append(tracer.trace(module))
            except Exception:  # noqa: BLE001 - whatever stops the tracer, nothing is known of such a module
                return None
            if asked or tracer.was_asked or not is_kept():
                return None
    return graphs[0], graphs[1]


#: What says the same whenever it is asked, of the libraries that models call; and what does not, of PyTorch.
_STEADY = frozenset(
    """_collections _functools _operator abc builtins collections contextlib dataclasses enum functools
    itertools math operator types typing""".split()
)
_UNSTEADY = re.compile(
    "_?(is|are|get|has)_(?!scripting|tracing|compiling|exporting|in_onnx_export)|rand(?!(n|int)?_like)"
    "|bernoulli|multinomial|normal|uniform|choice|initial_seed"
)


@contextmanager
def _without_switches() -> Iterator[list[Any]]:
    """Notes what is called in the block that may say something else another time: whether gradients are on,
    the environment, a clock, a random number."""
    asked: list[Any] = []

    def follow(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            caller, name = frame.f_back, frame.f_code.co_name
            module = frame.f_globals.get("__name__", "")
        elif event == "c_call":
            caller, name = frame, called.__name__
            owner = getattr(called, "__self__", None)
            is_torchs = isinstance(owner, type) and owner.__module__.startswith("torch")
            module = "torch" if is_torchs else called.__module__ or type(owner).__module__
        else:
            return
        where = "torch" if caller is None else caller.f_globals.get("__name__", "").partition(".")[0]
        is_models = where not in ("torch", "tilefit") and where not in sys.stdlib_module_names
        if is_models and not _is_steady(module.partition(".")[0], name):
            asked.append(name)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what runs when garbage is collected (hypothesis asks the clock) is not the model's
    sys.setprofile(follow)
    try:
        yield asked
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def _is_steady(library: str, name: str) -> bool:
    if library in ("torch", "numpy"):
        return not _UNSTEADY.match(name)
    return library in _STEADY or library not in sys.stdlib_module_names


# ---- whether a module is as it was -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Interior(Behaviour):
    """A call of the module opens a region, if the module is as it was when its parts were changed.

    Attributes:
        region: Held by the parts, too.
    """

    region: Region
    _hooks: tuple[dict[Any, Any], ...]
    _leaves: tuple[tuple[nn.Module, Assumed], ...]
    _others: tuple[tuple[nn.Module, Assumed, Any], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Interior:
        """Of a module as it is now."""
        parts = list(module.modules())
        # The module's own hooks see what they always saw, and where there were hooks nothing is handed on.
        hooks = [vars(part)[name] for part in parts[1:] for name in HOOKS]
        leaves: list[tuple[nn.Module, Assumed]] = []
        others: list[tuple[nn.Module, Assumed, Any]] = []
        for part in parts:
            if is_torchs(part) and not part._modules and part is not module:
                leaves.append((part, Assumed.of(part)))
            else:
                others.append((part, Assumed.of(part), _made_of(part)))
        return cls(Region(), tuple(each for each in hooks if not each), tuple(leaves), tuple(others))

    @classmethod
    def at(cls, module: nn.Module, edits: Edits) -> Region:
        """The region that calls of a module, as it is now, open from now on."""
        interior = cls.of(module)
        edits.behave(module, interior)
        return interior.region

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_followed():  # asked first: PyTorch 2.11's compiler breaks its graph at the set below
            return forward(*args, **kwargs)
        given = (*args, *kwargs.values())
        # The trace knew of each argument that it is a tensor, and another than the others.
        is_known = all(type(each) in PLAIN for each in given) and len({*map(id, given)}) == len(given)
        if not is_known or not self._holds():
            return forward(*args, **kwargs)
        return self.region(module, forward, *args, **kwargs)

    def _holds(self) -> bool:
        if any(self._hooks) or are_all_watched() or not are_torchs():
            return False
        try:
            for part, assumed in self._leaves:  # at the least cost: there are many
                attributes = part.__dict__
                if is_replaced(part) or "_compiled_call_impl" in attributes:
                    return False
                if type(part).forward is not assumed.forward or attributes["_modules"]:
                    return False
                if assumed.get(attributes) != assumed.values:
                    return False
        except KeyError:  # an attribute was deleted
            return False
        kinds = {(type(part), assumed.kind): assumed for part, assumed in self._leaves}
        kinds |= {(type(part), assumed.kind): assumed for part, assumed, _ in self._others}
        if not all(assumed.calls_the_same(kind) for (kind, _), assumed in kinds.items()):
            return False
        modes = {part.training for part, *_ in self._others if not is_torchs(part)}
        return len(modes) < 2 and all(
            assumed.reads_the_same(part) and _made_of(part) == made_of
            for part, assumed, made_of in self._others
        )


def _made_of(part: nn.Module) -> Any:
    """The parts of a part, what it does beyond opening a space, and whether its ``forward`` was replaced."""
    acting = (each for each in behaviours(part) if not isinstance(each, Region | Interior))
    return (not is_replaced(part), *part._modules.values(), *acting)
