"""The modes that a program runs under: those of a capture, on tensors that say they are CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.amp import autocast_mode

from tilefit.capture import flex
from tilefit.capture.autocast import AutocastState
from tilefit.capture.modes import Modes
from tilefit.capture.optimizer import OptimizerSteps, intercepted, state_bytes, state_of
from tilefit.capture.program.compiling import Compiling, is_on_gpu
from tilefit.capture.program.distributed import gathered_parameters
from tilefit.capture.program.events import Meetings
from tilefit.capture.program.late import changed
from tilefit.capture.program.recording import ProgramCalls, ProgramRecorder
from tilefit.capture.tf32 import multiplies_in_tf32
from tilefit.capture.trees import own_part
from tilefit.emulation.device import Device
from tilefit.emulation.mail import Mail
from tilefit.emulation.rules import RULES
from tilefit.emulation.torch_cuda import install, threads_see
from tilefit.gpus import Gpu
from tilefit.ops import FORWARD
from tilefit.ops.timeline import OPTIMIZER_STATE


class _Steps(OptimizerSteps):
    """A program's own optimizers, which have made their state when a step is recorded."""

    #: Whether ``optimizer_bytes`` is of what there is now.
    counted = False

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """As of any capture, but a closure is called whenever the optimizer calls it."""
        _, closure = (*args, kwargs.get("closure"), None)[:2]
        muted = self.recorder.muted
        super().before(optimizer, (optimizer,), {})
        if closure is None:
            return args, kwargs

        def within(*more: Any) -> Any:
            heard = patch.object(self.recorder, "muted", muted)
            with heard, self.recorder.phase(""), self.recorder.sites.falling_back(None), torch.enable_grad():
                return closure(*more)

        return (optimizer, within), {}

    def _make_state(self, optimizer: torch.optim.Optimizer, args: Any) -> None:
        """The first step makes it; nothing is recorded before."""

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """As of any capture; what its state takes is to be counted again."""
        super().after(optimizer, args, kwargs)
        self.counted = False

    def _default_device(self) -> AbstractContextManager[object]:
        """The program's own."""
        return nullcontext()


class ProgramModes(Modes):
    """The modes of a program, and what they have learnt.

    Args:
        gpu: What the program is told that it runs on.
        mail: By which other ranks of it answer.
    """

    kinds = ProgramRecorder, ProgramCalls, _Steps
    recorder: ProgramRecorder
    semantic: ProgramCalls
    steps: _Steps

    def __init__(self, gpu: Gpu, mail: Mail | None = None) -> None:
        super().__init__("meta", None, of_module=True, is_model=is_on_gpu)
        self.gpu, self._mail = gpu, mail
        self.recorder.muted = True
        self.meetings = Meetings(self.recorder, self.semantic)
        self.device_mode = Device(self.meetings, RULES)
        self.compiling = Compiling(self.recorder.ops)
        #: Numbers of the memory that was there when the step began.
        self.alive_before: set[int] = set()

    @property
    def unseen_notes(self) -> list[str]:
        """What a part of the step did elsewhere, or otherwise than the rest."""
        lines = ", ".join(self.recorder.host_products)
        host = [f"Products on the CPU are not counted: {lines}."] if lines else []
        return host + self.compiling.notes

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block a program runs on the GPU."""
        install(self.device_mode, self.gpu, self._mail)
        threads_see(self.semantic)
        change = partial(flex.emulate, self.semantic.fused, lambda: self.compiling.fuses_flex)
        unscale = self.steps.in_phase(torch.amp.GradScaler._unscale_grads_)
        with (
            self.compiling.following(),
            changed({flex.MODULE: change}),
            _followed(self.autocast),
            _without_inference_mode(),
            intercepted(self.steps),
            patch.object(torch.amp.GradScaler, "_unscale_grads_", unscale),
            self.sites.following(),
            self.semantic,
            self.device_mode,
        ):
            yield

    def start(self) -> None:
        """The step begins here."""
        self.recorder.tf32_matmul, self.recorder.tf32_conv = multiplies_in_tf32()
        self.autocast.restart()
        self.saved_bytes = 0
        for name, parameter in self.without_size.items():
            self.recorder.name_parameter(parameter, name)
            self._held_bytes += own_part(parameter).nbytes
        for name, whole in gathered_parameters(self.sites.roots):
            self.recorder.name_parameter(whole, name)
        self.recorder.restart()
        self.compiling.restart()
        self.alive_before = self.recorder.alive
        self.meetings.restart()
        self.recorder.muted = False

    def _keep_saved(self) -> None:
        """Activations are what is alive beside the model, its gradients and the optimizer's state."""
        if self.recorder.muted:
            return
        self.recorder.keep_saved()
        parameters = {id(p): p for _, root in self.sites.roots for p in root.parameters()}.values()
        gradients = sum(own_part(p.grad).nbytes for p in parameters if p.grad is not None)
        held = self._held_bytes + self.count_optimizer_state() + gradients
        self.saved_bytes = max(self.saved_bytes, self.recorder.live_bytes - held)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that the step computes with: not the ``meta`` ones of a model that is called with others in
        their place, but those that optimizers train and no model holds, such as an ensemble's, stacked."""
        of_models = [*super()._parameters()]
        yield from ((name, each) for name, each in of_models if own_part(each).device.type != "meta")
        held = {id(each) for _, each in of_models}
        forward = (entry for entry in self.recorder.ops if entry.phase == FORWARD)
        read = {ref.id for entry in forward if entry.op.category != "copy" for ref in entry.inputs}
        groups = (group for optimizer in self.steps.known for group in optimizer.param_groups)
        for number, each in enumerate(each for group in groups for each in group["params"]):
            if id(each) not in held and self.recorder.number_of(each) in read:
                yield f"optimizer.{number}", each

    def count_optimizer_state(self) -> int:
        """Bytes of the state of all optimizers that have stepped; they are noted."""
        if not self.steps.counted:
            for optimizer in self.steps.known:
                self.recorder.own(state_of(optimizer), OPTIMIZER_STATE)
            self.steps.optimizer_bytes = sum(map(state_bytes, self.steps.known))
            self.steps.counted = True
        return self.steps.optimizer_bytes


@contextmanager
def _followed(state: AutocastState) -> Iterator[None]:
    """Within the block, ``state`` knows which of PyTorch's own autocast regions for CUDA are open."""
    region: Any = autocast_mode.autocast
    enter, leave = region.__enter__, region.__exit__

    def entered(self: Any) -> Any:
        out = enter(self)
        if self.device == "cuda":
            state.enter(self._enabled, self.fast_dtype, self._cache_enabled)
        return out

    def left(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            state.leave()
        return leave(self, *error)

    with patch.multiple(region, __enter__=entered, __exit__=left):
        yield


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    """Within the block ``torch.inference_mode`` is ``torch.no_grad``: it forbids what the emulated GPU's
    tensors are made of, and a dispatch mode sees calls in it before they are taken apart."""

    def entered(self: Any) -> None:
        self._kept = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def left(self: Any, *error: Any) -> None:
        torch.set_grad_enabled(self._kept)

    with patch.multiple(torch.inference_mode, __enter__=entered, __exit__=left):
        yield
