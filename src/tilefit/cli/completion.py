"""What the shell completes: names of GPUs and codes of rules; options that take them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tilefit.cli.rules import every_rule


def gpu_names(incomplete: str) -> list[str]:
    """The GPUs whose name begins so."""
    from tilefit import gpus

    return [name for name in gpus.names() if name.startswith(incomplete)]


def rule_codes(incomplete: str) -> list[str]:
    """The rules whose code begins so."""
    codes = [rule.code for rule in every_rule()]
    return [code for code in (*codes, *map(str.lower, codes)) if incomplete and code.startswith(incomplete)]


def gpu_option(help: str) -> Any:
    """An option that names a GPU."""
    return typer.Option(metavar="NAME", help=help, autocompletion=gpu_names)


GpuName = Annotated[str | None, gpu_option("GPU; default: the one in this machine.")]
