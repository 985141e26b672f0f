"""Where things are in a program's files: found by the lines that were seen when it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst import matchers as m

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.syntax import Syntax
from tilefit.ops import Program


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
    """A statement, the models that are known there, and whether what is done to them stands behind it."""

    syntax: Syntax
    statement: cst.CSTNode
    models: list[str]
    behind: bool


def of_models(program: Program, files: Files, behind: bool) -> tuple[list[Place], list[RefusedError]]:
    """Where something can be done to the models of a step: beside the statements that make the optimizers, to
    the models that are asked for their parameters there; behind those that make the models that no optimizer
    steps, and of all where not every optimizer is given its parameters so. And why that is not known of some.

    Args:
        program: What was seen.
        files: Of the program.
        behind: Behind the optimizers, not before them.

    Raises:
        RefusedError: of no model it is known.
    """
    find = partial(_beside_optimizer, program=program, files=files, behind=behind)
    places, unclear = _found(find, program.optimizers)
    places = [] if unclear else places
    if files.built_at:
        others, left = _found(partial(_named, files=files), [files.built_at])
    else:
        made = program.models or ("",)  # which is refused
        others, left = _found(partial(_called, files=files), made[bool(places) :])
    if not (places or others):
        raise (*unclear, *left)[0]
    return [*places, *others], left


def _found(find: Callable[[str], Place], sources: Iterable[str]) -> tuple[list[Place], list[RefusedError]]:
    """What is found by lines, and why nothing by others."""
    found: list[Place] = []
    refused: list[RefusedError] = []
    for source in sources:
        try:
            found.append(find(source))
        except RefusedError as error:
            refused.append(error)
    return found, refused


def _beside_optimizer(source: str, program: Program, files: Files, behind: bool) -> Place:
    """The statement in a line that makes an optimizer, and the models that are asked for their parameters."""
    syntax, line = line_at(source, files)
    given = [node for call in syntax.on_line(cst.Call, line) for node in _given(syntax, call)]
    models = {_whole(name, program, files): None for node in given for name in _asked(syntax, node)}
    loops = [loop.target for node in given for loop in syntax.all(cst.CompFor, node)]
    statements = syntax.on_line(cst.SimpleStatementLine, line)
    if not statements or not models or models.keys() & syntax.names(*loops):
        raise RefusedError("it is not clear what the model is called: no optimizer gets model.parameters()")
    # Behind a return nothing runs.
    returns = any(syntax.all(cst.Return, statements[0]))
    return Place(syntax, statements[0], [*models], behind and not returns)


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
            assigned = (next(syntax.around(each, cst.Assign), None) for each in syntax.assignments(name))
            waiting += [each for each in assigned if each and syntax.stop(each) <= syntax.start(call)]
            appended = (
                next(syntax.around(each, cst.For), None)
                for each in syntax.all(cst.Attribute)
                if syntax.code(each) in (f"{name.value}.append", f"{name.value}.extend")
            )
            waiting += [loop.iter for loop in appended if loop and syntax.stop(loop) <= syntax.start(call)]


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
    code = syntax.code(call.func)
    if isinstance(call.func, cst.Name):
        assigned = syntax.assignments(call.func)
    else:
        assigned = [each for each in syntax.all(cst.AssignTarget) if syntax.code(each.target) == code]
    last = [each for node in assigned[-1:] for each in syntax.around(node, cst.SimpleStatementLine)]
    if last and _comes_by(syntax, last[0], call):
        return Place(syntax, last[0], [code], True)
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
