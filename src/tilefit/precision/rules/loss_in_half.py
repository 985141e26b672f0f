"""AMP011: the loss in half precision."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, LossInHalf
from tilefit.precision.rules.base import LARGEST, PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm


class LossInHalfPrecision(PrecisionRule):
    """The loss is computed in fp16 or bf16, and rounded to it.

    What it sees: The number that ``backward()`` starts from, or one that it was computed from, is fp16 or
    bf16. Casting the finished loss to fp32 comes too late, its digits are gone: cast the model's output,
    before the loss. In a model that is bf16 throughout, without autocast, it is a note.

    Why nobody notices: bf16 rounds the loss to 3 digits, fp16 to 4, which no log shows. And with a loss scale
    of 65536 the gradient of an fp16 loss is inf at once, because fp16 ends at 65504: the scaler lowers the
    scale, and gets the blame for the skipped steps.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = ((out - y.half()) ** 2).mean()

    Right:

        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = ((out.float() - y) ** 2).mean()

    Source: PyTorch, "Autocast Op Reference": losses are in its fp32 list, arithmetic by hand is not.
    """

    code = "AMP011"
    title = "the loss is computed in half precision"
    sees = LossInHalf

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, LossInHalf)
        limit = LARGEST[event.dtype]
        severity = ERROR if event.dtype == "float16" else WARNING if event.autocast else NOTE
        bits, rounding = ("8", "0.4 %") if event.dtype == "bfloat16" else ("11", "0.05 %")
        arithmetic = [f"{event.dtype} keeps {bits} bits: the loss is rounded by up to {rounding}"]
        if event.scale is not None and event.scale > limit:
            arithmetic.append(
                f"backward() starts from the loss scale, {figure(event.scale)}, which is inf in "
                f"{event.dtype}: the largest number is {limit:g}"
            )
        yield self.alarm(
            event,
            severity,
            f"the loss is computed in {event.dtype}, not in float32 (by {event.operation})",
            "Compute the loss in float32: cast the model's output before it, out.float(); or call a loss of "
            "torch.nn.functional inside the autocast block, which casts by itself.",
            *arithmetic,
        )
