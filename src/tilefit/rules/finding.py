"""What a rule has to say."""

from __future__ import annotations

from dataclasses import dataclass, field

SAFE = "safe"
UNSAFE = "unsafe"
ADVICE = "advice"
#: More work in a step, and less time for each piece of it: no step becomes shorter.
THROUGHPUT = "throughput"

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
        safety: ``safe`` (same function), ``unsafe`` (may change training), ``advice``, or ``throughput`` (a
            step of more work, such as a larger batch; the gain is for the work of this one).
        gain_s: Predicted saving per step; ``gain_low_s`` and ``gain_high_s`` bound it.
        gain_fraction: The saving as a share of the step.
        arithmetic: The figures behind it, a line each.
        sites: How many modules share it.
        origin: The user's line that made the module, where ``source`` is a library's; may be empty.
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
    origin: str = ""


@dataclass(frozen=True, slots=True)
class RulePage:
    """What a rule says of itself.

    Attributes:
        code, title: The rule's.
        text: Its documentation, as Markdown.
    """

    code: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing wrong in a run that was watched: a finding without a price.

    Attributes:
        code: The rule's code, such as ``AMP003``.
        severity: ``error`` (certain: exact bookkeeping, or confirmed by a replay), ``warning`` (numerics) or
            ``note``.
        source: The line of the user's code, ``file:line``.
        module: The module, parameter or optimizer concerned; may be empty.
        message: What is wrong, one sentence.
        fix: What to do, one sentence.
        arithmetic: The figures behind it, a line each.
        first_step: The step it was first seen in, counted from 0.
        steps: How many times it was seen.
    """

    code: str
    severity: str
    source: str
    message: str
    fix: str
    module: str = ""
    arithmetic: tuple[str, ...] = ()
    first_step: int = 0
    steps: int = 1
