"""What a program runs and calls, as the modes of a capture see it on tensors that say they are CUDA's."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from tilefit.capture.fused import REPLACEMENTS
from tilefit.capture.program.ring import LENGTH, ring, ring_attention
from tilefit.capture.recorder import Recorder
from tilefit.capture.semantic import SemanticMode
from tilefit.capture.trees import own_part
from tilefit.emulation.tensor import CudaTensor
from tilefit.emulation.values import leaves
from tilefit.errors import CaptureError


class ProgramRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records what runs on the ``meta`` tensors within the emulated GPU's."""

    #: The most that was alive since the program asked to look for that, and ever.
    most_bytes = ever_bytes = 0

    def memory_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Where a tensor lies on ``meta``; of one that is spread over several processes this one's part."""
        tensor = tensor if isinstance(tensor, CudaTensor) else own_part(tensor)
        return tensor.untyped_storage()

    def identify(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory."""
        number = super().identify(tensor)
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        self.ever_bytes = max(self.ever_bytes, self.live_bytes)
        return number

    @property
    def alive(self) -> set[int]:
        """Numbers of the memory that is there."""
        return set(self._ids.values())

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on ``meta`` tensors, recorded unless muted."""
        return self._dispatched(func, args, kwargs)


class ProgramCalls(SemanticMode):
    """Sees the program's calls, and replaces those that CUDA runs as one kernel.

    The device needs no pretending here, and autocast is PyTorch's own.
    """

    #: The last call: what a read is told as.
    asking = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if isinstance(func, FunctionType):
            return self._call_entered(func, args, kwargs)
        if name == "scaled_dot_product_attention" and hasattr(args[0], "placements"):
            return self._on_own_heads(func, args, kwargs)
        if name == "scaled_dot_product_attention" and args[0].is_nested:
            raise CaptureError(
                "attention over jagged tensors (torch.nested) is not known of the emulated GPU",
                hint="Pad them, with a mask, or run the program on a GPU: tilefit profile.",
            )
        replacement = REPLACEMENTS.get(name)
        if replacement is not None and any(isinstance(leaf, CudaTensor) for leaf in leaves(args)):
            if self.autocast.enabled:
                args, kwargs = self.autocast.cast_arguments(name, args, kwargs)
            with self:
                result = replacement(self.fused, *args, **kwargs)
            if result is not NotImplemented:
                return result
        self.asking = name
        return func(*args, **kwargs)

    def _is_ring(self, query: Any, args: Any, kwargs: Any) -> bool:
        """Whether ``context_parallel`` makes a ring of it: tokens are spread, and nothing else asked for."""
        spread = len(query.placements) == 1 and query.placements[0].is_shard(LENGTH)
        mask, dropout = (*args[3:5], None, None)[:2]
        plain = mask is None and not dropout and not {*kwargs} - {"is_causal", "scale"}
        return spread and plain and ring() is not None

    def _on_own_heads(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention of tensors that are spread over processes by samples, heads or tokens: of this one's.

        Raises:
            CaptureError: they are spread otherwise.
        """
        query = args[0]
        own = [each.to_local() if hasattr(each, "placements") else each for each in args]
        if self._is_ring(query, args, kwargs):
            with self:
                causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
                out = ring_attention(self.fused, query.device_mesh.get_group(), tuple(own[:3]), causal)
            return type(query).from_local(out, query.device_mesh, query.placements, run_check=False)
        if any(each.is_partial() or getattr(each, "dim", 0) > 1 for each in query.placements):
            raise CaptureError(
                f"attention over tensors placed as {query.placements} is not known of the emulated GPU",
                hint="Run the program on a GPU: tilefit profile.",
            )
        with self:
            out = func(*own, **kwargs)
        return type(query).from_local(out, query.device_mesh, query.placements, run_check=False)
