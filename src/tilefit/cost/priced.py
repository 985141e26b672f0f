"""A GPU with what its estimates rest on: a calibration that was named, the user's own or one that ships."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

from tilefit import gpus
from tilefit.cost.calibration import DAMAGED, Calibration, damage, load, read
from tilefit.cost.constants import Constants, constants
from tilefit.cost.launch import KNOWN_HOST, UNKNOWN_HOST
from tilefit.cost.measured import MeasuredRun
from tilefit.cost.tables import DATA, toml
from tilefit.errors import TilefitError, UsageError
from tilefit.gpus import Gpu
from tilefit.ops import Conv, Op, Streaming
from tilefit.paths import corrupt_name, data_folder

#: How far off all operations of a step are together where no GPU that chooses among the same kernels was
#: measured: what holds 80 % of 304 steps of 64 timm models, each of another family, on an RTX 3090. On a
#: 4090, on which it was not chosen, 83 % of 269 are inside. Where one was measured, the operations' own
#: intervals need nothing beside them (``benchmarks/common_spread.py``, ``lambda_training.py``).
_GENERAL_SPREAD = 0.07
_FACTS = tuple(each.name for each in fields(Gpu))


@dataclass(frozen=True, slots=True)
class PricedGpu(Gpu):
    """A GPU as estimates see it; equal to another with the same facts and the very same calibration.

    Attributes:
        calibration: The measured behaviour of this GPU, or of a donor where nobody has measured it.
        run: A run on it that steps are priced by; single operations are not.
    """

    calibration: Calibration = field(kw_only=True, repr=False)
    run: MeasuredRun | None = field(default=None, repr=False, compare=False)

    __hash__ = Gpu.__hash__

    @property
    def constants(self) -> Constants:
        """Of the model's first stage: fitted to this GPU, else those of its kind."""
        found = (not self.donor and self.calibration.constants) or constants(self)
        if (quick := self.calibration.quick) is None:
            return found
        return replace(
            found,
            memory_efficiency=found.memory_efficiency * quick.memory,
            math_efficiency=found.math_efficiency * quick.clock,
            simt_efficiency=found.simt_efficiency * quick.clock,
        )

    @property
    def as_measured(self) -> Gpu:
        """The facts that a donor's times are carried over to: as fast as a quick calibration found it."""
        if (quick := self.calibration.quick) is None:
            return self
        return replace(
            gpus.get(self.name),
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s * quick.memory,
            boost_clock_hz=self.boost_clock_hz * quick.clock,
        )

    @property
    def donor(self) -> PricedGpu | None:
        """The GPU whose times are carried over: another, or itself where a quick one corrects them."""
        of = self.calibration.donor or self.calibration.about["gpu"]
        if of == self.name and (self.calibration.quick is None or not self.calibration.donor):
            return None
        return _with(gpus.get(of), _ships(self) if self.calibration.quick else self.calibration)

    @property
    def before(self) -> PricedGpu | None:
        """This GPU as it is priced by what its calibration was made on top of: what ships, or a donor's."""
        if not self.calibration.on_shipped:
            return None
        return replace(self, calibration=_below(gpus.get(self.name), self.calibration), run=None)

    def covers(self, op: Op) -> bool:
        """Whether the calibration, or what it was made on top of, speaks of an operation: a donor's of all
        where the libraries choose among the same kernels, else of those that are compiled of the same code
        for every GPU."""
        if (donor := self.donor) is None:
            return self.calibration.covers(op) or ((before := self.before) is not None and before.covers(op))
        narrow = isinstance(op, Streaming) or (isinstance(op, Conv) and op.is_narrow)
        return (self._is_alike or narrow) and donor.covers(op)

    @property
    def common_spread(self) -> float:
        """How far off all operations of a step may be together: half-width of the 80 % interval of its GPU
        time, as a share."""
        return 0.0 if self._is_alike else _GENERAL_SPREAD

    @property
    def _is_alike(self) -> bool:
        return self.donor is None or self.donor.compute_capability == self.compute_capability

    @property
    def launch_scale(self) -> float:
        """Host time of a step, over what :mod:`tilefit.cost.launch` states."""
        timed = self.run.launch_scale if self.run else None
        return self.calibration.launch_scale if timed is None else timed

    @property
    def launch_spread(self) -> float:
        """What the host takes may be so many times as much, or as little (80 %)."""
        if self.run is not None and self.run.launch_scale is not None:
            return KNOWN_HOST
        spread: float = self.calibration.about.get("launch_spread", UNKNOWN_HOST)
        return spread

    @property
    def calibration_title(self) -> str:
        """Where the measurements are from."""
        if self.donor is None or self.calibration.quick:
            return self.calibration.title
        return f"the {self.donor.title}'s, {self.calibration.title}"


