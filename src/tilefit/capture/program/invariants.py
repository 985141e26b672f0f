"""What must hold of a captured step, so that none is reported of which a part was not seen."""

from __future__ import annotations

import torch

from tilefit.capture.program.modes import ProgramModes
from tilefit.capture.trees import own_part
from tilefit.emulation.tensor import CudaTensor
from tilefit.errors import CaptureError

ON_CPU = (
    'Move the model and its batches to the GPU: device = "cuda" if torch.cuda.is_available() else "cpu", '
    "model.to(device)."
)
_OFFLOADED = "Steps of an optimizer on the host are not priced: check it without offload_policy."


def check_step(modes: ProgramModes, stepped: list[torch.optim.Optimizer]) -> None:
    """Check what was recorded from one optimizer step to the next.

    Args:
        modes: What it ran under.
        stepped: The optimizers that stepped in it.

    Raises:
        CaptureError: parameters were stepped on the CPU, or with a gradient that no recorded operation made,
            or nothing was computed on the GPU.
    """
    ops = modes.recorder.ops
    host = modes.recorder.host_products
    where = next(iter(host), "")
    if not any(entry.op.flop for entry in ops if entry.op.multiplies or entry.phase != "optimizer"):
        raise CaptureError(
            "the step computes on the CPU, and nothing of it on the GPU"
            if host or stepped
            else "nothing ran on the GPU in the step",
            where=where,
            hint=ON_CPU,
        )
    written = {ref.id for entry in ops for ref in entry.outputs} | modes.meetings.received
    names = {
        id(p): prefix + name for prefix, root in modes.sites.roots for name, p in root.named_parameters()
    }
    for optimizer in stepped:
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                name = names.get(id(parameter), f"parameter {number} of {type(optimizer).__name__}")
                if not isinstance(own_part(parameter), CudaTensor):
                    hint = _OFFLOADED if hasattr(parameter, "placements") else ON_CPU
                    what = f"{name} {tuple(parameter.shape)} is trained on the CPU"
                    raise CaptureError(what, where=where, hint=hint)
                memory = modes.recorder.identify(own_part(parameter.grad))
                if memory not in written and memory not in modes.alive_before:
                    raise CaptureError(
                        f"{name} was stepped with a gradient that no recorded operation made",
                        hint="This is a part of the step that tilefit does not see; please report it.",
                    )
