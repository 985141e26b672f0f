"""Write padded sizes where the user wrote odd ones."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import libcst as cst
from torch import nn

from tilefit.fixes.fix import RefusedError
from tilefit.fixes.source.change import Change
from tilefit.fixes.source.program import Program, users_call
from tilefit.fixes.source.values import Literal, OtherValueError, Search, called
from tilefit.rules import Finding
from tilefit.rules.alignment.features import Group, groups
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
    literals: dict[cst.Integer, tuple[Literal, int]] = {}
    for old, new in sizes.items():
        if old not in fed:
            for literal in _literals(old, group, program):
                literals[literal.node] = (literal, new)
    if not literals:
        raise RefusedError(f"{' and '.join(map(str, sizes))} is the width of the data: pad the data")
    edits = []
    for literal, new in literals.values():
        program.require_own(literal.syntax)
        text = f"{new:_}" if "_" in literal.node.value else str(new)
        edits.append((literal.syntax, literal.syntax.replaced(literal.node, text)))
    first = next(iter(literals.values()))[0]
    changed = dict.fromkeys(f"{literal} -> {new}" for literal, new in literals.values())
    return Change.of(
        edits,
        first.syntax.line(first.node),
        ", ".join(changed),
        "changes the model's declared size and the shapes in its state_dict: checkpoints of the old "
        "size do not load",
    )


def _group(finding: Finding, context: Context, vocabularies: bool) -> Group:
    for group in groups(context.step):
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


def _literals(size: int, group: Group, program: Program) -> list[Literal]:
    """Where the size is written, for every module that has it."""
    found = []
    layers = [layer for layer in group.layers if size in (layer.in_features, layer.out_features)]
    for path in dict.fromkeys(layer.module for layer in layers):
        module = program.module(path)
        if module is None:
            raise RefusedError(f"{path} is not a module of the program")
        found += _in_constructor(path, module, size, program)
    for model in program.models.values():
        for path, module in model.named_modules():
            own = module.parameters(recurse=False)
            if not isinstance(module, nn.Linear) and any(size in p.shape for p in own):
                found += _in_constructor(path, module, size, program)
    return found


def _in_constructor(path: str, module: nn.Module, size: int, program: Program) -> list[Literal]:
    """The literals that give a module's constructor the size.

    Raises:
        RefusedError: there is none.
    """
    chain = program.births.of(module)
    if not chain:
        raise RefusedError(f"nobody saw who made {path} (a copy)")
    at, _ = users_call(chain)
    syntax, call = called(program, chain, at)
    search = Search(program, chain, size)
    found, reason = [], ""
    for argument in call.args:
        name = argument.keyword.value if argument.keyword else ""
        try:
            found.append(search.literal(syntax, argument.value, at, name))
        except OtherValueError:
            continue
        except RefusedError as refused:
            # A plain value is another argument, not the reason.
            if not reason and not _is_plain(argument.value):
                reason = f" ({refused.what})"
    if not found:
        found = _in_configuration(search, program)
    if not found:
        maker = next((caller for caller in chain if not caller.of_constructor), None)
        if maker is not None and not maker.is_users:
            reason = f": it is the library's ({Path(maker.path).name}), and an argument there may set it"
        raise RefusedError(f"{size} is not written in {syntax.file.name}:{syntax.line(call)}{reason}")
    return found


def _in_configuration(search: Search, program: Program) -> list[Literal]:
    """The literal behind the one name under which the model's configuration (Hugging Face's) has the size."""
    for model in program.models.values():
        sizes = vars(model.config) if hasattr(model, "config") else {}
        names = [name for name, value in sizes.items() if isinstance(value, int) and value == search.value]
        if len(names) == 1:
            with suppress(RefusedError):
                return [search.anywhere(names[0])]
    return []


def _is_plain(value: cst.BaseExpression) -> bool:
    constant = isinstance(value, cst.Name) and value.value in ("True", "False", "None")
    return constant or isinstance(value, cst.BaseNumber | cst.BaseString)


def _has_width(text: str, size: int) -> bool:
    """Whether an input (``x: float32[8191,479]``) has this many features."""
    return text.rstrip("]").rpartition(",")[2] == str(size) and "float" in text
