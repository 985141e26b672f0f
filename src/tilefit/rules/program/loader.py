"""DAT001: the data loader is slower than the step."""

from __future__ import annotations

from math import ceil

from tilefit.cost import estimate_step
from tilefit.ops import Loader
from tilefit.rules.base import Case, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE, WARNING
from tilefit.units import count, counted, seconds

#: Shares of the step: waiting for data that is worth a finding; and what workers are counted for, since a
#: worker that is just fast enough is late half of the time.
_LEAST = 0.05
_HEADROOM = 1.2
#: Workers beside one GPU that can be advised: a choice, twice the cores that clouds give with one.
_MOST_WORKERS = 64


class SlowLoader(Rule):
    """The data loader gives fewer samples a second than the step could take.

    What it sees: The program's loader, of which a few batches were timed on this machine, one process at a
    time, beside the step's predicted time on the GPU.

    Why it costs time: With `num_workers=0` the program makes each batch itself, and launches nothing
    meanwhile. With workers the batches are made beside it, each worker one at a time: the step cannot be
    faster than their number allows.

    Arithmetic: A step takes `batches × seconds a batch / workers` of loading; without workers its host time
    grows by all of it. The workers named are those that load in the step's time, and a fifth more. The
    step's predicted time is without the loader, and so the finding has no price: how fast this machine's
    processor is says little about the one beside the GPU. Made-up data are not timed.

    Example: `DataLoader(…, num_workers=8, persistent_workers=True, pin_memory=True)`.

    Source: PyTorch, `torch.utils.data`, single- and multi-process data loading.
    """

    code = "DAT001"
    title = "a data loader slower than the step"
    wrong = Case(
        program="""
        import time

        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, Dataset


        class Decoded(Dataset):
            def __len__(self):
                return 4096

            def __getitem__(self, index):
                time.sleep(0.001)  # as long as a small image takes
                return torch.zeros(8192)


        def main():
            with torch.device("cuda"):
                net = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))
            optimizer = torch.optim.AdamW(net.parameters(), fused=True)
            for x in DataLoader(Decoded(), batch_size=64, num_workers=0, pin_memory=True):
                x = x.to("cuda", non_blocking=True)
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), x)
                loss.backward()
                optimizer.step()


        if __name__ == "__main__":
            main()
        """
    )
    right = wrong.but("num_workers=0", "num_workers=16")

    def check(self, context: Context) -> Proposals:
        for loader in context.step.program.loaders:
            if loader.batch_s and loader.batch:
                yield from self._slow(context, loader)

    def _slow(self, context: Context, loader: Loader) -> Proposals:
        step, estimate = context.step, context.estimate
        batches = loader.drawn or max(step.batch / loader.batch, 1.0)
        load_s = batches * loader.batch_s
        if loader.workers:
            time_s = max(estimate.time_s, load_s / loader.workers)
        else:
            # The host's time is that of the GPU's host; a loader's was measured.
            python_s = load_s / (context.gpu.launch_scale or 1.0)
            time_s = estimate_step(step, context.gpu, estimate.ops, python_s=python_s).time_s
        if time_s < (1 + _LEAST) * estimate.time_s:
            return
        samples = step.batch or batches * loader.batch
        workers = ceil(_HEADROOM * load_s / estimate.time_s)
        has = counted(loader.workers, "worker") if loader.workers else "no workers"
        yield Proposal(
            place=Place(source=loader.source),
            message=f"the step takes {_rate(samples / estimate.time_s)}, the loader gives "
            f"{_rate(samples / load_s * max(loader.workers, 1))} with {has} on a machine like this one",
            fix=f"Load with num_workers={workers}; or make a sample cheaper, or on the GPU."
            if workers <= _MOST_WORKERS
            else f"Make a sample cheaper, or on the GPU: {count(workers)} workers would be needed.",
            safety=ADVICE,
            change=None,
            severity=WARNING,
            arithmetic=(
                f"a batch of {count(loader.batch)} takes one process {seconds(loader.batch_s)}, the step "
                f"{seconds(estimate.time_s)}: with the loader {seconds(time_s)}",
            ),
        )


def _rate(samples_per_s: float) -> str:
    return f"{count(round(samples_per_s))} samples/s"
