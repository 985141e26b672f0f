"""Compile the loss over a large vocabulary alone: the logits are not copied in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function_variadic

from tilefit.fixes.changes.behaviour import Behaviour, Edits, behaves
from tilefit.fixes.changes.calls import is_on_gpu
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, Refusal, RefusedError, fix
from tilefit.fixes.changes.run import Run
from tilefit.fixes.kinds.parts import compiled
from tilefit.ops import Gemm
from tilefit.ops.dtypes import HALVES
from tilefit.rules.flow import linear_calls
from tilefit.rules.outside.wide_loss import LARGE_VOCABULARY

#: Losses of Hugging Face models that widen all logits, and do nothing else than a cross-entropy.
_LOSSES = ("ForCausalLMLoss", "ForMaskedLMLoss")

Loss = Callable[..., torch.Tensor]


class CompiledLoss:
    """A loss function that is compiled where it runs on a GPU.

    Args:
        loss: The function: logits and labels to a number.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if logits.is_meta:
            return _StandIn.apply(logits)  # type: ignore[no-any-return, no-untyped-call]
        if not is_on_gpu(logits) or torch.compiler.is_compiling():
            return self.loss(logits, labels, *args, **kwargs)
        return compiled(self.loss)(logits, labels, *args, **kwargs)  # type: ignore[no-any-return]


class _StandIn(Function):
    """On shapes alone: operations that take about as long as the compiled loss.

    It reads the logits once for maximum and sum, and once more to write their gradient. The first kernel
    takes as long as three plain reads, the second as long as a read and a write: 1.37 and 1.61 ms for GPT-2's
    16,384 x 50,257 on an H200 (``benchmarks/results/whole_steps_compiled.json``).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return (logits.amax() + logits.amin() + logits.sum()).float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return logits.neg()


# ---- where the model calls it ------------------------------------------------------------------


def _exchange_loss(change: ChangeSet, run: Run, edits: Edits) -> None:
    edits.set(run.model, "_loss_function", CompiledLoss(require_known_loss(run.model)))


#: The ``loss_function`` of a Hugging Face model, compiled.
FUSED_LOSS = ChangeSet(
    (),
    also=_exchange_loss,
    words="Compile the loss alone (model.loss_function): the logits are not copied in fp32.",
)


@dataclass(frozen=True)
class WithCompiledCrossEntropy(Behaviour):
    """The module, in which a cross-entropy over many classes runs compiled."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with _exchanged():
            return forward(*args, **kwargs)


#: ``F.cross_entropy`` in the model's ``forward``, compiled.
FUSED_CROSS_ENTROPY = ChangeSet(
    (),
    behaviours=(("", WithCompiledCrossEntropy()),),
    words="Compile the model's cross-entropy alone: the logits are not copied in fp32.",
)


#: PyTorch's own, which :func:`_exchanged` puts something in place of.
_plain_cross_entropy = F.cross_entropy


class _Here(local):
    """How many calls of changed models this thread is in."""

    depth = 0


_here = _Here()


@contextmanager
def _exchanged() -> Iterator[None]:
    """Within the block ``F.cross_entropy`` is ours, and in this thread it compiles.

    Where threads end at different times, one may find PyTorch's: then its loss runs as it is written. A
    ``TorchFunctionMode`` would see the same call, but also every other one: on a model of many small
    operations that took a third of the forward pass's host time.
    """
    # Where somebody else has put a function of theirs, that one stays.
    if F.cross_entropy is _plain_cross_entropy:
        F.cross_entropy = _watched_cross_entropy
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        if not _here.depth and F.cross_entropy is _watched_cross_entropy:
            F.cross_entropy = _plain_cross_entropy


@wraps(_plain_cross_entropy)
def _watched_cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if _here.depth and input.dim() > 1 and input.shape[1] >= LARGE_VOCABULARY:
        # What the compiler has traced calls F.cross_entropy by its name again.
        depth, _here.depth = _here.depth, 0
        try:
            return _compiled_cross_entropy(input, target, *args, **kwargs)
        finally:
            _here.depth = depth
    if has_torch_function_variadic(input, target):  # whoever watches is told of the function that he knows
        return handle_torch_function(_plain_cross_entropy, (input, target), input, target, *args, **kwargs)
    return _plain_cross_entropy(input, target, *args, **kwargs)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _plain_cross_entropy(logits, labels, *args, **kwargs)


_compiled_cross_entropy = CompiledLoss(_cross_entropy)


@fix("fuse-loss", "NTC004", compiles_parts=True)
def fuse_loss(context: Context) -> Found:
    """Compiles the loss of a language model, and only that.

    The loss widens the logits, the largest tensor of the model, to fp32, takes a log-softmax of them and goes
    the same way back: each step writes them to memory and some are kept. Compiled, it reads them in half
    precision, computes in fp32 on chip, and writes their gradient in half precision. That is a few seconds
    of compiling, not the minutes of a whole model; nothing else of the model is changed, and on the CPU the
    loss runs as it did. It is found where it is a Hugging Face model's ``loss_function``, or a call of
    ``F.cross_entropy`` (by that name, or by ``nn.CrossEntropyLoss``) in the model's ``forward``; a loss of
    the training loop is not the model's to change.

    The same function: the operations are the same ones, in fp32 as before.

    Refused: a ``loss_function`` that is not one of the library's cross-entropies.
    """
    if not context.step.settings.training or not _has_wide_logits(context):
        return
    model = context.run.model
    if isinstance(getattr(type(model), "loss_function", None), property):
        try:
            if not isinstance(require_known_loss(model), CompiledLoss):
                yield FUSED_LOSS
        except RefusedError as refused:
            yield Refusal(("",), refused.what)
    if not behaves(model, WithCompiledCrossEntropy):
        yield FUSED_CROSS_ENTROPY


def _has_wide_logits(context: Context) -> bool:
    for call in linear_calls(context.step):
        op = context.step.ops[call.forward].op
        if isinstance(op, Gemm) and op.n >= LARGE_VOCABULARY and op.dtype in HALVES:
            return True
    return False


def require_known_loss(model: nn.Module) -> Loss:
    """The loss function of a Hugging Face model.

    Raises:
        RefusedError: it has none that can be exchanged, or one of its own.
    """
    loss: Any = model.loss_function
    known = getattr(loss, "__module__", "").startswith("transformers.loss") and loss.__name__ in _LOSSES
    if not known and not isinstance(loss, CompiledLoss):
        raise RefusedError(
            f"the loss function is {getattr(loss, '__name__', loss)}, not a plain cross-entropy"
        )
    return loss  # type: ignore[no-any-return]
