"""``%load_ext tilefit``: a model of a notebook is checked where it stands.

    %tilefit model inputs --gpu h200 --amp bf16

checks what two expressions are, or one that is a function of the whole step. Over a cell, ``%%tilefit`` runs
it and checks what its last line is: ``model, inputs``. The options are those of ``tilefit check``.
"""

from __future__ import annotations

import ast
import shlex
import sys
from typing import Any, get_type_hints

import typer

from tilefit.cli.main import command
from tilefit.errors import TilefitError, UsageError
from tilefit.options import CheckKeywords
from tilefit.report import Document

_TAKEN = {"gpu", "calibration", *get_type_hints(CheckKeywords)}


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext tilefit`` calls."""

    def tilefit(line: str, cell: str | None = None) -> Document | None:
        """Check a model: %tilefit model inputs --gpu h200, with the options of `tilefit check`."""
        try:
            return _checked(line, cell, shell.user_ns)
        except (TilefitError, typer.TyperException) as error:
            message = str(error) if isinstance(error, TilefitError) else error.format_message()
            print(f"error: {message}", file=sys.stderr)
            return None

    shell.register_magic_function(tilefit, "line_cell")


def _checked(line: str, cell: str | None, names: dict[str, Any]) -> Document:
    from tilefit.session import check

    texts, options = _read(line, has_cell=cell is not None)
    if cell is not None:
        value = _run(cell, names)
        what = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    else:
        what = tuple(eval(text, names) for text in texts)
    checked: Document = check(*what, **options)
    return checked


def _read(line: str, *, has_cell: bool) -> tuple[list[str], dict[str, Any]]:
    """The expressions of a line, and what its options say."""
    words = shlex.split(line)
    check = command("check").commands["check"]
    context = check.make_context("%tilefit", ["the cell", *words] if has_cell else words)
    given = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    texts = [given.pop("target"), *given.pop("arguments", ())]
    if len(texts) > (1 if has_cell else 2):
        raise UsageError(
            "what is checked are a model and its inputs, or a cell",
            where=line,
            hint="Give names: %tilefit model inputs --gpu h200.",
        )
    for name in sorted(given.keys() - _TAKEN):
        raise UsageError(f"--{name.replace('_', '-')} has no effect in a notebook", hint="Leave it out.")
    for name in given.keys() & {"select", "ignore"}:
        given[name] = [code for text in given[name] for code in text.split(",")]
    return texts, given


def _run(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell in a notebook's names; what its last line is."""
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if not isinstance(last, ast.Expr):
        raise UsageError("the last line is nothing that can be checked", hint="End with: model, inputs.")
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
