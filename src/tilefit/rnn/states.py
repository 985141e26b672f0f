"""Which state a step of a sequence starts from, and which one a sequence ends in."""

from __future__ import annotations

import torch
from torch import Tensor


def active_steps(lengths: Tensor | None, steps: int) -> Tensor | None:
    """Whether a step lies within a row's length, bool[T, B]; None if all do."""
    return None if lengths is None else torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths


def previous(states: Tensor, initial: Tensor | None, lengths: Tensor | None, reset: Tensor | None) -> Tensor:
    """The state before each step, [T, B, D, H], from those after it and the initial one [D, B, H].

    Direction 0 comes from the step before, direction 1 from the step after; a row's first step starts from
    the initial state (None: zeros), a step with ``reset`` from zeros.
    """
    if initial is None:
        initial = states.new_zeros((states.shape[2], *states.shape[1::2]))
    before = [torch.cat([initial[:1], states[:-1, :, 0]])]
    if states.shape[2] == 2:
        after = torch.cat([states[1:, :, 1], initial[1:]])
        if lengths is not None:
            steps = torch.arange(states.shape[0], device=lengths.device).unsqueeze(1)
            after = torch.where((steps == lengths - 1).unsqueeze(-1), initial[1], after)
        before.append(after)
    result = torch.stack(before, 2) if len(before) == 2 else before[0].unsqueeze(2)
    return result if reset is None else result.masked_fill((reset != 0)[:, :, None, None], 0)


def final(out: Tensor, initial: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The hidden state each row ends in, [D, B, H]: a copy; the initial one if its length is 0."""
    if lengths is None:
        ends = [out[-1, :, 0]]
    else:
        last = (lengths - 1).clamp(min=0).long()
        ends = [out[last, torch.arange(out.shape[1], device=out.device), 0]]
    if out.shape[2] == 2:
        ends.append(out[0, :, 1])
    result = torch.stack(ends)
    if lengths is None:
        return result
    ran = (lengths > 0).unsqueeze(-1)
    return torch.where(ran, result, result.new_zeros(()) if initial is None else initial)
