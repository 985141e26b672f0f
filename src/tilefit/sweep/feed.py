"""Captures that are needed later, made ahead in child processes while the parent works."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict

from tilefit.capture.child import captures_in_child
from tilefit.capture.interpolated import Capture
from tilefit.errors import CaptureError, TilefitError
from tilefit.ops import Step
from tilefit.options import AnyOptions

#: Children at most, and how many captures make another one worth its start.
_MOST_CHILDREN = 2
_CAPTURES_PER_CHILD = 8


class Feed:
    """Runs captures as :func:`~tilefit.capture.child.captures_in_child` does, from those planned if it can.

    Starting a child and importing the model's libraries takes longer than most captures: the planned ones
    share a child, or two where they are many, which is at work while the parent prices what is there.

    Args:
        target: What is captured.
        planned: The captures to make ahead, about in the order in which they will be asked for.
        timeout_s: How long one capture may take.
        capture: Runs captures.
    """

    def __init__(
        self,
        target: str,
        planned: Sequence[AnyOptions],
        timeout_s: float,
        capture: Capture = captures_in_child,
    ) -> None:
        self._capture = capture
        ahead = list({_key(options): options for options in planned}.items())
        count = min(_MOST_CHILDREN, os.cpu_count() or 1, -(-len(ahead) // _CAPTURES_PER_CHILD))
        self._children = [_Child(target, ahead[i::count], timeout_s, capture) for i in range(count)]
        self._child_of = {key: child for child in self._children for key in child.keys}

    def __call__(
        self, target: str, options: Sequence[AnyOptions], timeout_s: float
    ) -> Generator[Step | TilefitError]:
        """For each of the options, in order, the step or what the capture raised."""
        others = [each for each in options if _key(each) not in self._child_of]
        with closing(self._capture(target, others, timeout_s)) as unplanned:
            for each in options:
                child = self._child_of.pop(_key(each), None)
                yield child.take(_key(each)) if child else next(unplanned)

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            child.close()


class _Child:
    """Some of the planned captures, one after the other."""

    def __init__(
        self, target: str, ahead: list[tuple[str, AnyOptions]], timeout_s: float, capture: Capture
    ) -> None:
        self.keys = [key for key, _ in ahead]
        self._target = target
        self._ahead = deque(ahead)
        self._timeout_s = timeout_s
        self._capture = capture
        self._made: dict[str, Step | TilefitError] = {}
        self._source = self._started()

    def take(self, key: str) -> Step | TilefitError:
        """The capture of this key, each once; waits until it is there."""
        while key not in self._made:
            made, _ = self._ahead.popleft()
            try:
                self._made[made] = next(self._source)
            except CaptureError as error:
                # This one ended the process: the others get a new one.
                self._made[made] = error
                self._source.close()
                self._source = self._started()
        return self._made.pop(key)

    def close(self) -> None:
        self._source.close()

    def _started(self) -> Generator[Step | TilefitError]:
        options = [each for _, each in self._ahead]
        return self._capture(self._target, options, self._timeout_s)


def _key(options: AnyOptions) -> str:
    return json.dumps(asdict(options), sort_keys=True)
