"""For code scanning: SARIF 2.1.0, with a run for every GPU.

Sources: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0"; GitHub, "SARIF support for
code scanning", which of its properties are read, and which must be there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from tilefit.formats import renders
from tilefit.report.remarks import Remark, Subject, subjects
from tilefit.report.report import Document
from tilefit.rules.finding import ERROR, NOTE, WARNING, RulePage

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
#: What relative paths are relative to, as code scanning calls it.
_ROOT = "%SRCROOT%"
_LEVELS = {ERROR: "error", WARNING: "warning", NOTE: "note"}


@renders(Document, "sarif")
def render(document: Document) -> str:
    """The findings as SARIF, best first."""
    log = {"$schema": SCHEMA, "version": VERSION, "runs": [_run(subject) for subject in subjects(document)]}
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _run(subject: Subject) -> dict[str, Any]:
    # Findings without a page (of an older report) still need a rule that they belong to.
    pages = {remark.code: RulePage(remark.code, remark.code, "") for remark in subject.remarks}
    pages |= {page.code: page for page in subject.rules if page.code in pages}
    codes = sorted(pages)
    driver = {
        "name": "tilefit",
        "semanticVersion": subject.version,
        "rules": [_rule(pages[code]) for code in codes],
    }
    return {
        "tool": {"driver": driver},
        # Code scanning keeps models and GPUs apart by what stands before the last slash.
        "automationDetails": {"id": "/".join(filter(None, ("tilefit", subject.target, subject.gpu))) + "/"},
        "originalUriBaseIds": {
            _ROOT: {"description": {"text": "The folder that tilefit ran in: the root of the repository."}}
        },
        "columnKind": "unicodeCodePoints",
        "results": list(_results(subject, codes)),
    }


def _rule(page: RulePage) -> dict[str, Any]:
    more = f"tilefit rule {page.code} explains this rule."
    text = page.text or more
    return {
        "id": page.code,
        "shortDescription": {"text": page.title},
        "fullDescription": {"text": text.partition("\n\n")[0].replace("\n", " ")},
        "help": {"text": text, "markdown": f"# {page.code}: {page.title}\n\n{text}"},
        "properties": {"tags": ["performance", "gpu", page.code[:3]]},
    }


def _results(subject: Subject, codes: list[str]) -> Iterator[dict[str, Any]]:
    seen: Counter[str] = Counter()
    for remark in subject.remarks:
        # Not the line, the sizes or the gain: an edit elsewhere in the file must not make a new alert.
        identity = "\0".join((remark.code, remark.module, remark.path))
        seen[identity] += 1
        fingerprint = f"{sha256(identity.encode(errors='replace')).hexdigest()[:16]}:{seen[identity]}"
        location: dict[str, Any] = {"physicalLocation": _physical(remark, subject)}
        if remark.module:
            location["logicalLocations"] = [{"fullyQualifiedName": remark.module, "kind": "module"}]
        yield {
            "ruleId": remark.code,
            "ruleIndex": codes.index(remark.code),
            "level": _LEVELS[remark.severity],
            "message": {"text": _message(remark)},
            "locations": [location],
            # The first is what code scanning reads, the second the tool's own.
            "partialFingerprints": {"primaryLocationLineHash": fingerprint, "tilefit/v1": fingerprint},
            "properties": remark.figures,
        }


def _physical(remark: Remark, subject: Subject) -> dict[str, Any]:
    """Where it is; code scanning wants a file and a line of everything, so the whole step is the target's."""
    path = PurePath(remark.path or subject.path)
    artifact = {
        "uri": path.as_uri() if path.is_absolute() else quote(path.as_posix(), errors="surrogateescape")
    }
    if not path.is_absolute() and not set(path.parts[:1]) & set(subject.libraries):
        artifact["uriBaseId"] = _ROOT
    return {"artifactLocation": artifact, "region": {"startLine": remark.line or 1}}


def _message(remark: Remark) -> str:
    """The message as plain text: no placeholder (braces) and no link is meant."""
    lines = "\n".join((remark.message, remark.price, *remark.details))
    return lines.replace("{", "{{").replace("}", "}}").replace("](", "] (")
