"""A change of the user's files, and the kinds of edits that make one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilefit.fixes.changes.fix import refuse
from tilefit.fixes.source.file import Edit, Placed, SourceFile
from tilefit.rules.finding import UNSAFE


@dataclass(frozen=True)
class Change:
    """Edits that answer a finding.

    Attributes:
        edits: One or more, the one that matters most first.
        summary: What is written, as short as code: ``fused=True``.
        note: What the user must know before writing it; may be empty.
        level: ``safe`` where the program computes the same for every input, else ``unsafe``.
        code: The rule it answers, once it was tried.
        gain_s: Predicted saving per step, on top of the changes before it: the changed program was captured
            again.
    """

    edits: Sequence[Edit]
    summary: str
    note: str = ""
    level: str = UNSAFE
    code: str = ""
    gain_s: float = 0.0

    @property
    def where(self) -> str:
        """File and line: ``train.py:12``."""
        return f"{self.edits[0].file.name}:{self.edits[0].line}"


def with_torch(file: SourceFile, text: str) -> tuple[str, list[Edit]]:
    """A text with PyTorch as the file calls it; and the edit that imports it if the file does not."""
    for statement in file.tree.body:
        for alias in statement.names if isinstance(statement, ast.Import) else ():
            if alias.name == "torch":
                return re.sub(r"(?<![\w.])torch\.", f"{alias.asname or 'torch'}.", text), []
    # Behind a docstring and imports from the future.
    first_ones = ("'", '"', "from __future__")
    first = next(each for each in file.tree.body if not ast.unparse(each).startswith(first_ones))
    return text, [file.before(first, "import torch")] if "torch." in text else []


def switched_on(calls: Iterable[tuple[SourceFile, ast.Call]], name: str) -> list[Edit]:
    """The edits that give calls ``name=True``; none for one that has it.

    Raises:
        RefusedError: one gets arguments that stand elsewhere.
    """
    edits: list[Edit] = []
    for file, call in calls:
        elsewhere = any(each.arg is None for each in call.keywords)
        refuse(elsewhere, f"the call in {file.where(call)} gets arguments that stand elsewhere")
        arguments: list[Placed] = [*call.args, *call.keywords]
        last = max(arguments, key=file.stop, default=call.func)
        start, stop = file.start(last), file.stop(last)
        is_first = last.col_offset == len(file.indentation(last.lineno))
        if given := keyword(call, name):
            edits += [] if ast.unparse(given) == "True" else [file.replaced(given, "True")]
        elif not arguments:
            edits.append(Edit(file, file.stop(call) - 1, file.stop(call) - 1, f"{name}=True"))
        elif stop == file.stop(call):  # a generator between the call's own parentheses
            edits += [Edit(file, start, start, "("), Edit(file, stop, stop, f", {name}=True)")]
        else:
            between = file.new_line(last) if is_first else " "
            edits.append(Edit(file, stop, stop, f",{between}{name}=True"))
    return edits


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """What a call gives a keyword."""
    return next((each.value for each in call.keywords if each.arg == name), None)
