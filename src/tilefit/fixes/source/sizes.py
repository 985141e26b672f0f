"""Write padded sizes where the user wrote odd ones."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
from torch import nn

from tilefit.fixes.changes.fix import RefusedError, refuse
from tilefit.fixes.source.change import Change
from tilefit.fixes.source.program import Program, users_call
from tilefit.fixes.source.syntax import Syntax
from tilefit.fixes.source.values import Place
from tilefit.rules import Finding
from tilefit.rules.alignment.features import Group, designed
from tilefit.rules.base import Context
from tilefit.rules.sites import pattern


def write_features(finding: Finding, context: Context, program: Program) -> Change:
    """``nn.Linear(768, 1023)``: 1024, in every module that has the size."""
    return _padded(finding, context, program, vocabularies=False)


def write_vocabulary(finding: Finding, context: Context, program: Program) -> Change:
    """``vocab_size=50257``: 50304."""
    return _padded(finding, context, program, vocabularies=True)


def _padded(finding: Finding, context: Context, program: Program, *, vocabularies: bool) -> Change:
    """Sizes that count tokens or classes, or all others."""
    group = _group(finding, context, vocabularies)
    sizes, _, _ = group.padded(context)
    fed = {size for size in sizes if any(_has_width(text, size) for text in context.step.inputs)}
    literals: dict[cst.Integer, tuple[Syntax, int]] = {}
    for old, new in sizes.items():
        for path, line, column in sorted(_places(old, group, program)) if old not in fed else ():
            syntax = program.syntax(path)
            program.require_own(syntax)
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


def _group(finding: Finding, context: Context, vocabularies: bool) -> Group:
    for group in designed(context.step):
        layers = [
            layer
            for layer in group.layers
            if not vocabularies or layer.out_features == max(group.vocabularies, default=0)
        ]
        if bool(group.vocabularies) == vocabularies and (
            pattern(layer.module for layer in layers) == finding.module
        ):
            return group
    raise RefusedError("its layers are not found again")


def _places(size: int, group: Group, program: Program) -> set[Place]:
    """Where the size is written, for every module that has it."""
    layers = [layer.module for layer in group.layers if size in (layer.in_features, layer.out_features)]
    modules = {path: program.module(path) for path in layers}
    for model in program.models.values():
        for path, module in model.named_modules():
            if not isinstance(module, nn.Linear) and any(
                size in p.shape for p in module.parameters(recurse=False)
            ):
                modules[path] = module
    return {place for path, module in modules.items() for place in _of_module(path, module, size, program)}


def _of_module(path: str, module: nn.Module | None, size: int, program: Program) -> set[Place]:
    """Where the size is written that a module's constructors were given.

    Raises:
        RefusedError: nowhere.
    """
    if module is None:
        raise RefusedError(f"{path} is not a module of the program")
    chain = program.births.of(module)
    refuse(not chain, f"nobody saw who made {path} (a copy)")
    if found := program.births.places(module, size):
        return found
    maker = next((caller for caller in chain if not caller.of_constructor), None)
    if maker is not None and not maker.is_users:
        reason = f"it is the library's ({Path(maker.path).name}), and an argument there may set it"
    else:
        reason = "it is computed, or comes from elsewhere"
    _, caller = users_call(chain)
    name = program.syntax(caller.path).file.name
    raise RefusedError(f"{size} is not written in your files for {name}:{caller.line}: {reason}")


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
