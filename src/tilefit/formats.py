"""The formats of whatever is shown: who renders what.

A renderer registers itself, by a kind of document and a format; the data that it shows knows nothing of it.
The modules of :mod:`tilefit.report` are found without being listed anywhere; a document of another package is
rendered where it is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from tilefit import console
from tilefit.errors import UsageError

#: The formats of a report. They are named here because the command line starts without the renderers.
Format = Literal["text", "markdown", "concise", "json", "html", "sarif", "github", "junit"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: What the names of files end in, by format; more formats, of other documents, are among them.
ENDINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FORMATS, ()),
    "text": ("", ".txt", ".log"),
    "markdown": (".md",),
    "json": (".json",),
    "html": (".html", ".htm"),
    "sarif": (".sarif",),
    "junit": (".xml",),
    "csv": (".csv",),
    "svg": (".svg",),
    "png": (".png",),
}

_Renderer = TypeVar("_Renderer", bound=Callable[..., object])
_RENDERERS: dict[tuple[type, str], Callable[..., Any]] = {}


def renders(kind: type, format: str) -> Callable[[_Renderer], _Renderer]:
    """A decorator for what shows documents of a kind in a format.

    It is called with the document, and those of :func:`render`'s options that it has as keywords. It returns
    text or a picture's bytes; for ``text`` what rich shows.
    """

    def register(renderer: _Renderer) -> _Renderer:
        _RENDERERS[kind, format] = renderer
        return renderer

    return register


def formats_of(document: object) -> list[str]:
    """The formats that a document can be written in."""
    return [name for name in ENDINGS if _renderer(document, name)]


def by_ending(document: object, ending: str) -> str:
    """The format that the ending of a file asks for, such as ``.md``; ``text`` where it asks for none."""
    return next((name for name in formats_of(document) if ending.lower() in ENDINGS[name]), "text")


def require_ending(file: Path | None, format: str | None, known: Collection[str]) -> None:
    """Check that a file's ending says which of the ``known`` formats it is in, where no ``format`` does.

    Raises:
        UsageError: it does not.
    """
    endings = [ending for name in known for ending in ENDINGS[name]]
    if file and not format and file.suffix.lower() not in endings:
        raise UsageError(
            f"no format has files that end in {file.suffix}",
            where=str(file),
            hint=f"Name it, such as --output-format {next(iter(known))}; or end it in "
            f"{' or '.join(filter(None, endings))}.",
        )


def make(document: object, format: str = "text", **options: Any) -> Any:
    """What the renderer of a document makes of it: see :func:`renders`.

    Raises:
        UsageError: there is no such format.
    """
    renderer = _renderer(document, format)
    if renderer is None:
        known = ", ".join(formats_of(document))
        raise UsageError(f"unknown format {format!r}", hint=f"Use one of: {known}.")
    taken = renderer.__kwdefaults__ or {}
    return renderer(document, **{name: value for name, value in options.items() if name in taken})


def render(
    document: object,
    format: str = "text",
    *,
    show_all: bool = False,
    ops: bool = False,
    limit: int = 0,
    width: int = 80,
    prices: Mapping[str, float] | None = None,
) -> str:
    """A document as text in one of its formats; of a report in one of :data:`FORMATS`.

    Args:
        document: What to write.
        format: Its format.
        show_all: Every finding and total (``text``), of any length (``markdown``); the other formats always
            hold them all.
        ops: The operations too (``text`` and ``markdown``).
        limit: The most operations of a comparison of two reports (``text`` and ``markdown``); 0: all.
        width: Columns of the ``text`` format.
        prices: Of a GPU for an hour, by name; "" stands for all others (``text`` and ``html``).

    Raises:
        UsageError: there is no such format.
    """
    made = make(document, format, show_all=show_all, ops=ops, limit=limit, width=width, prices=prices)
    return made if isinstance(made, str) else console.plain(made, width)


def save(document: object, path: Path, format: str = "") -> None:
    """Write a document to a file, in a format or, without one, in that of the file's ending.

    Raises:
        UsageError: there is no such format, the ending is that of none, or the file cannot be written.
    """
    require_ending(path, format, formats_of(document))
    write(path, render(document, format or by_ending(document, path.suffix)))


def write(path: Path, content: str | bytes) -> None:
    """Write what was made of a document to a file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from error


def _renderer(document: object, format: str) -> Callable[..., Any] | None:
    found = (_RENDERERS.get((kind, format)) for kind in type(document).__mro__)
    return next(filter(None, found), None)
