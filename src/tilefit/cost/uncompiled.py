"""Which operations of a step ``torch.compile`` leaves to Python, where they run one by one.

- A module that runs a recurrent layer, and what it calls: Dynamo skips it
  (``torch._dynamo.config.allow_rnn``). Of three models on an H200 whose outermost module does, none ran a
  generated kernel.
- What a training step does beside its passes (:func:`beside`), the optimizer above all.
- A graph ends where a value of the GPU is read. Where that is in a loop, Dynamo leaves the whole function to
  Python, and modules of PyTorch's own classes that it calls; those of others are taken for left, too. A
  mixture of experts that asks each for its rows, compiled on an H100, ran 1,776 kernels in 7.9 ms, of 1,812
  in 8.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from tilefit.ops import FORWARD, OPTIMIZER, StepOp
from tilefit.ops.program import WAIT, Program

#: Share of the operations of the passes, those of modules that read values in loops, from which on a step is
#: taken for one that is not compiled: the rest is in so many small graphs that it gains nothing (the mixture:
#: 0.8).
_LEFT_SHARE = 0.5
#: Share of the forward operations that run compiled from which on a step is taken for compiled. A choice.
COMPILED_SHARE = 0.5


def marked(ops: Sequence[StepOp], program: Program) -> list[StepOp]:
    """The operations, those that are left to Python as such; none where nothing of the model is compiled."""
    owners = {entry.site.module.rpartition(".")[0] for entry in ops if entry.op.kind == "recurrent"}
    reading = _reading_in_loops(program)
    others = {*map(id, beside(ops))}
    inside, loops = within(owners | reading), within(reading)
    made = [
        replace(entry, eager=True)
        if entry.phase != OPTIMIZER and (id(entry) in others or inside(entry))
        else entry
        for entry in ops
    ]
    passes = [entry for entry in made if entry.phase != OPTIMIZER]
    gains = not all(entry.eager for entry in passes) and sum(map(loops, passes)) < _LEFT_SHARE * len(passes)
    return made if gains else []


def beside(ops: Sequence[StepOp]) -> list[StepOp]:
    """What a training step does to its parameters beside its passes (moving averages of weights): forward
    operations of lines outside of all modules that touch parameters, and others of the same tensors, with
    results that no module, no loss and no backward pass reads, or that are parameters themselves."""
    graded = {entry.site.source for entry in ops if entry.phase not in (FORWARD, OPTIMIZER)}
    unread: list[StepOp] = []
    read: set[int] = set()
    for entry in reversed(ops) if graded else ():
        is_outside = entry.phase == FORWARD and not entry.site.module and entry.site.source not in graded
        if is_outside and read.isdisjoint(ref.id for ref in entry.outputs if not ref.parameter):
            unread.append(entry)
        elif entry.phase != OPTIMIZER:
            read.update(ref.id for ref in entry.inputs)
    refs = [(entry.site.source, (*entry.inputs, *entry.outputs)) for entry in unread]
    lines = {line for line, own in refs if any(ref.parameter for ref in own)}
    touched = {ref.id for line, own in refs if line in lines for ref in own}
    return [e for e in unread if e.site.source in lines or touched & {ref.id for ref in e.outputs}]


def within(modules: Collection[str]) -> Callable[[StepOp], bool]:
    """Tells the operations of some modules and of what they call."""
    inside = tuple(module and f"{module}." for module in modules)
    return lambda entry: f"{entry.site.module}.".startswith(inside)


def _reading_in_loops(program: Program) -> set[str]:
    """The modules that read values of the GPU in one line several times in a forward pass."""
    reads = Counter((e.site.module, e.site.source) for e in program.events if e.kind == WAIT and e.within)
    passes = max(1, program.micro_batches)
    return {module for (module, _), times in reads.items() if module and times > passes}
