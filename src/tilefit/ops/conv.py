"""Convolution in one, two or three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from tilefit.errors import UsageError
from tilefit.ops.base import BACKWARD_DATA, DIRECTIONS, FORWARD, Growth, Op
from tilefit.ops.dtypes import size_bytes
from tilefit.ops.gemm import Gemm

#: Channels per group from which the grouped kernels use Tensor Cores.
_TENSOR_CORE_GROUP = 8


@dataclass(frozen=True, slots=True)
class Conv(Op):
    """A convolution pass, in the parameter names of ``torch.nn.Conv2d``.

    A transposed convolution is the ``backward-data`` pass of the convolution it transposes.

    Attributes:
        batch: Samples.
        in_channels, out_channels: Channels of the (forward) input and output.
        input_size: Spatial sizes of the input, without padding.
        kernel_size, stride, padding, dilation: One number per spatial dimension.
        groups: Channel groups; equal to ``in_channels`` in a depthwise convolution.
        dtype: Element type of the operands (``"tf32"``: fp32 storage).
        channels_last: NHWC in memory rather than NCHW.
        direction: ``forward``, ``backward-data`` or ``backward-weight``.
        bias: A kernel of PyTorch's adds a bias to the result.
    """

    kind: ClassVar[str] = "conv"
    passes: ClassVar[tuple[str, ...]] = DIRECTIONS

    batch: int
    in_channels: int
    out_channels: int
    input_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    dtype: str = "bf16"
    channels_last: bool = False
    direction: str = FORWARD
    bias: bool = False

    def __post_init__(self) -> None:
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise UsageError(
                f"{self.in_channels} and {self.out_channels} channels do not split into {self.groups} groups"
            )
        if min(self.output_size) < 1:
            raise UsageError(f"the kernel {self.kernel_size} does not fit the input {self.input_size}")
        Op.__post_init__(self)

    @property
    def output_size(self) -> tuple[int, ...]:
        """Spatial sizes of the output (the formula of ``torch.nn.Conv2d``)."""
        return tuple(
            (size + 2 * pad - dil * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dil in zip(
                self.input_size, self.kernel_size, self.stride, self.padding, self.dilation, strict=True
            )
        )

    @property
    def is_narrow(self) -> bool:
        """Too few channels per group for Tensor Cores: it runs on CUDA cores."""
        return self.groups > 1 and min(self.group_channels) < _TENSOR_CORE_GROUP

    @property
    def group_channels(self) -> tuple[int, int]:
        """Channels of a group, in and out."""
        return self.in_channels // self.groups, self.out_channels // self.groups

    @property
    def is_depthwise(self) -> bool:
        """One input channel per group."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def input_elements(self) -> int:
        return self.batch * self.in_channels * prod(self.input_size)

    @property
    def output_elements(self) -> int:
        return self.batch * self.out_channels * prod(self.output_size)

    @property
    def weight_elements(self) -> int:
        return self.out_channels * (self.in_channels // self.groups) * prod(self.kernel_size)

    @property
    def implicit_gemm(self) -> Gemm:
        """The product this pass is equivalent to, one per group (``batch`` counts the groups).

        Source: NVIDIA, "Convolutional Layers User's Guide", section on implicit GEMM: forward
        ``NPQ x K x CRS``, data gradient ``NHW x C x KRS``, weight gradient ``CRS x K x NPQ``. With a
        stride, only every ``prod(stride)``-th tap meets a given input pixel, so the data gradient's
        contraction is divided by it.
        """
        channels_in, channels_out = self.group_channels
        taps = prod(self.kernel_size)
        pixels_out = self.batch * prod(self.output_size)
        if self.direction == FORWARD:
            m, n, k, layout = pixels_out, channels_out, channels_in * taps, "TN"
        elif self.direction == BACKWARD_DATA:
            pixels_in = self.batch * prod(self.input_size)
            contraction = max(1, self.flop // (2 * pixels_in * channels_in * self.groups))
            m, n, k, layout = pixels_in, channels_in, contraction, "NN"
        else:
            m, n, k, layout = channels_in * taps, channels_out, pixels_out, "NT"
        return Gemm(m, n, k, dtype=self.dtype, layout=layout, batch=self.groups)

    @property
    def flop(self) -> int:
        # The three passes multiply the same pairs of numbers.
        return 2 * self.output_elements * (self.in_channels // self.groups) * prod(self.kernel_size)

    @property
    def read_bytes(self) -> int:
        # Of the image, the result and the weight, each pass reads two and writes the third.
        elements = self.input_elements + self.output_elements + self.weight_elements
        return size_bytes(self.dtype) * elements - self.write_bytes

    @property
    def write_bytes(self) -> int:
        if self.direction == FORWARD:
            written = self.output_elements
        else:
            written = self.input_elements if self.direction == BACKWARD_DATA else self.weight_elements
        return size_bytes(self.dtype) * written

    def on_batch(self, growth: Growth) -> Conv:
        return replace(self, batch=growth.of(self.batch))

    @property
    def shape(self) -> str:
        image = "x".join(map(str, self.input_size))
        kernel = "x".join(map(str, self.kernel_size))
        text = f"{self.batch}x{self.in_channels}x{image} -> {self.out_channels}, {kernel}"
        if any(s != 1 for s in self.stride):
            text += f" stride {'x'.join(map(str, self.stride))}"
        if self.groups > 1:
            text += f" groups {self.groups}"
        return text


def Conv2d(  # noqa: N802 - the name of the layer it describes
    batch: int,
    in_channels: int,
    out_channels: int,
    input_size: int | Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    **others: Any,
) -> Conv:
    """A two-dimensional :class:`Conv`; a single number stands for both dimensions."""

    def pair(size: int | Sequence[int]) -> tuple[int, ...]:
        return (size, size) if isinstance(size, int) else tuple(size)

    image = pair(input_size), pair(kernel_size), pair(stride), pair(padding), pair(dilation)
    return Conv(batch, in_channels, out_channels, *image, groups, **others)
