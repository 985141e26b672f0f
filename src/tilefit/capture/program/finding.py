"""Finding the step in a program, which is what repeats: from one ``optimizer.step()``, or call of the model,
to the next."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tilefit.capture.program.events import Captured

#: A model that is called twice within so many calls of another belongs to the same step. A choice:
#: assistants propose some 5 to 20 tokens for a call of their model; samplers of so few steps make a picture.
_INTERLEAVED = 40
#: An optimizer that was made and has not stepped when another has stepped so often is not waited for.
_PATIENCE = 12
#: So few calls before the first step are not worth a word: they make lazy layers, say. A choice.
_FEW = 8

#: A model, by its identity, and the lines that it is called from.
_Called = tuple[int, tuple[str, ...]]


class Listener:
    """Who is told where the step is, and what there is to know of the program around it."""

    def begins(self) -> None:
        """The step begins."""

    def ends(self) -> None:
        """It has ended."""

    def first_ended(self) -> None:
        """The first of all calls of a model has ended: the same one is called again."""

    def goes_on(self) -> None:
        """A model was called, or an optimizer stepped, again since the step had ended."""

    def evaluates(self) -> None:
        """A model is called and not trained though one was trained before."""

    def lines(self) -> tuple[str, ...]:
        """The lines of the program that run, the innermost first."""
        return ()

    def is_aside(self) -> bool:
        """Whether the program is on another stream than the first."""
        return False

    def may_capture(self) -> bool:
        """Whether the program says somewhere that it captures a CUDA graph."""
        return False


class StepFinder:
    """Tells when the step to be captured begins and ends.

    It is between two steps of the optimizer that was the last to make its first one, so that of several
    optimizers each steps in it, and the state that first steps make is there. A program without an optimizer
    steps where a backward pass ends, and one that has trained nothing so far where it calls a model again
    from the same lines: of several models that of which this is seen first, and then one whose calls it makes
    some of between, so that each runs in the step.

    Before a program captures a CUDA graph it takes a few steps without one, mostly on a stream of their own.
    They are the step only where nothing follows them: the graph's replays, if the optimizer steps in it, or
    the steps around them.

    Args:
        skip: Steps before it begins.
        steps: Steps until it ends.
        listener: Is told.
    """

    def __init__(self, skip: int, steps: int, listener: Listener) -> None:
        self._skip, self._steps, self._listener = skip, steps, listener
        #: When an optimizer stepped last, by the monotonic clock.
        self.stepped_s = 0.0
        #: The CUDA graph that is being captured, how often one was replayed in which an optimizer steps, and
        #: with which replay the step begins.
        self._graph: Captured | None = None
        self._has_captured = False
        self._replays = self._replayed_from = 0
        self._is_first = True
        #: How often which model was called from which lines, and what was called when the step began last.
        self._calls: Counter[_Called] = Counter()
        self._called: _Called = (0, ())
        #: How often models were called at which line before anything was trained.
        self._acted: Counter[str] = Counter()
        self._called_at = 0
        self._has_ended = False
        #: The models of the step; how often one was called again since, and had been when others were called
        #: first; whether it is sure of whose calls it is.
        self._inside: set[int] = set()
        self._again, self._is_settled = 0, False
        self._others: dict[_Called, int] = {}
        #: Calls that a backward pass may still follow.
        self.forwards = 0
        #: Whether an optimizer was ever made, even where nothing holds it any more.
        self.was_to_train = False
        self._made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._counts: Counter[int] = Counter()
        self._backwards = 0
        self._begun_at: int | None = None
        self._anchor: int | None = None
        #: The optimizers that stepped within the step.
        self.stepped: list[torch.optim.Optimizer] = []

    @property
    def taken(self) -> int:
        """Steps so far: of the optimizer that made most."""
        steps = max(self._counts.values(), default=self._backwards or self._calls[self._called])
        return steps + self._replays

    @property
    def is_settled(self) -> bool:
        """Whether the step that has ended is the program's, whatever follows."""
        if self.infers or (self._anchor is None and self._counts and not self._replays):
            return False
        warms_up = self._listener.is_aside() or (not self._has_captured and self._listener.may_capture())
        return bool(self._replays) or not warms_up

    @property
    def infers(self) -> bool:
        """Whether nothing was trained so far: the step is of calls."""
        return not (self._counts or self._backwards)

    @property
    def began_with_it(self) -> bool:
        """Whether the first call of all was of the model that the step is a call of."""
        return next(iter(self._calls), self._called)[0] == self._called[0]

    @property
    def is_to_train(self) -> bool:
        """Whether there is an optimizer, of parameters that may be frozen until they are trained."""
        return bool(self._made)

    @property
    def may_widen(self) -> bool:
        """Whether another model may still turn out to belong to the step of calls that has ended."""
        return self._again <= _INTERLEAVED

    @property
    def notes(self) -> tuple[str, ...]:
        """What the program did with its models before it trained, and may do again between other steps."""
        count = 0 if self.infers else self._acted.total()
        if count <= _FEW:
            return ()
        ((place, most),) = self._acted.most_common(1)
        place = place and f", {most:,} of them at {place}"
        return (
            f"Before it trained the program called its models {count:,} times{place}, as to evaluate or to "
            "act: what it does so between other steps is not in the time of this one.",
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block steps are noticed."""
        made = torch.optim.Optimizer.__init__
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._made.add(optimizer)
            self.was_to_train = True

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            out = engine(*args, **kwargs)
            self._passed_backward()
            return out

        with (
            register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer)),
            patch.object(torch.optim.Optimizer, "__init__", init),
            patch.object(torch.autograd, "_engine_run_backward", run_backward),
        ):
            yield

    def called(self, model: object) -> None:
        """A model is about to run, or a CUDA graph.

        The step begins wherever one was called more often than any so far: where the program ends early, the
        last of its calls is the step.
        """
        if isinstance(model, Captured) and model.optimizers:
            self._replayed(model)
            return
        trains = getattr(model, "training", False) and torch.is_grad_enabled()
        if not self.infers:
            if not trains:
                self._listener.evaluates()
            return
        if trains and self.is_to_train:
            self.forwards += 1
            return
        key = id(model), self._listener.lines()
        self._acted["".join(key[1][:1])] += 1
        if self._has_ended:
            self._called_behind(model, key)
            return
        self._inside.add(id(model))
        most = max(self._calls.values(), default=0)
        if self._is_first and most:
            if [each for each, _ in self._calls] == [id(model)]:
                self._listener.first_ended()
            self._is_first = False
        self._calls[key] += 1
        count = self._calls[key]
        if key == self._called and self._called_at > self._skip:
            if count == self._called_at + self._steps:
                self._has_ended = True
                self._listener.ends()
        elif not self._is_settled and (
            count > most or (most == 1 and len({each for each, _ in self._calls}) == 1)
        ):
            # One model that is called from ever other lines has its last call for a step.
            self._begin_at(key, count)

    def _begin_at(self, key: _Called, count: int) -> None:
        self._called, self._called_at = key, count
        self._inside = {key[0]}
        self._listener.begins()

    def _called_behind(self, model: object, key: _Called) -> None:
        """A call behind the step: of a model between whose calls those of the step are made, it begins anew.

        Where one model is done and another follows, none of the first lie between the other's.
        """
        self._again += key[0] in self._inside
        is_another = key[0] not in self._inside and any(True for _ in getattr(model, "parameters", tuple)())
        if is_another and self._others.setdefault(key, self._again) < self._again <= _INTERLEAVED:
            self._has_ended, self._is_settled = False, True
            self._calls[key] = self._skip + 1
            self._others.clear()
            self._again = 0
            self._begin_at(key, self._skip + 1)
        else:
            self._listener.goes_on()

    def capturing(self, graph: Captured) -> None:
        """A CUDA graph is captured from now on: the step begins anew behind it."""
        self._graph, self._has_captured = graph, True
        if self._anchor is not None:
            self._begun_at = self._counts[self._anchor] + 1

    def captured(self) -> None:
        """The capture has ended."""
        self._graph = None

    def _replayed(self, graph: Captured) -> None:
        self._replays += 1
        self._replayed_from = self._replayed_from or (self._replays if self.taken > self._skip else 0)
        if self._replays == self._replayed_from:
            self.stepped = list(graph.optimizers)
            self._listener.begins()
        elif self._replayed_from and self._replays == self._replayed_from + self._steps:
            self._listener.ends()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._graph is not None:
            self._graph.optimizers.append(optimizer)
            return
        self._counts[id(optimizer)] += 1
        self.stepped_s = time.monotonic()
        if not any(optimizer is each for each in self.stepped):
            self.stepped.append(optimizer)
        count = self._counts[id(optimizer)]
        if self._anchor is None and (count >= _PATIENCE or not self._others_to_come()):
            self._anchor = id(optimizer)
            self._begun_at = count + self._skip - 1
        if self._anchor is None and id(optimizer) == next(iter(self._counts)):
            # Others may never step: what lies between the steps of the first is then what there is.
            self._begun_at = self._skip
            if count <= self._skip + self._steps:
                self._reached(count)
        elif id(optimizer) == self._anchor:
            self._reached(count)

    def _others_to_come(self) -> bool:
        """Whether parameters have not been stepped whose optimizer was made."""
        stepped = {p for each in self._made if self._counts[id(each)] for p in _trained(each)}
        return any(not self._counts[id(each)] and _trained(each) - stepped for each in self._made)

    def _passed_backward(self) -> None:
        if self._graph is not None:
            return
        self._backwards += 1
        if not self._counts and not self.is_to_train:
            self._begun_at = self._skip
            self._reached(self._backwards)

    def _reached(self, count: int) -> None:
        assert self._begun_at is not None
        if count == self._begun_at:
            self.stepped = []
            self._listener.begins()
        elif count == self._begun_at + self._steps:
            self._listener.ends()
        elif count > self._begun_at + self._steps:
            self._listener.goes_on()


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    """Its parameters. One that wraps another, as SAM does, has the other's."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
