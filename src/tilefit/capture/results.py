"""What a process that captures leaves for the one that started it: a step, or what went wrong, as a line."""

from __future__ import annotations

import json

from tilefit import errors
from tilefit.errors import TilefitError
from tilefit.ops import Step


def written(result: Step | TilefitError) -> str:
    """A result as text."""
    if isinstance(result, Step):
        return result.to_json()
    said = {"what": result.what, "where": result.where, "hint": result.hint}
    return json.dumps({"error": type(result).__name__, **said})


def read(text: str) -> Step | TilefitError:
    """The result of which this is the text."""
    if not text.startswith('{"error"'):
        return Step.from_json(text)
    said = json.loads(text)
    error: TilefitError = getattr(errors, said.pop("error"))(**said)
    return error
