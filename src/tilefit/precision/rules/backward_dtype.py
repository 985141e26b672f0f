"""AMP017: another precision going backward."""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.precision.events import BackwardDtype, Event
from tilefit.precision.rules.base import PrecisionRule
from tilefit.rules.finding import ERROR, WARNING, Alarm


class BackwardInOtherDtype(PrecisionRule):
    """The backward pass computes in another precision than the forward pass.

    What it sees: A custom autograd Function whose matrix products have different element types forward and
    backward; a module that activation checkpointing recomputes in another type; an autocast region entered
    during the backward pass with a type the forward pass never used.

    Why nobody notices: Autocast is on in a Function's `forward` and off in its `backward` unless both are
    decorated. A recomputation under a bare `torch.autocast("cuda")` is fp16 even where the forward pass ran
    in bf16. The gradient then belongs to a slightly different function.

    Wrong:

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w): ...

    Right:

        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x, w): ...

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, g): ...

    Source: PyTorch, "Automatic Mixed Precision examples", autocast and custom autograd functions.
    """

    code = "AMP017"
    title = "the backward pass runs in another precision"
    sees = BackwardDtype

    def check(self, event: Event) -> Iterator[Alarm]:
        assert isinstance(event, BackwardDtype)
        types = f"{event.forward} forward and {event.backward} backward"
        if event.kind == "function":
            yield self.alarm(
                event,
                WARNING,
                f"{event.name} multiplies in {types}",
                "Decorate forward with torch.amp.custom_fwd(device_type=...) and backward with custom_bwd.",
                "autocast is off inside backward unless it is decorated",
            )
        else:
            what = event.name if event.kind == "recompute" else "what this region recomputes"
            yield self.alarm(
                event,
                ERROR,
                f"{what} runs in {types}",
                "Recompute under the forward pass's own autocast: torch.utils.checkpoint does so; by "
                "hand, pass "
                "device and dtype.",
            )
