"""What a user asks for, as values: how a step runs, what it is fed, how GPUs share it, which rules count.

A field that is an option of the command line says so in its metadata, of which
:mod:`tilefit.cli.option_groups` makes it; the ``TypedDict`` below a class has the same fields as keywords of
the Python functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from tilefit.errors import UsageError

Amp = Literal["bf16", "fp16", "off"]
OptimizerName = Literal["adamw", "sgd", "none"]
#: Sizes of inputs that can be synthesised.
INPUT_SIZES = ("batch", "seq", "image_size")
#: GPUs that one machine joins by their own links: an HGX board, or a server's PCIe slots, has at most eight.
MOST_LINKED = 8
#: Makes an optimizer of a list of parameters.
MakeOptimizer = Callable[[list[Any]], Any]


def option(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """A field that is an option: ``flags`` where they are not its name, ``more`` for ``typer.Option``."""
    return field(default=default, metadata={"flags": flags, "help": help, **more})


def spelled(name: str) -> str:
    """An option as it is written: ``--image-size``."""
    return f"--{name.replace('_', '-')}"


def refuse(names: Iterable[str], why: str) -> None:
    """Options that would have no effect are not ignored.

    Raises:
        UsageError: ``names`` is not empty; says ``why`` the first is of no use.
    """
    for name in names:
        raise UsageError(f"{spelled(name)} has no effect: {why}", hint="Leave it out.")


def require_in_range(options: Any) -> None:
    """Check the numbers of some options, as the command line does.

    Raises:
        UsageError: one is no number of its kind, or none that its option takes.
    """
    for each in fields(options):
        least, most = each.metadata.get("min"), each.metadata.get("max")
        value = getattr(options, each.name)
        if value is None or least is None:
            continue
        kind = float if "float" in str(each.type) else int
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or not least <= value <= (inf if most is None else most):
            wanted = f"at least {least}" if most is None else f"from {least} to {most}"
            noun = "a number" if kind is float else "a whole number"
            raise UsageError(f"{spelled(each.name)} is {value!r}", hint=f"Give {noun}, {wanted}.")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step runs.

    Attributes:
        train: Forward, loss, backward and optimizer; otherwise forward alone.
        amp: Autocast in ``bf16`` or ``fp16`` (with the gradient scaler's work); ``off`` for none.
        tf32: fp32 products may use TF32; None for PyTorch's defaults: convolutions yes, matrix products no.
        optimizer: Its name; or what makes one of a list of parameters.
        fused_optimizer: The optimizer runs with ``fused=True``.
        clip: The norm that gradients are clipped to, by ``clip_grad_norm_``; None: they are not.
        channels_last: The model and its 4-dimensional inputs are in NHWC.
        compile: The step is priced with the fusion of ``torch.compile``.
        on_cpu: It is captured with real tensors on the CPU, for code that depends on values.

    Raises:
        UsageError: a name is not known.
    """

    train: bool = option(True, "Training step or forward pass alone.", "--train/--infer")
    amp: Amp = option("off", "Mixed precision by autocast.")
    tf32: bool | None = option(None, "fp32 products in TF32; default as in PyTorch.", "--tf32/--no-tf32")
    optimizer: OptimizerName | MakeOptimizer = option(
        "adamw", "Optimizer of the training step.", annotation=OptimizerName
    )
    fused_optimizer: bool = option(False, "As with fused=True.")
    clip: float | None = option(None, "Clip the norm of the gradients.", min=0.0, metavar="NORM")
    channels_last: bool = option(False, "Model and images in NHWC.")
    compile: bool = option(False, "Price the fusion of torch.compile.")
    on_cpu: bool = option(False, "Capture with real data, for code that depends on values.")

    def __post_init__(self) -> None:
        # What is no word at all means none as well; PyTorch's own names of types are as good as ours.
        amp, optimizer = str(self.amp or "off"), self.optimizer or "none"  # type: ignore[unreachable]
        amp = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(amp, amp)
        if amp not in get_args(Amp):
            raise UsageError(f"unknown autocast type {amp!r}", hint="Use bf16 or fp16.")
        known = get_args(OptimizerName)
        if hasattr(optimizer, "param_groups"):
            raise UsageError(
                f"an {type(optimizer).__name__} has parameters of its own, and the step is made of a copy's",
                hint="Give what makes one: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1).",
            )
        if not callable(optimizer) and optimizer not in known:
            raise UsageError(f"unknown optimizer {optimizer!r}", hint=f"Use one of: {', '.join(known)}.")
        object.__setattr__(self, "amp", amp)
        object.__setattr__(self, "optimizer", optimizer)
        require_in_range(self)

    @property
    def words(self) -> tuple[str, ...]:
        """What cannot be seen from a model's name, for headings."""
        training = "training step" if self.train else "inference"
        autocast = [f"{self.amp} autocast"] if self.autocast else []
        clipped = [f"gradients clipped to {self.clip:g}"] if self.clip is not None else []
        return training, *autocast, *clipped, *(["compiled"] if self.compile else [])

    @property
    def device(self) -> str:
        """Where it is captured."""
        return "cpu" if self.on_cpu else "meta"

    @property
    def autocast(self) -> str:
        """The element type of autocast; empty for none."""
        return "" if self.amp == "off" else self.amp

    def refuse_idle(self, given: Collection[str]) -> None:
        """Refuse what was ``given`` of an optimizer where none runs.

        Raises:
            UsageError: something was.
        """
        names = [name for name in ("optimizer", "fused_optimizer", "clip") if name in given]
        if self.optimizer == "none":  # with --infer it says the same
            refuse((name for name in names if name != "optimizer"), "--optimizer none runs no optimizer")
        elif not self.train:
            refuse(names, "--infer runs no optimizer")


