"""The constants of the model, per GPU: fitted where the GPU was measured, else those of its kind.

Every constant of :class:`Constants` and :class:`LinkConstants` lives here. ``benchmarks/public_tables.py``
fits the former and prints their errors; its recorded result stands beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from tilefit.cost.estimate import DATASHEET, ESTIMATED
from tilefit.cost.tables import toml
from tilefit.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Constants:
    """What the datasheet does not say about a GPU and its libraries.

    Attributes:
        kernel_clocks: Fixed time of one kernel in a running stream (not the host's launch), in clocks.
        split_s: Price of splitting a contraction over blocks: another kernel adds the parts up. On A100,
            H100, H200 and L40S, whose clocks are up to 1.8 times apart, it is 2.4 to 3.0 us.
        memory_efficiency: Share of the datasheet's bandwidth that is reached.
        write_weight: Bytes of C cost this much more than bytes read.
        math_efficiency: Share of the Tensor Cores' peak that large tiles reach.
        simt_efficiency: The same for the CUDA cores.
        small_tile_exponent: Smaller tiles lose ``(area / 32768) ** exponent``.
        prologue_bytes: Filling and draining a block's pipeline, in bytes of contraction.
        saturating_share: Share of the SMs that saturates the memory.
        overlap: How well math and memory overlap: their times add as a p-norm with this p.
        l2_bytes_per_clock_per_sm: Rate of the L2 cache.
        l2_share: Share of the L2's capacity in which data are still found when they are needed again.
        spread: Half-width of the 80 % interval of the time of an aligned fp16 or bf16 product, as a factor
            minus one.
        provenance: ``datasheet`` for the constants of a kind of GPU, ``estimated`` for fitted ones.
    """

    kernel_clocks: float
    split_s: float
    memory_efficiency: float
    write_weight: float
    math_efficiency: float
    simt_efficiency: float
    small_tile_exponent: float
    prologue_bytes: float
    saturating_share: float
    overlap: float
    l2_bytes_per_clock_per_sm: float = 24.0
    l2_share: float = 1 / 6
    spread: float = 0.30
    provenance: str = DATASHEET

    def kernel_s(self, gpu: Gpu) -> float:
        """Fixed time of one kernel."""
        return self.kernel_clocks / gpu.boost_clock_hz


_TABLES = toml("constants")
#: For a GPU of an architecture without a table.
GENERAL = Constants(**_TABLES["general"])
_ARCHITECTURES = {name: Constants(**facts) for name, facts in _TABLES["architectures"].items()}
#: GPUs whose own table was fitted, with the spread that remains.
_FITTED: dict[str, float] = _TABLES["fitted"]

#: Kinds of cards, and cards, that differ from others of their architecture.
CARDS: dict[str, dict[str, float]] = _TABLES["cards"]
#: With GDDR memory.
GDDR_CAPABILITIES = ((7, 5), (8, 6), (8, 9), (12, 0))
_FULL_RATE = 1024
#: Of GeForce cards. A choice: only what nothing can beat rests on it.
_GEFORCE_HEADROOM = 1.25


#: What a PCIe card of a GPU that SXM modules have too delivers at the same clock, with less power: NVIDIA's
#: A100 datasheet ("delivered performance for top apps"). Lambda's A100 PCIe took 1.08 times as long as SXM.
#: Products on CUDA cores, which take less power, lose nothing (NeuSight's A100 PCIe).
_PCIE_CLOCK = 0.9
_ALSO_SXM = ((8, 0), (9, 0))


def clock_share(gpu: Gpu) -> float:
    """Share of the clock that a card's power sustains in training, over that of the fastest of its kind."""
    return _PCIE_CLOCK if "PCIe" in gpu.title and gpu.compute_capability in _ALSO_SXM else 1.0


def clock_headroom(gpu: Gpu) -> float:
    """The highest clock over the datasheet's boost clock."""
    return _GEFORCE_HEADROOM if "GeForce" in gpu.title else 1.0


@lru_cache(maxsize=64)
def constants(gpu: Gpu) -> Constants:
    """The constants the model uses for a GPU: those of its architecture, or the general ones."""
    found = _ARCHITECTURES.get(gpu.architecture, GENERAL)
    if gpu.name in _FITTED:
        return replace(found, spread=_FITTED[gpu.name], provenance=ESTIMATED)
    if gpu.compute_capability in GDDR_CAPABILITIES:
        half_rate = gpu.flop_per_clock_per_sm["fp16"] < _FULL_RATE
        for kind in ("GDDR", gpu.name, "half rate" * half_rate, "GeForce" * ("GeForce" in gpu.title)):
            found = replace(found, **CARDS.get(kind, {}))  # type: ignore[arg-type]
    return replace(found, math_efficiency=found.math_efficiency * clock_share(gpu))


# --- links ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkConstants:
    """What the datasheet does not say about a link; :mod:`tilefit.cost.links` has the model.

    Latencies are in clocks of the GPU, shares are of the published bandwidth of one direction: both carry
    over to another generation. ``benchmarks/collectives.py`` fits them and records their errors.

    Attributes:
        start_clocks: Fixed time of a message of the low-latency protocol, in clocks of the GPU.
        hop_clocks: Time of one step of a ring.
        low_latency_share: Share of the bandwidth that the low-latency protocol reaches.
        bulk_clocks: Fixed time of a message of the other protocol.
        chunk_clocks: What filling its pipeline costs: ``c`` above.
        share: Share of the bandwidth that it reaches between many ranks.
        pair_loss: Of it ``pair_loss / ranks`` is lost where each rank copies its own part, too: gathering
            and scattering. Sending loses none.
        sum_loss: The same of all-reduces and all-to-alls.
        switch_share, switch_clocks: Bandwidth and fixed time where the switch sums up; 0: it does not.
        spread: Half-width of the 80 % interval as a share.
        provenance: ``datasheet`` for the constants of a kind of link, ``estimated`` for those fitted to this
            machine's.
    """

    start_clocks: float
    hop_clocks: float
    low_latency_share: float
    bulk_clocks: float
    chunk_clocks: float
    share: float
    pair_loss: float
    sum_loss: float = 0.0
    switch_share: float = 0.0
    switch_clocks: float = 0.0
    spread: float = 0.3
    provenance: str = DATASHEET


#: By the kind of link.
FITTED_LINKS = {name: LinkConstants(**facts) for name, facts in _TABLES["links"].items()}
#: GeForce cards of the 30 series and later: copies go through the host's memory.
_NO_PEER_ACCESS = re.compile(r"GeForce RTX [345]0")


def link_constants(gpu: Gpu) -> LinkConstants:
    """The constants of the kind of link that a GPU has."""
    link = gpu.link
    if not link.startswith("NVLink"):
        link = "PCIe without peers" if _NO_PEER_ACCESS.search(gpu.title) else "PCIe"
    return FITTED_LINKS[_TABLES["nearest_link"].get(link, link)]
