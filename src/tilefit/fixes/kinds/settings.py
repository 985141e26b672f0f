"""Fixes that are a setting of the whole run: the compiler, lower precision, a fused optimizer, autotuning."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tilefit.capture.optimizer import MakeOptimizer
from tilefit.capture.tf32 import allow_tf32
from tilefit.cost import estimate_step
from tilefit.cost.fusion import fuse
from tilefit.fixes.changes.behaviour import Behaviour, Edits
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, Refusal, RefusedError, Stage, fix, refuse
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.cuda_graph import copies
from tilefit.ops import Conv
from tilefit.rules.finding import UNSAFE
from tilefit.rules.outside.graphs import WAITS, is_in_parts
from tilefit.rules.outside.unfused import LEFT_OUT

# ---- the compiler --------------------------------------------------------------------------------

DEFAULT, REDUCE_OVERHEAD = "default", "reduce-overhead"


def compilation(mode: str) -> ChangeSet:
    """The change that compiles the whole model in place.

    Args:
        mode: ``torch.compile``'s: ``default``, or ``reduce-overhead`` (CUDA graphs).
    """
    call = "torch.compile(model)" if mode == DEFAULT else f'torch.compile(model, mode="{mode}")'
    words = f"Compile the model: {call}. The first steps wait for the compiler."
    options = (("compile", True), ("cuda_graph", mode == REDUCE_OVERHEAD))
    return ChangeSet((), options=options, also=_compiled, words=words)


def _compiled(change: ChangeSet, run: Run, edits: Edits) -> None:
    if not any(parameter.is_meta for parameter in run.model.parameters()):
        mode = REDUCE_OVERHEAD if run.cuda_graph else DEFAULT
        call = torch.compile(_called(run.model), mode=mode)
        edits.set(run.model, "_compiled_call_impl", _with_copies(call) if run.cuda_graph else call)


def _with_copies(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A call whose outputs and gradients stay what they are: a CUDA graph has them where its next replay
    writes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = set(map(id, tree_leaves((args, kwargs))))
        outputs = compiled(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        # A view was made by PyTorch, of what the compiled function returned.
        wholes = [leaf if leaf._base is None else leaf._base for leaf in made if id(leaf) not in given]
        for node in {whole.grad_fn for whole in wholes}:
            if node is not None:
                node.register_hook(lambda gradients, _: tuple(copies(gradients)))
        return tree_map_only(torch.Tensor, lambda leaf: leaf if id(leaf) in given else leaf.clone(), outputs)

    return call


def _called(model: nn.Module) -> Callable[..., Any]:
    """What is compiled of a model: its call, as in ``model.compile()``.

    That starts in PyTorch's own code, which the compiler leaves to Python, and so are the model's hooks. A
    forward that is PyTorch's own as well would be left with it: of an ``nn.Sequential`` no more would be
    compiled than what others wrote inside. There it starts in a function of ours, as ``torch.compile(model)``
    does; hooks that the model gets after its first call are then left out.
    """
    if not str(getattr(model.forward, "__module__", "")).startswith("torch."):
        return model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call


@fix("compile", "NTC001", "NTC006", stage=Stage.RUN)
def compile_model(context: Context) -> Found:
    """Compiles the model: ``torch.compile`` makes few kernels of its streaming operations.

    Taken up when the other fixes are made, where the step as the compiler would make it is predicted to be
    faster, with the changes that only a compiled model calls for
    (:meth:`~tilefit.fixes.changes.fix.ChangeSet.together`); the others are then priced once more, on top of
    it. Its gain is the fusion of streaming operations and the compiler's own padding of misaligned products;
    convolutions it does not pad. What runs as it was written under the compiler (``fuse-attention``) is
    priced so.

    With ``mode="reduce-overhead"``, for models whose kernels the host cannot launch fast enough, it also
    replays them as CUDA graphs. What a call returns, and gradients, are then copies (memory for twice the
    gradients): the next call would write over them. A model that the compiler splits into parts does not get
    that mode.

    What it costs: the first call for every set of sizes waits for the compiler, seconds to minutes. The model
    is compiled in place, as ``model.compile()`` does, so that names and ``state_dict`` stay. As there, hooks
    that a layer gets after the first call, and functions of PyTorch's that are exchanged, are not noticed.

    Refused: models of whose output the loss leaves something out, as a second head. The parameters that only
    that is made of would get gradients of zeros where they have none, and weight decay would shrink them.
    Who uses less of the output than the loss that the plan was made with meets that too.
    """
    run, step = context.run, context.step
    if run.cuda_graph:
        return
    if not run.options.compile:
        if step.left_out:
            yield Refusal(("",), f"compiled, {LEFT_OUT}")
            return
        yield compilation(DEFAULT)
    fused = estimate_step(fuse(step), context.gpu)
    if not is_in_parts(step) and fused.launch_share > WAITS:
        yield compilation(REDUCE_OVERHEAD)


# ---- the optimizer -------------------------------------------------------------------------------

#: Optimizers with a fused kernel for CUDA in every supported version of PyTorch.
_FUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def fused(optimizer: str) -> ChangeSet:
    """The change that turns on ``fused=True`` of the optimizer with this name (in lower case)."""
    words = f"Run {optimizer} as one fused kernel (fused=True)."
    return ChangeSet((), options=(("fused_optimizer", True),), also=_fused, words=words)


def _fused(change: ChangeSet, run: Run, edits: Edits) -> None:
    own = set(run.model.parameters())
    groups = run.live_optimizer.param_groups if run.live_optimizer is not None else []
    # That of a model of which this is a copy stays as it is.
    if run.live_optimizer is not None and any(p in own for group in groups for p in group["params"]):
        _fuse(run.live_optimizer, edits)


def like(optimizer: torch.optim.Optimizer, model: nn.Module) -> MakeOptimizer:
    """Makes optimizers of the same class, options and groups, without state, for copies of ``model``: of the
    list of a copy's trainable parameters."""
    numbers = {p: number for number, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    groups = [
        (group, [numbers[p] for p in group["params"] if p in numbers]) for group in optimizer.param_groups
    ]

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        other = copy.copy(optimizer)  # whatever arguments its class takes
        other.state = defaultdict(dict)
        other.param_groups = [
            {**group, "params": [parameters[number] for number in chosen]} for group, chosen in groups
        ]
        return other

    return made


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of it runs fused."""
    return all(group.get("fused") for group in optimizer.param_groups)


@fix("fuse-optimizer", "NTC003")
def fuse_optimizer(context: Context) -> Found:
    """Turns on ``fused=True`` of Adam, AdamW and SGD.

    The update rule is the same; one kernel reads and writes parameters, gradients and state once, where the
    default streams them through memory for every operation of the rule. The optimizer that is passed in is
    changed itself, half-trained or not: its state stays, but that the step counts of Adam move to the
    parameters' device, as a fused optimizer keeps them; ``state_dict`` loads into an optimizer without
    ``fused`` and back. ``capturable`` and all other options stay. Gradients are still unscaled by a
    ``GradScaler``, whatever groups the optimizer gets later. The optimizer of the original stays as it is
    where a copy of the model is changed.

    Without an optimizer passed in the plan says to construct it with ``fused=True``.

    Refused: an optimizer of another class, ``differentiable=True``, ``foreach=False`` (someone asked for
    one kernel per tensor), parameters that are not floating-point, sparse gradients.
    """
    settings = context.step.settings
    if settings.training and settings.optimizer in _FUSED and not settings.fused_optimizer:
        yield fused(settings.optimizer)


def _fuse(optimizer: torch.optim.Optimizer, edits: Edits) -> None:
    _require_fusable(optimizer)
    kept = [{name: group[name] for name in ("fused", "foreach")} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=None)
    _place_steps(optimizer)
    edits.undone_by(partial(_unfuse, optimizer, kept))


def _unfuse(optimizer: torch.optim.Optimizer, kept: list[dict[str, Any]]) -> None:
    for group, options in zip(optimizer.param_groups, kept, strict=False):  # it may have got more groups
        group.update(options)
    _place_steps(optimizer)


def _place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Keep the step counts where the groups' options say: with the parameters, or on the host."""
    for group in optimizer.param_groups:
        with_parameters = group["fused"] or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] = state["step"].to(parameter.device if with_parameters else "cpu")


