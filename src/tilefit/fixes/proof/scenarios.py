"""What people do with a model: each thing is done to the original and to the changed one, and whatever comes
of it is compared.

A scenario is a function of a :class:`Trial` and a model, a copy of its own; it tells what it sees, by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_map, tree_map_only

from tilefit.capture.dtypes import AMP_DTYPES
from tilefit.capture.forward import call, loss_of_output
from tilefit.capture.trees import tensors

#: Gradients in fp16 are computed of the loss times this, as in training, and divided by it: as they are, most
#: would be below the smallest numbers that fp16 holds in full precision.
_LOSS_SCALE = 2.0**10
_SEED = 0
_LEARNING_RATE = 1e-3
#: Adam's epsilon: with the usual 1e-8, gradients that are zero but for rounding would move parameters.
_EPSILON = 1e-3
#: So large, and so small, that products overflow and underflow in fp32.
_HUGE, _TINY = 1e30, 1e-30

#: What is seen, by name; and as it is told: trees of tensors and numbers, each with what it is.
Observed = dict[str, Any]
Told = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Trial:
    """What all runs of a comparison share.

    Attributes:
        inputs: The model's, with values.
        loss: Makes the loss of the output; without it the output's ``loss``, else the distance of all outputs
            to random numbers.
        amp: Autocast element type, empty for none.
        dtype: Element type of parameters and floating-point inputs.
        device: Where it runs.
        same_random_numbers: Both models draw the same numbers from a seed; otherwise training mode is
            compared without dropout.
        parts: Arguments of modules that are called by themselves, by path.
        train: The run trains.
        steps: How many steps each optimizer makes.
    """

    inputs: Any
    loss: Callable[[Any], torch.Tensor] | None = None
    amp: str = ""
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    same_random_numbers: bool = True
    parts: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    train: bool = True
    steps: int = 3

    @property
    def precision(self) -> torch.dtype:
        """The coarsest element type of what is computed."""
        return AMP_DTYPES[self.amp] if self.amp else self.dtype

    @contextmanager
    def running(self) -> Iterator[None]:
        """The user's random numbers stay as they are; in fp64 everything is, new tensors too."""
        default = torch.get_default_dtype()
        is_double = self.precision == torch.float64
        with torch.random.fork_rng(), _InDouble() if is_double else nullcontext():
            torch.set_default_dtype(torch.float64 if is_double else default)
            try:
                yield
            finally:
                torch.set_default_dtype(default)

    def prepared(self, model: nn.Module, training: bool = False) -> nn.Module:
        """A copy of a model, to be run."""
        model = copy.deepcopy(model).to(self.device, self.dtype).train(training)
        model.zero_grad()
        if training and not self.same_random_numbers:
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.p = 0.0
        # Not ``torch.manual_seed``: for GPUs that nobody uses it notes the stack, each time.
        torch.default_generator.manual_seed(_SEED)
        if torch.device(self.device).type == "cuda":
            torch.cuda.manual_seed_all(_SEED)
        return model

    def fresh(self, tree: Any = None, *, grad: bool = False) -> Any:
        """The inputs, or others, as nobody has used or changed them; ``grad``: as leaves that require one."""

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            is_float = leaf.is_floating_point()
            new = leaf.detach().to(self.device, self.dtype if is_float else leaf.dtype, copy=True)
            return new.requires_grad_(grad and is_float)

        return tree_map(made, _plain(self.inputs if tree is None else tree))

    def called(self, model: nn.Module, inputs: Any) -> Any:
        """What the model returns."""
        kind = torch.device(self.device).type
        with torch.autocast(kind, dtype=AMP_DTYPES.get(self.amp, torch.bfloat16), enabled=bool(self.amp)):
            return call(model, inputs)

    def loss_of(self, output: Any) -> torch.Tensor | None:
        """The loss of an output; None where it has no gradient."""
        trained = [leaf for leaf in floats(output) if leaf.requires_grad]
        if not trained:
            return None
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if self.loss is not None or isinstance(own, torch.Tensor):
            return loss_of_output(output, self.loss)[0]
        # The distance to random numbers: a mean of the output would not notice elements that are exchanged.
        generator = torch.Generator(self.device).manual_seed(_SEED)
        wide = torch.promote_types(self.dtype, torch.float32)
        total = torch.zeros((), device=self.device, dtype=wide)
        for leaf in trained:
            aim = torch.randn(leaf.shape, generator=generator, device=self.device, dtype=wide)
            total = total + (leaf.to(wide) - aim).square().mean()
        return total

    def passed(self, model: nn.Module, inputs: Any) -> Told:
        """Output, loss and gradients of one pass."""
        output = self.called(model, inputs)
        yield "output", output
        yield from self.gradients(model, self.loss_of(output), inputs)

    def gradients(self, model: nn.Module, loss: torch.Tensor | None, inputs: Any) -> Told:
        """A loss, and the gradients of parameters and inputs."""
        if loss is None:
            return
        scale = _LOSS_SCALE if self.precision == torch.float16 else 1.0
        (loss if scale == 1.0 else loss.float() * scale).backward()  # type: ignore[no-untyped-call]
        yield "loss", loss.detach()
        given = [(f"input{path}", leaf) for path, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)]
        for name, leaf in (*model.named_parameters(), *given):
            if leaf.is_leaf and leaf.grad is not None:
                yield f"gradient of {name}", leaf.grad if scale == 1.0 else leaf.grad.float() / scale
        yield from (("buffer " + name, buffer) for name, buffer in model.named_buffers())


