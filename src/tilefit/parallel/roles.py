"""Which layers of a step tensor parallelism splits, and how: inferred from how tensors flow.

- **Attention**: the linear layers that fused attention (or a pair of batched products) gets its queries, keys
  and values from are split by columns, a whole number of heads to each rank; the first linear layer behind it
  by rows.
- **MLP**: a linear layer whose output reaches, through activations, products and casts alone, a second one
  that leads back to the first one's width. The first (or a gate and an up projection) is split by columns,
  the second by rows.
- **Vocabulary**: the layer that scores every token, tied to an embedding table or of its size, and that
  table, are split by tokens.

Everything else is kept whole on every rank: norms, position embeddings, routers, experts that are computed
as one grouped product, convolutions.

Source: Shoeybi and others, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tilefit.ops import FORWARD, Attention, Gemm, Step, Streaming
from tilefit.rules.flow import Flow
from tilefit.rules.layers import Linear, linears


@dataclass(slots=True)
class AttentionBlock:
    """One attention with the layers around it.

    Attributes:
        heads, kv_heads: Of the whole attention.
        head_dim, value_dim: Width of a query and key head, and of a value head.
        columns: The projections before it.
        row: The projection behind it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    columns: list[Linear] = field(default_factory=list)
    row: Linear | None = None


@dataclass(slots=True)
class MlpBlock:
    """The layers into a wide space (one, or a gate and an up projection) and the one out of it."""

    columns: list[Linear]
    row: Linear


@dataclass(slots=True)
class Roles:
    """What is split.

    Attributes:
        attention, mlp: The blocks, in the order of the step.
        heads: Layers that score tokens.
        tables: Embedding tables split by tokens, by name of the parameter, with their number of rows.
        whole: Linear layers that are not split.
    """

    attention: list[AttentionBlock] = field(default_factory=list)
    mlp: list[MlpBlock] = field(default_factory=list)
    heads: list[Linear] = field(default_factory=list)
    tables: dict[str, int] = field(default_factory=dict)
    whole: list[Linear] = field(default_factory=list)


class _Layers(Flow):
    """Which linear layers lie before and behind an operation of the forward pass, in their order."""

    def __init__(self, step: Step, layers: Iterable[Linear]) -> None:
        super().__init__(step)
        self.at = {index: layer for layer in layers for index in layer.forward}

    def sources(self, index: int) -> list[Linear]:
        """The linear layers that an operation's inputs come from, through streaming operations alone."""
        between = self.needed([index], self._is_between)
        return self._of(i for each in (index, *between) for i in self.writers[each].values())

    def sinks(self, index: int, through: Collection[str] = ()) -> list[Linear]:
        """The linear layers that an operation's results go to; ``through`` are the roles of operations that
        may lie between, all of them if empty."""
        between = self.reachable([index], lambda other: self._is_between(other, through))
        return self._of(i for each in (index, *between) for i in self.readers[each])

    def _is_between(self, index: int, through: Collection[str] = ()) -> bool:
        entry = self.step.ops[index]
        if entry.phase != FORWARD or index in self.at or not isinstance(entry.op, Streaming):
            return False
        return not through or entry.op.role in through

    def _of(self, indices: Iterable[int]) -> list[Linear]:
        return list({id(self.at[i]): self.at[i] for i in sorted(indices) if i in self.at}.values())


def roles(step: Step, apart: Collection[str] = ()) -> Roles:
    """What tensor parallelism splits in a step, but for layers with the parameters ``apart``."""
    layers = [layer for layer in linears(step) if layer.parameter not in apart]
    flow = _Layers(step, layers)
    found = Roles()
    taken: set[int] = set()
    for block in _attention(flow):
        if not taken & {id(layer) for layer in block.columns}:
            found.attention.append(block)
            taken.update(id(layer) for layer in (*block.columns, *([block.row] if block.row else [])))
    _vocabulary(step, layers, found)
    taken.update(id(layer) for layer in found.heads)
    for mlp in _mlps(flow, layers, taken):
        found.mlp.append(mlp)
        taken.update(id(layer) for layer in (*mlp.columns, mlp.row))
    found.whole = [layer for layer in layers if id(layer) not in taken]
    return found


