"""From a program to a report: its step is captured, priced and searched for waste."""

from tilefit.session.api import assess, check
from tilefit.session.session import Session

__all__ = ["Session", "assess", "check"]
