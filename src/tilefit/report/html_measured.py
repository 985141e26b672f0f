"""What the HTML page says of a profiled run, beside what was predicted for it."""

from __future__ import annotations

from collections.abc import Sequence

from tilefit import units
from tilefit.report.html_operations import Row
from tilefit.report.report import MeasuredStep

#: Rows of the table of the largest differences.
_DIFFERENCES = 10


def facts(run: MeasuredStep) -> list[tuple[str, str, str]]:
    """The run in a few numbers: (name, number, what it says)."""

    overhead = "" if run.overhead is None else f"; the profiler added {units.share(run.overhead)}"
    steps = f"{units.interval(run.low_s, run.high_s)} over {run.steps} step{'s' * (run.steps != 1)}{overhead}"
    cores = "of the kernels' time"
    if run.older_path_s:
        cores += f"; {run.of_kernels(run.older_path_s)} in code of an older generation"
    if run.unknown_s:
        cores += f"; of {run.of_kernels(run.unknown_s)} it is not known"
    known = "of the kernels' time belongs to a known module or to the optimizer"
    if run.unmatched_s:
        known += f"; {run.of_kernels(run.unmatched_s)} to operations that were not predicted"
    found = [
        ("step", units.seconds(run.time_s), steps),
        (
            "predicted",
            units.seconds(run.predicted_s),
            f"{units.seconds(run.predicted_gpu_s)} in kernels",
        ),
        ("GPU busy", run.of_step(run.busy_s), f"of the step, with {units.count(run.kernels)} kernels"),
        ("waiting for launches", run.of_step(run.launch_bound_s), "of the step: the host was the slower one"),
        ("on Tensor Cores", run.of_kernels(run.tensor_core_s), cores),
        ("bound by memory", run.of_kernels(run.memory_bound_s), "of the kernels' time"),
        ("attributed", run.of_kernels(run.attributed_s), known),
    ]
    if run.communication_s:
        exposed = (
            f"of the kernels' time; {run.of_kernels(run.exposed_communication_s)} while nothing else ran"
        )
        found.append(("communication", run.of_kernels(run.communication_s), exposed))
    return found


def differences(table: Sequence[Row]) -> list[tuple[Row, float]]:
    """The rows whose measured time differs most from the predicted one, with that one; the largest first."""
    known = [(row, predicted_s) for row in table if (predicted_s := row.predicted_s) is not None]
    return sorted(known, key=lambda pair: -abs(pair[0].measured_s - pair[1]))[:_DIFFERENCES]