@dataclass(frozen=True)
class Scenario:
    """One of the things that people do.

    Attributes:
        name: As in a refusal: ``eval``.
        tell: Does it.
        training: The model is in training mode; of a run that trains.
        most: The most parameters that a model may have for it.
        working: In the run's own precision, with wide tolerances.
        finite: Only that nothing becomes infinite or NaN which was not is compared.
        may_raise: The changed model may raise where the original does not: nobody gets a wrong number.
    """

    name: str
    tell: Callable[[Trial, nn.Module], Told]
    training: bool = False
    most: float = float("inf")
    working: bool = False
    finite: bool = False
    may_raise: bool = False

    def observe(self, trial: Trial, model: nn.Module) -> Observed:
        """What is seen of a copy of a model."""
        return seen(self.tell(trial, trial.prepared(model, self.training)))


def seen(told: Told) -> Observed:
    """What is told, each tensor and number of it by what it is and where."""
    return {f"{what}{where}": leaf for what, tree in told for where, leaf in leaves(tree)}


#: All of them, the first ones first.
SCENARIOS: list[Scenario] = []
#: Up to here optimizer steps, and what else takes several passes, are compared too. A choice.
_FEW = 2_000_000
#: Up to here, all else but the passes themselves.
_MANY = 10_000_000


def _scenario(name: str, **how: Any) -> Callable[[Callable[[Trial, nn.Module], Told]], Any]:
    def register(tell: Callable[[Trial, nn.Module], Told]) -> Any:
        SCENARIOS.append(Scenario(name, tell, **how))
        return tell

    return register


@_scenario("train", training=True)
@_scenario("eval")
def _one_pass(trial: Trial, model: nn.Module) -> Told:
    return trial.passed(model, trial.fresh(grad=True))


@_scenario("optimizer steps", training=True, most=_FEW)
def _stepped(trial: Trial, model: nn.Module) -> Told:
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return
    how: dict[str, Any] = {"lr": _LEARNING_RATE, "weight_decay": 0.1}
    sgd = torch.optim.SGD(trained, momentum=0.9, **how)
    for optimizer in (sgd, torch.optim.AdamW(trained, eps=_EPSILON, **how)):
        kind = type(optimizer).__name__
        for number in range(1, trial.steps + 1):
            loss = trial.loss_of(trial.called(model, trial.fresh()))
            if loss is None:
                return
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            yield f"gradient norm of step {number} of {kind}", nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            yield f"loss of step {number} of {kind}", loss.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            yield f"{name} after {trial.steps} steps of {kind}", tensor.detach().clone()


@_scenario("called again", most=_MANY)
def _called_again(trial: Trial, model: nn.Module) -> Told:
    """With the same inputs, with these written to, with other weights."""
    for mode in (torch.no_grad, torch.inference_mode):
        inputs = trial.fresh()
        with mode():
            for how in ("", " again", ", written to", ", other weights"):
                if how == ", written to":
                    for leaf in floats(inputs):
                        leaf.mul_(0.5)
                elif how == ", other weights":
                    _load_others(model)
                yield f"output of inputs{how}, {mode.__name__}", trial.called(model, inputs)
        yield f"inputs afterwards, {mode.__name__}", inputs


def _load_others(model: nn.Module) -> None:
    state = model.state_dict()
    model.load_state_dict({**state, **{n: 1.5 * each for n, each in state.items() if is_float(each)}})


@_scenario("inputs that are views", most=_MANY)
def _views(trial: Trial, model: nn.Module) -> Told:
    def doubled(leaf: torch.Tensor) -> torch.Tensor:
        return torch.stack((leaf, leaf), -1).requires_grad_(leaf.is_floating_point())

    wholes = tree_map_only(torch.Tensor, doubled, trial.fresh())
    views = tree_map_only(torch.Tensor, lambda whole: whole[..., 0], wholes)
    hooked: list[torch.Tensor] = []
    for each in floats(views):
        each.register_hook(hooked.append)  # type: ignore[no-untyped-call]
    output = trial.called(model, views)
    yield "output", output
    loss, given = trial.loss_of(output), [*floats(views), *floats(wholes)]
    if loss is not None and given:
        yield "gradients", torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True)
        loss.backward()  # type: ignore[no-untyped-call]
        yield "gradients of the whole", [whole.grad for whole in floats(wholes)]
        yield "seen by hooks", hooked


