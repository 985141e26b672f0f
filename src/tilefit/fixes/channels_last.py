"""Lay out convolutions and their images in NHWC."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from tilefit.fixes.behaviour import behaviours, is_replaced
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.layers import ContiguousOutside, Fitted, Wide
from tilefit.fixes.modules import submodule
from tilefit.fixes.padding import REGION_S
from tilefit.fixes.run import Run
from tilefit.rules.layout.channels_last import channels_last


@dataclass(frozen=True)
class InChannelsLast(ChangeSet):
    """Convolutions that read and write their images in NHWC."""

    words = "Run {count} convolutions on images in NHWC."

    def make(self, run: Run, edits: Edits) -> None:
        modules = [submodule(run.model, path) for path in self.modules]
        for path, module in zip(self.modules, modules, strict=True):
            _require_convolution(path, module)
        region = ContiguousOutside()
        edits.behave(run.model, region)
        for module in modules:
            old = Wide.of(module)
            edits.behave(module, replace(old if isinstance(old, Fitted) else Fitted(), nhwc=region), old)


def _require_convolution(path: str, module: nn.Module) -> None:
    """Check that the images of a module can be laid out anew.

    Raises:
        RefusedError: it is no convolution, or nobody knows what it does.
    """
    if not isinstance(module, _ConvNd):
        raise RefusedError(f"{path or 'the model'} is no convolution, and computes one with filters it holds")
    if parametrize.is_parametrized(module):
        raise RefusedError(f"{path} has parametrisations: its weight is computed anew for every call")
    if is_replaced(module):
        raise RefusedError(f"the forward method of {path} was replaced")


class ChannelsLast(Fix):
    """Runs convolutions on images in NHWC, as Tensor Cores read them.

    A convolution that is given an image in NCHW converts it, and PyTorch its filters. It then writes its
    image in NHWC; normalisation, pooling and elementwise functions keep it so, and the next convolution finds
    it as it is to be. Parameters, their gradients and what an optimizer keeps of them stay as they are, and
    so do the images that the model returns. Convolutions that are called outside a call of the model are
    plain.

    A model that takes apart images by ``view`` may need ``reshape`` instead: it fails when it is captured,
    and the fix is refused.

    Refused: convolutions whose weight is computed by something else.
    """

    name = "channels-last"
    rules = ("LAY001",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        step = context.step
        found: dict[str, None] = {}
        for path in dict.fromkeys(step.ops[index].site.module for index in channels_last(step, context.gpu)):
            try:
                module = submodule(context.run.model, path)
                _require_convolution(path, module)
            except RefusedError as refused:
                yield Refusal((path,), refused.what)
            else:
                if not any(isinstance(each, Fitted) and each.nhwc for each in behaviours(module)):
                    found[path] = None
        if found:
            yield InChannelsLast(tuple(found), host_s=REGION_S * len(found))