def priced(gpu: Gpu | str, calibration: str | os.PathLike[str] | None = None) -> PricedGpu:
    """A GPU with what its estimates rest on; one that has it already stays as it is.

    Args:
        gpu: The GPU, or its name.
        calibration: A calibration's file; kinds of operations that it does not know are taken from the
            calibration that ships. None: the user's own of the GPU, else the one that ships.

    Raises:
        UsageError: no GPU has this name, or the calibration is of another one.
        TilefitError: the file cannot be read, or is no calibration. The user's own is then set aside, so that
            the next call goes on without it.
    """
    return _together([gpu], _named(calibration))[0]


def resolve(
    asked: str | Gpu | Sequence[str | Gpu] | None, calibration: str | os.PathLike[str] | None = None
) -> tuple[PricedGpu, ...]:
    """The GPUs meant, in order, each once; None: that of the calibration, else the one of this machine.

    Raises:
        TilefitError: as :func:`priced`; or none was named and this machine has no GPU.
    """
    named = _named(calibration)
    several: Sequence[Any] = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    if asked is None or not several:
        several = [named.about["gpu"] if named else _local()]
    return tuple(dict.fromkeys(_together(several, named)))


#: By library the first version for a GPU, and what some versions lack.
_LIBRARIES = toml("libraries")


def with_libraries(gpu: PricedGpu, versions: str) -> PricedGpu:
    """A GPU on which libraries of these versions run, such as ``cublas=10.2,cudnn=7.6``.

    Raises:
        UsageError: no such library is known, a version is none, or it is older than the GPU.
    """
    lacks: set[str] = set()
    for each in filter(None, versions.split(",")):
        name, _, text = each.partition("=")
        number, known = _version(text), _LIBRARIES.get(name)
        if known is None or min(number) < 0:
            what = f"{each!r} is no version of {' or '.join(_LIBRARIES)}"
            raise UsageError(what, hint="Write cublas=10.2,cudnn=7.6.")
        runs = (at for since, at in known["first"].items() if _version(since) <= gpu.compute_capability)
        first = max(runs, key=_version, default="0")
        if number < _version(first):
            hint = f"The first that does is {first}."
            raise UsageError(f"{name} {text} does not run on the {gpu.title}", hint=hint)
        spans = known["lacks"].items()
        lacks |= {what for what, span in spans if _version(span[0]) <= number < _version(span[1])}
    return replace(gpu, lacks=frozenset(lacks)) if lacks else gpu


def _version(text: str) -> tuple[int, ...]:
    """Its numbers; of what is none, -1."""
    return tuple(int(part) if part.isdecimal() else -1 for part in text.split("."))


def _together(asked: Sequence[Any], named: Calibration | None) -> list[PricedGpu]:
    devices = [gpus.get(entry) if isinstance(entry, str) else entry for entry in asked]
    for entry in devices:
        if not isinstance(entry, Gpu):
            what = f"a GPU is named by a text, not by {type(entry).__name__} {entry!r}"
            raise UsageError(what, hint='Write gpu="h200"; tilefit gpu lists them.')
    of_gpu, names = (named.about["gpu"] if named else ""), [device.name for device in devices]
    if named and of_gpu not in names:
        what = f"the calibration is of the GPU {of_gpu}, not of {', '.join(names)}"
        raise UsageError(what, hint=f"Check for that one: --gpu {of_gpu}; or leave the calibration out.")

    def with_calibration(device: Gpu) -> PricedGpu:
        if named and device.name == of_gpu:
            return _with(device, named)
        return device if isinstance(device, PricedGpu) else _with(device, _usual(device))

    return [*map(with_calibration, devices)]


@lru_cache(maxsize=64)
def _with(gpu: Gpu, calibration: Calibration) -> PricedGpu:
    """The same object for the same arguments: estimates are looked up by it."""
    return PricedGpu(**{name: getattr(gpu, name) for name in _FACTS}, calibration=calibration)


def _local() -> Gpu:
    device = gpus.local()
    if device is None:
        hint = 'Name the one to check for: --gpu h200 (gpu="h200"); tilefit gpu lists them. '
        hint += "A GPU in this machine is found by nvidia-ml-py: pip install nvidia-ml-py."
        raise UsageError("no GPU was named, and none was found in this machine", hint=hint)
    return device


# --- which calibration -----------------------------------------------------------------------------


def user_path(gpu: str) -> Path:
    """Where ``tilefit calibrate`` keeps the calibration of a GPU, by its short name."""
    return data_folder() / "calibrations" / f"{gpu}.npz"


@cache
def shipped(gpu: str) -> Calibration | None:
    """The calibration that ships for a GPU, by its short name, or as a donor's, by that of its file."""
    path = DATA / f"{gpu}.npz"
    return read(path) if path.is_file() else None


@lru_cache(maxsize=64)
def _donated(capability: tuple[int, int]) -> Calibration:
    """The calibration that others are made on top of: of a GPU of the same compute capability, if there can
    be one."""
    donors = [found for path in sorted(DATA.glob("*-donor.npz")) if (found := shipped(path.stem))]
    return next((d for d in donors if gpus.get(d.about["gpu"]).compute_capability == capability), donors[0])


def _ships(gpu: Gpu) -> Calibration:
    """What ships for a GPU: its own, else a donor's."""
    return shipped(gpu.name) or _donated(gpu.compute_capability)


