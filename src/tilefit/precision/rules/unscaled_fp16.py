"""AMP007: fp16 without a loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, UnscaledHalf
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import WARNING, Alarm
from tilefit.units import count, share


class UnscaledFp16(PrecisionRule):
    """Gradients go through fp16, and no scale keeps small ones from becoming zero.

    What it sees: The forward pass ran in fp16 autocast, the gradients of the loss flow through fp16
    operations, and the optimizer steps on gradients no scaler has seen. A constant factor on the loss counts
    as a scale. The shares of gradient values that are zero or subnormal in fp16 are measured on the watched
    steps.

    Why nobody notices: fp16 has full precision down to 6.1e-5 and becomes zero below 3e-8. Small gradients
    vanish, large ones do not, and the loss settles a little early.

    Wrong:

        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        loss.backward()
        optimizer.step()

    Right:

        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Source: Micikevicius et al., "Mixed Precision Training" (2018), loss scaling.
    """

    code = "AMP007"
    title = "fp16 gradients without a loss scale"
    sees = UnscaledHalf

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, UnscaledHalf)
        measured = (
            (
                f"of {count(event.values)} fp16 gradient values {share(event.zero)} are zero and "
                f"{share(event.subnormal)} below 6.1e-5, where fp16 loses bits",
            )
            if event.values
            else ()
        )
        yield self.alarm(
            event,
            WARNING,
            "gradients go through fp16 without a loss scale",
            "Use torch.amp.GradScaler, or bf16, which has fp32's range.",
            *measured,
        )
