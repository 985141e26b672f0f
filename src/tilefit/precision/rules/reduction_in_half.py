"""AMP012: half-precision arithmetic that goes wrong on this data."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, OperationChecked
from tilefit.precision.rules.base import LARGEST, PrecisionRule, figure
from tilefit.rules.finding import WARNING, Alarm
from tilefit.units import share

#: Error in units of the last place above which an operation counts as wrong: kernels that compute in fp32
#: inside
#: and round once stay within 0.5.
LARGEST_ERROR_ULP = 8.0
#: Share of results that are zero, and should not be, from which on it counts.
VANISHED = 0.5


class ReductionInHalf(PrecisionRule):
    """A power, sum, exponential, logarithm or normalisation in half precision is wrong on the data seen.

    What it sees: On watched steps such operations of the forward pass are repeated in fp32 on samples of
    their own input. Reported are results that are inf where fp32's are finite, results that are zero where
    fp32's are not, for more than half of them, and errors above 8 units in the last place. That an operation
    ran in half precision is no finding: PyTorch's kernels compute in fp32 inside and round once.

    Why nobody notices: In an RMS normalisation by hand the square of 300 overflows fp16, the reciprocal root
    of inf is 0, and the layer returns exactly 0. No NaN ever appears.

    Wrong:

        x * torch.rsqrt((x ** 2).mean(-1, keepdim=True) + eps)

    Right:

        torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps)

    Source: PyTorch, "Autocast Op Reference", operations that autocast to float32.
    """

    code = "AMP012"
    title = "a half-precision operation is wrong on this data"
    sees = OperationChecked

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, OperationChecked)
        if is_norm(event.operation):
            return
        fix = (
            "Compute it in fp32: x.float(), or a fused function such as F.rms_norm, F.log_softmax, "
            "F.mse_loss."
        )
        if event.overflowed:
            yield self.alarm(
                event,
                WARNING,
                f"{event.operation} in {event.dtype} gives inf or NaN for {share(event.overflowed)} of its "
                "results; in fp32 they are finite",
                fix,
                f"largest true result {figure(event.largest)}; {event.dtype} ends at "
                f"{figure(LARGEST[event.dtype])}",
            )
        elif event.vanished > VANISHED:
            yield self.alarm(
                event,
                WARNING,
                f"{event.operation} in {event.dtype} gives 0 for {share(event.vanished)} of its results; "
                "in fp32 "
                "they are not 0",
                fix,
            )
        elif event.error_ulp > LARGEST_ERROR_ULP:
            yield self.alarm(
                event,
                WARNING,
                f"{event.operation} in {event.dtype} is off by up to {figure(event.error_ulp)} units in "
                "the last "
                "place",
                fix,
            )


def is_norm(operation: str) -> bool:
    """Whether an operation is a vector norm, which AMP031 judges."""
    return operation in ("linalg_vector_norm", "norm", "_foreach_norm")
