"""``DistributedDataParallel`` on the emulated GPU: what of it takes time there.

The C++ part of PyTorch's reads the memory of tensors, which have none here. This one asks for the same:
gradients go into buckets as they are made, a full bucket is reduced while the backward pass goes on, and what
comes back is copied out at its end (PyTorch, ``torch/csrc/distributed/c10d/reducer.cpp``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

_MIB = 1 << 20
_BUFFERS_BYTES = 250 * _MIB


class Bucket:
    """Gradients that are reduced together, as hooks of ``register_comm_hook`` know them.

    Args:
        index: Which.
        parameters: Whose gradients.
        last: Whether it is the last.
    """

    def __init__(self, index: int, parameters: list[nn.Parameter], *, last: bool) -> None:
        self._index, self._parameters, self._last = index, parameters, last
        first = parameters[0]
        size = sum(p.numel() for p in parameters)
        self._buffer = torch.empty(size, dtype=first.dtype, device=first.device)
        parts: Any = torch.split(self._buffer, [p.numel() for p in parameters])
        self.views = {id(p): v.view(p.shape) for p, v in zip(parameters, parts, strict=True)}
        self.missing = {id(p) for p in parameters}
        self.work: Any = None

    def index(self) -> int:
        """Which bucket it is."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients in one tensor of one dimension."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another tensor in the buffer's place."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Each gradient, as a view of the buffer."""
        return list(self.views.values())

    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients they are."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last to be reduced."""
        return self._last


