"""Activation checkpointing written into files: which modules, behind the line that makes their model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import libcst as cst
from torch import nn

from tilefit.cost.recompute import NORMALIZATION
from tilefit.fixes.changes.fix import RefusedError
from tilefit.fixes.kinds.checkpoint import choices, is_fit
from tilefit.fixes.source.change import Change, imported, keyword, with_argument
from tilefit.fixes.source.places import Place, statements, where_named
from tilefit.fixes.source.program import Files, Loaded
from tilefit.fixes.source.syntax import Syntax
from tilefit.rules.base import Context
from tilefit.rules.finding import SAFE

#: What wraps a model, and stands in the paths of its modules.
_WRAPPERS = ("module", "_orig_mod")
_LISTS = ("ModuleList", "Sequential")
#: Names that a loop over modules may use.
_NAMES = ("layer", "block", "module", "part", "checkpointed")
#: Classes whose models checkpoint themselves when told so.
_TRAINING_ARGUMENTS = {f"transformers.{kind}TrainingArguments" for kind in ("", "Seq2Seq")}

#: Changes of one kind, each to be tried where the one before it leaves the step too large.
Way = Iterator[Change]


def ways(context: Context, budget_bytes: float, files: Files) -> Iterator[Way]:
    """How to bring a step into a budget of memory; where the program does not run with a change, neither does
    it with the others of its way.

    What a library checkpoints itself when it is told so (transformers) is told so; else the ``forward`` of
    the modules becomes that of ``torch.utils.checkpoint``, which keeps their names and classes.

    Args:
        context: The priced step.
        budget_bytes: What its tensors may take at once.
        files: Of the program.

    Raises:
        RefusedError: nothing can be written.
    """
    of_transformers = any(_imports(syntax, "transformers") for syntax in files.syntaxes())
    arguments = [
        (syntax, call)
        for syntax in files.syntaxes()
        for call in (syntax.all(cst.Call) if of_transformers else ())
        if syntax.means(call.func) & _TRAINING_ARGUMENTS
    ]
    if len(arguments) == 1:
        yield iter([_told(*arguments[0])])
        return
    for place, modules in _places(context, files):
        found = partial(_chosen, context, budget_bytes, files)
        if of_transformers:
            yield (_enabled(place, paths, modules) for paths in found(of_library=True))
        yield (_wrapped(place, paths, modules, files) for paths in found())


def _imports(syntax: Syntax, package: str) -> bool:
    names = [alias.evaluated_name for each in syntax.all(cst.Import) for alias in each.names]
    for each in syntax.all(cst.ImportFrom):
        names += [syntax.code(each.module)] if each.module and not each.relative else []
    return any(name.partition(".")[0] == package for name in names)


# ---- which ------------------------------------------------------------------------------------


def _chosen(
    context: Context, budget_bytes: float, files: Files, *, of_library: bool = False
) -> Iterator[Sequence[str]]:
    """Paths of modules to compute again: of lists' elements, which a line can name, where these do."""
    modules = context.step.modules
    allowed: list[Callable[[str], bool]] = [partial(_is_element, modules)]
    if not of_library:
        model = files.models.get("") if isinstance(files, Loaded) else None
        runs_twice = partial(_runs_twice, modules, model)
        allowed = [lambda path: _is_element(modules, path) and runs_twice(path), runs_twice]
    for each in allowed:
        found = list(choices(context, budget_bytes, each))
        if any(context.step.memory.peak_bytes - one.saved_bytes <= budget_bytes for one in found):
            yield from (one.modules for one in found)


def _is_element(modules: Mapping[str, str], path: str) -> bool:
    """Whether a module is one of a list that is within no other one's element."""
    names = path.split(".")
    first = next((n for n in range(len(names)) if modules.get(".".join(names[:n])) in _LISTS), 0)
    return first > 0 and first == len(names) - 1


def _runs_twice(modules: Mapping[str, str], model: nn.Module | None, path: str) -> bool:
    """Whether a module can be called twice for a step: no statistics or other state of its own is known."""
    first = path.partition(".")[0]
    within = [name for name in modules if name == path or name.startswith(f"{path}.")]
    if modules.get(first) == first or any("parametrizations" in name.split(".") for name in within):
        return False  # another model's, which is named by its class; or state of a parametrisation
    if any(NORMALIZATION.search(modules[name]) for name in within):
        return False
    return model is None or is_fit(model, path)


def _named(name: str, paths: Sequence[str], modules: Mapping[str, str]) -> str:
    """An expression for modules: ``model.blocks[:4]``, ``(*model.blocks[:4], model.head)``."""
    found: list[str] = []
    for parent, group in groupby(paths, key=lambda path: _list_of(path, modules)):
        if not parent:
            found += [_accessed(name, path, modules) for path in group]
            continue
        numbers = sorted(int(path.rpartition(".")[2]) for path in group)
        last = max(int(path.rpartition(".")[2]) for path in modules if _list_of(path, modules) == parent)
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            own = [number for _, number in run]
            begin, end = (own[0] or ""), ("" if own[-1] == last else own[-1] + 1)
            part = f"[{begin}:{end}]" if (begin, end) != ("", "") else ""
            found.append(f"*{_accessed(name, parent, modules)}{part}")
    if len(found) == 1 and found[0].startswith("*"):
        return found[0][1:]
    return f"({', '.join(found)}{',' * (len(found) == 1)})"


