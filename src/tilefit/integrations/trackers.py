"""Reports in experiment trackers, through the tracker's own client; none of them is imported here.

>>> from tilefit.integrations.trackers import log
>>> log(report, SummaryWriter("runs/1"))  # doctest: +SKIP
>>> log(report, wandb.run)  # doctest: +SKIP
>>> log(report, mlflow)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

from tilefit.errors import UsageError
from tilefit.report import Report
from tilefit.report.answer import best, work


def figures(report: Report) -> dict[str, float]:
    """What is worth following from run to run, by name; times in seconds, memory in bytes."""
    step = report.step
    unit, items = work(report)
    values = {
        "time_s": step.time_s,
        "gpu_time_s": step.gpu_time_s,
        "host_time_s": step.host_time_s,
        "best_time_s": best(report).time_s,
        "flop_per_s": step.flop_per_s,
        "peak_share": step.peak_share,
        "memory_bytes": float(step.memory_bytes),
        "waste": report.waste,
        "findings": float(len(report.findings)),
    }
    if items and step.time_s:
        values[f"{unit}_per_s"] = items / step.time_s
    return values


def log(report: Report, client: Any, *, step: int = 0, prefix: str = "tilefit") -> dict[str, float]:
    """Write a report's figures, and its findings as text where the client takes any.

    Args:
        report: Of a step on a GPU.
        client: TensorBoard's ``SummaryWriter``, a run of W&B, the module or a logger of MLflow, a logger of
            Lightning: whatever has ``add_scalar``, ``log_metrics`` or ``log``.
        step: Of the training, for the tracker's axis.
        prefix: What the names begin with.

    Returns:
        What was written, by name.

    Raises:
        UsageError: the client has none of these methods.
    """
    values = {f"{prefix}/{report.gpu}/{name}": value for name, value in figures(report).items()}
    if hasattr(client, "add_scalar"):
        for name, value in values.items():
            client.add_scalar(name, value, step)
        client.add_text(f"{prefix}/{report.gpu}", f"```text\n{report}```", step)
    elif hasattr(client, "log_metrics"):
        client.log_metrics(values, step=step)
    elif hasattr(client, "log"):
        client.log(values, step=step)
    else:
        raise UsageError(
            f"{type(client).__name__} is no client that values can be written to",
            hint="Give a SummaryWriter, a run of W&B, mlflow, or a logger of Lightning.",
        )
    if hasattr(client, "log_artifact"):  # MLflow's: others have a method of this name for something else
        client.log_text(str(report), f"{prefix}-{report.gpu}.txt")
    return values
