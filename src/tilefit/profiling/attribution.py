"""Which operation launched each kernel, and which module, line and phase that was for.

A kernel shares a number with the call of the CUDA runtime that launched it. That call lies in an operation of
the dispatcher, the operation in a module, which a named range or a Python frame marks. In the backward pass
the module is that of the forward operation with the same autograd sequence number.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from tilefit.capture.sites import short_path
from tilefit.ops import FORWARD, OPTIMIZER
from tilefit.profiling.kernel_names import read_name
from tilefit.profiling.trace import FRAME, KERNEL, OP, HostEvent, Kernel, Shapes, Trace

#: The phase of what the backward pass runs, before data and weight gradients are told apart.
BACKWARD = "backward"

#: Begins the ranges that :mod:`tilefit.profiling.ranges` marks modules with.
MODULE_RANGE = "tilefit module "
#: Stands between the module and the line of source in the name of such a range.
LINE_MARK = " at "

_NODE = "autograd::engine::evaluate_function: "
_COMPILED_GRAPH = "## Call CompiledFxGraph"
_MODULE_FRAME = "nn.Module: "
_PYTHON_FRAME = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): ")
_FOREIGN = re.compile(r"(^|/)(torch|contextlib|functools|threading|runpy|importlib)(/|\.py|\()|^<|tilefit/")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
_GRAPH_LAUNCH = re.compile(r"GraphLaunch")


@dataclass(slots=True, eq=False)
class Call:
    """One operation that started work on the GPU.

    Attributes:
        name: The dispatcher's name (``aten::addmm``), the compiler's name of a kernel, or the short name of a
            kernel that was launched by none.
        phase: ``forward``, :data:`BACKWARD` or ``optimizer``.
        module: Path of the innermost module; None where the trace does not tell.
        source: Line of code, as far as the trace tells.
        start_ns: When the host began it.
        shapes: Its arguments, where recorded.
        recomputed: A forward operation that the backward pass repeats.
        node: The autograd node that ran it; empty outside of the backward pass.
        forward: The arguments of the forward operation whose gradient it computes, where recorded.
        graph: The run of a compiled graph it belongs to; empty outside of one.
        graph_module: The module that the graph was compiled of, or was run in; ``module`` is then not known
            from ranges and frames.
        replayed: It was replayed from a CUDA graph.
        kernels: What it ran on the GPU, in order.
    """

    name: str
    phase: str
    module: str | None
    source: str
    start_ns: int
    shapes: Shapes | None = None
    recomputed: bool = False
    node: str = ""
    forward: Shapes | None = None
    graph: str = ""
    graph_module: str = ""
    replayed: bool = False
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def duration_ns(self) -> int:
        """Time of its kernels."""
        return sum(kernel.duration_ns for kernel in self.kernels)


@dataclass(frozen=True, slots=True)
class Wait:
    """A call of the host that waited for the GPU: what for, where, and how long."""

    call: str
    operation: str
    module: str
    source: str
    duration_ns: int


@dataclass(slots=True)
class AttributedStep:
    """One step: what ran something on the GPU, in the order of launch, and where the host waited.

    Attributes:
        start_ns, end_ns: When, by the host's marks.
    """

    start_ns: int
    end_ns: int
    calls: list[Call] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Context:
    """What the events around an event say."""

    module: str | None = None
    source: str = ""
    operation: HostEvent | None = None
    node: str = ""
    forward: Shapes | None = None
    optimizing: bool = False
    recomputing: bool = False
    graph: str = ""
    graph_module: str = ""

    @property
    def phase(self) -> str:
        if self.optimizing:
            return OPTIMIZER
        return BACKWARD if self.node and not self.recomputing else FORWARD


_OUTSIDE = _Context()


def attribute(trace: Trace) -> list[AttributedStep]:
    """The steps of a trace. What was launched outside of them is left out."""
    contexts = _contexts(trace.events)
    by_external = {event.external: event for event in trace.events if event.external}
    steps = [AttributedStep(start, end) for start, end in trace.steps]
    starts = [step.start_ns for step in steps]

    def step_at(time_ns: int) -> AttributedStep | None:
        number = bisect_right(starts, time_ns) - 1
        return steps[number] if number >= 0 and time_ns < steps[number].end_ns else None

    for launch in trace.launches:
        step = step_at(launch.start_ns)
        if launch.waits and step is not None:
            context = contexts[id(launch.parent)] if launch.parent is not None else _OUTSIDE
            operation = context.operation.name if context.operation is not None else ""
            waited_ns = launch.end_ns - launch.start_ns
            step.waits.append(Wait(launch.name, operation, context.module or "", context.source, waited_ns))
    calls: dict[int, Call] = {}
    for kernel in sorted(trace.kernels, key=_launched_ns):
        launched_ns = _launched_ns(kernel)
        step = step_at(launched_ns)
        if step is None:
            continue
        around = kernel.launch.parent if kernel.launch else by_external.get(kernel.external)
        context = contexts[id(around)] if around is not None else _OUTSIDE
        replayed = kernel.launch is not None and bool(_GRAPH_LAUNCH.search(kernel.launch.name))
        launcher = None if replayed else context.operation
        call = calls.get(id(launcher)) if launcher is not None else None
        if call is None:
            name, began_ns, shapes = _kernel_label(kernel), launched_ns, None
            if launcher is not None:
                name, began_ns, shapes = launcher.name, launcher.start_ns, launcher.shapes
            where = context.phase, context.module, context.source
            gradient = context.recomputing, context.node, context.forward
            graph = context.graph, context.graph_module, replayed
            call = Call(name, *where, began_ns, shapes, *gradient, *graph)
            if launcher is not None:
                calls[id(launcher)] = call
            step.calls.append(call)
        call.kernels.append(kernel)
    return steps


def _launched_ns(kernel: Kernel) -> int:
    return kernel.launch.start_ns if kernel.launch else kernel.start_ns


def _kernel_label(kernel: Kernel) -> str:
    return read_name(kernel.name).short if kernel.kind == KERNEL else kernel.name.split(" (")[0]


def _contexts(events: list[HostEvent]) -> dict[int, _Context]:
    """What surrounds each event, by the event's ``id``."""
    contexts: dict[int, _Context] = {}
    made_by = _forward_events(events)
    last: dict[int, tuple[str | None, str]] = {}  # the site of the last backward node of each thread
    for event in events:
        outer = contexts[id(event.parent)] if event.parent is not None else _OUTSIDE
        name = event.name
        if name.startswith(_COMPILED_GRAPH):  # an operation or a range, by the version of PyTorch
            run = f"{name} {event.start_ns}"
            context = replace(outer, module=None, graph=run, graph_module=outer.module or "")
        elif event.kind == OP:
            if name.startswith(_NODE):
                forward = made_by(event)
                site: tuple[str | None, str] = (None, "")
                if forward is not None:
                    known = contexts[id(forward)]
                    site = (known.module, known.source)
                elif event.sequence < 0:
                    # Adding gradients up has no forward operation; it follows the one that made the last.
                    site = last.get(event.thread, site)
                last[event.thread] = site
                shapes, node = forward.shapes if forward else None, name.removeprefix(_NODE)
                context = replace(outer, node=node, forward=shapes, recomputing=False)
                context = replace(context, module=site[0], source=site[1])
            elif name.startswith(MODULE_RANGE):
                module, _, source = name.removeprefix(MODULE_RANGE).partition(LINE_MARK)
                context = _entered(outer, module, source)
            elif outer.operation is None and _is_operation(name):
                context = replace(outer, operation=event)
            else:
                context = outer
        elif event.kind == FRAME:
            context = _in_frame(outer, name)
        elif _OPTIMIZER.match(name):
            context = replace(outer, optimizing=True, module="")
        else:
            context = outer
        contexts[id(event)] = context
    return contexts


