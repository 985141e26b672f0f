"""Files that a program reads and that are not there."""

from __future__ import annotations

import os
import re
from unittest.mock import patch

from tilefit.capture.program.fake_data import made
from tilefit.capture.program.fake_data.sources import (
    PUT_IT_THERE,
    Sources,
    asked_by_user,
    is_listed,
    is_prepared,
    is_required,
    user_source,
)
from tilefit.capture.program.scratch import Scratch
from tilefit.capture.sites import short_path

#: Images in a folder that is not there. One of masks has PNG files of the same names.
_IMAGES = 256
_MASKS = re.compile("mask|label|annot|segm|^gt|ground.?truth|^anno")


class Files:
    """Makes what a program reads and that is not there, in its scratch folder."""

    scratch: Scratch

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._busy = False

    def supply(self, path: str, function: str) -> bool:
        """Make what is at a path; false where that is not wanted or nobody knows what it would be."""
        if self._busy:
            return False
        with patch.object(self, "_busy", True):
            return self._supply(path, function)

    def _supply(self, path: str, asked: str) -> bool:
        is_image = path.lower().endswith(made.IMAGES)
        if asked == "stat" and is_listed():  # pathlib looks whether it is a folder
            asked, wanted = "listdir", not is_prepared()
        elif asked == "stat":
            wanted = is_required()
        else:
            wanted = (asked_by_user() or (is_image and asked == "open")) and not is_prepared()
        if not wanted:
            return False
        if asked in ("open", "stat"):
            return self.make(path)
        name = short_path(os.path.abspath(path))
        self._sources.note(name)
        if self._sources.fake:
            kind = self._fill(path)
            self._sources.state(name, f"{_IMAGES} random {kind} of 500 x 375")
        return self._sources.fake

    def make(self, path: str) -> bool:
        """Make a missing file; false where that is not wanted or nobody knows what would be in it."""
        name, content = short_path(os.path.abspath(path)), made.content(path)
        self._sources.note(name, *([] if content else [PUT_IT_THERE]))
        if content is None or not self._sources.fake:
            return False
        self.scratch.write(path, content[0])
        self._sources.state(name, content[1])
        return True

    def _fill(self, folder: str) -> str:
        """Fill a folder, and tell with what."""
        is_mask = _MASKS.search(os.path.basename(os.path.abspath(folder)).lower()) is not None
        data, suffix = (made.encoded("PNG", mask=True), "png") if is_mask else (made.encoded("JPEG"), "jpg")
        source = user_source().lower()
        if not is_mask and ".png" in source and ".jpg" not in source and ".jpeg" not in source:
            data, suffix = made.encoded("PNG"), "png"
        for index in range(_IMAGES):
            # Before a name's underscore, and in its first digits, programs look for a class.
            name = f"{index % 8}_{index:05}.{suffix}"
            self.scratch.write(os.path.join(folder, name), data)
        return "masks" if is_mask else "images"
