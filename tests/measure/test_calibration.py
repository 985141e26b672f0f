"""Calibration of a made-up GPU, whose times the first stage cannot state with any constants."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import exp
from pathlib import Path
from random import Random

import pytest

from tilefit import gpus
from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import FORMAT, Calibration, read, write
from tilefit.cost.constants import GENERAL
from tilefit.cost.model import estimate
from tilefit.cost.priced import as_shipped, priced
from tilefit.errors import TilefitError
from tilefit.measure import calibration
from tilefit.measure.calibration import CEILINGS, Candidate, Design, Progress, calibrate, candidates, held_out
from tilefit.ops import Gemm, Op, Streaming

GPU = gpus.get("h200")
HIDDEN = replace(GENERAL, math_efficiency=0.6, memory_efficiency=0.7, kernel_clocks=3000)
KINDS = ("gemm", "streaming")


class Bench:
    """A GPU with other constants, slow at weight gradients; each operation takes a second of its clock."""

    def __init__(self, refuse: Callable[[Op], bool] = lambda op: False) -> None:
        self.now_s = 0.0
        self.ops: list[Op] = []
        self.refuse = refuse

    def __call__(self, few: Sequence[Candidate]) -> list[float | None]:
        self.now_s += len(few)
        ran = [each.op for each in few if not self.refuse(each.op)]
        self.ops += ran
        return [self.time_s(each.op) if each.op in ran else None for each in few]

    def time_s(self, op: Op) -> float:
        slow = 1.6 if isinstance(op, Gemm) and op.layout == "NT" else 1.0
        return slow * analytic(op, GPU, HIDDEN).time_s

    def clock(self) -> float:
        return self.now_s


def run(bench: Bench, budget_s: float, **how: object) -> Calibration:
    chosen = {kind: calibration.SHARES[kind] for kind in KINDS}
    design = Design(budget_s=budget_s, shares=chosen, clock=bench.clock)
    return calibrate(GPU, bench, design, **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> tuple[Calibration, Bench]:
    bench = Bench()
    return run(bench, 900, versions={"torch": "2.11"}), bench


def mean_error(own: Calibration, ops: list[Op], bench: Bench) -> float:
    first = [analytic(op, GPU, own.constants) for op in ops]
    times = own.correct(ops, GPU, first)
    return sum(abs(t.time_s / bench.time_s(op) - 1) for op, t in zip(ops, times, strict=True)) / len(ops)


def fresh(kind: str, own: Calibration, number: int = 150) -> list[Op]:
    """Operations of another seed than the calibration's."""
    ops = (candidate.op for candidate in candidates(seed=99)[kind])
    return list(islice((op for op in ops if own.covers(op)), number))


def test_it_predicts_products_it_never_saw(result: tuple[Calibration, Bench]) -> None:
    own, bench = result
    errors = own.about["networks"]["gemm"]["errors"]
    assert errors["datasheet"] > 0.15
    assert errors["calibrated"] < 0.1
    assert mean_error(own, fresh("gemm", own), bench) < 0.1


def test_it_learns_streaming_operations_too(result: tuple[Calibration, Bench]) -> None:
    own, bench = result
    ops = fresh("streaming", own)
    before = sum(abs(analytic(op, GPU).time_s / bench.time_s(op) - 1) for op in ops) / len(ops)
    assert mean_error(own, ops, bench) < before / 2


def test_the_interval_holds_most_of_what_it_never_saw(result: tuple[Calibration, Bench]) -> None:
    own, bench = result
    ops = fresh("gemm", own)
    first = [analytic(op, GPU, own.constants) for op in ops]
    inside = [
        e.low_s <= bench.time_s(op) <= e.high_s
        for op, e in zip(ops, own.correct(ops, GPU, first), strict=True)
    ]
    assert 0.65 <= sum(inside) / len(inside) <= 0.97