def _require_fusable(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    if kind not in _FUSED.values():
        raise RefusedError(
            f"the optimizer is a {kind.__module__}.{kind.__qualname__}, of which no fused form is known"
        )
    for group in optimizer.param_groups:
        refuse(group.get("differentiable"), "the optimizer is differentiable, which the fused kernel is not")
        if group["foreach"] is False:
            raise RefusedError("the optimizer was told to update one tensor at a time (foreach=False)")
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise RefusedError(f"the optimizer updates a parameter of type {parameter.dtype}")
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RefusedError("the optimizer updates a parameter whose gradient is sparse")


# ---- lower precision -----------------------------------------------------------------------------


def _products(context: Context, *dtypes: str) -> bool:
    """Whether there are products in one of these element types."""
    ops = (entry.op for entry in context.step.ops)
    return any(op.multiplies and op.dtype in dtypes for op in ops)


def _switched(change: ChangeSet, run: Run, edits: Edits) -> None:
    """TF32 for products of fp32 matrices, in the whole program."""
    if any(parameter.is_meta for parameter in run.model.parameters()):
        return  # a trial, which must not touch the program's switches
    edits.undone_by(allow_tf32(True))


_TF32 = ChangeSet(
    (),
    options=(("tf32", True),),
    also=_switched,
    words='Multiply fp32 matrices in TF32: torch.set_float32_matmul_precision("high").',
)


@fix("tf32", "PRC001", level=UNSAFE)
def use_tf32(context: Context) -> Found:
    """Lets products of fp32 matrices run on TF32 Tensor Cores.

    Unsafe: factors are rounded to 10 bits of mantissa (at most 4.9e-4 of their value); storage, range and
    sums stay fp32. Most trainings do not notice, but nobody can prove that. It is a switch of the whole
    program.
    """
    if context.gpu.supports("tf32") and not context.step.settings.amp and _products(context, "fp32"):
        yield _TF32


@dataclass(frozen=True)
class UnderAutocast(Behaviour):
    """The module under bf16 autocast, its results in fp32."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = next(module.parameters())
        with torch.autocast(tensor.device.type, torch.bfloat16):
            output = forward(*args, **kwargs)
        return tree_map(_widened, output)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16 else leaf


AUTOCAST = ChangeSet(
    (),
    behaviours=(("", UnderAutocast()),),
    options=(("amp", "bf16"),),
    words="Run the model under bf16 autocast; its results are cast back to fp32.",
)


@fix("mixed-precision", "PRC002", level=UNSAFE)
def mixed_precision(context: Context) -> Found:
    """Runs the model under bf16 autocast.

    Unsafe: products round their factors to 8 bits of mantissa. bf16 has fp32's range, so that no gradient
    scaler is needed; on GPUs without bf16 Tensor Cores the fix is refused, for fp16 needs one around loss and
    optimizer, which are the training loop's. Parameters and optimizer stay in fp32. The model's ``forward``
    is run under autocast and returns fp32, as its callers expect; a loss outside of it stays as it is.
    """
    if context.step.settings.amp or not _products(context, "fp32", "tf32"):
        return
    if context.gpu.supports("bf16"):
        yield AUTOCAST
    elif context.gpu.supports("fp16"):
        yield Refusal(
            ("",), f"{context.gpu.name} has no bf16 Tensor Cores, and fp16 needs a torch.amp.GradScaler"
        )


# ---- cuDNN's algorithms --------------------------------------------------------------------------


def _autotuned(change: ChangeSet, run: Run, edits: Edits) -> None:
    """``torch.backends.cudnn.benchmark``, in the whole program."""
    kept, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    edits.undone_by(partial(_set_autotuning, kept))


def _set_autotuning(on: bool) -> None:
    torch.backends.cudnn.benchmark = on


@fix("cudnn-autotuning", stage=Stage.TRIED)
def cudnn_autotuning(context: Context) -> Found:
    """Turns on ``torch.backends.cudnn.benchmark``, where that was measured to help.

    For every new size of a convolution cuDNN then runs all its algorithms and keeps the fastest, instead of
    the one its heuristic names. The function is the same one; the first call for a size waits, so that it is
    nothing for inputs whose sizes keep changing. What it saves cannot be predicted: of 66 passes of
    convolutions in bf16 on an H200 one in ten became at least 12 % faster, and the median not at all
    (``benchmarks/results/autotuning_h200.json``). So it is no part of a plan that only predicts.
    """
    convolutions = any(isinstance(entry.op, Conv) for entry in context.step.ops)
    if convolutions and not torch.backends.cudnn.benchmark:
        words = "Let cuDNN time its algorithms for each new size: torch.backends.cudnn.benchmark = True."
        yield ChangeSet((), also=_autotuned, words=words)
