"""Runs a model's step on shapes alone and returns what it executed."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import CellType, FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from tilefit.capture.autocast import AutocastState, simulated
from tilefit.capture.dtypes import DTYPES
from tilefit.capture.optimizer import (
    OPTIMIZERS,
    MakeOptimizer,
    OptimizerSteps,
    intercepted,
    made_optimizer,
)
from tilefit.capture.recorder import Recorder
from tilefit.capture.semantic import SemanticMode
from tilefit.capture.sites import SiteTracker, user_line
from tilefit.errors import CaptureError, TilefitError, UsageError
from tilefit.ops import Memory, Parameter, Recurrent, Settings, Step, StepOp
from tilefit.ops.scaling import tensors_that_stay

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: What code that asks for the GPU's compute capability is told: the oldest with bf16 Tensor Cores, on which
#: current libraries take the paths they take on every later one.
CAPABILITY = (8, 0)

_ELSEWHERE = (
    "Make the model and its tensors, without naming a device, in the factory that returns the step; "
    "or capture on the CPU: --on-cpu (on_cpu=True)."
)
#: What to do where code depends on values.
ON_CPU = "Capture with real data instead: --on-cpu (on_cpu=True), with a small batch."
#: What to do where the model refuses its inputs.
CHECK_INPUTS = "Check the shapes and element types of the inputs (--input), or the model itself."


def capture(
    model: nn.Module | Callable[..., Any],
    inputs: Any = None,
    *,
    train: bool = True,
    amp: str = "",
    tf32: bool | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    fused_optimizer: bool = False,
    channels_last: bool = False,
    compiled: bool = False,
    on_cpu: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str = "",
    notes: Sequence[str] = (),
) -> Step:
    """Capture one training step (forward, loss, backward, optimizer) or one inference call.

    Nothing is computed and no weight is allocated: the step runs on ``meta`` tensors, on a copy of the
    model, as CUDA would run it. The model passed in is not changed.

    Args:
        model: A module; or a callable that does a whole step itself, whose ``inputs`` are its arguments.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments. Only shapes
            and element types matter (with ``on_cpu``, the values too).
        train: Include loss, backward and optimizer. A step callable does as it does: it is refused what
            would say otherwise of these, of ``amp`` and of ``channels_last``.
        amp: ``"bf16"``, ``"fp16"`` (with the gradient scaler's work) or empty.
        tf32: Let fp32 products use TF32; None means PyTorch's defaults: convolutions yes, matrix products no.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"none"``; or what makes one of a list of parameters.
        fused_optimizer: As with ``fused=True``.
        channels_last: Convert the model and 4-dimensional inputs to NHWC.
        compiled: Say in the settings that fusion is to be modelled (the cost model does it), and tell a model
            that asks whether it is being compiled that it is: some then take other paths.
        on_cpu: Run with real tensors on the CPU, for code that depends on values.
        loss: Makes the loss of the model's output. Without it: the output's ``loss``; else the mean of
            the output, with a note.
        name: What to call the model.
        notes: Added to the step's notes.

    Raises:
        CaptureError: The step needs what shapes cannot give, or the model itself fails; names the line.
        UsageError: An option is not understood, or has no effect.
    """
    if not callable(model):
        raise UsageError(
            f"the model is of type {type(model).__name__}, which cannot be called",
            hint="Give a torch.nn.Module, or a function that runs one step.",
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel, whose communication shapes alone cannot do",
            hint="Give what it wraps, model.module.",
        )
    if amp not in ("", *AMP_DTYPES):
        raise UsageError(f"unknown autocast type {amp!r}", hint="Use bf16 or fp16.")
    if train and isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model was scripted or traced, and its training step cannot be followed",
            hint="Give the model as it was before, or look at inference: --infer (train=False).",
        )
    if isinstance(optimizer, str) and optimizer not in ("none", "", *OPTIMIZERS):
        raise UsageError(
            f"unknown optimizer {optimizer!r}", hint=f"Use one of: {', '.join(OPTIMIZERS)}, none."
        )
    device = "cpu" if on_cpu else "meta"
    is_module = isinstance(model, nn.Module)
    function = "" if is_module else getattr(model, "__name__", type(model).__name__)
    if function:
        _refuse_settings(
            {
                f"--amp {amp}": bool(amp),
                f"--optimizer {optimizer}": optimizer != "adamw",
                "--fused-optimizer": fused_optimizer,
                "--channels-last": channels_last,
            },
            function,
        )
    inputs = on_device(inputs, device)
    is_compiled = isinstance(model, nn.Module) and _is_compiled(model)  # a copy is not
    if isinstance(model, nn.Module):
        model = copied(model, device)
        model.train(train)
        if channels_last:
            model, inputs = _to_channels_last(model, inputs)
    session = _Session(device, tf32, is_module)
    with session.running():
        session.hold(inputs)
        if isinstance(model, nn.Module):
            session.sites.name_modules(model)
            _step(session, model, inputs, train, amp, optimizer, fused_optimizer, compiled, loss)
        else:
            call(model, inputs)
            session.check_something_ran()
    if not compiled and (is_compiled or any(_is_compiled(root) for _, root in session.sites.roots)):
        notes = (
            *notes,
            "The model was compiled, and is looked at as it runs eagerly: add --compile (compile=True).",
        )
    trained = train if is_module else any(op.phase != "forward" for op in session.recorder.ops)
    _refuse_settings({"--infer (train=False)": trained and not train}, function)
    settings = Settings(
        training=trained,
        amp=amp or session.amp_seen,
        tf32=session.recorder.tf32_matmul,
        optimizer=session.steps.name,
        fused_optimizer=session.steps.fused,
        channels_last=channels_last or session.channels_last_seen,
        compiled=compiled,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        split=session.split,
        recompiled=session.recompiled,
    )
    return session.step(
        settings,
        name or function or type(model).__name__,
        inputs,
        notes,
    )


def _is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` made the model or a part of it, or compiled it in place."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())


def _refuse_settings(given: Mapping[str, bool], name: str) -> None:
    """Refuse settings of a model's step for a function, which makes its own.

    Raises:
        UsageError: one was given.
    """
    for setting in (setting for setting, is_given in given.items() if is_given):
        raise UsageError(
            f"{setting} has no effect: {name} is a function that does the whole step itself",
            hint="Leave it out, and say it in the function; or give a factory that returns (model, inputs).",
        )


class _Session:
    """The modes of one capture and what they have learnt."""

    def __init__(self, device: str, tf32: bool | None, of_module: bool) -> None:
        self.device = device
        self.of_module = of_module
        self.sites = SiteTracker(self._adopt, self._keep_saved)
        tf32_matmul = torch.backends.cuda.matmul.allow_tf32 if tf32 is None else tf32
        tf32_conv = torch.backends.cudnn.allow_tf32 if tf32 is None else tf32
        self.recorder = Recorder(self.sites, device, tf32_matmul=tf32_matmul, tf32_conv=tf32_conv)
        self.autocast = AutocastState()
        self.semantic = SemanticMode(self.recorder, self.autocast)
        self.steps = OptimizerSteps(self.recorder, self.autocast)
        self.saved_bytes = 0
        self._held_bytes = 0  # parameters, buffers, inputs
        self.notes: list[str] = []
        #: Layers that ``torch.compile`` compiles each for itself.
        self.split = False
        self.recompiled = 0

    @property
    def amp_seen(self) -> str:
        dtype = self.autocast.seen
        return DTYPES[dtype] if dtype is not None else ""

    @property
    def channels_last_seen(self) -> bool:
        convs = [entry.op for entry in self.recorder.ops if entry.op.kind == "conv"]
        return bool(convs) and all(getattr(op, "channels_last", False) for op in convs)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_eager())
            stack.enter_context(simulated(self.autocast))
            stack.enter_context(intercepted(self.steps))
            stack.enter_context(self.sites.following())
            if not self.of_module:
                # A step callable makes its own tensors, and says nothing of a device where there is no GPU.
                stack.enter_context(torch.device(self.device))
            stack.enter_context(
                patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
            )
            # Layers that are dropped at random must be the same ones in every capture.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(0)
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
                raise self._explained(error) from error

    def _explained(self, error: Exception) -> CaptureError:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        lower = text.lower()
        where = user_line(error)
        if self.device == "meta" and "torchscript interpreter" in lower:
            return CaptureError(
                "the scripted or traced model does not run on shapes alone", where=where, hint=ON_CPU
            )
        if "expected device" in lower or "same device" in lower:
            return CaptureError(
                f"the step mixes tensors of different devices ({text})",
                where=where,
                hint=_ELSEWHERE,
            )
        if text.startswith("quantized::"):
            return CaptureError(
                f"the model is quantised for the CPU ({text.split(': ')[0]}), and no GPU runs that",
                where=where,
                hint="Give the model as it was before.",
            )
        if "couldn't load custom c++ ops" in lower:
            return CaptureError(
                f"the installed torchvision was not built for PyTorch {torch.__version__}: its compiled "
                "operations (nms, roi_align) are missing",
                where=where,
                hint="Install the two from the same place, as pytorch.org says for your machine.",
            )
        if self.device == "meta" and ("meta" in lower or "data-dependent" in lower or "no data" in lower):
            text = text.partition(". ")[0]
            return CaptureError(
                f"the step depends on values, and only shapes are known ({type(error).__name__}: {text})",
                where=where,
                hint=ON_CPU,
            )
        return CaptureError(
            f"the model raised {type(error).__name__}: {text}",
            where=where,
            hint=CHECK_INPUTS,
        )

    def _adopt(self, prefix: str, model: nn.Module) -> None:
        """Name a model's parameters; count them and its buffers as memory."""
        before = self.recorder.live_bytes
        for name, parameter in model.named_parameters():
            self.recorder.name_parameter(parameter, prefix + name)
        self.recorder.keep(model.buffers())
        self._held_bytes += self.recorder.live_bytes - before

    def _keep_saved(self) -> None:
        """Count the activations that are there when a backward pass begins."""
        self.saved_bytes = max(self.saved_bytes, self.recorder.live_bytes - self._held_bytes)

    def hold(self, inputs: Any) -> None:
        """Count the inputs as memory."""
        for leaf in tree_flatten(inputs)[0]:
            if isinstance(leaf, torch.Tensor):
                self.recorder.identify(leaf)
        self._held_bytes = self.recorder.live_bytes

    def loss(self, output: Any, loss_of: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
        loss, note = loss_of_output(output, loss_of)
        self.notes += [note] if note else []
        return loss

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
        each = f", and compiles {layers} a KV cache one by one" if filling else ""
        self.notes.append(
            f"The forward pass reads {values_read} tensor value{'s' * (values_read > 1)}: there "
            f"torch.compile splits the model{each}. The GPU's time is estimated as that of one part."
        )

    def check_something_ran(self) -> None:
        """Refuse a step whose tensors were somewhere else all along."""
        if not self.recorder.ops:
            raise CaptureError(
                f"the step did nothing on the {self.device} device, where it is watched",
                hint=_ELSEWHERE,
            )

    def step(self, settings: Settings, name: str, inputs: Any, notes: Sequence[str]) -> Step:
        names: dict[nn.Parameter, list[str]] = {}
        buffers: set[torch.Tensor] = set()
        for prefix, model in self.sites.roots:
            for path, parameter in model.named_parameters(remove_duplicate=False):
                names.setdefault(parameter, []).append(prefix + path)
            buffers.update(model.buffers())
        parameters = {
            first: Parameter(
                tuple(tensor.shape), DTYPES.get(tensor.dtype, "fp32"), tuple(aliases), tensor.requires_grad
            )
            for tensor, (first, *aliases) in names.items()
        }
        parameter_bytes = sum(p.numel() * p.element_size() for p in names)
        gradient_bytes = sum(p.numel() * p.element_size() for p in names if p.requires_grad)
        buffer_bytes = sum(b.numel() * b.element_size() for b in buffers)
        memory = Memory(
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes if settings.training else 0,
            optimizer_bytes=self.steps.optimizer_bytes,
            buffer_bytes=buffer_bytes,
            saved_bytes=self.saved_bytes,
            peak_bytes=self.recorder.peak_bytes,
            moments=self.recorder.moments(tensors_that_stay(self.recorder.ops, parameters)),
        )
        return Step(
            ops=tuple(self.recorder.ops),
            memory=memory,
            settings=settings,
            inputs=tuple(describe_inputs(inputs)),
            batch=_batch_of(inputs, self.recorder.ops),
            parameters=parameters,
            modules=dict(self.sites.classes),
            model=name,
            notes=(*notes, *self.notes, *self.semantic.fused.notes),
        )


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled regions run as plain Python: what fusion buys is the cost model's business."""

    def compiled(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", compiled))
        if "torch._dynamo" in sys.modules:  # else nothing can have been compiled, and importing it is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _step(
    session: _Session,
    model: nn.Module,
    inputs: Any,
    train: bool,
    amp: str,
    make_optimizer: str | MakeOptimizer,
    fused: bool,
    compiled: bool,
    loss_of: Callable[[Any], torch.Tensor] | None,
) -> None:
    optimizer = None
    trainable = [p for p in model.parameters() if p.requires_grad]
    if train and make_optimizer not in ("none", "") and trainable:
        optimizer = made_optimizer(make_optimizer, trainable)
        for group in optimizer.param_groups:
            group["fused"] = fused or None
    # Not inference mode: in it a dispatch mode sees ``conv2d`` and its like before they are taken apart.
    grad = torch.enable_grad() if train else torch.no_grad()
    autocast = torch.autocast("cuda", dtype=AMP_DTYPES[amp]) if amp else ExitStack()
    # The flag behind torch.compiler.is_compiling(), which libraries import by name.
    compiling = patch.object(torch.compiler, "_is_compiling_flag", True) if compiled else ExitStack()
    with grad:
        with autocast:
            before = session.semantic.values_read
            with compiling:
                output = call(model, inputs)
            session.note_graph_breaks(session.semantic.values_read - before if compiled else 0)
            loss = session.loss(output, loss_of) if train else None
        if loss is None:
            return
        del output
        if amp == "fp16":
            loss = loss * 65536.0  # what GradScaler.scale does
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    if optimizer is not None:
        if amp == "fp16":
            session.steps.unscale(optimizer)
        optimizer.step()


def call(function: Callable[..., Any], inputs: Any) -> Any:
    if inputs is None:
        return function()
    if isinstance(inputs, Mapping):
        return function(**inputs)
    if isinstance(inputs, (tuple, list)):
        return function(*inputs)
    return function(inputs)


def loss_of_output(
    output: Any, loss_of: Callable[[Any], torch.Tensor] | None = None
) -> tuple[torch.Tensor, str]:
    """The loss to differentiate, and a note.

    It is ``loss_of`` of the output; or its ``loss``; or, where it is nothing but numbers, their sum; or its
    mean.

    Raises:
        CaptureError: nothing in the output has a gradient.
    """
    if loss_of is not None:
        return loss_of(output), ""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss, ""
    leaves = [leaf for leaf in tensors(output) if leaf.is_floating_point() and leaf.requires_grad]
    if not leaves:
        raise CaptureError(
            "the model's output has no floating-point tensor with a gradient: there is nothing to train on",
            hint="Use --infer, or give a factory that returns a training-step callable.",
        )
    if all(leaf.dim() == 0 for leaf in leaves):
        return reduce(torch.add, leaves), ""
    means = [leaf.mean() for leaf in leaves]
    loss = torch.stack([m.float() for m in means]).sum() if len(means) > 1 else means[0]
    return loss, "No loss was given: the mean of the model's output stands for it."


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)


class _CopyTo(TorchFunctionMode):
    """Deep copies made under this mode have their tensors on another device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and args[0].device.type != self.device:
            tensor, memo = args
            moved = tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = moved
            return moved
        return func(*args, **(kwargs or {}))


def copied(model: nn.Module, device: str) -> nn.Module:
    """A copy of the model on ``device``; on meta, weights are neither copied nor allocated."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.device.type != device:
            data = _materialised(parameter.detach(), device)
            memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.device.type != device:
            memo[id(buffer)] = _materialised(buffer.detach(), device)
    try:
        with _CopyTo(device):
            made = copy.deepcopy(model, memo)
            for old, new in zip(model.modules(), made.modules(), strict=True):
                if isinstance(old, torch.jit.ScriptModule):
                    continue
                if "forward" in vars(old):  # set on the instance, as by model.forward = torch.compile(…)
                    new.forward = _over_copies(old.forward, memo)
            return made
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied ({type(error).__name__}: {error})",
            hint="Capture works on a copy. Give a factory: file.py:factory.",
        ) from error


