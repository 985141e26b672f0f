"""Sees the calls a model makes, and makes them as CUDA would.

What a model calls (``F.linear``, ``F.scaled_dot_product_attention``, ``nn.LSTM``) is not always what a CPU
build of PyTorch executes for it. This function mode stands between the two: it applies the simulated
autocast, answers that tensors live on CUDA, and replaces the few calls whose CUDA implementation differs.
Everything then reaches the dispatch mode below, which records it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tilefit.capture.autocast import AutocastState
from tilefit.capture.constants import Constants
from tilefit.capture.fused import REPLACEMENTS, FusedCalls
from tilefit.capture.recorder import Recorder
from tilefit.errors import CaptureError
from tilefit.ops.program import TO_GPU, WAIT

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_HOST = torch.device("cpu")
#: Calls that make a tensor of numbers, on the host; it is copied from there.
_FROM_DATA = frozenset("tensor new_tensor".split())
#: More indices are of pairs of tokens (relative positions, by their distance), and take memory to compute.
_MOST_POSITIONS = 1 << 20
#: What to do where a table of positions ends.
SHORTER_INPUTS = "Take shorter inputs (--seq N), or give the model a longer table of positions."


def _not_overridden(*args: Any) -> bool:
    return False


class SemanticMode(TorchFunctionMode):
    """A function mode that makes calls behave as on CUDA; see the module's text.

    Args:
        recorder: Receives the operations of replaced calls.
        autocast: The simulated autocast.
    """

    def __init__(self, recorder: Recorder, autocast: AutocastState) -> None:
        super().__init__()
        self.recorder = recorder
        self.autocast = autocast
        self.device = torch.device(recorder.device)
        self.constants = Constants()
        #: How often code asked for the value of a tensor.
        self.values_read = 0
        self.fused = FusedCalls(recorder, autocast)
        self._copies: dict[FunctionType, FunctionType] = {}
        self._calling: list[FunctionType] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        if name in _DEVICE_CALLS:
            return _DEVICE_CALLS[name](self, func, args, kwargs)
        if isinstance(func, FunctionType):
            return self._call_entered(func, args, kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._real_device(kwargs["device"])}
        if self.autocast.enabled:
            args, kwargs = self.autocast.cast_arguments(name, args, kwargs)
        if func is torch.embedding and self.device.type == "meta":
            self._check_lookup(*args, **kwargs)
        replacement = REPLACEMENTS.get(name)
        if replacement is not None:
            with self:
                result = replacement(self.fused, *args, **kwargs)
            self.fused.fill(result, func, args, kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self.constants.observe(name, func, args, kwargs, result)
        if name in _FROM_DATA and result.device == self.device != _HOST and result.numel():
            self.recorder.met(TO_GPU, name, bytes=result.nbytes)
        return result

    def _check_lookup(self, weight: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> None:
        """Refuse to look up rows that a table has not, where they are known: positions, not words.

        Args:
            weight, indices, *_, **__: Those of ``torch.embedding``.

        Raises:
            CaptureError: the largest index is beyond the table.
        """
        if indices.numel() > _MOST_POSITIONS:
            return
        with torch._C.DisableTorchFunction(), self.recorder.silent():
            known = self.constants.value(indices)
        largest = int(known.max()) if known is not None and known.numel() else 0
        if largest >= len(weight):
            name = self.recorder.reference(weight).parameter or "an embedding"
            raise CaptureError(
                f"row {largest} of {name} is looked up, and it has rows 0 to {len(weight) - 1}: with data "
                "this is an index error",
                hint=SHORTER_INPUTS,
            )

    def _call_entered(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch that is written in Python so that what it calls is seen too."""
        if self._calling and self._calling[-1] is func:
            return func(*args, **kwargs)  # it asked "am I overridden?" in a way of its own
        self._calling.append(func)
        try:
            with self:
                return self._entered(func)(*args, **kwargs)
        finally:
            self._calling.pop()

    def _entered(self, func: FunctionType) -> FunctionType:
        """A copy of a Python function whose question "is this call overridden?" answers no."""
        copy = self._copies.get(func)
        if copy is None:
            scope = {**func.__globals__, **dict.fromkeys(_CHECKS, _not_overridden)}
            closure = func.__closure__
            if closure and func.__module__ == "torch._jit_internal":
                # ``F.max_pool2d`` and its like choose between two functions, held in their closure.
                closure = tuple(
                    CellType(self._entered(c.cell_contents))
                    if isinstance(c.cell_contents, FunctionType)
                    else c
                    for c in closure
                )
            copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, closure)
            copy.__kwdefaults__ = func.__kwdefaults__
            self._copies[func] = copy
        return copy

    def _attribute(self, func: Any, args: Any) -> Any:
        """A tensor's attribute; the model is told that its tensors are on CUDA, PyTorch itself is not."""
        value = func(*args)
        if func in (_DEVICE_GETTER, _IS_CUDA_GETTER):  # each access makes a new wrapper, equal to the others
            tensor_is_ours = args[0].device == self.device
            if tensor_is_ours and not _called_from_torch():
                return torch.device("cuda", 0) if func == _DEVICE_GETTER else True
        return value

    def _real_device(self, device: Any) -> Any:
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, int):
            return self.device
        return self.device if isinstance(device, torch.device) and device.type == "cuda" else device

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor_is_ours = args[0].device == self.device

        def real(value: Any) -> Any:
            if not isinstance(value, str | torch.device):
                return value
            # Where there is no GPU, code moves its tensors to "cpu"; it means wherever the model is.
            return self.device if tensor_is_ours else self._real_device(value)

        if len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
            args = (args[0], self.device, *args[2:])
        result = func(*tree_map(real, args), **tree_map(real, kwargs))
        self.constants.observe("to", func, args, kwargs, result)
        return result

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].to(self.device)

    def _cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        # The copy to the host is not the step's work; only reading its value needs the data.
        return args[0]

    def _value(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.values_read += 1
        tensor = args[0]
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
            with torch._C.DisableTorchFunction(), self.recorder.silent():
                value = self.constants.value(tensor)
            if value is not None:
                self.recorder.met(WAIT, func.__name__.strip("_"))
                with torch._C.DisableTorchFunction(), self.recorder.silent():
                    return func(value, *args[1:], **kwargs)
            raise CaptureError(f"the code reads a tensor's value ({func.__name__}), which is not known here")
        return func(*args, **kwargs)


_DEVICE_GETTER = torch.Tensor.device.__get__
_IS_CUDA_GETTER = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]

_DEVICE_CALLS: dict[str, Callable[[SemanticMode, Any, Any, Any], Any]] = {
    "to": SemanticMode._to,
    "cuda": SemanticMode._cuda,
    "cpu": SemanticMode._cpu,
    **dict.fromkeys(
        ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"), SemanticMode._value
    ),
}


def _called_from_torch() -> bool:
    """Whether the Python code that made the current call belongs to PyTorch."""
    frame = sys._getframe(3)  # this, _attribute, __torch_function__, the caller
    return frame.f_code.co_filename.startswith(_TORCH)
