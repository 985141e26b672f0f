"""Tensor parallelism: the step of one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod

from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Attention,
    Collective,
    Gemm,
    Parameter,
    Shard,
    Step,
    StepOp,
    Streaming,
    TensorRef,
)
from tilefit.ops.collective import ALL_GATHER, ALL_REDUCE
from tilefit.parallel.roles import AttentionBlock, MlpBlock, Roles, roles
from tilefit.rules.layers import Linear

_WHOLE = Fraction(1)
#: Megatron reduces the largest logit, the logit of the label and the sum of exponentials over the ranks.
_LOSS_REDUCTIONS = 3
#: Bytes of the type that those are in.
_LOSS_DTYPE = "fp32"


@dataclass(slots=True)
class _Layer:
    """A linear layer's part."""

    layer: Linear
    in_features: int
    out_features: int

    @property
    def by_columns(self) -> bool:
        return self.out_features != self.layer.out_features

    @property
    def kept(self) -> Fraction:
        """The share of its weight."""
        return Fraction(
            self.in_features * self.out_features, self.layer.in_features * self.layer.out_features
        )


@dataclass(slots=True)
class _Parts:
    """What one rank holds.

    Attributes:
        step, ranks: What is split, over how many GPUs.
        layers: Split linear layers, by the index of each of their products.
        parameters: Share of each split parameter.
        weights: Shapes of the split layers' weights.
        sizes: Sizes that are divided, with their part: features, heads, tokens.
        last_gradients: Indices of the products after which the gradient of a block's input is summed up.
        scoring: Indices of the products that score tokens, in the forward pass.
        shards: How the sizes are divided.
    """

    step: Step
    ranks: int
    layers: dict[int, _Layer] = field(default_factory=dict)
    parameters: dict[str, Fraction] = field(default_factory=dict)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    last_gradients: set[int] = field(default_factory=set)
    scoring: set[int] = field(default_factory=set)
    shards: dict[Shard, None] = field(default_factory=dict)

    def share(self, what: str, size: int) -> int:
        """Divide a size of the model over the ranks."""
        part = -(-size // self.ranks)
        self.shards[Shard(what, size, part, self.ranks)] = None
        return part

    def add(self, layer: Linear, in_features: int, out_features: int) -> None:
        """Split a layer."""
        split = _Layer(layer, in_features, out_features)
        self.layers.update(dict.fromkeys(layer.indices, split))
        self.parameters[layer.parameter] = split.kept
        product = self.step.ops[layer.forward[0]].op if layer.forward else None
        if isinstance(product, Gemm):
            stored = (out_features, in_features)  # as nn.Linear does: a transposed operand
            self.weights[layer.parameter] = stored if product.layout[0] == "T" else stored[::-1]
        bias = f"{layer.parameter.removesuffix('weight')}bias"
        if split.by_columns and bias in self.step.parameters:
            self.parameters[bias] = split.kept
        for whole, part in ((layer.in_features, in_features), (layer.out_features, out_features)):
            if part != whole:
                self.sizes[whole] = part

    def summed_behind(self, columns: list[Linear]) -> None:
        """The gradients of these layers' common input are summed up over the ranks."""
        gradients = [index for layer in columns for index in layer.backward_data]
        if gradients:
            self.last_gradients.add(max(gradients))

    def divide_attention(self, block: AttentionBlock) -> None:
        """By heads; of fewer key and value heads than ranks each is held by several."""
        heads = kv_heads = self.share("query heads", block.heads)
        if block.kv_heads != block.heads:
            kv_heads = max(1, -(-block.kv_heads // self.ranks))
            sharing = min(self.ranks, block.kv_heads)
            self.shards[Shard("key/value heads", block.kv_heads, kv_heads, sharing)] = None
        for layer in block.columns:
            columns = _columns(layer.out_features, block, heads, kv_heads, self.ranks)
            self.add(layer, layer.in_features, columns)
        if block.row:
            self.add(block.row, heads * block.value_dim, block.row.out_features)
        self.sizes[block.heads] = heads
        self.sizes.setdefault(block.kv_heads, kv_heads)
        self.summed_behind(block.columns)

    def divide_mlp(self, mlp: MlpBlock) -> None:
        """By features of the wide space."""
        features = self.share("MLP features", mlp.row.in_features)
        for layer in mlp.columns:
            self.add(layer, layer.in_features, features * (layer.out_features // mlp.row.in_features))
        self.add(mlp.row, features, mlp.row.out_features)
        self.summed_behind(mlp.columns)


def tensor_parallel(step: Step, ranks: int, apart: Collection[str] = ()) -> tuple[Step, Roles]:
    """The operations of one rank, the largest where they differ, with the collectives between them.

    Attention is split by heads, key and value heads are repeated where there are fewer of them than ranks,
    MLPs by their wide features, vocabularies by tokens (filled up to a multiple of the ranks). A size that
    the ranks do not divide is rounded up.

    Args:
        step: The whole step, as captured: not fused.
        ranks: How many GPUs share it, two or more.
        apart: Parameters of layers that are not split.

    Returns:
        The step, with how each size is divided, and what was taken for what.
    """
    found = roles(step, apart)
    parts = _parts(step, found, ranks)
    ops: list[StepOp] = []
    kept: dict[int, Fraction] = {}
    scored = False
    before, after = 0, Fraction(0)
    for index, entry in enumerate(step.ops):
        new = _part(step, index, entry, parts, kept)
        ops.append(new)
        if entry.phase == FORWARD:
            for ref in entry.outputs:
                held = ref.bytes
                before += held
                after += held * kept.get(ref.id, _WHOLE)
        split = parts.layers.get(index)
        op = new.op
        if isinstance(op, Gemm) and split:
            sums = (entry.phase == FORWARD and not split.by_columns) or index in parts.last_gradients
            if sums:
                ops.append(_collective(new, ALL_REDUCE, op.m * op.n, ranks, op.out_dtype or op.dtype))
            if index in parts.scoring and not step.settings.training:
                ops.append(_collective(new, ALL_GATHER, op.m * split.layer.out_features, ranks, op.dtype))
        elif _embeds(entry, found.tables):
            (ref, *_) = entry.outputs
            ops.append(_collective(new, ALL_REDUCE, ref.elements, ranks, ref.dtype))
        elif not scored and _scores(entry, kept, found):
            scored = True
            rows = prod(entry.outputs[0].shape[:-1])
            ops += [_collective(new, ALL_REDUCE, rows, ranks, _LOSS_DTYPE)] * _LOSS_REDUCTIONS
    parameters = {
        name: replace(
            parameter,
            shape=parts.weights.get(name) or _shape(parameter.shape, parts.parameters.get(name), parts.sizes),
        )
        for name, parameter in step.parameters.items()
    }
    owned = _held(step.parameters, parts.parameters)
    return (
        replace(
            step,
            ops=tuple(entry.shared(owned) if entry.phase == OPTIMIZER else entry for entry in ops),
            parameters=parameters,
            memory=step.memory.part(owned, float(after / before) if before else 1.0),
            shards=tuple(parts.shards),
        ),
        found,
    )


def _parts(step: Step, found: Roles, ranks: int) -> _Parts:
    parts = _Parts(step, ranks)
    for block in found.attention:
        parts.divide_attention(block)
    for mlp in found.mlp:
        parts.divide_mlp(mlp)
    for layer in found.heads:
        parts.add(layer, layer.in_features, parts.share("vocabulary", layer.out_features))
        parts.summed_behind([layer])
        parts.scoring.update(layer.forward)
    for table, rows in found.tables.items():
        parts.parameters[table] = Fraction(parts.share("vocabulary", rows), rows)
        parts.sizes[rows] = -(-rows // ranks)
    return parts


def _columns(features: int, block: AttentionBlock, heads: int, kv_heads: int, ranks: int) -> int:
    """The part of a projection of that many features: of queries, keys, values or several of them."""
    for q, k, v in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 1, 1), (1, 1, 0)):

        def width(queries: int, keys: int, q: int = q, k: int = k, v: int = v) -> int:
            return (q * queries + k * keys) * block.head_dim + v * keys * block.value_dim

        if width(block.heads, block.kv_heads) == features:
            return width(heads, kv_heads)
    return -(-features // ranks)


def _part(step: Step, index: int, entry: StepOp, parts: _Parts, kept: dict[int, Fraction]) -> StepOp:
    """One operation as the rank runs it; notes in ``kept`` which share of each of its results it holds."""
    op = entry.op
    if entry.phase == OPTIMIZER:
        return entry
    shares = [_share(ref, parts, kept) for ref in entry.inputs]
    split = parts.layers.get(index)
    results = [_WHOLE] * len(entry.outputs)
    if split and isinstance(op, Gemm):
        layer = split.layer
        new_op = layer.resized(op, entry.phase, split.in_features, split.out_features)
        into = Fraction(split.in_features, layer.in_features)
        out_of = Fraction(split.out_features, layer.out_features)
        held = {FORWARD: out_of, BACKWARD_DATA: into, BACKWARD_WEIGHT: split.kept}
        results = [held[entry.phase]] * len(entry.outputs)
        new: StepOp = replace(entry, op=new_op)
    elif isinstance(op, Gemm):
        split_shares = [share for share in shares if share != _WHOLE]
        if not split_shares or op.batch == 1:
            return entry
        part = max(1, int(op.batch * split_shares[0]))
        results = [split_shares[0]] * len(entry.outputs)
        new = replace(entry, op=replace(op, batch=part))
    elif isinstance(op, Attention):
        if all(share == _WHOLE for share in shares) and op.num_heads not in parts.sizes:
            return entry
        heads = parts.sizes.get(op.num_heads, op.num_heads)
        kv_heads = parts.sizes.get(op.num_kv_heads, op.num_kv_heads)
        of_heads, of_kv = Fraction(heads, op.num_heads), Fraction(kv_heads, op.num_kv_heads)
        results = [
            of_kv if op.num_kv_heads in ref.shape and op.num_heads not in ref.shape else of_heads
            for ref in entry.outputs
        ]
        # Rounded up apart, the heads of a group need not divide any more.
        kv_heads = next(each for each in range(kv_heads, heads + 1) if heads % each == 0)
        new = replace(entry, op=replace(op, num_heads=heads, num_kv_heads=kv_heads))
    elif isinstance(op, Streaming):
        results = list(_results(entry, shares, parts))
        if all(share == _WHOLE for share in (*shares, *results)):
            return entry
        new = replace(entry, op=_streamed(op, entry, shares, results, parts.sizes))
    else:
        return entry
    for ref, share in zip(entry.outputs, results, strict=True):
        kept[ref.id] = share
    inputs, outputs = (
        tuple(_resized(ref, share, parts.sizes) for ref, share in zip(refs, of, strict=True))
        for refs, of in ((entry.inputs, shares), (entry.outputs, results))
    )
    return replace(new, inputs=inputs, outputs=outputs)


def _share(ref: TensorRef, parts: _Parts, kept: Mapping[int, Fraction]) -> Fraction:
    if ref.parameter:
        return parts.parameters.get(ref.parameter, _WHOLE)
    return kept.get(ref.id, _WHOLE)


def _results(entry: StepOp, shares: list[Fraction], parts: _Parts) -> Iterator[Fraction]:
    """Which share of each result the rank holds.

    A result is split like the largest input that is, unless a reduction has summed the split dimension up.
    """
    op = entry.op
    assert isinstance(op, Streaming)
    split_inputs = [(ref, share) for ref, share in zip(entry.inputs, shares, strict=True) if share != _WHOLE]
    largest, share = max(((ref.elements, share) for ref, share in split_inputs), default=(0, _WHOLE))
    for ref in entry.outputs:
        if op.role == "embedding":
            # The rows of a split table are gathered from all ranks; its gradient is split as it is.
            rows = [name for name in parts.parameters if name.startswith(f"{entry.site.module}.")]
            split = entry.phase == BACKWARD_WEIGHT and ref.shape[:1] and ref.shape[0] in parts.sizes and rows
            yield Fraction(parts.sizes[ref.shape[0]], ref.shape[0]) if split else _WHOLE
            continue
        reduces = op.role in ("reduction", "loss") or ref.elements < largest
        yield _WHOLE if reduces and not parts.sizes.keys() & {*ref.shape} else share


def _streamed(
    op: Streaming, entry: StepOp, shares: list[Fraction], results: list[Fraction], sizes: Mapping[int, int]
) -> Streaming:
    read = _of(entry.inputs, shares) if op.role != "embedding" else 1.0
    written = _of(entry.outputs, results)
    refs = [*zip(entry.inputs, shares, strict=True), *zip(entry.outputs, results, strict=True)]
    _, share = max(((ref.elements, share) for ref, share in refs), key=lambda pair: pair[0])
    return replace(
        op,
        elements=max(1, int(op.elements * share)),
        read_bytes=round(op.read_bytes * read),
        write_bytes=round(op.write_bytes * written),
        inner=sizes.get(op.inner, op.inner) if share != _WHOLE else op.inner,
    )


def _of(refs: tuple[TensorRef, ...], shares: list[Fraction]) -> float:
    held = [ref.bytes for ref in refs]
    kept = sum(size * share for size, share in zip(held, shares, strict=True))
    return float(kept / sum(held)) if sum(held) else 1.0


def _resized(ref: TensorRef, share: Fraction, sizes: Mapping[int, int]) -> TensorRef:
    return ref if share == _WHOLE else replace(ref, shape=_shape(ref.shape, share, sizes))


def _shape(shape: tuple[int, ...], share: Fraction | None, sizes: Mapping[int, int]) -> tuple[int, ...]:
    """The shape with the last dimension that the share fits replaced."""
    if share in (None, _WHOLE):
        return shape
    for place in reversed(range(len(shape))):
        part = sizes.get(shape[place])
        if part and Fraction(part, shape[place]) == share:
            return (*shape[:place], part, *shape[place + 1 :])
    return shape


def _embeds(entry: StepOp, tables: Mapping[str, int]) -> bool:
    return entry.op.category == "embedding" and entry.phase == FORWARD and entry.parameter in tables


def _scores(entry: StepOp, kept: Mapping[int, Fraction], found: Roles) -> bool:
    """Whether a loss takes its softmax over split tokens here."""
    return (
        entry.op.category in ("softmax", "loss")
        and entry.phase == FORWARD
        and any(
            ref.shape and ref.shape[-1] == layer.out_features and ref.id in kept
            for ref in entry.inputs
            for layer in found.heads
        )
    )


def _collective(entry: StepOp, function: str, elements: int, ranks: int, dtype: str) -> StepOp:
    op = Collective(function, elements, ranks, dtype)
    return StepOp(op, entry.phase, entry.site, function, entry.outputs, entry.outputs)


def _held(parameters: Mapping[str, Parameter], shares: Mapping[str, Fraction]) -> float:
    """The share of the trainable parameters that a rank holds."""
    total = part = Fraction(0)
    for name, parameter in parameters.items():
        size = prod(parameter.shape)
        total += size
        part += size * shares.get(name, _WHOLE)
    return float(part / total) if total else 1.0
