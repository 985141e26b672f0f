"""A loop over parameters, written as multi-tensor operations."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import libcst as cst

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, imported
from tilefit.fixes.source.places import line_at
from tilefit.fixes.source.program import Files
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE


def write_loop_at_once(finding: Finding, context: Context, files: Files) -> Change:
    """A loop over parameters: as multi-tensor operations."""
    syntax, line = line_at(finding.source, files)
    loops = syntax.on_line(cst.For, line)
    refuse(not loops, f"line {line} of {syntax.file.name} is in no loop")
    torch, imports = imported(syntax, "torch")
    loop = loops[-1]
    between = f"{syntax.file.newline_after(syntax.start(loop))}{syntax.indentation(syntax.line(loop))}"
    edit = syntax.replaced(loop, between.join(at_once(syntax.code(loop), torch)))
    summary = f"{torch}._foreach_… for the loop"
    return Change([(syntax, edit), *imports], summary, level=SAFE)


#: In-place methods of tensors that ``torch._foreach_`` has under the same name.
_METHODS = frozenset(
    "mul_ add_ sub_ div_ lerp_ addcmul_ addcdiv_ clamp_min_ clamp_max_ copy_ neg_ zero_".split()
)
#: What arithmetic on tensors is called there, and where its sides may change places.
_OPERATORS = {ast.Add: "add", ast.Mult: "mul", ast.Sub: "sub", ast.Div: "div"}
_TURN = ("add", "mul")


def at_once(loop: str, torch: str) -> Iterator[str]:
    """The statements that do to all tensors at once what the body of a loop does to each.

    ``for a, b in zip(x.parameters(), y.parameters()): a.mul_(d).add_(b, alpha=1 - d)``, or
    ``a.copy_(d * a + (1 - d) * b)``.

    Raises:
        RefusedError: the loop is another.
    """
    match ast.parse(loop).body:
        case [ast.For(body=[ast.Expr(value=call)], orelse=[], target=target, iter=over)]:
            lists = _lists(loop, target, over)
        case _:
            raise RefusedError("the loop does more than one thing")
    operations: list[tuple[str, Sequence[ast.AST]]] = []
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        name, given = call.func.attr, [*call.args, *call.keywords]
        if name == "clamp_" and len(call.args) == len(given) == 2:
            operations[:0] = [("clamp_min_", given[:1]), ("clamp_max_", given[1:])]
        else:
            refuse(name not in _METHODS, f"there is no multi-tensor form of {name}")
            operations.insert(0, (name, given))
        call = call.func.value
    written_to = _listed(call, lists)
    refuse(not written_to, "the loop writes to something else than the tensors it goes over")
    for name, own in operations:
        arguments = (_of_all(a, lists, torch) or str(ast.get_source_segment(loop, a)) for a in own)
        yield f"{torch}._foreach_{name}({', '.join([written_to, *arguments])})"


def _of_all(value: ast.AST, lists: Mapping[str, str], torch: str) -> str:
    """The list of what an expression is for each tensor; empty where it is the same for all."""
    if listed := _listed(value, lists):
        return listed
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    if not names & lists.keys() and _is_steady(value):
        return ""
    match value:
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            name = _OPERATORS[type(operator)]
            sides = [_of_all(side, lists, torch) for side in (left, right)]
            if name in _TURN and not sides[0]:
                (left, right), sides = (right, left), sides[::-1]
            if sides[0]:
                return f"{torch}._foreach_{name}({sides[0]}, {sides[1] or ast.unparse(right)})"
    raise RefusedError("what it adds depends on each tensor")


def _lists(loop: str, target: ast.expr, over: ast.expr) -> dict[str, str]:
    """What each name of a loop goes over: calls of ``parameters()``, which may be asked twice."""
    match target, over:
        case ast.Tuple(elts=names), ast.Call(func=ast.Name(id="zip"), args=lists, keywords=[]):
            pairs = list(zip_longest(names, lists))
        case _:
            pairs = [(target, over)]
    found = {}
    for pair in pairs:
        match pair:
            case (
                ast.Name(id=name),
                ast.Call(func=ast.Attribute(attr="parameters", value=owner), args=[], keywords=[]) as asked,
            ) if _is_steady(owner):
                found[name] = str(ast.get_source_segment(loop, asked))
            case _:
                raise RefusedError("the loop is not over parameters() alone")
    return found


#: Functions that say the same whenever they are asked.
_STEADY = frozenset("abs float int len max min pow".split())


def _is_steady(node: ast.AST) -> bool:
    """Whether code may be run once or twice in place of once for each tensor: it calls nothing of others."""
    acting = ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
    found = [each for each in ast.walk(node) if isinstance(each, acting)]
    return all(isinstance(each, ast.Call) and getattr(each.func, "id", "") in _STEADY for each in found)


def _listed(tensor: ast.AST, lists: Mapping[str, str]) -> str:
    """The list of what ``p``, ``p.data`` or ``p.detach()`` is one of; empty for what else there may be."""
    name, _, part = ast.unparse(tensor).partition(".")
    if name not in lists or part not in ("", "data", "detach()"):
        return ""
    return f"[each.data for each in {lists[name]}]" if part else f"list({lists[name]})"