def _entered(outer: _Context, module: str, source: str) -> _Context:
    """A module that runs within a backward node repeats its forward pass."""
    recomputing = outer.recomputing or bool(outer.node)
    return replace(outer, module=module, source=source or outer.source, recomputing=recomputing)


def _in_frame(outer: _Context, name: str) -> _Context:
    if name.startswith(_MODULE_FRAME):
        own = name.removeprefix(_MODULE_FRAME)
        # Ranges of ours know the path; frames only the class and a number.
        path = f"{outer.module}.{own}" if outer.module else own
        return _entered(outer, path, "")
    line = _source_of(name)
    return replace(outer, source=line) if line else outer


@cache
def _source_of(frame: str) -> str:
    """``file:line`` of a Python frame of the user's or the model's code; empty for others."""
    found = _PYTHON_FRAME.match(frame)
    if found is None or _FOREIGN.search(found["file"].removeprefix("site-packages/")):
        return ""
    return f"{short_path(found['file'])}:{found['line']}"


@cache
def _is_operation(name: str) -> bool:
    """Whether an event is an operation of the dispatcher that does work itself, or a generated kernel.

    ``aten::linear`` is none: it is put together from others (``aten::t``, ``aten::addmm``).
    """
    if name.startswith("triton_"):
        return True
    namespace, colons, base = name.partition("::")
    if not colons or "::" in base or namespace == "autograd":
        return False
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return True
    # Variants that write into a given tensor or name dimensions are made of others even where the function
    # itself is not, and the other way round.
    names = {f"{name}.{each}".removesuffix(".default") for each in packet.overloads() if "out" not in each}
    plain = {each for each in names if "imname" not in each} & _registered()
    return not plain or not plain <= _composites()


@cache
def _registered() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


@cache
def _composites() -> frozenset[str]:
    """Operations that are put together from others."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def _forward_events(events: list[HostEvent]) -> Callable[[HostEvent], HostEvent | None]:
    """Finds the forward operation of a backward node.

    Sequence numbers are counted by each thread of its own, and an operation notes the number of the node it
    is about to make: of all with the same number, the last one made it.
    """
    made: dict[tuple[int, int], HostEvent] = {}
    nodes: dict[int, list[HostEvent]] = defaultdict(list)
    for event in events:
        if event.kind != OP or event.sequence < 0:
            continue
        if event.forward_thread:
            if event.name.startswith(_NODE):
                nodes[event.forward_thread].append(event)
        else:
            made[event.thread, event.sequence] = event
    threads = {thread for thread, _ in made}
    # The numbers that autograd gives its threads are not those of the trace: the names tell.
    thread_of: dict[int, int] = {}
    for number, found in nodes.items():
        votes = Counter(
            thread
            for node in found
            for thread in threads
            if (forward := made.get((thread, node.sequence))) is not None
            and (len(threads) == 1 or _fits(node.name, forward.name))
        )
        if votes:
            thread_of[number] = votes.most_common(1)[0][0]

    def forward_event(node: HostEvent) -> HostEvent | None:
        thread = thread_of.get(node.forward_thread)
        forward = made.get((thread, node.sequence)) if thread is not None else None
        return forward if forward is not None and forward.start_ns < node.start_ns else None

    return forward_event


def _fits(node: str, operation: str) -> bool:
    """Whether a node's name (``AddmmBackward0``) is that of an operation's gradient (``aten::addmm``)."""
    stem = re.sub(r"Backward\d*$", "", node.removeprefix(_NODE)).lower()
    return stem == operation.partition("::")[2].replace("_", "").lower()