def _list_of(path: str, modules: Mapping[str, str]) -> str:
    parent, _, last = path.rpartition(".")
    return parent if last.isdigit() and modules.get(parent) in _LISTS else ""


def _accessed(name: str, path: str, modules: Mapping[str, str]) -> str:
    """A module as Python names it: ``model.blocks[3].mlp``."""
    walked, text = "", name
    for each in path.split("."):
        if each.isdigit() and modules.get(walked) in _LISTS:
            text += f"[{each}]"
        elif each.isidentifier():
            text += f".{each}"
        else:
            return f'{name}.get_submodule("{path}")'
        walked = f"{walked}.{each}".lstrip(".")
    return text


# ---- where ------------------------------------------------------------------------------------


def _places(context: Context, files: Files) -> Iterator[tuple[Place, Mapping[str, str]]]:
    """The statement beside which the model is known, and the classes of its modules by their paths there:
    without what wraps the model later.

    Raises:
        RefusedError: there is none.
    """
    place = where_named(files.seen(context.step), files)[0]()
    modules = context.step.modules
    for prefix in ("", *(f"{path}." for path in modules if path in _WRAPPERS)):
        yield place, {path.removeprefix(prefix): kind for path, kind in modules.items()}


# ---- what -------------------------------------------------------------------------------------


def _told(syntax: Syntax, call: cst.Call) -> Change:
    """``TrainingArguments(…, gradient_checkpointing=True)``."""
    if keyword(call, "gradient_checkpointing") or any(argument.star == "**" for argument in call.args):
        raise RefusedError(f"line {syntax.line(call)} of {syntax.file.name} may say it already")
    text = 'gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}'
    edit = with_argument(syntax, call, text)
    return Change.of([(syntax, edit)], syntax.line(call), "gradient_checkpointing=True", level=SAFE)


def _enabled(place: Place, paths: Sequence[str], modules: Mapping[str, str]) -> Change:
    """``model.gradient_checkpointing_enable()``, and off for the layers that need not."""
    paths = _there(paths, modules)
    lists = {path.rpartition(".")[0] for path in paths}
    others = [path for path in modules if path.rpartition(".")[0] in lists and path not in paths]

    def lines(name: str, syntax: Syntax) -> list[str]:
        made = [
            f'{name}.gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": False}})'
        ]
        if others:
            each = _free_name(syntax)
            loop = f"for {each} in {_named(name, others, modules)}:"
            made += [loop, f"\t{each}.gradient_checkpointing = False"]
        return made

    return statements([place], lines, f"{place.model}.gradient_checkpointing_enable()")


def _wrapped(place: Place, paths: Sequence[str], modules: Mapping[str, str], files: Files) -> Change:
    """``layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, …)`` for each."""
    _refuse_keywords(files, paths)
    paths = _there(paths, modules)

    def lines(name: str, syntax: Syntax) -> list[str]:
        each = _free_name(syntax)
        return [
            f"for {each} in {_named(name, paths, modules)}:",
            f"\t{each}.forward = {imported(syntax, 'functools')[0]}.partial(",
            f"\t\t{imported(syntax, 'torch')[0]}.utils.checkpoint.checkpoint, {each}.forward, "
            "use_reentrant=False",
            "\t)",
        ]

    summary = f"torch.utils.checkpoint for {_named(place.model, paths, modules)}"
    return statements([place], lines, summary, ("torch", "functools"))


def _there(paths: Sequence[str], modules: Mapping[str, str]) -> list[str]:
    """Paths of modules as they are where the model is not wrapped yet, if it is."""
    return [path if path in modules else path.partition(".")[2] for path in paths]


def _free_name(syntax: Syntax) -> str:
    used = {node.value for node in syntax.all(cst.Name)}
    return next(name for name in (*_NAMES, "_checkpointed") if name not in used)


def _refuse_keywords(files: Files, paths: Sequence[str]) -> None:
    """Refuse modules that may get tensors as keywords alone: of these ``torch.utils.checkpoint`` does not see
    the device, whose random numbers are to be drawn again.

    Raises:
        RefusedError: a ``forward`` of the user's calls one so.
    """
    names = {path.rpartition(".")[2] for path in paths}
    for syntax in files.syntaxes():
        for function in syntax.all(cst.FunctionDef):
            given = syntax.names(*(loop.target for loop in syntax.all(cst.For, function)))
            for call in syntax.all(cst.Call, function) if function.name.value == "forward" else ():
                called = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
                is_one = isinstance(called, cst.Name) and called.value in names | given
                if is_one and call.args and all(argument.keyword for argument in call.args):
                    raise RefusedError(
                        f"{syntax.file.name}:{syntax.line(call)} calls it by keywords alone, of which "
                        "torch.utils.checkpoint does not see the device"
                    )
