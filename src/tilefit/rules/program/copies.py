"""SYN002: copies to the GPU that block."""

from __future__ import annotations

from dataclasses import replace

from tilefit.cost.waits import copy_s
from tilefit.ops import HostEvent
from tilefit.ops.program import TO_GPU
from tilefit.rules.base import Case, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE, SAFE
from tilefit.rules.program.events import first_line, free, listed, named, with_events
from tilefit.units import counted, seconds, size

#: A copy below this takes longer to be asked for than to be made: at the 24 GB/s of PCIe 4.0, 22 us are as
#: long as 500 kB; and so many of them in a step are worth one copy.
_SMALL_BYTES = 1 << 16
_MANY = 8


class BlockingCopies(Rule):
    """Copies to the GPU make the host wait, or are many and small.

    What it sees: `.to("cuda")`, `.cuda()`, `torch.tensor(…, device="cuda")` of what lies in the host's
    memory, within the step: without `non_blocking=True`, or from memory that is not page-locked
    (`pin_memory`), from which no copy is asynchronous; and eight or more small ones.

    Why it costs time: A copy that blocks waits for its turn behind all that the GPU has to do, and the host
    waits with it (SYN001). From pageable memory the driver copies twice, at less than half of the rate. A
    small copy is the price of its call, whatever it moves.

    Arithmetic: bytes over what the GPU's slot delivers from such memory, and the two clocks of SYN001. The
    change is the same copies from page-locked memory, not waited for; of small ones, one copy of all their
    bytes. The copy's own time stays: the GPU does nothing else meanwhile on the same stream.

    Example: `DataLoader(…, pin_memory=True)`, and `x.to("cuda", non_blocking=True)`.

    Source: PyTorch, "A guide on good usage of non_blocking and pin_memory()"; NVIDIA, "CUDA C++ Best
    Practices Guide", data transfer between host and device.
    """

    code = "SYN002"
    title = "copies to the GPU that block"
    wrong = Case(
        program="""
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        net = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to("cuda")
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        data = TensorDataset(torch.randn(4096, 4096))
        for (x,) in DataLoader(data, batch_size=1024, pin_memory=False):
            x = x.to("cuda", non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.mse_loss(net(x), x)
            loss.backward()
            optimizer.step()
        """
    )
    right = wrong.but("pin_memory=False", "pin_memory=True")

    def check(self, context: Context) -> Proposals:
        events = context.step.program.events
        copies = [event for event in events if event.kind == TO_GPU]
        if any(event.blocks for event in copies):
            yield self._blocking(context, events)
        small = [event for event in copies if event.bytes < _SMALL_BYTES]
        if len(small) >= _MANY:
            together = replace(small[0], bytes=sum(event.bytes for event in small))
            others = (event for event in events if event not in small)
            yield Proposal(
                place=Place(source=first_line(small)),
                message=f"{len(small)} small copies to the GPU: {listed(named(small))}",
                fix="Put them together on the host (torch.stack) and copy once, or make them on the GPU.",
                safety=ADVICE,
                change=with_events(context.step, (together, *others)),
                arithmetic=(f"{size(together.bytes)} altogether, {seconds(copy_s(together, context.gpu))}",),
            )

    def _blocking(self, context: Context, events: tuple[HostEvent, ...]) -> Proposal:
        wrong = [event for event in events if event.kind == TO_GPU and event.blocks]
        pageable = sum(not event.pinned for event in wrong)
        before_s, after_s = (
            sum(copy_s(event, context.gpu) for event in copies) for copies in (wrong, map(free, wrong))
        )
        pin = "Load into page-locked memory (DataLoader's pin_memory=True) and copy" if pageable else "Copy"
        return Proposal(
            place=Place(source=first_line(wrong)),
            message=f"copies to the GPU make the host wait {counted(len(wrong), 'time')} a step: "
            f"{listed(named(wrong))}",
            fix=f"{pin} with non_blocking=True; what is made on the host can be made on the GPU (device=).",
            safety=SAFE,
            change=with_events(context.step, map(free, events)),
            arithmetic=(
                f"{size(sum(event.bytes for event in wrong))} in {seconds(before_s)}, {pageable} of "
                f"{len(wrong)} from pageable memory; page-locked {seconds(after_s)}",
            ),
        )
