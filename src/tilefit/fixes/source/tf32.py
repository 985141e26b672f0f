"""Allow TF32 at the beginning of the program."""

from __future__ import annotations

import libcst as cst

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change, refuse_where_mentioned, torch_name, writes
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.program import Program
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import UNSAFE


@writes("tf32", UNSAFE)
def write_tf32(finding: Finding, context: Context, program: Program) -> Change:
    """``torch.set_float32_matmul_precision("high")`` behind the imports."""
    syntax = program.syntax(program.main)
    program.require_own(syntax)
    refuse_where_mentioned(
        program, ("set_float32_matmul_precision", "allow_tf32", "fp32_precision"), "--tf32"
    )
    torch, imports = torch_name(syntax)
    statement = f'{torch}.set_float32_matmul_precision("high")'
    return Change(
        {syntax: (*imports, behind_imports(syntax, statement))},
        1,
        statement,
        "fp32 products round their factors to 10 bits of mantissa",
    )


def behind_imports(syntax: Syntax, statement: str) -> Edit:
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
    number = syntax.file.line_of(syntax.stop(last))
    place = syntax.file.line_starts[number - 1] + len(syntax.file.line(number))
    newline = syntax.file.newline_after(place)
    return Edit(place, place, f"{newline}{newline}{statement}")
