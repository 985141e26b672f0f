"""Recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tilefit.errors import UsageError
from tilefit.ops.base import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD, Growth, Op
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.gemm import Gemm, linear_pass

#: Gates per cell: how many matrices of hidden x hidden one time step multiplies.
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


#: Purposes of a layer, see :attr:`Recurrent.persistent`.
INFERENCE, TRAINING = "inference", "training"


@dataclass(frozen=True, slots=True)
class Recurrent(Op):
    """``torch.nn.LSTM``, ``GRU`` or ``RNN`` over a whole sequence, in their parameter names.

    Attributes:
        mode: ``LSTM``, ``GRU``, ``RNN_TANH`` or ``RNN_RELU``.
        input_size, hidden_size, num_layers, bidirectional, proj_size: As in ``torch.nn.LSTM``.
        seq_len: Time steps.
        batch: Samples.
        packed: The input is a ``PackedSequence``.
        dtype: Element type.
        direction: ``forward``, ``backward-data`` or ``backward-weight``.
        persistent: ``inference`` or ``training``: what a layer of ``tilefit.nn`` is for, which runs
            persistent kernels where they were measured to be faster for that; empty: cuDNN runs it.
        rows: Steps that the samples of a ``PackedSequence`` have altogether; 0: each has ``seq_len``.
        dropout: Between the layers some of the features are dropped.
    """

    kind: ClassVar[str] = "recurrent"
    passes: ClassVar[tuple[str, ...]] = DIRECTIONS

    mode: str
    input_size: int
    hidden_size: int
    seq_len: int
    batch: int
    num_layers: int = 1
    bidirectional: bool = False
    proj_size: int = 0
    packed: bool = False
    dtype: str = "bf16"
    direction: str = FORWARD
    persistent: str = ""
    rows: int = 0
    dropout: bool = False

    def __post_init__(self) -> None:
        if self.mode not in GATES:
            raise UsageError(f"unknown recurrent mode {self.mode!r}", hint=f"Use one of: {', '.join(GATES)}.")
        if self.persistent not in ("", INFERENCE, TRAINING):
            raise UsageError(
                f"unknown purpose {self.persistent!r}", hint=f"Use {INFERENCE}, {TRAINING} or nothing."
            )
        Op.__post_init__(self)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """Width of the output of one direction."""
        return self.proj_size or self.hidden_size

    @property
    def gates(self) -> int:
        return GATES[self.mode]

    def gemms(self) -> tuple[tuple[Gemm, int], ...]:
        """The products of this pass and how often each runs, as cuDNN's standard algorithm runs them.

        The input projection of a layer is one product over all time steps; the recurrent product is
        one per time step, and its weight gradient again one over all time steps.
        """
        rows, steps = self.all_rows, self.seq_len
        # Fewer and fewer samples are left of a packed input: each step as if it had the mean.
        least, more = divmod(rows, max(steps, 1))
        wide = self.gates * self.hidden_size
        out = self.output_size
        products: list[tuple[Gemm, int]] = []
        for layer in range(self.num_layers):
            inputs = self.input_size if layer == 0 else out * self.directions
            matrices = [(wide, inputs, False), (wide, out, True)]
            matrices += [(self.proj_size, self.hidden_size, True)] if self.proj_size else []
            for outputs, features, each_step in matrices:
                stepwise = each_step and self.direction != BACKWARD_WEIGHT
                sizes = ((least, steps - more), (least + 1, more)) if stepwise else ((rows, 1),)
                for size, times in sizes:
                    if size and times:
                        gemm = linear_pass(self.direction, size, outputs, features, self.dtype)
                        products.append((gemm, self.directions * times))
        return tuple(products)

    @property
    def all_rows(self) -> int:
        """Time steps of all samples."""
        return self.rows or self.seq_len * self.batch

    @property
    def flop(self) -> int:
        return sum(gemm.flop * count for gemm, count in self.gemms())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight matrices."""
        out = self.output_size
        total = 0
        for layer in range(self.num_layers):
            inputs = self.input_size if layer == 0 else out * self.directions
            total += self.gates * self.hidden_size * (inputs + out) + self.proj_size * self.hidden_size
        return total * self.directions * size_bytes(self.dtype)

    @property
    def _activation_bytes(self) -> int:
        widths = self.input_size + self.num_layers * self.directions * self.output_size
        return self.all_rows * widths * size_bytes(self.dtype)

    @property
    def _gate_bytes(self) -> int:
        wide = self.num_layers * self.directions * self.gates * self.hidden_size
        return self.all_rows * wide * size_bytes(self.dtype)

    @property
    def read_bytes(self) -> int:
        if self.direction == FORWARD:
            return self._activation_bytes + self.weight_bytes
        return (
            self._activation_bytes
            + self._gate_bytes
            + (self.weight_bytes if self.direction == BACKWARD_DATA else 0)
        )

    @property
    def write_bytes(self) -> int:
        if self.direction == FORWARD:
            return self._activation_bytes
        if self.direction == BACKWARD_DATA:
            return self._activation_bytes + self._gate_bytes
        return self.weight_bytes

    def on_batch(self, growth: Growth) -> Recurrent:
        return replace(self, batch=growth.of(self.batch), rows=self.rows and growth.of(self.rows))

    @property
    def shape(self) -> str:
        text = f"{self.mode} {self.input_size}->{self.hidden_size}, {self.seq_len} steps, batch {self.batch}"
        if self.num_layers > 1:
            text += f", {self.num_layers} layers"
        return f"{text}, bidirectional" if self.bidirectional else text
