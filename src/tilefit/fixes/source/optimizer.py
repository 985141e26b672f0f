"""Fuse the optimizer where it is made."""

from __future__ import annotations

import libcst as cst

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change, SourceFix, keyword, lines, with_argument
from tilefit.fixes.source.program import Program
from tilefit.fixes.source.syntax import Syntax
from tilefit.fixes.source.values import called
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE

#: Optimizers that can be fused, by what they are called in a program.
_FUSIBLE = {f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "Adagrad")}


class FusedOptimizer(SourceFix):
    """``AdamW(model.parameters(), lr=1e-4)``: with ``fused=True``."""

    code = "NTC003"
    level = SAFE

    def change(self, finding: Finding, context: Context, program: Program) -> Change:
        syntax, call, runs = _constructor(program)
        program.require_own(syntax)
        fused, foreach = keyword(call, "fused"), keyword(call, "foreach")
        if foreach is not None:
            raise RefusedError(f"{lines([(syntax, call)])} asks for {syntax.code(foreach)}")
        if fused is None:
            edit = with_argument(syntax, call, "fused=True")
        elif syntax.code(fused.value) == "True":
            raise RefusedError(f"{lines([(syntax, call)])} does it already: tell with --fused-optimizer")
        else:
            edit = syntax.replaced(fused.value, "True")
        told = {} if runs else {"fused_optimizer": True}
        return Change({syntax: (edit,)}, syntax.line(call), "fused=True", told=told)


def _constructor(program: Program) -> tuple[Syntax, cst.Call, bool]:
    """The call that makes the optimizer, and whether the step ran it."""
    made = program.births.optimizers()
    if len(made) == 1:
        chain = program.births.of(made[0])
        at = next(index for index, caller in enumerate(chain) if not caller.of_constructor)
        return *called(program, chain, at), True
    if made:
        raise RefusedError(f"the program makes {len(made)} optimizers")
    found = [
        (syntax, call)
        for syntax in program.syntaxes()
        for call in syntax.all(cst.Call)
        if syntax.means(call.func) & _FUSIBLE
    ]
    if len(found) != 1:
        where = f"made in several places ({lines(found)})" if found else "not made in your files"
        raise RefusedError(f"the optimizer is {where}")
    return *found[0], False
