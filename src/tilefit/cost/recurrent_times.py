"""What was measured of recurrent layers: of the persistent kernels of ``tilefit.nn``, and of cuDNN.

The measurements are in ``data/recurrent``, one file per GPU: microseconds per time step of both, by cell,
element type, hidden size, mini-batch, steps, directions and whether backward is included; of eager calls and
of those in a CUDA graph, which leaves out what the host does for a call. A size that was not measured is
judged by the nearest one that was, by the logarithms of hidden size, mini-batch and steps, among those at
which cuDNN runs the same algorithm.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from math import inf, isnan, log2, nan
from typing import NamedTuple

from tilefit.cost import tables
from tilefit.cost.cudnn import cudnn_algorithm
from tilefit.gpus import Gpu
from tilefit.ops import BACKWARD_DATA, FORWARD, Recurrent
from tilefit.ops.recurrent import TRAINING

PERSISTENT, CUDNN = "persistent", "cudnn"

DATA = tables.DATA / "recurrent"

#: How many times as fast the persistent kernels must have been outside CUDA graphs. There the host limits
#: short calls, and what it takes varies by more than this from run to run.
EAGER_MARGIN = 1.1

#: Sizes around a layer that say how far cuDNN is from what is computed, and what is added to the square of
#: their distances, in octaves, so that a size measured does not count alone.
NEIGHBOURS = 4
_SAME_SIZE = 0.05


class Row(NamedTuple):
    """One measured size: microseconds per time step, forward, or forward and backward if ``training``.

    ``captured_us`` are those of calls in a CUDA graph.
    """

    cell: str
    dtype: str
    hidden: int
    batch: int
    steps: int
    directions: int
    training: bool
    persistent_us: float | None
    cudnn_us: float | None
    persistent_captured_us: float | None
    cudnn_captured_us: float | None

    def time_us(self, backend: str, captured: bool) -> float:
        """Time of a step by the persistent kernels or cuDNN; no number where it was not measured."""
        time_us: float | None = getattr(self, f"{backend}{'_captured' if captured else ''}_us")
        return nan if time_us is None else time_us


class Judged(NamedTuple):
    """A measured size that a layer is judged by.

    Attributes:
        row: The size.
        persistent_us, cudnn_us: Microseconds of a time step, of layers of one direction.
        is_faster: The persistent kernels are faster, and outside CUDA graphs clearly faster.
    """

    row: Row
    persistent_us: float
    cudnn_us: float
    is_faster: bool


class Table:
    """What was measured on one GPU.

    The file is JSON: ``columns`` names the fields of :class:`Row`, ``rows`` lists their values (null: not
    measured); beside them stands what they were measured with.
    """

    def __init__(self, rows: Iterable[Row], gpu: Gpu) -> None:
        self._gpu = gpu
        self._algorithms = {row: _algorithms(_layer(row), gpu, row.training) for row in rows}

    def nearest(
        self, layer: Recurrent, dtype: str, *, training: bool, captured: bool = False
    ) -> Judged | None:
        """The measured size to judge a layer by; None beyond what was measured.

        It has a row in the layer's element type, with the time of the persistent kernels, and one in that of
        ``torch.nn``, with cuDNN's. It is the nearest of those at which cuDNN runs the algorithm that it runs
        for the layer, where there are such. Both times are of one size: what a call costs the host, spread
        over more or fewer steps, would tell apart what does not differ.

        Args:
            layer: What ``torch.nn`` would run.
            dtype: Element type of the persistent kernels.
            training: Backward follows.
            captured: In a CUDA graph.
        """
        ours = self._like(layer, dtype, PERSISTENT, training, captured)
        theirs = {_size(row): row for row in self._like(layer, layer.dtype, CUDNN, training, captured)}
        both = [row for row in ours if _size(row) in theirs]
        if not both or layer.hidden_size > max(row.hidden for row in ours):
            return None
        if layer.batch > max(row.batch for row in ours):
            return None
        wanted = _algorithms(layer, self._gpu, training)
        alike = [row for row in both if self._algorithms[theirs[_size(row)]] == wanted]
        row = min(alike or both, key=lambda row: _distance(layer, row))
        own_us = row.time_us(PERSISTENT, captured)
        other_us = theirs[_size(row)].time_us(CUDNN, captured)
        return Judged(row, own_us, other_us, own_us * (1.0 if captured else EAGER_MARGIN) <= other_us)

    def persistent(self, layer: Recurrent, *, training: bool, captured: bool) -> Row | None:
        """The nearest size measured that has a time of the persistent kernels."""
        rows = self._like(layer, layer.dtype, PERSISTENT, training, captured)
        return min(rows, key=lambda row: _distance(layer, row), default=None)

    def by_cudnn(self, layer: Recurrent) -> list[tuple[float, Recurrent, float]]:
        """The sizes measured nearest to a layer at which cuDNN runs the same algorithm for this pass.

        Returns:
            Of each its share among them, which falls with the square of the distance (as :meth:`nearest`
            measures it), the layer measured, and microseconds of its time step in a CUDA graph: forward, or
            backward with the weights' gradients.
        """
        backward = layer.direction != FORWARD
        forward = self._like(layer, layer.dtype, CUDNN, False, True)
        before_us = {_size(row): row.time_us(CUDNN, True) if backward else 0.0 for row in forward}
        which, wanted = -1 if backward else 0, cudnn_algorithm(layer, self._gpu)[0]
        found = []
        for row in self._like(layer, layer.dtype, CUDNN, True, True) if backward else forward:
            step_us = row.time_us(CUDNN, True) - before_us.get(_size(row), inf)
            if step_us > 0 and self._algorithms[row][which] == wanted:
                near = replace(_layer(row), direction=layer.direction)
                found.append((_distance(layer, row) + _SAME_SIZE, near, step_us))
        found = sorted(found, key=lambda near: near[0])[:NEIGHBOURS]
        weights = sum(1 / distance for distance, *_ in found)
        return [(1 / (distance * weights), near, step_us) for distance, near, step_us in found]

    def _like(self, layer: Recurrent, dtype: str, backend: str, training: bool, captured: bool) -> list[Row]:
        """Rows of a layer's kind that have a backend's time; those of one direction stand for two where two
        were not measured, and those of a tanh RNN for a ReLU RNN, which does the same work."""
        cell = layer.mode.lower()
        if cell == "rnn_relu" and cell not in {row.cell for row in self._algorithms}:
            cell = "rnn_tanh"
        kind = (cell, dtype, training)
        rows = [
            row
            for row in self._algorithms
            if (row.cell, row.dtype, row.training) == kind and not isnan(row.time_us(backend, captured))
        ]
        return [row for row in rows if row.directions == layer.directions] or rows


def _layer(row: Row) -> Recurrent:
    return Recurrent(
        mode=row.cell.upper(),
        input_size=row.hidden,
        hidden_size=row.hidden,
        seq_len=row.steps,
        batch=row.batch,
        bidirectional=row.directions == 2,
        dtype=row.dtype,
    )


def _algorithms(layer: Recurrent, gpu: Gpu, training: bool) -> tuple[str, ...]:
    """cuDNN's algorithms of the forward pass and, in training, the backward pass."""
    directions = (FORWARD, BACKWARD_DATA) if training else (FORWARD,)
    return tuple(cudnn_algorithm(replace(layer, direction=direction), gpu)[0] for direction in directions)


