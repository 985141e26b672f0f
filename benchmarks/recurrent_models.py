"""Part `models` of `recurrent.py`: whole training steps under automatic mixed precision.

A step is forward, loss, backward, clipping the gradients' norm and AdamW (fused); in fp16 with a gradient
scaler. Times are wall-clock, the device idle before and after.

- language model: 2 LSTM layers of 650, 35 steps of 20 sequences, 10,000 words, dropout 0.5.
- speech encoder: 5 bidirectional GRU layers of 1024 over 500 frames of 80 features, 29 outputs, CTC loss.
- recurrent policy (PPO): an LSTM of 256 over 128 steps of 64 environments, each beginning a new episode at a
  step with probability 1/200. `torch.nn.LSTM` cannot reset its state within a sequence, so three ways round
  that are timed, all with the same results:
    loop          one call a step, the state multiplied by 0 where an episode begins (CleanRL, sb3-contrib);
    segments      one call for the steps between any two resets of any environment (skrl);
    trajectories  each episode's part becomes a row of its own, padded to the longest (rsl_rl); where the rows
                  come from is worked out before the step is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from recurrent_common import DTYPES, Row, Run, Setting, copied, problems, table
from torch import Tensor, nn

import tilefit.nn as tnn

BUDGET_S = 20.0
BARS = {"language model": 1.5, "speech encoder": 2.0, "recurrent policy": 1.5}
ACTIONS = 6


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.5)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embedding.weight
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        out, state = self.lstm(self.dropout(self.embedding(words)), self.state)
        self.state = tuple(part.detach() for part in state)
        return F.cross_entropy(self.head(self.dropout(out)).flatten(0, 1), targets.flatten())


class SpeechEncoder(nn.Module):
    def __init__(self, features: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, layers, bidirectional=True)
        self.head = nn.Linear(2 * hidden, outputs)

    def forward(self, frames: Tensor, targets: Tensor, frame_lengths: Tensor, lengths: Tensor) -> Tensor:
        scores = self.head(self.gru(frames)[0]).log_softmax(-1, dtype=torch.float32)
        return F.ctc_loss(scores, targets, frame_lengths, lengths)


@dataclass
class Rollout:
    """What a policy has seen and done: [T, B, ...], and the state that the first step starts from."""

    seen: Tensor
    state: tuple[Tensor, Tensor]
    begins: Tensor
    actions: Tensor
    old: Tensor
    advantages: Tensor
    returns: Tensor

    def __post_init__(self) -> None:
        steps, batch = self.begins.shape
        self.keep = (~self.begins).float()[:, None, :, None]
        begins = self.begins.clone()
        begins[0] = False
        self.cuts = [0, *begins.any(1).nonzero().flatten().tolist(), steps]
        # Row by row: where each trajectory begins in the order environment, step; and how long it is.
        begins[0] = True
        starts = begins.t().flatten().nonzero().flatten()
        lengths = torch.diff(starts, append=starts.new_tensor([steps * batch]))
        offsets = torch.arange(int(lengths.max()), device=starts.device)[:, None]
        order = (starts + offsets).clamp(max=steps * batch - 1)
        self.source = order % steps * batch + order // steps
        valid = offsets < lengths
        back = torch.empty(steps * batch, dtype=torch.long, device=starts.device)
        back[self.source[valid]] = valid.flatten().nonzero().flatten()
        self.back = back
        self.firsts = (starts % steps == 0).nonzero().flatten()


Recurrence = Callable[[nn.Module, Tensor, Rollout], Tensor]


def loop(lstm: nn.Module, x: Tensor, rollout: Rollout) -> Tensor:
    state, outs = rollout.state, []
    for step in range(len(x)):
        state = tuple(part * rollout.keep[step] for part in state)
        out, state = lstm(x[step : step + 1], state)
        outs.append(out)
    return torch.cat(outs)


def segments(lstm: nn.Module, x: Tensor, rollout: Rollout) -> Tensor:
    state, outs = rollout.state, []
    for begin, end in zip(rollout.cuts, rollout.cuts[1:], strict=False):
        state = tuple(part * rollout.keep[begin] for part in state)
        out, state = lstm(x[begin:end], state)
        outs.append(out)
    return torch.cat(outs)


def trajectories(lstm: nn.Module, x: Tensor, rollout: Rollout) -> Tensor:
    rows = x.flatten(0, 1)[rollout.source]
    state = tuple(
        part.new_zeros((1, rows.shape[1], part.shape[-1])).index_copy(
            1, rollout.firsts, part * rollout.keep[0]
        )
        for part in rollout.state
    )
    out, _ = lstm(rows, state)
    return out.flatten(0, 1)[rollout.back].view(*x.shape[:2], -1)


def resetting(lstm: nn.Module, x: Tensor, rollout: Rollout) -> Tensor:
    return lstm(x, rollout.state, reset=rollout.begins)[0]


class Policy(nn.Module):
    def __init__(self, features: int, hidden: int, recurrence: Recurrence) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.Tanh())
        self.lstm = nn.LSTM(hidden, hidden)
        self.actor, self.critic = nn.Linear(hidden, ACTIONS), nn.Linear(hidden, 1)
        self.recurrence = recurrence

    def forward(self, rollout: Rollout) -> Tensor:
        out = self.recurrence(self.lstm, self.encoder(rollout.seen), rollout)
        scores = self.actor(out).log_softmax(-1, dtype=torch.float32)
        ratio = (scores.gather(-1, rollout.actions[..., None])[..., 0] - rollout.old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.minimum(ratio * rollout.advantages, clipped * rollout.advantages).mean()
        error = (self.critic(out)[..., 0].float() - rollout.returns).square().mean()
        entropy = -(scores.exp() * scores).sum(-1).mean()
        return 0.5 * error - gain - 0.01 * entropy


def rollout_of(setting: Setting, steps: int, batch: int, features: int, hidden: int) -> Rollout:
    def random(*shape: int) -> Tensor:
        return setting.random(*shape, dtype=torch.float32)

    begins = torch.rand(steps, batch, device=setting.device) < 1 / 200
    actions = torch.randint(ACTIONS, (steps, batch), device=setting.device)
    old = random(steps, batch, ACTIONS).log_softmax(-1).gather(-1, actions[..., None])[..., 0]
    state = (random(1, batch, hidden).tanh(), random(1, batch, hidden))
    advantages, returns = random(steps, batch), random(steps, batch)
    return Rollout(random(steps, batch, features), state, begins, actions, old, advantages, returns)


class Step:
    """One training step of a model, over and over."""

    def __init__(self, setting: Setting, model: nn.Module, batch: tuple[object, ...], dtype: torch.dtype):
        self.kind, self.model, self.batch, self.dtype = setting.device.type, model, batch, dtype
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.scaler = torch.amp.GradScaler(self.kind, enabled=dtype is torch.float16)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.kind, self.dtype):
            loss = self.model(*self.batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


Made = tuple[dict[str, nn.Module], tuple[object, ...]]


def language_model(setting: Setting, tied: bool) -> Made:
    vocabulary, width, steps, batch = (50, 8, 3, 2) if setting.tiny else (10_000, 650, 35, 20)
    model = LanguageModel(vocabulary, width, tied).to(setting.device)
    words = torch.randint(vocabulary, (steps + 1, batch), device=setting.device)
    return {"torch": model, "tilefit": converted(setting, model)}, (words[:-1], words[1:])


def speech_encoder(setting: Setting, batch: int) -> Made:
    hidden, layers, steps, letters = (8, 2, 12, 3) if setting.tiny else (1024, 5, 500, 80)
    with setting.device:
        model = SpeechEncoder(80, hidden, layers, 29)
    targets = torch.randint(1, 29, (batch, letters), device=setting.device)
    frames = setting.random(steps, batch, 80, dtype=torch.float32)
    lengths = [torch.full((batch,), length, device=setting.device) for length in (steps, letters)]
    return {"torch": model, "tilefit": converted(setting, model)}, (frames, targets, *lengths)


def recurrent_policy(setting: Setting) -> Made:
    hidden, steps, batch, features = (8, 6, 4, 5) if setting.tiny else (256, 128, 64, 64)
    models: dict[str, nn.Module] = {}
    first = Policy(features, hidden, loop).to(setting.device)
    for recurrence in (loop, segments, trajectories):
        models[f"torch, {recurrence.__name__}"] = model = copied(first)
        model.recurrence = recurrence
    models["tilefit"] = model = converted(setting, first)
    model.recurrence = resetting
    return models, (rollout_of(setting, steps, batch, features, hidden),)


def converted(setting: Setting, model: nn.Module) -> nn.Module:
    return tnn.convert(copied(model), backend=setting.ours)


def models(setting: Setting) -> list[Row]:
    kinds = [
        ("language model", "untied", lambda: language_model(setting, tied=False)),
        ("language model", "tied", lambda: language_model(setting, tied=True)),
        ("recurrent policy", "64 x 128", lambda: recurrent_policy(setting)),
        ("speech encoder", "batch 8", lambda: speech_encoder(setting, 8)),
        ("speech encoder", "batch 32", lambda: speech_encoder(setting, 32)),
    ]
    if not setting.tiny:
        setting.compile_ahead(
            problem
            for dtype in (torch.bfloat16, torch.float16)
            for found in (
                problems("lstm", dtype, 650, 20),
                problems("lstm", dtype, 256, 64, resets=True),
                problems("gru", dtype, 1024, 8, directions=2),
                problems("gru", dtype, 1024, 32, directions=2),
            )
            for problem in found
        )
    cases = [(dtype, *kind) for dtype in ("bf16", "fp16") for kind in kinds]
    rows = [row for case in setting.within(cases) for row in measured(setting, *case)]
    print("\nmodels: wall time of a training step, autocast")
    table(
        "model||dtype|baseline|ms|tilefit ms|ratio|bar|ran on",
        (
            (
                row["model"],
                row["variant"],
                row["dtype"],
                row["baseline"],
                f"{row['baseline_ms']:.2f}",
                f"{row['tilefit_ms']:.2f}",
                f"{row['baseline_ms'] / row['tilefit_ms']:.2f}x",
                BARS[row["model"]],
                row["backend"],
            )
            for row in rows
        ),
    )
    return rows


def measured(setting: Setting, dtype: str, name: str, variant: str, make: Callable[[], Made]) -> list[Row]:
    """A row for each baseline."""
    torch.manual_seed(0)
    made, batch = make()
    steps: dict[str, Run] = {
        contender: Step(setting, model, batch, DTYPES[dtype]) for contender, model in made.items()
    }
    first = {contender: float(step()) for contender, step in steps.items()}  # type: ignore[arg-type]
    ms = {key: us / 1e3 for key, us in setting.interleaved(steps, 7, wall=True).items()}
    backends = sorted({found.backend for found in tnn.explain(made["tilefit"])})
    head = {"model": name, "variant": variant, "dtype": dtype, "backend": ", ".join(backends)}
    return [
        {
            **head,
            "baseline": contender,
            "baseline_ms": ms[contender],
            "tilefit_ms": ms["tilefit"],
            "first_loss": first[contender],
            "tilefit_first_loss": first["tilefit"],
        }
        for contender in ms
        if contender != "tilefit"
    ]
