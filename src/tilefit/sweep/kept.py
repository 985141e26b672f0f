"""Points of sweeps in the store: an interrupted sweep goes on where it stopped."""

from __future__ import annotations

import ast
import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import accumulate
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

    A point is found again if the target, the texts of the user's modules that it is made of, the options, the
    GPU with its calibration, and the versions of tilefit and of the libraries are the same.

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
        self._about = [target, _texts(target), versions(_ROOMS), list(measured)]
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


def _texts(target: str) -> dict[str, str]:
    """The texts of the file a target is in, and of those beside it or below this folder that it imports, and
    that these import; none for a library's model."""
    place = target.removeprefix("hf:") if target.startswith("hf:") else target.rpartition(":")[0]
    first = Path(place)
    waiting = [first / "config.json" if first.is_dir() else first, *_files(place, {Path()})]
    texts: dict[str, str] = {}
    for file in waiting:  # which grows
        if str(file) not in texts and file.is_file():
            texts[str(file)] = text = file.read_text(errors="replace")
            for name in _imported(text) if file.suffix == ".py" else ():
                waiting += _files(name, {Path(), first.parent, file.parent})
    return texts


def _imported(text: str) -> Iterator[str]:
    """What a file of Python imports: modules, and what may be one."""
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                of = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
                yield from (f"{of}{each.name}" for each in node.names)


def _files(module: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Where a module and the packages that it is in may be."""
    for path in accumulate(map(Path, module.split(".")), operator.truediv):
        for folder in folders:
            yield from (folder / f"{path}.py", folder / path / "__init__.py")
