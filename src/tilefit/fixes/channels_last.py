"""Lay out convolutions and their images in NHWC."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from tilefit.capture.layouts import is_channels_last
from tilefit.errors import CaptureError
from tilefit.fixes.channel_paths import CONVOLUTIONS
from tilefit.fixes.convolution import fit
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal, RefusedError
from tilefit.fixes.run import Run
from tilefit.fixes.swap import require_plain, submodule
from tilefit.fixes.widening import NHWC
from tilefit.rules.layout.channels_last import channels_last


@dataclass(frozen=True)
class InChannelsLast(ChangeSet):
    """Convolutions whose filters are laid out in NHWC.

    Attributes:
        entries: Paths of those among them that are given images in NCHW and convert them.
    """

    entries: tuple[str, ...]

    @property
    def summary(self) -> str:
        count = len(self.entries)
        before = ", ".join(self.entries) if count < 4 else f"{count} of them"
        images = f", and the images before {before}" if count else ""
        return f"Lay out {len(self.modules)} convolutions in NHWC{images}."

    def make(self, run: Run, edits: Edits) -> None:
        modules = [submodule(run.model, path) for path in self.modules]
        for path, module in zip(self.modules, modules, strict=True):
            _require_own_memory(path, module)
        entries = [submodule(run.model, path) for path in self.entries]
        for path, module in zip(self.entries, entries, strict=True):
            require_plain(module, path, type(module))
        for module in modules:
            _convert(edits, module, run.live_optimizer)
        for module in entries:
            fit(edits, module, channels_last=True)


def _require_own_memory(path: str, module: nn.Module) -> None:
    """Check that the filters can be laid out anew.

    Raises:
        RefusedError: they are no parameter of the module, or part of a larger memory.
    """
    if not isinstance(module, _ConvNd):
        raise RefusedError(f"{path or 'the model'} is no convolution, and computes one with filters it holds")
    if parametrize.is_parametrized(module):
        raise RefusedError(f"{path} has parametrisations: its weight is computed anew for every call")
    weight = vars(module)["_parameters"].get("weight")
    if type(weight) is not nn.Parameter or type(weight.data).__module__ != "torch":
        raise RefusedError(f"the weight of {path} is no plain parameter")
    if weight.untyped_storage().nbytes() != weight.numel() * weight.element_size():
        raise RefusedError(f"the weight of {path} is part of a larger memory, which others may use")


def _convert(edits: Edits, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Lay out the filters in NHWC, and with them their gradient and what the optimizer keeps of them."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    kept = weight.stride()
    state = optimizer.state.get(weight, {}) if optimizer is not None else {}

    def lay_out(convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        weight.data = convert(weight.data)
        if weight.grad is not None:
            weight.grad = convert(weight.grad)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                state[name] = convert(value)

    def back(tensor: torch.Tensor) -> torch.Tensor:
        laid_out = torch.empty_strided(tensor.shape, kept, dtype=tensor.dtype, device=tensor.device)
        return laid_out.copy_(tensor)

    lay_out(lambda tensor: tensor.to(memory_format=NHWC[tensor.dim()]))
    edits.undone_by(lambda: lay_out(back))


class ChannelsLast(Fix):
    """Lays out the filters of convolutions in NHWC, and the images once where they enter.

    A convolution whose filters are in NHWC writes its images in NHWC; normalisation, pooling and elementwise
    functions keep them so, and the next convolution finds them as the Tensor Cores read them. Convolutions
    that are given an image in NCHW convert it, in the copy that autocast makes anyway. The numbers and their
    shapes are the same, so that checkpoints are; what an optimizer keeps of the filters (momenta) is laid
    out with them.

    A model that takes apart images by ``view`` may need ``reshape`` instead: it fails when it is captured,
    and the fix is refused. ``safetensors.torch.save_file`` wants contiguous tensors: save with
    ``save_model`` or ``save_pretrained``, or call ``.contiguous()`` on them.

    Refused: convolutions whose weight is computed by something else, or is a part of a larger tensor.
    """

    name = "channels-last"
    rules = ("LAY001",)

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        step = context.step
        found: dict[str, None] = {}
        for path in dict.fromkeys(step.ops[index].site.module for index in channels_last(step)):
            try:
                _require_own_memory(path, submodule(context.run.model, path))
            except RefusedError as refused:
                yield Refusal((path,), refused.what)
            else:
                found[path] = None
        if not found:
            return
        modules = tuple(found)
        try:
            yield InChannelsLast(modules, _entries(context.run, modules))
        except CaptureError as error:
            yield Refusal(modules, f"the model does not run with images in NHWC ({error.what})")


def _entries(run: Run, modules: tuple[str, ...]) -> tuple[str, ...]:
    """The convolutions among ``modules`` that are given images in NCHW although all filters are in NHWC.

    Raises:
        CaptureError: the model cannot be run so.
    """
    trial = run.on_meta()
    trial.change(train=False, compile=False)
    InChannelsLast(modules, ()).apply(trial)
    entries: dict[str, None] = {}
    for path in modules:
        module = submodule(trial.model, path)
        if type(module) in CONVOLUTIONS and "forward" not in vars(module):
            module.register_forward_pre_hook(_watching(path, entries))
    trial.capture()
    return tuple(entries)


def _watching(path: str, entries: dict[str, None]) -> Callable[[nn.Module, Any], None]:
    def watch(module: nn.Module, args: Any) -> None:
        image = args[0] if args else None
        if not isinstance(image, torch.Tensor) or image.dim() not in NHWC or is_channels_last(image):
            return
        # Where a size is 1 the memory of both formats is the same.
        if not image.is_contiguous(memory_format=NHWC[image.dim()]):
            entries[path] = None

    return watch
