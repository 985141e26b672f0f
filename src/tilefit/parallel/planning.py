"""Which split of a training step is fastest on so many GPUs, at a fixed global batch, within their memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd, prod

from tilefit.cost.footprint import usable_bytes
from tilefit.cost.links import Fabric
from tilefit.errors import UsageError
from tilefit.ops import Attention, Conv, Gemm, Op, Recurrent, Step
from tilefit.parallel.blocks import Blocks, Framework, Model
from tilefit.parallel.choices import CHECKPOINTS, Precision, TrainingSplit
from tilefit.parallel.memory_choices import Thrifty
from tilefit.parallel.schedule import APART, ONE_F_ONE_B, ZERO_BUBBLE, ZERO_BUBBLE_V
from tilefit.parallel.training import RankMemory, StepTime, Training

#: Splits that are kept, best first.
KEPT = 24
#: Tokens of a rank's part of a sequence below which context parallelism is not tried. A choice.
LEAST_TOKENS = 4096
#: Samples of a micro-batch, at most, and tokens (each sample is one where there are none), where these are
#: fewer. A choice: more fill no GPU better.
MOST_SAMPLES, MOST_TOKENS = 64, 2**16
#: Micro-batches that follow each other, at most: more take hours for a step, and are never the fastest.
MOST_PARTS = 4096
#: A slow host's launches over the usual one's. Two of the same kind took 0.74 and 1.25 to 2.2 times the
#: standard host's time, the second within minutes (``benchmarks/several_gpus.py``).
SLOW_HOST = 1.5
#: Tokens of the fullest rank's experts over the mean, where a router does not balance them: the capacity that
#: Switch Transformers give experts (Fedus and others, 2021, section 2.2).
UNEVEN = 1.25
#: Parts of a stage that ``torch.distributed.pipelining`` keeps gathered, less the one that it gathers ahead
#: (``max_active_stages`` of ``_add_unshard_reshard``): of more it gathers each anew.
MOST_GATHERED = 2
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
    _blocks: dict[tuple[float, int, int], Blocks] = field(default_factory=dict)

    def training(self, split: TrainingSplit) -> Training:
        """A split with its blocks."""
        key = samples, tensor, experts = split.samples / split.context, split.tensor, split.experts
        if key not in self._blocks:
            self._blocks[key] = self.model.blocks(self.fabric, samples, tensor, self.job.framework, experts)
        job = self.job
        made = Training(self._blocks[key], split, self.fabric, job.precision, job.framework)
        return Thrifty.of(made, job.choices)

    def priced(self, split: TrainingSplit) -> Priced:
        """A split with its time and memory."""
        training = self.training(split)
        memory = training.memory()
        return Priced(split, training.time(), memory, training.parts, memory.total <= self.usable_bytes)

    def step_s(self, split: TrainingSplit, framework: Framework) -> float:
        """The step's time by another framework, or on another host."""
        job = replace(self.job, framework=framework)
        return Planner(self.model, self.fabric, job).training(split).step_s()

    @property
    def usable_bytes(self) -> float:
        """What a rank may hold; what the context takes is counted apart."""
        return usable_bytes(self.fabric.gpu)

    def best(self, gpus: int, count: int = KEPT) -> list[Priced]:
        """The fastest splits over so many GPUs, best first; none where nothing fits.

        Raises:
            UsageError: the batch cannot be shared by so many GPUs, or nothing joins them.
        """
        return self.ranked(list(self.splits(gpus)), count)

    def ranked(self, splits: list[TrainingSplit], count: int) -> list[Priced]:
        """The fastest of some splits that fit, best first. What cannot be among the best is not looked at."""
        found: list[tuple[float, int, Training]] = []
        least = sorted((self.training(split).least_s(), index) for index, split in enumerate(splits))
        for least_s, index in least:
            if len(found) >= count and least_s > found[count - 1][0]:
                break
            training = self.training(splits[index])
            if training.memory().total <= self.usable_bytes:
                found = sorted([*found, (training.step_s(), index, training)])[:count]
        return [
            Priced(training.split, training.time(), training.memory(), training.parts)
            for _, _, training in found
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
        shared = [(0, True)] if data * context == 1 else [(0, True), (1, True), (3, True), (3, False)]
        most = max(MOST_SAMPLES, MOST_TOKENS // max(1, tokens_of(self.model.step)))
        for samples, experts in product(_divisors(own, most), self._experts(tensor, data * context)):
            parts = own // samples
            if parts > MOST_PARTS:
                continue
            for (zero, reshard), (schedule, chunks) in product(shared, self._schedules(pipeline, parts)):
                if zero == 3 and pipeline > 1 and chunks > MOST_GATHERED:
                    continue
                for checkpoint in CHECKPOINTS if schedule not in APART else CHECKPOINTS[:1]:
                    yield TrainingSplit(
                        *(tensor, pipeline, data, parts, context, experts, zero, reshard),
                        *(samples, chunks, schedule, checkpoint),
                    )

    def _schedules(self, pipeline: int, parts: int) -> Iterator[tuple[str, int]]:
        """Schedules, and how many parts each stage has."""
        yield ONE_F_ONE_B, 1
        if pipeline == 1 or pipeline * 2 > self.model.layers:
            return
        yield ZERO_BUBBLE_V, 2
        if parts % pipeline == 0:
            yield from ((ZERO_BUBBLE, 2), (ONE_F_ONE_B, 2))
            if pipeline * 4 <= self.model.layers:
                yield ONE_F_ONE_B, 4

    def _experts(self, tensor: int, replicas: int) -> list[int]:
        """Ranks that may share experts; those that share the tensors have different ones."""
        ranks = gcd(self.model.experts, replicas * tensor) if self.model.experts else 1
        return [1, *(each for each in _powers(ranks) if each > 1 and not (ranks % each or each % tensor))]

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
    """Tokens of a sample of a captured step; 0 where its inputs are none.

    Several integers of a sample are tokens where the step computes on each of them: the columns of a table,
    whose embeddings lie side by side, are not.
    """
    samples = step.batch * step.program.beams // step.program.micro_batches
    for text in step.inputs:
        if (match := _TOKENS.search(text)) and int(match[1]) == samples:
            tokens = int(match[2])
            each = (_computes_each(entry.op, samples, tokens) for entry in step.ops)
            return tokens if tokens == 1 or any(each) else 0
    return 0


def _computes_each(op: Op, samples: int, tokens: int) -> bool:
    """Whether an operation has a row, a time step or a place for each token."""
    if isinstance(op, Gemm):
        return samples * tokens in (op.m, op.n, op.k) or (op.batch == samples and tokens in (op.m, op.n))
    if isinstance(op, Conv):
        return op.input_size == (tokens,)
    return isinstance(op, Attention | Recurrent) and op.seq_len == tokens


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
