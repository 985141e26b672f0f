"""Fuse the optimizer where it is made."""

from __future__ import annotations

from typing import Any

import libcst as cst

from tilefit.capture.optimizer import OPTIMIZERS
from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change, keyword, lines, with_argument, writes
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.program import Program
from tilefit.fixes.source.syntax import Syntax
from tilefit.fixes.source.values import called
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE

#: Optimizers that can be fused, by what they are called in a program.
_FUSIBLE = {f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "Adagrad")}


@writes("fuse-optimizer", SAFE)
def write_fused(finding: Finding, context: Context, program: Program) -> Change:
    """``AdamW(model.parameters(), lr=1e-4)``: with ``fused=True``."""
    calls, run = _constructors(program)
    edits: dict[Syntax, tuple[Edit, ...]] = {}
    line = 0
    for syntax, call in calls:
        program.require_own(syntax)
        fused, foreach = keyword(call, "fused"), keyword(call, "foreach")
        if foreach is not None:
            raise RefusedError(f"{lines([(syntax, call)])} asks for {syntax.code(foreach)}")
        if fused is None:
            edit = with_argument(syntax, call, "fused=True")
        elif syntax.code(fused.value) == "True":
            continue
        else:
            edit = syntax.replaced(fused.value, "True")
        line = line if edits else syntax.line(call)
        edits[syntax] = (*edits.get(syntax, ()), edit)
    if not edits:
        raise RefusedError(f"{lines(calls)} does it already: tell with --fused-optimizer")
    return Change(edits, line, "fused=True", told={} if run else {"fused_optimizer": True})


def optimizer_of(program: Program) -> dict[str, Any]:
    """The options of a capture that say which optimizer the program makes; none where that is not clear."""
    try:
        calls, _ = _constructors(program)
    except RefusedError:
        return {}
    names = {name.rpartition(".")[2].lower() for syntax, call in calls for name in syntax.means(call.func)}
    if len(names) != 1 or not names <= OPTIMIZERS.keys():
        return {}
    fused = [(syntax, keyword(call, "fused")) for syntax, call in calls]
    is_fused = all(each is not None and syntax.code(each.value) == "True" for syntax, each in fused)
    return {"optimizer": names.pop(), "fused_optimizer": is_fused}


def _constructors(program: Program) -> tuple[list[tuple[Syntax, cst.Call]], bool]:
    """The calls that make the optimizers, and whether the step ran them."""
    made: dict[cst.Call, Syntax] = {}
    for optimizer in program.births.optimizers():
        if "fused" in optimizer.defaults:  # others take no such argument
            chain = program.births.of(optimizer)
            at = next(index for index, caller in enumerate(chain) if not caller.of_constructor)
            syntax, call = called(program, chain, at)
            made[call] = syntax
    if made:
        return [(syntax, call) for call, syntax in made.items()], True
    found = [
        (syntax, call)
        for syntax in program.syntaxes()
        for call in syntax.all(cst.Call)
        if syntax.means(call.func) & _FUSIBLE
    ]
    if len(found) != 1:
        where = f"made in several places ({lines(found)})" if found else "not made in your files"
        raise RefusedError(f"the optimizer is {where}")
    return found, False
