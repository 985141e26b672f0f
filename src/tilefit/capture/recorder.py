"""Records every ATen operation of a step as the operation the hardware sees."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilefit.capture.aten import Call, describe, is_channels_last, is_free
from tilefit.capture.dtypes import DTYPES
from tilefit.capture.sites import SiteTracker
from tilefit.ops import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, Gemm, Op, StepOp, TensorRef


class Recorder(TorchDispatchMode):
    """A dispatch mode that turns what PyTorch executes into :class:`~tilefit.ops.StepOp`.

    Args:
        sites: Tells where an operation comes from.
        device: The device whose work counts (``meta``, or ``cpu`` where real data is needed).
        tf32_matmul, tf32_conv: fp32 products run in TF32.
    """

    def __init__(self, sites: SiteTracker, device: str, *, tf32_matmul: bool, tf32_conv: bool) -> None:
        super().__init__()
        self.sites = sites
        self.device = device
        self.tf32_matmul = tf32_matmul
        self.tf32_conv = tf32_conv
        self.ops: list[StepOp] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self.muted = False
        self._phase = ""
        self._ids: dict[int, int] = {}
        self._next_id = 0
        self._parameter_of: dict[int, str] = {}
        # Autograd nodes of products that read a parameter.
        self._with_parameter: set[int] = set()

    # ---- what is alive -----------------------------------------------------------------------

    def identify(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory; new memory is counted until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._ids.get(key)
        if number is None:
            number = self._next_id
            self._next_id += 1
            self._ids[key] = number
            size = storage.nbytes()
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._freed, key, number, size).atexit = False
        return number

    def _freed(self, key: int, number: int, size: int) -> None:
        self.live_bytes -= size
        if self._ids.get(key) == number:
            del self._ids[key]
        self._parameter_of.pop(number, None)

    def name_parameter(self, tensor: torch.Tensor, name: str) -> None:
        """Make operations that read ``tensor`` (or a view, or a cast copy of it) say which parameter it is."""
        self._parameter_of[self.identify(tensor)] = name

    def reference(self, tensor: torch.Tensor) -> TensorRef:
        number = self.identify(tensor)
        return TensorRef(
            number,
            tuple(tensor.shape),
            DTYPES.get(tensor.dtype, "fp32"),
            self._parameter_of.get(number, ""),
        )

    @property
    def current_phase(self) -> str:
        """The phase that :meth:`phase` set; empty where autograd's state decides."""
        return self._phase

    # ---- recording ---------------------------------------------------------------------------

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Within the block, operations belong to ``phase`` whatever autograd is doing."""
        kept, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = kept

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within the block nothing is recorded."""
        kept, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = kept

    def record(
        self,
        op: Op,
        name: str,
        inputs: Iterable[torch.Tensor],
        outputs: Iterable[torch.Tensor],
        phase: str = "",
    ) -> None:
        """Add one operation at the current site; ``phase`` overrides what autograd's state implies."""
        if self.muted:
            return
        node = torch._C._current_autograd_node()
        recomputed = node is not None and torch.is_grad_enabled()
        if node is None or recomputed:
            site = self.sites.forward_site(name)
            implied = FORWARD
        else:
            site, _ = self.sites.backward_site(node)
            implied = BACKWARD_DATA
        entry = StepOp(
            op,
            self._phase or phase or implied,
            site,
            name,
            tuple(self.reference(t) for t in inputs),
            tuple(self.reference(t) for t in outputs),
            recomputed,
        )
        if isinstance(op, Gemm) and implied == FORWARD and entry.parameter:
            self._with_parameter.add(torch.autograd._get_sequence_nr() - 1)  # type: ignore[attr-defined]
        self.ops.append(entry)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Meta kernels written in Python must not be taken for the model's own calls.
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        if self.muted:
            return out
        if is_free(func):
            node = torch._C._current_autograd_node()
            if node is None or torch.is_grad_enabled():
                self.sites.forward_site(str(func))  # its gradient (a slice's, an expand's) costs time
            return out
        call = Call(func, args, kwargs, out)
        tensors = (*call.inputs, *call.outputs)
        if not any(t.device.type == self.device and t.numel() for t in tensors):
            return out  # the host's work, or none
        for op, phase, inputs, outputs in describe(call, self):
            self.record(op, call.name, inputs, outputs, phase)
        if call.packet in ("convolution", "convolution_backward"):
            out = self._in_channels_last(call)
        if call.packet == "_to_copy":
            source = self._parameter_of.get(self.identify(call.inputs[0]), "")
            if source:
                self.name_parameter(call.outputs[0], source)
        return out

    def _in_channels_last(self, call: Call) -> Any:
        """The results of a convolution as cuDNN lays them out: NHWC if an operand is (meta kernels forget)."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        operands = [t for t in call.inputs if t.dim() in formats]
        if not any(is_channels_last(t) for t in operands):
            return call.out

        def convert(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() not in formats:
                return tensor
            return tensor.contiguous(memory_format=formats[tensor.dim()])

        with self.silent(), torch._C.DisableTorchFunction():
            return tuple(map(convert, call.out)) if isinstance(call.out, tuple) else convert(call.out)

    def gradient_phase(self, operands: Iterable[torch.Tensor]) -> str:
        """Whether a product in the backward pass is a data or a weight gradient; empty outside of it.

        Only the data gradient multiplies by a parameter. The gradients of a product of two activations
        (attention written by hand) are both data gradients.
        """
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():
            return ""
        if node._sequence_nr() not in self._with_parameter:
            return BACKWARD_DATA
        reads_parameter = any(self._parameter_of.get(self.identify(t)) for t in operands)
        return BACKWARD_DATA if reads_parameter else BACKWARD_WEIGHT
