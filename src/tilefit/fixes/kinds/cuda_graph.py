"""Replay a small model's kernels as two CUDA graphs."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tilefit.fixes.changes.assumed import Assumed
from tilefit.fixes.changes.behaviour import Behaviour, behaviours, require_changeable
from tilefit.fixes.changes.calls import is_on_gpu
from tilefit.fixes.changes.edits import Edits
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, RefusedError, Stage, fix, refuse
from tilefit.fixes.changes.hooks import are_all_watched, has_hooks
from tilefit.fixes.changes.run import Run
from tilefit.rules.outside.graphs import WAITS

#: A call is captured when it has been made this often, with tensors of the same sizes.
_CALLS = 3
#: Calls captured in one state of a module, and states of it that are remembered (training, evaluation):
#: each call keeps the memory of its activations.
_MOST_GRAPHS = 4
_MOST_STATES = 4
#: Runs before a capture, in which libraries choose their kernels (PyTorch, ``make_graphed_callables``).
_WARM_UP = 3
_PLAIN = (type(None), bool, int, float, str)
#: Whose modules do the same in every call with the same sizes, but for those that look for objects.
_LIBRARIES = ("torch.nn.modules.", "torchvision.models.", "torchvision.ops.", "timm.models.", "timm.layers.")
_OURS = "tilefit.fixes."
_NOT = "torchvision.models.detection."


@fix("cuda-graph", stage=Stage.RUN)
def replay_graphs(context: Context) -> Found:
    """Records the kernels of a model that the host cannot launch fast enough, and replays them.

    The third call with the same sizes is captured into one CUDA graph for the forward and one for the
    backward pass; later ones copy their inputs in, launch the graph, and copy the outputs and gradients out,
    so that tensors that were returned stay what they are and gradients accumulate as ever. The optimizer
    stays outside: ``fuse-optimizer`` makes it one kernel.

    The same function: a graph replays kernels, not Python, so only models built of the modules of PyTorch,
    torchvision and timm are changed, whose Python does the same in every call. A call runs as it always did
    where anything is not as it was captured (sizes, element types, autocast, training mode, hooks, exchanged,
    moved or frozen parameters), where the output of the call before still waits for its backward pass, where
    it returns several tensors with gradients or writes to what it is given, and on the CPU. Dropout draws
    other random numbers.

    What it costs: the activations of a captured call stay allocated (at most four sizes are captured). A
    second derivative is an error, and so is a second backward pass through one call (``retain_graph=True``).

    Refused: modules with Python of their own (``torch.compile(mode="reduce-overhead")`` captures those,
    with guards), hooks, parametrisations.
    """
    estimate, run = context.estimate, context.run
    if not (run.options.compile or run.cuda_graph or estimate.launch_share <= WAITS):
        yield GRAPH


def require_capturable(model: nn.Module) -> None:
    """Check that a model does the same in every call with the same sizes.

    Raises:
        RefusedError: It may not.
    """
    for path, module in model.named_modules():
        kind = type(module)
        known = kind.__module__.startswith((*_LIBRARIES, _OURS)) and not kind.__module__.startswith(_NOT)
        if not known or isinstance(module, nn.SyncBatchNorm | nn.modules.lazy.LazyModuleMixin):
            raise RefusedError(
                f"{path or 'the model'} is a {kind.__module__}.{kind.__qualname__}, whose Python a CUDA "
                "graph would not run again"
            )
        require_changeable(module, path)
        refuse(has_hooks(module), f"{path or 'the model'} has hooks, which a CUDA graph would not run")


# ---- while the model runs ----------------------------------------------------------------------


@dataclass(frozen=True)
class Graphed(Behaviour):
    """The module, replayed where this very call was captured."""

    def require(self, module: nn.Module, path: str) -> None:
        require_capturable(module)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves = (*args, *kwargs.values())
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors and all(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))  # as a replay would
            return tree_map_only(torch.Tensor, torch.clone, forward(*args, **kwargs))
        if (
            not tensors
            or torch.compiler.is_compiling()
            or are_all_watched()
            or not all(type(leaf) in (torch.Tensor, *_PLAIN) for leaf in leaves)
            or not all(map(is_on_gpu, tensors))
            or torch.cuda.is_current_stream_capturing()
        ):
            return forward(*args, **kwargs)
        with _one_call:
            states = _states.setdefault(module, [])
            state = next((known for known in states if known.is_now()), None)
            if state is None:
                state = _State(module)
                states.append(state)
                del states[:-_MOST_STATES]
            return state.call(forward, args, kwargs)


def _forgotten(change: ChangeSet, run: Run, edits: Edits) -> None:
    """What was captured goes with the fix, and with it the memory of its activations."""
    edits.undone_by(partial(_forget, run.model))


def _forget(model: nn.Module) -> None:
    _states.pop(model, None)


#: The model as two CUDA graphs, forward and backward.
GRAPH = ChangeSet(
    (),
    behaviours=(("", Graphed()),),
    options=(("cuda_graph", True),),
    also=_forgotten,
    words="Replay forward and backward pass as CUDA graphs once a call has been made three times with the "
    "same sizes; they keep the memory of their activations.",
)


#: Two threads cannot capture at once: they would on one stream. Nor may one call a model while another
#: captures it, with leaves of its own: the gradients would be those of these leaves.
_one_call = threading.RLock()


class _State:
    """All that a model's kernels depend on besides the arguments of a call, and the calls captured in it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # which is the key by which this is found
        _, *self._parts = model.modules()
        self._as_they_were = [(Assumed.of(each), _runs(each)) for each in model.modules()]
        # Kept, so that their ids stay their own.
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        self._trained = [p for p in self._parameters if p.requires_grad]
        self._seen: dict[Any, int] = {}
        self._captured: dict[Any, _Captured | None] = {}

    def is_now(self) -> bool:
        """Whether the model is in this state."""
        model = self._model()
        assert model is not None  # it is being called
        pairs = zip((model, *self._parts), self._as_they_were, strict=True)
        return all(_runs(module) == runs and assumed.holds(module) for module, (assumed, runs) in pairs)

    def call(self, forward: Any, args: Any, kwargs: Any) -> Any:
        key = (*map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()), _modes())
        if key not in self._captured:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] < _CALLS or len(self._captured) >= _MOST_GRAPHS:
                return forward(*args, **kwargs)
            self._captured[key] = self._capture(forward, args, kwargs)
        captured = self._captured[key]
        if captured is None or captured.is_waiting():
            return forward(*args, **kwargs)
        return captured.replay((*args, *kwargs.values()))

    def _capture(self, forward: Any, args: Any, kwargs: Any) -> _Captured | None:
        try:
            device = next(leaf.device for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
            model = self._model()
            assert model is not None  # it is being called
            kept = _unchanged(self._buffers)
            # A capture that fails leaves its own stream the current one.
            here = torch.cuda.stream(torch.cuda.current_stream(device))
            with torch.cuda.device(device), here, kept, _leaves_of_our_own(model) as leaves:
                return _Captured(forward, args, kwargs, [leaves[p] for p in self._trained], self._trained)
        except RuntimeError as error:
            warnings.warn(f"this call cannot be captured and runs as it was: {error}", stacklevel=4)
            return None


def _runs(module: nn.Module) -> Any:
    """What a call of a module runs, and on what: its class, mode, what was put in place of its ``forward``,
    hooks, parts and tensors."""
    own = vars(module)
    forward, compiled = own.get("forward"), own.get("_compiled_call_impl")
    how = type(module), module.training, id(forward), behaviours(module), id(compiled), has_hooks(module)
    tensors = [
        None if tensor is None else (id(tensor), tensor.data_ptr(), tensor.requires_grad)
        for held in (module._parameters, module._buffers)
        for tensor in held.values()
    ]
    return how, list(module._modules.values()), tensors


def _kind(value: Any) -> Any:
    """What must be the same for a captured call to be repeated."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def _modes() -> Any:
    """What PyTorch's switches say, and who asks."""
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        # What older switches set, too; those cannot be read where somebody used these.
        cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.rnn.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        # Which attention kernels may be taken: ``torch.nn.attention.sdpa_kernel`` sets these.
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        cuda.math_sdp_enabled(),
        # Another thread, or stream, would write to the memory of a replay that still runs.
        threading.get_ident(),
        torch.cuda.current_stream().cuda_stream,
    )


