"""AMP008: a gradient scaler with bf16."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, ScalerUsed
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import WARNING, Alarm


class ScalerWithBf16(PrecisionRule):
    """A gradient scaler is enabled although all autocast is bf16.

    What it sees: The scaler steps an optimizer, and every autocast region with gradients since the last step
    was bf16.

    Why nobody notices: The weights come out bit-identical: the scale is a power of two, and bf16 has fp32's
    range, so nothing can under- or overflow. It costs a pass over all gradients and a wait for the device in
    each step, and makes every mistake of the scale's protocol possible.

    Wrong:

        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x)
        scaler.scale(loss).backward()

    Right:

        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    Source: PyTorch, "Automatic Mixed Precision package", gradient scaling: it is for fp16's range.
    """

    code = "AMP008"
    title = "a gradient scaler with bf16"
    sees = ScalerUsed

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, ScalerUsed)
        if event.dtypes == {"bfloat16"}:
            yield self.alarm(
                event,
                WARNING,
                "the loss is scaled although autocast uses bf16, which needs no scale",
                "Switch it off: GradScaler(enabled=dtype == torch.float16), or remove it.",
                "bf16 reaches as far as fp32, 3.4e38; the scaler costs a pass over the gradients and a "
                "wait for "
                "the device in each step",
            )
