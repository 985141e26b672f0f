"""A change of the user's files, and what every kind of it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import libcst as cst

from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import UNSAFE


@dataclass(frozen=True)
class Change:
    """Edits that answer a finding.

    Attributes:
        edits: By file.
        line: The line of the first file that matters most.
        summary: What is written, as short as code: ``fused=True``.
        note: What the user must know before writing it; may be empty.
        level: ``safe`` where the program computes the same for every input, else ``unsafe``.
    """

    edits: Mapping[Syntax, tuple[Edit, ...]]
    line: int
    summary: str
    note: str = ""
    level: str = UNSAFE

    @classmethod
    def of(cls, edits: Iterable[tuple[Syntax, Edit]], *others: Any, **more: Any) -> Change:
        """One of edits, each with its file; what else it is given is as above."""
        by_file: dict[Syntax, tuple[Edit, ...]] = {}
        for syntax, edit in edits:
            by_file[syntax] = (*by_file.get(syntax, ()), edit)
        return cls(by_file, *others, **more)

    @property
    def where(self) -> str:
        """File and line: ``train.py:12``."""
        return f"{next(iter(self.edits)).file.name}:{self.line}"


#: ``(finding, context, files)`` to the change; raises ``RefusedError`` where it is not clear what to write.
Write = Callable[[Finding, Context, Any], Change]


def imported(syntax: Syntax, module: str) -> tuple[str, list[tuple[Syntax, Edit]]]:
    """What the file calls a module, such as ``torch``, and the edit that imports it if the file does not."""
    for statement in syntax.all(cst.Import):
        for alias in statement.names:
            if alias.evaluated_name == module and syntax.scope(statement) is syntax.global_scope:
                return alias.evaluated_alias or module, []
    start = syntax.start(_after_docstring(syntax))
    return module, [(syntax, Edit(start, start, f"import {module}{syntax.file.newline_after(start)}"))]


def _after_docstring(syntax: Syntax) -> cst.CSTNode:
    """The first statement that is neither a docstring nor an import from ``__future__``."""
    for statement in syntax.tree.body:
        match statement:
            case cst.SimpleStatementLine(
                body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())]
            ):
                continue
            case cst.SimpleStatementLine(body=[cst.ImportFrom(module=cst.Name(value="__future__"))]):
                continue
        return statement
    return syntax.tree


def with_argument(syntax: Syntax, call: cst.Call, argument: str) -> Edit:
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


def switched_on(syntax: Syntax, call: cst.Call, name: str) -> Edit | None:
    """The edit that gives a call ``name=True``; None where it has it."""
    argument = keyword(call, name)
    if argument is None:
        return with_argument(syntax, call, f"{name}=True")
    return None if syntax.code(argument.value) == "True" else syntax.replaced(argument.value, "True")


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """A call's keyword argument."""
    return next((a for a in call.args if a.keyword is not None and a.keyword.value == name), None)
