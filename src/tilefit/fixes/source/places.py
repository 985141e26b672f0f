"""Where things are in a program's files: found by the lines that were seen when it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, imported
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.syntax import Syntax
from tilefit.ops import Called, Program
from tilefit.rules.finding import SAFE

_NO_OPTIMIZERS = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")


def line_at(source: str, files: Files) -> tuple[Syntax, int]:
    """The file and the line of ``train.py:41``.

    Raises:
        RefusedError: it is not the user's to change.
    """
    name, _, line = source.rpartition(":")
    refuse(not name, "which line makes, calls or trains it is not known: none was run")
    refuse(not Path(name).is_file(), f"{source} is no file of yours")
    return files.own_syntax(name), int(line)


def call_at(source: str, files: Files) -> tuple[Syntax, cst.Call]:
    """The file and the call that ends at ``train.py:41:17``.

    Raises:
        RefusedError: it is not the user's to change, or not there.
    """
    source, _, column = source.rpartition(":")
    syntax, line = line_at(source, files)
    call = syntax.call_ending(line, int(column))
    if call is None:
        raise RefusedError(f"the model's call is not found in line {line} of {syntax.file.name}")
    return syntax, call


def optimizers(program: Program, files: Files) -> list[tuple[Syntax, cst.Call]]:
    """The calls that make the optimizers of the step, of PyTorch's classes.

    Raises:
        RefusedError: one is not found in the user's files.
    """
    found = []
    for source in program.optimizers or ("",):  # which is refused
        syntax, line = line_at(source, files)
        calls = [
            call
            for call in syntax.on_line(cst.Call, line)
            if any(name.startswith("torch.optim.") for name in syntax.means(call.func))
            if not any(name.startswith(_NO_OPTIMIZERS) for name in syntax.means(call.func))
        ]
        found += [(syntax, call) for call in calls]
    return found


class Place(NamedTuple):
    """A statement, a model's name there, and whether what is added stands behind the statement."""

    syntax: Syntax
    statement: cst.SimpleStatementLine
    model: str
    after: bool


def statements(
    places: Iterable[Place],
    lines: Callable[[str, Syntax], Iterable[str]],
    summary: str,
    needed: Iterable[str] = (),
    note: str = "",
) -> Change:
    """Statements of models beside those that are there, once for each model.

    Args:
        places: Where.
        lines: Of the statements, by the model's name and the file; tabs stand for its indentation.
        summary, note: Of the change.
        needed: Modules that they need.
    """
    edits: dict[tuple[Syntax, Edit], None] = {}
    done: dict[tuple[Syntax, str], int] = {}
    for syntax, statement, model, after in places:
        if (syntax, model) in done:
            continue
        begin = syntax.line(statement)
        at = syntax.line_end(statement) if after else syntax.file.line_starts[begin - 1]
        newline, indentation = syntax.file.newline_after(at), syntax.indentation(begin)
        own = [line.replace("\t", syntax.tree.default_indent) for line in lines(model, syntax)]
        text = "".join(
            f"{newline}{indentation}{each}" if after else f"{indentation}{each}{newline}" for each in own
        )
        edits |= dict.fromkeys(edit for module in needed for edit in imported(syntax, module)[1])
        edits[syntax, Edit(at, at, text)] = None
        done[syntax, model] = syntax.file.line_of(at) + after
    return Change.of(edits, next(iter(done.values())), summary, note, SAFE)


def where_named(program: Program, files: Files) -> Sequence[Callable[[], Place]]:
    """For each model, what finds the statement beside which it has its name, or refuses: that makes an
    optimizer, else the one that gives it the name."""
    if files.built_at:
        return [partial(_named, files.built_at, files)]
    models = program.models or (Called(""),)  # which is refused
    return [partial(_beside if each.name else _called, each, files) for each in models]


def _beside(model: Called, files: Files) -> Place:
    """The statement that makes an optimizer, before which the model is what it will be."""
    syntax, call = call_at(model.beside, files)
    statement = syntax.around(call, cst.SimpleStatementLine)
    if statement is None:
        raise RefusedError(f"the optimizer in {syntax.where(call)} is not made in a statement of its own")
    return Place(syntax, statement, model.name, False)


def _named(source: str, files: Files) -> Place:
    """The statement in a line that makes a model."""
    syntax, line = line_at(source, files)
    for statement in syntax.on_line(cst.SimpleStatementLine, line):
        match statement.body:
            case [cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])]:
                return Place(syntax, statement, name, True)
    raise RefusedError(f"the model that line {line} of {syntax.file.name} makes is given no name there")


def _called(model: Called, files: Files) -> Place:
    """The last statement that names a model, where every call of it comes by."""
    syntax, call = call_at(model.call, files)
    if isinstance(call.func, cst.Name):
        name = call.func.value
        assigned = [each.node for each in syntax.assignments(name, syntax.scope(call))]
        made = [syntax.around(node, cst.SimpleStatementLine) for node in sorted(assigned, key=syntax.start)]
        if made and made[-1] is not None and _comes_by(syntax, made[-1], call):
            return Place(syntax, made[-1], name, True)
    where = f"line {syntax.line(call)} of {syntax.file.name}"
    raise RefusedError(f"the model that is called in {where} is not made there")


def _comes_by(syntax: Syntax, statement: cst.CSTNode, call: cst.CSTNode) -> bool:
    """Whether a statement has run once when a call is made: it is the file's own, or before it in a block
    around it, and in no loop."""
    block = syntax.parent(statement)
    if isinstance(block, cst.Module):
        return True
    loops = (cst.For, cst.While)
    before = syntax.start(statement) < syntax.start(call) < syntax.stop(block)
    return before and not any(syntax.around(statement, kind) for kind in loops)
