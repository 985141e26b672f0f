"""Which split of a training step is fastest on so many GPUs, at a fixed global batch, within their memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from tilefit.cost.links import Fabric
from tilefit.errors import UsageError
from tilefit.ops import Step
from tilefit.parallel.blocks import Blocks, Framework, Model
from tilefit.parallel.choices import CHECKPOINTS, Precision, TrainingSplit
from tilefit.parallel.memory_choices import Thrifty
from tilefit.parallel.training import RankMemory, StepTime, Training
from tilefit.rules.batch.memory import USABLE_SHARE

#: Splits that are kept, best first.
KEPT = 24
#: Tokens of a rank's part of a sequence below which context parallelism is not tried. A choice.
LEAST_TOKENS = 4096
#: Samples of a micro-batch, at most. A choice: more fill no GPU better.
MOST_SAMPLES = 64
#: Micro-batches that follow each other, at most: more take hours for a step, and are never the fastest.
MOST_PARTS = 4096
#: A slow host's launches over the usual one's. Two of the same kind took 0.74 and 1.25 to 2.2 times the
#: standard host's time, the second within minutes (``benchmarks/several_gpus.py``).
SLOW_HOST = 1.5
#: Doubling the GPUs should gain at least this share.
LEAST_SCALING = 0.2
_TOKENS = re.compile(r"\w+: int64\[(\d+),(\d+)\]")


@dataclass(frozen=True, slots=True)
class Priced:
    """A split with what it costs.

    Attributes:
        split: How GPUs share the step.
        time: The step's time, and what it consists of.
        memory: Of the rank that holds most.
        layers: How many each part of the pipeline has, in the order in which they run.
        fits: It holds no more than the GPU has.
    """

    split: TrainingSplit
    time: StepTime
    memory: RankMemory
    layers: tuple[int, ...]
    fits: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be planned.

    Attributes:
        batch: Samples of a step, over all GPUs.
        precision: Bytes of a parameter.
        framework: What runs the training.
        choices: Names of what it holds less by, of :data:`tilefit.parallel.memory_choices.CHOICES`.
    """

    batch: int
    precision: Precision
    framework: Framework = Framework()  # noqa: RUF009  # it is frozen
    choices: tuple[str, ...] = ()


