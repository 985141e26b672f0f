"""How commands read what is typed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tilefit.errors import UsageError


class Command(TyperCommand):
    """A command that does not choose where two values are given for one option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse what stands twice, and say of a negative number that it is no option."""
        try:
            _, _, order = self.make_parser(ctx).parse_args(list(args))
        except typer.TyperException as error:
            name = getattr(error, "option_name", "")
            if name[1:2].isdigit():
                raise UsageError(f"{name}: a size is at least 1") from error
            program = next((each for each in args if each.endswith(".py")), "")
            takes_own = any(each.metavar == "[ARGS]..." for each in self.params)
            if name and program and takes_own and "--" not in args:
                meant = f"tilefit {ctx.info_name} {program} -- {name}"
                hint = f"The program's own options stand behind --: {meant}"
                raise UsageError(error.format_message(), hint=hint) from error
            raise
        # Of a flag and its opposite the last one counts, as everywhere; of two values neither is meant less.
        options = [each for each in order if not getattr(each, "is_flag", True)]  # arguments have none
        for option, times in Counter(options).items():
            if times > 1 and not option.multiple:
                raise UsageError(f"{option.opts[0]} is given {times} times", hint="It takes one value.")
        return super().parse_args(ctx, args)


class TargetGroup(TyperGroup):
    """What is no verb is a target: ``tilefit bench hf:gpt2``. The group has a verb ``target``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``-m package.train`` is a target."""
        return super().parse_args(ctx, ["target", *args] if args[:1] == ["-m"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A target is checked without the name of a command before it."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["target", *args]
        return super().resolve_command(ctx, args)


class Verbs(typer.Typer):
    """Commands, each a :class:`Command`."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **more: Any
    ) -> Callable[..., Any]:
        """As of Typer."""
        return super().command(name, cls=cls, **more)
