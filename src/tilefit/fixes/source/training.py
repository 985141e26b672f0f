"""What is written into a program, by the rule that it answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import libcst as cst
from libcst import matchers as m

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, Placed, Write, beside, imported, keyword, switched_on
from tilefit.fixes.source.loops import write_loop_at_once
from tilefit.fixes.source.places import line_at, of_models
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.settings import write_autocast, write_tf32
from tilefit.fixes.source.syntax import Syntax
from tilefit.ops.program import TO_GPU, TO_HOST
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE, UNSAFE
from tilefit.rules.outside.optimizer import unfused_updates

_LOADERS = {f"torch.utils.data.{module}DataLoader" for module in ("", "dataloader.")}
#: Optimizers that can be fused: what they are called in a program, by what they are called in a step.
_FUSIBLE = {name.lower(): f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "Adagrad")}
#: Copies of so many bytes are numbers, which are made where they are used.
_NUMBER_BYTES = 8


# ---- the optimizer and the model ---------------------------------------------------------------


def _fused(finding: Finding, context: Context, files: Files) -> Change:
    """``AdamW(model.parameters())``: with ``fused=True``; one beside it that cannot be fused stays."""
    wanted = {_FUSIBLE[name] for name in unfused_updates(context.step)}
    edits: list[Placed] = []
    for source in context.step.program.optimizers or ("",):  # which is refused
        syntax, line = line_at(source, files)
        for call in syntax.on_line(cst.Call, line):
            if syntax.means(call.func) & wanted:
                where, foreach = syntax.where(call), keyword(call, "foreach")
                _refuse_elsewhere(call, f"the optimizer in {where}")
                refuse(foreach is not None, f"{where} asks for {foreach and syntax.code(foreach)}")
                edits += switched_on(syntax, call, "fused")
    refuse(not edits, "the optimizer is not made by a call of PyTorch's class, or asks for it already")
    return Change(edits, "fused=True", level=SAFE)


def _refuse_elsewhere(call: cst.Call, what: str) -> None:
    stars = any(argument.star == "**" for argument in call.args)
    refuse(stars, f"{what} gets arguments that stand elsewhere")


def _compiled(finding: Finding, context: Context, files: Files) -> Change:
    """``model.compile()`` before the optimizer: in place, so that checkpoints keep their names."""
    if any(f.name.value == "compile" for s in files.syntaxes() for f in s.all(cst.FunctionDef)):
        raise RefusedError("the program has a function called compile")
    return _of_models(context, files, "compile()")


def _channels_last(finding: Finding, context: Context, files: Files) -> Change:
    """``model.to(memory_format=torch.channels_last)`` before the optimizer, in place."""
    ranks = {len(p.shape) for p in context.step.parameters.values() if len(p.shape) > 3}
    refuse(len(ranks) != 1, "the model has convolutions in two and in three dimensions")
    layout = "channels_last" if 4 in ranks else "channels_last_3d"
    return _of_models(context, files, f"to(memory_format=torch.{layout})")


def _of_models(context: Context, files: Files, method: str) -> Change:
    """A statement ``model.method`` for each model, where it is known."""
    places, left = of_models(context.step.program, files)
    edits: list[Placed] = []
    done: dict[tuple[Syntax, str], int] = {}
    for syntax, statement, model, behind in places:
        if (syntax, model) not in done:
            torch, imports = imported(syntax, "torch") if "torch." in method else ("", [])
            line = f"{model}.{method}".replace("torch.", f"{torch}.")
            edits += [*imports, beside(syntax, statement, [line], behind=behind)]
            done[syntax, model] = syntax.last_line(statement) + 1 if behind else syntax.line(statement)
    summary = ", ".join(f"{name}.{method}" for _, name in done)
    note = "".join(f"{each.what}, and it is left as it is" for each in left[-1:])
    return Change(edits, summary, note, SAFE, next(iter(done.values())))


# ---- the loop ----------------------------------------------------------------------------------


def _anomalies_unseen(finding: Finding, context: Context, files: Files) -> Change:
    """``set_detect_anomaly(True)``: False."""
    refuse(not finding.source, "no fix does it")  # an environment variable, a setting
    syntax, line = line_at(finding.source, files)
    for call in syntax.on_line(cst.Call, line):
        given = keyword(call, "mode") or next(iter(call.args), None)
        is_it = any(name.endswith("set_detect_anomaly") for name in syntax.means(call.func))
        if is_it and given and syntax.code(given.value) == "True":
            note = "a NaN in the backward pass is then no error"
            edit = syntax, syntax.replaced(given.value, "False")
            return Change([edit], "set_detect_anomaly(False)", note)
    raise RefusedError(f"line {line} of {syntax.file.name} does not say set_detect_anomaly(True)")


def _sums_on_gpu(finding: Finding, context: Context, files: Files) -> Change:
    """``total += loss.item()``: ``total += loss.detach()``."""
    reads = (event for event in context.step.program.events if event.name in ("item", "float"))
    edits = [
        (syntax, syntax.replaced(call.func.attr, "detach"))
        for source in dict.fromkeys(event.site.source for event in reads)
        for syntax, line in (line_at(source, files),)
        for statement in syntax.all(cst.AugAssign)
        if syntax.line(statement) == line and isinstance(statement.operator, cst.AddAssign)
        for call in syntax.all(cst.Call, statement)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "item" and not call.args
        # Between them are sums and products alone.
        for parents in (syntax.parents(call),)
        if next(each for each in parents if not isinstance(each, cst.BinaryOperation)) is statement
    ]
    refuse(not edits, "the values are read for other things than a sum that is kept")
    note = "the sum is then a tensor on the GPU, with the loss's precision: float(total) where it is used"
    return Change(edits, "+= loss.detach()", note)


def _copies_unwaited(finding: Finding, context: Context, files: Files) -> Change:
    """``DataLoader(…)``: with ``pin_memory=True``; ``x.to(device)``: with ``non_blocking=True``."""
    program = context.step.program
    edits: list[Placed] = []
    level = SAFE
    read = {event.site.source for event in program.events if event.kind == TO_HOST}
    copies = [e for e in program.events if e.kind == TO_GPU and e.blocks and e.bytes > _NUMBER_BYTES]
    for source in dict.fromkeys(event.site.source for event in copies if not event.non_blocking):
        syntax, line = line_at(source, files)
        calls = [call for call in syntax.on_line(cst.Call, line) if _copies(syntax, call)]
        refuse(source in read or not calls, f"it is not clear which calls in {source} copy to the GPU")
        if not all(_of_batch(syntax, call) for call in calls):
            level = UNSAFE
        edits += chain(*(switched_on(syntax, call, "non_blocking") for call in calls))
    loaders = dict.fromkeys(loader.source for loader in program.loaders)
    pinned = [edit for source in loaders for edit in _pinned(source, files)]
    edits += pinned
    refuse(not edits, "the batches come from no DataLoader of yours")
    warning = "what is copied must not be a tensor of the GPU's, nor be written to meanwhile"
    summary = "pin_memory=True, non_blocking=True" if pinned else "non_blocking=True"
    return Change(edits, summary, "" if level == SAFE else warning, level)


def _copies(syntax: Syntax, call: cst.Call) -> bool:
    """Whether a call is ``x.to(device)`` or ``x.cuda()``, and names no other place."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in ("to", "cuda"):
        return False
    return "cpu" not in syntax.code(call) and not any(argument.star for argument in call.args)


