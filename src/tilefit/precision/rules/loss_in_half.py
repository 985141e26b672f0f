"""AMP011: the loss in half precision."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, LossInHalf
from tilefit.precision.rules.base import LARGEST, PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm


class LossInHalfPrecision(PrecisionRule):
    """The loss itself is computed in fp16 or bf16.

    What it sees: Among the scalar operations at the root of the backward pass, one whose result is half
    precision. Casting the finished loss to fp32 does not hide it; casting the model's output before the
    reduction is right. In a model that is bf16 throughout, without autocast, it is a note.

    Why nobody notices: bf16 rounds the loss to 3 digits, fp16 to 4. And the first gradient of an fp16 loss
    that is scaled by 65536 is inf at once, because fp16 ends at 65504: the scaler backs off and gets the
    blame.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = ((out - y) ** 2).mean()

    Right:

        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = ((out.float() - y.float()) ** 2).mean()

    Source: PyTorch, "Autocast Op Reference": losses are in its fp32 list, arithmetic by hand is not.
    """

    code = "AMP011"
    title = "the loss is computed in half precision"
    sees = LossInHalf

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, LossInHalf)
        limit = LARGEST[event.dtype]
        severity = ERROR if event.dtype == "float16" else WARNING if event.autocast else NOTE
        arithmetic = [
            "bf16 keeps 8 bits of the loss: differences below 0.4 % are lost"
            if event.dtype == "bfloat16"
            else "fp16 keeps 11 bits of the loss: differences below 0.05 % are lost"
        ]
        if event.scale is not None and event.scale > limit:
            arithmetic.append(
                f"its first gradient is the scale, {figure(event.scale)}: above fp16's {limit:g}"
            )
        yield self.alarm(
            event,
            severity,
            f"the loss is computed in {event.dtype} ({event.operation})",
            "Cast the model's output before the loss: out.float(); or use a loss of torch.nn.functional "
            "under "
            "autocast.",
            *arithmetic,
        )
