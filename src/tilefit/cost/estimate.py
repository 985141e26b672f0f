"""The predicted time of an operation, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MATH = "math"
MEMORY = "memory"
LATENCY = "latency"
#: What limits an operation.
BOUNDS = (MATH, MEMORY, LATENCY)

DATASHEET = "datasheet"
TRANSFERRED = "transferred"
ESTIMATED = "estimated"
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted GPU time of one operation on one GPU, without the host's launch time.

    Operands are taken not to lie in the L2 cache beforehand, where the times the model was fitted to say so
    (the calibrated stage).

    Attributes:
        time_s: The prediction.
        low_s, high_s: An interval that should hold the truth in 80 % of cases.
        bound: ``math``, ``memory`` or ``latency``.
        math_s: Time the arithmetic alone would take, tile and wave quantization included.
        memory_s: Time the memory traffic alone would take.
        kernel_family: What the library would run: ``sm90`` (TMA and wgmma), ``sm80`` (a misaligned GEMM on
            Hopper, or the normal case on Ampere), ``simt`` (no Tensor Cores), ``flash``, ``streaming``, …
        tile: Output tile (rows of C, columns of C); None where there is none.
        waves: Tiles over the number that run at once; None without tiles.
        provenance: ``measured`` (a table of this GPU), ``estimated`` (a model fitted to measurements of this
            GPU) or ``datasheet`` (nothing of this GPU was measured).
        reason: One sentence saying why, for explanations.
        odds: What networks say of a product's kernel: the share of each family, what to expect of the
            logarithms of the tile's sides, the shares of the likeliest tile and of those without a name, and
            how far off they may be.
    """

    time_s: float
    low_s: float
    high_s: float
    bound: str
    math_s: float = 0.0
    memory_s: float = 0.0
    kernel_family: str = ""
    tile: tuple[int, int] | None = None
    waves: float | None = None
    provenance: str = DATASHEET
    reason: str = ""
    odds: tuple[float, ...] = field(default=(), repr=False)

    def each(self, change: Callable[[float], float], **facts: Any) -> Estimate:
        """With the time and both ends of its interval changed alike, and these fields."""
        time_s, low_s, high_s = map(change, (self.time_s, self.low_s, self.high_s))
        return replace(self, time_s=time_s, low_s=low_s, high_s=high_s, **facts)

    def within(self, time_s: float, spread: float, floor: float = 0.0, **facts: Any) -> Estimate:
        """With another time, an interval of this half-width, as a factor minus one, and these fields."""
        low_s, high_s = max(time_s / (1 + spread), floor), time_s * (1 + spread)
        return replace(self, time_s=time_s, low_s=low_s, high_s=high_s, **facts)


#: The host's launches are what a step waits for; a bound of a step, never of one operation.
LAUNCH = "launch"
#: The queue runs empty where the program waits, and copies between host and GPU: a bound of a program's step.
WAITS = "waits"
#: Ranks exchange what the step waits for: a bound of a program's step.
EXPOSED = "communication"


def bound(math_s: float, memory_s: float, time_s: float, busy_s: float | None = None) -> str:
    """What limits an operation that takes so long, of which arithmetic and traffic alone would take this, and
    all but what is fixed ``busy_s``: by default the larger of them."""
    if (max(math_s, memory_s) if busy_s is None else busy_s) < time_s / 2:
        return LATENCY
    return MATH if math_s >= memory_s else MEMORY


@dataclass(slots=True)
class Span:
    """What a stream does for a time.

    Attributes:
        stream: Its number.
        start_s, end_s: From the beginning of the step.
        index: Of the operation, or of the exchange.
        exchange: It is a collective.
    """

    stream: int
    start_s: float
    end_s: float
    index: int
    exchange: bool = False


@dataclass(slots=True)
class Streams:
    """A step as its streams run it.

    Attributes:
        time_s: Of one step among others.
        exchange_s: Of each collective.
        exposed_s: Of it, what the stream that computes waits for, and nothing hides; of each collective.
        late_s: Of that, what is waited for because another rank is not there yet: in a pipeline its bubbles.
        slowed_s: By how much collectives beside it make the computation longer.
        busy_s: GPU time of the operations of each rank that was gone through, this one's first.
        unmet: Exchanges of ranks that do not fit each other, which begin without who is missing.
        aside: Operations that run on other streams than that, by their index.
        spans: What each stream does when.
    """

    time_s: float = 0.0
    exchange_s: tuple[float, ...] = ()
    exposed_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    slowed_s: float = 0.0
    busy_s: tuple[float, ...] = ()
    unmet: int = 0
    aside: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Predicted time of a step on one GPU.

    Attributes:
        ops: Estimates, aligned with ``Step.ops``.
        time_s: Wall time: the host launching against the GPU executing, and what the program's waits add.
        low_s, high_s: An interval that should hold the truth in 80 % of cases.
        gpu_time_s: Sum of the operations' GPU times.
        host_time_s: Sum of the host's launch times, and of its calls that wait or copy: the time if the GPU
            were infinitely fast.
        flop: Floating-point operations.
        bound_time_s: Wall time by what limits it: ``math``, ``memory``, ``latency`` (GPU times of the
            operations with that bound; the last also what the GPU idles between kernels), ``launch`` (the
            GPU waits for the host) and, where they meet within the step, ``waits`` (its queue is empty
            because the host waited, or a copy runs) and ``communication`` (of several ranks, what nothing
            hides). Sums to ``time_s``.
        streams: Of a program of several streams or ranks, how they run it.
        host_spread: The host's part may be so many times as much, or as little (80 %).
    """

    ops: tuple[Estimate, ...]
    time_s: float
    low_s: float
    high_s: float
    gpu_time_s: float
    host_time_s: float
    flop: int
    bound_time_s: Mapping[str, float]
    streams: Streams | None = None
    host_spread: float = 1.0

    @property
    def launch_share(self) -> float:
        """The share of the step that the GPU waits for the host's launches."""
        return self.bound_time_s.get(LAUNCH, 0.0) / self.time_s if self.time_s else 0.0

    @property
    def provenance(self) -> str:
        """What most of the GPU time rests on; empty for a step without operations."""
        time_s: dict[str, float] = {}
        for each in self.ops:
            time_s[each.provenance] = time_s.get(each.provenance, 0.0) + each.time_s
        return max(time_s, key=lambda name: time_s[name], default="")
