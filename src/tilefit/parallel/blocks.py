"""A step as blocks: what runs before the layers, each layer, and what runs after them.

A model of many equal layers is captured with few of them; their blocks are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod

from tilefit.cost.launch import COLLECTIVE_S, DTENSOR_S, around_s, launch
from tilefit.cost.links import Fabric
from tilefit.cost.model import estimate_all
from tilefit.cost.priced import priced
from tilefit.errors import UsageError
from tilefit.ops import (
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Attention,
    Collective,
    Gemm,
    Step,
    StepOp,
    Streaming,
)
from tilefit.ops.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.scaling import scale_batch
from tilefit.parallel.experts import Experts, expert_parallel, experts_of
from tilefit.parallel.lifetimes import Lifetimes
from tilefit.parallel.pipeline import layer_of, layers_of, places
from tilefit.parallel.schedule import cut
from tilefit.parallel.tensor import tensor_parallel

#: Times of kernels in a training of hours over those of benchmarks of milliseconds, on GPUs that reach the
#: limit of power. Fitted with ``benchmarks/multi_gpu_steps.py`` to llm-foundry's MPT-125m on A100.
SLOWDOWN = 1.06


@dataclass(frozen=True, slots=True)
class Block:
    """What one rank does of a layer for one micro-batch.

    Attributes:
        forward_s, backward_s: Its computation.
        forward_host_s, backward_host_s: The host's launches, of its communication too.
        forward_link_s, backward_link_s: Communication that its computation waits for.
        weights_s: Of the backward pass, the gradients of weights, which a pipeline may put off.
        recompute_s: What a split computes again in the backward pass.
        gathered_s, summed_s: Messages of a split's replicas: its parameters, its gradients.
        flop: Of its products, forward and backward.
        parameters: Elements that the rank holds.
        experts: Of them, those of experts that ranks share.
        tensors: In how many tensors.
        saved_bytes: What the forward pass keeps for the backward pass.
        surplus_bytes: What its passes hold at their fullest moment beyond that.
        logits_bytes: Of the two, what logits, what is made of them, and their gradients take.
        logits_surplus_bytes: Of these, what is none of the ``saved_bytes``.
        late_bytes: Gradients that those of weights are made of.
        products_bytes: Results that selective checkpointing keeps: of products and attention, also those that
            the backward pass does not read.
        products_s: Forward time of those.
        input_bytes: What it is handed by the block before.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    forward_link_s: float = 0.0
    backward_link_s: float = 0.0
    weights_s: float = 0.0
    recompute_s: float = 0.0
    gathered_s: float = 0.0
    summed_s: float = 0.0
    flop: int = 0
    parameters: int = 0
    experts: int = 0
    tensors: int = 0
    saved_bytes: int = 0
    surplus_bytes: int = 0
    logits_bytes: int = 0
    logits_surplus_bytes: int = 0
    late_bytes: int = 0
    products_bytes: int = 0
    products_s: float = 0.0
    input_bytes: int = 0

    @property
    def gpu_s(self) -> tuple[float, float]:
        """Time of its forward and backward pass on a GPU."""
        forward_s = self.forward_s + self.forward_link_s
        return forward_s, self.backward_s + self.recompute_s + self.backward_link_s

    @property
    def pass_s(self) -> tuple[float, float]:
        """The same, or the host's launches where they take longer."""
        forward_s, backward_s = self.gpu_s
        return max(forward_s, self.forward_host_s), max(backward_s, self.backward_host_s)