@dataclass
class Planner:
    """Splits of a model over one kind of GPU.

    Attributes:
        model: The captured step.
        fabric: The GPU, its machines and what joins them.
        job: What is to be planned.
    """

    model: Model
    fabric: Fabric
    job: Job
    _blocks: dict[tuple[float, int], Blocks] = field(default_factory=dict)

    def training(self, split: TrainingSplit) -> Training:
        """A split with its blocks."""
        key = (split.samples / split.context, split.tensor)
        if key not in self._blocks:
            self._blocks[key] = self.model.blocks(self.fabric, *key, self.job.framework)
        job = self.job
        made = Training(self._blocks[key], split, self.fabric, job.precision, job.framework)
        return Thrifty.of(made, job.choices)

    def priced(self, split: TrainingSplit) -> Priced:
        """A split with its time and memory."""
        training = self.training(split)
        memory = training.memory()
        return Priced(split, training.time(), memory, training.parts, memory.total <= self.usable_bytes)

    def on_slow_host(self, split: TrainingSplit) -> float:
        """The step's time where the host takes :data:`SLOW_HOST` times as long."""
        slow = replace(self.job, framework=replace(self.job.framework, host=SLOW_HOST))
        return Planner(self.model, self.fabric, slow).training(split).step_s()

    @property
    def usable_bytes(self) -> float:
        """What a rank may hold; what the context takes is counted apart."""
        return self.fabric.gpu.memory_bytes * USABLE_SHARE

    def best(self, gpus: int, count: int = KEPT) -> list[Priced]:
        """The fastest splits over so many GPUs, best first; none where nothing fits.

        Raises:
            UsageError: the batch cannot be shared by so many GPUs, or nothing joins them.
        """
        return self.ranked(list(self.splits(gpus)), count)

    def ranked(self, splits: list[TrainingSplit], count: int) -> list[Priced]:
        """The fastest of some splits that fit, best first."""
        fitting = []
        for split in splits:
            training = self.training(split)
            memory = training.memory()
            if memory.total <= self.usable_bytes:
                fitting.append((training.least_s(), training, memory))
        fitting.sort(key=lambda each: each[0])
        found: list[tuple[float, int]] = []
        for index, (least_s, training, _) in enumerate(fitting):
            # What cannot be among the best is not looked at.
            if len(found) >= count and least_s > found[count - 1][0]:
                break
            found = sorted([*found, (training.step_s(), index)])[:count]
        best = (fitting[index] for _, index in found)
        return [
            Priced(training.split, training.time(), memory, training.parts) for _, training, memory in best
        ]

    def splits(self, gpus: int) -> Iterator[TrainingSplit]:
        """Every split over so many GPUs that keeps the global batch.

        Raises:
            UsageError: there is none.
        """
        gpu = self.fabric.gpu
        if gpus > 1 and not gpu.link_bandwidth_bytes_per_s:
            raise UsageError(f"nothing is known of what joins several {gpu.title}", hint="Take another GPU.")
        contexts = _powers(max(1, tokens_of(self.model.step) // LEAST_TOKENS))
        any_found = False
        for tensor in _divisors(min(gpus, self.fabric.per_machine)):
            if self.model.heads % tensor and tensor > 1:
                continue
            for context in contexts:
                for pipeline in (
                    _divisors(gpus // (tensor * context)) if gpus % (tensor * context) == 0 else ()
                ):
                    data = gpus // (tensor * context * pipeline)
                    if pipeline > self.model.layers or self.job.batch % data:
                        continue
                    for split in self._micro_batches(tensor, context, pipeline, data):
                        any_found = True
                        yield split
        if not any_found:
            raise UsageError(
                f"a global batch of {self.job.batch} cannot be shared by {gpus} GPUs",
                where="--global-batch",
                hint="Take a global batch that is a multiple of the number of GPUs, or fewer GPUs.",
            )

    def _micro_batches(self, tensor: int, context: int, pipeline: int, data: int) -> Iterator[TrainingSplit]:
        own = self.job.batch // data
        for samples in _divisors(own, MOST_SAMPLES):
            parts = own // samples
            if parts > MOST_PARTS:
                continue
            levels = (0,) if data * context == 1 else (0, 1, 3) if pipeline == 1 else (0, 1)
            chunks = [1]
            if pipeline > 1 and parts % pipeline == 0:
                chunks += [each for each in (2, 4) if pipeline * each <= self.model.layers]
            for zero in levels:
                for chunk in chunks:
                    for checkpoint in CHECKPOINTS:
                        yield TrainingSplit(
                            tensor, pipeline, data, parts, context, zero, samples, chunk, checkpoint
                        )

    def counts(self, gpus: int) -> list[int]:
        """Powers of two of GPUs up to ``gpus``, and ``gpus``, that machines have and parameters fit on."""
        precision = self.job.precision
        each = precision.weight * (not precision.master) + precision.gradient + precision.optimizer
        held = self.model.parameters * each
        machine = self.fabric.per_machine
        return [
            count
            for count in sorted({*_powers(gpus), gpus})
            if held <= count * self.usable_bytes and (count <= machine or not count % machine)
        ]


def tokens_of(step: Step) -> int:
    """Tokens of a sample of a captured step; 0 where its inputs are none."""
    for text in step.inputs:
        if (match := _TOKENS.search(text)) and int(match[1]) == step.batch:
            return int(match[2])
    return 0


def precision_of(step: Step) -> Precision:
    """Bytes of a parameter as the captured step trains them.

    Weights of 16 bits have a copy in fp32 that the optimizer updates; autocast reads 16 bits of fp32 weights.
    Gradients are kept and summed up in fp32, as Megatron-LM, FSDP's mixed precision and DDP with autocast do.
    """
    trained = [p for p in step.parameters.values() if p.trainable]
    short = sum(prod(p.shape) for p in trained if p.dtype in ("bf16", "fp16"))
    is_short = 2 * short > sum(prod(p.shape) for p in trained)
    moments = {"adamw": 8, "adam": 8, "sgd": 0}.get(step.settings.optimizer, 8)
    work = 2 if is_short or step.settings.amp else 4
    master = 4 * is_short
    return Precision(2 if is_short else 4, work, 4, moments + master, master=master)


def _powers(most: int) -> list[int]:
    return [1 << each for each in range(max(1, most).bit_length())]


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [each for each in range(1, min(number, most or number) + 1) if number % each == 0]
