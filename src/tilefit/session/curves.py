"""The stages of a curve: operations or steps at every size, priced, and measured where a GPU is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tilefit.capture.child import captures_in_child
from tilefit.capture.interpolated import capture_sizes
from tilefit.cost.curve import Curve, Prices, curve, step_curve
from tilefit.cost.priced import PricedGpu
from tilefit.options import AnyOptions, Sizes
from tilefit.report.curves import Curves, Family, roundest

if TYPE_CHECKING:
    from tilefit.measure.curve import Measured
    from tilefit.ops import Gemm, Op

#: Measures operations, as :func:`tilefit.measure.curve.measure_ops` does, under a name of their source.
Measuring = Callable[[Iterable["Op"], str], "Measured"]
#: Shows progress: what is done, an iterable and its length in, the same items out.
Watch = Callable[[str, Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Curves as far as they were made.

    Attributes:
        curves: What there is.
        captured: How many sizes have a step.
        interrupted: The user stopped it before all was done.
    """

    curves: Curves
    captured: int = 0
    interrupted: bool = False


def product_curves(
    title: str,
    sizes: Sizes,
    products: Mapping[str, Callable[[int], Sequence[Gemm]]],
    gpu: PricedGpu,
    measure: Measuring | None = None,
) -> Drawn:
    """Curves of products, by name: predicted and, where they can be, measured."""
    predicted = {name: curve(name, at, sizes.values, gpu) for name, at in products.items()}
    families = [Family(each) for each in predicted.values()]
    if measure is None:
        return Drawn(Curves(title, sizes.over, sizes.fixed, families))
    measured = measure((op for size in sizes.values for at in products.values() for op in at(size)), "curve")
    families = []
    for name, at in products.items():
        known = [size for size in sizes.values if measured.knows(at(size))]
        real = curve(f"{name} measured", at, known, gpu, measured.prices) if known else None
        families.append(Family(predicted[name], real))
    notes = ["Measured: cold in L2, random data, median of replays.", *_failed("products", measured)]
    return Drawn(
        Curves(title, sizes.over, sizes.fixed, families, tuple(notes)), interrupted=measured.interrupted
    )


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """A target's step while one size varies.

    Attributes:
        target, options: As of ``tilefit check``, without the size that varies.
        sizes: Which size varies, and the others.
        gpu: What it is priced on.
        timeout_s: How long one capture may take.
        fresh: Capture again what was captured before.
    """

    target: str
    options: AnyOptions
    sizes: Sizes
    gpu: PricedGpu
    timeout_s: float
    fresh: bool = False

    def drawn(self, watch: Watch, measure: Measuring | None = None) -> Drawn:
        """Capture, price and, where that can be done, measure.

        Raises:
            TilefitError: no size can be captured, or the target does not depend on it.
        """
        over, every = self.sizes.over, self.sizes.values
        steps = capture_sizes(
            self.target,
            self.options,
            over,
            every,
            self.timeout_s,
            watch=partial(watch, "Capturing"),
            capture=partial(captures_in_child, fresh=self.fresh, gpu=self.gpu.name),
        )
        notes = [*steps.notes]
        if steps.failed:
            size, error = next(iter(steps.failed.items()))
            notes.append(
                f"{len(steps.failed)} sizes could not be captured, such as {over} {size}: "
                f"{error.what.rstrip('.')}."
            )

        def priced(name: str, at: Sequence[int], prices: Prices | None = None) -> Curve:
            return step_curve(
                name, steps.at, at, self.gpu, over=over, everywhere=steps.everywhere, prices=prices
            )

        family = Family(priced("step", steps.sizes))
        interrupted = steps.interrupted
        if measure and not interrupted:
            chosen = roundest([point.size for point in family.predicted.points])
            ops_at = {size: [entry.op for entry in steps.at(size).ops] for size in chosen}
            measured = measure((op for ops in ops_at.values() for op in ops), f"curve {self.target}")
            interrupted = measured.interrupted
            if reached := [size for size, ops in ops_at.items() if measured.reached(ops)]:
                family = Family(family.predicted, priced("step measured", reached, measured.prices))
            notes.append(
                "Measured: each operation alone, cold in L2; launches and their overlap are predicted."
            )
            notes += _failed("operations", measured)
        title = ", ".join([self.target, *self.options.words, self.sizes.text([over, *self.sizes.fixed])])
        curves = Curves(title, over, self.sizes.fixed, [family], tuple(notes))
        return Drawn(curves, len(steps.sizes), interrupted)


def _failed(what: str, measured: Measured) -> list[str]:
    """What could not be measured, and why, in a sentence."""
    if not measured.errors:
        return []
    op, why = next(iter(measured.errors.items()))
    of_step = what == "operations"
    instead = " and are predicted" if of_step else ""
    name = f"{op.kind} {op.shape}" if of_step else op.shape
    return [
        f"{len(measured.errors)} {what} could not be measured{instead}, such as {name}: "
        f"{why.splitlines()[0]}."
    ]