class StepKeywords(TypedDict, total=False):
    """The fields of :class:`StepOptions` as keywords."""

    train: bool
    amp: Amp
    tf32: bool | None
    optimizer: OptimizerName
    fused_optimizer: bool
    clip: float | None
    channels_last: bool
    compile: bool
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class TargetOptions(StepOptions):
    """How the step of a target runs, and what the target is built with and fed.

    Attributes:
        input: Texts such as ``input_ids: int64[16,1024]``; they win over everything else.
        batch, seq, image_size: Sizes of inputs that can be synthesised; None for a default.
        arguments: Sizes for the constructor, by name: arguments of a factory or of a library's model,
            attributes of a configuration. ``hidden`` and ``vocab`` stand for the usual names of these sizes.
        sources: Texts of files, by real path, to be read instead of what the files say.
        varied: The size that a sweep varies, which looks itself whether it has an effect.
        weights: Element type that floating-point parameters and inputs are turned into; empty: as they are.
    """

    input: tuple[str, ...] = option(
        (), 'An input, such as "input_ids: int64[16,1024]"; repeat.', metavar="SPEC"
    )
    batch: int | None = option(None, "Samples.", min=1, metavar="N")
    seq: int | None = option(None, "Tokens per sample.", min=1, metavar="N")
    image_size: int | None = option(None, "Height and width of an image.", min=1, metavar="N")
    arguments: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    varied: str = ""
    weights: Literal["", "bf16"] = ""

    def __post_init__(self) -> None:
        StepOptions.__post_init__(self)
        # A lone text would be taken for a list of one-letter inputs.
        given: object = self.input
        object.__setattr__(self, "input", (given,) if isinstance(given, str) else tuple(self.input))

    @property
    def own_sizes(self) -> Mapping[str, int | None]:
        """The sizes of inputs that are given."""
        return {name: getattr(self, name) for name in INPUT_SIZES}

    def takes(self, name: str) -> bool:
        """Whether a size may have an effect; the capture tells."""
        return True

    def require_places(self, names: Iterable[str]) -> None:
        """Nothing is refused before the capture."""

    def at_size(self, name: str, size: int, *, varies: bool = True) -> TargetOptions:
        """With one size: of the inputs, or of the model; ``varies``: as of :attr:`varied`."""
        own: dict[str, Any] = {name: size}
        changed = own if name in INPUT_SIZES else {"arguments": {**self.arguments, **own}}
        return replace(self, **changed, varied=name if varies else self.varied)

    def refuse_sizes(self, why: str, names: Iterable[str] = INPUT_SIZES) -> None:
        """Refuse sizes that would have no effect.

        Raises:
            UsageError: one of ``names`` was given; says ``why`` it is of no use.
        """
        refuse((name for name in names if getattr(self, name) is not None and name != self.varied), why)


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """A program, and which of its steps is captured.

    Attributes:
        program: Path of the script, or name of the module.
        arguments: The program's own; ``{batch}`` in them stands for the size of that name.
        is_module: It is started as ``python -m`` starts it.
        steps: Steps of its optimizer, or calls of its model, that the captured step is made of.
        skip: Steps before them.
        fake_data: Data that it lacks are made up.
        ranks: Processes, of which one is captured; 0 for as many as the environment says.
        rank: Which.
        nodes: Machines that share them; 0 for as few as there can be.
        network: What joins machines.
        sources: Texts of files, by real path, to be read instead of what the files say.
        sizes: What stands for ``{name}`` in the arguments.
    """

    program: str = ""
    arguments: tuple[str, ...] = ()
    is_module: bool = option(False, "Run a module of this name, as python -m does.", "-m")
    steps: int = option(1, "Steps that are looked at, as one.", min=1, metavar="N")
    skip: int = option(2, "Steps before them: the first does more.", min=1, metavar="N")
    fake_data: bool = option(False, "Make up data and weights that are not there, at random.")
    ranks: int = option(
        0,
        "Processes, one a GPU, as torchrun would start.",
        min=0,
        metavar="N",
        show_default=False,
    )
    rank: int = option(0, "Which of them is looked at, from 0.", min=0, metavar="N")
    nodes: int = option(
        0, "Machines that share them; default: of eight GPUs.", min=0, metavar="N", show_default=False
    )
    network: str = option("efa", "What joins machines, as of tilefit plan.")
    sources: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.nodes and (not self.ranks or self.ranks % self.nodes):
            raise UsageError(
                f"{self.nodes} machines do not share {self.ranks} processes evenly",
                where="--nodes",
                hint="Take a number of machines that divides --ranks.",
            )
        if self.rank and self.rank >= self.ranks:
            raise UsageError(
                f"there is no rank {self.rank} of {self.ranks}", where="--rank", hint="They count from 0."
            )

    @property
    def command(self) -> tuple[str, ...]:
        """Its arguments, with the sizes in them."""
        filled = list(self.arguments)
        for name, size in self.sizes.items():
            filled = [argument.replace(f"{{{name}}}", str(size)) for argument in filled]
        return tuple(filled)

    @property
    def words(self) -> tuple[str, ...]:
        """For headings: what it is started with."""
        return (" ".join(self.arguments),) if self.arguments else ()

    @property
    def own_sizes(self) -> Mapping[str, int | None]:
        """The sizes that its arguments are given."""
        return self.sizes

    def takes(self, name: str) -> bool:
        """Whether its arguments say where a size goes."""
        return any(f"{{{name}}}" in argument for argument in self.arguments)

    def require_places(self, names: Iterable[str]) -> None:
        """Refuse sizes that its arguments have no place for.

        Raises:
            UsageError: one of ``names`` is such.
        """
        for name in names:
            if not self.takes(name):
                raise UsageError(
                    f"the arguments of {self.program} do not say where {name} goes",
                    hint=f"Write it behind --, as {{{name}}}: {self.program} -- {spelled(name)} {{{name}}}.",
                )

    def at_size(self, name: str, size: int, *, varies: bool = True) -> ProgramOptions:
        """With one size in its arguments."""
        return replace(self, sizes={**self.sizes, name: size})

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun tells the process; nothing where nobody said how many there are."""
        if not self.ranks:
            return {}
        local = self.ranks // self.nodes if self.nodes else min(self.ranks, MOST_LINKED)
        place = {"RANK": self.rank, "LOCAL_RANK": self.rank % local, "GROUP_RANK": self.rank // local}
        first = {name: str(number) for name, number in place.items()}
        sizes = {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(local)}
        return {**first, **sizes, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


#: How the step of a target is made: of a model, or of a program.
AnyOptions = TargetOptions | ProgramOptions


@dataclass(frozen=True, slots=True)
class Split:
    """Over how many GPUs a step is split each way.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Stages, each a part of the layers.
        data: Replicas, each with its part of the batch.
        micro_batches: Parts in which a replica's batch goes through it, one after the other; 0 for as many as
            there are stages.

    Raises:
        UsageError: a number is below 1.
    """

    tensor: int = option(1, "GPUs that share each layer.", "--tensor-parallel", min=1, metavar="N")
    pipeline: int = option(1, "Stages, each a part of the layers.", "--pipeline-parallel", min=1, metavar="N")
    data: int = option(1, "Replicas, each with a part of the batch.", "--data-parallel", min=1, metavar="N")
    micro_batches: int = option(
        0, "Parts of a replica's batch; default: as many as stages.", min=0, metavar="N", show_default=False
    )

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} parallelism over {getattr(self, name)} GPUs")

    @property
    def gpus(self) -> int:
        """GPUs altogether."""
        return self.tensor * self.pipeline * self.data

    @property
    def parts(self) -> int:
        """Micro-batches of a replica."""
        return self.micro_batches or self.pipeline

    @property
    def is_trivial(self) -> bool:
        """One GPU does the whole batch at once."""
        return self.gpus == self.parts == 1

    def __str__(self) -> str:
        named = (("tensor", self.tensor), ("pipeline", self.pipeline), ("data", self.data))
        sizes = [f"{name} {size}" for name, size in named if size > 1]
        return ", ".join([*sizes, *([f"{self.parts} micro-batches"] if self.parts > 1 else [])]) or "one GPU"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which findings are wanted.

    Attributes:
        select, ignore: Codes of rules or their beginnings (``ALN``, ``ALN002``); all rules where ``select``
            is empty. Where fixes are chosen, their names too.
        min_gain: Smallest gain worth a finding, as a share of the step; None for the default of what is made;
            below 0, which Python alone takes, even what loses that much.
        per_module_ignores: Codes not to report, by pattern of module path (``{"encoder.*": ["QNT"]}``).
    """

    select: tuple[str, ...] = option(
        (),
        "Only these rules, by code or its beginning; repeat or separate by commas.",
        metavar="CODE",
        separator=",",
    )
    ignore: tuple[str, ...] = option((), "Not these rules.", metavar="CODE", separator=",")
    min_gain: float | None = option(
        None, "Smallest gain worth a finding, as a share of the step.", min=0, max=1, metavar="SHARE"
    )
    per_module_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("select", "ignore"):
            # A lone text would be taken for a list of one-letter codes, most of which are beginnings of some.
            codes = getattr(self, name)
            object.__setattr__(self, name, (codes,) if isinstance(codes, str) else tuple(codes))
        ignores = {pattern: tuple(codes) for pattern, codes in (self.per_module_ignores or {}).items()}
        object.__setattr__(self, "per_module_ignores", ignores)
        least = self.min_gain
        is_number = isinstance(least, int | float) and not isinstance(least, bool)
        if least is not None and not (is_number and -inf < least <= 1):
            raise UsageError(f"--min-gain is {least!r}", hint="Give a share of the step, at most 1.")


