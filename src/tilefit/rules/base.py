"""What a rule is, and what it looks at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from typing import ClassVar, Protocol

from tilefit.cost import StepEstimate, estimate
from tilefit.cost.priced import PricedGpu
from tilefit.ops import Op, Step, StepOp
from tilefit.rules.sites import pattern
from tilefit.units import seconds

#: New operations by index into ``Step.ops``; an empty tuple removes the operation.
Replaced = Mapping[int, tuple[StepOp, ...]]
#: The same while it is made.
Edits = dict[int, tuple[StepOp, ...]]


@dataclass(frozen=True, slots=True)
class Change:
    """A step with some operations replaced: what a proposal is priced by.

    Attributes:
        replace: New operations by index into ``Step.ops``; an empty tuple removes the operation.
        step: The whole changed step, where it is not a matter of single operations (compilation, copies
            and collectives of a program); ``replace`` is then empty, or has the new one of each.
        rewrite: Makes ``step`` of a step, where it can be made of one that other changes have been made to.
        work_ratio: Work the changed step does, relative to the original (a step on twice the batch does
            2.0); the gain is per unit of the original's work.
    """

    replace: Replaced = field(default_factory=dict)
    work_ratio: float = 1.0
    step: Step | None = None
    rewrite: Callable[[Step], Step] | None = None


def changed(step: Step, change: Change) -> Step:
    """The step with the change made. Its memory is left as it is."""
    if change.step is not None:
        return change.step
    ops: list[StepOp] = []
    before = [0]
    for index, op in enumerate(step.ops):
        ops.extend(change.replace.get(index, (op,)))
        before.append(len(ops))
    program = step.program.moved(lambda index: before[min(index, len(step.ops))])
    return replace(step, ops=tuple(ops), program=program)


class Located(Protocol):
    """What has a module's path and a line: a site, a layer."""

    @property
    def module(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding is; see :class:`~tilefit.rules.finding.Finding`. By default the whole step."""

    module: str = ""
    source: str = ""
    sites: int = 1

    @classmethod
    def of(cls, located: Iterable[Located], source: str | None = None, sites: int = 0) -> Place:
        """The common place of several; the line is the first one's and each module counts once, unless
        something else is said."""
        located = tuple(located)
        modules = dict.fromkeys(one.module for one in located)
        return cls(pattern(modules), located[0].source if source is None else source, sites or len(modules))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rule proposes, before it is priced; see :class:`~tilefit.rules.finding.Finding` for the fields.

    ``change`` is None only where the step cannot run at all (``severity="error"``), or where nothing that
    was captured tells what it costs; ``severity`` is then said.
    """

    place: Place
    message: str
    fix: str
    safety: str
    change: Change | None
    arithmetic: tuple[str, ...] = ()
    next_command: str = ""
    severity: str = ""


Proposals = Iterable[Proposal]


@dataclass(frozen=True, slots=True)
class Context:
    """All that a rule may look at: data, never a live module."""

    step: Step
    gpu: PricedGpu
    estimate: StepEstimate

    def place(self, indices: Iterable[int], source: str | None = None) -> Place:
        """Where some operations are."""
        return Place.of((self.step.ops[index].site for index in indices), source)

    def time_s(self, indices: Iterable[int]) -> float:
        """GPU time of some operations, in seconds."""
        return sum(self.estimate.ops[index].time_s for index in indices)

    def replaced_s(self, replaced: Replaced) -> float:
        """GPU time of what takes the place of some operations, in seconds."""
        return sum(estimate(entry.op, self.gpu).time_s for entries in replaced.values() for entry in entries)

    def saving(self, replaced: Replaced) -> str:
        """``12.4 ms -> 1.75 ms``: the time of some operations, and of what takes their place."""
        return f"{seconds(self.time_s(replaced))} -> {seconds(self.replaced_s(replaced))}"

    def faster(self, index: int, op: Op, *, kernels: bool = False) -> str:
        """``12.4 ms -> 1.75 ms``: the time of an operation, and of what takes its place; with the families of
        both ``kernels``, if wanted."""
        both = self.estimate.ops[index], estimate(op, self.gpu)
        names = (f"{each.kernel_family} " if kernels else "" for each in both)
        return " -> ".join(name + seconds(each.time_s) for name, each in zip(names, both, strict=True))


#: A program that trains ``net`` on the same matrix again and again.
_TRAINING = """
import torch
from torch import distributed, nn
from torch.nn import functional as F

{model}
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
x = torch.randn({rows}, {width}, device="cuda")
for step in range(100):
    optimizer.zero_grad()
    loss = F.mse_loss(net(x), x)
    loss.backward()
    optimizer.step()
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A small program, as text: a rule imports no torch, and its page shows what was run.

    Attributes:
        model, inputs: Expressions, with ``torch``, ``nn`` and ``F`` at hand.
        options: How the step runs, as ``tilefit check`` takes it; on an H200 unless a GPU is named.
        code: What the expressions need, such as a class.
        program: A whole program in their place.
    """

    model: str = ""
    inputs: str = ""
    options: str = ""
    code: str = ""
    program: str = ""

    @classmethod
    def training(cls, model: str, rows: int, width: int, options: str = "") -> Case:
        """A program that trains ``net``, which the statements ``model`` make, on a matrix of such a size."""
        model = cleandoc(model)
        *_, last = (line for line in model.splitlines() if line and not line.startswith(" "))
        model += "\n\n" * last.startswith("def ")
        return cls(program=_TRAINING.format(model=model, rows=rows, width=width), options=options)

    def but(self, old: str, new: str) -> Case:
        """The same program with a piece of its text replaced wherever it stands."""
        texts = {name: getattr(self, name) for name in ("model", "inputs", "code", "program")}
        assert any(old in text for text in texts.values()), f"{old!r} stands nowhere in {self}"
        return replace(self, **{name: text.replace(old, new) for name, text in texts.items()})

    def under(self, options: str) -> Case:
        """The same program under other options."""
        return replace(self, options=options)


class Rule(ABC):
    """A rule looks at a priced step and proposes changes.

    A subclass's docstring is its documentation page: what it sees, why it costs time, the arithmetic, an
    example, the source. ``code`` is the family's three letters and a number; ``title`` one line; ``wrong`` a
    program that the rule has something to say of, ``right`` the same as it should be, where it is silent.
    """

    code: ClassVar[str]
    title: ClassVar[str]
    wrong: ClassVar[Case]
    right: ClassVar[Case]

    @abstractmethod
    def check(self, context: Context) -> Proposals:
        """Yield what should change; the engine prices, filters and ranks."""
