"""What a report says of the program around a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilefit import units
from tilefit.cost.estimate import Streams
from tilefit.ops import Assumption, HostEvent, Loader, Program, Step
from tilefit.ops.program import TO_GPU, WAIT
from tilefit.report import ranks
from tilefit.report.ranks import Ranks
from tilefit.units import counted


@dataclass(frozen=True, slots=True)
class Meeting:
    """A line at which host and GPU meet in every step.

    Attributes:
        kind: ``wait`` (the host reads a value), ``to_gpu`` or ``to_host`` (a copy).
        name: What the program calls there.
        source: The line.
        blocks: The host waits there.
        count: How often in a step.
        bytes: What the copies move, together.
    """

    kind: str
    name: str
    source: str
    blocks: bool
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Serving:
    """What a step that trains nothing gets done.

    Attributes:
        step_s: Seconds of the step.
        batch: Samples in it.
        tokens: Of each of them; 0 where its inputs are none.
        prompt_tokens: Of each of them, in the first call of a model that makes one token after the other;
            0 of others.
        prompt_s: Seconds of that call.
    """

    step_s: float
    batch: int
    tokens: int = 0
    prompt_tokens: int = 0
    prompt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Around:
    """The program around a step.

    Attributes:
        command: As it was started.
        step: What the step is, such as ``4 micro-batches of 8, AdamW fused, bf16 autocast``.
        steps: Steps that were run, the captured one included.
        meetings: Where host and GPU meet, by line.
        assumptions: Values that were asked of the GPU, which nobody has computed, and the answers.
        loaders: The data loaders, as timed on the machine that ran it.
        fake: Data that were made up.
        ranks: What several processes exchange; None of one.
        serving: What a step that trains nothing gets done; None of one that does.
        own_s: Of the host's time, seconds of work on tensors of the CPU's, beside loaders.
        updates: Whether it changes parameters.
        micro_batches: Forward passes over samples of their own that a step sums the gradients of.
    """

    command: str
    step: str
    steps: int
    meetings: tuple[Meeting, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    loaders: tuple[Loader, ...] = ()
    fake: tuple[str, ...] = ()
    ranks: Ranks | None = None
    serving: Serving | None = None
    own_s: float = 0.0
    updates: bool = True
    micro_batches: int = 1

    @classmethod
    def of(cls, program: Program, streams: Streams | None = None, run: Sequence[Step] = ()) -> Around:
        """What is told of a program, and of those of its ranks that were ``run``."""
        return cls(
            program.command,
            program.step,
            program.steps,
            tuple(_meetings(program)),
            program.assumptions,
            program.loaders,
            program.fake,
            Ranks.of(program, streams, run),
            updates=program.updates,
            micro_batches=program.micro_batches,
        )

    @property
    def assumed(self) -> int:
        """How often a value was assumed."""
        return sum(each.count for each in self.assumptions)

    @property
    def waits(self) -> int:
        """How often the host waits in a step."""
        return sum(each.count for each in self.meetings if each.blocks)


def _meetings(program: Program) -> Iterator[Meeting]:
    lines: dict[tuple[str, str, str, bool], list[HostEvent]] = {}
    for event in program.events:
        lines.setdefault((event.kind, event.name, event.site.source, event.blocks), []).append(event)
    for key, same in lines.items():
        yield Meeting(*key, len(same), sum(event.bytes for event in same))


def headline(around: Around) -> list[tuple[str, str]]:
    """The program and its step in a few lines: (label, words)."""
    said = [ranks.headline(around.ranks)] if around.ranks else []
    lines = []
    if around.command:
        ran = f"{around.command}, stopped after {counted(around.steps, 'step')}"
        lines = [("Program", ran), ("Step", around.step)]
    elif not around.meetings:  # a model's step that several GPUs share
        return said
    copies = [each for each in around.meetings if each.kind != WAIT]
    met = f"{counted(around.waits, 'time')} a step"
    if copies:
        count, moved = (sum(getattr(each, name) for each in copies) for name in ("count", "bytes"))
        met += f"; {count:,} {'copy' if count == 1 else 'copies'} of {units.size(moved)}"
    if around.serving:
        lines.append(("Serves", serving(around.serving)))
    return [*lines, *said, ("Waits", met)]


def serving(each: Serving) -> str:
    """``1,300 tokens/s, 8 at once; the prompts, 512 tokens each, take 31.2 ms``.

    Without a prompt they are samples: an integer of each may as well be a user.
    """
    rate = units.number(each.batch / each.step_s)
    if not each.prompt_tokens:
        calls = units.number(1 / each.step_s)
        return f"{calls} calls/s with {counted(each.batch, 'sample')} each, {rate} samples/s"
    prompts = f"the prompt, {each.prompt_tokens:,} tokens, takes"
    if each.batch > 1:
        prompts = f"the prompts, {each.prompt_tokens:,} tokens each, take"
    prompts += f" {units.seconds(each.prompt_s)}"
    total = units.number(each.batch * each.prompt_tokens / each.prompt_s)
    return f"{rate} tokens/s, {each.batch:,} at once; {prompts} ({total} tokens/s)"


def footer(around: Around) -> Iterator[tuple[str, str]]:
    """What the step rests on: (label, words)."""
    for each in around.loaders:
        yield "Loader", loader(each)
    if around.assumptions:
        yield "Assumed", f"{counted(around.assumed, 'value')}, such as {assumption(around.assumptions[0])}"
    for made_up in around.fake:
        yield "Made up", made_up


def everything(around: Around) -> Iterator[tuple[str, list[str]]]:
    """What the lines above sum up, in full: (title, lines)."""
    if around.ranks:
        yield from ranks.everything(around.ranks)
    if around.meetings:
        yield "Where host and GPU meet", [meeting(each) for each in around.meetings]
    if around.assumptions:
        yield "Values that were assumed", [assumption(each) for each in around.assumptions]


def loader(each: Loader) -> str:
    """``train.py:20: batches of 64, 2 workers, pinned; 410 samples/s a process on this machine``."""
    workers = counted(each.workers, "worker") if each.workers else "no workers"
    memory = "pinned" if each.pinned else "not pinned"
    rate = "not timed"
    if each.batch_s and each.batch:
        rate = f"{units.number(each.batch / each.batch_s)} samples/s a process where it was timed"
    return f"{each.source}: batches of {each.batch}, {workers}, {memory}; {rate}"


def assumption(each: Assumption) -> str:
    """``item of fp32[] at train.py:41: 2.31``."""
    times = f" ({each.count} times)" if each.count > 1 else ""
    return f"{each.name} of {each.what} at {each.source}: {each.value}{times}"


def meeting(each: Meeting) -> str:
    """``train.py:41 item: the host waits``."""
    times = f" ({each.count} times)" if each.count > 1 else ""
    moved = f", {units.size(each.bytes)} {'to the GPU' if each.kind == TO_GPU else 'to the host'}"
    waits = "the host waits" if each.blocks else "the host goes on"
    return f"{each.source} {each.name}{times}: {waits}{moved if each.bytes else ''}"
