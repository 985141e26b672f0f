"""Collectives among processes of this machine, and the constants of links that they are fitted by."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from small_calibration import made
from tilefit import estimate, gpus
from tilefit.cost.calibration import Calibration, load, read, with_links_of, write
from tilefit.cost.constants import LinkConstants, link_constants
from tilefit.cost.links import Fabric, Group
from tilefit.cost.priced import priced
from tilefit.errors import TilefitError
from tilefit.measure.collectives import SIZES, SMALLEST, Timed, calls, fit, measure, with_links
from tilefit.measure.ranks import Ranks
from tilefit.ops import Collective
from tilefit.ops.collective import FUNCTIONS

H100 = gpus.get("h100-sxm")


# ---- processes ------------------------------------------------------------------------------------


def results() -> dict[str, list[float]]:
    """What each collective leaves on this rank: rank r begins with 10 r + 0, 1, 2, 3."""
    found = {}
    for function in FUNCTIONS:
        rank = dist.get_rank()
        whole = torch.arange(4.0) + 10 * rank
        assert dist.group.WORLD is not None
        call = calls(function, whole, dist.group.WORLD)
        call()
        cells = zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)
        kept = {name: cell.cell_contents for name, cell in cells}
        name = {"reduce-scatter": "part", "all-to-all": "other"}.get(function, "whole")
        found[function] = kept[name].tolist()
    return found


def fails_on_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    dist.barrier()  # for ever


def hangs() -> None:
    time.sleep(3600)


def dies() -> None:
    os._exit(3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, "cpu") as made_:
        yield made_


def test_collectives_do_what_they_are_called(ranks: Ranks) -> None:
    first, second = ranks.call(results)
    assert first["all-reduce"] == second["all-reduce"] == [10, 12, 14, 16]
    assert first["all-gather"] == second["all-gather"] == [0, 1, 10, 11]
    assert (first["reduce-scatter"], second["reduce-scatter"]) == ([10, 12], [14, 16])
    assert (first["all-to-all"], second["all-to-all"]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert second["send"] == [0, 1, 2, 3]


def test_every_function_and_size_is_measured_once(ranks: Ranks) -> None:
    rows = list(measure(ranks, SIZES[:3]))
    assert [(row.function, row.size_bytes) for row in rows] == [(f, s) for f in FUNCTIONS for s in SIZES[:3]]
    assert all(row.ranks == 2 and 1e-7 < row.time_s < 5 for row in rows)


def test_one_that_fails_ends_those_that_wait_for_it() -> None:
    with Ranks(2, "cpu") as own:
        processes = list(own._processes)
        with pytest.raises(TilefitError, match="rank 1: ValueError: out of luck"):
            own.call(fails_on_the_second)
        assert not any(process.is_alive() for process in processes)
        with pytest.raises(TilefitError, match="the processes have ended"):
            own.call(hangs)


@pytest.mark.parametrize(
    ("function", "limit_s", "said"),
    [(hangs, 1.0, r"no answer within 1 s of rank 0"), (dies, 60.0, "rank 0: the process has ended")],
)
def test_ranks_that_do_not_answer_are_ended(function: Any, limit_s: float, said: str) -> None:
    with Ranks(1, "cpu") as own:
        (process,) = own._processes
        with pytest.raises(TilefitError, match=said):
            own.call(function, timeout_s=limit_s)
        assert not process.is_alive()


# ---- constants ------------------------------------------------------------------------------------


def as_if(link: LinkConstants, ranks: tuple[int, ...] = (2, 4, 8)) -> list[Timed]:
    """What would be measured of a link."""
    fabric = Fabric(H100, constants=link)
    return [
        Timed(function, count, size, fabric.time_s(function, size, Group(count, count)))
        for function in FUNCTIONS
        for count in ranks
        for size in SIZES
    ]


def test_constants_of_a_made_up_link_are_found_again() -> None:
    start = link_constants(H100)
    truth = replace(
        start,
        start_clocks=20000,
        hop_clocks=900,
        bulk_clocks=9000,
        chunk_clocks=9000,
        share=0.8,
        pair_loss=0.3,
    )
    found = fit(as_if(truth), H100, start)
    for name, value in asdict(truth).items():
        if name not in ("spread", "provenance"):
            assert getattr(found, name) == pytest.approx(value, rel=0.03), name


@settings(max_examples=4, deadline=None)
@given(
    share=st.floats(0.3, 0.98),
    start_clocks=st.floats(4e3, 8e4),
    chunk_clocks=st.floats(1e3, 4e4),
    low=st.floats(0.1, 0.5),
)
def test_two_gpus_suffice_for_what_they_do(
    share: float, start_clocks: float, chunk_clocks: float, low: float
) -> None:
    start = link_constants(H100)
    bulk = 0.9 * start_clocks
    truth = replace(
        start,
        share=share,
        start_clocks=start_clocks,
        bulk_clocks=bulk,
        chunk_clocks=chunk_clocks,
        low_latency_share=low * share,
    )
    found = fit(as_if(truth, (2,)), H100, start)
    for size in SIZES:
        if size >= SMALLEST:
            times = [
                Fabric(H100, constants=each).time_s("all-gather", size, Group(2, 2))
                for each in (found, truth)
            ]
            assert times[0] == pytest.approx(times[1], rel=0.1)


def test_a_calibration_with_links_prices_by_them_and_says_so(tmp_path: Path) -> None:
    truth = replace(link_constants(H100), share=0.4)
    empty = Calibration({}, {"gpu": H100.name, "networks": {}})
    write(with_links(empty, H100, as_if(truth, (2,))), tmp_path / "links.npz")
    gpu = priced(H100, tmp_path / "links.npz")
    op = Collective("all-gather", 1 << 28, 2)
    usual, own = estimate(op, H100), estimate(op, gpu)
    assert own.time_s == pytest.approx(
        Fabric(H100, constants=truth).time_s("all-gather", 1 << 29, Group(2, 2)), rel=0.05
    )
    assert own.time_s > 1.5 * usual.time_s
    assert (usual.provenance, own.provenance) == ("datasheet", "estimated")
    # All else is priced as without.
    assert gpu.calibration is not None
    assert gpu.calibration.networks == (priced(H100).calibration or gpu.calibration).networks


def test_the_error_is_that_of_sizes_that_set_nothing() -> None:
    truth = replace(link_constants(H100), share=0.5)
    empty = Calibration({}, {"gpu": H100.name, "networks": {}})
    facts = with_links(empty, H100, as_if(truth)).about["links"]
    assert facts["errors"]["before"] > 0.2 > 0.02 > facts["errors"]["after"]
    assert (facts["ranks"], facts["measured"]) == ([2, 4, 8], len(FUNCTIONS) * 3 * len(SIZES))


def test_without_a_known_link_there_is_nothing_to_fit_to() -> None:
    alone = replace(H100, link_bandwidth_bytes_per_s=0.0)
    with pytest.raises(TilefitError, match="nothing is known of what joins several"):
        with_links(Calibration({}, {"gpu": "h100-sxm"}), alone, [])


def test_a_new_calibration_keeps_the_links_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    a100 = gpus.get("a100-sxm-80gb")
    write(with_links(made(H100), H100, as_if(link_constants(H100), (2,))), path)
    before = read(path)
    assert before.links is not None
    assert "gemm" in before.networks
    write(with_links_of(made(H100, factor=2.0), path), path)
    assert read(path).links == before.links
    assert with_links_of(made(a100), path).links is None
    assert with_links_of(made(a100), tmp_path / "none.npz").links is None


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(asdict(link_constants(H100)))),
    value=st.one_of(
        st.floats(max_value=-1e-9), st.just(float("nan")), st.just(float("inf")), st.text(), st.none()
    ),
)
def test_constants_that_are_no_numbers_are_an_error_and_not_a_price(
    name: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if name == "provenance":
        name, value = "nonsense", 1.0
    path = tmp_path_factory.mktemp("bad") / "bad.npz"
    facts = {"constants": asdict(link_constants(H100)) | {name: value}}
    write(Calibration({}, {"gpu": H100.name, "networks": {}, "links": facts}), path)
    with pytest.raises(TilefitError, match="the calibration cannot be read"):
        read(path)


@pytest.mark.parametrize("facts", [{}, [], {"constants": 3}, {"constants": {"share": 0.9}}, "links"])
def test_links_of_another_form_are_damaged(facts: Any, tmp_path: Path) -> None:
    write(Calibration({}, {"gpu": H100.name, "networks": {}, "links": facts}), tmp_path / "bad.npz")
    with pytest.raises(TilefitError, match="the calibration cannot be read"):
        read(tmp_path / "bad.npz")
    with pytest.raises((TypeError, KeyError, ValueError)):
        load(tmp_path / "bad.npz")
