"""Random convolutional networks stay the same function when their channels are padded, and in NHWC."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import tilefit
from fixing import fitted
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.padding.layers import in_channels_last, padded

CHANNELS = (3, 5, 6, 8, 12)
SIZES = {3: 8, 5: 8, 6: 8, 12: 16, 10: 16, 11: 16}


class Net(nn.Module):
    """Runs a list of steps, each on the image before it or on one before that."""

    def __init__(self, program: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.program: list[Callable[[list[Any]], Any]] = []
        self.layers = nn.ModuleList()
        self.shared = nn.ReLU()
        self.channels = [3]
        for step in program:
            getattr(self, f"add_{step[0]}")(*step[1:])

    def _layer(self, layer: nn.Module, channels: int) -> None:
        number = len(self.layers)
        self.layers.append(layer)
        self.program.append(("layer", number))
        self.channels.append(channels)

    def _function(self, *call: Any, channels: int = 0) -> None:
        self.program.append(call)
        self.channels.append(channels or self.channels[-1])

    def add_conv(self, out: int, kernel: int, bias: bool) -> None:
        self._layer(nn.Conv2d(self.channels[-1], out, kernel, padding=kernel // 2, bias=bias), out)

    def add_reflect(self, out: int) -> None:
        self._layer(nn.Conv2d(self.channels[-1], out, 3, padding=1, padding_mode="reflect"), out)

    def add_transposed(self, out: int) -> None:
        self._layer(nn.ConvTranspose2d(self.channels[-1], out, 3, padding=1), out)

    def add_depthwise(self, times: int, transposed: bool) -> None:
        now = self.channels[-1]
        conv = nn.ConvTranspose2d if transposed else nn.Conv2d
        self._layer(conv(now, times * now, 3, padding=1, groups=now), times * now)

    def add_grouped(self) -> None:
        now = self.channels[-1]
        groups = 2 if now % 2 == 0 else 1
        self._layer(nn.Conv2d(now, 6, 1, groups=groups), 6)

    def add_norm(self, affine: bool, track: bool) -> None:
        now = self.channels[-1]
        self._layer(nn.BatchNorm2d(now, affine=affine, track_running_stats=track), now)

    def add_group_norm(self) -> None:
        self._layer(nn.GroupNorm(1, self.channels[-1]), self.channels[-1])

    def add_module(self, kind: int) -> None:
        modules = [
            nn.SiLU(),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 1, 1),
            nn.AvgPool2d(3, 1, 1),
            nn.Sigmoid(),
        ]
        self._layer(modules[kind % len(modules)], self.channels[-1])

    def add_function(self, name: str) -> None:
        self._function(name)

    def add_residual(self, back: int) -> None:
        same = [i for i, c in enumerate(self.channels) if c == self.channels[-1]]
        self._function("residual", same[back % len(same)])

    def add_concatenated(self, back: int) -> None:
        other = back % len(self.channels)
        channels = self.channels[-1] + self.channels[other]
        if channels <= 24:
            self._function("concatenated", other, channels=channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = [x]
        for name, *arguments in self.program:
            images.append(self._step(name, images, *arguments))
        return images[-1]

    def _step(self, name: str, images: list[torch.Tensor], *arguments: int) -> torch.Tensor:
        x = images[-1]
        if name == "layer":
            # In-place layers must not change what is used again.
            layer = self.layers[arguments[0]]
            return layer(x.clone() if getattr(layer, "inplace", False) else x)
        if name == "residual":
            return x + images[arguments[0]]
        if name == "concatenated":
            return torch.cat([images[arguments[0]], x], dim=1)
        return FUNCTIONS[name](self, x)


def _by_shape(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x / x.shape[1]


def _resized(net: Net, x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(F.interpolate(x, scale_factor=2.0), size=x.shape[-2:])


FUNCTIONS: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "relu": lambda net, x: F.relu(x),
    "shared": lambda net, x: net.shared(x),
    "scaled": lambda net, x: 2 * x - 1.0,
    "gated": lambda net, x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "masked": lambda net, x: x * x.mean(1, keepdim=True),
    "pooled": lambda net, x: F.max_pool2d(x, 3, 1, 1),
    "by_shape": _by_shape,
    "resized": _resized,
    "halves": lambda net, x: torch.cat(x.flip(1).chunk(2, 1), 1),
    "softmax": lambda net, x: x.softmax(1),
}
STEPS = st.one_of(
    st.tuples(st.just("conv"), st.sampled_from(CHANNELS), st.sampled_from((1, 3)), st.booleans()),
    st.tuples(st.just("conv"), st.sampled_from(CHANNELS), st.sampled_from((1, 3)), st.booleans()),
    st.tuples(st.just("reflect"), st.sampled_from(CHANNELS)),
    st.tuples(st.just("transposed"), st.sampled_from(CHANNELS)),
    st.tuples(st.just("depthwise"), st.sampled_from((1, 2)), st.booleans()),
    st.tuples(st.just("grouped")),
    st.tuples(st.just("norm"), st.booleans(), st.booleans()),
    st.tuples(st.just("norm"), st.just(True), st.just(True)),
    st.tuples(st.just("group_norm")),
    st.tuples(st.just("module"), st.integers(0, 4)),
    st.tuples(st.just("function"), st.sampled_from(sorted(FUNCTIONS))),
    st.tuples(st.just("residual"), st.integers(0, 9)),
    st.tuples(st.just("concatenated"), st.integers(0, 9)),
)


@given(
    program=st.lists(STEPS, min_size=2, max_size=9),
    sizes=st.lists(st.sampled_from(sorted(SIZES)), min_size=1, unique=True),
    nhwc=st.booleans(),
)
@example(program=[("depthwise", 2, True), ("conv", 3, 1, False)], sizes=[3, 5], nhwc=False)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_padding_keeps_the_function(program: list[Any], sizes: list[int], nhwc: bool) -> None:
    torch.manual_seed(0)
    net = Net([("conv", 5, 3, True), *program]).double()
    chosen = {size: SIZES[size] for size in sizes}
    what = fitted(net, chosen, chosen)
    fixed = copy.deepcopy(net)
    run = Run(fixed)
    if nhwc:
        names = [name for name, m in fixed.named_modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
        in_channels_last(tuple(names)).apply(run)
    padded(what, chosen).apply(run)
    result = tilefit.verify(net, fixed, torch.randn(2, 3, 5, 4, dtype=torch.double), steps=2)
    assert result.ok, result
