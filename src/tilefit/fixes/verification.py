"""Is a changed model still the same model? Both are run, and everything that should be equal is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_map

from tilefit.capture.forward import call, loss_of_output
from tilefit.fixes.edits import Edits
from tilefit.fixes.run import Run

#: Largest relative error (norm of the difference over norm) that counts as rounding, by element type. The
#: coarse ones are what reordering the sums of a deep network does; a missing column shows in any of them.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: Tensors whose norm is below this share of all they are compared with (gradients that are zero but for
#: rounding) are compared at this scale.
_NEGLIGIBLE = 1e-3
#: Gradients in fp16 are computed of the loss times this, as in training, and divided by it: as they are, most
#: would be below the smallest numbers that fp16 holds in full precision.
_LOSS_SCALE = 2.0**10
_SEED = 0
_LEARNING_RATE = 1e-3
#: Adam's epsilon: with the usual 1e-8, gradients that are zero but for rounding would move parameters.
_EPSILON = 1e-3
#: Largest difference in fp64 between two ways to write one function.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was compared.

    Attributes:
        what: ``eval: gradient of lm_head.weight``.
        error: Norm of the difference over the norm of the original's; infinite where shapes or values that
            must be equal are not.
    """

    what: str
    error: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The proof, or what speaks against it.

    Attributes:
        scope: What was compared: ``whole model``, or the paths of the changed modules.
        dtype: Element type of the comparison.
        device: Where it ran.
        tolerance: Largest relative error allowed.
        compared: How many tensors (outputs, losses, gradients, parameters after steps) were compared.
        worst: The largest relative error among them.
        differences: Those beyond the tolerance, in the order of the computation; empty for a proof.
    """

    scope: str
    dtype: str
    device: str
    tolerance: float
    compared: int
    worst: float
    differences: tuple[Difference, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Nothing differs, and something was compared."""
        return self.compared > 0 and not self.differences

    def __str__(self) -> str:
        if not self.compared:
            return f"{self.scope}: nothing could be compared"
        if self.ok:
            return (
                f"{self.scope}: {self.compared} tensors agree in {self.dtype} on {self.device}, largest "
                f"relative error {self.worst:.1e} (allowed {self.tolerance:.0e})"
            )
        first = self.differences[0]
        return (
            f"{self.scope}: {len(self.differences)} of {self.compared} tensors differ in {self.dtype}, first "
            f"{first.what} (relative error {first.error:.1e}, allowed {self.tolerance:.0e})"
        )


def verify(
    original: nn.Module,
    fixed: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    amp: str = "",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    train: bool = True,
    steps: int = 3,
    same_random_numbers: bool = True,
    scope: str = "whole model",
) -> Verification:
    """Compare two models: outputs, loss, gradients, and parameters after optimizer steps.

    In evaluation mode (dropout off) and, with ``train``, in training mode with the same seed: outputs, loss,
    the gradient of every parameter and input; then ``steps`` steps of SGD with momentum and weight decay, and
    of AdamW with clipped gradients: each loss, all parameters and buffers at the end. Both models are copied
    and stay as they are.

    Args:
        original, fixed: Two modules with the same parameters.
        inputs: As for :func:`tilefit.check`, with values; use few and small ones.
        loss: Makes the loss of the output; without it the output's ``loss``, else the distance of
            all outputs to random numbers.
        amp: Autocast element type, empty for none.
        dtype: Element type of parameters and floating-point inputs.
        device: Where to run.
        same_random_numbers: Both draw the same numbers from a seed; otherwise training mode is compared
            without dropout.
    """
    check = _Check(loss, amp, dtype, device, inputs, same_random_numbers)
    errors: list[Difference] = []
    for name, observe in check.observations(train, steps):
        with check.running():
            first, second = observe(original), observe(fixed)
        errors += [Difference(f"{name}: {what}", error) for what, error in _errors(first, second)]
    return _judged(errors, scope, _AMP[amp] if amp else dtype, device)


