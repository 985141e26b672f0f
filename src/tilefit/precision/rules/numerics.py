"""Half-precision arithmetic that goes wrong on the data seen."""

from __future__ import annotations

from tilefit.precision.events import (
    Diverged,
    IntegersMerged,
    LayerError,
    MaskOverflowed,
    NonFinite,
    OperationChecked,
)
from tilefit.precision.rules.base import LARGEST, SIGNIFICAND_BITS, PrecisionRule, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm
from tilefit.units import share

#: Error in units of the last place above which an operation counts as wrong: kernels that compute in fp32
#: inside
#: and round once stay within 0.5.
LARGEST_ERROR_ULP = 8.0
#: Share of results that are zero, and should not be, from which on it counts.
VANISHED = 0.5


class ReductionInHalf(PrecisionRule[OperationChecked]):
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
    needs = ("half precision",)
    closely = True

    def check(self, event: OperationChecked) -> Alarm | None:
        what = f"{event.operation} in {event.dtype}"
        arithmetic: tuple[str, ...] = ()
        if is_norm(event.operation):
            return None
        if event.overflowed:
            message = (
                f"{what} gives inf or NaN for {share(event.overflowed)} of its results; in fp32 they are "
                "finite"
            )
            limit = f"{event.dtype} ends at {figure(LARGEST[event.dtype])}"
            arithmetic = (f"largest true result {figure(event.largest)}; {limit}",)
        elif event.vanished > VANISHED:
            message = f"{what} gives 0 for {share(event.vanished)} of its results; in fp32 they are not 0"
        elif event.error_ulp > LARGEST_ERROR_ULP:
            message = f"{what} is off by up to {figure(event.error_ulp)} units in the last place"
        else:
            return None
        fix = (
            "Compute it in fp32: x.float(), or a fused function such as F.rms_norm, F.log_softmax, "
            "F.mse_loss."
        )
        return self.alarm(event, WARNING, message, fix, *arithmetic)


def is_norm(operation: str) -> bool:
    """Whether an operation is a vector norm, which AMP031 judges."""
    return operation in ("linalg_vector_norm", "norm", "_foreach_norm")


