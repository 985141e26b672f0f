"""What is kept of a trace: what ran on the GPU, and what the host was doing when it launched that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from tilefit.errors import TilefitError
from tilefit.profiling.chrome import Event, read_events

KERNEL, COPY, FILL = "kernel", "copy", "fill"
#: What events on the GPU are, by Kineto's category; those in capitals are of PyTorch before 1.12.
_GPU = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": FILL}
_GPU |= {"Kernel": KERNEL, "Memcpy": COPY, "Memset": FILL}
_RUNTIME = frozenset(("cuda_runtime", "cuda_driver", "Runtime"))
#: Kinds of events of the host.
OP, RANGE, FRAME = "op", "range", "frame"
_HOST = {"cpu_op": OP, "Operator": OP, "user_annotation": RANGE, "python_function": FRAME}
#: Calls of the CUDA runtime and driver that make the host wait for the GPU.
_WAITING = re.compile(r"Synchronize|^cudaMemcpy(?!.*Async)|^cuMemcpy(?!.*Async)|^cudaFree$")
_STEP = re.compile(r"ProfilerStep#(\d+)")


@dataclass(slots=True, eq=False)
class Shapes:
    """The arguments of an operation, as the profiler records them (``record_shapes=True``).

    Attributes:
        dims, strides: Sizes and strides by argument; lists of them for lists of tensors.
        types: Element types in C++'s words; ``Scalar`` and the like for what is no tensor.
        values: Arguments that are no tensors, as text.
    """

    dims: list[Any]
    strides: list[Any]
    types: list[str]
    values: list[Any]


@dataclass(slots=True, eq=False)
class HostEvent:
    """Something the host did on one thread: an operation, a named range, or a Python function.

    Attributes:
        kind: :data:`OP`, :data:`RANGE` or :data:`FRAME`.
        name: Its name.
        thread: Number of the thread, counted by first appearance.
        start_ns, end_ns: When.
        external: The number by which kernels refer to it; 0 without one.
        sequence: The autograd sequence number; -1 without one.
        forward_thread: Autograd's number of the thread that ran the forward operation; 0 in a forward pass.
        shapes: Its arguments, where recorded.
        parent: The innermost event it lies in.
    """

    kind: str
    name: str
    thread: int
    start_ns: int
    end_ns: int
    external: int = 0
    sequence: int = -1
    forward_thread: int = 0
    shapes: Shapes | None = None
    parent: HostEvent | None = None


@dataclass(slots=True, eq=False)
class Launch:
    """A call of the CUDA runtime or driver that started work on the GPU, or waited for it."""

    name: str
    thread: int
    start_ns: int
    end_ns: int
    correlation: int
    parent: HostEvent | None = None

    @property
    def waits(self) -> bool:
        """It makes the host wait for the GPU."""
        return _WAITING.search(self.name) is not None


@dataclass(slots=True, eq=False)
class Kernel:
    """Something that ran on the GPU.

    Attributes:
        kind: :data:`KERNEL`, :data:`COPY` or :data:`FILL`.
        name: The kernel's demangled name.
        start_ns, end_ns: When.
        device: Where.
        correlation: Number it shares with the call that launched it.
        external: Number of the host's event that launched it; 0 where the trace does not tell.
        moved_bytes: Of a copy or a fill; else 0.
        launch: The call that launched it; None where the trace does not have it.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int
    device: int
    correlation: int
    external: int = 0
    moved_bytes: int = 0
    launch: Launch | None = None

    @property
    def duration_ns(self) -> int:
        """From its start to its end."""
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Trace:
    """A run as the profiler saw it. Events are in the order of their start.

    Attributes:
        kernels: What ran on the GPU.
        launches: Calls that launched it, and calls that waited.
        events: What the host did, each event after the one it lies in.
        steps: Start and end of every step, where the trace marks them; else of everything.
        gpu: The product's name of the GPU, where the trace tells; else empty.
        has_shapes: Operations have their arguments.
    """

    kernels: list[Kernel]
    launches: list[Launch]
    events: list[HostEvent]
    steps: list[tuple[int, int]] = field(default_factory=list)
    gpu: str = ""
    has_shapes: bool = False


def read_trace(path: Path) -> Trace:
    """The trace in a file.

    Args:
        path: What ``torch.profiler`` exported: ``.json`` or ``.json.gz``.

    Raises:
        TilefitError: the file is no trace, or nothing in it ran on a GPU.
    """
    header: dict[str, Any] = {}
    try:
        trace = collect(read_events(path, header.__setitem__), header)
    except (KeyError, TypeError, ValueError) as error:
        raise TilefitError(
            f"an event is not as PyTorch's profiler writes it ({error!r})",
            where=str(path),
            hint="Name what torch.profiler's export_chrome_trace wrote.",
        ) from error
    if not trace.kernels:
        raise TilefitError(
            "nothing in this trace ran on a GPU",
            where=str(path),
            hint="Record it with ProfilerActivity.CUDA among the activities, on a machine with a GPU.",
        )
    return trace


