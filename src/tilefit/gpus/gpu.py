"""The facts of one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device's facts. Peaks are dense, never sparse, and derived, never copied.

    Attributes:
        name: The short name users type, such as ``h200``.
        title: The product's name, such as ``NVIDIA H200 SXM``.
        architecture: ``pascal``, ``volta``, ``turing``, ``ampere``, ``ada``, ``hopper``, ``blackwell``.
        compute_capability: Such as ``(9, 0)``.
        sms: Streaming multiprocessors.
        boost_clock_hz: Clock the datasheet's peaks are computed with; of the Tensor Cores' where it uses two.
        flop_per_clock_per_sm: By element type (``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``, ``int8``,
            ``fp64``): dense, a multiply-add counted as two, accumulated in fp32 as PyTorch does. A type the
            GPU lacks is absent.
        memory_bytes: Memory capacity as the product is sold, in binary gigabytes; the driver keeps some, and
            error correction on GDDR6 takes a sixteenth where it is on.
        memory_bandwidth_bytes_per_s: Bus width x data rate.
        l2_bytes: L2 cache.
        shared_memory_bytes_per_sm: The most one SM offers.
        memory_bus_width_bits: Pins of the memory interface.
        memory_data_rate_bits_per_s: Of one pin.
        link: The link to other GPUs of the same machine, such as ``NVLink 4``; where NVLink joins pairs only,
            the PCIe slot; empty where unknown.
        link_bandwidth_bytes_per_s: Its published bandwidth, both directions together; 0 where unknown.
        clock_hz_by_dtype: Clock of the types whose published peak is not at ``boost_clock_hz``: NVIDIA states
            Hopper's fp32 and fp64 at a higher clock than its other Tensor Core types.
        datasheet_peak_flop_per_s: The published dense peaks by element type; for comparison, nothing is
            computed from them.
        datasheet_bandwidth_bytes_per_s: The published memory bandwidth; for comparison.
        sources: Where each number is from, by field name.
        lacks: What its libraries are too old for, as :func:`tilefit.cost.priced.with_libraries` names it: not
            a fact of the device, but of what runs on it.
    """

    name: str
    title: str
    architecture: str
    compute_capability: tuple[int, int]
    sms: int
    boost_clock_hz: float
    flop_per_clock_per_sm: Mapping[str, int]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    l2_bytes: int
    shared_memory_bytes_per_sm: int
    memory_bus_width_bits: int = 0
    memory_data_rate_bits_per_s: float = 0.0
    link: str = ""
    link_bandwidth_bytes_per_s: float = 0.0
    clock_hz_by_dtype: Mapping[str, float] = field(default_factory=dict)
    datasheet_peak_flop_per_s: Mapping[str, float] = field(default_factory=dict)
    datasheet_bandwidth_bytes_per_s: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    lacks: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return hash(self.name)

    def peak_flop_per_s(self, dtype: str) -> float:
        """Dense peak of an element type; of fp32 where the GPU has no faster path for it.

        fp16 and bf16 without Tensor Cores, int64 and other types fall to the fp32 pipelines.
        """
        if dtype not in self.flop_per_clock_per_sm:
            dtype = "fp32"
        clock_hz = self.clock_hz_by_dtype.get(dtype, self.boost_clock_hz)
        return self.sms * clock_hz * self.flop_per_clock_per_sm[dtype]

    def ops_per_byte(self, dtype: str) -> float:
        """The arithmetic intensity at which math and memory take the same time."""
        return self.peak_flop_per_s(dtype) / self.memory_bandwidth_bytes_per_s

    def supports(self, dtype: str) -> bool:
        """Whether the GPU multiplies this element type on its fast path."""
        return dtype in self.flop_per_clock_per_sm
