"""A loop over parameters, written as multi-tensor operations."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

import torch

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, with_torch
from tilefit.fixes.source.file import called, names
from tilefit.fixes.source.program import Files
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE

#: What arithmetic on tensors is called there, and where its sides may change places.
_OPERATORS = {ast.Add: "add", ast.Mult: "mul", ast.Sub: "sub", ast.Div: "div"}
_TURN = ("add", "mul")
#: Functions and methods that say the same whenever they are asked.
_STEADY = "abs float int len max min parameters pow".split()


def write_loop_at_once(finding: Finding, context: Context, files: Files) -> Change:
    """A loop over parameters: as multi-tensor operations."""
    file, line = files.line_at(finding.source)
    loops = file.on_line(ast.For, line)
    refuse(not loops, f"line {line} of {file.name} is in no loop")
    statements, imports = with_torch(file, file.new_line(loops[-1]).join(at_once(loops[-1])))
    edits = [file.replaced(loops[-1], statements), *imports]
    return Change(edits, "torch._foreach_… for the loop", level=SAFE)


def at_once(loop: ast.For) -> Iterator[str]:
    """The statements that do to all tensors at once what the body of a loop does to each.

    ``for a, b in zip(x.parameters(), y.parameters()): a.mul_(d).add_(b, alpha=1 - d)``, or
    ``a.copy_(d * a + (1 - d) * b)``.

    Raises:
        RefusedError: the loop is another.
    """
    match loop:
        case ast.For(body=[ast.Expr(value=call)], orelse=[]):
            lists = _lists(loop)
        case _:
            raise RefusedError("the loop does more than one thing")
    operations: list[tuple[str, Sequence[ast.AST]]] = []
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        name, given = call.func.attr, [*call.args, *call.keywords]
        if name == "clamp_" and len(call.args) == len(given) == 2:
            operations[:0] = [("clamp_min_", given[:1]), ("clamp_max_", given[1:])]
        else:
            has_form = name.endswith("_") and hasattr(torch, f"_foreach_{name}")
            refuse(not has_form, f"there is no multi-tensor form of {name}")
            operations.insert(0, (name, given))
        call = call.func.value
    written_to = _listed(call, lists)
    refuse(not written_to, "the loop writes to something else than the tensors it goes over")
    for name, own in operations:
        arguments = (_of_all(each, lists) or ast.unparse(each) for each in own)
        yield f"torch._foreach_{name}({', '.join([written_to, *arguments])})"


def _lists(loop: ast.For) -> dict[str, str]:
    """What each name of a loop goes over: calls of ``parameters()``, which may be asked twice."""
    match loop.target, loop.iter:
        case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=lists, keywords=[]):
            pass
        case _:
            targets, lists = [loop.target], [loop.iter]
    asked = [ast.unparse(each) for each in lists if _is_steady(each)]
    of_parameters = len(asked) == len(lists) and all(each.endswith(".parameters()") for each in asked)
    refuse(not of_parameters, "the loop is not over parameters() alone")
    return dict(zip(map(ast.unparse, targets), asked, strict=False))


def _of_all(value: ast.AST, lists: Mapping[str, str]) -> str:
    """The list of what an expression is for each tensor; empty where it is the same for all."""
    if listed := _listed(value, lists):
        return listed
    if not names(value) & lists.keys() and _is_steady(value):
        return ""
    match value:
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            name = _OPERATORS[type(operator)]
            sides = [_of_all(side, lists) for side in (left, right)]
            if name in _TURN and not sides[0]:
                right, sides = left, sides[::-1]
            if sides[0]:
                return f"torch._foreach_{name}({sides[0]}, {sides[1] or ast.unparse(right)})"
    raise RefusedError("what it adds depends on each tensor")


def _is_steady(node: ast.AST) -> bool:
    """Whether code may be run once or twice in place of once for each tensor: it calls nothing of others."""
    acting = ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
    found = [each for each in ast.walk(node) if isinstance(each, acting)]
    return all(isinstance(each, ast.Call) and called(each) in _STEADY for each in found)


def _listed(tensor: ast.AST, lists: Mapping[str, str]) -> str:
    """The list of what ``p``, ``p.data`` or ``p.detach()`` is one of; empty for what else there may be."""
    name, _, part = ast.unparse(tensor).partition(".")
    if name not in lists or part not in ("", "data", "detach()"):
        return ""
    return f"[each.data for each in {lists[name]}]" if part else f"list({lists[name]})"
