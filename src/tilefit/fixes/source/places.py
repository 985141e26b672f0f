"""Where things are in a program's files: found by the lines that were seen when it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst.metadata import Assignment

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, imported
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.syntax import Syntax
from tilefit.ops import Program
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


def optimizers(program: Program, files: Files, *, beside: bool = False) -> list[tuple[Syntax, cst.Call]]:
    """The calls that make the optimizers of the step; those ``beside`` PyTorch's may be passed over.

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
        refuse(not calls and not beside, f"{source} does not call a class of torch.optim")
        found += [(syntax, call) for call in calls]
    return found


class Place(NamedTuple):
    """A statement, the models that are known there, and whether it is to be done behind the statement."""

    syntax: Syntax
    statement: cst.SimpleStatementLine
    models: list[str]
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
    for syntax, statement, models, after in places:
        begin = syntax.line(statement)
        at = syntax.line_end(statement) if after else syntax.file.line_starts[begin - 1]
        newline, indentation = syntax.file.newline_after(at), syntax.indentation(begin)
        new = [name for name in models if (syntax, name) not in done]
        own = [line.replace("\t", syntax.tree.default_indent) for name in new for line in lines(name, syntax)]
        text = "".join(
            f"{newline}{indentation}{each}" if after else f"{indentation}{each}{newline}" for each in own
        )
        if new:
            edits |= dict.fromkeys(edit for module in needed for edit in imported(syntax, module)[1])
            edits[syntax, Edit(at, at, text)] = None
        done |= dict.fromkeys(((syntax, name) for name in new), syntax.file.line_of(at) + after)
    return Change.of(edits, next(iter(done.values())), summary, note, SAFE)


def beside_optimizers(program: Program, files: Files, behind: bool) -> Iterator[Place]:
    """Statements that ask models for their parameters to make the optimizers of the step.

    Raises:
        RefusedError: they are not found, or it is not clear what a model is called there.
    """
    for syntax, call in optimizers(program, files) if program.optimizers else ():
        statement = syntax.around(call, cst.SimpleStatementLine)
        given = [*_given(syntax, call)]
        models = {_whole(name, program, files): None for node in given for name in _asked(syntax, node)}
        loops = [loop.target for node in given for loop in syntax.all(cst.CompFor, node)]
        if statement is None or not models or models.keys() & syntax.names(*loops):
            raise RefusedError(
                "it is not clear what the model is called: no optimizer gets model.parameters()"
            )
        # Behind a return nothing runs.
        yield Place(syntax, statement, [*models], behind and not any(syntax.all(cst.Return, statement)))


def _asked(syntax: Syntax, node: cst.CSTNode) -> Iterator[str]:
    """What is asked for its parameters within a node."""
    for call in syntax.all(cst.Call, node):
        match call.func:
            case cst.Attribute(value=model, attr=cst.Name(value="parameters" | "named_parameters")):
                yield syntax.code(model)


def _whole(name: str, program: Program, files: Files) -> str:
    """Of a part, ``net.conv``, of a model that is called the model, ``net``; of a replica what it wraps."""
    for source in program.models:
        try:
            syntax, call = call_at(source, files)
        except RefusedError:
            continue
        called = syntax.code(call.func)
        if (part := name.removeprefix(f"{called}.")) != name:
            return f"{called}.module" if part.partition(".")[0] == "module" else called
    return name


def _given(syntax: Syntax, call: cst.Call) -> Iterator[cst.CSTNode]:
    """A call and what it is given by name: what was assigned to the names before it, and what loops run over
    that append to them."""
    waiting: list[cst.CSTNode] = [call]
    names: set[str] = set()
    while waiting:
        yield (node := waiting.pop(0))
        for name in syntax.all(cst.Name, node):
            if name.value in names or syntax.start(name) >= syntax.stop(call):
                continue
            names.add(name.value)
            assigned = (syntax.around(each.node, cst.Assign) for each in _assigned(syntax, name))
            waiting += [each for each in assigned if each and syntax.stop(each) <= syntax.start(call)]
            appended = (
                syntax.around(each, cst.For)
                for each in syntax.all(cst.Attribute)
                if syntax.code(each) in (f"{name.value}.append", f"{name.value}.extend")
            )
            waiting += [loop.iter for loop in appended if loop and syntax.stop(loop) <= syntax.start(call)]


def _assigned(syntax: Syntax, name: cst.Name) -> list[Assignment]:
    try:
        return syntax.assignments(name.value, syntax.scope(name))
    except KeyError:  # a keyword of a call, or an attribute
        return []


def where_made(program: Program, files: Files) -> Sequence[Callable[[], Place]]:
    """For each model, what finds the statement that gives it its name, or refuses."""
    if files.built_at:
        return [partial(_named, files.built_at, files)]
    return [partial(_called, source, files) for source in program.models or ("",)]  # which is refused


def _named(source: str, files: Files) -> Place:
    """The statement in a line that makes a model."""
    syntax, line = line_at(source, files)
    for statement in syntax.on_line(cst.SimpleStatementLine, line):
        match statement.body:
            case [cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])]:
                return Place(syntax, statement, [name], True)
    raise RefusedError(f"the model that line {line} of {syntax.file.name} makes is given no name there")


def _called(source: str, files: Files) -> Place:
    """The last statement that names a model, where every call of it comes by."""
    syntax, call = call_at(source, files)
    if isinstance(call.func, cst.Name):
        name = call.func.value
        assigned = [each.node for each in syntax.assignments(name, syntax.scope(call))]
        made = [syntax.around(node, cst.SimpleStatementLine) for node in sorted(assigned, key=syntax.start)]
        if made and made[-1] is not None and _comes_by(syntax, made[-1], call):
            return Place(syntax, made[-1], [name], True)
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
