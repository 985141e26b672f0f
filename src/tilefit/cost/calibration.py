"""The second stage of the model: a correction fitted to measurements of one GPU.

For each kind of operation an ensemble of small networks predicts ``log(time / baseline)``, the spread of its
own error, and for products the family and the tile of the kernel that runs. The inputs are those of
:mod:`tilefit.cost.features`. Two programs fit them and record their errors on shapes that the fit never saw:
``benchmarks/fit_calibration.py`` for a calibration that ships, and ``tilefit calibrate`` for the user's own.
Both write the file that :func:`read` reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite, log
from pathlib import Path
from struct import error as StructError
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile, is_zipfile
from zlib import crc32
from zlib import error as ZlibError

from tilefit import gpus
from tilefit.cost.analytic import analytic as first_stage
from tilefit.cost.constants import Constants, LinkConstants
from tilefit.cost.estimate import ESTIMATED, Estimate, bound
from tilefit.cost.features import apart, divided, domain, example, features
from tilefit.cost.memory import floor_s
from tilefit.cost.tiles import count
from tilefit.errors import TilefitError, UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Gemm, Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: The logarithm of a spread is trained up to this (a factor of e^7); beyond it says nothing.
WIDEST = 2.0
#: A tile is named where the network gives it at least this probability; else it is unsure.
SURE = 0.4
#: Networks are surer of the way on shapes that they were trained on than on others: logits over this.
SOFTENED = 1.5


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
        paths: Number of ways in which the library may compute it, of which the last outputs are the logits
            and the times; the time is then the mean of what these say together and of the first output,
            which changes less abruptly from one size to the next.
        on_analytic: The first stage's time is corrected, and is the last input (:func:`on_analytic`); else
            the baseline of the features is.
        bounds: The least and the largest correction that was measured; no other is predicted.
        divided: Of products these see more (:func:`~tilefit.cost.features.divided`).
        apart: Quantiles of operations that are told apart (:func:`~tilefit.cost.features.apart`).
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
    on_analytic: bool = False
    bounds: tuple[float, float] = (-inf, inf)
    paths: int = 0
    divided: bool = False
    apart: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, rows: Sequence[Sequence[float]] | NDArray[np.float32]) -> NDArray[np.float32]:
        """The outputs for rows of inputs: [rows, 2 + families + tiles]."""
        import numpy as np

        outputs: NDArray[np.float32] = self.members(rows).mean(axis=0)
        if self.paths:
            outputs, logits, times = np.split(outputs, (-2 * self.paths, -self.paths), axis=1)
            outputs[:, 0] = (outputs[:, 0] + least_error(times, logits)) / 2
        return outputs

    def kept(self, share: float) -> Network:
        """Networks that correct by a share of what these do."""
        weight, bias = (each.copy() for each in self.layers[-1])
        weight[..., 0] *= share
        bias[..., 0] *= share
        bounds = (share * self.bounds[0], share * self.bounds[1])
        return replace(self, layers=(*self.layers[:-1], (weight, bias)), bounds=bounds)

    def members(self, rows: Sequence[Sequence[float]] | NDArray[np.float32]) -> NDArray[np.float32]:
        """The outputs of each network of the ensemble: [members, rows, 2 + families + tiles + 2 * paths].

        Of rows of more inputs than it was fitted to those at their end are left out."""
        import numpy as np

        x = np.asarray(rows, dtype=np.float32)[:, : len(self.low)]
        x = ((np.clip(x, self.low, self.high) - self.mean) / self.scale)[None]
        for index, (weight, bias) in enumerate(self.layers):
            x = x @ weight + bias
            if index < len(self.layers) - 1:
                np.maximum(x, 0.0, out=x)
        np.clip(x[..., 0], *self.bounds, out=x[..., 0])
        return x


class Quick(NamedTuple):
    """How fast a GPU is beside its facts: its memory and its multiprocessors' clock."""

    memory: float
    clock: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """The measured behaviour of one GPU.

    Attributes:
        networks: By kind of operation.
        about: The GPU, versions, dates, numbers of measurements and errors.
        constants: Of the first stage, fitted to this GPU; None for those of its kind.
        kind_constants: Of the first stage that a kind's networks correct, where these are others.
        quick: What a quick calibration found; the networks are then those that ship.
        donor: The GPU that the networks are of, where a calibration without any took them from it.
        launch_scale: Host time of a step, over what :mod:`tilefit.cost.launch` states.
        title: Where the measurements are from, for reports.
        links: Of what joins this machine's GPUs, where that was measured.
    """

    networks: dict[str, Network]
    about: dict[str, Any]
    constants: Constants | None = None
    launch_scale: float = 1.0
    title: str = ""
    kind_constants: dict[str, Constants] = field(default_factory=dict)
    quick: Quick | None = None
    donor: str = ""
    links: LinkConstants | None = None

    @property
    def on_shipped(self) -> bool:
        """Whether the networks correct what was predicted by what ships, not the first stage."""
        return bool(self.about.get("on"))

    def covers(self, op: Op) -> bool:
        """Whether operations of this kind, type and role were measured."""
        network = self.networks.get(op.kind)
        return network is not None and domain(op) in network.domains

    def correct(self, ops: Sequence[Op], gpu: Gpu, analytic: Sequence[Estimate]) -> list[Estimate]:
        """The analytic estimates of covered operations of one kind, corrected by what was measured."""
        import numpy as np

        network = self.networks[ops[0].kind]
        baselines, rows = on_analytic(ops, gpu, analytic if network.on_analytic else None, network.divided)
        outputs = network(rows)
        times = baselines * np.exp(outputs[:, 0])
        spreads = np.exp(np.minimum(outputs[:, 1], WIDEST))
        lower, upper = np.array([network.apart.get(apart(op, gpu), network.quantiles) for op in ops]).T
        low = times * np.exp(lower * spreads)
        high = times * np.exp(upper * spreads)
        chosen = _kernels(outputs, network) if network.families else [{}] * len(ops)
        corrected = []
        columns = times.tolist(), low.tolist(), high.tolist(), chosen
        for op, estimate, each_s, low_s, high_s, choice in zip(ops, analytic, *columns, strict=True):
            floor = floor_s(op, gpu)
            time_s = max(each_s, floor)
            facts: dict[str, Any] = {}
            if choice and isinstance(op, Gemm):
                tile = choice["tile"]
                facts = choice | {"waves": count(op.m, op.n, tile, op.batch) / gpu.sms if tile else None}
            corrected.append(
                replace(
                    estimate,
                    time_s=time_s,
                    low_s=min(time_s, max(low_s, floor)),
                    high_s=max(time_s, high_s),
                    bound=bound(estimate.math_s, estimate.memory_s, time_s),
                    provenance=ESTIMATED,
                    **facts,
                )
            )
        return corrected


