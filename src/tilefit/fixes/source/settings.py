"""What fixes write that changes the precision of a step: a switch, a block."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import libcst as cst
from libcst import matchers as m

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change, Placed, beside, imported
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.places import call_at
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules import Finding
from tilefit.rules.base import Context

_STRING = m.SimpleString() | m.FormattedString()
#: What a file begins with: imports, docstrings and the like.
_IMPORTS = m.SimpleStatementLine([m.AtLeastN(m.Import() | m.ImportFrom(), n=1)])
_WORDS = m.SimpleStatementLine([m.Expr(), m.ZeroOrMore()])
#: What a file may set TF32 by.
_OF_TF32 = ("set_float32_matmul_precision", "allow_tf32", "fp32_precision")


def write_autocast(finding: Finding, context: Context, files: Files) -> Change:
    """``with torch.autocast("cuda", dtype=torch.bfloat16):`` around the statements from the model's call to
    the one before ``backward``.

    Raises:
        RefusedError: it is not clear where that is, or takes more than a block.
    """
    refuse(not context.gpu.supports("bf16"), "fp16 needs a GradScaler in the training loop")
    syntax, call = call_at(next((each.call for each in context.step.program.models), ""), files)
    statements = _statements(syntax, call)
    torch, imports = imported(syntax, "torch")
    header = f'with {torch}.autocast("cuda", dtype={torch}.bfloat16):'
    edits = [*_within(syntax, header, statements), *imports]
    return Change(edits, header, "products run in bf16: the same training but for rounding")


def _statements(syntax: Syntax, call: cst.Call) -> list[cst.BaseStatement]:
    """The statements from the model's call to the one before ``backward``; without it, to the return."""
    first = next(syntax.around(call, cst.SimpleStatementLine), None)
    block = next(syntax.parents(first)) if first else None
    if first is None or not isinstance(block, cst.IndentedBlock | cst.Module):
        raise RefusedError("the model is not called in a statement of its own")
    body = list(block.body)
    body = body[body.index(first) :]
    for index, statement in enumerate(body):
        if m.findall(statement, m.Call(m.Attribute(attr=m.Name("backward")))):
            refuse(index == 0, f"forward and backward share line {syntax.line(first)}: write them apart")
            return _up_to_loss(syntax, body[:index], statement)
    if not m.matches(body[-1], m.SimpleStatementLine([m.ZeroOrMore(), m.Return()])):
        raise RefusedError("it is not clear where the loss ends: there is no backward() in the same block")
    return body


def _up_to_loss(
    syntax: Syntax, statements: list[cst.BaseStatement], backward: cst.BaseStatement
) -> list[cst.BaseStatement]:
    """The statements up to the last that sets what ``backward`` is called on, as far as that is seen."""
    names = syntax.names(backward)
    sets_one = m.AssignTarget(m.Name(m.MatchIfTrue(lambda name: name in names)))
    setting = [index for index, statement in enumerate(statements) if m.findall(statement, sets_one)]
    return statements[: max(setting, default=len(statements) - 1) + 1]


def _within(syntax: Syntax, header: str, statements: list[cst.BaseStatement]) -> Iterator[Placed]:
    """The edits that put statements in a block with a header."""
    file = syntax.file
    yield beside(syntax, statements[0], [header], behind=False)
    # In lines that begin within a string, blanks would be the string's.
    strings = (node for each in statements for node in m.findall(each, _STRING))
    kept = {line for node in strings for line in range(syntax.line(node) + 1, syntax.last_line(node) + 1)}
    for line in range(syntax.line(statements[0]), syntax.last_line(statements[-1]) + 1):
        if line not in kept and file.line(line).strip():
            yield syntax, Edit(file.offset(line, 0), file.offset(line, 0), syntax.tree.default_indent)


def write_tf32(finding: Finding, context: Context, files: Files) -> Change:
    """``torch.set_float32_matmul_precision("high")`` behind the imports that the main file begins with.

    Raises:
        RefusedError: a file of the program's seems to do so in a part that is not captured.
    """
    syntax = files.syntax(files.main)
    for each in files.syntaxes():
        for node in each.all(cst.Name):
            refuse(node.value in _OF_TF32, f"{each.where(node)} does so already: tell with --tf32")
    head = [*takewhile(lambda statement: m.matches(statement, _IMPORTS | _WORDS), syntax.tree.body)]
    last = next((statement for statement in reversed(head) if m.matches(statement, _IMPORTS)), None)
    if last is None:
        raise RefusedError(f"{syntax.file.name} does not begin with imports")
    torch, imports = imported(syntax, "torch")
    statement = f'{torch}.set_float32_matmul_precision("high")'
    note = "fp32 products round their factors to 10 bits of mantissa"
    return Change([*imports, beside(syntax, last, ["", statement], behind=True)], statement, note, line=1)
