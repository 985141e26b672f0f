"""Replay a small model's kernels as two CUDA graphs."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tilefit.fixes.changes.assumed import Assumed
from tilefit.fixes.changes.behaviour import Behaviour, Edits, behaviours, require_changeable
from tilefit.fixes.changes.calls import are_all_watched, has_hooks, is_on_gpu
from tilefit.fixes.changes.fix import ChangeSet, Context, Found, RefusedError, Stage, fix, refuse
from tilefit.fixes.changes.run import Run
from tilefit.rules.outside.graphs import WAITS

#: A call is captured when it has been made this often, with tensors of the same sizes.
_CALLS = 3
#: Calls of a model that are captured (in training and evaluation, of several sizes): each keeps the memory of
#: its activations.
_MOST_GRAPHS = 8
#: Runs before a capture, in which libraries choose their kernels (PyTorch, ``make_graphed_callables``).
_WARM_UP = 3
_PLAIN = (type(None), bool, int, float, str)
#: Whose modules do the same in every call with the same sizes, but for those that look for objects.
_LIBRARIES = ("torch.nn.modules.", "torchvision.models.", "torchvision.ops.", "timm.models.", "timm.layers.")
_OURS = "tilefit.fixes."
_NOT = "torchvision.models.detection."
#: Whose functions these may call.
_KNOWN = {"torch", "torchvision", "timm", "tilefit", "numpy", *sys.stdlib_module_names}


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

    What it costs: the activations of a captured call stay allocated (at most eight calls are captured). A
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


def _graphed(change: ChangeSet, run: Run, edits: Edits) -> None:
    edits.give(run.model, "", Graphed())


#: The model as two CUDA graphs, forward and backward.
GRAPH = ChangeSet(
    (),
    options=(("cuda_graph", True),),
    also=_graphed,
    words="Replay forward and backward pass as CUDA graphs once a call has been made three times with the "
    "same sizes; they keep the memory of their activations.",
)


# ---- while the model runs ----------------------------------------------------------------------


#: Two threads cannot capture at once: they would on one stream. Nor may one call a model while another
#: captures it, with leaves of its own: the gradients would be those of these leaves.
_one_call = threading.RLock()


class Graphed(Behaviour):
    """The module, replayed where this very call was captured. Alone among behaviours it keeps something,
    what was captured; copies begin anew, on the device where they will be."""

    def __init__(self) -> None:
        self._modes: Callable[[], Any] = _none
        #: What was captured; before that, how often the call was made; None where it cannot be captured.
        self._calls: dict[Any, int | _Captured | None] = {}

    def __reduce__(self) -> Any:
        return Graphed, ()

    def require(self, module: nn.Module, path: str) -> None:
        super().require(module, path)
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
            known = self._known(module, forward, args, kwargs)
            # The activations of the last replay may still be needed.
            if known is None or known.node() is not None:
                return forward(*args, **kwargs)
            return known.replay(tensors)

    def _known(self, model: nn.Module, forward: Any, args: Any, kwargs: Any) -> _Captured | None:
        """This call, captured, if it has been by now. Once the model is another, none has been."""
        if (modes := self._modes()) is None:
            self._modes, self._calls = as_it_is(model), {}
            modes = self._modes()
        key = (*map(_kind, args), *kwargs, *map(_kind, kwargs.values()), modes, _switches())
        known = self._calls.get(key, 0)
        if isinstance(known, int):
            self._calls[key] = known + 1
            captured = sum(not isinstance(each, int) for each in self._calls.values())
            if known + 1 != _CALLS or captured >= _MOST_GRAPHS:
                return None
            self._calls[key] = known = _capture(model, forward, args, kwargs)
        return known


def as_it_is(model: nn.Module) -> Callable[[], Any]:
    """What tells in which modes a model is, as long as it runs the same on the same tensors; else None."""
    then = [(module, Assumed(module), _runs(module)) for module in model.modules()]
    if any(_is_users(value) for _, each, _ in then for _, _, value, _ in each.outside.reads):
        return _none
    parameters = list(model.parameters())

    def modes() -> Any:
        if all(_runs(module)[1] == runs and assumed.holds(module) for module, assumed, (_, runs) in then):
            return *(module.training for module, *_ in then), *(p.requires_grad for p in parameters)
        return None

    return modes


def _is_users(value: Any) -> bool:
    """Whether something is a function of the user's, which may be in place of PyTorch's: nobody knows whether
    it does the same in every call."""
    return isinstance(value, FunctionType) and str(value.__module__).partition(".")[0] not in _KNOWN


def _runs(module: nn.Module) -> tuple[list[Any], list[Any]]:
    """What a call of a module runs, and on what: its class, what was put in place of its ``forward``,
    behaviours, parts, tensors; and what they are known by, with hooks and the tensors' memory. Who keeps the
    former keeps others from being known by the same."""
    own = vars(module)
    tensors = [*module._parameters.values(), *module._buffers.values()]
    # Not what keeps this: it would keep itself, and the memory of the graphs.
    others = [each for each in behaviours(module) if not isinstance(each, Graphed)]
    how = type(module), own.get("forward"), own.get("_compiled_call_impl"), *others
    objects = [*how, *module._modules.values(), *tensors]
    memory = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return objects, [*map(id, objects), has_hooks(module), *memory]


def _kind(value: Any) -> Any:
    """What is the same of an argument."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), value


