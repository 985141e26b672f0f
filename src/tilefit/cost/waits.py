"""What a program does with the host beside launching: copies to and from the GPU, and work of its own.

A copy runs in the order of its stream, so the GPU does nothing else meanwhile. One that blocks makes the host
wait for it, and for all before it, too (PyTorch, ``at::cuda::memcpy_and_sync``; CUDA Runtime API, "API
synchronization behavior": a copy from pageable memory begins with a synchronization of the stream).
:mod:`tilefit.cost.streams` tells what that costs.
"""

from __future__ import annotations

from tilefit.gpus import Gpu
from tilefit.ops import HostEvent, Program

#: What the slot of a GPU delivers in one direction: 16 lanes of PCIe 3.0, 4.0 and 5.0 (PCI-SIG: 8, 16 and
#: 32 GT/s, 128 of 130 bits are data), and NVLink-C2C (datasheets: 900 GB/s in both directions, of a GH200,
#: and of the two GPUs of a GB200 or GB300 together).
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9
_C2C = {"gh200": 450e9, "gb200": 225e9, "gb300": 225e9}
_SLOTS = {"pascal": _PCIE_3, "volta": _PCIE_3, "turing": _PCIE_3, "ampere": _PCIE_4, "ada": _PCIE_4}
#: The memory of hosts with two sockets, by channels, rate and 8 bytes: eight of DDR5-4800 (DGX H100) and of
#: DDR4-3200 (DGX A100), six of DDR4-2666 (DGX-2); and Grace's LPDDR5X (datasheet), of a GH200's or a GB200's.
_DDR5, _DDR4, _DDR4_2666, _LPDDR5X = 614e9, 410e9, 256e9, 512e9
_MEMORY = {
    **dict.fromkeys(("gh200", "gb200", "gb300"), _LPDDR5X),
    **dict.fromkeys(("ampere", "ada"), _DDR4),
    **dict.fromkeys(("turing", "volta", "pascal"), _DDR4_2666),
}
#: The part of it that copies from page-locked memory reach: 12 GB/s of PCIe 3.0 (NVIDIA, "CUDA C++ Best
#: Practices Guide", pinned memory), 55.4 GB/s of PCIe 5.0 (an H100, ``benchmarks/memory_choices.py``).
_PINNED, _PINNED_5 = 12e9 / _PCIE_3, 55.4e9 / _PCIE_5
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


def copy_s(event: HostEvent, gpu: Gpu) -> float:
    """Time of a copy between host and GPU; 0 where nothing is copied."""
    return event.bytes / (host_bytes_per_s(gpu) * (1.0 if event.pinned else _PAGEABLE))


def host_bytes_per_s(gpu: Gpu) -> float:
    """Rate of copies between the GPU and page-locked memory of the host, in one direction."""
    link = _C2C.get(gpu.name.partition("-")[0], _SLOTS.get(gpu.architecture, _PCIE_5))
    return link * (_PINNED_5 if link == _PCIE_5 else _PINNED)


def host_memory_bytes_per_s(gpu: Gpu) -> float:
    """Rate of the memory of a host that such a GPU is found in, for all of its GPUs."""
    return _MEMORY.get(gpu.name.partition("-")[0], _MEMORY.get(gpu.architecture, _DDR5))


def launches_block(program: Program) -> bool:
    """Whether the host waits for each operation."""
    return any(habit.name == "launch_blocking" for habit in program.habits)


def own_work_s(program: Program | None) -> float:
    """What the program does on tensors of the host's, on the stated host."""
    work = program.host_work if program else ()
    return sum(_ELEMENT_S.get(name, _PASSED_S) * elements for name, elements in work)
