"""Healthy programs, and every way to break one line of their protocol.

A program is a function ``train(model, batches, s)`` in text. Its statements about the scale are dropped,
doubled, swapped with their neighbours and moved; whether that changes what is learnt is found out by
training. Left out is what is no matter of precision: a step or a backward pass that is missing altogether,
gradients that are cleared too early, a clip that comes when the step is over or trades places with another.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from precision.loops.parts import BF16, FP16, autocast, net, scaler
from tilefit.precision import watch
from tilefit.rules.finding import NOTE, Alarm

STEPS = 6

_HEAD = """
def train(model, batches, s):
    def loss_of(batch, dtype=FP16, model=model):
        x, y = batch
        with autocast(dtype):
            return mse(model(x).float(), y)
"""

PROGRAMS: dict[str, str] = {
    "plain": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.step(opt)
        s.update()
""",
    "clipped": """
    opt = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "clipped_by_value": """
    opt = AdamW(model.parameters(), lr=1e-2)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        clip_value(model.parameters(), 0.01)
        s.step(opt)
        s.update()
""",
    "adam_with_eps": """
    opt = Adam(model.parameters(), lr=1e-2, eps=1e-3)
    for b in batches:
        opt.zero_grad(set_to_none=False)
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "accumulating": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        for half in halves(b):
            loss = loss_of(half) / 2
            s.scale(loss).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "two_losses": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        first, second = loss_of(b), 0.5 * loss_of(halves(b)[1])
        s.scale(first).backward()
        s.scale(second).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "two_optimizers": """
    o1, o2 = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    for b in batches:
        model.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(o1)
        clip_norm(model[0].parameters(), 3.0)
        s.step(o1)
        s.step(o2)
        s.update()
""",
    "penalty": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        add_decay(model)
        s.step(opt)
        s.update()
""",
    "noise": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        nan_to_num(model)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "by_hand": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        divide(model, s.get_scale())
        clip_norm(model.parameters(), 3.0)
        opt.step()
""",
    "constant_scale": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        (loss * 1024.0).backward()
        divide(model, 1024.0)
        clip_norm(model.parameters(), 3.0)
        opt.step()
""",
    "cleared_through_data": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        zero_data(model)
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "cleared_at_the_end": """
    opt = RMSprop(model.parameters(), lr=1e-3)
    for b in batches:
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
        opt.zero_grad()
""",
    "gan": """
    other = copy_of(model)
    o1, o2 = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    for b in batches:
        o1.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(o1)
        clip_norm(model.parameters(), 3.0)
        s.step(o1)
        o2.zero_grad()
        loss = loss_of(b, model=other)
        s.scale(loss).backward()
        s.step(o2)
        s.update()
    model[0].weight.data.add_(other[0].weight.data)
""",
    "own_clip": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        own_clip(model, 3.0)
        s.step(opt)
        s.update()
""",
    "skipping": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        norm = clip_norm(model.parameters(), 3.0)
        if torch.isfinite(norm):
            s.step(opt)
        s.update()
""",
    "functional": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        loss = s.scale(loss_of(b))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        give(model, grads)
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "schedule": """
    opt = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(opt, 2)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
        schedule.step()
""",
    "averaged_by_hand": """
    opt = SGD(model.parameters(), lr=0.1)
    for b in batches:
        opt.zero_grad()
        for half in halves(b):
            loss = loss_of(half)
            s.scale(loss).backward()
        divide(model, 2)
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
""",
    "moving_average": """
    opt = SGD(model.parameters(), lr=0.1)
    average = copy_of(model)
    for b in batches:
        opt.zero_grad()
        loss = loss_of(b)
        s.scale(loss).backward()
        s.unscale_(opt)
        clip_norm(model.parameters(), 3.0)
        s.step(opt)
        s.update()
        follow(average, model)
