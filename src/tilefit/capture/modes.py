"""The modes that a step runs under, and what they learn of it."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tilefit.capture import flex
from tilefit.capture.autocast import AutocastState, simulated
from tilefit.capture.dtypes import DTYPES
from tilefit.capture.failures import ELSEWHERE, ON_CPU, explained
from tilefit.capture.inputs import batch_of, describe_inputs
from tilefit.capture.optimizer import OptimizerSteps, intercepted, scaled
from tilefit.capture.recorder import Recorder
from tilefit.capture.semantic import SemanticMode
from tilefit.capture.sites import SiteTracker, user_line
from tilefit.capture.tf32 import multiplies_in_tf32
from tilefit.capture.trees import own_part, tensors
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import FORWARD, Memory, Parameter, Program, Settings, Step
from tilefit.ops.program import WAIT
from tilefit.ops.scaling import tensors_that_stay
from tilefit.ops.timeline import BUFFERS, GRADIENTS, INPUTS

#: What code that asks for the GPU's compute capability is told: the oldest with bf16 Tensor Cores, on which
#: current libraries take the paths they take on every later one.
CAPABILITY = (8, 0)


class Modes:
    """The modes of one capture and what they have learnt."""

    #: What records, what sees calls, what runs optimizers.
    kinds = Recorder, SemanticMode, OptimizerSteps

    def __init__(
        self,
        device: str,
        tf32: bool | None,
        of_module: bool,
        is_model: Callable[[nn.Module], bool] = lambda module: True,
    ) -> None:
        recorder, calls, steps = self.kinds
        self.device = device
        self.of_module = of_module
        self.sites = SiteTracker(self._adopt, self._keep_saved, is_model, self._keep_gradients)
        tf32_matmul, tf32_conv = multiplies_in_tf32() if tf32 is None else (tf32, tf32)
        self.recorder = recorder(self.sites, device, tf32_matmul=tf32_matmul, tf32_conv=tf32_conv)
        self.autocast = AutocastState()
        self.semantic = calls(self.recorder, self.autocast)
        self.steps = steps(self.recorder, self.autocast)
        self.saved_bytes = 0
        #: Parameters that had no size yet when their model was first seen, by name.
        self.without_size: dict[str, nn.Parameter] = {}
        #: Of an output that the loss does not use.
        self.without_gradient: set[torch.Tensor] = set()
        self._held_bytes = 0  # parameters, buffers, inputs
        self.notes: list[str] = []
        #: Layers that ``torch.compile`` compiles each for itself.
        self.split = False
        self.recompiled = 0

    @property
    def amp_seen(self) -> str:
        """The type that autocast cast to; empty where it was off."""
        dtype = self.autocast.seen
        return DTYPES[dtype] if dtype is not None else ""

    @property
    def channels_last_seen(self) -> bool:
        """Whether all convolutions, if there are any, ran in NHWC."""
        convs = [entry.op for entry in self.recorder.ops if entry.op.kind == "conv"]
        return bool(convs) and all(getattr(op, "channels_last", False) for op in convs)

    @property
    def trains(self) -> bool:
        """Whether more than a forward pass ran."""
        return any(entry.phase != FORWARD for entry in self.recorder.ops)

    def settings(self, **known: Any) -> Settings:
        """How the step ran, as far as was seen; ``known`` are fields that somebody knows better."""
        seen = {
            "training": self.trains,
            "amp": self.amp_seen,
            "tf32": self.recorder.tf32_matmul,
            "optimizer": self.steps.name,
            "fused_optimizer": self.steps.fused,
            "channels_last": self.channels_last_seen,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "split": self.split,
            "recompiled": self.recompiled,
        }
        return Settings(**{**seen, **known})

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, what runs is the step; what it raises is told in the user's words."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_eager())
            stack.enter_context(simulated(self.autocast))
            if self.device == "meta":
                stack.enter_context(flex.on_shapes(self.semantic.fused))
            stack.enter_context(intercepted(self.steps))
            stack.enter_context(scaled(self.steps))
            stack.enter_context(self.sites.following())
            if not self.of_module:
                # A step callable makes its own tensors, and says nothing of a device where there is no GPU.
                stack.enter_context(torch.device(self.device))
            stack.enter_context(
                patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
            )
            # Layers that are dropped at random must be the same ones in every capture.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.default_generator.manual_seed(0)  # and no GPU's, whose numbers go on
            stack.callback(random.setstate, random.getstate())
            random.seed(0)
            stack.enter_context(self.semantic)
            stack.enter_context(self.recorder)
            try:
                yield
            except TilefitError as error:
                if not error.where:
                    error.where = user_line(error)
                    error.hint = error.hint or ON_CPU
                raise
            except Exception as error:
                raise explained(error, on_shapes=self.device == "meta") from error

    def _adopt(self, prefix: str, model: nn.Module) -> None:
        """Name a model's parameters; count them and its buffers as memory."""
        for name, parameter in model.named_parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                self.without_size[prefix + name] = parameter
            else:
                self._held_bytes += self.recorder.name_parameter(parameter, prefix + name)
        buffers = (buffer for buffer in model.buffers() if not is_lazy(buffer))
        self._held_bytes += self.recorder.keep(buffers, BUFFERS)

    def _keep_saved(self) -> None:
        """Count the activations that are there when a backward pass begins."""
        self.recorder.keep_saved()
        self.saved_bytes = max(self.saved_bytes, self.recorder.live_bytes - self._held_bytes)

    def _keep_gradients(self) -> None:
        """Note which memory holds the gradients when a backward pass has ended."""
        parameters = (parameter for _, root in self.sites.roots for parameter in root.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.layout == torch.strided]
        self.recorder.own(gradients, GRADIENTS)

    def hold(self, inputs: Any) -> None:
        """Count the inputs as memory."""
        for tensor in tensors(inputs):
            self.recorder.identify(tensor)
        self.recorder.own(tensors(inputs), INPUTS)
        self._held_bytes = self.recorder.live_bytes

    def returning(self, output: Any) -> Any:
        """What the step returns, which is noted."""
        self.recorder.returned.update(map(self.recorder.number_of, tensors(output)))
        return output

    def note_graph_breaks(self, values_read: int) -> None:
        """Say where the compiler splits the model, and count the layers that it compiles each for itself.

        The code of a layer is compiled once for all layers, unless it depends on the layer's number. It does
        where its attention puts keys and values into a cache, which at first concatenates them with nothing.
        """
        if not values_read:
            return
        filling = {
            entry.site.module.rpartition(".")[0]
            for entry in self.recorder.ops
            if entry.name == "aten.cat" and any(0 in ref.shape for ref in entry.inputs)
        }
        self.split = True
        self.recompiled = len(filling)
        layers = "1 layer that fills" if len(filling) == 1 else f"{len(filling)} layers that fill"
        one_by_one = f", and compiles {layers} a KV cache one by one" if filling else ""
        self.notes.append(
            f"The forward pass reads {values_read} tensor value{'s' * (values_read > 1)}: there "
            f"torch.compile splits the model{one_by_one}. The GPU's time is estimated as that of one part."
        )

    def check_something_ran(self) -> None:
        """Refuse a step whose tensors were somewhere else all along."""
        if not self.recorder.ops:
            raise CaptureError(
                f"the step did nothing on the {self.device} device, where it is watched", hint=ELSEWHERE
            )
        for line in self.recorder.host_products:
            raise CaptureError(
                "a part of the step computes on tensors of another device", where=line, hint=ELSEWHERE
            )

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the models, each by all of its names."""
        for prefix, model in self.sites.roots:
            for path, parameter in model.named_parameters(remove_duplicate=False):
                yield prefix + path, parameter

    def step(self, settings: Settings, name: str, inputs: Any, notes: Sequence[str]) -> Step:
        """The step that ran."""
        names: dict[nn.Parameter, list[str]] = {}
        buffers: set[torch.Tensor] = set()
        for path, parameter in self._parameters():
            names.setdefault(parameter, []).append(path)
        for _, model in self.sites.roots:
            buffers.update(model.buffers())
        parameters = {
            first: Parameter(
                tuple(tensor.shape), DTYPES.get(tensor.dtype, "fp32"), tuple(aliases), tensor.requires_grad
            )
            for tensor, (first, *aliases) in names.items()
        }
        parameter_bytes = sum(own_part(p).nbytes for p in names)
        gradient_bytes = sum(own_part(p).nbytes for p in names if p.requires_grad)
        buffer_bytes = sum(b.numel() * b.element_size() for b in buffers)
        forward = (entry for entry in self.recorder.ops if entry.phase == FORWARD)
        made = {ref.id for entry in forward for ref in entry.outputs}
        stay = tensors_that_stay(self.recorder.ops, parameters)
        # The compiler makes numbers on the GPU that were made on the host.
        meetings = [e for e in self.recorder.meetings if e.kind == WAIT or not settings.compiled]
        memory = Memory(
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes if settings.training else 0,
            optimizer_bytes=self.steps.optimizer_bytes,
            buffer_bytes=buffer_bytes,
            saved_bytes=self.saved_bytes,
            peak_bytes=self.recorder.peak_bytes,
            moments=self.recorder.moments(stay),
            timeline=self.recorder.timeline(stay),
        )
        return Step(
            ops=tuple(self.recorder.ops),
            memory=memory,
            settings=settings,
            inputs=tuple(describe_inputs(inputs)),
            batch=batch_of(inputs, self.recorder.ops),
            parameters=parameters,
            modules=dict(self.sites.classes),
            made=dict(self.sites.made),
            libraries=tuple(self.sites.libraries),
            model=name,
            notes=(*notes, *self.notes, *self.semantic.fused.notes),
            program=Program(events=tuple(meetings)),
            returned=tuple(sorted(made & self.recorder.returned)),
            left_out=tuple(first for tensor, (first, *_) in names.items() if tensor in self.without_gradient),
        )


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled regions run as plain Python: what fusion buys is the cost model's business."""

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compiled(function, **options)
        return model if isinstance(model, nn.Module) else _later(model, options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", compiled))
        if "torch._dynamo" in sys.modules:  # else nothing can have been compiled, and importing it is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _later(function: Any, options: Any) -> Callable[..., Any]:
    """A function that is compiled where it is called outside of any capture. What was compiled within one may
    be kept: by a library that compiles ``flex_attention`` once for all models, by a file that is imported."""
    made: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_captured = torch.compile.__module__ == __name__
        if is_captured or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compile(function, **options))
        return made[0](*args, **kwargs)

    return run
