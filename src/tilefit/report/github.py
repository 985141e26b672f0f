"""For GitHub Actions: workflow commands, which become annotations of the run and of a pull request's files.

Source: GitHub, "Workflow commands for GitHub Actions", setting a notice, warning or error message. The
escapes are its toolkit's: of ``%`` and line ends in the message, of ``:`` and ``,`` as well in a property.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilefit.formats import renders
from tilefit.report.remarks import Remark, subjects
from tilefit.report.report import Document
from tilefit.rules.finding import ERROR, NOTE, WARNING

_COMMANDS = {ERROR: "error", WARNING: "warning", NOTE: "notice"}
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = _DATA | str.maketrans({":": "%3A", ",": "%2C"})


@renders(Document, "github")
def render(document: Document) -> str:
    """A command per finding, best first; nothing where nothing was found."""
    found = subjects(document)
    return "".join(
        f"{_command(remark, f' on {subject.gpu}' if len(found) > 1 else '')}\n"
        for subject in found
        for remark in subject.remarks
    )


def _command(remark: Remark, on: str) -> str:
    title = f"{remark.code} {remark.price}{on}"
    properties = ",".join(
        f"{name}={value.translate(_PROPERTY)}" for name, value in _properties(remark, title)
    )
    message = "\n".join(filter(None, (remark.module, remark.message, *remark.details)))
    return f"::{_COMMANDS[remark.severity]} {properties}::{message.translate(_DATA)}"


def _properties(remark: Remark, title: str) -> Iterator[tuple[str, str]]:
    if remark.path:
        yield "file", remark.path
        if remark.line is not None:
            yield "line", str(remark.line)
    yield "title", title