class IntegerCollapse(PrecisionRule[IntegersMerged]):
    """Positions, time steps or other whole numbers are cast to half precision, where neighbours merge.

    What it sees: A cast to half precision of values that are all whole numbers, some beyond 256 (bf16) or
    2048 (fp16), that go into a product, a sine or a cosine, as positions and time steps do; of a sorted
    table that is looked up in, where entries merge; a range that is counted in half precision; and
    half-precision buffers of a model where that has happened already. A matrix of features is a note.

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
    needs = ("half precision",)
    closely = True

    def check(self, event: IntegersMerged) -> Alarm | None:
        what = "whole numbers" if event.integral else "entries of a sorted table"
        exact = 2 ** SIGNIFICAND_BITS[event.dtype]
        merges = (
            f"a cast to {event.dtype} merges {what}: of {event.before} distinct ones {event.after} are left"
            if event.after < event.before
            else f"a cast to {event.dtype} rounds {what}: {event.rounded} of {event.before}"
        )
        return self.alarm(
            event,
            NOTE if event.likely_data else WARNING,
            merges,
            "Compute with them in fp32, inside torch.autocast(..., enabled=False); keep such buffers fp32.",
            f"values up to {figure(event.largest)}; {event.dtype} holds every whole number up to {exact}",
        )


class NonFiniteOrigin(PrecisionRule[NonFinite]):
    """The first operation that makes inf or NaN out of finite numbers.

    What it sees: After a loss that is not finite, or after three steps in a row that the scaler skipped with
    losses that are not finite, one step is run with every operation checked, and the first whose inputs are
    finite and whose output is not is named, forward or backward. Overflow of scaled gradients that the scaler
    answers by halving the scale is normal and never reported. `watch(..., find_non_finite=True)` checks every
    step, for those whose first inf ends up in the weights.

    Why nobody notices: What raises the alarm is the loss, or a layer far behind the one that overflowed.

    Wrong:

        h = big(x)      # crosses 65504 in fp16 at some step
        loss = f(h)     # here the NaN is seen

    Right:

        with torch.autocast("cuda", enabled=False):
            h = big(x.float())

    Source: IEEE 754: fp16 ends at 65504.
    """

    code = "AMP026"
    title = "where inf or NaN comes from"
    closely = True

    def check(self, event: NonFinite) -> Alarm | None:
        if event.operation == "weights":
            return self.alarm(
                event,
                ERROR,
                "the weights hold inf or NaN already: an earlier step brought them there",
                "Start again with watch(..., find_non_finite=True), or --find-non-finite.",
            )
        limit = LARGEST.get(event.dtype)
        return self.alarm(
            event,
            ERROR,
            f"{event.operation} makes inf or NaN out of finite inputs, {event.phase}, in {event.dtype}",
            "Compute this operation in fp32, or bound its input.",
            *((f"{event.dtype} ends at {figure(limit)}",) if limit else ()),
        )


#: A layer's own error counts from this multiple of the tolerance on.
FLAGGED = 4.0


class LayerLosesPrecision(PrecisionRule[LayerError]):
    """One layer loses far more precision than its element type explains.

    What it sees: `tilefit.precision.compare` runs a batch once as the training does and once in fp32, with
    the same upstream gradients, and measures each module's error: end to end, and on its own, fed with the
    half-precision input. The tolerance is the error that perturbing the input by the element type's epsilon
    makes in fp32; four times that is reported.

    Why nobody notices: The loss still falls; the layers around it make up for it in part.

    Wrong:

        p = torch.softmax(x, -1)       # in half precision
        loss = (y * p.log()).sum()

    Right:

        loss = torch.nn.functional.cross_entropy(x.float(), y)

    Source: TTrace: tolerances per tensor from perturbation by the machine epsilon.
    """

    code = "AMP027"
    title = "a layer loses more precision than its type explains"
    by_module = True
    replay = "compare"

    def check(self, event: LayerError) -> Alarm | None:
        if event.local <= FLAGGED * event.tolerance:
            return None
        return self.alarm(
            event,
            WARNING,
            f"the {event.what} of {event.module} is off by {share(event.local)} on its own",
            "Compute this module in fp32, or look for a cancellation or a sum by hand inside it.",
            f"perturbing its input by the type's epsilon explains {share(event.tolerance)}",
            f"with what came before it: {share(event.end_to_end)}",
        )


class FirstDivergence(PrecisionRule[Diverged]):
    """Two replays of the same step, with the same random numbers, differ.

    What it sees: `tilefit.precision.first_divergence` runs a step twice from the same state and compares a
    hash of every module's output, and of the gradients: the first that differs is named. It is a note while
    deterministic algorithms are not asked for, since atomics and autotuning may then differ.

    Why nobody notices: Two runs with one seed part at some step, and nothing says where.

    Wrong:

        torch.manual_seed(0)     # and a layer that uses atomic additions

    Right:

        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)

    Source: PyTorch, "Reproducibility".
    """

    code = "AMP028"
    title = "two equal runs part here"
    replay = "first_divergence"

    def check(self, event: Diverged) -> Alarm | None:
        return self.alarm(
            event,
            WARNING if event.deterministic else NOTE,
            f"two replays of the same step differ, first in {event.module}",
            "torch.use_deterministic_algorithms(True), and no state outside of torch's generators.",
            f"{event.calls} module calls before it agree bit for bit",
        )


class MaskOverflow(PrecisionRule[MaskOverflowed]):
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
    needs = ("half precision",)
    closely = True

    def check(self, event: MaskOverflowed) -> Alarm | None:
        rows = f"{event.rows} rows are -inf throughout: their softmax is NaN"
        return self.alarm(
            event,
            WARNING,
            f"finite values add up to -inf in {event.dtype} and go into a softmax",
            "Combine boolean masks with | and fill once, or use F.scaled_dot_product_attention with a "
            "boolean mask.",
            f"{event.dtype} ends at -{figure(LARGEST[event.dtype])}; "
            + (rows if event.rows else "no row is full yet"),
        )


class NormOverflow(PrecisionRule[OperationChecked]):
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
    needs = ("half precision",)
    closely = True

    def check(self, event: OperationChecked) -> Alarm | None:
        if not is_norm(event.operation) or not event.overflowed:
            return None
        return self.alarm(
            event,
            WARNING,
            f"a norm in {event.dtype} is inf although its inputs are finite",
            "Compute norms in fp32: torch.linalg.vector_norm(x, dtype=torch.float32).",
            f"true norm {figure(event.largest)}; {event.dtype} ends at {figure(LARGEST[event.dtype])}",
        )
