"""Running a piece of training again, on state that is put back afterwards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilefit.errors import UsageError
from tilefit.precision.events import Accumulated, Event, ResumeDiffers
from tilefit.precision.lines import user_line
from tilefit.precision.patches import Patches
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules import all_rules
from tilefit.report.watched import Table, Watched
from tilefit.rules.registry import pages
from tilefit.version import __version__

#: Steps made before a checkpoint is taken, and after it.
STEPS_BEFORE = 3
STEPS_AFTER = 4


class Random:
    """The state of PyTorch's random number generators, of the CPU and of every CUDA device in use."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if in_use else []

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Within the block gradients, buffers, modes and random numbers of a model may change; afterwards they
    have not.

    Yields:
        A function that puts buffers and random numbers back for another run, and clears the gradients.
    """
    random = Random()
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]

    def again() -> None:
        random.restore()
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


def judged(title: str, events: list[Event], *tables: Table, unchecked: tuple[str, ...] = ()) -> Watched:
    """The report of a replay."""
    recorder = Recorder(all_rules())
    for event in events:
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

    def counted(*args: Any, **kw: Any) -> Generator[None, Any, None]:
        sources.append(user_line())
        yield

    with restored(model) as again:
        patches = Patches()
        patches.apply((torch.autograd, "_engine_run_backward", counted))
        try:
            accumulate()
        finally:
            patches.undo()
        accumulated = {p: p.grad.detach().double() for p in model.parameters() if p.grad is not None}
        again()
        joined().backward()  # type: ignore[no-untyped-call]
        whole = {p: p.grad.detach().double() for p in model.parameters() if p.grad is not None}
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
    event = Accumulated(
        source=sources[0],
        module=type(model).__name__,
        passes=len(sources),
        factor=1.0,
        confirmed=projection,
    )
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
    random = Random()
    try:
        first = build()
        for _ in range(STEPS_BEFORE):
            step(first)
        file = io.BytesIO()
        torch.save(copy.deepcopy(save(first)), file)
        at_save = Random()
        expected = [step(first).detach().clone() for _ in range(STEPS_AFTER)]
        file.seek(0)
        second = build()
        load(second, torch.load(file, weights_only=False))
        at_save.restore()
        got = [step(second).detach().clone() for _ in range(STEPS_AFTER)]
    finally:
        random.restore()
    rows = tuple(
        (str(index + 1), f"{float(before):.9g}", f"{float(after):.9g}")
        for index, (before, after) in enumerate(zip(expected, got, strict=True))
    )
    events: list[Event] = [
        ResumeDiffers(step=index + 1, expected=float(before), got=float(after))
        for index, (before, after) in enumerate(zip(expected, got, strict=True))
        if not torch.equal(before, after)
    ]
    table = Table("Losses after the checkpoint", ("step", "uninterrupted", "resumed"), rows)
    return judged("resume", events[:1], table)