@contextmanager
def _unchanged(buffers: list[torch.Tensor]) -> Iterator[None]:
    """After the block buffers and random numbers are as before."""
    kept = [buffer.clone() for buffer in buffers]
    random = torch.cuda.get_rng_state()
    try:
        yield
    finally:
        torch.cuda.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)


@contextmanager
def _leaves_of_our_own(model: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Within the block the model computes with other leaves on the memory of its parameters.

    A leaf accumulates its gradient on the stream where it was first used, for as long as the graph of any
    call is alive (that of the last loss is); a capture on another stream would have to wait for that one.
    """
    leaves = {p: nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    held = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    # By attribute: recurrent layers keep a second list of their weights.
    for module, name, parameter in held:
        setattr(module, name, leaves[parameter])
    try:
        yield leaves
    finally:
        for module, name, parameter in held:
            setattr(module, name, parameter)


class _Captured:
    """Two graphs, and the memory they read and write.

    Args:
        forward, args, kwargs: The call.
        leaves: What it computes with: leaves on the memory of ``trained``.
        trained: The parameters that get the gradients.
    """

    def __init__(
        self, forward: Any, args: Any, kwargs: Any, leaves: list[nn.Parameter], trained: list[nn.Parameter]
    ) -> None:
        with torch.inference_mode(False):  # where tensors know when they are written to
            own_args, own_kwargs = tree_map_only(torch.Tensor, _own, (args, kwargs))
        self.inputs = [leaf for leaf in (*own_args, *own_kwargs.values()) if isinstance(leaf, torch.Tensor)]
        self.sources = [*(leaf for leaf in self.inputs if leaf.requires_grad), *leaves]
        self.trained = trained
        versions = [each._version for each in self.inputs]
        #: Of the call whose backward pass may come: it lives as long as its node.
        self.ticket: weakref.ref[_Ticket] | None = None

        def run() -> Any:
            # Cached casts of the weights would be those of the capture for ever.
            with torch.autocast(
                "cuda",
                torch.get_autocast_dtype("cuda"),
                torch.is_autocast_enabled("cuda"),
                cache_enabled=False,
            ):
                return forward(*own_args, **own_kwargs)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                outputs = tree_flatten(run())[0]
                if not all(isinstance(output, torch.Tensor) for output in outputs):
                    raise RuntimeError("it returns something that is no tensor")
                if sum(output.requires_grad for output in outputs) > 1:
                    # Parameters of one that no loss is made of get no gradient, and not one of zeros.
                    raise RuntimeError("it returns several tensors with gradients")
                if [each._version for each in self.inputs] != versions:
                    raise RuntimeError("it writes to what it is given")
                self._gradients(outputs)
            del outputs
        torch.cuda.current_stream().wait_stream(stream)

        self.forward_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, capture_error_mode="thread_local"):
            self.outputs, self.spec = tree_flatten(run())
        self.output_gradients = [torch.zeros_like(o) for o in self.outputs if o.requires_grad]
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        if self.output_gradients:
            self.backward_graph = torch.cuda.CUDAGraph()
            pool = self.forward_graph.pool()
            with torch.cuda.graph(self.backward_graph, pool=pool, capture_error_mode="thread_local"):
                self.gradients = self._gradients(self.outputs, self.output_gradients)
        self.differentiable = [output.requires_grad for output in self.outputs]
        self.outputs = [output.detach() for output in self.outputs]

    def _gradients(self, outputs: list[torch.Tensor], given: Sequence[torch.Tensor] = ()) -> Any:
        """Of all sources, from ``given`` ones of outputs, or zeros."""
        graded = [output for output in outputs if output.requires_grad]
        given = given or [torch.zeros_like(output) for output in graded]
        return torch.autograd.grad(graded, self.sources, given, allow_unused=True) if graded else ()

    def is_waiting(self) -> bool:
        """Whether the activations of the last replay may still be needed."""
        return self.ticket is not None and self.ticket() is not None

    def replay(self, leaves: tuple[Any, ...]) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, tensors)
        if self.backward_graph is None:
            self.forward_graph.replay()
            outputs = [output.clone() for output in self.outputs]
        else:
            sources = [*(leaf for leaf in tensors if leaf.requires_grad), *self.trained]
            outputs = list(_Replay.apply(self, *sources))  # type: ignore[no-untyped-call]
        return tree_unflatten(outputs, self.spec)


def _own(value: torch.Tensor) -> torch.Tensor:
    """Memory of our own for an input, laid out alike."""
    return torch.empty_like(value).copy_(value.detach()).requires_grad_(value.requires_grad)


class _Ticket:
    """Lives as long as the backward pass of a replay can come."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        captured.forward_graph.replay()
        ctx.captured, ctx.ticket = captured, _Ticket()
        captured.ticket = weakref.ref(ctx.ticket)
        outputs = tuple(output.clone() for output in captured.outputs)
        pairs = zip(outputs, captured.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        captured = ctx.captured
        if captured.ticket is None or captured.ticket() is not ctx.ticket:
            raise RuntimeError(
                "a second backward pass through one call, whose activations the CUDA graph has written over; "
                "take the fix cuda-graph back (plan.undo())"
            )
        wanted = [
            g for g, differentiable in zip(gradients, captured.differentiable, strict=True) if differentiable
        ]
        torch._foreach_copy_(captured.output_gradients, wanted)
        captured.backward_graph.replay()
        captured.ticket = None
        # Copies: autograd keeps what it is given as ``.grad``, and the next replay writes over the original.
        return None, *copies(captured.gradients)


def copies(tensors: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Copies of tensors, where there are some, in few launches."""
    known = [tensor for tensor in tensors if tensor is not None]
    made = [torch.empty_like(tensor) for tensor in known]
    if known:
        torch._foreach_copy_(made, known)
    fresh = iter(made)
    return (None if tensor is None else next(fresh) for tensor in tensors)


#: By module. Not an attribute of it: its copies begin anew, on the device where they will be.
_states: weakref.WeakKeyDictionary[nn.Module, list[_State]] = weakref.WeakKeyDictionary()
