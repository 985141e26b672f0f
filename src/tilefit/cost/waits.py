"""What it costs that a program waits for the GPU: its queue runs empty, and fills again one launch at a time.

Between two waits the host launches ahead of the GPU; at a wait it stands until the GPU has done all that it
was given, and the GPU then stands until the next launch. Two clocks, the host's and the GPU's, go over the
operations and :class:`events <tilefit.ops.HostEvent>` in order, step after step. After a wait both show the
same time, whatever was before: one round from a wait to the same wait of the next step is the time of every
step. Without a wait the slower of the two sets the pace.

A copy runs in the order of its stream, so the GPU does nothing else meanwhile. One that blocks makes the host
wait for it, and for all before it, too (PyTorch, ``at::cuda::memcpy_and_sync``; CUDA Runtime API, "API
synchronization behavior": a copy from pageable memory begins with a synchronization of the stream).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from tilefit.cost.launch import FORWARD_S
from tilefit.gpus import Gpu
from tilefit.ops import HostEvent, Program

#: What the slot of a GPU delivers in one direction: 16 lanes of PCIe 3.0, 4.0 and 5.0 (PCI-SIG: 8, 16 and
#: 32 GT/s, 128 of 130 bits are data), and NVLink-C2C of a GH200 (its datasheet: 900 GB/s, both directions).
_PCIE_3, _PCIE_4, _PCIE_5, _C2C = 15.75e9, 31.5e9, 63e9, 450e9
_SLOTS = {"pascal": _PCIE_3, "volta": _PCIE_3, "turing": _PCIE_3, "ampere": _PCIE_4, "ada": _PCIE_4}
#: The part of it that copies from page-locked memory reach: 12 GB/s of PCIe 3.0 (NVIDIA, "CUDA C++ Best
#: Practices Guide", pinned memory).
_PINNED = 12e9 / _PCIE_3
#: What copies from pageable memory reach of that, which the driver copies to page-locked memory first: 2.3
#: GB/s of 5.7 GB/s (NVIDIA, "How to Optimize Data Transfers in CUDA C/C++"). Not measured on newer hosts.
_PAGEABLE = 2.3 / 5.7


#: Seconds that one element takes on one core, in operations on tensors of the host's: random numbers, and
#: what passes over memory (``benchmarks/host_parts.py --own``).
_ELEMENT_S = {
    "randn": 3.4e-9, "normal": 3.4e-9, "rand": 2.9e-9, "uniform": 2.9e-9, "randint": 2.6e-9,
    "random": 2.6e-9, "randperm": 20e-9, "bernoulli": 12e-9,
}  # fmt: skip
_PASSED_S = 0.4e-9


class _Action(NamedTuple):
    """What the host does next: its time, the GPU's time for it, and whether the host waits for that."""

    host_s: float
    gpu_s: float
    waits: bool


def copy_s(event: HostEvent, gpu: Gpu) -> float:
    """Time of a copy between host and GPU; 0 where nothing is copied."""
    return event.bytes / (host_bytes_per_s(gpu) * (1.0 if event.pinned else _PAGEABLE))


def host_bytes_per_s(gpu: Gpu) -> float:
    """Rate of copies between the GPU and page-locked memory of the host, in one direction."""
    link = _C2C if gpu.name.startswith("gh200") else _SLOTS.get(gpu.architecture, _PCIE_5)
    return link * _PINNED


def launches_block(program: Program) -> bool:
    """Whether the host waits for each operation."""
    return any(habit.name == "launch_blocking" for habit in program.habits)


def call_s(program: Program | None, scale: float) -> float:
    """Host time of all calls that wait or copy: each takes what a launch takes."""
    return scale * FORWARD_S * len(program.events) if program else 0.0


def own_work_s(program: Program | None) -> float:
    """What the program does on tensors of the host's, on the stated host."""
    work = program.host_work if program else ()
    return sum(_ELEMENT_S.get(name, _PASSED_S) * elements for name, elements in work)


def paced_s(
    program: Program, launches_s: Sequence[float], times_s: Sequence[float], gpu: Gpu, scale: float
) -> float:
    """Time of one step among others; 0 where nothing is copied or waited for.

    Args:
        program: What waits, and where.
        launches_s: Host time of each operation, in order; the first one's with all that comes before it.
        times_s: GPU time of each operation.
        gpu: The GPU.
        scale: Host time over what :mod:`tilefit.cost.launch` states.
    """
    actions = list(_actions(program, launches_s, times_s, gpu, scale))
    if not program.events and not any(action.waits for action in actions):
        return 0.0
    last = max((index for index, action in enumerate(actions) if action.waits), default=None)
    if last is None:
        return max(sum(action.host_s for action in actions), sum(action.gpu_s for action in actions))
    host_s = gpu_s = 0.0
    for action in (*actions[last + 1 :], *actions[: last + 1]):
        host_s += action.host_s
        gpu_s = max(host_s, gpu_s) + action.gpu_s
        if action.waits:
            host_s = gpu_s
    return host_s


def _actions(
    program: Program, launches_s: Sequence[float], times_s: Sequence[float], gpu: Gpu, scale: float
) -> Iterator[_Action]:
    blocking = launches_block(program)
    count = len(launches_s)
    events = sorted(program.events, key=lambda event: event.index)
    at = {index: list(same) for index, same in groupby(events, lambda event: min(event.index, count))}
    for index in range(count + 1):
        for event in at.get(index, ()):
            yield _Action(scale * FORWARD_S, copy_s(event, gpu), event.blocks)
        if index < count:
            yield _Action(launches_s[index], times_s[index], blocking)
