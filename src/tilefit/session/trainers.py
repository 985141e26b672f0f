"""The step of a Hugging Face Trainer or of a LightningModule, from what they hold.

Neither is run: they have chosen their device before. Their model trains on the emulated GPU in a copy of this
process, with their optimizer, precision, accumulation, clipping and first batch; where there can be no copy,
it is captured on shapes, and the report's notes say what is not in it. The program around them, as it is, is
what ``tilefit check train.py`` runs.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tilefit.capture import capture
from tilefit.capture.program.forked import Loop, can_fork, capture_forked
from tilefit.errors import CaptureError, UsageError
from tilefit.ops import Step
from tilefit.options import StepOptions

#: What PyTorch says in a copy of a process in which gradients were computed before.
_AFTER_BACKWARD = "autograd's threading in combination with fork"
_PROGRAM = "Check the program that makes it, as it is: tilefit check train.py."
_NO_DATA = "Give a batch: tilefit.check(…, inputs)."


@dataclass
class Training(Loop):
    """What is captured of a trainer.

    Attributes:
        settings: Fields of :class:`~tilefit.options.StepOptions`.
        recomputes: Its activations are to be checkpointed.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    recomputes: bool = False

    def capture(self, given: StepOptions, named: Collection[str], gpu: str) -> Step:
        """Its step.

        Args:
            given: Options of the step; of those that are not ``named`` the trainer's own count.
            named: The options that the user has named.
            gpu: Name of the GPU that it is told that it runs on.

        Raises:
            TilefitError: it fails.
        """
        options = replace(given, **{name: v for name, v in self.settings.items() if name not in named})
        with self._as_it_trains():
            if options.train and not options.on_cpu and options.optimizer != "none" and can_fork():
                try:
                    return capture_forked(self, options, gpu)
                except CaptureError as error:
                    if _AFTER_BACKWARD not in error.what:
                        raise
            return capture(
                self.model,
                self.inputs,
                options=options,
                loss=self.loss,
                name=self.name,
                notes=[*self.notes, *self._missing],
            )

    @property
    def _missing(self) -> Iterator[str]:
        """What a capture on shapes leaves out."""
        if self.accumulates > 1:
            yield (
                f"It is of one micro-batch with an optimizer's step; the trainer makes one in "
                f"{self.accumulates}."
            )
        if self.clips:
            yield "Clipping of the gradients is not in it."

    @contextmanager
    def _as_it_trains(self) -> Iterator[None]:
        """Within the block the model checkpoints its activations, where its trainer would have it so."""
        model: Any = self.model
        changes = self.recomputes and not getattr(model, "is_gradient_checkpointing", True)
        if changes:
            model.gradient_checkpointing_enable()
        try:
            yield
        finally:
            if changes:
                model.gradient_checkpointing_disable()


def training_of(model: Any, inputs: Any = None, datamodule: Any = None) -> Training | None:
    """The training that an object does; None where it is neither a Trainer nor a LightningModule.

    Args:
        model: The object.
        inputs: A batch; None for the first of its own data.
        datamodule: Where a LightningModule's data come from.

    Raises:
        UsageError: there is no batch, or it trains in a way that cannot be seen without running it.
    """
    if _is_a(model, "transformers", "Trainer"):
        found = _of_transformers(model, inputs)
    elif _is_a(model, ("lightning", "pytorch_lightning"), "LightningModule"):
        return _of_lightning(model, inputs, datamodule)
    else:
        found = None
    if datamodule is not None:
        raise UsageError("a datamodule has no effect: the model is no LightningModule", hint="Leave it out.")
    return found


def _is_a(value: Any, package: str | tuple[str, ...], name: str) -> bool:
    """Whether a value is of a library's class, which need not be imported to say so."""
    packages = (package,) if isinstance(package, str) else package
    return any(c.__name__ == name and c.__module__.split(".")[0] in packages for c in type(value).__mro__)


# ---- transformers ------------------------------------------------------------------------------


