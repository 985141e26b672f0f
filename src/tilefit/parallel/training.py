"""A training step on many GPUs: the tasks of every pipeline stage on its streams, and what a rank holds.

One rank of each stage stands for all that do the same. It has two streams: it computes, and it communicates
with other replicas and stages. Tensor-parallel communication is waited for, so that it is part of the
computation. Sources: Narayanan and others, "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", 2021 (1F1B, interleaved stages); Rajbhandari and others, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", 2020 (what is sharded); Zhao and others, "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel", 2023 (prefetching).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from tilefit.cost.launch import fsdp_s
from tilefit.cost.links import TAKEN, Fabric, Group
from tilefit.cost.priced import priced
from tilefit.ops.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND
from tilefit.parallel.blocks import Block, Blocks, Framework
from tilefit.parallel.choices import Precision, TrainingSplit
from tilefit.parallel.schedule import (
    APART,
    ZERO_BUBBLE_V,
    Flight,
    Task,
    in_flight,
    order,
    place_of,
    run,
    stage_of,
)

#: A context of CUDA, what libraries hold and NCCL's buffers: 1.6 GiB beyond what PyTorch reserves for DDP and
#: FSDP2 on 2 H100 and 2 H200, 1.7 with DTensor, 2.0 with pipelines (``benchmarks/several_gpus.py``).
CONTEXT_BYTES = 1638 * 2**20
#: Share of the memory's bandwidth that adding tensors up reaches, as fitted on A100.
_STREAMED = 0.86
#: What the host needs for each parameter that DDP copies into a bucket and back: 0 to 56 us, 23 in the
#: median, in seven steps on 2 H100 that a host limits whose scale was measured beside them
#: (``several_gpus_held_h100`` and ``_h100`` of ``benchmarks/results``); by scales of minutes before, 45.
#: Eight later steps are 10 % off with it, 15 with 45 (``several_gpus_third_h100``, ``_third_again_h100``).
DDP_HOST_S = 20e-6
#: And for each layer that is computed again, beside its launches: 1.6 ms (GPT-2-XL), 1.5 (OPT), 1.5 and 4
#: (DTensor) in the four such steps there.
CHECKPOINT_S = 1.5e-3
#: What a stage does that has no layer.
_NOTHING = Block()


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted time of a step, and what it consists of.

    Attributes:
        time_s: Of the step.
        compute_s: Of the stage that computes longest, without what it computes again.
        recompute_s: What it computes again.
        tensor_s: Communication within layers: of tensor-, context- and expert-parallel ranks.
        data_s: Communication between replicas and stages that nothing hides.
        bubble_s: Waiting for the pipeline to fill and to drain.
        optimizer_s: Of the optimizer.
        launch_s: By how much the host's launches, and what it does for messages, make it longer; nothing of
            it is in the other parts.
        host_s: Copies to and from the host that nothing hides.
    """

    time_s: float
    compute_s: float
    recompute_s: float
    tensor_s: float
    data_s: float
    bubble_s: float
    optimizer_s: float
    launch_s: float = 0.0
    host_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Communication that the step waits for."""
        return self.tensor_s + self.data_s


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds at most, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    other: float

    @property
    def total(self) -> float:
        """Altogether."""
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.temporary + self.other


class _HeldSums(NamedTuple):
    """What the first so many blocks of a stage hold: elements of parameters, bytes of all else.

    Attributes:
        parameters: Parameters.
        gradients: Gradients.
        scattered: Of these, what a rank no longer holds when they are summed up.
        kept: Activations of a micro-batch.
        late: What gradients of weights that are put off wait with.
        shared: Elements of all parameters that a rank holds where replicas share them.
        bounds: The first block of each chunk, and the one behind its last.
    """

    parameters: list[float]
    gradients: list[float]
    scattered: list[float]
    kept: list[float]
    late: list[float]
    shared: float
    bounds: tuple[tuple[int, int], ...]

    def of(self, sums: list[float], counts: Iterable[int]) -> float:
        """What so many micro-batches of each chunk hold."""
        spans = zip(self.bounds, counts, strict=True)
        return sum(count * (sums[end] - sums[begin]) for (begin, end), count in spans)


@dataclass(frozen=True)
class Training:
    """A split of a model over a cluster.

    Attributes:
        blocks: The model on one rank.
        split: How.
        fabric: Machines and what joins them.
        precision: Bytes of a parameter.
        framework: What runs the training.
    """

    blocks: Blocks
    split: TrainingSplit
    fabric: Fabric
    precision: Precision
    framework: Framework

    # --- what a stage has -------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[list[Block]]:
        """The blocks of each stage, chunk after chunk."""
        chunks = range(self.split.chunks)
        return [
            [block for chunk in chunks for block in self.chunk(stage, chunk)]
            for stage in range(self.split.pipeline)
        ]

    def chunk(self, index: int, chunk: int) -> list[Block]:
        """The blocks of a stage's chunk; the first has what runs before the layers, the last what runs
        after."""
        place = place_of(index, chunk, self.split.pipeline, self.split.schedule)
        own = list(self.blocks.layers[self.bounds[place] : self.bounds[place + 1]])
        last = place == len(self.bounds) - 2
        return [self.blocks.before] * (place == 0) + own + [self._after] * last or [_NOTHING]

    @cached_property
    def _after(self) -> Block:
        """What runs after the layers; in another stage it has tied parameters of its own."""
        after = self.blocks.after
        own = self.split.pipeline > 1 and self.blocks.tied
        return replace(after, parameters=after.parameters + own) if own else after

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where each part of the layers begins, and where the last ends."""
        parts = self.split.pipeline * self.split.chunks
        return self.framework.bounds(parts) if self.framework.bounds else self.blocks.bounds(parts)

    @property
    def parts(self) -> tuple[int, ...]:
        """How many layers each part has, in the order in which they run."""
        return tuple(end - begin for begin, end in pairwise(self.bounds))

    def _accumulated_s(self, block: Block) -> float:
        """Adding a micro-batch's gradients to those of the others: one is read, one read and written."""
        moved = (self.precision.weight + 2 * self.precision.gradient) * (self.split.parts > 1)
        shared = self.split.zero > 1 and self._sums(0, self.split.parts)
        return self._copied_s(self._held(block, shared), moved)

    @cached_property
    def _known(self) -> dict[int, Block]:
        """Blocks as the split runs them, by identity: layers are the same ones again and again."""
        blocks = (self.blocks.before, *self.blocks.layers, self._after, _NOTHING)
        return {id(block): self._timed(block) for block in {id(each): each for each in blocks}.values()}

    def _times(self, block: Block) -> Block:
        return self._known[id(block)]

    def _timed(self, block: Block) -> Block:
        block = block if self.framework.host else replace(block, forward_host_s=0.0, backward_host_s=0.0)
        forward_link_s, backward_link_s = block.forward_link_s, block.backward_link_s
        if self.split.context > 1 and block.input_bytes:
            # Keys and values of the other ranks, gathered and their gradients scattered.
            group = self.fabric.group(self.split.context, self.split.tensor)
            size = 2 * block.input_bytes * self.split.context
            forward_link_s += self.fabric.time_s(ALL_GATHER, size, group)
            backward_link_s += self.fabric.time_s(REDUCE_SCATTER, size, group)
        backward_s, again_s = block.backward_s + self._accumulated_s(block), 0.0
        layer_s = self.framework.layer_host_s / 3 * (not self._is_end(block)) * bool(self.framework.host)
        forward_host_s = max(block.forward_host_s, layer_s)
        backward_host_s = max(block.backward_host_s, 2 * layer_s)
        if self.split.checkpoint != "none" and not self._is_end(block):
            full = self.split.checkpoint == "full"
            again_s = max(0.0, block.forward_s - (0.0 if full else block.products_s))
            backward_link_s += forward_link_s if full else 0.0
            # It is computed again, or launched, before the backward pass.
            own_s = max(backward_s + backward_link_s, backward_host_s) + max(again_s, forward_host_s)
            launches_s = block.forward_host_s + block.backward_host_s + CHECKPOINT_S * self._host_scale
            backward_host_s = max(own_s, launches_s)
        return replace(
            block,
            backward_s=backward_s,
            weights_s=block.weights_s + self._accumulated_s(block),
            forward_host_s=forward_host_s,
            backward_host_s=backward_host_s,
            recompute_s=again_s,
            forward_link_s=forward_link_s,
            backward_link_s=backward_link_s,
            gathered_s=self._exchanged_s(ALL_GATHER, block, self.precision.work),
            summed_s=self._summed_s(block),
        )

    # --- communication ----------------------------------------------------------------------------

    def _replicas(self, block: Block) -> Iterator[tuple[int, Group]]:
        """Elements of a block with the ranks that hold the same ones: experts have fewer.

        Where the sequence is split, tensor-parallel ranks hold different experts, or the same ones for
        different tokens.
        """
        split = self.split
        ranks, stride = split.replicas, split.tensor
        whole = self.fabric.group(ranks, stride)
        if self.framework.sequence:
            ranks, stride = ranks * split.tensor, 1
        fewer = self.fabric.group(ranks // split.experts, stride * split.experts)
        apart = block.experts if fewer != whole else 0
        yield block.parameters - apart, whole
        if apart:
            yield apart, fewer

    def _exchanged_s(self, function: str, block: Block, bytes_each: int, most: float = inf) -> float:
        """Exchanging so many bytes of each element, in messages of at most ``most`` bytes."""
        whole_s = 0.0
        for elements, group in self._replicas(block):
            size = elements * bytes_each
            message = min(size, most)
            whole_s += size / message * self.fabric.time_s(function, message, group) if size else 0.0
        return whole_s

    def _summed_s(self, block: Block) -> float:
        """Summing up a block's gradients: FSDP's in one message, else in messages of the size of a bucket."""
        scatters = self.split.zero == 3 or (self.split.zero and self.framework.scatters)
        most = inf if self.split.zero == 3 else self.framework.bucket_bytes
        return self._exchanged_s(
            REDUCE_SCATTER if scatters else ALL_REDUCE, block, self.precision.gradient, most
        )

    def _held(self, block: Block, shared: bool = True) -> float:
        """Elements of a block that a rank holds, where replicas share them."""
        return sum(elements / (group.ranks if shared else 1) for elements, group in self._replicas(block))

    @cached_property
    def _reduces(self) -> bool:
        whole = self._sum_of(block for stage in self.stages for block in stage)
        return any(elements and group.ranks > 1 for elements, group in self._replicas(whole))

    def _sums(self, part: int, parts: int) -> bool:
        """Whether gradients are summed up behind a micro-batch."""
        return self._reduces and self.split.sums(part, parts)

    @staticmethod
    def _sum_of(blocks: Iterable[Block]) -> Block:
        """The parameters of blocks as those of one."""
        sizes = [(block.parameters, block.experts, block.tensors) for block in blocks]
        parameters, experts, tensors = map(sum, zip(*sizes, strict=True)) if sizes else (0, 0, 0)
        return Block(parameters=parameters, experts=experts, tensors=tensors)

    def _send_s(self) -> float:
        """Handing a micro-batch's activations to the next stage."""
        return self.fabric.time_s(SEND, self._sent_bytes, Group(2, 2 if self._is_inside else 1))

    @property
    def _is_inside(self) -> bool:
        """A stage and the next are in one machine."""
        return self.split.tensor * self.split.replicas < self.fabric.per_machine

    @cached_property
    def _sent_bytes(self) -> int:
        """What a stage hands to the next of a micro-batch."""
        return max(block.input_bytes for block in (*self.blocks.layers, self.blocks.after))

    # --- tasks ------------------------------------------------------------------------------------

    def tasks(self, parts: int) -> Iterator[Task]:
        """A step of so many micro-batches."""
        for stage in range(self.split.pipeline):
            yield from self._staged(stage, parts)

    def _staged(self, stage: int, parts: int) -> Iterator[Task]:
        """What a stage does, pass by pass in its order, then the optimizer.

        Within a pass FSDP gathers what is not there, one block ahead, and frees it again. In a pipeline it
        frees nothing behind a backward pass, and sums gradients up when all passes of a chunk are over, as
        ``torch.distributed.pipelining`` has it.
        """
        split = self.split
        chunks = [[self._times(block) for block in self.chunk(stage, chunk)] for chunk in range(split.chunks)]
        places, send_s = split.pipeline * split.chunks, self._send_s() if split.pipeline > 1 else 0.0
        ends = ("W" if self._is_apart else "B",)
        gathered: list[set[int]] = [set() for _ in chunks]
        recent: deque[Hashable] = deque(maxlen=2)
        summed: list[Hashable] = []
        for kind, part, chunk in order(stage, split.pipeline, split.chunks, parts, split.schedule):
            place = place_of(stage, chunk, split.pipeline, split.schedule)
            name, blocks = (kind, part, place), chunks[chunk]
            every = set(range(len(blocks)))
            missing = every - gathered[chunk] if split.zero == 3 and kind != "W" else set[int]()
            sums = kind in ends and self._sums(part, parts)
            summed += [("R", *name, i) for i in every] * sums
            yield from self._pass(stage, name, blocks, missing, recent, sums=sums)
            if kind == "F":  # the last block is still there when the backward pass begins
                kept = {len(blocks) - 1} if split.pipeline == 1 else set[int]()
                gathered[chunk] = kept if split.reshard else every
            elif kind == "B":
                gathered[chunk] = every if split.pipeline > 1 else set()
            if split.pipeline > 1 and self._next(kind, place) in range(places):
                yield Task(
                    ("sent", *name), (stage, "send", kind), send_s * self._crosses(kind, place), (name,)
                )
        yield from self._update(stage, tuple(summed) or ((ends[0], parts - 1, stage),))

    @property
    def _is_apart(self) -> bool:
        """Gradients of weights are passes of their own."""
        return self.split.schedule in APART

    @property
    def _is_ahead(self) -> bool:
        """Messages are asked for ahead, and what is sent is held until the end of the step
        (``_PipelineScheduleRuntime`` of ``torch.distributed.pipelining``)."""
        return self.split.chunks > 1 or self._is_apart

    def _next(self, kind: str, place: int) -> int:
        """Where the result of a pass goes; nowhere: -1."""
        return {"F": place + 1, "B": place - 1}.get(kind, -1)

    def _crosses(self, kind: str, place: int) -> bool:
        """Whether it is another stage's."""
        stages = self.split.pipeline
        return not self._turns or {place, self._next(kind, place)} != {stages - 1, stages}

    @property
    def _turns(self) -> bool:
        return self.split.schedule == ZERO_BUBBLE_V

    def _before(self, kind: str, part: int, place: int) -> tuple[Hashable, ...]:
        """What a pass waits for."""
        last = self.split.pipeline * self.split.chunks - 1
        if kind == "W":
            return (("B", part, place),)
        if kind == "F":
            return (("sent", "F", part, place - 1),) if place else ()
        return (("sent", "B", part, place + 1),) if place < last else (("F", part, place),)

    def _pass(
        self,
        stage: int,
        name: tuple[str, int, int],
        blocks: list[Block],
        missing: set[int],
        recent: deque[Hashable],
        *,
        sums: bool,
    ) -> Iterator[Task]:
        """A pass over a chunk; block by block where messages go beside it.

        Args:
            stage: Whose.
            name: The pass, the micro-batch, which chunk.
            blocks: Of the chunk.
            missing: Those that are gathered.
            recent: The two pieces of work before it: two blocks are held at once.
            sums: Gradients are summed up.
        """
        after, compute, link = self._before(*name), (stage, "compute"), (stage, "link")
        if not missing and not sums:
            yield Task(name, compute, sum(self._pass_s(block, name[0]) for block in blocks), after)
            recent.append(name)
            return
        within = self.framework.overlap and not (self.split.zero == 3 and self.split.pipeline > 1)
        ahead, ready = 0.0, list[Task]()
        indices = range(len(blocks)) if name[0] == "F" else range(len(blocks) - 1, -1, -1)
        for i in indices:
            block, own = blocks[i], name if i == indices[-1] else (*name, i)
            gather_s = block.gathered_s * (i in missing)
            if i in missing:
                yield Task(("G", *name, i), link, gather_s, (recent[0],) if len(recent) > 1 else ())
                after = (*after, ("G", *name, i))
            if within:
                yield from ready
                ready.clear()
            time_s = self._with_messages_s(block, name[0], i in missing, sums)
            hidden_s = ahead * within + gather_s
            yield Task(own, compute, time_s + TAKEN * min(time_s, hidden_s), after)
            recent.append(own)
            if sums:
                ahead = block.summed_s
                ready.append(Task(("R", *name, i), link, ahead, (own if within else name,)))
            after = ()
        yield from ready

    def _pass_s(self, block: Block, kind: str, copies_s: float = 0.0, more_host_s: float = 0.0) -> float:
        """A pass over a block, with what copies for messages take, or what the host then needs."""
        (forward_s, backward_s), forward_host_s = block.gpu_s, block.forward_host_s
        weights = block.weights_s / backward_s if backward_s and self._is_apart else 0.0
        share = {"F": 1.0, "B": 1 - weights, "W": weights}[kind]
        gpu_s, host_s = (forward_s, forward_host_s) if kind == "F" else (backward_s, block.backward_host_s)
        return max(gpu_s * share + copies_s, host_s * share + more_host_s)

    def _with_messages_s(self, block: Block, kind: str, gathers: bool, scatters: bool) -> float:
        """A pass over a block with its copies from and into messages."""
        precision, copied, host_s = self.precision, 0.0, 0.0
        if self.split.zero == 3:
            copied = 2 * precision.work * gathers + (precision.work + precision.gradient) * scatters
            host_s = (gathers + scatters) * fsdp_s(block.tensors) * bool(block.tensors)
        elif self._is_ddp and scatters:
            copied = 2 * self.framework.bucket_copies * precision.gradient
            host_s = block.tensors * DDP_HOST_S
        copies_s = self._copied_s(block.parameters, copied)
        return self._pass_s(block, kind, copies_s, host_s * self._host_scale)

    @property
    def _is_ddp(self) -> bool:
        return self.framework.bucket_copies > 0 and self.split.zero < 2 and self._reduces

    @property
    def _host_scale(self) -> float:
        return priced(self.fabric.gpu).launch_scale * self.framework.host

    def _copied_s(self, elements: float, bytes_each: float) -> float:
        """Reading and writing so many bytes of each element."""
        return elements * bytes_each / (self.fabric.gpu.memory_bandwidth_bytes_per_s * _STREAMED)

    def _update(self, stage: int, after: tuple[Hashable, ...]) -> Iterator[Task]:
        optimizer = ("optimizer", stage)
        yield Task(optimizer, (stage, "compute"), self._optimizer_s(stage), after)
        if self.split.zero in (1, 2) and self._reduces:
            total = self._sum_of(self.stages[stage])
            pieces = self.split.replicas * total.tensors
            time_s = self._exchanged_s(ALL_GATHER, total, self.precision.weight)
            time_s += pieces * self.framework.gather_host_s
            yield Task(("gathered", stage), (stage, "link"), time_s, (optimizer,))

    def _optimizer_s(self, stage: int) -> float:
        precision = self.precision
        whole = self._sum_of(self.stages[stage])
        own = self._held(whole, self.split.zero > 0)
        tensors = whole.tensors / (self.split.replicas if self.split.zero in (1, 2) else 1)
        # The host is ahead of passes that the GPU limits.
        passes = [self._times(block) for block in self.stages[stage]]
        waits_s = sum(each.forward_host_s + each.backward_host_s - sum(each.gpu_s) for each in passes)
        host_s = tensors * self.blocks.optimizer_host_s * (waits_s > 0)
        # It was captured with its state in the weight's type, and takes as long as what it reads and writes.
        captured = (2 + 4 * bool(precision.optimizer) + 1) * precision.weight
        updated = precision.weight * (not (self.split.zero == 3 and precision.master))
        moved = 2 * precision.optimizer + precision.gradient + 2 * updated
        return max(own * self.blocks.optimizer_s * moved / captured, host_s)

    # --- results ----------------------------------------------------------------------------------

    def step_s(self, *, silent: bool = False) -> float:
        """The step's time; ``silent``: if communication between replicas and stages took none.

        Many micro-batches follow each other alike: few are looked at.
        """
        split = self.split
        step = split.pipeline
        fewer = (step * (1 + split.chunks) if step > 1 else 3) + split.parts % step
        if split.parts <= fewer + step:
            return self._run_s(split.parts, silent)
        short_s, long_s = (self._run_s(each, silent) for each in (fewer, fewer + step))
        # Where stages are nearly alike, the slowest is not yet what the others wait for.
        each_s = max((long_s - short_s) / step, self._slowest_s)
        return short_s + (split.parts - fewer) * each_s

    @cached_property
    def _slowest_s(self) -> float:
        """Of the stages' work for one micro-batch, the longest."""
        return max(sum(sum(each.pass_s) for each in map(self._times, stage)) for stage in self.stages)

    def _run_s(self, parts: int, silent: bool) -> float:
        tasks = self.tasks(parts)
        if silent:
            tasks = (
                task if task.resource[1:] == ("compute",) else replace(task, time_s=0.0) for task in tasks
            )
        ends = run(tasks)
        whole_s = max(ends.values(), default=0.0)
        return whole_s if silent else whole_s + self._waiting_s(ends, parts, whole_s)

    def _waiting_s(self, ends: Mapping[Hashable, float], parts: int, whole_s: float) -> float:
        """What messages that wait for another stage take of a GPU meanwhile.

        Schedules of several chunks, and those that take backward passes apart, ask for messages ahead, and
        one follows the other between two stages; others wait for theirs at once
        (``_PipelineScheduleRuntime`` and ``PipelineScheduleSingle`` of ``torch.distributed.pipelining``).
        Only messages within a machine, to one neighbour, were seen to: others are taken to cost nothing.
        """
        stages, schedule = self.split.pipeline, self.split.schedule
        if not self._is_inside or stages == 1 or not self._is_ahead:
            return 0.0
        between: dict[tuple[int, int], list[tuple[float, int]]] = {}
        for name, end_s in ends.items():
            if isinstance(name, tuple) and name[0] == "sent":
                _, kind, _, place = name
                here, there = (stage_of(each, stages, schedule) for each in (place, self._next(kind, place)))
                between.setdefault((min(here, there), max(here, there)), []).append((end_s, there))
        waits = [0.0] * stages
        for pair, messages in between.items():
            received_s, before_s = dict.fromkeys(pair, 0.0), 0.0
            for end_s, receiver in sorted(messages):
                received_s[receiver] += end_s - before_s
                before_s = end_s
            for stage, wait_s in received_s.items():
                waits[stage] = max(waits[stage], wait_s)
        own = [parts * sum(sum(self._times(block).pass_s) for block in stage) for stage in self.stages]
        return TAKEN * max(
            min(wait_s / whole_s, 1.0) * own_s for wait_s, own_s in zip(waits, own, strict=True)
        )

    def time(self) -> StepTime:
        """The step's time, and what it consists of."""
        # Its layers are shared as they are.
        alone = replace(self.framework, host=0.0, bounds=lambda parts: self.bounds)
        made, time_s = replace(self, framework=alone)._time(), self.step_s()
        return replace(made, time_s=time_s, launch_s=_left(time_s, made.time_s))

    def _time(self) -> StepTime:
        parts = self.split.parts
        time_s, silent_s = self.step_s(), self.step_s(silent=True)
        stages = [[self._times(block) for block in stage] for stage in self.stages]
        slowest = max(stages, key=lambda times: sum(sum(each.pass_s) for each in times))
        compute_s = parts * sum(each.forward_s + each.backward_s for each in slowest)
        again_s = parts * sum(each.recompute_s for each in slowest)
        link_s = parts * sum(each.forward_link_s + each.backward_link_s for each in slowest)
        optimizer_s = max(self._optimizer_s(i) for i in range(self.split.pipeline))
        own_s = compute_s + again_s + link_s + optimizer_s
        # Without stages what is left is work that messages make: copies into them and out of them.
        bubble_s = _left(silent_s, own_s) if self.split.pipeline > 1 else 0.0
        data_s = _left(time_s, own_s + bubble_s)
        return StepTime(time_s, compute_s, again_s, link_s, data_s, bubble_s, optimizer_s)

    def least_s(self) -> float:
        """No schedule is faster: what the slowest stage does, and filling the pipeline."""
        split = self.split
        stages = [list(map(self._times, stage)) for stage in self.stages]
        own = [sum(sum(each.pass_s) for each in stage) for stage in stages]
        if self._is_apart:  # gradients of weights fill what draining leaves
            before = accumulate((sum(each.pass_s[0] for each in stage) for stage in stages), initial=0.0)
            return max(split.parts * each + at / split.chunks for each, at in zip(own, before, strict=False))
        return split.parts * max(own) + (sum(own) - max(own)) / split.chunks * (split.parts >= split.pipeline)

    def memory(self) -> RankMemory:
        """Of the rank that holds most."""
        return max(map(self.stage_memory, range(self.split.pipeline)), key=lambda each: each.total)

    def stage_memory(self, stage: int) -> RankMemory:
        """At the fullest moment of its passes: activations go, and gradients come, block by block."""
        split, sums = self.split, self._held_sums(stage)
        flights = in_flight(stage, split.pipeline, split.chunks, split.parts, split.schedule)
        held = {each: sums.of(sums.kept, each.held) + sums.of(sums.late, each.late) for each in flights}
        fullest = {(each.chunk, each.summed): each for each in sorted(flights, key=held.__getitem__)}
        found = [
            self._moment(stage, sums, flight, i)
            for flight in fullest.values()
            for i in range(*sums.bounds[flight.chunk])
        ]
        return max(found, key=lambda each: each.total)

    def _moment(self, stage: int, sums: _HeldSums, flight: Flight, i: int) -> RankMemory:
        """While the backward pass of a flight goes through a block."""
        split, precision, block = self.split, self.precision, self.stages[stage][i]
        begin, end = sums.bounds[flight.chunk]
        message = block.parameters * (precision.work + precision.gradient) if split.zero >= 2 else 0.0
        buckets = sums.parameters[-1] * (precision.copies or precision.gradient * self._is_ddp)
        received = 2 * split.chunks - (stage == 0) - (stage == split.pipeline - 1)
        received *= split.parts * self._sent_bytes * self.framework.receives_apart * (1 + self._is_ahead)
        # Where gradients of weights are put off, nothing of the pass is freed before them.
        gone = 0.0 if self._is_apart else sums.kept[end] - sums.kept[i + 1]
        late = sums.late[end] - sums.late[i + 1]
        again = max(0.0, block.saved_bytes - self._kept(block))  # of an end, nothing
        there = [self.framework.gradients_stay or each > 0 for each in flight.summed]
        before = 0.0 if there[flight.chunk] else sums.gradients[i] - sums.gradients[begin]
        there[flight.chunk] = True
        gradients = sums.of(sums.gradients, there) - before - sums.of(sums.scattered, flight.done)
        return RankMemory(
            parameters=self._parameter_bytes(stage, sums, flight, i),
            gradients=gradients + buckets + message,
            optimizer=(sums.shared if split.zero else sums.parameters[-1]) * precision.optimizer,
            activations=sums.of(sums.kept, flight.held) - gone,
            temporary=block.surplus_bytes + again + sums.of(sums.late, flight.late) + late,
            other=self.blocks.buffer_bytes + received + CONTEXT_BYTES,
        )

    def _held_sums(self, stage: int) -> _HeldSums:
        precision, blocks, split = self.precision, self.stages[stage], self.split
        shared = split.zero > 1 and self._sums(0, split.parts)
        # Those that are views of buckets are in them; those that are not summed up yet are whole.
        gradient = 0 if self._is_ddp and self.framework.bucket_copies == 1 else precision.gradient
        scatters = gradient * (split.zero > 1 and not shared and self._reduces)
        held = (
            [float(block.parameters) for block in blocks],
            [gradient * self._held(block, shared) for block in blocks],
            [scatters * (block.parameters - self._held(block)) for block in blocks],
            [self._kept(block) for block in blocks],
            [block.late_bytes * float(self._is_apart) for block in blocks],
        )
        sizes = [len(self.chunk(stage, chunk)) for chunk in range(split.chunks)]
        bounds = tuple(pairwise(accumulate(sizes, initial=0)))
        parameters, gradients, scattered, kept, late = (list(accumulate(e, initial=0.0)) for e in held)
        shares = self._held(self._sum_of(blocks))
        return _HeldSums(parameters, gradients, scattered, kept, late, shares, bounds)

    def _parameter_bytes(self, stage: int, sums: _HeldSums, flight: Flight, i: int) -> float:
        """Parameters, with what FSDP has gathered when a backward pass is at a block.

        It gathers one block ahead, and frees what is behind; the ends of the model are kept. In a pipeline
        a chunk is freed behind its last backward pass.
        """
        precision, blocks, parameters = self.precision, self.stages[stage], sums.parameters
        if self.split.zero < 3:
            # A copy in the type of the products, where the weight is in another, is kept for the pass.
            copied = precision.work * (precision.work != precision.weight)
            return parameters[-1] * precision.weight + copied * parameters[i + 1]
        first = max(0, i - 1) if self.split.reshard else 0
        last = i if self.split.pipeline == 1 else len(blocks) - 1
        there = parameters[last + 1] - parameters[first]
        for end in {0, len(blocks) - 1}:
            outside = not first <= end <= last and self.split.reshard and self._is_end(blocks[end])
            there += blocks[end].parameters * outside
        there -= sums.of(parameters, flight.done)
        shards = 0 if precision.master else precision.weight  # they are the optimizer's fp32 copy
        return sums.shared * shards + there * precision.work

    def _is_end(self, block: Block) -> bool:
        return block is self.blocks.before or block is self._after

    def _kept(self, block: Block) -> float:
        """What a micro-batch keeps of a block for the backward pass."""
        if self._is_end(block):
            return block.saved_bytes
        kept = {"selective": block.products_bytes + block.input_bytes, "full": block.input_bytes}
        return kept.get(self.split.checkpoint, block.saved_bytes)


def _left(whole_s: float, part_s: float) -> float:
    """What is left of a time; nothing where only rounding makes a difference."""
    left_s = whole_s - part_s
    return left_s if left_s > 1e-9 * whole_s else 0.0