def _attention(flow: _Layers) -> Iterator[AttentionBlock]:
    step = flow.step
    for index, entry in enumerate(step.ops):
        op = entry.op
        if entry.phase != FORWARD or entry.recomputed:
            continue
        if isinstance(op, Attention):
            block = AttentionBlock(op.num_heads, op.num_kv_heads, op.head_dim, op.value_dim)
            block.columns = _inside(flow.sources(index), entry.site.module)
            width = op.num_heads * op.value_dim
            ends = [index]
        elif isinstance(op, Gemm) and op.batch > 1 and index not in flow.at:
            # Attention written out: softmax(Q K^T), then its product with V.
            seconds = [other for other in _through(flow, index) if _is_batched(flow, other, op.batch)]
            if not seconds or not step.batch or op.batch % step.batch:
                continue
            second = step.ops[seconds[0]].op
            assert isinstance(second, Gemm)
            heads, head_dim, value_dim = op.batch // step.batch, op.k, second.n
            columns = {
                id(layer): layer
                for each in (index, seconds[0])
                for layer in _inside(flow.sources(each), entry.site.module)
            }
            keys = {layer.out_features // head_dim for layer in columns.values()} - {heads}
            block = AttentionBlock(
                heads, min((k for k in keys if 0 < k < heads), default=heads), head_dim, value_dim
            )
            block.columns = list(columns.values())
            width = heads * value_dim
            ends = seconds[:1]
        else:
            continue
        if not block.columns:
            continue
        rows = [layer for layer in flow.sinks(ends[0]) if layer.in_features == width]
        block.row = rows[0] if rows else None
        yield block


def _through(flow: _Layers, index: int) -> Iterator[int]:
    """Products that a product's result reaches through a softmax and what lies around it."""
    seen, open_ = {index}, [index]
    softmax = False
    while open_:
        for other in flow.readers[open_.pop(0)]:
            if other in seen or flow.step.ops[other].phase != FORWARD:
                continue
            seen.add(other)
            op = flow.step.ops[other].op
            if isinstance(op, Streaming):
                softmax = softmax or op.role == "softmax"
                open_.append(other)
            elif isinstance(op, Gemm) and softmax:
                yield other


def _is_batched(flow: _Layers, index: int, batch: int) -> bool:
    op = flow.step.ops[index].op
    return isinstance(op, Gemm) and op.batch == batch and index not in flow.at


def _inside(layers: list[Linear], module: str) -> list[Linear]:
    """The layers below a module; where there are none, those beside it."""
    for root in (module, module.rpartition(".")[0]):
        inside = [
            layer
            for layer in layers
            if not root or layer.module == root or layer.module.startswith(f"{root}.")
        ]
        if inside:
            return inside
    return []


def _vocabulary(step: Step, layers: list[Linear], found: Roles) -> None:
    """Adds the layers that score tokens and the tables of their size."""
    tables = {
        ref.parameter: ref.shape[0]
        for entry in step.ops
        if entry.phase == FORWARD and entry.op.category == "embedding"
        for ref in entry.inputs
        if ref.parameter and len(ref.shape) == 2
    }
    for layer in layers:
        wide = layer.out_features > layer.in_features and layer.out_features in tables.values()
        if layer.parameter in tables or wide:
            found.heads.append(layer)
    scored = {layer.out_features for layer in found.heads} or {max(tables.values(), default=0)}
    found.tables = {name: rows for name, rows in tables.items() if rows in scored}


#: What may lie between the two layers of an MLP.
_BETWEEN = ("pointwise", "copy", "indexing")


def _mlps(flow: _Layers, layers: list[Linear], taken: set[int]) -> Iterator[MlpBlock]:
    into: dict[int, MlpBlock] = {}
    for layer in layers:
        if id(layer) in taken or not layer.forward:
            continue
        for row in flow.sinks(layer.forward[0], _BETWEEN):
            halves = (row.in_features, 2 * row.in_features)  # a gate and an up projection may be one layer
            leads_back = row.out_features == layer.in_features and layer.out_features in halves
            if leads_back and id(row) not in taken and row is not layer:
                into.setdefault(id(row), MlpBlock([], row)).columns.append(layer)
                break
    rows = {*into}
    for block in into.values():
        # A chain of layers of one width: each second one ends a pair.
        columns = [
            layer
            for layer in block.columns
            if id(layer) not in rows or layer.out_features > layer.in_features
        ]
        if columns:
            yield MlpBlock(columns, block.row)