def _of_transformers(trainer: Any, inputs: Any) -> Training:
    args = trainer.args
    if inputs is None:
        if trainer.train_dataset is None:
            raise UsageError("the Trainer has no train_dataset", hint=_NO_DATA)
        inputs = _first_batch(trainer.get_train_dataloader)
    model = trainer.model
    found = Training(model, inputs, type(model).__name__)
    found.settings = {
        "amp": "bf16" if args.bf16 else "fp16" if args.fp16 else "off",
        "tf32": True if args.tf32 else None,
        "compile": bool(args.torch_compile),
        **_optimizer_of(*trainer.get_optimizer_cls_and_kwargs(args, model)),
    }
    if trainer.optimizer is not None:
        found.settings |= _optimizer_of(type(trainer.optimizer), trainer.optimizer.defaults)
    found.recomputes = bool(args.gradient_checkpointing)
    found.notes.append("The step is that of the Trainer's model, optimizer, precision and first batch.")
    found.accumulates, found.clips = args.gradient_accumulation_steps, args.max_grad_norm or 0.0
    base: Any = next(c for c in type(trainer).__mro__ if c.__module__.startswith("transformers."))
    if type(trainer).compute_loss is not base.compute_loss or trainer.compute_loss_func is not None:
        found.notes.append("The loss is the model's: the Trainer's own compute_loss is not in it.")
    return found


# ---- Lightning ---------------------------------------------------------------------------------


class _TrainingStep(nn.Module):
    """``training_step`` as a forward pass, which returns the loss."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        takes = inspect.signature(self.module.training_step).parameters
        out = self.module.training_step(*(batch, 0)[: len(takes)])
        if out is None:
            raise UsageError("training_step returns no loss", hint=_PROGRAM)
        return out["loss"] if isinstance(out, dict) else out


def _of_lightning(module: Any, inputs: Any, datamodule: Any) -> Training:
    if not module.automatic_optimization:
        raise UsageError("the LightningModule steps its optimizers itself", hint=_PROGRAM)
    if inputs is None:
        inputs = _lightning_batch(module, datamodule)
    found = Training(_TrainingStep(module), (inputs,), type(module).__name__, loss=lambda loss: loss)
    found.settings = _lightning_optimizer(module)
    found.notes.append("The step is that of training_step with the module's optimizer and first batch.")
    trainer = module._trainer
    if trainer is None:
        found.notes.append(
            "No lightning Trainer is attached: the precision is fp32, unless amp says otherwise."
        )
        return found
    found.settings["amp"] = {"16-mixed": "fp16", "bf16-mixed": "bf16"}.get(trainer.precision, "off")
    found.accumulates, found.clips = trainer.accumulate_grad_batches, trainer.gradient_clip_val or 0.0
    return found


def _lightning_batch(module: Any, datamodule: Any) -> Any:
    if datamodule is None:
        hooks: Any = next(c for c in type(module).__mro__ if c.__name__ == "DataHooks")
        if type(module).train_dataloader is hooks.train_dataloader:
            raise UsageError(
                "the LightningModule has no data of its own", hint=f"Give datamodule=…. {_NO_DATA}"
            )
        return _first_batch(module.train_dataloader)
    datamodule.prepare_data()
    datamodule.setup("fit")
    return _first_batch(datamodule.train_dataloader)


def _lightning_optimizer(module: Any) -> dict[str, Any]:
    made = module.configure_optimizers()
    made = made[0] if isinstance(made, tuple) and isinstance(made[0], list | tuple) else made
    several = made if isinstance(made, list | tuple) else [made]
    several = [each["optimizer"] if isinstance(each, dict) else each for each in several]
    if len(several) != 1:
        raise UsageError(f"the LightningModule has {len(several)} optimizers", hint=_PROGRAM)
    (optimizer,) = several
    return {"optimizer": "none"} if optimizer is None else _optimizer_of(type(optimizer), optimizer.defaults)


# ---- both --------------------------------------------------------------------------------------


def _optimizer_of(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Options that make an optimizer of a class with its settings, of the captured copy's parameters."""
    known = inspect.signature(kind).parameters
    kept = {name: v for name, v in settings.items() if name in known and name not in ("fused", "params")}
    return {
        "optimizer": lambda parameters: kind(parameters, **kept),
        "fused_optimizer": bool(settings.get("fused")),
    }


def _first_batch(loader: Callable[[], Any]) -> Any:
    """The first batch of the user's data, of which only shapes and types matter; no seed is moved by it.

    Raises:
        UsageError: there is none.
    """
    kept = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            for batch in loader():
                return dict(batch) if hasattr(batch, "keys") else batch
    finally:
        random.setstate(kept)
    raise UsageError("its data are empty", hint=_NO_DATA)