def collect(events: Iterable[Event], header: dict[str, Any]) -> Trace:
    """The trace that these events of Chrome's format describe.

    Args:
        events: In any order.
        header: The other fields of the trace; may still be filled while the events are read.
    """
    kernels: list[Kernel] = []
    launches: dict[int, Launch] = {}
    waits: list[Launch] = []
    host: list[HostEvent] = []
    marks: list[tuple[int, int, int]] = []
    threads: dict[tuple[Any, Any], int] = {}
    known_shapes: dict[str, Shapes] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat", "")
        host_kind = _HOST.get(category)
        if host_kind is None and category not in _GPU and category not in _RUNTIME:
            continue
        start_ns = round(1000 * float(event["ts"]))
        end_ns = start_ns + round(1000 * float(event.get("dur", 0)))
        name = intern(event["name"])
        args = event.get("args") or {}
        if category in _GPU:
            kernels.append(_kernel(_GPU[category], name, start_ns, end_ns, event, args))
            continue
        thread = threads.setdefault((event.get("pid"), event.get("tid")), len(threads))
        if host_kind is None:
            correlation = args.get("correlation", 0)
            launch = Launch(name, thread, start_ns, end_ns, correlation)
            launches[correlation] = launch
            if launch.waits:
                waits.append(launch)
            continue
        step = _STEP.match(name)
        if step:
            marks.append((int(step[1]), start_ns, end_ns))
            continue
        made = HostEvent(host_kind, name, thread, start_ns, end_ns)
        if host_kind == OP:
            _note_arguments(made, args, known_shapes)
        host.append(made)
    kernels.sort(key=lambda kernel: kernel.start_ns)
    for kernel in kernels:
        kernel.launch = launches.get(kernel.correlation)
    launched = {kernel.correlation for kernel in kernels}
    kept = [launch for number, launch in launches.items() if number in launched]
    kept += [launch for launch in waits if launch.correlation not in launched]
    kept.sort(key=lambda launch: launch.start_ns)
    host.sort(key=lambda event: (event.start_ns, -event.end_ns))
    _nest(host, kept)
    steps = [(start, end) for _, start, end in sorted(marks)]
    return Trace(
        kernels, kept, host, steps or _whole(kernels, kept), _gpu_name(header, kernels), bool(known_shapes)
    )


def _kernel(kind: str, name: str, start_ns: int, end_ns: int, event: Event, args: dict[str, Any]) -> Kernel:
    device = int(args["device"] if "device" in args else event["pid"])
    numbers = args.get("correlation", 0), args.get("External id", 0), int(args.get("bytes", 0))
    return Kernel(kind, name, start_ns, end_ns, device, *numbers)


def _note_arguments(operation: HostEvent, args: dict[str, Any], known_shapes: dict[str, Shapes]) -> None:
    operation.external = args.get("External id", 0)
    operation.sequence = args.get("Sequence number", -1)
    operation.forward_thread = args.get("Fwd thread id", 0)
    if "Input Dims" in args:
        operation.shapes = _shapes(args, known_shapes)


def _shapes(args: dict[str, Any], known: dict[str, Shapes]) -> Shapes:
    """The arguments; the same object for the same arguments."""
    parts = [args["Input Dims"], args.get("Input Strides", []), args.get("Input type", [])]
    parts.append(args.get("Concrete Inputs", []))
    key = repr(parts)
    shapes = known.get(key)
    if shapes is None:
        known[key] = shapes = Shapes(*parts)
    return shapes


def _nest(events: list[HostEvent], launches: list[Launch]) -> None:
    """Find the innermost event that each event and each launch lies in."""
    open_: dict[int, list[HostEvent]] = {}
    waiting = iter(launches)
    launch = next(waiting, None)

    def innermost(thread: int, start_ns: int) -> HostEvent | None:
        stack = open_.setdefault(thread, [])
        # Only the start decides: ends are rounded, and a child's may lie behind its parent's.
        while stack and stack[-1].end_ns <= start_ns:
            stack.pop()
        return stack[-1] if stack else None

    for event in events:
        while launch is not None and launch.start_ns < event.start_ns:
            launch.parent = innermost(launch.thread, launch.start_ns)
            launch = next(waiting, None)
        event.parent = innermost(event.thread, event.start_ns)
        open_[event.thread].append(event)
    while launch is not None:
        launch.parent = innermost(launch.thread, launch.start_ns)
        launch = next(waiting, None)


def _whole(kernels: list[Kernel], launches: list[Launch]) -> list[tuple[int, int]]:
    """One step from the first event to the last."""
    if not kernels:
        return []
    starts = [kernels[0].start_ns] + ([launches[0].start_ns] if launches else [])
    return [(min(starts), max(kernel.end_ns for kernel in kernels))]


def _gpu_name(header: dict[str, Any], kernels: list[Kernel]) -> str:
    """The name of the GPU that ran the first kernel."""
    devices = header.get("deviceProperties") or header.get("computeProperties") or []
    used = kernels[0].device if kernels else 0
    return next((str(d.get("name", "")) for d in devices if d.get("id") == used), "")
