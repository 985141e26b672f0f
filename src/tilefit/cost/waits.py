"""What a program does with the host beside launching: copies to and from the GPU, and work of its own.

A copy runs in the order of its stream, so the GPU does nothing else meanwhile. One that blocks makes the host
wait for it, and for all before it, too (PyTorch, ``at::cuda::memcpy_and_sync``; CUDA Runtime API, "API
synchronization behavior": a copy from pageable memory begins with a synchronization of the stream).
:mod:`tilefit.cost.streams` tells what that costs.
"""

from __future__ import annotations

from tilefit.cost.tables import toml
from tilefit.gpus import Gpu
from tilefit.ops import HostEvent, Program

_TABLES = toml("constants")
#: What copies from pageable memory reach of that, which the driver copies to page-locked memory first: 2.3
#: GB/s of 5.7 GB/s (NVIDIA, "How to Optimize Data Transfers in CUDA C/C++"). Not measured on newer hosts.
_PAGEABLE = 2.3 / 5.7


def copy_s(event: HostEvent, gpu: Gpu) -> float:
    """Time of a copy between host and GPU; 0 where nothing is copied."""
    return event.bytes and event.bytes / (host_bytes_per_s(gpu) * (1.0 if event.pinned else _PAGEABLE))


def _host(gpu: Gpu) -> dict[str, float]:
    """What is known of a host that such a GPU is found in."""
    hosts: dict[str, dict[str, float]] = _TABLES["hosts"]
    return hosts.get(gpu.name.partition("-")[0]) or hosts.get(gpu.architecture) or hosts["newest"]


def host_bytes_per_s(gpu: Gpu) -> float:
    """Rate of copies between the GPU and page-locked memory of the host, in one direction."""
    host = _host(gpu)
    return host["slot"] * host["pinned"]


def host_memory_bytes_per_s(gpu: Gpu) -> float:
    """Rate of the memory of a host that such a GPU is found in, for all of its GPUs."""
    return _host(gpu)["memory"]


def launches_block(program: Program) -> bool:
    """Whether the host waits for each operation."""
    return any(habit.name == "launch_blocking" for habit in program.habits)


def own_work_s(program: Program) -> float:
    """What the program does on tensors of the host's, on the stated host."""
    each_s: dict[str, float] = _TABLES["host_elements"]
    return sum(each_s.get(name, each_s["other"]) * elements for name, elements in program.host_work)