@dataclass(frozen=True, slots=True)
class FixSelection(Selection):
    """Which fixes are wanted. ``min_gain`` below zero asks for all that can be made, paying or not."""

    min_gain: float | None = option(None, "Smallest gain worth a change.", min=-inf, max=1)


class SelectionKeywords(TypedDict, total=False):
    """The fields of :class:`Selection` as keywords."""

    select: Collection[str]
    ignore: Collection[str]
    min_gain: float | None
    per_module_ignores: Mapping[str, Collection[str]] | None


class CheckKeywords(StepKeywords, SelectionKeywords, total=False):
    """The keywords of :func:`tilefit.check` beyond its own."""


class TargetKeywords(CheckKeywords, total=False):
    """Those of a target that is named, as on the command line: what its inputs are as well."""

    input: Collection[str]
    batch: int | None
    seq: int | None
    image_size: int | None


class Sizes(NamedTuple):
    """Which size varies, through what, and the others."""

    over: str
    values: tuple[int, ...]
    fixed: Mapping[str, int]

    def at(self, size: int) -> dict[str, int]:
        """All sizes, by name."""
        return {**self.fixed, self.over: size}

    def text(self, names: Sequence[str]) -> str:
        """``m=1:512 n=4096 k=4096``."""
        values = {name: str(size) for name, size in self.fixed.items()}
        values[self.over] = f"{self.values[0]}:{self.values[-1]}"
        return " ".join(f"{name}={values[name]}" for name in names)


def taken(function: str, keywords: Mapping[str, Any], *kinds: type) -> list[Any]:
    """A value of each of the ``kinds``, made of its part of a function's keywords.

    Raises:
        TypeError: a keyword belongs to none of them.
    """
    names = [[each.name for each in fields(kind)] for kind in kinds]
    for name in keywords:
        if not any(name in own for own in names):
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return [
        kind(**{name: keywords[name] for name in own if name in keywords})
        for kind, own in zip(kinds, names, strict=True)
    ]