def _switches() -> Any:
    """What PyTorch's switches say, and who asks."""
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    return (
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        # What older switches set, too; those cannot be read where somebody used these.
        (cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        (torch.are_deterministic_algorithms_enabled(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        # Which attention kernels may be taken: ``torch.nn.attention.sdpa_kernel`` sets these.
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        cuda.math_sdp_enabled(),
        # Another thread, or stream, would write to the memory of a replay that still runs.
        (threading.get_ident(), torch.cuda.current_stream().cuda_stream),
    )


# ---- the capture -------------------------------------------------------------------------------


_Leaves = dict[nn.Parameter, nn.Parameter]


def _capture(model: nn.Module, forward: Any, args: Any, kwargs: Any) -> _Captured | None:
    """A call as graphs; None, with a warning, where it cannot be."""
    try:
        require_capturable(model)  # it may have hooks by now
        device = next(leaf.device for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
        # A capture that fails leaves its own stream the current one.
        here = torch.cuda.stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), here, torch.random.fork_rng([device]), _aside(model) as leaves:
            return _Captured(forward, args, kwargs, leaves)
    except (RuntimeError, RefusedError) as error:
        warnings.warn(f"this call cannot be captured and runs as it was: {error}", stacklevel=4)
        return None


@contextmanager
def _aside(model: nn.Module) -> Iterator[_Leaves]:
    """Within the block the model computes with other leaves, by the parameters on whose memory they are; what
    it writes to buffers is taken back.

    A leaf accumulates its gradient on the stream where it was first used, for as long as the graph of any
    call is alive (that of the last loss is); a capture on another stream would have to wait for that one.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
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
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class _Captured:
    """Two graphs, and the memory they read and write.

    Args:
        forward, args, kwargs: The call.
        leaves: What it computes with, by the parameters that get the gradients.
    """

    def __init__(self, forward: Any, args: Any, kwargs: Any, leaves: _Leaves) -> None:
        with torch.inference_mode(False):  # where tensors know when they are written to
            args, kwargs = tree_map_only(
                torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), (args, kwargs)
            )
        self.inputs = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        self.trained = [parameter for parameter in leaves if parameter.requires_grad]
        self.sources = [each for each in (*self.inputs, *leaves.values()) if each.requires_grad]
        #: What may still run the backward pass of the last replay.
        self.node: Callable[[], Any] = _none
        versions = [each._version for each in self.inputs]

        def run() -> tuple[list[Any], Any]:
            # Cached casts of the weights would be those of the capture for ever.
            dtype, is_on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
            with torch.autocast("cuda", dtype, is_on, cache_enabled=False):
                outputs, spec = tree_flatten(forward(*args, **kwargs))
            others = [output for output in outputs if not isinstance(output, torch.Tensor)]
            refuse(others, "it returns something that is no tensor")
            # Parameters of one that no loss is made of get no gradient, and not one of zeros.
            graded = [output for output in outputs if output.requires_grad]
            refuse(graded[1:], "it returns several tensors with gradients")
            refuse([each._version for each in self.inputs] != versions, "it writes to what it is given")
            return outputs, spec

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                outputs, _ = run()
                self._gradients(outputs, [torch.zeros_like(each) for each in outputs if each.requires_grad])
            del outputs
        torch.cuda.current_stream().wait_stream(stream)

        self.forward_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward_graph, capture_error_mode="thread_local"):
            outputs, self.spec = run()
        self.differentiable = [output.requires_grad for output in outputs]
        self.given = [torch.zeros_like(output) for output in outputs if output.requires_grad]
        if self.given:
            self.backward_graph, pool = torch.cuda.CUDAGraph(), self.forward_graph.pool()
            with torch.cuda.graph(self.backward_graph, pool=pool, capture_error_mode="thread_local"):
                self.gradients = self._gradients(outputs, self.given)
        self.outputs = [output.detach() for output in outputs]

    def _gradients(self, outputs: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
        """Of all sources, from those of the outputs that have one."""
        graded = [output for output in outputs if output.requires_grad]
        return torch.autograd.grad(graded, self.sources, given, allow_unused=True) if graded else ()

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        """What the call returns for these inputs."""
        sources = [*(tensor for tensor in tensors if tensor.requires_grad), *self.trained]
        outputs = _Replay.apply(self, tensors, *sources)  # type: ignore[no-untyped-call]
        return tree_unflatten(list(outputs), self.spec)


def _none() -> None:
    """In place of what tells of something that is gone."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, inputs: list[torch.Tensor], *sources: Any) -> Any:
        torch._foreach_copy_(captured.inputs, inputs)
        captured.forward_graph.replay()
        # It lives as long as the backward pass can come.
        ctx.captured, captured.node = captured, weakref.ref(ctx)
        outputs = tuple(output.clone() for output in captured.outputs)
        pairs = zip(outputs, captured.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        captured = ctx.captured
        if captured.node() is not ctx:
            raise RuntimeError(
                "a second backward pass through one call, whose activations the CUDA graph has written over; "
                "take the fix cuda-graph back (plan.undo())"
            )
        torch._foreach_copy_(captured.given, [*compress(gradients, captured.differentiable)])
        captured.backward_graph.replay()
        captured.node = _none
        # Copies: autograd keeps what it is given as ``.grad``, and the next replay writes over the original.
        return None, None, *copies(captured.gradients)


def copies(tensors: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Copies of tensors, where there are some, in few launches."""
    known = [tensor for tensor in tensors if tensor is not None]
    made = [torch.empty_like(tensor) for tensor in known]
    if known:
        torch._foreach_copy_(made, known)
    fresh = iter(made)
    return (None if tensor is None else next(fresh) for tensor in tensors)
