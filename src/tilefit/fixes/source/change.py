"""A change of the user's files, and the kinds of edits that make one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m

from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.program import Files
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import UNSAFE

#: An edit with its file.
Placed = tuple[Syntax, Edit]
#: What stands before the first import that may be written: a docstring, imports from ``__future__``.
_BEFORE_IMPORTS = m.SimpleStatementLine(
    [m.Expr(m.SimpleString() | m.ConcatenatedString()) | m.ImportFrom(m.Name("__future__"))]
)


@dataclass(frozen=True)
class Change:
    """Edits that answer a finding.

    Attributes:
        edits: One or more.
        summary: What is written, as short as code: ``fused=True``.
        note: What the user must know before writing it; may be empty.
        level: ``safe`` where the program computes the same for every input, else ``unsafe``.
        line: The line of the first file that matters most; 0 for that of the first edit.
    """

    edits: Sequence[Placed]
    summary: str
    note: str = ""
    level: str = UNSAFE
    line: int = 0

    @property
    def where(self) -> str:
        """File and line: ``train.py:12``."""
        syntax, edit = self.edits[0]
        return f"{syntax.file.name}:{self.line or syntax.file.line_of(edit.start)}"


#: ``(finding, context, files)`` to the change; raises ``RefusedError`` where it is not clear what to write.
Write = Callable[[Finding, Context, Files], Change]


def beside(syntax: Syntax, statement: cst.CSTNode, lines: Iterable[str], *, behind: bool) -> Placed:
    """The edit that writes lines before or behind a statement, indented as it is."""
    begin = syntax.line(statement)
    at = syntax.line_end(statement) if behind else syntax.file.line_starts[begin - 1]
    newline, indentation = syntax.file.newline_after(at), syntax.indentation(begin)
    own = (f"{newline}{indentation}{line}" if behind else f"{indentation}{line}{newline}" for line in lines)
    return syntax, Edit(at, at, "".join(own))


def imported(syntax: Syntax, module: str) -> tuple[str, list[Placed]]:
    """What the file calls a module, such as ``torch``, and the edit that imports it if the file does not."""
    for statement in syntax.all(cst.Import):
        for alias in statement.names:
            if alias.evaluated_name == module and syntax.is_global(statement):
                return alias.evaluated_alias or module, []
    first = next(each for each in syntax.tree.body if not m.matches(each, _BEFORE_IMPORTS))
    return module, [beside(syntax, first, [f"import {module}"], behind=False)]


def switched_on(syntax: Syntax, call: cst.Call, name: str) -> list[Placed]:
    """The edit that gives a call ``name=True``; none where it has it."""
    argument = keyword(call, name)
    if argument is None:
        return [(syntax, _with_argument(syntax, call, f"{name}=True"))]
    is_on = syntax.code(argument.value) == "True"
    return [] if is_on else [(syntax, syntax.replaced(argument.value, "True"))]


def _with_argument(syntax: Syntax, call: cst.Call, argument: str) -> Edit:
    """The edit that adds an argument at the end of a call."""
    if not call.args:
        place = syntax.stop(call) - 1
        return Edit(place, place, argument)
    last = call.args[-1]
    if isinstance(last.comma, cst.Comma):
        # After the comma that is there, in the manner of the arguments before it.
        place = syntax.stop(last.comma)
        own_line = syntax.line(last) != syntax.line(call)
        start = syntax.file.newline_after(place) + syntax.indentation(syntax.line(last)) if own_line else " "
        return Edit(place, place, f"{start}{argument}{',' if own_line else ''}")
    place = syntax.stop(last)
    return Edit(place, place, f", {argument}")


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """A call's keyword argument."""
    return next((a for a in call.args if a.keyword is not None and a.keyword.value == name), None)
