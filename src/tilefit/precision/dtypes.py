"""Element types operations run in: forward against backward, and how often each type is used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.precision.events import BackwardDtype, GradientLost
from tilefit.precision.ledger import Ended, Ledger
from tilefit.precision.lines import short, user_line
from tilefit.precision.look import Call, Look, Observer, function_of
from tilefit.precision.recorder import Recorder
from tilefit.precision.tensors import name_of

#: Operations that autocast runs in half precision.
PRODUCTS = frozenset(
    """mm addmm bmm baddbmm addbmm convolution _scaled_dot_product_flash_attention mkldnn_linear
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention linear""".split()
)
#: Frames that are searched for the forward function of a custom Function.
_FRAMES = 12


class Products(Observer):
    """Compares the element types of matrix products forward, backward and in recomputations.

    Args:
        recorder: Where events go.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._by_code: dict[CodeType, tuple[str, str]] = {}
        self._by_module: dict[int, str] = {}

    def wants(self, func: Any, name: str) -> bool:
        return name in PRODUCTS

    def after(self, call: Call) -> None:
        first = next((t for t in call.args if isinstance(t, Tensor) and t.is_floating_point()), None)
        if first is None:
            return
        dtype = name_of(first.dtype)
        module = call.look.running
        if call.backward:
            node = torch._C._current_autograd_node()
            function = function_of(node)
            if function is not None:
                self._judge_function(function, dtype)
            elif call.look.recomputes and module is not None:
                self._judge_module(module, call, dtype)
            return
        if module is not None:
            self._by_module.setdefault(id(module), dtype)
        self._note_functions(dtype)

    def _note_functions(self, dtype: str) -> None:
        frame: FrameType | None = sys._getframe(3)
        for _ in range(_FRAMES):
            if frame is None:
                return
            code = frame.f_code
            if code.co_name in ("forward", "decorate_fwd", "setup_context") and code not in self._by_code:
                self._by_code[code] = dtype, f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back

    def _judge_function(self, function: type, dtype: str) -> None:
        forward = _unwrapped(function.forward)  # type: ignore[attr-defined]
        known = self._by_code.get(forward.__code__) if forward is not None else None
        if known is None or known[0] == dtype:
            return
        filename, _, line = known[1].rpartition(":")
        source = f"{short(filename)}:{line}"
        self._recorder.emit_once(
            ("function", source),
            lambda: BackwardDtype(
                source=source,
                kind="function",
                name=function.__name__.removesuffix("Backward"),
                forward=known[0],
                backward=dtype,
            ),
        )

    def _judge_module(self, module: nn.Module, call: Call, dtype: str) -> None:
        before = self._by_module.get(id(module), dtype)
        if before == dtype:
            return
        source, name = call.source, call.module
        self._recorder.emit_once(
            ("recompute", source),
            lambda: BackwardDtype(
                source=source, module=name, kind="recompute", name=name, forward=before, backward=dtype
            ),
        )

    def end(self) -> None:
        self._by_code.clear()
        self._by_module.clear()


class LostGradients:
    """Weights whose output has a gradient and which have none, after a forward pass without gradients.

    Args:
        recorder: Where events go.
        ledger: Knows backward passes.
        region: The number of the present autocast region with a cache, 0 for none.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger, region: Callable[[], int]) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._region = region
        self._without: dict[int, int] = {}
        self._reached: dict[int, tuple[nn.Module, str, str]] = {}
        recorder.on(Ended, self._on_backward)

    def follow(self, look: Look) -> None:
        """Look at the modules that run during a close look."""
        self._without.clear()
        look.on_module.append(self._ran)

    def _ran(self, module: nn.Module, name: str, output: Any) -> None:
        if not self._without and torch.is_grad_enabled():
            return  # nothing ran without gradients
        region = self._region()
        if (
            not region
            or self._ledger.here.depth
            or not any(p is not None for p in module._parameters.values())
        ):
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

    def _on_backward(self, ended: Ended) -> None:
        reached, self._reached = self._reached, {}
        for module, name, source in reached.values():
            weights = [
                p
                for p in module.parameters(recurse=False)
                if p.requires_grad and p.ndim >= 2 and p.dtype == torch.float32
            ]
            if weights and all(weight.grad is None for weight in weights):
                self._recorder.emit_once(
                    ("lost", name, source), partial(GradientLost, source=source, module=name)
                )


def _unwrapped(function: Any) -> Any:
    """The function below ``custom_fwd``, or None where there is no Python code."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function if hasattr(function, "__code__") else None
