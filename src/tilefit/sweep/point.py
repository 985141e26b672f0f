"""One point of a sweep, and which points are worth having."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tilefit.cost import MEASURED
from tilefit.sweep.axes import SAME_MODEL, Value


@dataclass(frozen=True, slots=True)
class Point:
    """The step at one point of the grid, predicted or measured.

    Attributes:
        at: The value of every axis.
        gpu: Short name of the GPU.
        time_s, low_s, high_s: Wall time of the step, and its interval: the 80 % interval of a prediction, the
            20th and 80th percentile of measured steps. Of a split step, of the whole of it.
        samples: Samples of a step, all replicas together; 0 where unknown.
        items: Samples, or tokens where the sequence varies.
        flop: Floating-point operations of matrix products, convolutions, attention and recurrence on one GPU.
        gpus: How many GPUs work on the step.
        memory_bytes: The most that one GPU holds at once.
        fits: The GPU's memory holds it.
        provenance: What the time rests on: ``datasheet``, ``estimated`` or ``measured``.
        predicted_s: Of a measured point, what was predicted.
        notes: What a reader must know: how it was captured, or that a split pads, for instance.
        error: Why there is no step here; then all numbers are 0.
    """

    at: Mapping[str, Value]
    gpu: str
    time_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    samples: int = 0
    items: int = 0
    flop: int = 0
    gpus: int = 1
    memory_bytes: int = 0
    fits: bool = True
    provenance: str = ""
    predicted_s: float = 0.0
    notes: tuple[str, ...] = field(default=())
    error: str = ""

    @property
    def runs(self) -> bool:
        """There is such a step, and the GPU's memory holds it."""
        return self.fits and not self.error

    @property
    def items_per_s(self) -> float:
        """Samples or tokens per second, of all GPUs together."""
        return self.items / self.time_s if self.time_s else 0.0

    @property
    def flop_per_s(self) -> float:
        """Floating-point operations per second, of one GPU."""
        return self.flop / self.time_s if self.time_s else 0.0

    @property
    def items_per_s_per_gpu(self) -> float:
        """What a GPU buys: throughput is compared by it, so that more GPUs alone are no better."""
        return self.items_per_s / self.gpus

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; rates are included."""
        data = asdict(self)
        if self.error:
            return {"at": data["at"], "gpu": self.gpu, "error": self.error}
        del data["error"]
        return {**data, "items_per_s": self.items_per_s, "flop_per_s": self.flop_per_s}


def model_of(point: Point) -> Hashable:
    """Points with the same one do the same work for a sample on GPUs of the same kind: they compete."""
    return (point.gpu, *(item for item in point.at.items() if item[0] not in {*SAME_MODEL, "gpu"}))


def compares_models(points: Iterable[Point]) -> bool:
    """Whether the points are of several models, so that a sample is not the same work everywhere."""
    return len({model_of(replace(point, gpu="")) for point in points}) > 1


def frontier(points: Iterable[Point], cost: Callable[[Point], float]) -> list[Point]:
    """The points that no other beats: each costs more than any before it and has a higher throughput per GPU.

    Among points of the same model on the same kind of GPU. Without those that do not run or whose samples
    are unknown.

    Args:
        points: Of one sweep.
        cost: What to spend little of, such as the time of a step.

    Returns:
        By model, then by increasing cost.
    """
    models: dict[Hashable, list[Point]] = {}
    for point in points:
        if point.runs and point.items:
            models.setdefault(model_of(point), []).append(point)
    found = []
    for competing in models.values():
        best = 0.0
        for point in sorted(competing, key=lambda each: (cost(each), -each.items_per_s_per_gpu)):
            if point.items_per_s_per_gpu > best:
                found.append(point)
                best = point.items_per_s_per_gpu
    return found


def by_latency(points: Iterable[Point]) -> list[Point]:
    """The efficient frontier of throughput against the time of a step."""
    return frontier(points, lambda point: point.time_s)


def by_memory(points: Iterable[Point]) -> list[Point]:
    """The efficient frontier of throughput against the memory that a GPU needs."""
    return frontier(points, lambda point: point.memory_bytes)


def best(points: Sequence[Point]) -> Point | None:
    """The highest throughput per GPU; of FLOPs where samples are unknown, or the models differ.

    None where no point runs.
    """
    running = [point for point in points if point.runs]
    # What was measured is known better than what was not.
    running = [point for point in running if point.provenance == MEASURED] or running
    if compares_models(running):
        return max(running, key=lambda point: point.flop_per_s, default=None)
    return max(running, key=lambda point: (point.items_per_s_per_gpu, point.flop_per_s), default=None)