def _over_copies(function: Any, memo: dict[int, Any]) -> Any:
    """A function that refers to copies; ``copy.deepcopy`` leaves functions, and what they close over."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    if not isinstance(function, FunctionType):
        return copy.deepcopy(function, memo)

    def copied_cell(cell: CellType) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing was assigned to the variable
            return cell
        if isinstance(value, FunctionType):
            return CellType(_over_copies(value, memo))
        ours = isinstance(value, nn.Module | torch.Tensor | MethodType)
        return CellType(copy.deepcopy(value, memo)) if ours else cell

    closure = tuple(map(copied_cell, function.__closure__ or ()))
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def on_device(inputs: Any, device: str) -> Any:
    """The inputs on ``device``, as leaves of their own."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return _materialised(leaf.detach(), device).requires_grad_(leaf.requires_grad)

    return tree_map(moved, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def _materialised(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on ``device``; one without data, asked for on the CPU, gets small random values."""
    if tensor.device.type == "meta" and device != "meta":
        real = torch.empty_like(tensor, device=device)
        if tensor.is_floating_point():
            return real.normal_(std=0.02)
        return real.zero_()
    return tensor.to(device)


def _to_channels_last(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """The model and the images among its inputs in NHWC.

    Raises:
        UsageError: there is nothing to convert.
    """
    if all(tensor.dim() != 4 for tensor in (*model.parameters(), *model.buffers(), *tensors(inputs))):
        raise UsageError(
            "--channels-last has no effect: no weight and no input has four dimensions", hint="Leave it out."
        )
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4:
            return leaf.detach().to(memory_format=torch.channels_last).requires_grad_(leaf.requires_grad)
        return leaf

    return model, tree_map(convert, inputs)


def describe_inputs(inputs: Any) -> Iterator[str]:
    """``name: dtype[sizes]`` of every tensor among the inputs."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    named: Sequence[tuple[str, Any]] = (
        list(inputs.items())
        if isinstance(inputs, Mapping)
        else [(str(i), v) for i, v in enumerate(inputs or ())]
    )
    for name, value in named:
        if isinstance(value, Mapping):
            yield from describe_inputs({f"{name}.{key}": each for key, each in value.items()})
            continue
        several = isinstance(value, (list, tuple))
        first = next(tensors(value), None) if several else value
        if isinstance(first, torch.Tensor):
            shapes = [t.shape for t in tensors(value) if t.dim() == first.dim()] if several else [first.shape]
            sizes = ",".join(_range(extents) for extents in zip(*shapes, strict=True))
            dtype = str(first.dtype).removeprefix("torch.")
            yield f"{name}: {f'{len(value)} x ' if several else ''}{dtype}[{sizes}]"


def _range(extents: Sequence[int]) -> str:
    least, most = min(extents), max(extents)
    return str(least) if least == most else f"{least}..{most}"


def _batch_of(inputs: Any, ops: Sequence[StepOp]) -> int:
    """Samples: the length of a list of images, or of samples of different lengths; or the first size of the
    first input, or what a recurrent layer that reads time first says."""
    arguments = inputs.values() if isinstance(inputs, Mapping) else inputs
    listed = next(iter(arguments), None) if isinstance(arguments, Iterable) else None
    if isinstance(listed, list) and listed and (all(map(_is_image, listed)) or _is_ragged(listed)):
        return len(listed)
    first = next((t for t in tensors(inputs) if t.dim() > 0), None)
    if first is None:
        return 0
    recurrent = next((entry.op for entry in ops if isinstance(entry.op, Recurrent)), None)
    if recurrent is not None and tuple(first.shape[:2]) == (recurrent.seq_len, recurrent.batch):
        return recurrent.batch
    return int(first.shape[0])


def _is_ragged(values: list[Any]) -> bool:
    return all(isinstance(v, torch.Tensor) and v.dim() for v in values) and len({len(v) for v in values}) > 1


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[0] in (1, 3)
