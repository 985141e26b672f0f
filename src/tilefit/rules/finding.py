"""What a rule has to say."""

from __future__ import annotations

from dataclasses import dataclass, field

SAFE = "safe"
UNSAFE = "unsafe"
ADVICE = "advice"

ERROR = "error"
WARNING = "warning"
NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth changing, with its price.

    Attributes:
        code: The rule's code, such as ``ALN002``.
        severity: ``error`` (cannot run as it is), ``warning`` (worth at least 5 % of the step) or ``note``.
        module, source: The site; where several share the finding, their common pattern
            (``transformer.h.*.mlp.c_fc``) and the first one's line.
        message: What is wrong, one sentence.
        fix: What to do, one sentence.
        safety: ``safe`` (same function), ``unsafe`` (may change training) or ``advice``.
        gain_s: Predicted saving per step; ``gain_low_s`` and ``gain_high_s`` bound it.
        gain_fraction: The saving as a share of the step.
        arithmetic: The figures behind it, a line each.
        sites: How many modules share it.
        next_command: A tilefit command that shows more; may be empty.
    """

    code: str
    severity: str
    module: str
    source: str
    message: str
    fix: str
    safety: str
    gain_s: float
    gain_low_s: float
    gain_high_s: float
    gain_fraction: float
    arithmetic: tuple[str, ...] = field(default=())
    sites: int = 1
    next_command: str = ""
