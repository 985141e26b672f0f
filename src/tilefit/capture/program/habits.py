"""Ways of writing a program that cost time on a GPU, noticed while it runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import anomaly_mode
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from tilefit.ops import Habit, HostEvent, Site, StepOp
from tilefit.ops.program import WAIT

_ANOMALY, _DETERMINISTIC = "detect_anomaly", "deterministic"
#: What anomaly mode runs on every gradient.
_CHECKS = ("aten.isnan", "aten._is_any_true", "aten.any")


class Habits:
    """Notices what a program has switched on, and how it calls its models.

    Args:
        line: The line of the program that is running, such as ``train.py:41``.
        recorded: The operations and events of the step so far.
    """

    def __init__(
        self,
        line: Callable[[], str],
        recorded: Callable[[], tuple[list[StepOp], list[HostEvent]]] = lambda: ([], []),
    ) -> None:
        self._line = line
        self._recorded = recorded
        #: Where a switch was thrown last; empty where that was not seen.
        self._switched: Counter[str] = Counter()
        self._lines: dict[str, str] = {}
        self._depth = 0
        #: Backward passes that have left gradients behind.
        self.backwards = 0
        #: Calls whose reads are named for them, with the number of events before.
        self._calls: list[tuple[str, int]] = []
        self._replica: nn.Module | None = None
        #: Lines of replicas that search for unused parameters, and whether there were any.
        self._searched: dict[str, bool] = {}
        #: Calls in eval mode whose graph may yet be used, by model, and those whose graph never was, by line.
        self._pending: dict[int, list[str]] = {}
        self._evaluations: Counter[str] = Counter()
        #: Lines of backward passes that are to be differentiated themselves.
        self._differentiated: dict[str, None] = {}
        #: Whether the next backward pass sums the gradients over all ranks, and how many did since a step.
        self._sums = ""
        self._summed: list[tuple[str, list[tuple[int, int]]]] = []
        #: By line: the backward passes of a step that sum, and the operations with which all but the last do.
        self._micro_batches: dict[str, tuple[int, list[tuple[int, int]]]] = {}

    def found(self) -> tuple[Habit, ...]:
        """What there is to say so far: with the operations of anomaly mode, of the others first and last
        are 0."""
        # A step ends within the call that makes it, of which it is the end here.
        for call in reversed(self._calls):
            self._name_reads(*call)
        evaluations = self._evaluations + Counter(line for lines in self._pending.values() for line in lines)
        self._stepped()
        rows = [
            (name, line, detail, self._checks() if name == _ANOMALY else [])
            for name, line, detail in self._switches()
        ]
        for line, calls in evaluations.items():
            rows.append(("evaluates_with_gradients", line, f"{calls} call{'s' * (calls > 1)}", []))
        for line, (count, spans) in self._micro_batches.items():
            rows.append(("synchronizes_micro_batches", line, f"{count} micro-batches", spans))
        for line in (line for line, unused in self._searched.items() if not unused):
            rows.append(("finds_nothing_unused", line, "", []))
        rows += [("differentiates_backward", line, "", []) for line in self._differentiated]
        return tuple(
            Habit(name, Site("", line), *span, detail=detail)
            for name, line, detail, spans in rows
            for span in spans or [(0, 0)]
        )

    def _checks(self) -> list[tuple[int, int]]:
        """The operations of the step in which anomaly mode looks for NaN."""
        ops, _ = self._recorded()
        return [
            (index, index + 1)
            for index, entry in enumerate(ops)
            if entry.phase.startswith("backward") and entry.name in _CHECKS
        ]

    def _switches(self) -> Iterator[tuple[str, str, str]]:
        if self._switched[_ANOMALY] or torch.is_anomaly_enabled():
            yield _ANOMALY, self._lines.get(_ANOMALY, ""), ""
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            yield "launch_blocking", "", ""
        if torch.are_deterministic_algorithms_enabled():
            yield _DETERMINISTIC, self._lines.get(_DETERMINISTIC, ""), "torch.use_deterministic_algorithms"
        elif torch.backends.cudnn.deterministic:
            yield _DETERMINISTIC, "", "torch.backends.cudnn.deterministic"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block habits are noticed."""
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        scaled = torch.amp.GradScaler._maybe_opt_step

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._pending.clear()  # a step may end within it
            *_, creates_graph = args[:4]  # of outputs, gradients, retain_graph, create_graph
            # Transforms of torch.func always ask for it, and compile nothing.
            if creates_graph and torch._C._functorch.peek_interpreter_stack() is None:
                self._differentiated[self._line()] = None
            out = self._within(_ANOMALY, engine, *args, **kwargs)
            self.backwards += bool(kwargs.get("accumulate_grad"))
            self._passed_backward()
            return out

        def scaled_step(*args: Any, **kwargs: Any) -> Any:
            return self._within("found_inf", scaled, *args, **kwargs)

        with (
            self._noted(anomaly_mode.set_detect_anomaly, "__init__", _ANOMALY),
            self._noted(anomaly_mode.detect_anomaly, "__enter__", _ANOMALY, 1),
            self._noted(torch, "use_deterministic_algorithms", _DETERMINISTIC),
            patch.object(torch.autograd, "_engine_run_backward", run_backward),
            patch.object(torch.amp.GradScaler, "_maybe_opt_step", scaled_step),
            nn_module.register_module_forward_pre_hook(self._entered),
            nn_module.register_module_forward_hook(self._left, always_call=True),
            register_optimizer_step_post_hook(lambda *_: self._stepped()),
        ):
            yield

    def _within(self, why: str, called: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call, with the reads in it named for why they are made."""
        self._calls.append((why, len(self._recorded()[1])))
        out = called(*args, **kwargs)
        self._name_reads(*self._calls.pop())
        return out

    def _name_reads(self, why: str, first: int) -> None:
        events = self._recorded()[1]
        if why != _ANOMALY or torch.is_anomaly_enabled():
            events[first:] = [
                replace(each, name=why) if each.kind == WAIT else each for each in events[first:]
            ]

    def _noted(self, owner: Any, name: str, habit: str, once: int = 0) -> Any:
        """Calls of a switch, with their lines; one that is left again counts for having been there."""
        called = getattr(owner, name)

        def switch(*args: Any, **kwargs: Any) -> Any:
            self._lines[habit] = self._line()
            self._switched[habit] += once
            return called(*args, **kwargs)

        return patch.object(owner, name, switch)

    def _entered(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and module.training:
            # Who trains on does not come back to the graph of an evaluation.
            self._evaluations.update(self._pending.pop(id(module), ()))

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled():
            return
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            if not module.training:
                self._pending.setdefault(id(module), []).append(self._line())
            if getattr(module, "require_backward_grad_sync", False):
                self._sums, self._replica = self._line(), module

    def _passed_backward(self) -> None:
        self._pending.clear()
        if self._sums:
            replica = self._replica
            self._summed.append((self._sums, getattr(replica, "spans", [])))
            if replica is not None and getattr(replica, "find_unused_parameters", False):
                unused = any(p.requires_grad and p.grad is None for p in replica.parameters())
                self._searched[self._sums] = self._searched.get(self._sums, False) or unused
            self._sums = ""

    def _stepped(self) -> None:
        if len(self._summed) > 1:
            spans = [span for _, made in self._summed[:-1] for span in made]
            self._micro_batches[self._summed[0][0]] = len(self._summed), spans
        self._summed.clear()
