"""Finding the step in a program: from one ``optimizer.step()`` to the next."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

#: An optimizer that was made and has not stepped when another has stepped so often is not waited for.
_PATIENCE = 12


class StepFinder:
    """Tells when the step to be captured begins and ends.

    It is between two steps of the optimizer that was the last to make its first one, so that of several
    optimizers each steps in it, and the state that first steps make is there. A program without an optimizer
    steps where a backward pass ends.

    Args:
        skip: Steps before it begins.
        steps: Steps until it ends.
        on_begin: Told when it begins.
        on_end: Told when it ends.
        line: The line of the program that is running.
    """

    def __init__(
        self,
        skip: int,
        steps: int,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        line: Callable[[], str],
    ) -> None:
        self._skip, self._steps = skip, steps
        self._on_begin, self._on_end, self._line = on_begin, on_end, line
        self._lines: dict[int, str] = {}
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._counts: Counter[int] = Counter()
        self._backwards = 0
        self._begun_at: int | None = None
        self._anchor: int | None = None
        #: The optimizers that stepped within the step, and backward passes in it.
        self.stepped: list[torch.optim.Optimizer] = []
        self.backwards = 0

    @property
    def taken(self) -> int:
        """Optimizer steps so far: of the one that made most."""
        return max(self._counts.values(), default=self._backwards)

    @property
    def lines(self) -> tuple[str, ...]:
        """Where the optimizers of the step were made."""
        return tuple(dict.fromkeys(self._lines.get(id(each), "") for each in self.stepped))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block steps are noticed."""
        made = torch.optim.Optimizer.__init__
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._made.add(optimizer)
            self._lines[id(optimizer)] = self._line()

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            out = engine(*args, **kwargs)
            self._passed_backward()
            return out

        hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        try:
            with (
                patch.object(torch.optim.Optimizer, "__init__", init),
                patch.object(torch.autograd, "_engine_run_backward", run_backward),
            ):
                yield
        finally:
            hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._counts[id(optimizer)] += 1
        if not any(optimizer is each for each in self.stepped):
            self.stepped.append(optimizer)
        count = self._counts[id(optimizer)]
        if self._anchor is None and (count >= _PATIENCE or not self._others_to_come()):
            self._anchor = id(optimizer)
            self._begun_at = count + self._skip - 1
        if id(optimizer) == self._anchor:
            self._reached(count)

    def _others_to_come(self) -> bool:
        """Whether parameters have not been stepped whose optimizer was made."""
        stepped = {p for each in self._made if self._counts[id(each)] for p in _trained(each)}
        return any(not self._counts[id(each)] and _trained(each) - stepped for each in self._made)

    def _passed_backward(self) -> None:
        self.backwards += 1
        self._backwards += 1
        if not self._counts and not any(map(_trained, self._made)):
            self._begun_at = self._skip
            self._reached(self._backwards)

    def _reached(self, count: int) -> None:
        assert self._begun_at is not None
        if count == self._begun_at:
            self.stepped, self.backwards = [], 0
            self._on_begin()
        elif count == self._begun_at + self._steps:
            self._on_end()


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    """Its parameters. One that wraps another, as SAM does, has the other's."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