@dataclass(frozen=True, slots=True)
class Framework:
    """How what runs the training differs from the captured step alone on a GPU.

    Attributes:
        sequence: What tensor-parallel ranks would all do is split by the sequence (Korthikanti and others,
            "Reducing Activation Recomputation in Large Transformer Models", 2022).
        slowdown: Times of kernels over those of a benchmark.
        host: Times of the host over those of the one that the GPU's calibration knows; 0: it takes none.
        layer_host_s: Least time that the host takes for a layer's two passes over a micro-batch.
        bucket_bytes: Gradients that are summed up in one message where they are not sharded layer by layer;
            the default is that of DistributedDataParallel.
        overlap: Gradients are summed up while the backward pass runs.
        scatters: With ZeRO-1 each rank is sent the sums of its share alone.
        gather_host_s: What the host needs with ZeRO-1 for each rank's part of each parameter it gathers.
        bucket_copies: How often they are copied between where they are made and the buckets: once where they
            are views of DistributedDataParallel's buckets, as the settings say; else twice.
        tensor_host_s: What the host needs more for each product and collective of tensor-parallel ranks;
            the default is that of PyTorch's DTensor.
        again: Selective checkpointing computes every so-manieth matrix product again, too; 0: none.
        gathers_again: With the sequence split, what tensor-parallel ranks gather for products is gathered
            again in the backward pass (Megatron-LM, nanotron); else it is kept, as by PyTorch's DTensor.
        gradients_stay: Gradients have memory of their own from the beginning on (Megatron-LM, nanotron); else
            those of the first micro-batch take it one after the other.
        receives_apart: A stage of a pipeline has memory for what it is sent of every micro-batch, as by
            ``torch.distributed.pipelining``.
        imbalance: Tokens that the fullest rank's experts are given over the mean; 1 is what a router is
            trained for. Products and messages are as many times as large.
        bounds: Where the layers of each of so many stages begin, and where the last end; a stage may have
            none. None: the slowest stage is as fast as can be.
    """

    sequence: bool = True
    slowdown: float = SLOWDOWN
    host: float = 1.0
    layer_host_s: float = 0.0
    bucket_bytes: float = 25 * 2**20
    overlap: bool = True
    scatters: bool = True
    gather_host_s: float = 0.0
    bucket_copies: int = 1
    tensor_host_s: float = DTENSOR_S
    again: int = 0
    gathers_again: bool = False
    gradients_stay: bool = False
    receives_apart: bool = True
    imbalance: float = 1.0
    bounds: Callable[[int], tuple[int, ...]] | None = None

    def paced(self, block: Block) -> Block:
        """A block at the clocks of a training."""
        return replace(
            block,
            forward_s=block.forward_s * self.slowdown,
            backward_s=block.backward_s * self.slowdown,
            weights_s=block.weights_s * self.slowdown,
            products_s=block.products_s * self.slowdown,
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """A whole model on one rank.

    Attributes:
        before, after: What is no layer: embeddings; the last norm, the head and the loss.
        layers: The layers.
        optimizer_s: Updating one element.
        optimizer_host_s: The host's launches for updating one tensor.
        buffer_bytes: Tensors that are held and not trained.
        tied: Parameters of what runs before the layers that what runs after them reads, too.
    """

    before: Block
    layers: tuple[Block, ...]
    after: Block
    optimizer_s: float = 0.0
    optimizer_host_s: float = 0.0
    buffer_bytes: int = 0
    tied: int = 0
    _bounds: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def bounds(self, parts: int) -> tuple[int, ...]:
        """Where each of so many parts of the layers begins, and where the last ends.

        The slowest is as fast as can be. Of equally fast ways one that shares the rest evenly, the first with
        the least: it holds most micro-batches.

        Raises:
            UsageError: there are fewer layers.
        """
        if parts not in self._bounds:
            self._bounds[parts] = self._cut(parts)
        return self._bounds[parts]

    def _cut(self, parts: int) -> tuple[int, ...]:
        costs = [sum(block.pass_s) for block in self.layers]
        before_s, after_s = sum(self.before.pass_s), sum(self.after.pass_s)
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


class Model:
    """A captured step, to be split in any way.

    Args:
        step: A training step of any batch, as captured: not fused.
        layers: Layers of the model, where the step has been captured with fewer; 0 for as many as it has.

    Raises:
        UsageError: it is no training step, has no list of layers, or its batch is unknown.
    """

    def __init__(self, step: Step, layers: int = 0) -> None:
        self.prefix, self.captured = layers_of(step)
        if not self.captured:
            raise UsageError(
                "the step has no list of layers, so that nothing can be planned",
                hint="A model needs a numbered list of equal modules, such as layers.0, layers.1, ….",
            )
        if not step.batch or not step.settings.training:
            raise UsageError("only a training step of a known batch can be planned")
        self.step = step
        self.layers = layers or self.captured

    @cached_property
    def parameters(self) -> int:
        """Elements of the whole model."""
        first, *layers, last = (
            sum(prod(self.step.parameters[name].shape) for name in names) for names in self._names
        )
        return first + last + sum(layers[index % self.captured] for index in range(self.layers))

    @cached_property
    def _readers(self) -> dict[str, set[int]]:
        """The blocks that read each parameter in the forward pass."""
        found: dict[str, set[int]] = {name: set() for name in self.step.parameters}
        for entry, place in zip(self.step.ops, self._whole_places, strict=True):
            if entry.phase == FORWARD:
                for ref in entry.inputs:
                    found.get(ref.parameter, set()).add(place)
        return found

    @cached_property
    def _names(self) -> list[list[str]]:
        """The parameters of each block: of a layer by their names, else of the first that reads them."""
        made: list[list[str]] = [[] for _ in range(self.captured + 2)]
        for name, readers in self._readers.items():
            layer = layer_of(self.prefix, name)
            made[min(readers, default=0) if layer is None else layer + 1].append(name)
        return made

    @cached_property
    def _whole_places(self) -> list[int]:
        return places(self.step, self.prefix, self.captured)

    @cached_property
    def heads(self) -> int:
        """Key and value heads, which tensor parallelism divides; 0 where there is no attention."""
        return max((e.op.num_kv_heads for e in self.step.ops if isinstance(e.op, Attention)), default=0)

    @cached_property
    def _mixtures(self) -> list[Experts]:
        return experts_of(self.step, self.prefix)

    @cached_property
    def experts(self) -> int:
        """Experts of a layer, of the fewest that one has; 0 where there are none."""
        return gcd(*(each.count for each in self._mixtures))

    @cached_property
    def flop(self) -> float:
        """Of the products, for one sample."""
        own = [0] * (self.captured + 2)
        for entry, place in zip(self.step.ops, self._whole_places, strict=True):
            own[place] += entry.op.flop if entry.op.multiplies else 0
        first, *layers, last = own
        every = first + last + sum(layers[index % self.captured] for index in range(self.layers))
        return every / self.step.batch

    def blocks(
        self,
        fabric: Fabric,
        samples: float,
        tensor: int = 1,
        framework: Framework | None = None,
        experts: int = 1,
    ) -> Blocks:
        """The blocks of one rank.

        Args:
            fabric: The GPU, its machines and what joins them.
            samples: Of a micro-batch; a part of one where context parallelism splits its sequence.
            tensor: Ranks that share each layer.
            framework: What runs it.
            experts: Ranks that share the experts of a layer.
        """
        framework = framework or Framework()
        step, alone = self._on_rank(samples, tensor, framework, experts)
        entries = [
            replace(entry, op=entry.op.shared(1 / tensor)) if index in alone else entry
            for index, entry in enumerate(step.ops)
        ]
        times = _times(
            step, entries, fabric, framework if tensor > 1 else replace(framework, tensor_host_s=0.0)
        )
        where = places(step, self.prefix, self.captured)
        shapes = {parameter.shape for parameter in step.parameters.values()}
        parts = dict.fromkeys(alone, tensor)
        lifetimes = Lifetimes(entries, shapes, parts, framework.gathers_again)
        made = []
        for place in range(self.captured + 2):
            members = [i for i, each in enumerate(where) if each == place and entries[i].phase != OPTIMIZER]
            block = _block([(entries[i], times[i], parts.get(i, 1)) for i in members], framework.again)
            block = _with_tensors(block, lifetimes, members)
            if place > self.captured:
                block = _with_logits(block, lifetimes.without_logits(members), members)
            made.append(framework.paced(block))
        sizes = {name: prod(parameter.shape) for name, parameter in step.parameters.items()}
        made = [
            replace(
                block,
                parameters=sum(sizes[name] for name in own),
                experts=sum(sizes[name] for name in own & self._shared),
                tensors=len(own),
            )
            for block, own in zip(made, (sizes.keys() & each for each in self._names), strict=True)
        ]
        first, *layers, last = made
        width = max((self._crossing(step, index) for index in range(self.captured)), default=0)
        width //= tensor if framework.sequence else 1
        layers = [replace(layer, input_bytes=width) for layer in layers]
        updates = [times[i] for i, entry in enumerate(entries) if entry.phase == OPTIMIZER]
        update_s, update_host_s = (
            (sum(each) for each in zip(*updates, strict=True)) if updates else (0.0, 0.0)
        )
        held = sum(prod(p.shape) for p in step.parameters.values() if p.trainable)
        return Blocks(
            first,
            tuple(layers[index % self.captured] for index in range(self.layers)),
            replace(last, input_bytes=width),
            update_s / held if held else 0.0,
            update_host_s / max(1, sum(p.trainable for p in step.parameters.values())),
            step.memory.buffer_bytes,
            sum(sizes[name] for name in self._names[0] if self.captured + 1 in self._readers[name]),
        )

    @cached_property
    def _shared(self) -> set[str]:
        """Parameters of experts."""
        return {name for each in self._mixtures for name in each.names}

    def _on_rank(
        self, samples: float, tensor: int, framework: Framework, experts: int
    ) -> tuple[Step, set[int]]:
        """The step of one rank, and which of its operations tensor-parallel ranks split by the sequence."""
        whole, own = scale_batch(self.step, samples / self.step.batch), set[int]()
        if self._mixtures:
            sharing = tensor if framework.sequence else 1
            whole, own = expert_parallel(whole, self._mixtures, experts, sharing, framework.imbalance)
        if tensor == 1:
            return whole, set()
        step, _ = tensor_parallel(whole, tensor, self._shared)
        return step, _alone(whole, step, tensor, own) if framework.sequence else set()

    def _crossing(self, step: Step, layer: int) -> int:
        """Bytes of what a layer hands on: its last result."""
        own = [
            entry
            for entry in step.ops
            if entry.phase == FORWARD and layer_of(self.prefix, entry.site.module) == layer and entry.outputs
        ]
        return own[-1].outputs[0].bytes if own else 0


def _block(members: Iterable[tuple[StepOp, tuple[float, float], int]], again: int) -> Block:
    """What operations take together; each with its times of GPU and host, and the ranks that share it."""
    compute = {True: [0.0, 0.0], False: [0.0, 0.0]}  # by direction: of the GPU, of the host
    link = {True: 0.0, False: 0.0}
    products_s = weights_s = 0.0
    flop = products = multiplied = 0
    for entry, (gpu_s, host_s), part in members:
        forward = entry.phase == FORWARD
        compute[forward][1] += host_s
        if isinstance(entry.op, Collective):
            link[forward] += gpu_s
            continue
        compute[forward][0] += gpu_s
        weights_s += gpu_s * (entry.phase == BACKWARD_WEIGHT)
        flop += entry.op.flop if entry.op.multiplies else 0
        multiplied += forward and isinstance(entry.op, Gemm)
        left_out = isinstance(entry.op, Gemm) and again and multiplied % again == 0
        if forward and isinstance(entry.op, (Gemm, Attention)) and not left_out:
            products_s += gpu_s
            products += sum(ref.bytes for ref in entry.outputs) // part
    return Block(
        forward_s=compute[True][0],
        backward_s=compute[False][0],
        forward_host_s=compute[True][1],
        backward_host_s=compute[False][1],
        forward_link_s=link[True],
        backward_link_s=link[False],
        weights_s=weights_s,
        flop=flop,
        products_bytes=products,
        products_s=products_s,
    )


def _with_tensors(block: Block, lifetimes: Lifetimes, members: list[int]) -> Block:
    """A block with what its operations hold."""
    return replace(
        block,
        saved_bytes=sum(lifetimes.kept(members).values()),
        surplus_bytes=lifetimes.surplus(members),
        late_bytes=lifetimes.late(members),
    )


def _with_logits(block: Block, others: Lifetimes, members: Collection[int]) -> Block:
    """What logits take of a block, of whose other tensors the lifetimes are."""
    saved = block.saved_bytes - sum(others.kept(members).values())
    surplus = block.surplus_bytes - others.surplus(members)
    return replace(block, logits_bytes=saved + surplus, logits_surplus_bytes=surplus)


def _alone(whole: Step, step: Step, tensor: int, experts: set[int]) -> set[int]:
    """Operations that every tensor-parallel rank would do in full: streaming ones, and of the whole step
    those of ``experts``; indices into the rank's step."""
    ranks = [i for i, entry in enumerate(step.ops) if not _inserted(entry, tensor)]
    return {
        mine
        for index, (mine, entry) in enumerate(zip(ranks, whole.ops, strict=True))
        if (isinstance(entry.op, Streaming) or index in experts)
        and entry.phase != OPTIMIZER
        and step.ops[mine].op == entry.op
    }


def _inserted(entry: StepOp, tensor: int) -> bool:
    op = entry.op
    return isinstance(op, Collective) and op.ranks == tensor and op.function != ALL_TO_ALL


def _times(
    step: Step, entries: Sequence[StepOp], fabric: Fabric, framework: Framework
) -> list[tuple[float, float]]:
    """GPU and host time of every operation."""
    gpu = priced(fabric.gpu)
    unique = list(dict.fromkeys(entry.op for entry in entries if not isinstance(entry.op, Collective)))
    scale = gpu.launch_scale * framework.host
    known = dict(zip(unique, (each.time_s for each in estimate_all(unique, gpu)), strict=True))
    made = []
    for entry, around in zip(entries, around_s(step), strict=True):
        more_s = framework.tensor_host_s if isinstance(entry.op, Gemm | Collective) else 0.0
        if isinstance(entry.op, Collective):
            messages = _messages_s(entry.op, fabric, framework.sequence)
            made.append((sum(messages), len(messages) * (COLLECTIVE_S + more_s) * scale))
            continue
        host_s = launch(entry, gpu, step.settings).host_s + more_s
        made.append((known[entry.op], scale * (host_s + around)))
    return made


def _messages_s(op: Collective, fabric: Fabric, sequence: bool) -> list[float]:
    """Messages of tensor-parallel ranks; with the sequence split, sums are scattered and gathered."""
    size = op.elements * size_bytes(op.dtype)
    group = fabric.group(op.ranks)
    large = sequence and op.function == ALL_REDUCE and size > 1 << 20
    functions = (REDUCE_SCATTER, ALL_GATHER) if large else (op.function,)
    return [fabric.time_s(function, size, group) for function in functions]
