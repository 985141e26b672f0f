"""Command-line options made of the values that they fill: a new field of one is a new option everywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from tilefit.errors import UsageError
from tilefit.options import refuse, spelled


@dataclass(frozen=True)
class Group:
    """Stands at a command's parameter whose value is filled by several options (see :func:`grouped`).

    Attributes:
        panel: Heading of the options in the help.
        without: Fields that are no options of this command.
        help: Other words for some fields.
    """

    panel: str
    without: Collection[str] = ()
    help: Mapping[str, str] = field(default_factory=dict)


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command for Typer: each parameter that is a :class:`Group` is replaced by the options of its fields.

    The fields of the parameter's dataclass that have ``help`` in their metadata are options: named like the
    field unless ``flags`` say otherwise, of the field's type unless there is an ``annotation``, with what
    else stands there handed to ``typer.Option``. A value with a method ``refuse_idle`` is asked which of the
    given ones would have no effect, which takes a parameter ``context`` of the command. The group is
    keyword-only.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, tuple[type, list[Field[Any]]]] = {}
    for parameter in signature(command).parameters.values():
        kind, *more = get_args(hints[parameter.name]) or (None,)
        group = next((extra for extra in more if isinstance(extra, Group)), None)
        if kind is None or group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        options = [each for each in _options(kind) if each.name not in group.without]
        groups[parameter.name] = kind, options
        types = get_type_hints(kind)
        parameters += [_parameter(option, types[option.name], group) for option in options]

    @wraps(command)
    def called(**values: Any) -> Any:
        for name, (kind, options) in groups.items():
            own = {option.name: _read(option, values.pop(option.name)) for option in options}
            value = kind(**own)
            if hasattr(value, "refuse_idle"):
                value.refuse_idle([option for option in own if given(values["context"], option)])
            values[name] = value
        return command(**values)

    called.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def _options(kind: type) -> Iterator[Field[Any]]:
    """The fields that are options, those of a class before those that it inherits."""
    named = {each.name: each for each in fields(kind) if "help" in each.metadata}
    for owner in kind.__mro__:
        for name in vars(owner).get("__annotations__", ()):
            if name in named:
                yield named.pop(name)


def _parameter(option: Field[Any], kind: Any, group: Group) -> Parameter:
    settings = dict(option.metadata)
    flags = settings.pop("flags") or ((f"--{option.name.replace('_', '-')}",) if kind is bool else ())
    kind = settings.pop("annotation", kind)
    separator = settings.pop("separator", None)
    settings["help"] = group.help.get(option.name, settings["help"])
    default = option.default if option.default is not MISSING else None
    if get_origin(kind) is tuple or separator:
        kind, default = list[str] | None, None
    declared = Annotated[kind, typer.Option(*flags, rich_help_panel=group.panel, **settings)]
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=declared)


def _read(option: Field[Any], value: Any) -> Any:
    """What an option says, as the field holds it."""
    if isinstance(option.default, tuple):
        separator = option.metadata.get("separator")
        parts = [part for text in value or () for part in (text.split(separator) if separator else [text])]
        words = tuple(part.strip() if separator else part for part in parts if not separator or part.strip())
        if value and not words:
            raise UsageError(f"{spelled(option.name)} names nothing", hint="Leave it out for the default.")
        return words
    return value


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse those options that were given and would have no effect.

    Raises:
        UsageError: one was; says ``why`` it is of no use.
    """
    refuse((_typed(context, name) for name in names if given(context, name)), why)


def _typed(context: typer.Context, name: str) -> str:
    """The name of an option as it stands on the command line: ``infer`` for ``train`` that is off."""
    off = next(each.secondary_opts for each in context.command.params if each.name == name)
    return off[0].removeprefix("--") if off and context.params[name] is False else name


def given(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
