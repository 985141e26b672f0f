"""AMP023: ranks that part."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import Event, RanksDiffer
from tilefit.precision.rules.base import PrecisionRule, figure
from tilefit.rules.finding import ERROR, WARNING, Alarm

_TEXTS = {
    "parameters": (
        ERROR,
        "parameters differ between ranks",
        "Wrap the model in DistributedDataParallel and call the wrapper, or broadcast the parameters at "
        "the start.",
    ),
    "gradients": (
        ERROR,
        "gradients differ between ranks at the optimizer's step",
        "Call the DistributedDataParallel wrapper, not the model inside; leave no_sync before the last "
        "backward; "
        "change gradients on all ranks alike.",
    ),
    "scale": (
        ERROR,
        "the loss scale differs between ranks",
        "Let every rank see the same inf: use one GradScaler after the all-reduce, or ShardedGradScaler.",
    ),
    "found_inf": (
        ERROR,
        "some ranks skip the step and others do not",
        "All-reduce the gradients before unscaling them, or use ShardedGradScaler.",
    ),
    "steps": (
        ERROR,
        "ranks have made different numbers of steps",
        "Give every rank the same number of batches: drop_last, or join().",
    ),
    "data": (
        WARNING,
        "every rank reads the same batch",
        "Use a DistributedSampler, and call its set_epoch.",
    ),
}


class RankDrift(PrecisionRule):
    """Ranks that should hold the same model do not, or all of them read the same data.

    What it sees: On watched steps each rank contributes a checksum of its parameters, its gradients, its
    batch, the scale, whether it skips, and its step count, in one exchange of a few integers. Parameters that
    differ mean drift; equal parameters with different gradients mean missing synchronisation. Sharded tensors
    are not compared.

    Why nobody notices: Each rank trains a model of its own; the loss that rank 0 prints looks fine, and the
    checkpoint it writes is the model of one rank's data.

    Wrong:

        ddp = DistributedDataParallel(model)
        loss_fn(model(x)).backward()

    Right:

        ddp = DistributedDataParallel(model)
        loss_fn(ddp(x)).backward()

    Source: PyTorch, `DistributedDataParallel`: gradients are synchronised by the wrapper's forward pass.
    """

    code = "AMP023"
    title = "ranks do not agree"
    sees = RanksDiffer

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, RanksDiffer)
        severity, message, fix = _TEXTS[event.what]
        figures = [f"{event.ranks} ranks"]
        if event.name:
            figures.append(f"first in {event.name}")
        if event.values:
            figures.append("by rank: " + ", ".join(figure(value) for value in event.values))
        yield self.alarm(event, severity, message, fix, "; ".join(figures))
