"""The optimizer's part of a step, as CUDA would run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from tilefit.capture.autocast import AutocastState
from tilefit.capture.layouts import touched_bytes
from tilefit.capture.recorder import Recorder
from tilefit.capture.trees import own_part
from tilefit.ops import OPTIMIZER, Streaming
from tilefit.ops.streaming import multi_tensor_launches

#: Makes an optimizer of parameters.
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
#: What ``--optimizer`` can name.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def made_optimizer(
    make: str | MakeOptimizer, parameters: list[nn.Parameter], *, fused: bool, **settings: Any
) -> torch.optim.Optimizer:
    """An optimizer, of a name in ``OPTIMIZERS`` or of what makes one, with settings for all its groups."""
    optimizer = (OPTIMIZERS[make] if isinstance(make, str) else make)(parameters)
    for group in optimizer.param_groups:
        group.update(fused=fused or None, **settings)
    return optimizer


def state_of(optimizer: torch.optim.Optimizer, *, on_host: bool = False) -> list[torch.Tensor]:
    """The tensors of the optimizer's state on the device, or those on the host, which count steps: what is a
    single number for parameters that are none."""
    states = [(parameter.dim(), state) for parameter, state in optimizer.state.items()]
    values = [
        (dim, name, t) for dim, state in states for name, t in state.items() if isinstance(t, torch.Tensor)
    ]
    counters = {"step", *(name for dim, name, t in values if dim and not t.dim())}
    return [t for _, name, t in values if (not t.dim() and name in counters) == on_host]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on the device."""
    return sum(own_part(tensor).nbytes for tensor in state_of(optimizer))


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The parameters of each group that have a gradient, each with it."""
    groups = ([(p, p.grad) for p in group["params"]] for group in optimizer.param_groups)
    return [[(p, grad) for p, grad in group if grad is not None] for group in groups]


def _fused_form(optimizer: torch.optim.Optimizer) -> Streaming:
    """One pass: read parameter, gradient and state, write parameter and state."""
    groups = _with_gradients(optimizer)
    pairs = list(chain(*groups))
    parameters = sum(touched_bytes(p) for p, _ in pairs)
    gradients = sum(touched_bytes(g) for _, g in pairs)
    state = state_bytes(optimizer)
    return Streaming(
        role="optimizer",
        elements=sum(p.numel() for p, _ in pairs),
        read_bytes=parameters + gradients + state,
        write_bytes=parameters + state,
        flop_per_element=12,
        kernels=sum(multi_tensor_launches(p.numel() for p, _ in group) for group in groups),
    )


def _unfused(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer of PyTorch's that has a fused form and was not asked for it; else empty."""
    groups = optimizer.param_groups
    could = (
        type(optimizer).__module__.startswith("torch.optim.")
        and _fuses_on_cuda(type(optimizer))
        and all("fused" in group and not (group["fused"] or group.get("differentiable")) for group in groups)
        and not _has_sparse_gradients(optimizer)
    )
    return type(optimizer).__name__.lower() if could else ""


