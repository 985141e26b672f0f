"""What only a whole program shows of its step: where the host waits, what was assumed, how data arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilefit.ops.entries import Site

#: Values of :attr:`HostEvent.kind`: the host reads a value of a GPU tensor and so waits for all that it has
#: launched; a copy from the host to the GPU; one from the GPU to the host.
WAIT, TO_GPU, TO_HOST = "wait", "to_gpu", "to_host"
#: Name of a wait for an event behind which more was launched: it keeps the host from running too far ahead.
EARLIER = "earlier event"
#: The name of a read by which ``torch.distributions`` checks its arguments.
VALIDATE_ARGS = "validate_args"
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class HostEvent:
    """A point of a step at which host and GPU meet.

    Attributes:
        index: How many of the step's operations were launched before it.
        kind: :data:`WAIT`, :data:`TO_GPU` or :data:`TO_HOST`.
        name: What the program called, such as ``item``, ``nonzero``, ``isnan``, ``to``, ``synchronize``.
        site: The line of the program.
        bytes: What a copy moves; 0 for none.
        pinned: The host's memory is page-locked.
        non_blocking: The copy was asked for as such; it does not block only from pinned memory.
        event: Of a stream's, its number, where the host waits for what was before it; 0: for all.
        within: A module runs: its own code meets the host.
        after: How much the streams were asked for before it, of :attr:`Program.order`; -1: all at its index.
    """

    index: int
    kind: str
    name: str
    site: Site
    bytes: int = 0
    pinned: bool = False
    non_blocking: bool = False
    event: int = 0
    after: int = -1
    within: bool = False

    @property
    def blocks(self) -> bool:
        """Whether the host waits here: for all that was launched, or for the copy.

        A copy that is not waited for needs pinned memory. PyTorch's ``.to("cpu", non_blocking=True)`` makes
        such memory itself, and says so in ``pinned``.
        """
        return self.kind == WAIT or not (self.pinned and self.non_blocking)


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that was asked of a GPU tensor which nobody has computed.

    Attributes:
        name: What the program called, such as ``item``.
        what: The tensor, such as ``fp32[]`` or ``bool[64,128]``.
        value: The answer it was given, as text.
        source: The line.
        count: How many times in the program until the end of the step.
    """

    name: str
    what: str
    value: str
    source: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader of the program's, as timed on this machine.

    Attributes:
        source: The line that made it.
        batch: Samples a batch.
        workers: Processes that load (``num_workers``).
        pinned: ``pin_memory``.
        batch_s: Seconds in which one process makes a batch; 0 where it was not timed.
        timed: How many batches were.
        drawn: Batches that a step drew; 0 where that was not counted.
    """

    source: str
    batch: int
    workers: int
    pinned: bool
    batch_s: float = 0.0
    timed: int = 0
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Called:
    """A model that the program calls.

    Attributes:
        call: Where its first call is written: ``file:line:column`` of its end.
        beside: The call, written so, that goes on where an optimizer of the step is made and the model has a
            name; empty where there is none.
        name: That name, such as ``self.model``.
    """

    call: str
    beside: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Habit:
    """A way in which the program is written that costs time on a GPU and leaves no mark in its operations.

    Attributes:
        name: Which: ``detect_anomaly``, ``launch_blocking``, ``deterministic``, ``keeps_gradients``
            (``zero_grad(set_to_none=False)``), ``parameter_loop``, ``evaluates_with_gradients``,
            ``synchronizes_micro_batches``, ``finds_nothing_unused``, ``differentiates_backward``
            (``create_graph=True``), ``called_by_a_method`` (the model's parts are, instead of the model).
        site: Its line.
        first, last: The operations it made, as indices into the step's (``last`` excluded); equal where none.
        detail: What a reader needs to know, such as ``161 parameters``.
    """

    name: str
    site: Site
    first: int = 0
    last: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective that the program calls, which nobody answers here.

    Attributes:
        index: How many of the step's operations were launched before it.
        function: What it is priced as: one of :data:`tilefit.ops.collective.FUNCTIONS`.
        name: What it is, such as ``all-reduce`` or ``broadcast``.
        bytes: Of the tensor; where each rank has a part of it, of all parts.
        ranks: Processes that take part.
        per_machine: Of them in one machine.
        site: The line of the program.
        dtype: Element type.
        group: The group of processes, by its name: what it is asked for runs one after the other.
        grows: Its bytes grow with the batch.
        phase: As of an operation.
        copied: ``fully_shard`` calls it, which copies parameters and gradients into it and out of it.
    """

    index: int
    function: str
    name: str
    bytes: int
    ranks: int
    per_machine: int
    site: Site
    dtype: str = "fp32"
    group: str = ""
    grows: bool = False
    phase: str = ""
    copied: bool = False


#: What happens to a stream: the operations that follow run on it; an event is recorded on it; it waits for
#: one; an exchange runs on it.
TO_STREAM, RECORD, AWAIT, EXCHANGE = "to", "record", "await", "exchange"


@dataclass(frozen=True, slots=True)
class Ordered:
    """What the program asks of a stream, beside operations.

    Attributes:
        index: How many of the step's operations were launched before it.
        kind: :data:`TO_STREAM`, :data:`RECORD`, :data:`AWAIT` or :data:`EXCHANGE`.
        stream: Its number; 0 is the one that everything runs on by default.
        number: Of the event, or of the exchange in :attr:`Program.exchanges`.
    """

    index: int
    kind: str
    stream: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """The program around a step; of a model's own step, in which none was run, what it shares with one. False
    where there is nothing to be known of it but where its optimizers and models are.

    Attributes:
        command: As it was started, such as ``train.py --batch-size 64``; empty where none was run.
        step: What the step is, such as ``4 micro-batches of 8, AdamW fused, bf16 autocast``.
        steps: Steps that were run, the captured one included.
        updates: Whether it changes parameters, by an optimizer or by hand.
        in_models: Share of the forward operations that are made within calls of its models.
        micro_batches: Forward passes over samples of their own that a step sums the gradients of.
        beams: Inputs of a call that are tried for one sample, of which one is kept: beam search's.
        events: Where host and GPU meet within the step, in order.
        assumptions: What was answered without being known, in the order of first use.
        loaders: The data loaders that fed the step.
        habits: Ways of writing it that cost time.
        fake: Data that were made up, such as ``torchvision.datasets.MNIST: 60000 random images``.
        optimizers: Of each that stepped, the line that made it.
        models: Those that are called and have parameters, the one that the step is of first.
        exchanges: Collectives of the step, in order.
        order: What the streams are told, in order.
        ranks: Processes of the program, of which this is one.
        rank: Which.
        per_machine: Of them in one machine.
        network: What joins their machines, as it is asked for; empty for one machine.
        host_work: What the program does on tensors of the host's, beside its loaders: elements by function.
        split: Modules whose parameters are tensors of several ranks while they compute (``DTensor``).
    """

    command: str = ""
    step: str = ""
    steps: int = 1
    updates: bool = True
    in_models: float = 1.0
    micro_batches: int = 1
    beams: int = 1
    events: tuple[HostEvent, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    loaders: tuple[Loader, ...] = ()
    habits: tuple[Habit, ...] = ()
    fake: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    models: tuple[Called, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    order: tuple[Ordered, ...] = ()
    ranks: int = 1
    per_machine: int = 1
    network: str = ""
    rank: int = 0
    host_work: tuple[tuple[str, int], ...] = ()
    split: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return replace(self, optimizers=(), models=()) != Program()

    @property
    def was_run(self) -> bool:
        """Whether there is one."""
        return bool(self.command)

    @property
    def calls_models(self) -> bool:
        """Whether the step is a program's or a function's, which calls models, and no model's own."""
        return self.was_run or bool(self.models)

    def moved(self, place: Callable[[int], int]) -> Program:
        """With its operations elsewhere: ``place`` says how many there are now before what had so many."""
        return replace(
            self,
            events=tuple(replace(event, index=place(event.index)) for event in self.events),
            exchanges=tuple(replace(each, index=place(each.index)) for each in self.exchanges),
            order=tuple(replace(each, index=place(each.index)) for each in self.order),
            habits=tuple(
                replace(habit, first=place(habit.first), last=place(habit.last)) for habit in self.habits
            ),
        )

    def on_batch(self, factor: float) -> Program:
        """With ``factor`` times the samples: what is copied to the GPU grows, but for single numbers, what
        ranks exchange of it, and what the host makes."""
        events = (
            replace(event, bytes=round(factor * event.bytes))
            if event.kind == TO_GPU and event.bytes > _NUMBER_BYTES
            else event
            for event in self.events
        )
        exchanges = (
            replace(each, bytes=round(factor * each.bytes)) if each.grows else each for each in self.exchanges
        )
        work = tuple((name, round(factor * elements)) for name, elements in self.host_work)
        return replace(self, events=tuple(events), exchanges=tuple(exchanges), host_work=work)