def _of_batch(syntax: Syntax, call: cst.Call) -> bool:
    """Whether what is copied is what a loop over batches gives, so that nobody writes to it on the host."""
    assert isinstance(call.func, cst.Attribute)
    names = syntax.names(call.func.value)
    loops: Iterator[Any] = syntax.around(call, cst.For, cst.ListComp, cst.DictComp, cst.GeneratorExp)
    targets = (loop.target if isinstance(loop, cst.For) else loop.for_in.target for loop in loops)
    return bool(names & syntax.names(*targets)) and not _written_in_place(syntax, names)


def _written_in_place(syntax: Syntax, names: set[str]) -> bool:
    """Whether the file writes into a tensor of one of these names, or makes an array of its memory."""
    tensor, method = m.Name(m.MatchIfTrue(names.__contains__)), m.Name(m.MatchRegex(r"(.*[^_])?_|numpy"))
    targets: Iterator[cst.CSTNode] = chain(
        (each for each in syntax.all(cst.Call) if m.matches(each, m.Call(m.Attribute(tensor, method)))),
        (out.value for call in syntax.all(cst.Call) if (out := keyword(call, "out"))),
        (each.target for each in syntax.all(cst.AugAssign)),
        (each.target for each in syntax.all(cst.AssignTarget) if isinstance(each.target, cst.Subscript)),
    )
    return bool(syntax.names(*targets) & names)


def _pinned(source: str, files: Files) -> list[Placed]:
    """The edit that has a loader pin its batches; none where it does."""
    syntax, line = line_at(source, files)
    calls = [each for each in syntax.on_line(cst.Call, line) if syntax.means(each.func) & _LOADERS]
    refuse(len(calls) != 1, f"{source} does not call DataLoader once")
    _refuse_elsewhere(calls[0], f"the loader in {source}")
    return switched_on(syntax, calls[0], "pin_memory")


#: What is written into files, by the rule that it answers. A change is safe only where the program computes
#: the same for every input.
WRITERS: dict[str, Write] = {
    "ANO001": _anomalies_unseen,
    "FOR001": write_loop_at_once,
    "LAY001": _channels_last,
    "NTC001": _compiled,
    "NTC003": _fused,
    "PRC001": write_tf32,
    "PRC002": write_autocast,
    "SYN001": _sums_on_gpu,
    "SYN002": _copies_unwaited,
}
#: Into the files of a target that is a model or a function: it is captured on shapes, where none is compiled.
WRITERS_OF_LOADED = {code: WRITERS[code] for code in ("LAY001", "NTC003", "PRC001", "PRC002")}