@_scenario("a batch of another size", most=_MANY)
def _other_batch(trial: Trial, model: nn.Module) -> Told:
    size = next((each.shape[0] for each in tensors(trial.inputs) if each.dim()), 0)

    def other(leaf: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return leaf[rows] if leaf.dim() and leaf.shape[0] == size else leaf

    for rows in ([*range(size), 0], [0]) if size else ():
        given = tree_map_only(torch.Tensor, partial(other, rows=rows), _plain(trial.inputs))
        model.zero_grad()
        for what, tree in trial.passed(model, trial.fresh(given, grad=True)):
            yield f"{what} of {len(rows)}", tree


@_scenario("parts called by themselves", most=_MANY)
def _parts(trial: Trial, model: nn.Module) -> Told:
    """With other weights than in a call before."""
    with torch.no_grad():
        trial.called(model, trial.fresh())
    _load_others(model)
    for path in trial.parts:
        model.zero_grad()
        args, kwargs = given = trial.fresh(trial.parts[path], grad=True)
        output = model.get_submodule(path)(*args, **kwargs)
        yield path, output
        for what, tree in trial.gradients(model, replace(trial, loss=None).loss_of(output), given):
            yield f"{what}, {path} alone", tree


@_scenario("parts given wrong sizes", most=_MANY)
def _wrong_sizes(trial: Trial, model: nn.Module) -> Told:
    for path, (args, kwargs) in trial.parts.items():
        for change in (-1, 1):
            other = tree_map_only(torch.Tensor, partial(_of_other_width, change=change), args)
            given, keywords = trial.fresh((other, kwargs))
            with torch.no_grad():
                try:
                    output = model.get_submodule(path)(*given, **keywords)
                except Exception:  # noqa: BLE001 - that it raises is what is seen
                    output = "an error"
            yield f"{path} of {change:+d} feature", output


def _of_other_width(leaf: torch.Tensor, change: int) -> torch.Tensor:
    if not leaf.is_floating_point() or not leaf.dim():
        return leaf
    return leaf[..., :change] if change < 0 else torch.cat((leaf, leaf[..., :change]), -1)


@_scenario("hooks set afterwards", most=_MANY)
def _hooked(trial: Trial, model: nn.Module) -> Told:
    called: list[tuple[str, Any]] = []

    def see(module: nn.Module, args: Any, output: Any, path: str) -> None:
        called.append((path, (args, output)))

    for path in trial.parts:
        model.get_submodule(path).register_forward_hook(partial(see, path=path))
    yield from trial.passed(model, trial.fresh(grad=True))
    yield from ((f"hook {number} of {path}", tree) for number, (path, tree) in enumerate(called))


@_scenario("a sample of NaN", most=_MANY)
def _nan(trial: Trial, model: nn.Module) -> Told:
    inputs = trial.fresh()
    given = [leaf for leaf in floats(inputs) if leaf.dim()]
    for leaf in given:
        leaf[(0,) * leaf.dim()] = torch.nan
    with torch.no_grad():
        yield "output", trial.called(model, inputs) if given else None


@_scenario("second derivatives", most=_FEW, may_raise=True)
def _second(trial: Trial, model: nn.Module) -> Told:
    inputs = trial.fresh(grad=True)
    loss = trial.loss_of(trial.called(model, inputs))
    of: list[torch.Tensor] = [*(p for p in model.parameters() if p.requires_grad), *floats(inputs)]
    if loss is not None:
        first = torch.autograd.grad(loss, of, create_graph=True, allow_unused=True)
        total = sum(gradient.square().sum() for gradient in first if gradient is not None)
        if isinstance(total, torch.Tensor) and total.requires_grad:
            yield "second derivatives", torch.autograd.grad(total, of, allow_unused=True)


@_scenario("in its own precision", working=True, most=_MANY)
def _working(trial: Trial, model: nn.Module) -> Told:
    with torch.no_grad():
        yield "output", trial.called(model, trial.fresh())


@_scenario("huge and tiny numbers", working=True, finite=True, most=_MANY)
def _magnitudes(trial: Trial, model: nn.Module) -> Told:
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    for size in (_HUGE, _TINY):
        inputs = trial.fresh()
        given = [*floats(inputs)]
        with torch.no_grad():
            for tensor in given or tables:
                tensor.mul_(size)
            yield f"output at {size:g}", trial.called(model, inputs)
            for tensor in () if given else tables:
                tensor.div_(size)


def _plain(tree: Any) -> Any:
    return dict(tree) if isinstance(tree, Mapping) else tree


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of a tree of outputs, with where they are; objects of other kinds are passed by."""
    for path, leaf in tree_flatten_with_path(_plain(tree))[0]:
        if isinstance(leaf, torch.Tensor | bool | int | float | str):
            yield "".join(map(str, path)), leaf


def floats(tree: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors of a tree."""
    yield from (leaf for _, leaf in leaves(tree) if is_float(leaf))


def is_float(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether something is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# ---- fp64 --------------------------------------------------------------------------------------


class _InDouble(TorchFunctionMode):
    """Casts to floating-point types that a model asks for lead to fp64: what is compared is the function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        if torch.dtype in map(type, (*args, *kwargs.values())):
            args, kwargs = tree_map_only(torch.dtype, _wider, (args, kwargs))
        return func(*args, **kwargs)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _FLOATS else dtype


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
