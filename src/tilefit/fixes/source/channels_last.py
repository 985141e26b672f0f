"""Put a model in channels-last where it is built."""

from __future__ import annotations

import libcst as cst
from torch import nn

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change, refuse_where_mentioned, torch_name, writes
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.loop import class_names
from tilefit.fixes.source.program import Program, users_call
from tilefit.fixes.source.syntax import Syntax
from tilefit.fixes.source.values import called
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE


@writes("channels-last", SAFE)
def write_channels_last(finding: Finding, context: Context, program: Program) -> Change:
    """``UNet()``: ``UNet().to(memory_format=torch.channels_last)``.

    The first convolution converts images that come in the other format.
    """
    refuse_where_mentioned(program, ("channels_last", "channels_last_3d"), "--channels-last")
    edits: dict[Syntax, tuple[Edit, ...]] = {}
    line = 0
    for model in program.models.values():
        ranks = {p.dim() for p in model.parameters() if p.dim() > 3}
        if not ranks:
            continue
        if len(ranks) > 1:
            raise RefusedError("the model has convolutions in two and in three dimensions")
        last = "channels_last" if ranks == {4} else "channels_last_3d"
        for syntax, call in _makers(program, model):
            program.require_own(syntax)
            torch, imports = torch_name(syntax)
            stop = syntax.stop(call)
            converted = Edit(stop, stop, f".to(memory_format={torch}.{last})")
            own = edits.get(syntax, ())
            edits[syntax] = (*own, *(() if own else imports), converted)
            line = line or syntax.line(call)
    if not edits:
        raise RefusedError("its convolutions are not modules of the program")
    return Change(edits, line, next(reversed(next(iter(edits.values())))).text)


def _makers(program: Program, model: nn.Module) -> list[tuple[Syntax, cst.Call]]:
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
