"""The modules that a fix would change, and what speaks against changing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from torch import nn
from torch.nn.utils import parametrize

from tilefit.fixes.changes.behaviour import RefusedError, require_changeable


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
    require_unparametrized(module, path)
    if kind is not cls:
        raise RefusedError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which may do more than {cls.__name__}"
        )
    require_changeable(module, path)
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter or type(parameter.data).__module__ != "torch":
            raise RefusedError(f"{path}.{name} is a {type(parameter.data).__qualname__}, not a plain tensor")


def common(paths: Iterable[str]) -> list[str]:
    """The names that paths of modules begin with."""
    together = takewhile(
        lambda names: len(set(names)) == 1, zip(*(p.split(".") for p in paths), strict=False)
    )
    return [names[0] for names in together]


def caller(model: nn.Module, path: str) -> str:
    """Path of the nearest module around ``path`` that is called: no list or dictionary of modules.

    Raises:
        RefusedError: there is none.
    """
    while path:
        path = path.rpartition(".")[0]
        if type(submodule(model, path)).forward is not nn.Module.forward:
            return path
    raise RefusedError("it is called by nothing that can be changed")


def fewest_rows(most: int, pays: Callable[[int], bool]) -> int:
    """The smallest power of two below ``most`` that pays, else ``most``."""
    smaller = (1 << power for power in range((most - 1).bit_length()))
    return next(filter(pays, smaller), most)


def require_unparametrized(module: nn.Module, path: str) -> None:
    """Check that a module's weight is the parameter itself.

    Raises:
        RefusedError: it is not.
    """
    if parametrize.is_parametrized(module):
        raise RefusedError(f"{path} has parametrisations: its weight is computed anew for every call")
