"""What fixes write that changes the precision of a step: a switch, a block."""

from __future__ import annotations

import libcst as cst

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, imported
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.places import call_at
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules import Finding
from tilefit.rules.base import Context

#: What a file may set TF32 by.
_OF_TF32 = ("set_float32_matmul_precision", "allow_tf32", "fp32_precision")


def write_autocast(finding: Finding, context: Context, files: Files) -> Change:
    """``with torch.autocast("cuda", dtype=torch.bfloat16):`` around the statements from the model's call to
    the one before ``backward``.

    Raises:
        RefusedError: it is not clear where that is, or takes more than a block.
    """
    refuse(not context.gpu.supports("bf16"), "fp16 needs a GradScaler in the training loop")
    syntax, call = call_at(next((each.call for each in files.seen(context.step).models), ""), files)
    statements = _statements(syntax, call)
    torch, imports = imported(syntax, "torch")
    line = syntax.line(statements[0])
    header = f'with {torch}.autocast("cuda", dtype={torch}.bfloat16):'
    edits = [*imports, *((syntax, edit) for edit in _within(syntax, header, statements))]
    return Change.of(edits, line, header, "products run in bf16: the same training but for rounding")


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
            refuse(index == 0, f"forward and backward share line {syntax.line(first)}: write them apart")
            return _up_to_loss(syntax, body[:index], statement)
    last = body[-1]
    if not (isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], cst.Return)):
        raise RefusedError("it is not clear where the loss ends: there is no backward() in the same block")
    return body


def _up_to_loss(
    syntax: Syntax, statements: list[cst.BaseStatement], backward: cst.BaseStatement
) -> list[cst.BaseStatement]:
    """The statements up to the last that sets what ``backward`` is called on, as far as that is seen."""
    names = syntax.names(backward)
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
    start, stop = syntax.line(statements[0]), file.line_of(syntax.stop(statements[-1]))
    begin = file.line_starts[start - 1]
    edits = [Edit(begin, begin, f"{syntax.indentation(start)}{header}{file.newline_after(begin)}")]
    # In lines that begin within a string, blanks would be the string's.
    kept = {
        line
        for statement in statements
        for kind in (cst.SimpleString, cst.FormattedString)
        for node in syntax.all(kind, statement)
        for line in range(syntax.line(node) + 1, file.line_of(syntax.stop(node)) + 1)
    }
    for line in range(start, stop + 1):
        if line not in kept and file.line(line).strip():
            place = file.line_starts[line - 1]
            edits.append(Edit(place, place, syntax.tree.default_indent))
    return edits


def write_tf32(finding: Finding, context: Context, files: Files) -> Change:
    """``torch.set_float32_matmul_precision("high")`` behind the imports that the main file begins with.

    Raises:
        RefusedError: a file of the program's seems to do so in a part that is not captured.
    """
    syntax = files.own_syntax(files.main)
    for each in files.syntaxes():
        for node in each.all(cst.Name):
            refuse(node.value in _OF_TF32, f"{each.where(node)} does so already: tell with --tf32")
    torch, imports = imported(syntax, "torch")
    statement = f'{torch}.set_float32_matmul_precision("high")'
    note = "fp32 products round their factors to 10 bits of mantissa"
    return Change.of([*imports, (syntax, _behind_imports(syntax, statement))], 1, statement, note)


def _behind_imports(syntax: Syntax, statement: str) -> Edit:
    """The edit that adds a statement behind the imports a file begins with."""
    last: cst.CSTNode | None = None
    for node in syntax.tree.body:
        if not isinstance(node, cst.SimpleStatementLine):
            break
        if all(isinstance(small, cst.Import | cst.ImportFrom) for small in node.body):
            last = node
        elif not isinstance(node.body[0], cst.Expr):
            break
    if last is None:
        raise RefusedError(f"{syntax.file.name} does not begin with imports")
    place = syntax.line_end(last)
    newline = syntax.file.newline_after(place)
    return Edit(place, place, f"{newline}{newline}{statement}")
