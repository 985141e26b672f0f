"""The step: every operation of one training step or one inference call, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import NamedTuple, TypeVar

from tilefit.ops import step_json
from tilefit.ops.base import Op
from tilefit.ops.entries import Parameter, Settings, Shard, StepOp
from tilefit.ops.memory import Memory
from tilefit.ops.program import Program

_Op = TypeVar("_Op", bound=Op)


@dataclass(frozen=True, slots=True)
class Step:
    """One captured training step or inference call.

    Attributes:
        ops: In the order in which the host launches them.
        memory: What it needs.
        settings: How it was run.
        inputs: Name, element type and shape of each input, as text (``input_ids: int64[16,1024]``).
        batch: Samples, where known; else 0.
        parameters: By qualified name.
        modules: Class name of each module, by path.
        model: What was captured, for headings.
        notes: What a reader must know about the capture (assumptions, things not seen).
        returned: Numbers of the memory of what its forward pass makes and returns to the caller.
        shards: Of one tensor-parallel rank's step, how sizes are divided; empty for a whole step.
        program: The program around it, where a whole program was run; of a model, where its step meets the
            host or is shared by several GPUs.
        made: The user's line that made a module, by its path; of the modules inside it only where it is
            another. Empty where that was not seen.
        libraries: Folders of installed packages that operations' lines are in.
        ranks: Of a program whose ranks send each other messages, as the stages of a pipeline do: the steps of
            those that were run, this one's as it was captured among them.
        prompt: Of a program that calls its model again and again on other inputs than at first, as a language
            model reads a prompt and then one token at a time: that first call. None of others.
        left_out: Parameters that outputs of the model are made of, but not the loss: they get no gradient.
    """

    ops: tuple[StepOp, ...]
    memory: Memory = field(default_factory=Memory)
    settings: Settings = field(default_factory=Settings)
    inputs: tuple[str, ...] = ()
    batch: int = 0
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    notes: tuple[str, ...] = ()
    returned: tuple[int, ...] = ()
    shards: tuple[Shard, ...] = ()
    program: Program = field(default_factory=Program)
    made: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    ranks: tuple[Step, ...] = ()
    prompt: Step | None = None
    left_out: tuple[str, ...] = ()

    def each(self, kind: type[_Op]) -> Iterator[tuple[int, StepOp, _Op]]:
        """The operations of a kind: index into ``ops``, entry, and what the hardware executes."""
        return ((i, entry, op) for i, entry in enumerate(self.ops) if isinstance(op := entry.op, kind))

    @property
    def flop(self) -> int:
        return sum(op.op.flop for op in self.ops)

    @property
    def tensor_flop(self) -> int:
        """Floating-point operations of matrix products, convolutions, attention and recurrence."""
        return sum(entry.op.flop for entry in self.ops if entry.op.multiplies)

    @property
    def parameter_count(self) -> int:
        return sum(prod(parameter.shape) for parameter in self.parameters.values())

    def largest_batch(self, capacity_bytes: float) -> int | None:
        """Samples whose activations fit beside what does not depend on the batch, in every rank that was run;
        None where unknown.

        Without the allocator's fragmentation, library workspaces and the CUDA context, as in
        :class:`~tilefit.ops.Memory`.
        """
        others = (each for each in self.ranks if each.program.rank != self.program.rank)
        fits = (
            each.memory.largest_batch(each.batch, capacity_bytes) for each in (self, *others) if each.batch
        )
        return min((most for most in fits if most is not None), default=None)

    def origin(self, module: str, source: str) -> str:
        """The user's line that made a module (or what fits a pattern), where a line is not the user's own;
        empty where it is, or where that was not seen."""
        if source and source.partition("/")[0] not in self.libraries:
            return ""
        return maker(self.made, module.partition("*")[0].removesuffix("."))

    def to_json(self) -> str:
        """The step as JSON text, compact: sites and tensors are written once and referred to."""
        return step_json.dump({each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> Step:
        """The step that :meth:`to_json` wrote.

        Raises:
            TilefitError: the text is not such a step, or of another version.
        """
        return step_json.load(cls, text)


class Same(NamedTuple):
    """A step as a key: only itself is equal to it, and comparing takes no time."""

    step: Step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.step is other.step

    def __hash__(self) -> int:
        return id(self.step)


def maker(made: Mapping[str, str], module: str) -> str:
    """The line that made a module, of lines by path: its own, or that of the module it is in."""
    while module and module not in made:
        module = module.rpartition(".")[0]
    return made.get(module, "")
