"""Changing what a module does without changing the module: its class is exchanged for one of ours.

A subclass of the module's own class keeps its parameters, their names and ``isinstance``; ``copy.deepcopy``,
``torch.save``, ``torch.compile``, DDP and FSDP see an ordinary module.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from tilefit.fixes.behaviour import is_replaced
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import RefusedError


def swap(edits: Edits, module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Make ``module`` an instance of ``cls``, a subclass of its class, with more attributes."""
    kept = type(module)
    assert issubclass(cls, kept)
    module.__class__ = cls
    for name, value in attributes.items():
        setattr(module, name, value)

    def undo() -> None:
        module.__class__ = kept
        for name in attributes:
            delattr(module, name)

    edits.undone_by(undo)


def submodule(model: nn.Module, path: str) -> nn.Module:
    """The module at ``path``.

    Raises:
        RefusedError: there is none: what was captured is called otherwise.
    """
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise RefusedError(f"there is no module {path!r} in the model") from error


def require_plain(module: nn.Module, path: str, cls: type[nn.Module]) -> None:
    """Check that ``module`` does just what ``cls`` does.

    Raises:
        RefusedError: it is of another class (quantised, traced, adapted), or was changed at run time.
    """
    kind = type(module)
    if parametrize.is_parametrized(module):
        raise RefusedError(f"{path} has parametrisations: its weight is computed anew for every call")
    if kind is not cls:
        raise RefusedError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which may do more than {cls.__name__}"
        )
    if is_replaced(module):
        raise RefusedError(f"the forward method of {path} was replaced")
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter or type(parameter.data).__module__ != "torch":
            raise RefusedError(f"{path}.{name} is a {type(parameter.data).__qualname__}, not a plain tensor")