def least_error(times: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of the times (logarithms) of some ways [rows, ways] the one that is expected to err least.

    The least mean relative error has the median of the times, each weighted by its probability over the time.
    """
    import numpy as np

    weights = np.exp((logits - logits.max(axis=1, keepdims=True)) / SOFTENED - times)
    order = times.argsort(axis=1)
    below = np.take_along_axis(weights, order, axis=1).cumsum(axis=1)
    middle = (below >= below[:, -1:] / 2).argmax(axis=1)
    row = np.arange(len(times))
    found: NDArray[np.float32] = times[row, order[row, middle]]
    return found


def _kernels(outputs: NDArray[np.float32], network: Network) -> list[dict[str, Any]]:
    """Of each row the likeliest family and, where that is sure enough, tile, and all that is said of them."""
    import numpy as np

    _, *logits = np.split(outputs, (2, 2 + len(network.families)), axis=1)
    raised = (np.exp(each - each.max(axis=1, keepdims=True)) for each in logits)
    families, tiles = (each / each.sum(axis=1, keepdims=True) for each in raised)
    sides = np.log2([tile or (1, 1) for tile in network.tiles])
    sure, unnamed = tiles.max(axis=1), tiles @ [tile is None for tile in network.tiles]
    odds = np.column_stack((families, tiles @ sides, sure, unnamed, outputs[:, 1]))
    likeliest = families.argmax(axis=1), np.where(sure >= SURE, tiles.argmax(axis=1), -1), odds.tolist()
    named = [{"kernel_family": name} if name else {} for name in network.families]
    return [
        named[family] | {"tile": network.tiles[tile] if tile >= 0 else None, "odds": tuple(told)}
        for family, tile, told in zip(*likeliest, strict=True)
    ]


def on_analytic(
    ops: Sequence[Op], gpu: Gpu, analytic: Sequence[Estimate] | None, in_parts: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """The first stage's times [s], and the inputs of networks that correct them; without these the baseline
    of the features, and the inputs of networks that correct that.

    The inputs are the features and, last, the logarithm of the first stage's time over their baseline; of
    products ``in_parts`` also how wide its interval is, how they are divided, and what is said of the kernel.
    """
    import numpy as np

    baselines, rows = map(np.array, zip(*(features[type(op)](op, gpu) for op in ops), strict=True))
    rows = rows.astype(np.float32)
    if analytic is None:
        return baselines, rows
    times = np.array([each.time_s for each in analytic])
    rows = np.column_stack((rows, np.log(times / baselines).astype(np.float32)))
    if in_parts:
        both = zip(ops, analytic, strict=True)
        more = [[log(each.high_s / each.low_s), *divided(op, gpu), *each.odds] for op, each in both]
        rows = np.column_stack((rows, np.array(more, dtype=np.float32)))
    return times, rows


# --- the file --------------------------------------------------------------------------------------

#: What can go wrong in a file that was cut, altered, or is something else.
DAMAGED = (
    EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError,
    StructError, BadZipFile, ZlibError,
)  # fmt: skip
#: What the inputs are normalised by.
_INPUTS = ("low", "high", "mean", "scale")
#: Version of the form; files without one are of the first.
FORMAT = 2
_OTHER_VERSION = "it was made with another version of tilefit"
_HINT = "Use another file, or make a new one on this GPU: tilefit calibrate."


def fingerprint(kind: str, gpu: Gpu, corrects_first_stage: bool = False, in_parts: bool = False) -> int:
    """Changes when the inputs of a kind's networks change, or the GPU's facts; and where they correct the
    first stage, when that does.

    Networks fitted before would be given inputs that mean something else.
    """
    op = example(kind)
    told = [first_stage(op, gpu)] if corrects_first_stage else None
    baselines, rows = on_analytic([op], gpu, told, in_parts)
    return crc32(" ".join(f"{value:.4g}" for value in (*baselines, *rows[0])).encode())


def read(path: Path) -> Calibration:
    """The calibration in a file.

    Raises:
        TilefitError: the file cannot be read, or is no calibration, or damaged. It is left as it is.
    """
    try:
        return load(path)
    except (OSError, *DAMAGED) as error:
        why = error.strerror or error if isinstance(error, OSError) else damage(error)
        raise TilefitError(f"the calibration cannot be read: {why}", where=str(path), hint=_HINT) from error


def damage(error: Exception) -> str:
    """What one of :data:`DAMAGED` means to who named the file; what is raised here says it itself."""
    return str(error) if type(error) is ValueError else "it is damaged, or no calibration"


def load(path: Path) -> Calibration:
    """As :func:`read`, but raises what went wrong: OSError or one of :data:`DAMAGED`."""
    import numpy as np

    with path.open("rb") as file:
        if not is_zipfile(file):
            raise BadZipFile
        file.seek(0)
        arrays = np.load(file, allow_pickle=False)
        about = json.loads(str(arrays["about"]))
        if about.get("format", 1) > FORMAT:
            raise ValueError("it was made with a newer version of tilefit")
        networks = {kind: network(arrays, kind, facts) for kind, facts in about["networks"].items()}
    gpu = gpus.get(about["gpu"])
    known = about["networks"].items()
    for kind, facts in known:
        seen = facts.get("on_analytic", False), facts.get("divided", False)
        if facts.get("fingerprint") != fingerprint(kind, gpu, *seen):
            raise ValueError(_OTHER_VERSION)
    links = _links(about["links"]["constants"]) if "links" in about else None
    quick = Quick(**about["quick"]) if "quick" in about else None
    title = ""
    if "collected" in about:
        title = f"measured by tilefit's authors, {about['collected'][-1]}"
    elif networks or quick:  # not the links alone
        title = f"{'quickly ' if quick else ''}calibrated on {about['date'][:10]}"
    constants = _constants(about["constants"]) if "constants" in about else None
    others = {kind: _constants(each["constants"]) for kind, each in known if "constants" in each}
    scale = about.get("launch_scale", 1.0)
    return Calibration(networks, about, constants, scale, title, others, quick, links=links)


def _constants(facts: dict[str, Any]) -> Constants:
    if facts.keys() != Constants.__dataclass_fields__.keys():
        raise ValueError(_OTHER_VERSION)
    return Constants(**facts)


def _links(facts: dict[str, Any]) -> LinkConstants:
    found = LinkConstants(**facts)
    numbers = [value for name, value in facts.items() if name != "provenance"]
    if not all(isfinite(number) and number >= 0 for number in numbers) or not found.share:
        raise ValueError("the constants of its links are no finite numbers")
    return found


def with_links_of(found: Calibration, path: Path) -> Calibration:
    """A new calibration with what the one in a file, which it is to replace, knows of the GPU's links."""
    if not path.exists():
        return found
    before = load(path)
    if before.links is None or before.about["gpu"] != found.about["gpu"]:
        return found
    return replace(found, links=before.links, about=found.about | {"links": before.about["links"]})


def merged(first: Calibration, second: Calibration) -> Calibration:
    """Of two calibrations of a GPU, for each kind the one with the smaller error on what it held out.

    All else is the first's.

    Raises:
        UsageError: they are of different GPUs, or one holds no errors, as one that ships or a quick one.
    """
    alike = all(first.about.get(name) == second.about.get(name) for name in ("gpu", "on"))
    if not alike or not (first.constants and second.constants):
        mine, other = first.about["gpu"], second.about["gpu"]
        hint = "Merge two of the same GPU that this version's tilefit calibrate made without --quick."
        raise UsageError(f"a calibration of {mine} cannot be merged with this one of {other}", hint=hint)
    networks, own = dict(first.networks), dict(first.kind_constants)
    facts: dict[str, Any] = {}
    for each in (second, first):
        for kind, told in each.about["networks"].items():
            if kind in facts and facts[kind]["errors"]["calibrated"] < told["errors"]["calibrated"]:
                continue
            own[kind] = each.kind_constants.get(kind) or each.constants or first.constants
            networks[kind], facts[kind] = each.networks[kind], told | {"constants": asdict(own[kind])}
    return replace(first, networks=networks, about=first.about | {"networks": facts}, kind_constants=own)


def write(calibration: Calibration, path: Path) -> None:
    """Write a calibration's file, whole or not at all.

    Raises:
        TilefitError: it cannot be written.
    """
    import numpy as np

    arrays: dict[str, Any] = {}
    for kind, fitted in calibration.networks.items():
        for name in _INPUTS:
            arrays[f"{kind}/{name}"] = getattr(fitted, name)
        for index, (weight, bias) in enumerate(fitted.layers):
            arrays[f"{kind}/weight{index}"] = weight.astype(np.float16)
            arrays[f"{kind}/bias{index}"] = bias.astype(np.float16)
    about = calibration.about | {"format": FORMAT}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        what = f"the calibration cannot be written: {error.strerror}"
        raise TilefitError(what, where=str(path), hint="Choose another file: --output FILE.") from error


def network(arrays: Any, kind: str, facts: dict[str, Any]) -> Network:
    """One kind's networks from the arrays and facts of a calibration's file."""
    import numpy as np

    def array(name: str) -> NDArray[np.float32]:
        kept = arrays[f"{kind}/{name}"]  # in files that ship some as their bytes
        if kept.dtype == np.uint8:
            kept = np.ascontiguousarray(kept).view(f"<f{kept.shape[-1]}")[..., 0]
        found: NDArray[np.float32] = kept.astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError(f"{kind}/{name} holds no finite numbers")
        return found

    def weight(index: int) -> NDArray[np.float32]:
        """Some are kept in whole steps, a step for each output."""
        name = f"weight{index}"
        return array(name) * array(f"{name}_step") if f"{kind}/{name}_step" in arrays else array(name)

    low, high = facts.get("bounds", (-inf, inf))
    return Network(
        domains=frozenset(facts["domains"]),
        **{name: array(name) for name in _INPUTS},
        layers=tuple((weight(i), array(f"bias{i}")) for i in range(facts["layers"])),
        quantiles=(facts["quantiles"][0], facts["quantiles"][1]),
        families=tuple(facts["families"]),
        tiles=tuple((tile[0], tile[1]) if tile else None for tile in facts["tiles"]),
        on_analytic=facts.get("on_analytic", False),
        bounds=(low, high),
        paths=facts.get("paths", 0),
        divided=facts.get("divided", False),
        apart={name: (least, most) for name, (least, most) in facts.get("apart", {}).items()},
    )
