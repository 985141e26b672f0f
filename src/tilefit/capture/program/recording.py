"""What a program runs and calls, as the modes of a capture see it on tensors that say they are CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from types import FunctionType
from typing import Any

import torch

from tilefit.capture.fused import REPLACEMENTS
from tilefit.capture.program.ring import LENGTH, ring, ring_attention
from tilefit.capture.recorder import Recorder
from tilefit.capture.semantic import SemanticMode
from tilefit.capture.trees import own_part, untransformed
from tilefit.emulation.tensor import CudaTensor
from tilefit.emulation.values import leaves, mapped
from tilefit.errors import CaptureError
from tilefit.ops import FORWARD, StepOp


class ProgramRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records what runs on the ``meta`` tensors within the emulated GPU's."""

    #: The most that was alive since the program asked to look for that, and ever.
    most_bytes = ever_bytes = 0

    def memory_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Where a tensor lies on ``meta``; of one that is spread over several processes this one's part."""
        tensor = tensor if isinstance(tensor, CudaTensor) else own_part(untransformed(tensor))
        return tensor.untyped_storage()

    def identify(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory."""
        number = super().identify(tensor)
        if self.live_bytes > self.most_bytes:
            self.most_bytes = self.live_bytes
            self.ever_bytes = max(self.ever_bytes, self.live_bytes)
        return number

    @property
    def alive(self) -> set[int]:
        """Numbers of the memory that is there."""
        return set(self._ids.values())

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on ``meta`` tensors, recorded unless muted."""
        return self._dispatched(func, args, kwargs)

    @contextmanager
    def recording(self, recorded: Recorded) -> Iterator[None]:
        """Within the block what runs is recorded elsewhere."""
        kept, since = (self.ops, self.muted, self._saved), len(self._allocations)
        self.ops, self.muted, self._saved = [], False, set()
        yield
        gone = self._gone_since(since)
        recorded.ops = [replace(entry, replayed=True) for entry in self.ops]
        recorded.allocations = [each for each in self._allocations[since:] if each[0] in gone]
        recorded.saved = self._saved & gone
        self.ops, self.muted, self._saved = kept

    def replayed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, of which each call is a replay."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            since = len(self.ops)
            out = function(*args, **kwargs)
            self.ops[since:] = [replace(entry, replayed=True) for entry in self.ops[since:]]
            return out

        return call

    def mark_replayed_backward(self) -> None:
        """What belongs to the forward operations that are replayed is replayed as well."""
        sites = {entry.site for entry in self.ops if entry.replayed}
        self.ops[:] = [
            replace(entry, replayed=True) if entry.phase != FORWARD and entry.site in sites else entry
            for entry in self.ops
        ]

    def replay(self, recorded: Recorded) -> None:
        """Take what was recorded for what runs now, in the memory that it had."""
        for number, size, index in recorded.allocations:
            self._allocations.append((number, size, len(self.ops) + index))
        self._saved |= recorded.saved
        self.ops += recorded.ops


class Recorded:
    """Operations that a CUDA graph runs, the memory that comes and goes with them, as numbers, bytes and the
    operation then, and which of it a backward pass reads."""

    ops: Sequence[StepOp] = ()
    allocations: Sequence[tuple[int, int, int]] = ()
    saved: Set[int] = frozenset()

    @property
    def saved_bytes(self) -> int:
        """What a backward pass reads."""
        return sum(size for number, size, _ in self.allocations if size > 0 and number in self.saved)


def _number(leaf: Any) -> Any:
    """What a list of numbers is made of where one is the GPU's: it is read."""
    return leaf.tolist() if isinstance(leaf, CudaTensor) else leaf


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
        if name in ("tensor", "as_tensor") and args and isinstance(args[0], list | tuple):
            args = (mapped(args[0], _number), *args[1:])
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