""",
}

#: Words of statements that may be dropped, doubled and moved; of the loss, what scales it.
_PROTOCOL = (
    "s.unscale_(",
    "s.step(",
    "opt.step(",
    "s.update(",
    "clip",
    "divide(",
    "add_decay(",
    "nan_to_num(",
)
_STEPS = ("s.step(", "opt.step(")
_CLIPS = ("clip", "own_clip(", "divide(", "add_decay(", "nan_to_num(")
#: A wish, not the protocol: without it, less is done, in the right way.
_WISHES = ("clip", "own_clip(", "norm = clip", "add_decay(", "nan_to_num(", "follow(")


@dataclass(frozen=True)
class Mutation:
    """One changed line of a program: its kind, the line, and the whole text."""

    program: str
    kind: str
    line: str
    text: str

    def __str__(self) -> str:
        return f"{self.program}: {self.kind} {self.line}"


def mutations(name: str) -> Iterator[Mutation]:
    """Every mutation of a program, each text once."""
    order = _order(ast.parse(_HEAD + PROGRAMS[name]))
    seen = {original(name)}
    for kind, line, tree in _mutated(name):
        text = ast.unparse(ast.fix_missing_locations(tree))
        if text not in seen and _is_protocol(tree) and _order(tree) != order:
            seen.add(text)
            yield Mutation(name, kind, line, text)


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.If)]
    return [node.body for node in loops]


def _mutated(name: str) -> Iterator[tuple[str, str, ast.Module]]:
    base = ast.parse(_HEAD + PROGRAMS[name])
    for number, block in enumerate(_blocks(base)):
        for index, statement in enumerate(block):
            text = ast.unparse(statement)
            for kind, change in _changes(text, index, len(block)):
                tree = copy.deepcopy(base)
                change(_blocks(tree)[number])
                yield kind, text, tree


_Change = Callable[[list[ast.stmt]], Any]


def _move(index: int, to: int, block: list[ast.stmt]) -> None:
    block.insert(to, block.pop(index))


def _changes(text: str, index: int, length: int) -> Iterator[tuple[str, _Change]]:
    if "s.scale(" in text and "backward" in text:
        plain = ast.parse(text.replace("s.scale(", "(", 1)).body[0]
        yield "drop", lambda block: block.__setitem__(index, plain)
    if "zero_grad" in text or "zero_data" in text:
        yield "drop", lambda block: block.pop(index)
    if not text.startswith(_PROTOCOL) and " = clip" not in text:
        return
    if not text.startswith(_WISHES) and length > 1 and not text.startswith(_STEPS):
        yield "drop", lambda block: block.pop(index)
    if not text.startswith(_WISHES):
        yield "double", lambda block: block.insert(index, copy.deepcopy(block[index]))
    for to in range(length):
        if to != index:
            kind = "swap" if abs(to - index) == 1 else "move"
            yield kind, partial(_move, index, to)


def _is_protocol(tree: ast.Module) -> bool:
    """Whether what is wrong is a matter of precision: nothing is done to gradients before there are any, or
    after the step, and no step comes without them."""
    for block in _blocks(tree):
        texts = [ast.unparse(statement) for statement in block]
        ready = not any("backward" in text or "give(" in text for text in texts)
        stepped = False
        for text in texts:
            changes = text.startswith((*_WISHES, "divide(", "s.unscale_("))
            if (changes and (stepped or not ready)) or (text.startswith(_STEPS) and not ready):
                return False
            if "backward" in text or "give(" in text:
                ready, stepped = True, False
            stepped |= text.startswith(_STEPS)
    return True


def _order(tree: ast.Module) -> list[list[str]]:
    """The statements of every block, wishes that follow each other in no order."""
    blocks = []
    for block in _blocks(tree):
        texts = [ast.unparse(statement) for statement in block]
        groups = groupby(texts, lambda text: text.startswith(_WISHES))
        blocks.append([text for wish, group in groups for text in (sorted(group) if wish else group)])
    return blocks


# ---- running --------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def halves(batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(4) for part in batch), strict=True))  # type: ignore[no-untyped-call]


def add_decay(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)  # type: ignore[union-attr]


def nan_to_num(model: nn.Module) -> None:
    for g in gradients(model):
        torch.nan_to_num(g, nan=0.0, posinf=0.01, neginf=-0.01, out=g)
        g.clamp_(-0.1, 0.1)


def divide(model: nn.Module, by: float) -> None:
    for g in gradients(model):
        g.div_(by)


def zero_data(model: nn.Module) -> None:
    for g in gradients(model):
        g.data.zero_()


def own_clip(model: nn.Module, limit: float) -> None:
    norm = torch.cat([g.flatten() for g in gradients(model)]).norm()
    for g in gradients(model):
        g.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


def give(model: nn.Module, grads: Any) -> None:
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = g


def follow(average: nn.Module, model: nn.Module) -> None:
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.data.mul_(0.999).add_(p.data, alpha=0.001)


def _helpers() -> dict[str, Any]:
    optim = torch.optim
    return {
        **{name: getattr(optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop")},
        "StepLR": optim.lr_scheduler.StepLR,
        "torch": torch,
        "autocast": autocast,
        "FP16": FP16,
        "BF16": BF16,
        "mse": nn.functional.mse_loss,
        "clip_norm": nn.utils.clip_grad_norm_,
        "clip_value": nn.utils.clip_grad_value_,
        "copy_of": copy.deepcopy,
        **{f.__name__: f for f in (halves, add_decay, nan_to_num, divide, zero_data, own_clip, give, follow)},
    }


@dataclass(frozen=True)
class Ran:
    """What became of a program: weights, an exception's name, and what a watch said."""

    weights: tuple[Tensor, ...]
    raised: str
    alarms: tuple[Alarm, ...]


def run(text: str, *, watched: bool) -> Ran:
    """Train by a program."""
    namespace = _helpers()
    exec(compile(text, "program.py", "exec"), namespace)
    model = net()
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(STEPS)
    ]
    s = scaler(init_scale=2.0**10, growth_interval=2)
    s.scale(torch.ones(()))  # or else nothing could be forgotten without an exception
    w = watch() if watched else None
    raised = ""
    with w if w is not None else nullcontext():
        try:
            # The scale changes often, so that a division by another one shows.
            namespace["train"](model, batches, s)
        except (RuntimeError, AssertionError, ValueError, NameError) as error:
            raised = type(error).__name__
    weights = tuple(p.detach().clone() for p in model.parameters())
    return Ran(weights, raised, w.alarms if w is not None else ())


def original(name: str) -> str:
    """The text of a program as it should be."""
    return ast.unparse(ast.parse(_HEAD + PROGRAMS[name]))


def differs(one: Ran, other: Ran) -> bool:
    """Whether two programs have not learnt the same, rounding apart, which any order of operations has."""
    return any(
        not torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        for a, b in zip(one.weights, other.weights, strict=True)
    )


@cache
def _base(name: str) -> Ran:
    return run(original(name), watched=False)


def judge(mutation: Mutation) -> str:
    """What becomes of a mutation.

    Returns:
        ``found`` or ``missed`` where it changes what is learnt, ``explained`` or ``unexplained`` where
        PyTorch raises, ``silent`` or ``accused`` where it changes nothing; empty where it is no program.
    """
    alone, watched = run(mutation.text, watched=False), run(mutation.text, watched=True)
    if alone.raised in ("NameError", "UnboundLocalError"):
        return ""
    if alone.raised:
        return "explained" if watched.alarms else "unexplained"
    if differs(alone, _base(mutation.program)):
        return "found" if watched.alarms else "missed"
    return "accused" if any(alarm.severity != NOTE for alarm in watched.alarms) else "silent"
