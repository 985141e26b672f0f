"""Fit the cost model to a GPU that nobody has measured, in a few minutes.

Of products first those that show the ceilings; then, of products, streaming operations, convolutions and
attention in turn, random ones for as long as there is time: measuring one takes no longer than choosing it
would. The constants of the model's first stage are fitted to the first products. At the end an ensemble of
small networks is fitted to everything, as a correction of what ships for the GPU: a few minutes tell how it
differs from one that was measured for hours, not what that took to learn. One family of shapes in six is
never fitted to. On half of these it is decided how much of what the networks say is kept, which may be
nothing: what ships stays where it is better. On the other half the errors are stated; the intervals are taken
from both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from math import log2
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import Calibration, Network, fingerprint, on_analytic
from tilefit.cost.constants import Constants, constants
from tilefit.cost.estimate import ESTIMATED, Estimate
from tilefit.cost.features import domain
from tilefit.cost.kernels import select
from tilefit.cost.model import by_stages
from tilefit.cost.priced import PricedGpu, basis
from tilefit.cost.streaming import traffic
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.measure import streaming, suites
from tilefit.measure.environment import now
from tilefit.measure.fitting import Measured, fit
from tilefit.measure.microbenchmarks import instance
from tilefit.measure.networks import train
from tilefit.measure.pool import Pool
from tilefit.ops import Attention, Conv, Gemm, Op, Streaming
from tilefit.ops.dtypes import ALIGNMENT_BYTES
from tilefit.ops.streaming import multi_tensor_launches
from tilefit.version import __version__

Call = Callable[[], object]

#: What is measured, in this order, and its share of the time.
SHARES = {"gemm": 0.3, "streaming": 0.15, "conv": 0.4, "attention": 0.15}
#: Products that show a ceiling each: math, memory (weights, activations), the latency of a kernel.
CEILINGS = (
    Gemm(8192, 8192, 8192),
    Gemm(4096, 4096, 4096),
    Gemm(8, 16384, 16384),
    Gemm(65536, 64, 1024),
    Gemm(64, 64, 64),
)
#: Operations that are measured at once, first and at most, and the share of the budget that this should take.
#: Of products a hundred take 0.2 s, of attention, for which cuDNN compiles kernels, 50 s (an H100).
_FIRST, _TOGETHER, _GROUP = 10, 300, 0.005
#: Share of the budget for measuring; the rest is for the last fits.
_MEASURING = 0.8
_LONGEST_S = 10e-3
_HELD_OUT = 6
#: How much of what the networks say is kept.
_KEPT = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Fitted at least, of a kind, and in each half of what is held out; and of an element type or role that the
#: networks then speak for.
_LEAST, _LEAST_HELD_OUT, _LEAST_OF_DOMAIN = 40, 4, 20
_EPOCHS = 50
#: Of the constants' fit: products and iterations.
_FITTED_ROWS, _ITERATIONS = 300, 300


@dataclass(frozen=True, slots=True)
class Candidate:
    """An operation that may be measured, and the call that runs it on data of a pool."""

    op: Op
    build: Callable[[Pool], Call]


#: Seconds that the kernels of operations run; None for one that cannot.
Measure: TypeAlias = Callable[[Sequence[Candidate]], Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a calibration is: operations measured of a kind, and the share of the budget that is used."""

    kind: str
    measured: int
    share: float


def candidates(seed: int = 0) -> dict[str, Iterator[Candidate]]:
    """Endless operations of each kind: layers of real models, and random ones."""

    def of(entries: Iterable[suites.Entry]) -> Iterator[Candidate]:
        return (Candidate(entry.op, partial(instance, entry.op)) for entry in entries)

    def streams() -> Iterator[Candidate]:
        for case in suites.streamings(seed):
            if (op := as_captured(*case)) is not None:
                yield Candidate(op, partial(streaming.build, *case))

    return {
        "gemm": chain(of(suites.Entry(op, "ceiling") for op in CEILINGS), of(suites.gemms(seed))),
        "streaming": streams(),
        "conv": of(suites.convs(seed)),
        "attention": of(suites.attentions(seed)),
    }


