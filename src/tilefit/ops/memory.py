"""The memory that a step needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tilefit.ops.peaks import Moment, fullest
from tilefit.ops.timeline import Timeline

#: Of the state of an fp32 optimizer: in bf16, and in 8 bits with a scale of 4 bytes for 256 values
#: (Dettmers and others, "8-bit Optimizers via Block-wise Quantization", 2022).
OF_BF16, OF_EIGHT_BITS = 1 / 2, (1 + 4 / 256) / 4
#: Parts that a loss over many classes is computed in: a choice.
CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of GPU memory, by what they hold.

    Attributes:
        parameter_bytes, gradient_bytes, optimizer_bytes, buffer_bytes: Held between steps.
        saved_bytes: Activations kept for the backward pass.
        peak_bytes: The most that was alive at once, everything included; without the allocator's
            fragmentation, library workspaces and the CUDA context.
        moments: Of the moments that are the fullest on some batch, the bytes that stay whatever the batch
            (what is held by then, and what is made of parameters alone, such as autocast's copies of them),
            and those that grow with it. Empty where only the peak is known: then all that is not held
            between steps is taken to grow.
        timeline: What is alive when, and whose it is; empty where only the sums are known.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0
    moments: tuple[Moment, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes at the peak that are not held between steps."""
        return max(0, self.peak_bytes - self.fixed_bytes)

    @property
    def constant_bytes(self) -> int:
        """Bytes that no batch is small enough to do without."""
        return max(stays for stays, _ in self._moments)

    def on_batch(self, factor: float) -> Memory:
        """What ``factor`` times the samples need."""
        return self._with(
            [(stays, round(grows * factor)) for stays, grows in self._moments],
            saved_bytes=round(self.saved_bytes * factor),
            timeline=self.timeline.on_batch(factor),
        )

    def part(self, held: float, activations: float) -> Memory:
        """What a GPU needs that holds a share of the parameters and makes a share of the activations."""
        of_held = {
            name: round(getattr(self, name) * held)
            for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        }
        return self._with(
            [
                (self.buffer_bytes + round((stays - self.buffer_bytes) * held), round(grows * activations))
                for stays, grows in self._moments
            ],
            **of_held,
            saved_bytes=round(self.saved_bytes * activations),
            timeline=Timeline(),  # whose share each piece is, is not known
        )

    def largest_batch(self, batch: int, capacity_bytes: float) -> int | None:
        """Samples that fit where this is of ``batch``: 0 if none does, None where nothing grows with it."""
        if self.constant_bytes > capacity_bytes:
            return 0
        return min(
            (int((capacity_bytes - stays) * batch / grows) for stays, grows in self._moments if grows),
            default=None,
        )

    @property
    def _moments(self) -> tuple[Moment, ...]:
        return self.moments or ((self.fixed_bytes, self.activation_bytes),)

    def _with(self, moments: Iterable[Moment], *, timeline: Timeline, **held: int) -> Memory:
        found = fullest(moments)
        peak_bytes = max(stays + grows for stays, grows in found)
        moments = found if self.moments else ()
        return replace(self, **held, peak_bytes=peak_bytes, moments=moments, timeline=timeline)
