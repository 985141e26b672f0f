"""AMP016: whole numbers that half precision cannot tell apart."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, IntegersMerged
from tilefit.precision.rules.base import SIGNIFICAND_BITS, PrecisionRule, figure
from tilefit.rules.finding import NOTE, WARNING, Alarm


class IntegerCollapse(PrecisionRule):
    """Positions, time steps or other whole numbers are cast to half precision, where neighbours merge.

    What it sees: A cast to half precision of values that are all whole numbers beyond 256 (bf16) or 2048
    (fp16), or of a sorted table, after which fewer are distinct; and half-precision buffers of a model where
    that has happened already. Image-shaped data is a note.

    Why nobody notices: Of 1000 positions bf16 keeps 507. Rotary and sinusoidal embeddings give neighbours the
    same code; short sequences are not affected. An explicit `.float()` does not help under autocast: the
    product casts both operands again.

    Wrong:

        freqs = positions.float() @ inv_freq          # inside autocast

    Right:

        with torch.autocast("cuda", enabled=False):
            freqs = positions.float() @ inv_freq.float()

    Source: IEEE 754 and bfloat16: 11 and 8 bits of significand.
    """

    code = "AMP016"
    title = "whole numbers merge in half precision"
    sees = IntegersMerged

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, IntegersMerged)
        what = "whole numbers" if event.integral else "entries of a sorted table"
        exact = 2 ** SIGNIFICAND_BITS[event.dtype]
        yield self.alarm(
            event,
            NOTE if event.likely_data else WARNING,
            f"a cast to {event.dtype} merges {what}: of {event.before} distinct ones {event.after} are left",
            "Compute with them in fp32, inside torch.autocast(..., enabled=False); keep such buffers fp32.",
            f"values up to {figure(event.largest)}; {event.dtype} holds every whole number up to {exact}",
        )
