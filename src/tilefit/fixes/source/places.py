"""Where things are in a program's files: found by the lines that were seen when it ran."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst import matchers as m

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.syntax import Syntax
from tilefit.ops import Called, Program


def line_at(source: str, files: Files) -> tuple[Syntax, int]:
    """The file and the line of ``train.py:41``.

    Raises:
        RefusedError: it is not the user's to change.
    """
    name, _, line = source.rpartition(":")
    refuse(not name, "which line makes, calls or trains it is not known: none was run")
    refuse(not Path(name).is_file(), f"{source} is no file of yours")
    return files.syntax(name), int(line)


def call_at(source: str, files: Files) -> tuple[Syntax, cst.Call]:
    """The file and the call that ends at ``train.py:41:17``, as Python's bytecode gives it: the column is of
    bytes.

    Raises:
        RefusedError: it is not the user's to change, or not there.
    """
    source, _, column = source.rpartition(":")
    syntax, line = line_at(source, files)
    before = syntax.file.line(line).encode()[: int(column)].decode(errors="replace")
    for call in syntax.on_line(cst.Call, line):
        if syntax.stop(call) == syntax.file.offset(line, len(before)):
            return syntax, call
    raise RefusedError(f"the model's call is not found in line {line} of {syntax.file.name}")


class Place(NamedTuple):
    """A statement, a model's name there, and whether what is done to it stands behind the statement."""

    syntax: Syntax
    statement: cst.CSTNode
    model: str
    behind: bool


def of_models(program: Program, files: Files) -> tuple[list[Place], list[RefusedError]]:
    """Where something can be done to the models that a step calls: before the statement that makes an
    optimizer, where the program has a name for the model there, else behind the one that names it; and why
    that is not known of some.

    Raises:
        RefusedError: of no model it is known.
    """
    if files.built_at:
        return [_named(files.built_at, files)], []
    found: list[Place] = []
    refused: list[RefusedError] = []
    for model in program.models or (Called(""),):  # which is refused
        try:
            found.append(_beside_optimizer(model, files) if model.name else _called(model.call, files))
        except RefusedError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found, refused


def _beside_optimizer(model: Called, files: Files) -> Place:
    """The statement that makes an optimizer, before which the model is what it will be."""
    syntax, call = call_at(model.beside, files)
    for statement in syntax.around(call, cst.SimpleStatementLine):
        return Place(syntax, statement, model.name, False)
    raise RefusedError(f"the optimizer in {syntax.where(call)} is not made in a statement of its own")


def _named(source: str, files: Files) -> Place:
    """The statement in a line that makes a model."""
    syntax, line = line_at(source, files)
    for statement in syntax.on_line(cst.SimpleStatementLine, line):
        match statement.body:
            case [cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])]:
                return Place(syntax, statement, name, True)
    raise RefusedError(f"the model that line {line} of {syntax.file.name} makes is given no name there")


def _called(source: str, files: Files) -> Place:
    """The last statement that names a model, where every call of it comes by."""
    syntax, call = call_at(source, files)
    code = syntax.code(call.func)
    if isinstance(call.func, cst.Name):
        assigned = syntax.assignments(call.func)
    else:
        assigned = [each for each in syntax.all(cst.AssignTarget) if syntax.code(each.target) == code]
    last = [each for node in assigned[-1:] for each in syntax.around(node, cst.SimpleStatementLine)]
    if last and _comes_by(syntax, last[0], call):
        return Place(syntax, last[0], code, True)
    where = f"line {syntax.line(call)} of {syntax.file.name}"
    raise RefusedError(f"the model that is called in {where} is not made there")


def _comes_by(syntax: Syntax, statement: cst.CSTNode, call: cst.Call) -> bool:
    """Whether a statement has run once when a call is made: it is the file's own, or that of the constructor
    whose attribute is called, or before it in a block around it, and in no loop."""
    block, outer, *_ = [*syntax.parents(statement), statement]
    if isinstance(block, cst.Module):
        return True
    if isinstance(call.func, cst.Attribute) and m.matches(outer, m.FunctionDef(m.Name("__init__"))):
        return [*syntax.around(outer, cst.ClassDef)] == [*syntax.around(call, cst.ClassDef)]
    before = syntax.start(statement) < syntax.start(call) < syntax.stop(block)
    return before and not any(syntax.around(statement, cst.For, cst.While))