def as_captured(name: str, rows: int, inner: int, dtype: str) -> Streaming | None:
    """A microbenchmark as a captured step describes what it runs; None where that is several operations."""
    if name.endswith("foreach") or name in ("clip_grad_norm", "cross_entropy"):
        return None
    op = streaming.operation(name, rows, inner, dtype)
    kernels = 1
    if op.role == "optimizer":
        kernels = multi_tensor_launches([op.elements // rows] * rows)
    elif name == "embedding_backward":
        kernels = 2 if rows <= 3072 else 30
    elif name == "nll_loss_backward":
        kernels = 2
    return replace(op, kernels=kernels, flop_per_element=1.0)


def family(op: Op) -> str:
    """What is held out together: an operation that is held out has no near neighbour among those fitted.

    Of products all whose weights have about the same two sizes (within 19 %), whatever the rows, the layout
    and the type.
    """
    match op:
        case Gemm():
            weights = (op.m, op.n) if op.layout == "NT" else (op.n, op.k)
            key: tuple[object, ...] = tuple(round(4 * log2(size)) for size in sorted(weights))
        case Conv():
            key = (op.in_channels, op.out_channels, op.kernel_size)
        case Attention():
            key = (op.num_heads, op.head_dim, op.seq_len)
        case _:
            assert isinstance(op, Streaming)
            key = (op.function, op.inner or round(4 * log2(1 + op.elements)))
    return f"{op.kind} {key}"


def held_out(op: Op, among: int = _HELD_OUT) -> bool:
    """Whether an operation's family is one, of so many, that is never fitted to."""
    return crc32(family(op).encode()) % among == 0


@dataclass
class _Rows:
    """Measured operations of one kind, and what the networks see of them."""

    gpu: Gpu
    fitted: Constants
    before: PricedGpu | None = None
    ops: list[Op] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    _first: list[Estimate] = field(default_factory=list)
    _inputs: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def deciding(self) -> NDArray[np.bool_]:
        """Of what is held out, what decides how much is kept; on the rest the errors are stated."""
        return np.array([held_out(op, 2 * _HELD_OUT) for op in self.ops])

    @property
    def suffices(self) -> bool:
        """Whether there is enough of both."""
        decide = int(self.deciding.sum())
        return min(decide, len(self.ops) - decide) >= _LEAST_HELD_OUT

    def described(self) -> tuple[list[Estimate], NDArray[np.float32]]:
        """What the networks correct, and what they see."""
        if new := self.ops[len(self._first) :]:
            if self.before is not None:
                first = by_stages([traffic(op) for op in new], self.before, self.fitted)
            else:
                first = [analytic(op, self.gpu, self.fitted) for op in new]
            self._first += first
            self._inputs.append(on_analytic(new, self.gpu, first)[1])
        return self._first, np.concatenate(self._inputs)

    @property
    def ratios(self) -> NDArray[np.float32]:
        """Logarithm of what each took over what the networks correct."""
        first_s = [each.time_s for each in self.described()[0]]
        return np.log(np.array(self.times_s) / first_s).astype(np.float32)


@dataclass
class _Session:
    """One calibration: what is measured goes to what is fitted to, or to what is held out."""

    gpu: Gpu
    measure: Measure
    start: Constants
    used: Callable[[], float]
    before: PricedGpu | None
    device: str
    on_progress: Callable[[Progress], None] | None
    rows: dict[str, _Rows] = field(default_factory=dict)
    held_out: dict[str, _Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fitted = self.start

    def take(self, few: Sequence[Candidate]) -> None:
        """Measure some operations."""
        for op, time_s in zip((each.op for each in few), self.measure(few), strict=True):
            if time_s is None:
                continue  # too large for this card, or not supported by it
            into = self.held_out if held_out(op) else self.rows
            rows = into.setdefault(op.kind, _Rows(self.gpu, self.fitted, self.before))
            rows.ops.append(op)
            rows.times_s.append(time_s)
            if self.on_progress:
                self.on_progress(Progress(op.kind, self.measured(op.kind), self.used()))

    def measured(self, kind: str) -> int:
        return sum(len(part[kind].ops) for part in (self.rows, self.held_out) if kind in part)

    def feasible(self, candidate: Candidate) -> bool:
        """Whether the GPU has the type, and it does not take too long."""
        op = candidate.op
        supported = op.dtype not in ("bf16", "tf32", "fp8", "int8") or self.gpu.supports(op.dtype)
        return supported and analytic(op, self.gpu, self.start).time_s < _LONGEST_S

    def fit_constants(self, least: int = _LEAST // 2) -> None:
        """Fit the first stage, once, to the products whose interval it states: aligned, of 16 bits."""
        rows = self.rows.get("gemm")
        if rows is None or self.fitted is not self.start:
            return
        plain = [
            Measured(op, self.gpu, time_s)
            for op, time_s in zip(rows.ops, rows.times_s, strict=True)
            if isinstance(op, Gemm) and _plain(op, self.gpu)
        ]
        if len(plain) >= least:
            self.fitted = fit(plain[:_FITTED_ROWS], self.start, iterations=_ITERATIONS)
            for part in (*self.rows.values(), *self.held_out.values()):
                part.fitted = self.fitted

    def explore(self, drawn: Iterator[Candidate], until: float) -> None:
        """Measure until a share of the budget is used, or there are no more candidates."""
        feasible = filter(self.feasible, drawn)
        together = _FIRST
        while (began := self.used()) < until and (few := list(islice(feasible, together))):
            self.take(few)
            took = self.used() - began
            together = max(1, min(_TOGETHER, int(len(few) * _GROUP / took))) if took else _TOGETHER
            self.fit_constants(_FITTED_ROWS)
            if self.fitted is not self.start:
                for rows in (*self.rows.values(), *self.held_out.values()):
                    rows.described()  # it takes about as long as measuring


def _plain(op: Gemm, gpu: Gpu) -> bool:
    return op.dtype in ("fp16", "bf16") and select(op, gpu).alignment_bytes >= ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What is measured, and for how long.

    Attributes:
        budget_s: Time for everything.
        drawn: What may be measured, by kind; by default :func:`candidates`.
        shares: Of the time, by kind, in the order in which they are measured, products first.
        start: Constants that the fit of the first stage starts from; by default those of the GPU's kind.
        clock: Seconds; for tests.
    """

    budget_s: float = 240.0
    drawn: Mapping[str, Iterator[Candidate]] | None = None
    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)
    start: Constants | None = None
    clock: Callable[[], float] = time.monotonic


def calibrate(
    gpu: Gpu,
    measure: Measure,
    design: Design,
    *,
    before: PricedGpu | None = None,
    versions: Mapping[str, str] | None = None,
    device: str = "cpu",
    on_progress: Callable[[Progress], None] | None = None,
) -> Calibration:
    """Measure and fit, within a time budget.

    Interrupted (``KeyboardInterrupt``), it stops measuring and fits to what there is.

    Args:
        gpu: The facts of the GPU.
        measure: Seconds that operations take.
        design: What is measured, and for how long.
        before: The GPU as it is priced by what ships: the networks correct that, and its errors on the same
            held-out operations are recorded beside. None: they correct the first stage.
        versions: Of the software; recorded.
        device: Where to train the networks.
        on_progress: Called for each operation.

    Returns:
        The calibration; ``about["networks"][kind]`` holds how many operations were fitted to and held out,
        how much of what the networks say is ``kept``, and the mean absolute relative errors on those held out
        that had no part in that (``errors``): of the first stage as it was (``datasheet``), of this
        calibration (``calibrated``), and of what ships (``shipped``).

    Raises:
        TilefitError: too few products could be measured.
    """
    began_s = design.clock()

    def used() -> float:
        return (design.clock() - began_s) / design.budget_s

    start = design.start or constants(gpu)
    session = _Session(gpu, measure, start, used, before, device, on_progress)
    sources, shares = design.drawn or candidates(), design.shares
    until = 0.0
    try:
        for kind, share in shares.items():
            until += _MEASURING * share / sum(shares.values())
            session.explore(sources[kind], until)
            session.fit_constants()
    except KeyboardInterrupt:
        if session.measured("gemm") < _LEAST:
            raise
        # What has been measured is worth fitting to; a second interruption ends that as well.
        session.fit_constants()
    networks, facts = {}, {}
    for kind in shares:
        rows, aside = session.rows.get(kind), session.held_out.get(kind)
        if not rows or not aside or len(rows.ops) < _LEAST or not aside.suffices:
            if kind == "gemm":
                raise TilefitError(
                    f"only {session.measured(kind)} products could be measured in {design.budget_s:.0f} s",
                    hint="Give it more time, and look whether other programs use the GPU.",
                )
            continue
        networks[kind], facts[kind] = _fitted(session, rows, aside)
    fitted = session.fitted
    if "gemm" in session.held_out:
        fitted = replace(fitted, spread=_spread(session.held_out["gemm"]), provenance=ESTIMATED)
    about = {**origin(gpu, versions), "constants": asdict(fitted), "networks": facts}
    if before is not None:
        about["on"] = basis(before)
    return Calibration(networks, about, fitted)


def origin(gpu: Gpu, versions: Mapping[str, str] | None) -> dict[str, object]:
    """What every calibration says of itself: of which GPU, made when and by which versions."""
    return {
        "gpu": gpu.name,
        "tilefit": __version__,
        "date": now(),
        "versions": dict(versions or {}),
        "launch_scale": 1.0,
    }


def _fitted(session: _Session, rows: _Rows, aside: _Rows) -> tuple[Network, dict[str, object]]:
    """A kind's networks, and what is recorded of them."""
    kind = rows.ops[0].kind
    counts = Counter(map(domain, rows.ops))
    network = replace(
        train(rows.described()[1], rows.ratios, epochs=_EPOCHS, device=session.device),
        domains=frozenset(name for name, number in counts.items() if number >= _LEAST_OF_DOMAIN),
    )
    first, inputs = aside.described()
    deciding = aside.deciding

    def corrected(network: Network) -> list[Estimate]:
        own, better = Calibration({kind: network}, {}, session.fitted), list(first)
        covered = [index for index, op in enumerate(aside.ops) if own.covers(op)]
        found = own.correct([aside.ops[i] for i in covered], session.gpu, [first[i] for i in covered])
        for index, each in zip(covered, found, strict=True):
            better[index] = each
        return better

    # Of equal ones the first, which keeps less.
    kept = min(_KEPT, key=lambda share: _error(aside, corrected(network.kept(share)), deciding))
    network = network.kept(kept)
    outputs = network(inputs)
    residual = (aside.ratios - outputs[:, 0]) / np.exp(outputs[:, 1])
    # Widened by what a sample of this size may miss, as in conformal prediction.
    level = min(1.0, 0.9 * (1 + 1 / len(residual)))
    low, high = np.quantile(residual, (1 - level, level))
    network = replace(network, quantiles=(float(low), float(high)))
    datasheet = [analytic(op, session.gpu, session.start) for op in aside.ops]
    errors = {"datasheet": datasheet, "calibrated": corrected(network)}
    if session.before is not None:
        errors["shipped"] = first
    return network, {
        "domains": sorted(network.domains),
        "layers": len(network.layers),
        "quantiles": list(network.quantiles),
        "families": [],
        "tiles": [],
        "on_analytic": True,
        "bounds": list(network.bounds),
        "fingerprint": fingerprint(kind, session.gpu, corrects_first_stage=True),
        "trained_rows": len(rows.ops),
        "held_out_rows": len(aside.ops),
        "kept": kept,
        "errors": {name: _error(aside, each, ~deciding) for name, each in errors.items()},
    }


def _error(rows: _Rows, predicted: Sequence[Estimate], among: NDArray[np.bool_]) -> float:
    """Mean absolute relative error of some of the rows."""
    times = np.array([each.time_s for each in predicted])
    return round(float(np.abs(times / rows.times_s - 1)[among].mean()), 4)


def _spread(rows: _Rows) -> float:
    """Half-width of the first stage's 80 % interval for aligned products of 16 bits."""
    factors = [
        max(ratio, 1 / ratio)
        for op, time_s in zip(rows.ops, rows.times_s, strict=True)
        if isinstance(op, Gemm) and _plain(op, rows.gpu)
        for ratio in (analytic(op, rows.gpu, rows.fitted).time_s / time_s,)
    ]
    return round(float(np.quantile(factors, 0.8)) - 1, 4) if factors else rows.fitted.spread
