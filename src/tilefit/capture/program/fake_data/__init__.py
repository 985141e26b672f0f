"""Random data in place of data sets, pretrained weights and files that are not on this machine.

Nothing is ever downloaded. A source that is there is read as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from tilefit.capture.program import native_files
from tilefit.capture.program.fake_data import arrays, hub, network, pretrained, side_libraries, vision
from tilefit.capture.program.fake_data.files import Files
from tilefit.capture.program.fake_data.sources import Sources
from tilefit.capture.program.late import changed
from tilefit.capture.program.scratch import redirected

__all__ = ["Sources", "fake_data"]

_PARTS = (vision, hub, pretrained, arrays, network, side_libraries)


@contextmanager
def fake_data(found: list[str], folder: Path | None = None, *, fake: bool = True) -> Iterator[Sources]:
    """Within the block, data that are missing are answered, and files that are written land elsewhere.

    Args:
        found: Gets a text for each source that random data took the place of.
        folder: Where files go that are written or made up; None for one that is deleted.
        fake: Random data take the place of what is missing; otherwise it is noted, for
            :meth:`~tilefit.capture.program.fake_data.sources.Sources.explained`.
    """
    own = TemporaryDirectory(prefix="tilefit-") if folder is None else nullcontext(folder)
    with own as place, Sources(found, fake=fake) as sources:
        files = Files(sources)
        sources.make = files.make
        changes = {name: change for part in _PARTS for name, change in part.changes(sources).items()}
        changes |= native_files.changes(sources.replace, lambda: files.scratch)
        with (
            redirected(place, files.supply) as files.scratch,
            side_libraries.answered(sources),
            changed(changes),
        ):
            sources.files_used = lambda: files.scratch.handed_out
            yield sources
