"""Points of sweeps in the store: an interrupted sweep goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tilefit.capture.cache import versions
from tilefit.cost.priced import PricedGpu
from tilefit.measure.store import Store
from tilefit.options import AnyOptions
from tilefit.sweep.point import Point

#: The parts of tilefit that a point is made by.
_ROOMS = ("capture", "cost", "gpus", "ops", "parallel", "sweep")


class Kept:
    """Points that were computed before.

    A point is found again if the target (of a Python file, its text), the options, the GPU with the profile
    of its estimates, and the versions of tilefit and of the libraries are the same. Other files that a target
    imports are not looked at.

    Args:
        store: Where they are.
        target: What is swept.
        fresh: Compute every point again, and keep the new ones.
        measured: What times were measured with (GPU and versions); empty for predictions.
    """

    def __init__(
        self, store: Store, target: str, *, fresh: bool = False, measured: Sequence[str] = ()
    ) -> None:
        self._store = store
        self._fresh = fresh
        self._about = [target, _content(target), versions(_ROOMS), list(measured)]
        self.found = 0

    def get(self, options: AnyOptions, gpu: PricedGpu, more: Mapping[str, Any]) -> Point | None:
        """The point that was computed with these options before, if any.

        Args:
            options: How its step was captured.
            gpu: The GPU.
            more: What else it depends on.
        """
        text = None if self._fresh else self._store.point(self._key(options, gpu, more))
        if text is None:
            return None
        self.found += 1
        values = json.loads(text)
        return Point(**{**values, "notes": tuple(values["notes"])})

    def put(self, options: AnyOptions, gpu: PricedGpu, more: Mapping[str, Any], point: Point) -> None:
        """Keep a point; one without a step is not kept, what prevented it may pass."""
        if not point.error:
            values = {each.name: getattr(point, each.name) for each in fields(point)}
            self._store.keep_point(self._key(options, gpu, more), json.dumps(values))

    def _key(self, options: AnyOptions, gpu: PricedGpu, more: Mapping[str, Any]) -> str:
        about = [*self._about, asdict(options), gpu.name, gpu.calibration.about, more]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _content(target: str) -> str:
    """The text of the file a target is in; empty for a library's model."""
    path = target.removeprefix("hf:") if target.startswith("hf:") else target.rpartition(":")[0]
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""