def left_out(gpu: Gpu) -> PricedGpu:
    """A GPU priced as if nobody had measured it: by a donor's calibration."""
    return _with(gpus.get(gpu.name), _donated(gpu.compute_capability))


def as_shipped(gpu: Gpu) -> PricedGpu:
    """A GPU priced by what ships, whatever its user has calibrated."""
    return _with(gpus.get(gpu.name), _ships(gpu))


def basis(gpu: PricedGpu) -> str:
    """Tells apart what prices a GPU from what did with other versions."""
    return _checksum(gpu.calibration)


def _checksum(calibration: Calibration) -> str:
    return f"{crc32(json.dumps(calibration.about, sort_keys=True).encode()):08x}"


@lru_cache(maxsize=64)
def _below(gpu: Gpu, calibration: Calibration) -> Calibration:
    """What a calibration was made on top of, with what it knows of the GPU's links.

    Raises:
        ValueError: it was what shipped with another version.
    """
    for found in (shipped(gpu.name), _donated(gpu.compute_capability)):
        if found is not None and _checksum(found) == calibration.about["on"]:
            return replace(found, links=calibration.links) if calibration.links else found
    raise ValueError("it was made with another version of tilefit")


def keep(path: Path) -> Path | None:
    """Before a calibration is written: move a file that is there and is no sound one; returns where to.

    Raises:
        TilefitError: what is there cannot be read.
    """
    try:
        load(path)
    except FileNotFoundError:
        return None
    except OSError:
        read(path)  # says so
    except DAMAGED:
        return path.rename(corrupt_name(path))
    return None


def _named(path: str | os.PathLike[str] | None) -> Calibration | None:
    if path is None:
        return None
    own = read(Path(path))
    try:
        return _completed(own, own.networks)
    except ValueError as error:
        hint = "Make a new one on this GPU: tilefit calibrate."
        raise TilefitError(f"the calibration cannot be used: {error}", where=str(path), hint=hint) from error


def _usual(gpu: Gpu) -> Calibration:
    """The user's own calibration, else the one that ships."""
    path = user_path(gpu.name)
    try:
        changed_ns = os.stat(path).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return _ships(gpu)
    except OSError:
        changed_ns = 0  # reading it will say what is wrong
    return _users(path, changed_ns, gpu.name)


@lru_cache(maxsize=64)
def _users(path: Path, changed_ns: int, gpu: str) -> Calibration:
    """The user's own, without the kinds that the shipped calibration predicted better when it was made."""
    try:
        own = load(path)
        if own.about["gpu"] != gpu:
            raise ValueError(f"it is one of the GPU {own.about['gpu']}")
        return _completed(own, _better(own))
    except OSError:
        read(path)  # says so
        raise
    except DAMAGED as error:
        aside = path.rename(corrupt_name(path))
        moved = f"It was moved to {aside.name}. Run the command again to go on without it"
        what, hint = damage(error), f"{moved}, or make a new one: tilefit calibrate."
        what = f"the calibration of this GPU cannot be used: {what}"
        raise TilefitError(what, where=str(path), hint=hint) from error


def _better(own: Calibration) -> list[str]:
    """The kinds that a calibration predicted better than what shipped when it was made."""
    errors = {kind: facts.get("errors", {}) for kind, facts in own.about["networks"].items()}
    return [kind for kind, e in errors.items() if e.get("calibrated", 0.0) < e.get("shipped", inf)]


def _completed(own: Calibration, kinds: Iterable[str]) -> Calibration:
    """A calibration with these kinds, and what else the shipped one knows; a quick one with all of that.

    Raises:
        ValueError: it was made on top of what shipped with another version.
    """
    if own.quick:
        return corrected(own)
    name = own.about["gpu"]
    if not own.networks:  # nothing but links was measured
        ships = _ships(gpus.get(name))
        donor = ships.about["gpu"] if ships.about["gpu"] != name else ""
        return replace(ships, about=ships.about | {"gpu": name}, donor=donor, links=own.links)
    if own.on_shipped:
        _below(gpus.get(name), own)
        return replace(own, networks={kind: own.networks[kind] for kind in _better(own)})
    mine = {kind: own.networks[kind] for kind in kinds}
    others = _donated(gpus.get(name).compute_capability)
    if others.about["gpu"] != name:  # these networks correct something else
        return replace(own, networks=mine)
    theirs = {kind: net for kind, net in others.networks.items() if kind not in mine}
    title = own.title if mine else others.title
    if mine and theirs:
        title = f"{', '.join(mine)} {own.title}; {', '.join(theirs)} {others.title}"
    return replace(own, networks=mine | theirs, title=title)


def corrected(own: Calibration) -> Calibration:
    """A quick calibration with the networks that it corrects: those of its GPU that ship, else a donor's."""
    ships = _ships(gpus.get(own.about["gpu"]))
    of = ships.about["gpu"]
    title = f"{own.title}; the {gpus.get(of).title}'s, {ships.title}"
    return replace(own, networks=ships.networks, donor=of, title=title)