def _fuses_on_cuda(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class of PyTorch's that can be fused can be so on CUDA: before 2.13 Adagrad could not, as its
    code says."""
    return "cuda_unsupported=True" not in inspect.getsource(kind)


def _has_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(gradient.is_sparse for _, gradient in chain(*_with_gradients(optimizer)))


def _require_fusible(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what CUDA refuses of a fused step, since here another stands in for it.

    Raises:
        RuntimeError: as PyTorch raises it.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return  # whose fused step is its own matter
    if not _fuses_on_cuda(kind):
        raise RuntimeError(f"`fused=True` of {kind.__name__} is not supported on cuda by this PyTorch")
    if _has_sparse_gradients(optimizer):
        raise RuntimeError(f"fused {kind.__name__} does not support sparse gradients")


class OptimizerSteps:
    """Runs optimizers with the multi-tensor kernels CUDA would use, and remembers their state's size.

    ``before`` and ``after`` are PyTorch's global hooks of every optimizer's step.
    """

    def __init__(self, recorder: Recorder, autocast: AutocastState) -> None:
        self.recorder = recorder
        self.autocast = autocast
        self.optimizer_bytes = 0
        self.name = ""
        self.fused = False
        self.known: list[torch.optim.Optimizer] = []
        self._unscaled: list[torch.optim.Optimizer] = []
        self._stepping = ExitStack()

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Put what follows in the optimizer's phase, as CUDA would run it."""
        _, closure = (*args, kwargs.get("closure"), None)[:2]
        if closure is not None:
            # What it computes is a forward and a backward pass, not the optimizer's work.
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (optimizer, lambda: loss), {}
        self.name = type(optimizer).__name__.lower()
        wraps = _wraps(optimizer)
        self.fused = not wraps and any(group.get("fused") for group in optimizer.param_groups)
        if self.fused:
            _require_fusible(optimizer)
        enter = self._stepping.enter_context
        self._stepping.callback(_restore, [(g, dict(g)) for g in optimizer.param_groups])
        for group in optimizer.param_groups:
            if "foreach" in group and not wraps:
                # Without a word from the user CUDA takes the multi-tensor path; ``foreach=False`` is a word.
                # What can be captured takes a tensor as its learning rate there only if it is captured.
                one_by_one = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable", True)
                group.update(fused=None, foreach=group["foreach"] is not False and not one_by_one)
        enter(self.recorder.phase(OPTIMIZER))
        enter(self._default_device())
        enter(torch.no_grad())
        if not any(known is optimizer for known in self.known):
            self.known.append(optimizer)
            self._make_state(optimizer, args)
        if not self.recorder.muted and (name := _unfused(optimizer)):
            enter(self.recorder.sites.falling_back(_fused_form(optimizer), name))
        if self.fused:
            enter(self.recorder.silent())
            enter(self.recorder.in_place())
            if hasattr(optimizer, "found_inf"):
                # A scaler leaves the division to the fused step, which here stands aside for another.
                vars(optimizer).update(grad_scale=None, found_inf=None)
        return args, kwargs

    def _default_device(self) -> AbstractContextManager[object]:
        """Where a step makes what it says no device of: that of the model is none here."""
        return torch.device("cpu")

    def _make_state(self, optimizer: torch.optim.Optimizer, args: Any) -> None:
        """Create the state, as a run's first step does, and count it as there from the start."""
        if not optimizer.state:
            step = type(optimizer).step
            with self.recorder.silent():
                getattr(step, "__wrapped__", step)(*args)
        self.recorder.keep_from_start(state_of(optimizer))
        self.recorder.keep_on_host(state_of(optimizer, on_host=True))
        self.optimizer_bytes += state_bytes(optimizer)

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End what :meth:`before` began."""
        self._stepping.close()
        if self.fused and not _wraps(optimizer):
            with self.recorder.phase(OPTIMIZER):
                self.recorder.record(_fused_form(optimizer), f"fused_{self.name}", (), ())

    def close(self) -> None:
        """End a step that raised."""
        self._stepping.close()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what ``GradScaler`` does to the gradients before a step: divide and look for infinities."""
        gradients = [gradient for _, gradient in chain(*_with_gradients(optimizer))]
        if not gradients:
            return
        total = sum(map(touched_bytes, gradients))
        sizes = [g.numel() for g in gradients]
        op = Streaming("optimizer", sum(sizes), total, total, kernels=multi_tensor_launches(sizes, 1))
        with self.recorder.phase(OPTIMIZER):
            self.recorder.record(op, "aten._amp_foreach_non_finite_check_and_unscale_", (), ())

    def in_phase(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its work counted as the optimizer's."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.phase(OPTIMIZER):
                return function(*args, **kwargs)

        return counted

    def scaling(self, scaler: GradScaler) -> bool:
        """Whether a scaler works. One made where there is no CUDA is off; fp16 tells that it is meant."""
        return scaler.is_enabled() or self.autocast.seen == torch.float16

    def unscale_once(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """:meth:`unscale`, unless the code has done so itself since the last step."""
        if self.scaling(scaler) and not any(done is optimizer for done in self._unscaled):
            self.unscale(optimizer)
            self._unscaled.append(optimizer)

    def scaled_step(
        self, scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """A step through a scaler, taken to find no infinity."""
        self.unscale_once(scaler, optimizer)
        self._unscaled.clear()
        return optimizer.step(*args, **kwargs)


@contextmanager
def scaled(steps: OptimizerSteps) -> Iterator[None]:
    """Within the block every GradScaler is recorded as CUDA would run it, and finds no infinity."""

    def scale(self: GradScaler, outputs: Any) -> Any:
        return tree_map(lambda output: output * 1.0, outputs) if steps.scaling(self) else outputs

    with patch.multiple(
        GradScaler,
        scale=scale,
        unscale_=lambda self, optimizer: steps.unscale_once(self, optimizer),
        step=lambda self, optimizer, *args, **kwargs: steps.scaled_step(self, optimizer, *args, **kwargs),
        update=lambda self, new_scale=None: None,
    ):
        yield


@contextmanager
def intercepted(steps: OptimizerSteps) -> Iterator[None]:
    """Within the block every optimizer's step is recorded as CUDA would run it."""
    # The decorator of these two imports the whole compiler, which takes longer than a capture.
    undecorated = {
        name: getattr(method, "__wrapped__", method)
        for name in ("add_param_group", "zero_grad")
        for method in [torch.optim.Optimizer.__dict__[name]]
    }
    with (
        closing(steps),
        register_optimizer_step_pre_hook(steps.before),
        register_optimizer_step_post_hook(steps.after),
        patch.multiple(torch.optim.Optimizer, **undecorated),
        # Clipping takes the multi-tensor path on CUDA; on meta it would take one kernel for each tensor.
        patch.multiple(
            clip_grad,
            _has_foreach_support=lambda tensors, device: True,
            _device_has_foreach_support=lambda device: True,
            _get_total_norm=steps.in_phase(clip_grad._get_total_norm),
            _clip_grads_with_norm_=steps.in_phase(clip_grad._clip_grads_with_norm_),
        ),
    ):
        yield


def _wraps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether another optimizer makes its steps, as of ``ZeroRedundancyOptimizer``, by the settings of its
    groups."""
    return any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values())


def _restore(groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for group, kept in groups:
        group.update({name: kept[name] for name in ("fused", "foreach") if name in kept})
