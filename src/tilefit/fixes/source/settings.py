"""What fixes write that is one setting: a layout, an argument of the optimizer, a switch, a block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import libcst as cst
from torch import nn

from tilefit.capture.optimizer import OPTIMIZERS
from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import (
    Change,
    imported,
    keyword,
    lines,
    refuse_where_mentioned,
    with_argument,
)
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.loop import class_names, model_call
from tilefit.fixes.source.program import Files, Program, called, users_call
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE


def write_autocast(finding: Finding, context: Context, program: Program) -> Change:
    """``with torch.autocast("cuda", dtype=torch.bfloat16):`` around the statements from the model's call to
    the one before ``backward``."""
    syntax, call, runs = model_call(program)
    if not runs:
        refuse_where_mentioned(program, ("autocast",), "--amp bf16")
    return replace(autocast_around(context, program, syntax, call), told={} if runs else {"amp": "bf16"})


def autocast_around(context: Context, files: Files, syntax: Syntax, call: cst.Call) -> Change:
    """The block around a model's call and what follows up to its loss.

    Raises:
        RefusedError: it is not clear where that is, or takes more than a block.
    """
    refuse(not context.gpu.supports("bf16"), "fp16 needs a GradScaler in the training loop")
    files.require_own(syntax)
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


def write_channels_last(finding: Finding, context: Context, program: Program) -> Change:
    """``UNet()``: ``UNet().to(memory_format=torch.channels_last)``.

    The first convolution converts images that come in the other format.
    """
    refuse_where_mentioned(program, ("channels_last", "channels_last_3d"), "--channels-last")
    edits: list[tuple[Syntax, Edit]] = []
    lines = []
    for model in program.models.values():
        ranks = {p.dim() for p in model.parameters() if p.dim() > 3}
        for syntax, call in makers(program, model) if ranks else ():
            program.require_own(syntax)
            torch, imports = imported(syntax, "torch")
            stop = syntax.stop(call)
            edits += [*imports, (syntax, Edit(stop, stop, f".{layout_call(ranks, torch)}"))]
            lines.append(syntax.line(call))
    refuse(not edits, "its convolutions are not modules of the program")
    return Change.of(edits, lines[0], edits[-1][1].text, level=SAFE)


def layout_call(ranks: Collection[int], torch: str) -> str:
    """The call of a model's method that lays it out in NHWC.

    Args:
        ranks: Dimensions of its filters.
        torch: What the file calls PyTorch.

    Raises:
        RefusedError: there is no one layout.
    """
    refuse(len(ranks) != 1, "the model has convolutions in two and in three dimensions")
    return f"to(memory_format={torch}.{'channels_last' if 4 in ranks else 'channels_last_3d'})"


def makers(program: Program, model: nn.Module) -> list[tuple[Syntax, cst.Call]]:
    """The call that made a model, and for a target that is a model those that make others of its class.

    The training loop, which nobody has seen, may build the model itself.
    """
    chain = program.births.of(model)
    outside = next((i for i, caller in enumerate(chain) if not caller.of_constructor), len(chain))
    at, _ = users_call(chain[outside:])
    first = called(program, chain, outside + at)
    if program.calls:
        return [first]
    others = [
        (syntax, call)
        for syntax in program.syntaxes()
        if (names := class_names(program, syntax, type(model)))
        for call in syntax.all(cst.Call)
        if call is not first[1] and syntax.means(call.func) & names
    ]
    return [first, *others]


#: Optimizers that can be fused: what they are called in a program, by what they are called in a step.
FUSIBLE = {name.lower(): f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "Adagrad")}


def write_fused(finding: Finding, context: Context, program: Program) -> Change:
    """``AdamW(model.parameters(), lr=1e-4)``: with ``fused=True``."""
    calls, run = _constructors(program)
    return fused(program, calls, told={} if run else {"fused_optimizer": True})


def fused(files: Files, calls: Sequence[tuple[Syntax, cst.Call]], **more: Any) -> Change:
    """The change that fuses the optimizers that calls make; ``more``: of it.

    Raises:
        RefusedError: one asks for another form, or all are.
    """
    edits = []
    for syntax, call in calls:
        files.require_own(syntax)
        if any(argument.star == "**" for argument in call.args):
            raise RefusedError(
                f"the optimizer in {lines([(syntax, call)])} gets arguments that stand elsewhere"
            )
        if (foreach := keyword(call, "foreach")) is not None:
            raise RefusedError(f"{lines([(syntax, call)])} asks for {syntax.code(foreach)}")
        if (edit := switched_on(syntax, call, "fused")) is not None:
            edits.append((call, (syntax, edit)))
    refuse(not edits, f"{lines(calls)} does it already: tell with --fused-optimizer")
    (first, (syntax, _)), *_ = edits
    return Change.of((edit for _, edit in edits), syntax.line(first), "fused=True", level=SAFE, **more)


def switched_on(syntax: Syntax, call: cst.Call, name: str) -> Edit | None:
    """The edit that gives a call ``name=True``; None where it has it."""
    argument = keyword(call, name)
    if argument is None:
        return with_argument(syntax, call, f"{name}=True")
    return None if syntax.code(argument.value) == "True" else syntax.replaced(argument.value, "True")


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
        if syntax.means(call.func) & set(FUSIBLE.values())
    ]
    if len(found) != 1:
        where = f"made in several places ({lines(found)})" if found else "not made in your files"
        raise RefusedError(f"the optimizer is {where}")
    return found, False


def write_tf32(finding: Finding, context: Context, program: Files) -> Change:
    """``torch.set_float32_matmul_precision("high")`` behind the imports."""
    syntax = program.syntax(program.main)
    program.require_own(syntax)
    refuse_where_mentioned(
        program, ("set_float32_matmul_precision", "allow_tf32", "fp32_precision"), "--tf32"
    )
    torch, imports = imported(syntax, "torch")
    statement = f'{torch}.set_float32_matmul_precision("high")'
    note = "fp32 products round their factors to 10 bits of mantissa"
    return Change.of([*imports, (syntax, behind_imports(syntax, statement))], 1, statement, note)


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
    place = syntax.line_end(last)
    newline = syntax.file.newline_after(place)
    return Edit(place, place, f"{newline}{newline}{statement}")