def verify_in_place(run: Run, change: Callable[[Run, Edits], None]) -> Verification:
    """Compare a model with itself changed, where it is and in its working precision, in evaluation mode.

    Outputs, loss and gradients of parameters and inputs. Nothing is copied but what is compared; afterwards
    the model is as it was.
    """
    parameter = next(run.model.parameters())
    check = _Check(run.loss, run.options.autocast, parameter.dtype, str(parameter.device), run.inputs, True)
    with run.kept():
        run.model.eval()
        first = check.observed(run.model)
        edits = Edits()
        try:
            change(run, edits)
            run.model.zero_grad()
            second = check.observed(run.model)
        finally:
            edits.undo()
    errors = [Difference(f"eval: {what}", error) for what, error in _errors(first, second)]
    return _judged(
        errors, "whole model", _AMP.get(run.options.autocast, parameter.dtype), str(parameter.device)
    )


def _judged(errors: list[Difference], scope: str, dtype: torch.dtype, device: str) -> Verification:
    tolerance = TOLERANCES[dtype]
    return Verification(
        scope=scope,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        tolerance=tolerance,
        compared=len(errors),
        worst=max((e.error for e in errors), default=0.0),
        differences=tuple(error for error in errors if not error.error <= tolerance),
    )


def join(verifications: list[Verification]) -> Verification:
    """Several comparisons of parts as one."""
    first = verifications[0]
    return replace(
        first,
        scope=", ".join(dict.fromkeys(v.scope for v in verifications)),
        compared=sum(v.compared for v in verifications) if all(v.compared for v in verifications) else 0,
        worst=max(v.worst for v in verifications),
        differences=tuple(difference for v in verifications for difference in v.differences),
    )


@contextmanager
def in_double() -> Iterator[None]:
    """Within the block, new tensors are in fp64, and what is cast to another floating-point type is, too."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InDouble():
            yield
    finally:
        torch.set_default_dtype(default)


class _InDouble(TorchFunctionMode):
    """Casts to floating-point types that a model asks for lead to fp64: what is compared is the function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        wider = lambda leaf: torch.float64 if leaf in _FLOATS else leaf  # noqa: E731
        if any(isinstance(leaf, torch.dtype) for leaf in (*args, *(kwargs or {}).values())):
            args, kwargs = tree_map(wider, args), tree_map(wider, kwargs or {})
        return func(*args, **(kwargs or {}))


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
Observed = dict[str, Any]


