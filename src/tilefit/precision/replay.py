"""Running a piece of training again, on state that is put back afterwards."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.errors import UsageError
from tilefit.precision.ledger import Running
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules import PrecisionRule, all_rules
from tilefit.precision.rules.numerics import FirstDivergence
from tilefit.precision.rules.scaler import ScalerNotRestored
from tilefit.precision.rules.storage import AccumulationNotAveraged
from tilefit.precision.tensors import tensors_in
from tilefit.report.watched import Table, Watched
from tilefit.rules.registry import pages
from tilefit.version import __version__

#: Steps made before a checkpoint is taken, and after it.
STEPS_BEFORE = 3
STEPS_AFTER = 4


def random_state() -> Callable[[], None]:
    """What puts PyTorch's random number generators back, of the CPU and of every CUDA device in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if in_use else []

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


@contextmanager
def hooked(
    modules: Iterable[nn.Module], left: Callable[..., None], entered: Callable[..., None] | None = None
) -> Iterator[None]:
    """Within the block modules that are entered and left are noticed, with all that they are called with."""
    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_forward_hook(left, with_kwargs=True))
        if entered is not None:
            handles.append(module.register_forward_pre_hook(entered, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model and their names."""
    return {module: name or type(module).__name__ for name, module in model.named_modules()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients there are, by the parameter's name."""
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Within the block gradients, buffers, modes and random numbers of a model may change; afterwards they
    have not.

    Yields:
        A function that puts buffers and random numbers back for another run, and clears the gradients.
    """
    random = random_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]

    def again() -> None:
        random()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, _ in gradients:
            parameter.grad = None

    again()
    try:
        yield again
    finally:
        again()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


def judged(
    title: str, found: Iterable[PrecisionRule], *tables: Table, unchecked: tuple[str, ...] = ()
) -> Watched:
    """The report of a replay."""
    recorder = Recorder(all_rules())
    for event in found:
        recorder.emit(event)
    return Watched(
        title=title,
        setup=(),
        steps=1,
        findings=recorder.alarms,
        tables=tables,
        unchecked=unchecked,
        version=__version__,
        rules=pages((alarm.code for alarm in recorder.alarms), all_rules()),
    )


def check_accumulation(
    model: nn.Module, accumulate: Callable[[], object], joined: Callable[[], Tensor]
) -> Watched:
    """Whether accumulated gradients are those of the joined batch.

    Args:
        model: The model.
        accumulate: Makes all the backward passes of one step, as the training loop does; without a loss
            scale.
        joined: Gives the loss of the same samples as one batch.

    Returns:
        A report with AMP018 where the accumulated gradient is k or 1/k times the joined batch's, for k
        backward passes. Its table holds the projection and the cosine. With batch statistics they differ for
        good reasons.

    Raises:
        UsageError: ``accumulate`` leaves no gradients, or ``joined`` gives none.
    """
    sources: list[str] = []

    def counted(*args: Any, **kw: Any) -> Running:
        sources.append(user_line())
        yield

    with restored(model) as again:
        with Patches().applied((torch.autograd, "_engine_run_backward", counted)):
            accumulate()
        accumulated = {name: gradient.double() for name, gradient in gradients_of(model).items()}
        again()
        joined().backward()  # type: ignore[no-untyped-call]
        whole = {name: gradient.double() for name, gradient in gradients_of(model).items()}
    both = [p for p in whole if p in accumulated]
    if not sources or not both:
        raise UsageError(
            "no gradients to compare", hint="accumulate() must call backward(), and joined() return the loss."
        )
    product = sum(float((accumulated[p] * whole[p]).sum()) for p in both)
    square = sum(float(whole[p].square().sum()) for p in both)
    other = sum(float(accumulated[p].square().sum()) for p in both)
    if not square or not other:
        raise UsageError("the gradients are all zero", hint="Use a batch the model can learn from.")
    projection, cosine = product / square, product / (square * other) ** 0.5
    place = sources[0], type(model).__name__
    event = AccumulationNotAveraged(*place, passes=len(sources), factor=1.0, confirmed=projection)
    table = Table(
        "Accumulated gradient against the joined batch's",
        ("backward passes", "projection", "cosine"),
        ((str(len(sources)), f"{projection:.4g}", f"{cosine:.4f}"),),
    )
    return judged(type(model).__name__, [event], table)


def check_resume(
    build: Callable[[], Any],
    step: Callable[[Any], Tensor],
    save: Callable[[Any], Any],
    load: Callable[[Any, Any], object],
) -> Watched:
    """Whether a resumed run goes on exactly as the run that was saved.

    Args:
        build: Makes everything a run needs (model, optimizer, scaler, …) and returns it as one object.
        step: Makes one training step with such an object and returns the loss.
        save: Gives the checkpoint of such an object.
        load: Puts a checkpoint into a new one.

    Returns:
        A report with AMP020 where the resumed run differs in a bit of a loss.
    """
    random = random_state()
    try:
        first = build()
        for _ in range(STEPS_BEFORE):
            step(first)
        file = io.BytesIO()
        torch.save(copy.deepcopy(save(first)), file)
        at_save = random_state()
        expected = [step(first).detach().clone() for _ in range(STEPS_AFTER)]
        file.seek(0)
        second = build()
        load(second, torch.load(file, weights_only=False))
        at_save()
        got = [step(second).detach().clone() for _ in range(STEPS_AFTER)]
    finally:
        random()
    steps = tuple(zip(range(1, STEPS_AFTER + 1), expected, got, strict=True))
    rows = tuple((str(step), f"{float(before):.9g}", f"{float(after):.9g}") for step, before, after in steps)
    found = [
        ScalerNotRestored(what="resumed", step=step, expected=float(before), got=float(after))
        for step, before, after in steps
        if not torch.equal(before, after)
    ]
    table = Table("Losses after the checkpoint", ("step", "uninterrupted", "resumed"), rows)
    return judged("resume", found[:1], table)


def first_divergence(model: nn.Module, step: Callable[[], Tensor]) -> Watched:
    """Run a step twice from the same state and name the first module that does not give the same bits.

    Weights, buffers, gradients and random numbers are put back before, between and after the runs.

    Args:
        model: The model.
        step: Runs the forward pass, with its own autocast, and returns the loss.

    Returns:
        A report with AMP028 where the runs differ.
    """
    with restored(model) as again:
        first = _trace(model, step)
        again()
        second = _trace(model, step)
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = [
        FirstDivergence(source, name, calls=index, deterministic=deterministic)
        for index, (before, (name, source, digest)) in enumerate(zip(first, second, strict=False))
        if before != (name, source, digest)
    ]
    return judged(type(model).__name__, found[:1])


def _trace(model: nn.Module, step: Callable[[], Tensor]) -> list[tuple[str, str, bytes]]:
    """Of each module call and each gradient, its name, the line that made it, and a hash of its bits."""
    trace: list[tuple[str, str, bytes]] = []
    names = names_of(model)

    def left(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        trace.append((names[module], user_line(), b"".join(map(_digest, tensors_in([output])))))

    with hooked(names, left):
        step().backward()  # type: ignore[no-untyped-call]
    # Gradients come about from the last to the first: so are they compared.
    for name, gradient in reversed(gradients_of(model).items()):
        trace.append((f"the gradient of {name}", "", _digest(gradient)))
    return trace


def _digest(tensor: Tensor) -> bytes:
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=16).digest()
