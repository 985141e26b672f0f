"""Run forward and loss under autocast."""

from __future__ import annotations

import libcst as cst

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change, refuse_where_mentioned, torch_name, writes
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.loop import model_call
from tilefit.fixes.source.program import Program
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import UNSAFE


@writes("mixed-precision", UNSAFE)
def write_autocast(finding: Finding, context: Context, program: Program) -> Change:
    """``with torch.autocast("cuda", dtype=torch.bfloat16):`` around the statements from the model's call to
    the one before ``backward``."""
    if not context.gpu.supports("bf16"):
        raise RefusedError("fp16 needs a GradScaler in the training loop")
    syntax, call, runs = model_call(program)
    program.require_own(syntax)
    if not runs:
        refuse_where_mentioned(program, ("autocast",), "--amp bf16")
    statements = _statements(syntax, call)
    torch, imports = torch_name(syntax)
    line = syntax.line(statements[0])
    header = f'with {torch}.autocast("cuda", dtype={torch}.bfloat16):'
    return Change(
        {syntax: (*imports, *_within(syntax, header, statements))},
        line,
        header,
        "products run in bf16: the same training but for rounding",
        {} if runs else {"amp": "bf16"},
    )


def _statements(syntax: Syntax, call: cst.Call) -> list[cst.BaseStatement]:
    """The statements from the model's call to the one before ``backward``; without it, to the return."""
    first = syntax.around(call, cst.SimpleStatementLine)
    block = syntax.parent(first) if first else None
    if first is None or not isinstance(block, cst.IndentedBlock | cst.Module):
        raise RefusedError("the model is not called in a statement of its own")
    body = list(block.body)
    body = body[body.index(first) :]
    for index, statement in enumerate(body):
        if any(
            isinstance(c.func, cst.Attribute) and c.func.attr.value == "backward"
            for c in syntax.all(cst.Call, statement)
        ):
            if index == 0:
                raise RefusedError(f"forward and backward share line {syntax.line(first)}: write them apart")
            return _up_to_loss(syntax, body[:index], statement)
    last = body[-1]
    if not (isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], cst.Return)):
        raise RefusedError("it is not clear where the loss ends: there is no backward() in the same block")
    return body


def _up_to_loss(
    syntax: Syntax, statements: list[cst.BaseStatement], backward: cst.BaseStatement
) -> list[cst.BaseStatement]:
    """The statements up to the last that sets what ``backward`` is called on, as far as that is seen."""
    names = {name.value for name in syntax.all(cst.Name, backward)}
    setting = [
        index
        for index, statement in enumerate(statements)
        for target in syntax.all(cst.AssignTarget, statement)
        if isinstance(target.target, cst.Name) and target.target.value in names
    ]
    return statements[: max(setting, default=len(statements) - 1) + 1]


def _within(syntax: Syntax, header: str, statements: list[cst.BaseStatement]) -> list[Edit]:
    """The edits that put statements in a block with a header."""
    file = syntax.file
    first, last = statements[0], statements[-1]
    start = syntax.line(first)
    indentation = syntax.indentation(start)
    unit = syntax.tree.default_indent
    kept = _inside_strings(syntax, statements)
    begin = file.line_starts[start - 1]
    edits = [Edit(begin, begin, f"{indentation}{header}{file.newline_after(begin)}")]
    for line in range(start, file.line_of(syntax.stop(last)) + 1):
        if line not in kept and file.line(line).strip():
            place = file.line_starts[line - 1]
            edits.append(Edit(place, place, unit))
    return edits


def _inside_strings(syntax: Syntax, statements: list[cst.BaseStatement]) -> set[int]:
    """Lines that begin within a string: spaces added there would be the string's."""
    return {
        line
        for statement in statements
        for kind in (cst.SimpleString, cst.FormattedString)
        for node in syntax.all(kind, statement)
        for line in range(syntax.line(node) + 1, syntax.file.line_of(syntax.stop(node)) + 1)
    }
