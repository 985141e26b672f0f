"""AMP024: many gradients summed in half precision."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, HalfSum
from tilefit.precision.rules.base import SIGNIFICAND_BITS, PrecisionRule
from tilefit.rules.finding import NOTE, WARNING, Alarm
from tilefit.units import share

#: From so many terms on, the rounding of a half-precision sum is worth a word.
MANY = 64
#: A measured error above this is a warning.
LARGE = 0.01


class LowPrecisionGradientSum(PrecisionRule):
    """Gradients of many ranks or micro-batches are added up in half precision.

    What it sees: The element type of the sum, and ranks times micro-batches from 64 on; where the
    micro-batches of a step are seen, the error of the half-precision sum against one in fp32. Above 1 % it is
    a warning.

    Why nobody notices: Each addition rounds. In bf16 the 64th of equal terms changes the sum by 1.6 %, and a
    rounding step is 0.4 %.

    Wrong:

        for batch in sixty_four_micro_batches:
            loss(model_in_bf16(batch)).backward()   # .grad is bf16

    Right:

        main_grad += p.grad.float()                 # accumulate in fp32

    Source: PyTorch FSDP, `MixedPrecisionPolicy(reduce_dtype=torch.float32)`.
    """

    code = "AMP024"
    title = "many gradients are summed in half precision"
    sees = HalfSum

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, HalfSum)
        if event.terms < MANY:
            return
        large = event.error is not None and event.error > LARGE
        measured = (f"error against fp32: {share(event.error)}",) if event.error is not None else ()
        yield self.alarm(
            event,
            WARNING if large else NOTE,
            f"{event.terms} gradients are summed in {event.dtype}",
            "Sum in fp32: reduce_dtype=torch.float32, or fp32 main gradients.",
            *measured,
            f"each addition rounds to 1/{2 ** SIGNIFICAND_BITS[event.dtype]} of the sum",
        )
