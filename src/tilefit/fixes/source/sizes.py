"""Write padded sizes where the user wrote odd ones."""

from __future__ import annotations

import libcst as cst
from torch import nn

from tilefit.capture.sites import made_at
from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change
from tilefit.fixes.source.program import Loaded
from tilefit.fixes.source.syntax import Syntax
from tilefit.fixes.source.values import Place
from tilefit.rules import Finding
from tilefit.rules.alignment.features import Group, designed
from tilefit.rules.base import Context
from tilefit.rules.sites import pattern


def write_sizes(finding: Finding, context: Context, program: Loaded) -> Change:
    """``nn.Linear(768, 1023)``: 1024, in every module that has the size; ``vocab_size=50257``: 50304."""
    group = _group(finding, context)
    sizes, _, _ = group.padded(context)
    fed = {size for size in sizes if any(_has_width(text, size) for text in context.step.inputs)}
    literals: dict[cst.Integer, tuple[Syntax, int]] = {}
    for old, new in sizes.items():
        for path, line, column in sorted(_places(old, group, program)) if old not in fed else ():
            syntax = program.own_syntax(path)
            literals[syntax.integer_at(line, column)] = syntax, new
    refuse(not literals, f"{' and '.join(map(str, sizes))} is the width of the data: pad the data")
    edits, changed = [], {}
    for literal, (syntax, new) in literals.items():
        text = f"{new:_}" if "_" in literal.value else str(new)
        edits.append((syntax, syntax.replaced(literal, text)))
        changed[f"{_name(syntax, literal)}{literal.value} -> {new}"] = syntax.line(literal)
    return Change.of(
        edits,
        next(iter(changed.values())),
        ", ".join(changed),
        "changes the model's declared size and the shapes in its state_dict: checkpoints of the old "
        "size do not load",
    )


def _group(finding: Finding, context: Context) -> Group:
    """The layers of a finding: of those that count tokens or classes, it names the ones that score them."""
    for group in designed(context.step):
        scored = max(group.vocabularies, default=0)
        named = [layer.module for layer in group.layers if scored in (0, layer.out_features)]
        if (finding.code == "ALN002") == bool(scored) and pattern(named) == finding.module:
            return group
    raise RefusedError("its layers are not found again")


def _places(size: int, group: Group, program: Loaded) -> set[Place]:
    """Where the size is written that the constructors were given of every module that has it.

    Raises:
        RefusedError: one was given it from elsewhere.
    """
    layers = [layer.module for layer in group.layers if size in (layer.in_features, layer.out_features)]
    modules = {path: program.module(path) for path in layers}
    for model in program.models.values():
        for path, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if size in p.shape]
            if own and not isinstance(module, nn.Linear):
                modules[path] = module
    places = set()
    for path, module in modules.items():
        written = {each.place for each in program.given.get(id(module), ()) if each == size}
        if not written:
            made = (module is not None and made_at(module)) or "a line that was not seen"
            raise RefusedError(
                f"{size}, with which {made} makes {path}, is not written in your files: it is computed, or "
                "comes from elsewhere, such as a library's default that an argument may set"
            )
        places |= written
    return places


def _name(syntax: Syntax, literal: cst.Integer) -> str:
    """What a number is the value of, where that is written beside it: ``vocab_size=``."""
    match syntax.parent(literal):
        case cst.Arg(keyword=cst.Name(value=name)) | cst.Param(name=cst.Name(value=name)):
            return f"{name}="
        case (
            cst.AnnAssign(target=cst.Name(value=name))
            | cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))])
        ):
            return f"{name}="
    return ""


def _has_width(text: str, size: int) -> bool:
    """Whether an input (``x: float32[8191,479]``) has this many features."""
    return text.rstrip("]").rpartition(",")[2] == str(size) and "float" in text
