"""Half-precision arithmetic that goes wrong on the data seen."""

from __future__ import annotations

from tilefit.precision.rules.base import LARGEST, SIGNIFICAND_BITS, PrecisionRule, ends, figure
from tilefit.rules.finding import ERROR, NOTE, WARNING, Alarm
from tilefit.units import share

#: Error in units of the last place above which an operation counts as wrong: kernels that compute in fp32
#: inside and round once stay within 0.5.
LARGEST_ERROR_ULP = 8.0
#: Share of results that are zero, and should not be, from which on it counts.
VANISHED = 0.5
#: A layer's own error counts from this multiple of the tolerance on.
FLAGGED = 4.0


class ReductionInHalf(PrecisionRule, code="AMP012", needs=("half precision",), closely=True, values=True):
    """A power, sum, exponential, logarithm or normalisation in half precision is wrong on the data seen.

    What it sees: On watched steps such operations of the forward pass are repeated in fp32 on samples of
    their own input, and roots, reciprocals and logarithms of what sums have become, from these sums on.
    Reported are results that are inf where fp32's are finite, results that are zero where
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

    title = "a half-precision operation is wrong on this data"
    fix = "Compute it in fp32: x.float(), or a fused function such as F.rms_norm, F.log_softmax, F.mse_loss."

    #: The operation that was repeated in fp32, and its type.
    operation: str
    dtype: str
    #: Share of results that are inf or NaN where fp32's are finite.
    overflowed: float
    #: Share of results that are zero where fp32's are not.
    vanished: float
    #: Largest error, in units of the element type's spacing at the result.
    error_ulp: float
    #: Largest finite result in fp32.
    largest: float

    def judge(self) -> Alarm | None:
        what = f"{self.operation} in {self.dtype}"
        if self.overflowed:
            message = f"{what} gives inf or NaN for {share(self.overflowed)} of its results"
            limit = f"largest true result {figure(self.largest)}; {ends(self.dtype)}"
            return self.alarm(f"{message}; in fp32 they are finite", limit)
        if self.vanished > VANISHED:
            return self.alarm(
                f"{what} gives 0 for {share(self.vanished)} of its results; in fp32 they are not 0"
            )
        if self.error_ulp > LARGEST_ERROR_ULP:
            return self.alarm(f"{what} is off by up to {figure(self.error_ulp)} units in the last place")
        return None


class IntegerCollapse(PrecisionRule, code="AMP016", needs=("half precision",), closely=True, values=True):
    """Positions, time steps or other whole numbers are cast to half precision, where neighbours merge.

    What it sees: A cast to half precision of values that are all whole numbers, some beyond 256 (bf16) or
    2048 (fp16), that go into a product, a sine, a cosine or a distance, as positions and steps do; of a
    sorted table that is looked up in, where entries merge; a range that is counted in half precision; and
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

    title = "whole numbers merge in half precision"
    fix = "Compute with them in fp32, inside torch.autocast(..., enabled=False); keep such buffers fp32."

    #: The element type cast to.
    dtype: str
    #: All values were whole numbers; else they were a sorted table.
    integral: bool
    #: The largest magnitude.
    largest: float
    #: Distinct values of those looked at, and how many are not exact any more.
    before: int
    after: int
    rounded: int = 0
    #: They are not used as positions or steps are: whole numbers by accident.
    likely_data: bool = False

    def judge(self) -> Alarm:
        dtype, before, after = self.dtype, self.before, self.after
        what = "whole numbers" if self.integral else "entries of a sorted table"
        merged = f"merges {what}: of {before} distinct ones {after} are left"
        message = merged if after < before else f"rounds {what}: {self.rounded} of {before}"
        whole = f"{dtype} holds every whole number up to {2 ** SIGNIFICAND_BITS[dtype]}"
        severity = NOTE if self.likely_data else WARNING
        figures = f"values up to {figure(self.largest)}; {whole}"
        return self.alarm(f"a cast to {dtype} {message}", figures, severity=severity)


class NonFiniteOrigin(PrecisionRule, code="AMP026", severity=ERROR, closely=True, values=True):
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

    title = "where inf or NaN comes from"
    fix = "Compute this operation in fp32, or bound its input."

    #: The first operation of a step whose inputs were finite and whose output was not; ``weights`` where the
    #: weights were not finite before the step.
    operation: str
    #: ``forward`` or ``backward``.
    phase: str = ""
    dtype: str = ""

    def judge(self) -> Alarm:
        if self.operation == "weights":
            message = "the weights hold inf or NaN already: an earlier step brought them there"
            return self.alarm(
                message, fix="Start again with watch(..., find_non_finite=True), or --find-non-finite."
            )
        what = f"{self.operation} makes inf or NaN out of finite inputs"
        limit = [ends(self.dtype)] if self.dtype in LARGEST else []
        return self.alarm(f"{what}, {self.phase}, in {self.dtype}", *limit)


class LayerLosesPrecision(PrecisionRule, code="AMP027", by_module=True, replay="compare"):
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

    title = "a layer loses more precision than its type explains"
    fix = "Compute this module in fp32, or look for a cancellation or a sum by hand inside it."

    #: ``output`` or ``weight gradient``.
    what: str
    #: Relative error of the module fed with the half-precision input.
    local: float
    #: Relative error including what came before.
    end_to_end: float
    #: The error that perturbing its input by the element type's epsilon makes in fp32.
    tolerance: float

    def judge(self) -> Alarm | None:
        if self.local <= FLAGGED * self.tolerance:
            return None
        return self.alarm(
            f"the {self.what} of {self.module} is off by {share(self.local)} on its own",
            f"perturbing its input by the type's epsilon explains {share(self.tolerance)}",
            f"with what came before it: {share(self.end_to_end)}",
        )


class FirstDivergence(PrecisionRule, code="AMP028", replay="first_divergence"):
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

    title = "two equal runs part here"
    fix = "torch.use_deterministic_algorithms(True), and no state outside of torch's generators."

    #: How many modules ran before the first that differs.
    calls: int
    deterministic: bool

    def judge(self) -> Alarm:
        message = f"two replays of the same step differ, first in {self.module}"
        agree = f"{self.calls} module calls before it agree bit for bit"
        return self.alarm(message, agree, severity=WARNING if self.deterministic else NOTE)


class MaskOverflow(PrecisionRule, code="AMP030", needs=("half precision",), closely=True, values=True):
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

    title = "attention masks add up to -inf"
    fix = (
        "Combine boolean masks with | and fill once, or use F.scaled_dot_product_attention with a "
        "boolean mask."
    )

    dtype: str
    #: Those that are -inf throughout.
    rows: int

    def judge(self) -> Alarm:
        full = f"{self.rows} rows are -inf throughout: their softmax is NaN"
        limit = f"{self.dtype} ends at -{figure(LARGEST[self.dtype])}"
        message = f"finite values add up to -inf in {self.dtype} and go into a softmax"
        return self.alarm(message, f"{limit}; {full if self.rows else 'no row is full yet'}")


class NormOverflow(ReductionInHalf, code="AMP031", needs=("half precision",), closely=True, values=True):
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

    title = "a norm overflows in half precision"
    fix = "Compute norms in fp32: torch.linalg.vector_norm(x, dtype=torch.float32)."

    def judge(self) -> Alarm | None:
        if not self.overflowed:
            return None
        message = f"a norm in {self.dtype} is inf although its inputs are finite"
        return self.alarm(message, f"true norm {figure(self.largest)}; {ends(self.dtype)}")
