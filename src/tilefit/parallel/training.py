"""A training step on many GPUs: the tasks of every pipeline stage on its streams, and what a rank holds.

One rank of each stage stands for all that do the same. It has two streams: it computes, and it communicates
with other replicas and stages. Tensor-parallel communication is waited for, so that it is part of the
computation. Sources: Narayanan and others, "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", 2021 (1F1B, interleaved stages); Rajbhandari and others, "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", 2020 (what is sharded); Zhao and others, "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel", 2023 (prefetching).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tilefit.cost.launch import FSDP_S
from tilefit.cost.links import TAKEN, Fabric, Group
from tilefit.cost.priced import priced
from tilefit.errors import UsageError
from tilefit.ops.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND
from tilefit.parallel.blocks import Block, Blocks, Framework
from tilefit.parallel.choices import Precision, TrainingSplit
from tilefit.parallel.schedule import Task, cut, in_flight, order, run

#: A context of CUDA, the libraries' workspaces and NCCL's buffers. A choice: 1 to 2 GiB are usual.
CONTEXT_BYTES = 1.5 * 2**30
#: Share of the memory's bandwidth that adding tensors up reaches, as fitted on A100.
_STREAMED = 0.86
#: What it needs for each parameter that DDP copies into a bucket and back (GPT-2, 4 samples, 2 H200).
DDP_HOST_S = 45e-6
#: What a stage does that has no layer.
_NOTHING = Block()


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted time of a step, and what it consists of.

    Attributes:
        time_s: Of the step.
        compute_s: Of the stage that computes longest, without what it computes again.
        recompute_s: What it computes again.
        tensor_s: Communication of tensor- and context-parallel ranks.
        data_s: Communication between replicas and stages that nothing hides.
        bubble_s: Waiting for the pipeline to fill and to drain.
        optimizer_s: Of the optimizer.
        host_s: Copies to and from the host that nothing hides.
    """

    time_s: float
    compute_s: float
    recompute_s: float
    tensor_s: float
    data_s: float
    bubble_s: float
    optimizer_s: float
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
        place = chunk * self.split.pipeline + index
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
        """Where each part of the layers begins, and where the last ends: the slowest is as fast as can be.

        Of equally fast ways one that shares the rest evenly, the first with the least: it holds most
        micro-batches.
        """
        parts = self.split.pipeline * self.split.chunks
        if self.framework.bounds is not None:
            return self.framework.bounds(parts)
        costs = [block.forward_s + block.backward_s for block in self.blocks.layers]
        ends = self.blocks.before, self.blocks.after
        before_s, after_s = (block.forward_s + block.backward_s for block in ends)
        low_s, high_s = 0.0, 1.01 * (before_s + sum(costs) + after_s)
        best = cut(costs, before_s, after_s, parts, high_s)
        if best is None or len(costs) < parts:
            raise UsageError(
                f"{len(costs)} layers do not fill {parts} pipeline stages", hint="Take fewer stages."
            )
        for _ in range(30):
            middle_s = (low_s + high_s) / 2
            found = cut(costs, before_s, after_s, parts, middle_s)
            low_s, high_s, best = (low_s, middle_s, found) if found else (middle_s, high_s, best)
        return cut(costs, before_s, after_s, parts, high_s, fair=True) or best

    @property
    def parts(self) -> tuple[int, ...]:
        """How many layers each part has, in the order in which they run."""
        return tuple(end - begin for begin, end in pairwise(self.bounds))

    def _accumulated_s(self, block: Block) -> float:
        """Adding a micro-batch's gradients to those of the others: one is read, one read and written."""
        moved = (self.precision.weight + 2 * self.precision.gradient) * (self.split.parts > 1)
        shared = self.split.zero > 1 and self.split.sums(0, self.split.parts)
        return self._copied_s(block.parameters, moved / (self.split.replicas if shared else 1))

    @cached_property
    def _known(self) -> dict[int, Block]:
        """Blocks as the split runs them, by identity: layers are the same ones again and again."""
        blocks = (self.blocks.before, *self.blocks.layers, self._after, _NOTHING)
        return {id(block): self._timed(block) for block in {id(each): each for each in blocks}.values()}

    def _times(self, block: Block) -> Block:
        return self._known[id(block)]

    def _timed(self, block: Block) -> Block:
        forward_link_s, backward_link_s = block.forward_link_s, block.backward_link_s
        if self.split.context > 1 and block.input_bytes:
            # Keys and values of the other ranks, gathered and their gradients scattered.
            group = self.fabric.group(self.split.context, self.split.tensor)
            size = 2 * block.input_bytes * self.split.context
            forward_link_s += self.fabric.time_s(ALL_GATHER, size, group)
            backward_link_s += self.fabric.time_s(REDUCE_SCATTER, size, group)
        again_s = 0.0
        if self.split.checkpoint != "none" and not self._is_end(block):
            full = self.split.checkpoint == "full"
            again_s = max(0.0, block.forward_s - (0.0 if full else block.products_s))
            backward_link_s += forward_link_s if full else 0.0
        return replace(
            block,
            backward_s=block.backward_s + self._accumulated_s(block),
            backward_host_s=block.backward_host_s + block.forward_host_s * (again_s > 0),
            recompute_s=again_s,
            forward_link_s=forward_link_s,
            backward_link_s=backward_link_s,
        )

    # --- communication ----------------------------------------------------------------------------

    def _replicas(self) -> Group:
        return self.fabric.group(self.split.replicas, self.split.tensor)

    def _exchange_s(self, function: str, block: Block, bytes_each: int) -> float:
        return self.fabric.time_s(function, block.parameters * bytes_each, self._replicas())

    def _bucketed_s(self, function: str, block: Block) -> float:
        """Summing up a block's gradients in messages of the size of a bucket."""
        size = block.parameters * self.precision.gradient
        message = min(size, self.framework.bucket_bytes)
        return size / message * self.fabric.time_s(function, message, self._replicas()) if size else 0.0

    def _send_s(self) -> float:
        """Handing a micro-batch's activations to the next stage."""
        stride = self.split.tensor * self.split.replicas
        inside = stride < self.fabric.per_machine
        return self.fabric.time_s(SEND, self._sent_bytes, Group(2, 2 if inside else 1))

    @cached_property
    def _sent_bytes(self) -> int:
        """What a stage hands to the next of a micro-batch."""
        return max(block.input_bytes for block in (*self.blocks.layers, self.blocks.after))

    # --- tasks ------------------------------------------------------------------------------------

    def tasks(self, parts: int) -> Iterator[Task]:
        """A step of so many micro-batches."""
        for stage in range(self.split.pipeline):
            if self._is_fsdp:
                yield from self._sharded(parts)
            else:
                yield from self._staged(stage, parts)

    @property
    def _is_fsdp(self) -> bool:
        """Parameters are gathered ahead of each block; with ZeRO-2 they are kept until the backward pass."""
        return self.split.zero == 3 or (self.split.zero == 2 and self.split.pipeline == 1)

    def _copied_s(self, elements: int, bytes_each: float) -> float:
        """Reading and writing so many bytes of each element."""
        return elements * bytes_each / (self.fabric.gpu.memory_bandwidth_bytes_per_s * _STREAMED)

    def _beside(self, compute_s: float, link_s: float) -> float:
        """Computation that hides messages, which take part of the GPU."""
        return compute_s + TAKEN * min(compute_s, link_s)

    def _sharded(self, parts: int) -> Iterator[Task]:
        """FSDP: parameters are gathered ahead of each block and freed behind it, gradients scattered."""
        blocks = [self._times(block) for block in self.stages[0]]
        gather = [self._exchange_s(ALL_GATHER, block, self.precision.work) for block in blocks]
        scatter = [self._exchange_s(REDUCE_SCATTER, block, self.precision.gradient) for block in blocks]
        last = len(blocks) - 1
        done: list[tuple[str, int, int]] = []
        for part in range(parts):
            sums = self.split.sums(part, parts)
            order = [("F", i) for i in range(last + 1)] + [("B", i) for i in range(last, -1, -1)]
            for kind, i in order:
                # The last block is still there when the backward pass begins.
                kept = kind == "B" and (i == last or self.split.zero == 2)
                before = tuple(done[-2:-1])  # the block before the one before: two are held at once
                yield Task(("G", kind, part, i), (0, "link"), 0.0 if kept else gather[i], before)
                if kind == "B" and i < last:
                    yield Task(("R", part, i + 1), (0, "link"), sums * scatter[i + 1], ((kind, part, i + 1),))
                scatters = kind == "B" and sums
                time_s = self._sharded_s(blocks[i], kind == "B", not kept, scatters)
                hidden_s = scatters * scatter[min(i + 1, last)] + (not kept) * gather[i]
                name = (kind, part, i)
                yield Task(name, (0, "compute"), self._beside(time_s, hidden_s), (("G", *name),))
                done.append(name)
            yield Task(("R", part, 0), (0, "link"), sums * scatter[0], (("B", part, 0),))
        ends = tuple(("R", part, i) for part in range(parts) for i in range(len(blocks)))
        yield Task(("optimizer", 0), (0, "compute"), self._optimizer_s(0), ends)

    def _sharded_s(self, block: Block, backward: bool, gathers: bool, scatters: bool) -> float:
        """A pass over a block with its copies from and into messages, or the host's work for it."""
        work, gradient = self.precision.work, self.precision.gradient
        copied = 2 * work * gathers + (work + gradient) * scatters
        host_s = block.backward_host_s if backward else block.forward_host_s
        host_s += (gathers + scatters) * FSDP_S * self._host_scale * bool(block.parameters)
        return max(block.pass_s[backward] + self._copied_s(block.parameters, copied), host_s)

    @property
    def _host_scale(self) -> float:
        return priced(self.fabric.gpu).launch_scale * self.framework.host

    def _staged(self, stage: int, parts: int) -> Iterator[Task]:
        """A stage of 1F1B; the gradients are summed up behind the last backward pass of each block."""
        split = self.split
        chunks = [self.chunk(stage, chunk) for chunk in range(split.chunks)]
        times = [[self._times(block) for block in chunk] for chunk in chunks]
        send_s = self._send_s() if split.pipeline > 1 else 0.0
        after: tuple[object, ...]
        places = split.pipeline * split.chunks
        scattered: list[object] = []
        ahead = parts if split.gpipe else None
        for kind, part, chunk in order(stage, split.pipeline, split.chunks, parts, ahead):
            place = chunk * split.pipeline + stage
            name = (kind, part, place)
            if kind == "F":
                after = (("sent", "F", part, place - 1),) if place else ()
                yield Task(name, (stage, "compute"), sum(each.pass_s[0] for each in times[chunk]), after)
                if place < places - 1:
                    yield Task(("sent", *name), (stage, "send", "F"), send_s, (name,))
                continue
            after = (("sent", "B", part, place + 1),) if place < places - 1 else (("F", part, place),)
            if not split.sums(part, parts):
                yield Task(name, (stage, "compute"), sum(each.pass_s[1] for each in times[chunk]), after)
            else:
                scattered += [("R", *name, i) for i in range(len(times[chunk]))]
                yield from self._last(stage, name, times[chunk], after)
            if place:
                yield Task(("sent", *name), (stage, "send", "B"), send_s, (name,))
        yield from self._update(stage, tuple(scattered) or (("B", parts - 1, stage),))

    def _last(
        self, stage: int, name: tuple[str, int, int], blocks: list[Block], after: tuple[object, ...]
    ) -> Iterator[Task]:
        """The last backward pass of a chunk, block by block, with the exchange of each block's gradients."""
        function = REDUCE_SCATTER if self.split.zero and self.framework.scatters else ALL_REDUCE
        last, overlap = len(blocks) - 1, self.framework.overlap
        messages = [self._bucketed_s(function, block) for block in blocks]
        for i in range(last, -1, -1):
            own = name if i == 0 else (*name, i)
            hidden_s = messages[i + 1] if overlap and i < last else 0.0
            time_s = self._beside(self._reduced_s(blocks[i]), hidden_s)
            yield Task(own, (stage, "compute"), time_s, after if i == last else ())
        for i in range(last, -1, -1):
            waits = name if i == 0 or not overlap else (*name, i)
            yield Task(("R", *name, i), (stage, "link"), messages[i], (waits,))

    @property
    def _is_ddp(self) -> bool:
        return self.framework.bucket_copies > 0 and self.split.zero < 2 and self.split.replicas > 1

    def _reduced_s(self, block: Block) -> float:
        """The backward pass of a block whose gradients DDP copies into buckets and back, or the host's."""
        if not self._is_ddp:
            return block.pass_s[1]
        host_s = block.backward_host_s + block.tensors * DDP_HOST_S * self._host_scale
        copied = 2 * self.framework.bucket_copies * self.precision.gradient
        return max(block.pass_s[1] + self._copied_s(block.parameters, copied), host_s)

    def _update(self, stage: int, after: tuple[object, ...]) -> Iterator[Task]:
        optimizer = ("optimizer", stage)
        yield Task(optimizer, (stage, "compute"), self._optimizer_s(stage), after)
        if self.split.zero and self.split.replicas > 1:
            # ZeRO-2 in FSDP's sense gathers ahead of the next forward pass; here all wait for it.
            total = replace(Block(), parameters=sum(block.parameters for block in self.stages[stage]))
            pieces = self.split.replicas * sum(block.tensors for block in self.stages[stage])
            time_s = self._exchange_s(ALL_GATHER, total, self.precision.work)
            time_s += pieces * self.framework.gather_host_s
            yield Task(("gathered", stage), (stage, "link"), time_s, (optimizer,))

    def _optimizer_s(self, stage: int) -> float:
        own, precision = sum(block.parameters for block in self.stages[stage]), self.precision
        # It was captured with its state in the weight's type, and takes as long as what it reads and writes.
        captured = (2 + 4 * bool(precision.optimizer) + 1) * precision.weight
        updated = precision.weight * (not (self._is_fsdp and precision.master))
        moved = 2 * precision.optimizer + precision.gradient + 2 * updated
        share = self.split.replicas if self.split.zero else 1
        return own * self.blocks.optimizer_s * moved / captured / share

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
        return max(run(tasks).values(), default=0.0)

    def time(self) -> StepTime:
        """The step's time, and what it consists of."""
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
        own = [sum(sum(each.pass_s) for each in map(self._times, stage)) for stage in self.stages]
        return split.parts * max(own) + (sum(own) - max(own)) / split.chunks * (split.parts >= split.pipeline)

    def memory(self) -> RankMemory:
        """Of the rank that holds most."""
        return max(map(self.stage_memory, range(self.split.pipeline)), key=lambda each: each.total)

    def stage_memory(self, stage: int) -> RankMemory:
        """At the fullest moment of the backward pass: activations go, and gradients come, block by block."""
        split, precision = self.split, self.precision
        blocks = self.stages[stage]
        own = sum(block.parameters for block in blocks)
        share = [1 / split.replicas if split.zero >= level else 1.0 for level in (1, 2, 3)]
        # A copy in the type of the products, where the weight is in another, is kept for the backward pass.
        copied = precision.work * (precision.work != precision.weight) * (split.zero < 3)
        # Those that are views of buckets are in them; those that are not summed up yet are whole.
        held_share = share[1] if split.sums(0, split.parts) else 1.0
        held_share *= not (self._is_ddp and self.framework.bucket_copies == 1)
        gradients = [block.parameters * precision.gradient * held_share for block in blocks]
        buckets = own * (precision.copies or precision.gradient * self._is_ddp)
        late = 1 + self.framework.late * (split.tensor > 1)
        kept = [late * self._kept(block) for block in blocks]
        parts = split.parts
        received = 2 * split.chunks - (stage == 0) - (stage == split.pipeline - 1)
        received *= parts * self._sent_bytes * self.framework.receives_apart
        flight = parts if split.gpipe else in_flight(stage, split.pipeline, split.chunks, parts)
        ends = sum(block.parameters for block in blocks if self._is_end(block))

        def moment(i: int, first: bool) -> RankMemory:
            block = blocks[i]
            held = flight if first else min(flight, parts - 1)
            nearby = sum(each.parameters for each in blocks[max(0, i - 1) : i + 1] if not self._is_end(each))
            gathered = (nearby + ends) * precision.work if split.zero == 3 else 0.0
            message = block.parameters * (precision.work + precision.gradient) if split.zero >= 2 else 0.0
            again = block.saved_bytes - self._kept(block)  # of an end, nothing
            return RankMemory(
                parameters=own * (0 if split.zero == 3 and precision.master else precision.weight) * share[2]
                + copied * sum(each.parameters for each in blocks[: i + 1])
                + gathered,
                gradients=sum(gradients[i if first else 0 :]) + buckets + message,
                optimizer=own * precision.optimizer * share[0],
                activations=sum(kept) * (held - 1) + sum(kept[: i + 1]),
                temporary=block.surplus_bytes + max(0.0, again),
                other=self.blocks.buffer_bytes + received + CONTEXT_BYTES,
            )

        # Of the first micro-batch there are no gradients yet; of the second there are.
        moments = [moment(i, first) for i in range(len(blocks)) for first in (True, parts == 1)]
        return max(moments, key=lambda each: each.total)

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
