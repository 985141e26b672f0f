"""A group of verbs that also takes a target."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class TargetGroup(TyperGroup):
    """What is no verb is a target: ``tilefit bench hf:gpt2``. The group has a verb ``target``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A target is checked without the name of a command before it."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["target", *args]
        return super().resolve_command(ctx, args)
