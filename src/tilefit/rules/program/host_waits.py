"""SYN001: the host waits for the GPU."""

from __future__ import annotations

from tilefit.ops.program import EARLIER, TO_GPU, VALIDATE_ARGS
from tilefit.rules.base import Case, Context, Place, Proposal, Proposals, Rule
from tilefit.rules.finding import ADVICE
from tilefit.rules.outside.optimizer import unfused_updates
from tilefit.rules.program.events import first_line, free, listed, named, waits, with_events
from tilefit.units import counted, seconds

#: The read of a ``GradScaler``, and the reads of anomaly mode, which has a rule of its own.
FOUND_INF, ANOMALY = "found_inf", "detect_anomaly"
#: What puts the elements of a sparse matrix in order.
COALESCE = "coalesce"
#: What has as many elements as values say.
_SIZED = frozenset(
    """nonzero argwhere where masked_select index bincount repeat_interleave unique _unique2 unique_dim
    unique_consecutive""".split()
)
_ON_GPU = "Leave shapes to sizes: torch.where, or a product with the mask, in place of an index by it."
_FUSED = "Pass fused=True to the optimizer: GradScaler then leaves to it what it reads."
_COPIES = "Copy without waiting (SYN002)."
_SORTED = (
    "Coalesce a sparse matrix once, before the loop; its transposed one, which every backward pass "
    "multiplies by, is sorted anew each time: keep that too, in an autograd function of your own."
)
_LATER = "Keep it on the GPU (total += loss.detach()) and read it every hundredth step."
_WITHIN = (
    "What a model's forward pass reads itself decides what it does next: choose by torch.where, or tell the "
    "model from outside what the host knows, such as whether there is a mask."
)
_CHECKED = (
    "torch.distributions reads whether its arguments are valid: Normal(…, validate_args=False), or once "
    "Distribution.set_default_validate_args(False)."
)
_NEXT = (
    "Launch the next call before what this one made is read (copy it with non_blocking=True and wait for an "
    "event), and count on the GPU."
)


class HostWaits(Rule):
    """The host waits for the GPU in every step, and the GPU then for the host.

    What it sees: A value of a GPU tensor that the program reads between two steps of the optimizer:
    `loss.item()`, `print(loss)`, `if torch.isnan(loss)`, `.cpu()`, an index by a mask, `synchronize()`.

    Why it costs time: The host launches ahead of the GPU. A value is there when all has run that was launched
    before, so the host waits, and what it would have launched meanwhile comes late: the queue is empty, and
    the GPU does nothing until it fills again.

    Arithmetic: The step is gone through in order with the host's clock and the GPU's. At a wait the host's
    becomes the GPU's; without waits the slower of the two sets the pace. All reads that need not be are taken
    out at once, and copies no longer block: of several waits one alone often gains nothing, since the next
    one takes as long.

    Not every read can go. `GradScaler` reads whether a gradient was infinite before it lets the optimizer
    step; only an optimizer that is fused does without.

    Example: `total += loss.detach()` in each step and `total.item()` every hundredth, in place of
    `total += loss.item()`.

    Source: PyTorch, "Performance Tuning Guide", avoid unnecessary CPU-GPU synchronization;
    `torch.amp.GradScaler`.
    """

    code = "SYN001"
    title = "the host waits for the GPU"
    wrong = Case(
        program="""
        import torch
        from torch import nn
        from torch.nn import functional as F

        layers = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()) for _ in range(24)]
        net = nn.Sequential(nn.Embedding(128256, 512), *layers, nn.Linear(512, 128256)).to("cuda")
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        words = torch.randint(128256, (8193,), device="cuda")
        total = 0.0
        for step in range(100):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(net(words[:-1]), words[1:])
            loss.backward()
            optimizer.step()
            total += loss.item()
        """
    )
    right = wrong.but("loss.item()", "loss.detach()")

    def check(self, context: Context) -> Proposals:
        step, estimate = context.step, context.estimate
        events = step.program.events
        read = [event for event in events if waits(event) and event.name not in (ANOMALY, EARLIER)]
        scaler = [event for event in read if event.name == FOUND_INF]
        stays = scaler and not unfused_updates(step)
        gone = [event for event in read if not (stays and event.name == FOUND_INF)]
        if not gone:
            return
        copies = [event for event in events if event.kind == TO_GPU and event.blocks]
        sized = sum(event.name in _SIZED for event in gone)
        ordered = sum(event.name == COALESCE for event in gone)
        checked = sum(event.name == VALIDATE_ARGS for event in gone)
        fused = 0 if stays else len(scaler)
        within = sum(event.within for event in gone if event.name not in {*_SIZED, COALESCE, VALIDATE_ARGS})
        values = len(gone) - sized - ordered - checked - fused - within
        later = _LATER if step.settings.training else _NEXT
        cures = {
            later: values,
            _WITHIN: within,
            _ON_GPU: sized,
            _SORTED: ordered,
            _CHECKED: checked,
            _FUSED: fused,
            _COPIES: len(copies),
        }
        lines = [
            f"host {seconds(estimate.host_time_s)}, GPU {seconds(estimate.gpu_time_s)}; with what each waits "
            f"for the other {seconds(estimate.time_s)}"
        ]
        yield Proposal(
            place=Place(source=first_line(gone)),
            message=f"the host waits for the GPU {counted(len(gone), 'time')} a step: {listed(named(gone))}",
            fix=" ".join(cure for cure, number in cures.items() if number),
            safety=ADVICE,
            change=with_events(step, (free(event) for event in events if event not in gone)),
            arithmetic=(*lines, *(["GradScaler's own read stays"] if stays else [])),
        )