class Replica(nn.Module):
    """Takes the place of ``DistributedDataParallel``, whose arguments it has.

    Attributes:
        require_backward_grad_sync: The next backward pass sums the gradients.
        spans: The operations with which the last one did, as ranges of their numbers.
        recorded: How many operations there are so far.
        reduces: Is told the tensors of a bucket that is reduced.
    """

    recorded: Callable[[], int] = staticmethod(lambda: 0)
    reduces: Callable[[list[torch.Tensor]], None] = staticmethod(lambda tensors: None)

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.process_group: Any = options.get("process_group") or dist.group.WORLD
        self.broadcast_buffers = broadcast_buffers
        self.static_graph = bool(options.get("static_graph"))
        self.find_unused_parameters = bool(options.get("find_unused_parameters")) and not self.static_graph
        self.gradient_as_bucket_view = bool(options.get("gradient_as_bucket_view"))
        bucket_cap_mb = options.get("bucket_cap_mb")
        self.bucket_bytes_cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * _MIB)
        self._limits = (_MIB if bucket_cap_mb is None else self.bucket_bytes_cap), self.bucket_bytes_cap
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._hook: tuple[Any, Callable[..., Any]] | None = None
        self._own = [
            p
            for name, p in module.named_parameters()
            if p.requires_grad and name not in getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        ]
        # As long as nothing is known of the order in which gradients come, all are reduced at once.
        limits = self._limits if self.find_unused_parameters else (sys.maxsize,)
        self._members = self._assigned(list(reversed(self._own)), *limits)
        self._buckets: list[Bucket] = []
        self._arrived: list[nn.Parameter] = []
        self.spans: list[tuple[int, int]] = []
        self._next = 0
        self._reduces = self._rebuilt = False
        for parameter in self._own:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(self._has_gradient)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's, its buffers as those of the first process."""
        sums = torch.is_grad_enabled() and self.require_backward_grad_sync
        if sums:
            self._prepare()
        else:
            self._reduces = False
        if self.require_forward_param_sync and self.broadcast_buffers:
            self._sync_buffers()
        self.require_forward_param_sync = sums
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[object]:
        """Within the block gradients are accumulated alone."""
        return patch.object(self, "require_backward_grad_sync", False)

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[object]:
        """All processes have as many batches here."""
        return nullcontext()

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Reduce each bucket by ``hook(state, bucket)``, which gives a future."""
        self._hook = state, hook

    @property
    def reducer(self) -> SimpleNamespace:
        """What stages of a pipeline tell that the backward pass to come is the last."""
        return SimpleNamespace(prepare_for_backward=lambda tensors: self._prepare())

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What PyTorch logs of a run; none here."""
        return {}

    def _set_static_graph(self) -> None:
        self.static_graph, self.find_unused_parameters = True, False

    # ---- a pass ----------------------------------------------------------------------------------

    def _assigned(self, parameters: list[nn.Parameter], *limits: int) -> list[list[nn.Parameter]]:
        """Which bucket has which parameters, of one element type each: the first as many bytes as the first
        of ``limits``, and so on."""
        found: list[list[nn.Parameter]] = []
        open_: dict[torch.dtype, list[nn.Parameter]] = {}
        full: Counter[torch.dtype] = Counter()
        for p in parameters:
            own = open_.setdefault(p.dtype, [])
            own.append(p)
            if sum(each.nbytes for each in own) >= limits[min(full[p.dtype], len(limits) - 1)]:
                found.append(open_.pop(p.dtype))
                full[p.dtype] += 1
        return found + list(open_.values())

    def _sync_buffers(self) -> None:
        buffers = list(self.module.buffers())
        if buffers and self.process_group.size() > 1:
            with torch.no_grad():
                module: Any = dist
                module._broadcast_coalesced(self.process_group, buffers, _BUFFERS_BYTES, 0)

    def _prepare(self) -> None:
        """A backward pass is to come that sums.

        Raises:
            RuntimeError: as PyTorch's, where the one before has left gradients out.
        """
        if self._reduces and self._arrived and not self.find_unused_parameters:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one. This "
                "error indicates that your module has parameters that were not used in producing loss. You "
                "can enable unused parameter detection by passing the keyword argument "
                "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`"
            )
        if not self._buckets:
            last = len(self._members) - 1
            self._buckets = [Bucket(i, own, last=i == last) for i, own in enumerate(self._members)]
        for bucket, own in zip(self._buckets, self._members, strict=True):
            bucket.missing = {id(p) for p in own}
        self._reduces, self._next = True, 0
        self._arrived.clear()
        self.spans = []

    def _has_gradient(self, parameter: nn.Parameter) -> None:
        """A gradient is complete: it goes into its bucket."""
        if not self._reduces or parameter.grad is None:
            return
        if not self._arrived:
            Variable._execution_engine.queue_callback(self._finish)
        self._arrived.append(parameter)
        first = self.recorded()
        bucket = next(each for each in self._buckets if id(parameter) in each.views)
        view = bucket.views[id(parameter)]
        with torch.no_grad():
            if self._hook is None:
                torch.mul(parameter.grad, 1 / self.process_group.size(), out=view)
            else:
                view.copy_(parameter.grad)
            if self.gradient_as_bucket_view:
                parameter.grad = view
        bucket.missing.discard(id(parameter))
        self._launch(everything=False)
        self.spans.append((first, self.recorded()))

    def _launch(self, *, everything: bool) -> None:
        """Reduce the buckets that are full, in their order."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.missing and not everything:
                return
            self._next += 1
            self.reduces([bucket.buffer(), *bucket.gradients()])
            with torch.no_grad():
                if self._hook is None:
                    bucket.work = dist.all_reduce(bucket.buffer(), group=self.process_group, async_op=True)
                else:
                    bucket.work = self._hook[1](self._hook[0], bucket)

    def _finish(self) -> None:
        """The backward pass ends: all is waited for, and copied out."""
        unused = any(bucket.missing for bucket in self._buckets)
        if unused and not (self.find_unused_parameters or self.static_graph):
            return  # the next forward pass says so
        first = self.recorded()
        if self.find_unused_parameters:
            used = torch.zeros(len(self._own), dtype=torch.int32).pin_memory()
            there = used.to(self._own[0].device, non_blocking=True)
            dist.all_reduce(there, group=self.process_group, async_op=True)
        self._launch(everything=True)
        with torch.no_grad():
            for bucket in self._buckets:
                self._take(bucket)
        if not self._rebuilt and not self.find_unused_parameters:
            # From the second pass on in the order in which the gradients came.
            self._rebuilt = True
            self._members = self._assigned(self._arrived, *self._limits)
            self._buckets = []
        self.spans.append((first, self.recorded()))
        self._arrived.clear()

    def _take(self, bucket: Bucket) -> None:
        """Wait for a bucket, and copy its gradients out."""
        given = bucket.work.wait()
        if isinstance(given, torch.Tensor) and given is not bucket.buffer():
            parts: Any = torch.split(given, [p.numel() for p in bucket.parameters()])
            for view, part in zip(bucket.gradients(), parts, strict=True):
                view.copy_(part.view(view.shape))
        bucket.work = None
        if not self.gradient_as_bucket_view:
            for parameter in bucket.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(bucket.views[id(parameter)])


# Programs ask for it, and reports say what runs.
Replica.__name__ = "DistributedDataParallel"