def _size(row: Row) -> tuple[int, int, int]:
    return row.hidden, row.batch, row.steps


def _distance(layer: Recurrent, row: Row) -> float:
    pairs = ((row.hidden, layer.hidden_size), (row.batch, layer.batch), (row.steps, layer.seq_len))
    return sum(log2(a / b) ** 2 for a, b in pairs)


@cache
def table(gpu: Gpu) -> Table | None:
    """The measurements that hold for a GPU: its own, or the H200's for its generation."""
    path = DATA / f"{gpu.name}.json"
    if not path.exists() and gpu.compute_capability[0] == 9:
        path = DATA / "h200.json"
    if not path.exists():
        return None
    columns = json.loads(path.read_text(encoding="utf-8"))["columns"]
    return Table(
        [Row(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)], gpu
    )


class Steps(NamedTuple):
    """GPU time of the persistent kernels for a layer.

    Attributes:
        row: The size that was measured.
        forward_us, backward_us: A time step of one layer and direction, with its share of the products with
            the input and of the weights' gradients; ``backward_us`` is 0 in inference.
    """

    row: Row
    forward_us: float
    backward_us: float


@lru_cache(maxsize=4096)
def persistent_steps(op: Recurrent, gpu: Gpu) -> Steps | None:
    """What a layer's time steps take by the persistent kernels; None where cuDNN runs it.

    The layer runs by what is faster in eager calls; its times are those of the nearest size in CUDA graphs,
    which leave out what the host does.
    """
    measured = table(gpu)
    if not op.persistent or op.proj_size or measured is None:
        return None
    layer, training = replace(op, direction=FORWARD), op.persistent == TRAINING
    choice = measured.nearest(layer, op.dtype, training=training)
    forward = measured.persistent(layer, training=False, captured=True)
    if choice is None or forward is None or not choice.is_faster:
        return None
    forward_us = forward.time_us(PERSISTENT, True)
    if not training:
        return Steps(forward, forward_us, 0.0)
    both = measured.persistent(layer, training=True, captured=True)
    return both and Steps(both, forward_us, max(both.time_us(PERSISTENT, True) - forward_us, 0.0))