class _Check:
    def __init__(
        self,
        loss: Callable[[Any], torch.Tensor] | None,
        amp: str,
        dtype: torch.dtype,
        device: str,
        inputs: Any,
        same_random_numbers: bool,
    ) -> None:
        self.loss = loss
        self.amp, self.dtype, self.device = amp, dtype, device
        self.same_random_numbers = same_random_numbers
        self.inputs = tree_map(self._converted, dict(inputs) if isinstance(inputs, Mapping) else inputs)

    def observations(self, train: bool, steps: int) -> Iterator[tuple[str, Callable[[nn.Module], Observed]]]:
        yield "eval", lambda model: self.once(model, training=False)
        if train:
            yield "train", lambda model: self.once(model, training=True)
        if train and steps:
            yield "SGD", lambda model: self.stepped(model, "sgd", steps)
            yield "AdamW", lambda model: self.stepped(model, "adamw", steps)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The user's random numbers stay as they are; in fp64 everything is."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            if self.dtype == torch.float64 and not self.amp:
                stack.enter_context(in_double())
            yield

    def once(self, model: nn.Module, training: bool) -> Observed:
        """Output, loss and gradients of one pass of a copy."""
        return self.observed(self._prepared(model, training))

    def observed(self, model: nn.Module) -> Observed:
        """Output, loss and gradients of one pass."""
        inputs = tree_map(_leaf, self.inputs)
        with self._autocast():
            output = call(model, inputs)
            found: Observed = {f"output{path}": value for path, value in _leaves(output)}
            loss = self._loss(output)
        if loss is None:
            return found
        found["loss"] = loss.detach()
        scale = _LOSS_SCALE if torch.float16 in (self.dtype, _AMP.get(self.amp)) else 1.0
        wide = loss if scale == 1.0 else loss.float() * scale
        wide.backward()  # type: ignore[no-untyped-call]

        def gradient(leaf: torch.Tensor) -> torch.Tensor | None:
            return leaf.grad if scale == 1.0 or leaf.grad is None else leaf.grad.float() / scale

        for name, parameter in model.named_parameters():
            found[f"gradient of {name}"] = gradient(parameter)
        for path, leaf in _leaves(inputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                found[f"gradient of input{path}"] = gradient(leaf)
        return found | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}

    def stepped(self, model: nn.Module, optimizer_name: str, steps: int) -> Observed:
        """Losses of some steps, and parameters and buffers at the end."""
        model = self._prepared(model, training=True)
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            return {}
        optimizer: torch.optim.Optimizer
        if optimizer_name == "sgd":
            optimizer = torch.optim.SGD(trainable, _LEARNING_RATE, momentum=0.9, weight_decay=0.1)
        else:
            optimizer = torch.optim.AdamW(trainable, _LEARNING_RATE, eps=_EPSILON, weight_decay=0.1)
        found: Observed = {}
        for number in range(1, steps + 1):
            with self._autocast():
                loss = self._loss(call(model, tree_map(_fresh, self.inputs)))
            if loss is None:
                return {}
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if optimizer_name == "adamw":
                found[f"gradient norm of step {number}"] = nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            found[f"loss of step {number}"] = loss.detach()
        found |= {f"{name} after {steps} steps": p.detach() for name, p in model.named_parameters()}
        return found | {f"buffer {name} after {steps} steps": b for name, b in model.named_buffers()}

    def _prepared(self, model: nn.Module, training: bool) -> nn.Module:
        model = copy.deepcopy(model).to(self.device, self.dtype).train(training)
        model.zero_grad()
        if training and not self.same_random_numbers:
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.p = 0.0
        torch.manual_seed(_SEED)
        return model

    def _autocast(self) -> torch.autocast:
        kind = torch.device(self.device).type
        return torch.autocast(kind, dtype=_AMP.get(self.amp, torch.bfloat16), enabled=bool(self.amp))

    def _loss(self, output: Any) -> torch.Tensor | None:
        leaves = [
            leaf
            for _, leaf in _leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
        ]
        if not leaves:
            return None
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if self.loss is not None or isinstance(own, torch.Tensor):
            return loss_of_output(output, self.loss)[0]
        # The distance to random numbers: a mean of the output would not notice elements that are exchanged.
        generator = torch.Generator(self.device).manual_seed(_SEED)
        wide = torch.promote_types(self.dtype, torch.float32)
        total = torch.zeros((), device=self.device, dtype=wide)
        for leaf in leaves:
            aim = torch.randn(leaf.shape, generator=generator, device=self.device, dtype=wide)
            total = total + (leaf.to(wide) - aim).square().mean()
        return total

    def _converted(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        target = self.dtype if leaf.is_floating_point() else leaf.dtype
        return leaf.detach().to(self.device, target)


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return _fresh(value)


def _fresh(value: Any) -> Any:
    """An argument that no earlier call has changed (a cache of keys and values)."""
    return value if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of a tree of outputs, with where they are; objects of other kinds are passed by."""
    if isinstance(tree, Mapping):
        tree = dict(tree)
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, torch.Tensor | bool | int | float | str):
            yield "".join(map(str, path)), leaf


def _errors(first: Observed, second: Observed) -> Iterator[tuple[str, float]]:
    """How far each observation of the second is from the first."""
    scale = -1.0
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name), second.get(name)
        if a is None and b is None:
            continue
        if not (_is_float(a) and _is_float(b)):
            yield name, 0.0 if _equal(a, b) else float("inf")
        elif a.shape != b.shape or a.dtype != b.dtype:
            yield name, float("inf")
        else:
            if torch.equal(a, b):
                yield name, 0.0
                continue
            if scale < 0:
                scale = _norm(value for value in first.values() if _is_float(value))
            off = _norm([(a.double() - b.double()).where(a != b, 0.0)])
            yield name, off / max(_norm([a]), _NEGLIGIBLE * scale)


def _is_float(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _norm(tensors: Iterable[Any]) -> float:
    return float(sum(float(t.detach().double().square().sum()) for t in tensors) ** 0.5)
