"""How a command shows a report: the options that every such command has, and the showing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from tilefit import formats
from tilefit.cli import output
from tilefit.cli.option_groups import Group
from tilefit.errors import UsageError
from tilefit.formats import FORMATS, Format
from tilefit.options import option, refuse

PANEL = "Output"


@dataclass(frozen=True)
class Destination:
    """Where a document goes, and how much of it.

    Raises:
        UsageError: no format is named, and the file's ending is that of none.
    """

    show_all: bool = option(False, "Every finding with all its arithmetic.", "--all")
    ops: bool = option(False, "The operations too, by time.")
    output_format: Format | None = option(
        None,
        f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}; default: by the ending of the file, else text.",
        metavar="FORMAT",
    )
    price: tuple[str, ...] = option(
        (), "Of a GPU for an hour: says what work costs. NAME=PRICE where GPUs are compared.", metavar="PRICE"
    )
    output_file: Path | None = option(
        None, "Write there instead of to stdout.", metavar="FILE", callback=output.writable
    )

    def __post_init__(self) -> None:
        formats.require_ending(self.output_file, self.output_format, FORMATS)
        ending = self.output_file.suffix.lower() if self.output_file else ""
        chosen = self.output_format or next(name for name in FORMATS if ending in formats.ENDINGS[name])
        if prices(self.price) and chosen not in ("text", "html"):
            refuse(["price"], "text and html say what work costs")

    def show(self, document: object, **options: Any) -> None:
        """Write a document; ``options`` as of :func:`show`."""
        known = {report.gpu for report in getattr(document, "reports", ())}
        for name in prices(self.price).keys() - {"", *known}:
            raise UsageError(
                f"a price of {name}, which is not checked", where="--price", hint=f"It is {', '.join(known)}."
            )
        more = {"show_all": self.show_all, "ops": self.ops, "prices": prices(self.price), **options}
        show(document, self.output_format, self.output_file, **more)


Shown = Annotated[Destination, Group(PANEL)]


def only_whole(formats: str) -> Group:
    """Where a document is always shown whole; ``formats`` says which there are."""
    return Group(PANEL, without=("show_all", "ops", "price"), help={"output_format": formats})


ShownWhole = Annotated[
    Destination, Group(PANEL, without=("ops", "price"), help={"show_all": "The tables as well."})
]


def prices(texts: Iterable[str]) -> dict[str, float]:
    """Prices by GPU; of all others under "".

    Raises:
        UsageError: one is no price.
    """
    found = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        try:
            found[name] = float(price)
        except ValueError:
            found[name] = -1.0
        if not isfinite(found[name]) or found[name] < 0:
            raise UsageError(
                f"cannot read the price {text!r}", where="--price", hint="Write --price 2.5 or h100-sxm=2.5."
            )
    return found


def show(
    document: object, format: str | None, file: Path | None, *, trimmed: bool = True, **options: Any
) -> None:
    """Write a document to a file, or to stdout, there in colour where it is a terminal.

    Args:
        document: A report, or any other document that has renderers.
        format: Its format; None: by the ending of the file, else text.
        file: None for stdout.
        trimmed: On stdout without the blanks that fill its columns, where it is no terminal.
        options: As of :func:`tilefit.formats.render`.

    Raises:
        UsageError: the file's ending asks for a format that there is none of, or it cannot be written.
    """
    formats.require_ending(file, format, formats.formats_of(document))
    format = format or formats.by_ending(document, file.suffix if file else "")
    console = output.stdout()
    if format == "text" and file is None and (console.is_terminal or not trimmed):
        console.print(formats.make(document, width=console.width, **options), crop=False)
        return
    text = formats.render(document, format, width=console.width, **options)
    if file is None:
        print(text, end="")
    else:
        formats.write(file, text)
