"""Lower precision for products: TF32, and mixed precision in bf16. Both change what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tilefit.fixes.behaviour import Behaviour
from tilefit.fixes.edits import Edits
from tilefit.fixes.fix import ChangeSet, Context, Fix, Refusal
from tilefit.fixes.modules import behave
from tilefit.fixes.run import Run
from tilefit.rules.finding import UNSAFE


def _products(context: Context, *dtypes: str) -> bool:
    """Whether there are products in one of these element types."""
    ops = (entry.op for entry in context.step.ops)
    return any(op.multiplies and op.dtype in dtypes for op in ops)


# ---- TF32 --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tf32Products(ChangeSet):
    """TF32 for products of fp32 matrices, in the whole program."""

    words = 'Multiply fp32 matrices in TF32: torch.set_float32_matmul_precision("high").'

    def make(self, run: Run, edits: Edits) -> None:
        edits.run(run, tf32=True)
        if _on_meta(run.model):  # a trial, which must not touch the program's switches
            return
        precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        edits.undone_by(lambda: _set_tf32(precision, cudnn))
        _set_tf32("high", True)


def _set_tf32(precision: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


class UseTf32(Fix):
    """Lets products of fp32 matrices run on TF32 Tensor Cores.

    Unsafe: factors are rounded to 10 bits of mantissa (at most 4.9e-4 of their value); storage, range and
    sums stay fp32. Most trainings do not notice, but nobody can prove that. It is a switch of the whole
    program.
    """

    name = "tf32"
    rules = ("PRC001",)
    level = UNSAFE

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        if context.gpu.supports("tf32") and not context.step.settings.amp and _products(context, "fp32"):
            yield Tf32Products(())


# ---- mixed precision ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Autocast(ChangeSet):
    """The model's ``forward`` under bf16 autocast."""

    words = "Run the model under bf16 autocast; its results are cast back to fp32."

    def make(self, run: Run, edits: Edits) -> None:
        behave(run, edits, ("",), UnderAutocast())
        edits.run(run, amp="bf16")


class UnderAutocast(Behaviour):
    """The module under bf16 autocast, its results in fp32."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = next(module.parameters())
        with torch.autocast(tensor.device.type, torch.bfloat16):
            output = forward(*args, **kwargs)
        return tree_map(_widened, output)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16 else leaf


class MixedPrecision(Fix):
    """Runs the model under bf16 autocast.

    Unsafe: products round their factors to 8 bits of mantissa. bf16 has fp32's range, so that no gradient
    scaler is needed; on GPUs without bf16 Tensor Cores the fix is refused, for fp16 needs one around loss and
    optimizer, which are the training loop's. Parameters and optimizer stay in fp32. The model's ``forward``
    is run under autocast and returns fp32, as its callers expect; a loss outside of it stays as it is.
    """

    name = "mixed-precision"
    rules = ("PRC002",)
    level = UNSAFE

    def find(self, context: Context) -> Iterable[ChangeSet | Refusal]:
        if context.step.settings.amp or not _products(context, "fp32", "tf32"):
            return
        if context.gpu.supports("bf16"):
            yield Autocast(())
        elif context.gpu.supports("fp16"):
            yield Refusal(
                ("",), f"{context.gpu.name} has no bf16 Tensor Cores, and fp16 needs a torch.amp.GradScaler"
            )
