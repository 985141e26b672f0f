"""AMP031: norms that overflow."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, OperationChecked
from tilefit.precision.rules.base import LARGEST, PrecisionRule, figure
from tilefit.precision.rules.reduction_in_half import is_norm
from tilefit.rules.finding import WARNING, Alarm


class NormOverflow(PrecisionRule):
    """The norm of finite gradients is inf, because it is computed in fp16.

    What it sees: On watched steps, a vector norm in half precision whose result is not finite and whose
    inputs are.

    Why nobody notices: Code that skips steps whose norm is not finite skips good steps.

    Wrong:

        norm = torch.stack([p.grad.half().norm() for p in parameters]).norm()
        if not torch.isfinite(norm):
            continue

    Right:

        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in parameters])

    Source: IEEE 754: fp16 ends at 65504; 3000 values of 1000 in each of three tensors have norm 94868.
    """

    code = "AMP031"
    title = "a norm overflows in half precision"
    sees = OperationChecked

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, OperationChecked)
        if is_norm(event.operation) and event.overflowed:
            yield self.alarm(
                event,
                WARNING,
                f"a norm in {event.dtype} is inf although its inputs are finite",
                "Compute norms in fp32: torch.linalg.vector_norm(x, dtype=torch.float32).",
                f"true norm {figure(event.largest)}; {event.dtype} ends at {figure(LARGEST[event.dtype])}",
            )
