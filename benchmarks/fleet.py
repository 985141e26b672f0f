"""A sweep of 400 points on a cluster of three machines, of which one is killed midway, beside one without.

    PYTHONPATH=src python benchmarks/fleet.py [--record]

The machines are processes of this one (``ray.cluster_utils.Cluster``). All points must be there, none twice,
with the same numbers; the store must hold them, so that the same sweep computes nothing again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tilefit.cost.priced import priced
from tilefit.measure.store import Store
from tilefit.options import TargetOptions
from tilefit.session.fleet import Fleet
from tilefit.sweep.axes import read_axes
from tilefit.sweep.kept import Kept
from tilefit.sweep.point import Point
from tilefit.sweep.run import Grid, Predictions

RESULTS = Path(__file__).parent / "results" / "fleet.json"
MODEL = """
import torch

def make(hidden: int = 64):
    layers = [torch.nn.Linear(hidden, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 10)]
    return torch.nn.Sequential(*layers), torch.empty(8, hidden)
"""


def named(points: Iterable[Point]) -> list[tuple[tuple[Any, ...], Point]]:
    return [((point.gpu, *sorted(point.at.items())), point) for point in points]


def largest(first: dict[Any, Point], second: dict[Any, Point]) -> float:
    """Of the points of two sweeps; networks round otherwise where other operations are priced beside."""
    assert first.keys() == second.keys()
    for name, point in first.items():
        times = {"time_s": 0.0, "low_s": 0.0, "high_s": 0.0}
        assert replace(point, **times) == replace(second[name], **times)
    return max(
        abs(getattr(second[name], each) / getattr(point, each) - 1)
        for name, point in first.items()
        for each in ("time_s", "low_s", "high_s")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write the result into results/")
    options = parser.parse_args()
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**small)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "store.db") as store:
        target = f"{folder}/model.py:make"
        Path(folder, "model.py").write_text(MODEL)
        axes = read_axes(["hidden=64,72,80,88,96,104,112,120,128,136", "batch=8..160:8"])
        devices = tuple(map(priced, ("h200", "l4")))
        grid = Grid(target, TargetOptions(), tuple(axes), devices)
        began_s = time.monotonic()
        alone = named(Predictions(grid, 300.0))
        alone_s = time.monotonic() - began_s
        kept = Kept(store, target)
        found = []
        began_s = time.monotonic()
        with Fleet(cluster.address) as fleet:
            for point in Predictions(grid, 300.0, kept, fleet=fleet):
                found.append(point)
                if len(found) == 120:
                    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
            fleet_s = time.monotonic() - began_s
            again = Kept(store, target)
            repeated = named(Predictions(grid, 300.0, again, fleet=fleet))
    cluster.shutdown()
    there = named(found)
    report = {
        "ray": ray.__version__,
        "points": grid.size,
        "found": len(there),
        "twice": sum(count - 1 for count in Counter(name for name, _ in there).values()),
        "largest relative difference of a time": largest(dict(alone), dict(there)),
        "errors": sum(bool(point.error) for point in found),
        "known afterwards": again.found,
        "the same afterwards": dict(repeated) == dict(there),
        "alone, s": round(alone_s, 1),
        "on the cluster, s": round(fleet_s, 1),
    }
    print(json.dumps(report, indent=1))
    if options.record:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
