"""The second stage of the model: a correction fitted to measurements of one GPU.

For each kind of operation an ensemble of small networks predicts ``log(time / baseline)``, the spread of its
own error, and for products the family and the tile of the kernel that runs. The inputs and the baseline are
those of :mod:`tilefit.cost.features`. ``benchmarks/fit_profile.py`` fits the networks, records their errors
on shapes that the fit never saw, and writes the file that is read here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from tilefit.cost.estimate import ESTIMATED, LATENCY, MATH, MEMORY, Estimate
from tilefit.cost.features import FEATURES, domain
from tilefit.cost.memory import floor_s
from tilefit.cost.tiles import count
from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.ops import Gemm, Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: A tile is named where the network gives it at least this probability; else it is unsure.
SURE = 0.4


@dataclass(frozen=True, eq=False)
class Network:
    """The fitted networks of one kind of operation.

    Attributes:
        domains: What was measured (see :func:`tilefit.cost.features.domain`); the rest is not predicted.
        low, high, mean, scale: Range and normalisation of each input; sizes beyond the measured range are
            clipped to it, and the baseline alone extrapolates.
        layers: Weights [members, inputs, outputs] and biases [members, 1, outputs] of each layer.
        quantiles: Of ``log(measured / predicted) / spread`` at 10 and 90 %, on shapes set aside for it.
        families, tiles: What the outputs after the time and the spread stand for.
    """

    domains: frozenset[str]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    layers: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    quantiles: tuple[float, float]
    families: tuple[str, ...]
    tiles: tuple[tuple[int, int] | None, ...]

    def __call__(self, rows: Sequence[Sequence[float]]) -> NDArray[np.float32]:
        """The outputs for rows of inputs: [rows, 2 + families + tiles]."""
        import numpy as np

        x = np.asarray(rows, dtype=np.float32)
        x = ((np.clip(x, self.low, self.high) - self.mean) / self.scale)[None]
        for index, (weight, bias) in enumerate(self.layers):
            x = x @ weight + bias
            if index < len(self.layers) - 1:
                np.maximum(x, 0.0, out=x)
        outputs: NDArray[np.float32] = x.mean(axis=0)
        return outputs


@dataclass(frozen=True, eq=False)
class Profile:
    """The measured behaviour of one GPU.

    Attributes:
        networks: By kind of operation.
        about: Versions, dates and numbers of measurements.
    """

    networks: dict[str, Network]
    about: dict[str, Any]

    def covers(self, op: Op) -> bool:
        """Whether operations of this kind, type and role were measured."""
        network = self.networks.get(op.kind)
        return network is not None and domain(op) in network.domains

    def correct(self, ops: Sequence[Op], gpu: Gpu, analytic: Sequence[Estimate]) -> list[Estimate]:
        """The analytic estimates of covered operations of one kind, corrected by what was measured."""
        import numpy as np

        network = self.networks[ops[0].kind]
        described = [FEATURES[type(op)](op, gpu) for op in ops]
        outputs = network([row for _, row in described])
        baselines = np.array([baseline for baseline, _ in described])
        times = (baselines * np.exp(outputs[:, 0])).tolist()
        spreads = np.exp(outputs[:, 1])
        low, high = (np.exp(quantile * spreads).tolist() for quantile in network.quantiles)
        ends = 2 + len(network.families)
        families = _choices(outputs[:, 2:ends])
        tiles = _choices(outputs[:, ends:])
        corrected = []
        for index, (op, estimate) in enumerate(zip(ops, analytic, strict=True)):
            floor = floor_s(op, gpu)
            time_s = max(times[index], floor)
            estimate = replace(
                estimate,
                time_s=time_s,
                low_s=min(time_s, max(times[index] * low[index], floor)),
                high_s=max(time_s, times[index] * high[index]),
                bound=_bound(estimate, time_s),
                provenance=ESTIMATED,
            )
            if network.families:
                family, tile = network.families[families[index][0]], network.tiles[tiles[index][0]]
                estimate = replace(
                    estimate,
                    kernel_family=family or estimate.kernel_family,
                    **_tiled(op, gpu, tile if tiles[index][1] >= SURE else None),
                )
            corrected.append(estimate)
        return corrected


def _choices(logits: NDArray[np.float32]) -> list[tuple[int, float]]:
    """The most likely class of each row, with its probability."""
    import numpy as np

    if not logits.shape[1]:
        return []
    best = logits.argmax(axis=1)
    top = logits.max(axis=1, keepdims=True)
    probability = 1.0 / np.exp(logits - top).sum(axis=1)
    return list(zip(best.tolist(), probability.tolist(), strict=True))


def _tiled(op: Op, gpu: Gpu, tile: tuple[int, int] | None) -> dict[str, Any]:
    assert isinstance(op, Gemm)
    waves = count(op.m, op.n, tile, op.batch) / gpu.sms if tile else None
    return {"tile": tile, "waves": waves}


def _bound(estimate: Estimate, time_s: float) -> str:
    busy = max(estimate.math_s, estimate.memory_s)
    if busy < time_s / 2:
        return LATENCY
    return MATH if estimate.math_s >= estimate.memory_s else MEMORY


@lru_cache(maxsize=64)
def profile(gpu: Gpu) -> Profile | None:
    """The profile that ships for a GPU; None where nobody has measured it.

    Raises:
        TilefitError: the profile's file is damaged.
    """
    path = resources.files("tilefit.cost") / "data" / f"{gpu.name}.npz"
    return read(path) if path.is_file() else None


def read(path: Traversable) -> Profile:
    """The profile in a file.

    Raises:
        TilefitError: the file is no profile, or damaged.
    """
    import numpy as np

    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            networks = {kind: network(arrays, kind, facts) for kind, facts in about["networks"].items()}
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise TilefitError(
            f"the profile cannot be read: {error}",
            where=str(path),
            hint="Install tilefit again, or calibrate again.",
        ) from error
    return Profile(networks, about)


def network(arrays: Any, kind: str, facts: dict[str, Any]) -> Network:
    """One kind's networks from the arrays and facts of a profile's file."""
    import numpy as np

    def array(name: str) -> NDArray[np.float32]:
        found: NDArray[np.float32] = arrays[f"{kind}/{name}"].astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError(f"{kind}/{name} holds no finite numbers")
        return found

    return Network(
        domains=frozenset(facts["domains"]),
        low=array("low"),
        high=array("high"),
        mean=array("mean"),
        scale=array("scale"),
        layers=tuple((array(f"weight{i}"), array(f"bias{i}")) for i in range(facts["layers"])),
        quantiles=(facts["quantiles"][0], facts["quantiles"][1]),
        families=tuple(facts["families"]),
        tiles=tuple((tile[0], tile[1]) if tile else None for tile in facts["tiles"]),
    )
