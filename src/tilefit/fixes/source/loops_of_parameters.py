"""A loop over parameters, written as the multi-tensor operations that do the same."""

from __future__ import annotations

import libcst as cst

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.syntax import Syntax

#: In-place methods of tensors that ``torch._foreach_`` has under the same name.
_METHODS = frozenset("mul_ add_ sub_ div_ lerp_ addcmul_ addcdiv_ clamp_min_ clamp_max_ neg_ zero_".split())


def at_once(syntax: Syntax, loop: cst.For, torch: str) -> str:
    """The statements that do to all tensors at once what the body does to each.

    ``for a, b in zip(x.parameters(), y.parameters()): a.mul_(d).add_(b, alpha=1 - d)``.

    Raises:
        RefusedError: the loop is another.
    """
    lists = _lists(syntax, loop)
    target, operations = _operations(loop)
    if target.partition(".")[0] not in lists:
        raise RefusedError("the loop writes to another tensor than those it goes over")
    indentation = syntax.indentation(syntax.line(loop))
    newline = syntax.file.newline_after(syntax.start(loop))
    return f"{newline}{indentation}".join(
        f"{torch}._foreach_{name}({', '.join([_listed(target, lists), *arguments])})"
        for name, given in operations
        for arguments in [_arguments(syntax, given, lists)]
    )


def _lists(syntax: Syntax, loop: cst.For) -> dict[str, str]:
    """What each name of the loop goes over: calls of ``parameters()``, which may be asked twice."""
    match loop:
        case cst.For(
            target=cst.Tuple(elements=names), iter=cst.Call(func=cst.Name(value="zip"), args=over)
        ) if len(names) == len(over):
            pairs = [(element.value, argument.value) for element, argument in zip(names, over, strict=True)]
        case _:
            pairs = [(loop.target, loop.iter)]
    lists = {}
    for pair in pairs:
        match pair:
            case (
                cst.Name(value=text),
                cst.Call(func=cst.Attribute(attr=cst.Name(value="parameters")), args=[]) as asked,
            ):
                lists[text] = syntax.code(asked)
            case _:
                pairs = []
    if not pairs or loop.orelse or loop.asynchronous:
        raise RefusedError("the loop is not over parameters() alone")
    return lists


def _operations(loop: cst.For) -> tuple[str, list[tuple[str, list[cst.Arg]]]]:
    """The tensor that the only statement writes to, and the methods it calls, in order."""
    match loop.body:
        case cst.IndentedBlock(body=[cst.SimpleStatementLine(body=[cst.Expr(value=call)])]):
            pass
        case _:
            raise RefusedError("the loop does more than one thing")
    found: list[tuple[str, list[cst.Arg]]] = []
    node: cst.BaseExpression = call
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        if node.func.attr.value not in _METHODS:
            raise RefusedError(f"there is no multi-tensor form of {node.func.attr.value}")
        found.insert(0, (node.func.attr.value, list(node.args)))
        node = node.func.value
    return _tensor(node), found


def _tensor(node: cst.BaseExpression) -> str:
    """``p`` or ``p.data``; what else is written to, nobody knows the list of."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value="data")):
            return f"{name}.data"
    raise RefusedError("the loop writes to something else than its tensors")


def _listed(tensor: str, lists: dict[str, str]) -> str:
    name, dot, _ = tensor.partition(".")
    return f"[each.data for each in {lists[name]}]" if dot else f"list({lists[name]})"


def _arguments(syntax: Syntax, arguments: list[cst.Arg], lists: dict[str, str]) -> list[str]:
    """The arguments, with lists for tensors; a number may not depend on which tensor it is for."""
    written = []
    for argument in arguments:
        names = {name.value for name in syntax.all(cst.Name, argument.value)} & lists.keys()
        word = f"{argument.keyword.value}=" if argument.keyword else ""
        if names:
            code = syntax.code(argument.value).removesuffix(".data").removesuffix(".detach()")
            if word or argument.star or code not in lists:
                raise RefusedError("what it adds depends on each tensor")
            code = syntax.code(argument.value)
            form = ".data" if code.endswith((".data", ".detach()")) else ""
            written.append(_listed(f"{next(iter(names))}{form}", lists))
        else:
            written.append(f"{word}{syntax.code(argument.value)}")
    return written
