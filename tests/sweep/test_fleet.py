"""Sweeps and plans on a cluster: machines that die, Ctrl-C, and the same numbers as without."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import builders
from tilefit.cost.links import Fabric
from tilefit.cost.priced import priced
from tilefit.errors import TilefitError, UsageError
from tilefit.measure.store import Store
from tilefit.ops import Step
from tilefit.options import TargetOptions
from tilefit.session import fleet
from tilefit.session.fleet import Fleet
from tilefit.sweep.axes import read_axes
from tilefit.sweep.kept import Kept
from tilefit.sweep.point import Point
from tilefit.sweep.run import Grid, Predictions
from tilefit.sweep.session import SweepSession

from . import conftest
from .conftest import Fake, mlp

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three machines of a core each; the functions of the tests go to them as they are."""
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    for module in (builders, conftest, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    for _ in range(2):
        made.add_node(**small)
    yield made
    made.shutdown()


def slow(options: TargetOptions) -> Step:
    """Takes a while, as captures do."""
    time.sleep(0.1)
    return mlp(options)


def grid(*over: str) -> Grid:
    return Grid("model", TargetOptions(), tuple(read_axes(over)), (priced("h200"), priced("l4")))


def by_place(points: Iterable[Point]) -> dict[tuple[object, ...], Point]:
    return {(point.gpu, *sorted(point.at.items())): point for point in points}


def test_what_goes_on_when_ctrl_c_comes_and_what_is_there_afterwards(cluster: Any, tmp_path: Path) -> None:
    of = grid("batch=8", "hidden=64,72,80,88,96")

    def stopped(what: str, points: Iterable[Point], total: int) -> Iterator[Point]:
        assert what == "Predicting on 3 machines, 3 cores"
        for index, point in enumerate(points):
            if index == 4:
                raise KeyboardInterrupt
            yield point

    def session(where: Fleet, store: Store, watch: Any) -> SweepSession:
        made = SweepSession(of, store, timeout_s=5.0, watch=watch, fleet=where)
        made._predictions.capture = Fake(slow)
        return made

    with Store(tmp_path / "store.db") as store, Fleet(cluster.address) as where:
        first = session(where, store, stopped)
        assert len(first.predicted) == 4
        assert first.interrupted
        second = session(where, store, lambda what, points, total: points)
        assert len(second.predicted) == of.size == 10
        assert 4 <= second.known < 10


def test_impossible_points_are_points_and_say_why(cluster: Any) -> None:
    with Fleet(cluster.address) as where:
        made = Predictions(grid("batch=4", "hidden=64,100"), 1.0, capture=Fake(mlp), fleet=where)
        errors = Counter(point.error for point in made)
    assert errors == {"": 2, "100 features do not divide into 8 heads": 2}
    assert made.failure is not None


def dies_once(marker: Path, item: int) -> int:
    if item == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * item


def fails(common: None, item: int) -> int:
    raise TilefitError("no luck", where="here", hint="Try again.")


def test_a_worker_that_dies_is_replaced_and_an_error_is_told_as_it_is(cluster: Any, tmp_path: Path) -> None:
    with Fleet(cluster.address) as where:
        assert dict(where.map(dies_once, tmp_path / "died", [0, 1, 2])) == {0: 0, 1: 10, 2: 20}
        with pytest.raises(TilefitError, match="no luck") as error:
            dict(where.map(fails, None, [0]))
    assert (error.value.where, error.value.hint) == ("here", "Try again.")
    assert (tmp_path / "died").exists()


def test_a_machine_with_other_versions_or_without_the_folder_is_refused(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Fleet(cluster.address) as where:
        monkeypatch.setattr(fleet, "_versions", lambda: "tilefit 99")
        with pytest.raises(TilefitError, match=r"and this one tilefit 99"):
            dict(where.map(fails, None, [0]))
        gone = tmp_path / "gone"
        monkeypatch.setattr(os, "getcwd", lambda: str(gone))
        with pytest.raises(TilefitError, match="has no folder"):
            dict(where.map(fails, None, [0]))


def test_a_plan_is_the_same_as_on_one_machine(cluster: Any) -> None:
    from tilefit.parallel.blocks import Model
    from tilefit.parallel.planning import Job, Planner, precision_of
    from tilefit.session.planning import _best

    b = builders.StepBuilder(2, "bf16")
    for layer in range(2):
        b.linear(f"layers.{layer}.fc", 256, 512, 512)
    b.optimizer()
    model = Model(b.step(), 8)
    job = Job(64, precision_of(model.step))
    common = [Planner(model, Fabric(priced("h200")), job)], 8
    work = [(0, count) for count in (1, 2, 4, 8)]
    with Fleet(cluster.address) as where:
        there = dict(where.map(_best, common, work))
    assert there == {place: _best(common, item) for place, item in enumerate(work)}
    assert all(there.values())


def test_every_point_is_there_once_with_the_same_numbers_though_a_machine_dies(
    cluster: Any, tmp_path: Path
) -> None:
    of = grid("batch=1..8", "hidden=64,128,192,256")
    alone = by_place(Predictions(of, 1.0, capture=Fake(mlp)))
    with Store(tmp_path / "store.db") as store, Fleet(cluster.address) as where:
        kept = Kept(store, "model")
        found = []
        for point in Predictions(of, 1.0, kept, Fake(slow), where):
            found.append(point)
            if len(found) == 1:
                dead = cluster.list_all_nodes()[-1]
                cluster.remove_node(dead, allow_graceful=False)
        assert not dead.any_processes_alive()
        assert len(found) == of.size == 32
        assert by_place(found) == alone
        again = list(Predictions(of, 1.0, kept, Fake(slow), where))
        assert kept.found == 32
        assert by_place(again) == alone


def test_what_ray_says_of_its_machines_is_not_among_the_data(
    cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with Fleet(cluster.address):
        print("(raylet) a machine is gone")
    print("data")
    assert capsys.readouterr() == ("data\n", "(raylet) a machine is gone\n")


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="which is not installed") as error:
        Fleet("auto")
    assert error.value.hint == "Run: pip install ray."
