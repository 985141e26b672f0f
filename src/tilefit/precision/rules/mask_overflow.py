"""AMP030: masks that add up to -inf."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, MaskOverflowed
from tilefit.precision.rules.base import LARGEST, PrecisionRule, figure
from tilefit.rules.finding import WARNING, Alarm


class MaskOverflow(PrecisionRule):
    """Finite attention masks add up to -inf.

    What it sees: On watched steps, a half-precision sum of finite values that is -inf and goes into a
    softmax. Masks made with -inf on purpose, without a row that is masked throughout, are fine.

    Why nobody notices: Nothing happens until a row is masked throughout: the softmax of a row of -inf is NaN.

    Wrong:

        mask = causal * torch.finfo(dtype).min + padding * torch.finfo(dtype).min

    Right:

        mask = (causal | padding) * torch.finfo(dtype).min

    Source: IEEE 754: -65504 - 65504 is -inf in fp16; so is -65504 - 16.
    """

    code = "AMP030"
    title = "attention masks add up to -inf"
    sees = MaskOverflowed

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, MaskOverflowed)
        rows = (
            f"{event.rows} rows are -inf throughout: their softmax is NaN"
            if event.rows
            else "no row is full yet"
        )
        yield self.alarm(
            event,
            WARNING,
            f"finite values add up to -inf in {event.dtype} and go into a softmax",
            "Combine boolean masks with | and fill once, or use F.scaled_dot_product_attention with a "
            "boolean mask.",
            f"{event.dtype} ends at -{figure(LARGEST[event.dtype])}; {rows}",
        )