def test_the_first_stage_has_constants_of_this_gpu(result: tuple[Calibration, Bench]) -> None:
    constants = result[0].constants
    assert constants is not None
    assert constants.math_efficiency == pytest.approx(HIDDEN.math_efficiency, rel=0.1)
    assert constants.memory_efficiency == pytest.approx(HIDDEN.memory_efficiency, rel=0.1)
    assert constants.provenance == "estimated"


def test_the_ceilings_come_first(result: tuple[Calibration, Bench]) -> None:
    assert tuple(result[1].ops[: len(CEILINGS)]) == CEILINGS


def test_what_is_held_out_is_not_fitted_to(result: tuple[Calibration, Bench]) -> None:
    own, bench = result
    for kind in KINDS:
        facts = own.about["networks"][kind]
        measured = [op for op in bench.ops if op.kind == kind]
        assert facts["held_out_rows"] == sum(map(held_out, measured)) > 20
        assert facts["trained_rows"] == len(measured) - facts["held_out_rows"]


def test_it_keeps_to_its_budget(result: tuple[Calibration, Bench]) -> None:
    assert 0.8 * 900 <= result[1].now_s <= 0.9 * 900


def test_the_file_says_what_it_is_and_predicts_the_same(
    result: tuple[Calibration, Bench], tmp_path: Path
) -> None:
    own, bench = result
    path = tmp_path / "new" / "h200.npz"
    write(own, path)
    again = read(path)
    assert again.about == {**own.about, "format": FORMAT}
    assert again.constants == own.constants
    assert again.about["gpu"] == "h200"
    assert again.about["versions"] == {"torch": "2.11"}
    assert again.title.startswith("calibrated on 20")
    ops = fresh("gemm", own)
    assert mean_error(again, ops, bench) == pytest.approx(mean_error(own, ops, bench), rel=1e-3)
    assert [file.name for file in path.parent.iterdir()] == ["h200.npz"]


