"""What GPUs are joined by, and how long they take to exchange bytes over it.

A message takes the faster of two protocols. The low-latency one sends its flags with the data: little to
start, part of the bandwidth. The other sends chunks through a pipeline: with the best size of chunk a message
of ``w`` bytes takes ``(sqrt(w / B) + sqrt(c))**2``, so that its bandwidth rises slowly with its size (Chan
and others, "Collective communication: theory, practice, and experience", 2007). All-reduces of a whole
switched machine may be summed up in the switch (NVLink SHARP).

``tilefit calibrate --collectives`` fits the constants to a machine's GPUs; those of others are in
:mod:`tilefit.cost.constants`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil, log2, sqrt

from tilefit.cost.constants import LinkConstants, link_constants
from tilefit.cost.priced import PricedGpu
from tilefit.cost.tables import toml
from tilefit.errors import UsageError, near
from tilefit.gpus import Gpu
from tilefit.ops.collective import ALL_REDUCE, ALL_TO_ALL, SEND, ring_bytes
from tilefit.options import MOST_LINKED

#: Share of the multiprocessors that NCCL's kernels take from what runs beside them: computation was 5 to 8 ms
#: longer for 29 to 34 ms of hidden messages (Llama-1B under DDP and FSDP2 on 2 H200).
TAKEN = 0.2


@dataclass(frozen=True, slots=True)
class Network:
    """What joins machines.

    Attributes:
        name: As it is asked for.
        cards: Network cards of a machine.
        card_bytes_per_s: Bandwidth of one of them, one direction.
        start_s: Fixed time of a message between machines.
        hop_s: Time of one step of a ring or tree that crosses machines.
        share: Share of the bandwidth that is reached.
        chunk_s: What filling the pipeline costs.
    """

    name: str
    cards: int
    card_bytes_per_s: float
    start_s: float = 12e-6
    hop_s: float = 5e-6
    share: float = 0.9
    chunk_s: float = 10e-6

    @property
    def machine_bytes_per_s(self) -> float:
        """Bandwidth of a machine that is reached, one direction."""
        return self.cards * self.card_bytes_per_s * self.share


_GBIT = 1e9 / 8
NETWORKS = {name: Network(name, **facts) for name, facts in toml("constants")["networks"].items()}
#: Element types that NVLink's switches sum up.
SUMMED = ("fp16", "bf16", "fp32")
_CARDS = re.compile(r"(\d{1,2})x(\d{1,4})")


def network(name: str) -> Network:
    """A network by its name, or by cards and Gbit/s each (``8x400``).

    Raises:
        UsageError: it is neither.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    if (match := _CARDS.fullmatch(name)) and int(match[1]) and int(match[2]):
        return Network(name, int(match[1]), int(match[2]) * _GBIT)
    known = f"Use one of {', '.join(NETWORKS)}; or the cards of a machine and their Gbit/s, such as 8x400."
    raise UsageError(f"unknown network {name!r}", hint=near(name, NETWORKS, known))


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that exchange bytes.

    Attributes:
        ranks: How many.
        per_machine: Of them in one machine.
    """

    ranks: int
    per_machine: int

    @property
    def machines(self) -> int:
        """How many machines they are in."""
        return ceil(self.ranks / self.per_machine)


@dataclass(frozen=True, slots=True)
class Fabric:
    """Machines of GPUs.

    Attributes:
        gpu: The GPU.
        per_machine: GPUs of a machine.
        network: What joins the machines; None where there is one.
        constants: Of the GPU's link; None for those that are known.
    """

    gpu: Gpu
    per_machine: int = MOST_LINKED
    network: Network | None = None
    constants: LinkConstants | None = None

    @property
    def link(self) -> LinkConstants:
        """The constants of the GPU's link: measured on the user's machine, else those of its kind."""
        measured = self.gpu.calibration.links if isinstance(self.gpu, PricedGpu) else None
        return self.constants or measured or link_constants(self.gpu)

    def reaches(self, group: Group) -> bool:
        """Whether anything is known of what joins them."""
        inside = group.per_machine < 2 or bool(self.gpu.link_bandwidth_bytes_per_s)
        return inside and (group.machines < 2 or self.network is not None)

    def group(self, ranks: int, stride: int = 1) -> Group:
        """``ranks`` GPUs, each ``stride`` GPUs after the one before, counted through the machines."""
        return Group(ranks, max(1, min(ranks, self.per_machine // stride)))

    def time_s(self, function: str, size_bytes: float, group: Group, *, sums: bool = True) -> float:
        """How long a collective takes, the GPUs doing nothing else.

        All groups of a machine communicate at once, as those of a split do: a group has its GPUs' share of
        the network cards.

        Args:
            function: One of :data:`tilefit.ops.collective.FUNCTIONS`.
            size_bytes: Of the tensor; where each GPU has a part of it, of all parts.
            group: Who takes part.
            sums: The element type is one of :data:`SUMMED`.

        Returns:
            Seconds; infinity where nothing joins them.
        """
        if group.ranks < 2 or size_bytes <= 0:
            return 0.0
        if not self.reaches(group):
            return float("inf")
        wire = ring_bytes(function, size_bytes, group.ranks)
        if group.machines > 1:
            return self._across_s(function, wire, group)
        return self._inside_s(function, wire, group.ranks, sums)

    def _inside_s(self, function: str, wire: float, ranks: int, sums: bool) -> float:
        """Within a machine; ``wire`` are the bytes that each GPU sends."""
        link, clock_s = self.link, 1 / self.gpu.boost_clock_hz
        bandwidth = self.gpu.link_bandwidth_bytes_per_s / 2
        hops_s = _hops(function, ranks) * link.hop_clocks * clock_s
        low_s = link.start_clocks * clock_s + hops_s + wire / (bandwidth * link.low_latency_share)
        bulk_s = link.bulk_clocks * clock_s + hops_s
        moved_s = wire / (bandwidth * link.share * (1 - _loss(link, function) / ranks))
        bulk_s += moved_s + 2 * sqrt(moved_s * link.chunk_clocks * clock_s)
        # Around the size where one protocol gives way to the other, the library chooses well.
        time_s: float = (low_s**-8 + bulk_s**-8) ** (-1 / 8)
        if link.switch_share and sums and function == ALL_REDUCE and ranks == MOST_LINKED:
            summed_s = link.switch_clocks * clock_s + wire / (bandwidth * link.switch_share)
            time_s = min(time_s, summed_s)
        return time_s

    def _across_s(self, function: str, wire: float, group: Group) -> float:
        """Between machines: every ring crosses each machine's border once, over its share of the cards."""
        net = self.network
        assert net is not None
        ours = net.machine_bytes_per_s * min(1.0, group.per_machine / self.per_machine)
        if function == SEND:
            ours = min(ours, net.machine_bytes_per_s / self.per_machine)
        if function == ALL_TO_ALL:
            # Each GPU has its own share of the cards, and what stays inside takes the link.
            outside = (group.ranks - group.per_machine) / (group.ranks - 1)
            time_s = net.start_s + wire * outside / (ours / group.per_machine)
            return time_s + net.hop_s * log2(group.machines)
        link, clock_s = self.link, 1 / self.gpu.boost_clock_hz
        if group.per_machine > 1:
            inside = self.gpu.link_bandwidth_bytes_per_s / 2 * link.share
            ours = min(ours, inside * (1 - link.pair_loss / group.per_machine))
        moved_s = wire / ours
        hop_s = link.hop_clocks * clock_s
        start_s = _hops(function, group.ranks) * net.hop_s  # of every step some message crosses
        if function == ALL_REDUCE:  # a tree of machines takes fewer steps
            tree_s = 2 * (ceil(log2(group.machines)) * net.hop_s + (group.per_machine - 1) * hop_s)
            start_s = min(start_s, tree_s)
        return net.start_s + start_s + moved_s + 2 * sqrt(moved_s * net.chunk_s)


def _loss(link: LinkConstants, function: str) -> float:
    """What is lost between two ranks, over that between many."""
    if function == SEND:
        return 0.0
    return link.sum_loss if function in (ALL_REDUCE, ALL_TO_ALL) else link.pair_loss


def _hops(function: str, ranks: int) -> int:
    """Steps that follow each other: of a ring, or of pairs that all exchange at once."""
    if function in (SEND, ALL_TO_ALL):
        return 1
    return (2 if function == ALL_REDUCE else 1) * (ranks - 1)
