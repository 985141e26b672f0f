"""Element types operations run in: forward against backward, and how often each type is used."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.precision.ledger import Ended, Tracker
from tilefit.precision.lines import short, user_line
from tilefit.precision.look import Call, Observer, function_of
from tilefit.precision.rules.autocast import BackwardInOtherDtype, CacheDropsGradients
from tilefit.precision.tensors import name_of

#: Operations that autocast runs in half precision.
PRODUCTS = frozenset(
    """mm addmm bmm baddbmm addbmm convolution _scaled_dot_product_flash_attention mkldnn_linear
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention linear""".split()
)
#: Frames that are searched for the forward function of a custom Function.
_FRAMES = 12


class Products(Tracker, Observer):
    """Compares the element types of matrix products forward, backward and in recomputations."""

    def set_up(self) -> None:
        self._by_code: dict[CodeType, tuple[str, str]] = {}
        self._by_module: dict[int, str] = {}

    def wants(self, func: Any, name: str) -> bool:
        return name in PRODUCTS

    def after(self, call: Call) -> None:
        first = next((t for t in call.args if isinstance(t, Tensor) and t.is_floating_point()), None)
        if first is None:
            return
        dtype, module = name_of(first.dtype), call.look.running
        if not call.backward:
            if module is not None:
                self._by_module.setdefault(id(module), dtype)
            self._note_functions(dtype)
            return
        function = function_of(torch._C._current_autograd_node())
        if function is not None:
            forward = _unwrapped(function.forward)  # type: ignore[attr-defined]
            before, place = ("", "") if forward is None else self._by_code.get(forward.__code__, ("", ""))
            filename, _, line = place.rpartition(":")
            name = function.__name__.removesuffix("Backward")
            self._judge("function", name, before, dtype, f"{short(filename)}:{line}")
        elif call.look.recomputes and module is not None:
            before, name = self._by_module.get(id(module), ""), call.module
            self._judge("recompute", name, before, dtype, call.source, name)

    def _judge(self, kind: str, name: str, forward: str, backward: str, *place: str) -> None:
        if forward not in ("", backward):
            types = {"forward": forward, "backward": backward}
            self.found(BackwardInOtherDtype, *place, kind=kind, name=name, **types)

    def _note_functions(self, dtype: str) -> None:
        frame: FrameType | None = sys._getframe(3)
        for _ in range(_FRAMES):
            if frame is None:
                return
            code = frame.f_code
            if code.co_name in ("forward", "decorate_fwd", "setup_context") and code not in self._by_code:
                self._by_code[code] = dtype, f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back

    def end(self) -> None:
        self._by_code.clear()
        self._by_module.clear()


class LostGradients(Tracker, Observer):
    """Weights whose output has a gradient and which have none, after a forward pass without gradients."""

    def set_up(self) -> None:
        self._without: dict[int, int] = {}
        self._reached: dict[int, tuple[nn.Module, str, str]] = {}

    def end(self) -> None:
        self._without.clear()

    def ran(self, module: nn.Module, name: str, output: Any) -> None:
        if not self._without and torch.is_grad_enabled():
            return  # nothing ran without gradients
        region, weights = (
            self._ledger.here.cached_in,
            [p for p in module._parameters.values() if p is not None],
        )
        if not region or self._ledger.here.depth or not weights:
            return
        if not torch.is_grad_enabled():
            self._without[id(module)] = region
            return
        if self._without.get(id(module)) != region or not isinstance(output, Tensor):
            return
        source = user_line()
        if not output.requires_grad:
            # Not even a graph: neither its input nor, wrongly, its weight asks for a gradient.
            self._reached[id(module)] = module, name, source
        else:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda _: self._reached.update({id(module): (module, name, source)})
            )

    def on_ended(self, ended: Ended) -> None:
        """Whose weights got no gradient although its output did?"""
        reached, self._reached = self._reached, {}
        for module, name, source in reached.values():
            weights = [
                p
                for p in module.parameters(recurse=False)
                if p.requires_grad and p.ndim >= 2 and p.dtype == torch.float32
            ]
            if weights and all(weight.grad is None for weight in weights):
                self.found(CacheDropsGradients, source, name)


def _unwrapped(function: Any) -> Any:
    """The function below ``custom_fwd``, or None where there is no Python code."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if hasattr(function, "__code__") else None