def test_made_on_top_of_what_ships_it_corrects_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU whose times are carried over from a donor: a hundred products tell what is wrong with them."""
    gpu = gpus.get("h100-sxm")
    before = as_shipped(gpu)

    class Off(Bench):
        def time_s(self, op: Op) -> float:
            slow = 1.6 if isinstance(op, Gemm) and op.layout == "NT" else 1.1
            return slow * estimate(op, before).time_s

    bench = Off()
    design = Design(budget_s=400, shares={"gemm": 1.0}, clock=bench.clock)
    own = calibrate(gpu, bench, design, before=before)
    errors = own.about["networks"]["gemm"]["errors"]
    assert errors["calibrated"] < 0.05 < 0.1 < errors["shipped"] < errors["datasheet"]

    path = tmp_path / "own.npz"
    write(own, path)
    device = priced(gpu, path)
    ops = fresh("gemm", own, 60)
    off = [abs(estimate(op, device).time_s / bench.time_s(op) - 1) for op in ops]
    assert statistics.median(off) < 0.05
    stream = Streaming("copy", 10**7, 4 * 10**7, 4 * 10**7, function="clone")
    assert estimate(stream, device).time_s == estimate(stream, before).time_s

    monkeypatch.setattr("tilefit.cost.priced._checksum", lambda calibration: "of another version")
    with pytest.raises(TilefitError, match="another version"):
        priced(gpu, path)


def test_of_what_nobody_can_learn_little_is_kept() -> None:
    """What ships is not made worse by networks that learnt noise."""
    gpu = gpus.get("h100-sxm")
    before = as_shipped(gpu)

    class Noisy(Bench):
        def time_s(self, op: Op) -> float:
            return exp(Random(repr(op)).gauss(0, 0.3)) * estimate(op, before).time_s

    bench = Noisy()
    design = Design(budget_s=400, shares={"gemm": 1.0}, clock=bench.clock)
    facts = calibrate(gpu, bench, design, before=before).about["networks"]["gemm"]
    assert facts["kept"] <= 0.5
    assert facts["errors"]["calibrated"] <= 1.03 * facts["errors"]["shipped"]


def test_nothing_beyond_what_was_measured_is_made_up(result: tuple[Calibration, Bench]) -> None:
    # A function that was never measured, with sizes far out of range.
    op = Streaming("pointwise", 10**11, 10**11, 10**11, function="logaddexp")
    first = analytic(op, GPU, result[0].constants)
    (found,) = result[0].correct([op], GPU, [first])
    assert 0.3 < found.time_s / first.time_s < 3


def test_operations_that_cannot_run_are_left_out() -> None:
    bench = Bench(refuse=lambda op: isinstance(op, Gemm) and op.m > 10_000)
    own = run(bench, 300)
    facts = own.about["networks"]
    assert sum(f["trained_rows"] + f["held_out_rows"] for f in facts.values()) == len(bench.ops) < 255


def test_a_kind_that_cannot_be_measured_is_left_out() -> None:
    own = run(Bench(refuse=lambda op: op.kind == "streaming"), 300)
    assert set(own.networks) == {"gemm"}


def test_too_little_is_an_error() -> None:
    with pytest.raises(TilefitError, match="products could be measured"):
        run(Bench(refuse=lambda op: op.kind == "gemm"), 60)


def test_candidates_that_run_out_end_it() -> None:
    few: Iterator[Candidate] = islice(candidates()["gemm"], 150)
    bench = Bench()
    calibrate(
        GPU,
        bench,
        Design(budget_s=1e6, drawn={"gemm": few}, shares={"gemm": 1.0}, clock=bench.clock),
    )
    assert 100 < bench.now_s <= 150


def test_it_says_how_far_it_is() -> None:
    told: list[Progress] = []
    run(Bench(), 250, on_progress=told.append)
    counted = [each.measured for each in told if each.kind == "gemm"]
    assert counted == list(range(1, 1 + len(counted)))
    assert told[0].share < 0.05
    assert 0.75 < told[-1].share < 0.9


def test_only_what_the_gpu_supports_is_measured() -> None:
    v100, bench = gpus.get("v100-sxm2-16gb"), Bench()
    calibrate(v100, bench, Design(budget_s=200, shares={"gemm": 1.0}, clock=bench.clock))
    assert {op.dtype for op in bench.ops} == {"fp16", "fp32"}


def test_what_takes_long_is_measured_a_few_at_a_time() -> None:
    """So that no kind takes the time of the others, nor of the fits."""
    bench, sizes = Bench(), []

    def slow_at_streams(few: Sequence[Candidate]) -> list[float | None]:
        sizes.append((few[0].op.kind, len(few)))
        if few[0].op.kind == "gemm":
            bench.now_s -= 0.99 * len(few)
        return bench(few)

    chosen = {kind: calibration.SHARES[kind] for kind in KINDS}
    calibrate(GPU, slow_at_streams, Design(budget_s=200, shares=chosen, clock=bench.clock))
    assert max(size for kind, size in sizes if kind == "gemm") >= 80
    assert {size for kind, size in sizes if kind == "streaming"} == {1, 10}
    assert bench.now_s <= 0.9 * 200


def test_interrupted_it_fits_to_what_has_been_measured() -> None:
    bench = Bench()

    def interrupted(few: Sequence[Candidate]) -> list[float | None]:
        if isinstance(few[0].op, Streaming):
            raise KeyboardInterrupt
        return bench(few)

    chosen = {kind: calibration.SHARES[kind] for kind in KINDS}
    own = calibrate(GPU, interrupted, Design(budget_s=400, shares=chosen, clock=bench.clock))
    assert list(own.networks) == ["gemm"]
    assert own.about["networks"]["gemm"]["errors"]["calibrated"] < 0.15


def test_interrupted_with_next_to_nothing_measured_it_ends() -> None:
    def interrupted(few: Sequence[Candidate]) -> list[float | None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(GPU, interrupted, Design(budget_s=400))
