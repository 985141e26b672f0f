"""Changes made for tests: one behaviour for some modules, right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from tilefit.fixes import ChangeSet, Context, Edits, Fix, RefusedError, Run
from tilefit.fixes.changes.behaviour import Behaviour

Done = Callable[..., Any]


@dataclass(frozen=True)
class Doing(Behaviour):
    """A module does something else: ``does(module, forward, *args)``."""

    does: Done

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.does(module, forward, *args, **kwargs)


@dataclass(frozen=True)
class Change(ChangeSet):
    """Some modules do something else."""

    does: Done

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", f"Change {', '.join(self.modules)}.")

    def make(self, run: Run, edits: Edits) -> None:
        for path in self.modules:
            try:
                module = run.model.get_submodule(path)
            except AttributeError as error:
                raise RefusedError(f"there is no {path}") from error
            edits.give(module, path, Doing(self.does))


def same(module: nn.Module, forward: Done, *args: Any) -> Any:
    """What it did."""
    return forward(*args)


def nothing(module: nn.Module, forward: Done, x: torch.Tensor) -> torch.Tensor:
    """Gives back what it is given: fast, and wrong."""
    return x


def as_relu(module: nn.Module, forward: Done, x: torch.Tensor) -> torch.Tensor:
    """One kernel for two, and the same."""
    return x.relu()


class Slow(nn.Module):
    """ReLU by two kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -((-x).clamp(max=0))


class Faster(Fix):
    """Computes each :class:`Slow` by one kernel, one after the other."""

    called: ClassVar[str] = "faster"
    of_level: ClassVar[str] = "safe"
    does: ClassVar[Done] = staticmethod(as_relu)
    host_s: ClassVar[float] = 0.0

    def __init__(self) -> None:
        super().__init__(self.called, ("PRC004",), self.found, self.of_level)

    def found(self, context: Context) -> Iterable[ChangeSet]:
        yield from self.changes(context)

    def changes(self, context: Context) -> Iterator[ChangeSet]:
        for path, module in context.run.model.named_modules():
            if isinstance(module, Slow) and "forward" not in vars(module):
                yield Change((path,), type(self).does, host_s=self.host_s)
