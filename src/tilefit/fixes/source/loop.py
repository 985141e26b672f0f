"""Where the user's code calls its model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from libcst.metadata import Assignment

from tilefit.capture.packages import package_of
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.source.change import lines
from tilefit.fixes.source.program import Program, called, users_call
from tilefit.fixes.source.syntax import Syntax


def model_call(program: Program) -> tuple[Syntax, cst.Call, bool]:
    """The call of the model, and whether the captured step ran it.

    Where the target is a model, nobody has seen its training loop: the call is then looked for in the
    program's files, through the names that hold what the target's factory, or the model's class, returned.

    Raises:
        RefusedError: there is not just one.
    """
    if program.calls:
        chain = next(iter(program.calls.values()))
        return *called(program, chain, users_call(chain)[0]), True
    found = [(syntax, call) for syntax in program.syntaxes() for call in _calls(program, syntax)]
    if len(found) != 1:
        where = f"called in several places ({lines(found)})" if found else "not called in your files"
        raise RefusedError(f"the model is {where}")
    return *found[0], False


def _calls(program: Program, syntax: Syntax) -> Iterator[cst.Call]:
    """The calls of the model in one file."""
    holders = _holders(program, syntax)
    for call in syntax.all(cst.Call):
        if isinstance(call.func, cst.Name):
            assigned = syntax.assignments(call.func.value, syntax.scope(call))
            if assigned and all(each.node in holders for each in assigned):
                yield call


def _holders(program: Program, syntax: Syntax) -> set[cst.CSTNode]:
    """What is assigned the model: names and parameters of functions."""
    model = next(iter(program.models.values()))
    factory = program.target.rpartition(":")[2]
    made = known_as(program, syntax, program.main, factory) | class_names(program, syntax, type(model))
    holders: set[cst.CSTNode] = set()
    size = -1
    while size < len(holders):
        size = len(holders)
        for assign in syntax.all(cst.Assign):
            if _gives_model(syntax, assign.value, made, holders):
                for target in assign.targets:
                    holders.add(_first(target.target))
        for call in syntax.all(cst.Call):
            holders.update(_parameters(syntax, call, made, holders))
    return holders


def class_names(program: Program, syntax: Syntax, kind: type) -> set[str]:
    """What a file may call a class; nothing where no file defines it."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return known_as(program, syntax, Path(path).resolve(), kind.__name__, kind.__module__) if path else set()


def known_as(program: Program, syntax: Syntax, path: Path, name: str, module: str = "") -> set[str]:
    """What a file may call something that the file at ``path`` defines, imported absolutely or relatively."""
    if path == program.main:  # which was loaded under a name of tilefit's
        module = f"{package_of(path)[0]}.{path.stem}".removeprefix(".")
    parts = [*module.split("."), name]
    tails = [".".join(parts[index:]) for index in range(len(parts) - 1)]
    own = {name} if path == syntax.file.path else set()
    return own | {f"{dots}{tail}" for tail in tails for dots in ("", ".", "..", "...")}


def _gives_model(
    syntax: Syntax, value: cst.BaseExpression, made: set[str], holders: set[cst.CSTNode]
) -> bool:
    """Whether an expression is the model: made here, held by a name, or the result of its ``.to(…)``."""
    match value:
        case cst.Call(func=cst.Attribute(value=inner, attr=cst.Name(value="to" | "cuda" | "train" | "eval"))):
            return _gives_model(syntax, inner, made, holders)
        case cst.Call():
            return bool(syntax.means(value.func) & made)
        case cst.Name():
            return any(
                assigned.node in holders for assigned in syntax.assignments(value.value, syntax.scope(value))
            )
    return False


def _first(target: cst.BaseExpression) -> cst.CSTNode:
    """The name that is assigned the model: of a factory that returns (model, inputs) the first."""
    return target.elements[0].value if isinstance(target, cst.Tuple) and target.elements else target


def _parameters(
    syntax: Syntax, call: cst.Call, made: set[str], holders: set[cst.CSTNode]
) -> Iterator[cst.Param]:
    """Parameters of the file's own functions that a call passes the model."""
    if not isinstance(call.func, cst.Name):
        return
    functions = [
        assigned.node
        for assigned in syntax.assignments(call.func.value, syntax.scope(call))
        if isinstance(assigned, Assignment) and isinstance(assigned.node, cst.FunctionDef)
    ]
    for function in functions:
        for index, argument in enumerate(call.args):
            if argument.star or not _gives_model(syntax, argument.value, made, holders):
                continue
            for place, parameter in enumerate(function.params.params):
                is_it = parameter.name.value == argument.keyword.value if argument.keyword else place == index
                if is_it:
                    yield parameter
