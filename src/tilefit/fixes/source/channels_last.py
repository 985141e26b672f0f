"""Put a model in channels-last where it is built."""

from __future__ import annotations

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change, SourceFix, refuse_where_mentioned, torch_name
from tilefit.fixes.source.file import Edit
from tilefit.fixes.source.program import Program, users_call
from tilefit.fixes.source.syntax import Syntax
from tilefit.fixes.source.values import called
from tilefit.rules import Finding
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE


class ChannelsLast(SourceFix):
    """``UNet()``: ``UNet().to(memory_format=torch.channels_last)``.

    The first convolution converts images that come in the other format.
    """

    code = "LAY001"
    level = SAFE

    def change(self, finding: Finding, context: Context, program: Program) -> Change:
        refuse_where_mentioned(program, ("channels_last", "channels_last_3d"), "--channels-last")
        edits: dict[Syntax, tuple[Edit, ...]] = {}
        line = 0
        for model in program.models.values():
            ranks = {p.dim() for p in model.parameters() if p.dim() > 3}
            if not ranks:
                continue
            if len(ranks) > 1:
                raise RefusedError("the model has convolutions in two and in three dimensions")
            chain = program.births.of(model)
            outside = next((i for i, caller in enumerate(chain) if not caller.of_constructor), len(chain))
            at, _ = users_call(chain[outside:])
            syntax, call = called(program, chain, outside + at)
            program.require_own(syntax)
            torch, imports = torch_name(syntax)
            last = "channels_last" if ranks == {4} else "channels_last_3d"
            stop = syntax.stop(call)
            converted = Edit(stop, stop, f".to(memory_format={torch}.{last})")
            edits[syntax] = (*edits.get(syntax, ()), *imports, converted)
            line = line or syntax.line(call)
        if not edits:
            raise RefusedError("its convolutions are not modules of the program")
        return Change(edits, line, next(reversed(next(iter(edits.values())))).text)
