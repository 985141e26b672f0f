"""Running a piece of training again, on state that is put back afterwards: runs that should agree, and each
layer's error in the precision of training, against fp32."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tilefit.errors import UsageError
from tilefit.precision.ledger import Ledger, Running
from tilefit.precision.lines import user_line
from tilefit.precision.look import Look, Observers, Statistics
from tilefit.precision.patches import Patches, of_all
from tilefit.precision.recorder import Recorder
from tilefit.precision.rules import PrecisionRule, all_rules
from tilefit.precision.rules.numerics import FirstDivergence
from tilefit.precision.rules.numerics import LayerLosesPrecision as _Lost
from tilefit.precision.rules.scaler import ScalerNotRestored
from tilefit.precision.rules.storage import AccumulationNotAveraged
from tilefit.precision.tensors import HALF, tensors_in
from tilefit.report.watched import Table, Watched
from tilefit.units import share

#: Steps made before a checkpoint is taken, and after it.
STEPS_BEFORE = 3
STEPS_AFTER = 4


def random_state() -> Callable[[], None]:
    """What puts PyTorch's random number generators back, of the CPU and of every CUDA device in use."""
    states: list[tuple[Callable[[Any], None], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def restore() -> None:
        for put_back, state in states:
            put_back(state)

    return restore


@contextmanager
def hooked(
    modules: Iterable[nn.Module], left: Callable[..., None], entered: Callable[..., None] | None = None
) -> Iterator[None]:
    """Within the block modules that are entered and left are noticed, with all that they are called with."""
    with ExitStack() as ends:
        for module in modules:
            ends.enter_context(module.register_forward_hook(left, with_kwargs=True))
            if entered is not None:
                ends.enter_context(module.register_forward_pre_hook(entered, with_kwargs=True))
        yield


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
    title: str, found: Iterable[PrecisionRule], *tables: Table, unchecked: Sequence[str] = ()
) -> Watched:
    """The report of a replay."""
    recorder = Recorder(all_rules())
    for event in found:
        recorder.emit(event)
    return recorder.report(title, setup=(), steps=1, tables=tables, unchecked=tuple(unchecked))


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
        accumulated = gradients_of(model)
        again()
        joined().backward()  # type: ignore[no-untyped-call]
        both = [(accumulated[p], g) for p, g in gradients_of(model).items() if p in accumulated]
    if not sources or not both:
        hint = "accumulate() must call backward(), and joined() return the loss."
        raise UsageError("no gradients to compare", hint=hint)
    pairs = ((a.double(), b.double()) for a, b in both)
    sums = [torch.stack([(a * b).sum(), b.square().sum(), a.square().sum()]) for a, b in pairs]
    product, square, other = torch.stack(sums).sum(0).tolist()
    if not square or not other:
        raise UsageError("the gradients are all zero", hint="Use a batch the model can learn from.")
    name, passes, projection = type(model).__name__, len(sources), product / square
    found = AccumulationNotAveraged(sources[0], name, passes=passes, factor=1.0, confirmed=projection)
    heads = ("backward passes", "projection", "cosine")
    row = (str(passes), f"{projection:.4g}", f"{product / (square * other) ** 0.5:.4f}")
    return judged(name, [found], Table("Accumulated gradient against the joined batch's", heads, (row,)))


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
    parted = [(step, float(a), float(b)) for step, a, b in steps if not torch.equal(a, b)]
    found = [ScalerNotRestored(what="resumed", step=step, expected=a, got=b) for step, a, b in parted[:1]]
    table = Table("Losses after the checkpoint", ("step", "uninterrupted", "resumed"), rows)
    return judged("resume", found, table)


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


#: Containers do nothing themselves; what they hold is compared.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: Seed of the perturbation.
_SEED = 20240607
_SMALL = 1e-30


@dataclass(slots=True)
class _Ran:
    """One module's run.

    Attributes:
        args, kwargs: What went in, detached.
        output: Its first floating-point output, detached.
        gradient: The gradient of that output, if it got one.
        source: The line that called it.
        calls: How often it ran; only the first is kept.
    """

    args: Any
    kwargs: Any
    output: Tensor | None = None
    gradient: Tensor | None = None
    source: str = ""
    calls: int = 1


#: A forward and a backward pass: every module's run, and the parameters' gradients.
_Run = tuple[dict[str, _Ran], dict[str, Tensor]]


def compare(model: nn.Module, step: Callable[[], Tensor], *, scale: float = 1.0) -> Watched:
    """Run one batch as training does and once in fp32, and measure every layer's error.

    Two errors are measured, of outputs and of weight gradients, as the root mean square of the difference
    over that of the fp32 value: *end to end* includes what came before, and what comes back from behind;
    *local* is the module's own, in fp32 on the input and the output gradient that it had in training's
    precision. The tolerance is what perturbing input and weights by the element type's epsilon does to the
    fp32 module. Of the gradients of outputs, the end-to-end error is listed. Weights, buffers, gradients and
    random numbers are put back; dropout is off.

    Args:
        model: The model, with fp32 weights.
        step: Runs the forward pass, with its own autocast, and returns the loss.
        scale: The loss scale of the backward pass, a power of two for fp16; divided out again.

    Returns:
        A report with AMP027 for each module that is off by more than four times its tolerance, a table of all
        modules, and a table of operations by element type.

    Raises:
        UsageError: the weights are in half precision, or nothing runs in half precision.
    """
    if any(parameter.dtype in HALF for parameter in model.parameters()):
        hint = "Compare a model with fp32 weights under autocast."
        raise UsageError("the weights are in half precision", where=type(model).__name__, hint=hint)
    names = names_of(model)
    statistics = Statistics()
    with restored(model) as again:
        for module in names:
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        half = _run(model, names, step, scale, statistics)
        again()
        with Patches().applied(*of_all(torch.amp.autocast_mode.autocast, __enter__=_enter_switched_off)):
            wide = _run(model, names, step, 1.0, None)
            again()
            errors, left_out = _errors(names, half, wide)
    if not errors:
        hint = "Enter autocast inside step(), as the training loop does."
        raise UsageError("nothing ran in half precision", hint=hint)
    worst = sorted(errors, key=lambda e: -e.local / max(e.tolerance, _SMALL))
    rows = [(e.module, e.what, share(e.local), share(e.end_to_end), share(e.tolerance)) for e in worst]
    for name, ran in half[0].items():
        exact = wide[0][name].gradient
        if ran.gradient is not None and exact is not None:
            rows.append((name, "output gradient", "", share(_error(ran.gradient, exact)), ""))
    title = "Error against fp32, the largest beyond its tolerance first"
    table = Table(title, ("module", "of its", "local", "end to end", "tolerance"), tuple(rows))
    unchecked = [f"{name}: {why}" for name, why in left_out.items()]
    return judged(type(model).__name__, errors, table, statistics.table(), unchecked=unchecked)


def _run(
    model: nn.Module,
    names: dict[nn.Module, str],
    step: Callable[[], Tensor],
    scale: float,
    statistics: Statistics | None,
) -> _Run:
    modules: dict[str, _Ran] = {}

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        if (known := modules.get(names[module])) is not None:
            known.calls += 1
        else:
            modules[names[module]] = _Ran(_detached(args), _detached(kwargs), source=user_line())

    def left(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ran, tensor = modules[names[module]], _first(output)
        if ran.calls > 1 or tensor is None or ran.output is not None:
            return
        ran.output = tensor.detach()
        if tensor.requires_grad:
            tensor.register_hook(lambda g: setattr(ran, "gradient", g.detach() / scale))  # type: ignore[no-untyped-call]

    look: AbstractContextManager[Any] = nullcontext()
    if statistics is not None and Look.possible():
        recorder = Recorder(())
        look = Look(recorder, Ledger(recorder), Observers(statistics, ()), thorough=False)
    with hooked(names, left, entered):
        with look:
            loss = step()
        (loss * scale).backward()  # type: ignore[no-untyped-call]
    return modules, {name: gradient / scale for name, gradient in gradients_of(model).items()}


def _errors(names: dict[nn.Module, str], half: _Run, wide: _Run) -> tuple[list[_Lost], dict[str, str]]:
    """The errors of what ran in half precision, and what could not be compared."""
    found: list[_Lost] = []
    left_out: dict[str, str] = {}
    for module, name in names.items():
        ran, ref = half[0].get(name), wide[0].get(name)
        if ran is None or ref is None or (output := ran.output) is None or (exact := ref.output) is None:
            continue
        if output.dtype not in HALF or isinstance(module, _CONTAINERS):
            continue
        if ran.calls > 1:
            left_out[name] = f"runs {ran.calls} times in a step; its first run alone is compared"
        pairs = {"output": (output, exact)}
        # A parent's weights are its children's; they are compared there, and those of several runs nowhere.
        for key, _ in module.named_parameters() if ran.calls == 1 and not list(module.children()) else ():
            got, gradient = half[1].get(f"{name}.{key}"), wide[1].get(f"{name}.{key}")
            if got is not None and gradient is not None:
                pairs[key] = got, gradient
        try:
            found += _local(module, name, ran, pairs)
        except (RuntimeError, TypeError, ValueError) as error:
            left_out[name] = f"cannot be run by itself ({type(error).__name__})"
    return found, left_out


def _local(
    module: nn.Module, name: str, ran: _Ran, pairs: dict[str, tuple[Tensor, Tensor]]
) -> Iterator[_Lost]:
    """The errors of a module's output and weight gradients, of each of which both runs' are given."""
    eps = torch.finfo(pairs["output"][0].dtype).eps
    exact, moved = _alone(module, ran, 0.0), _alone(module, ran, eps)
    for key, (got, reference) in pairs.items():
        if key in exact:
            what = "output" if key == "output" else "weight gradient"
            tolerance = _error(moved[key], exact[key]) + eps / 2  # rounding of the result itself
            local, whole = _error(got, exact[key]), _error(got, reference)
            yield _Lost(ran.source, name, what=what, local=local, end_to_end=whole, tolerance=tolerance)


def _alone(module: nn.Module, ran: _Ran, eps: float) -> dict[str, Tensor]:
    """The module in fp32 on the inputs it had, perturbed by ``eps``: output and weight gradients."""
    generator = torch.Generator().manual_seed(_SEED)

    def perturbed(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        wide = value.float()
        noise = torch.rand(wide.shape, generator=generator).to(wide.device) * 2 - 1
        return wide * (1 + eps * noise)

    parameters = dict(module.named_parameters())
    weights = {key: perturbed(p.detach()).requires_grad_(p.requires_grad) for key, p in parameters.items()}
    args, kwargs = tree_map(perturbed, (ran.args, ran.kwargs))
    with torch.enable_grad():
        output = _first(torch.func.functional_call(module, weights, args, kwargs))
    if output is None:
        raise ValueError("it gives no tensor")
    found = {"output": output.detach()}
    wanted = {key: weight for key, weight in weights.items() if weight.requires_grad}
    if ran.gradient is not None and wanted and output.requires_grad:
        given = ran.gradient.to(output.dtype)
        gradients = torch.autograd.grad(output, list(wanted.values()), given, allow_unused=True)
        found |= {key: g for key, g in zip(wanted, gradients, strict=True) if g is not None}
    return found


def _enter_switched_off(autocast: Any) -> Running:
    """An autocast region is entered switched off."""
    enabled, autocast._enabled = autocast._enabled, False
    try:
        yield
    finally:
        autocast._enabled = enabled


def _error(got: Tensor, exact: Tensor) -> float:
    """The root mean square of the difference over that of the exact value."""
    got, exact = got.double(), exact.double()
    size = float(exact.square().mean().sqrt())
    return float((got - exact).square().mean().sqrt()) / max(size, _SMALL)


def _detached(values: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, values)


def _first(output: Any) -> Tensor | None:
    """The first floating-point tensor of an output."""
    leaves = tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
