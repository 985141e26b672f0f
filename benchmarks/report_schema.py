"""The JSON Schema of a report, made from the dataclasses that it describes.

    $ python benchmarks/report_schema.py > src/tilefit/report/report.schema.json

writes the published file again after a field was added.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from tilefit.ops.step_json import types_of
from tilefit.report.json_reader import WORDS, is_signed, required
from tilefit.report.report import REPORT_SCHEMA, Comparison, Report
from tilefit.report.watched import Watched

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
#: ``name, other: text`` of a docstring's list of attributes; what follows is indented further.
_ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def schema() -> dict[str, Any]:
    """The schema of what ``to_json`` writes."""
    definitions: dict[str, Any] = {}
    documents = [_describe(kind, definitions) for kind in (Report, Comparison, Watched)]
    for kind in (Report, Comparison, Watched):
        entry = definitions[kind.__name__]
        entry["properties"] = {"schema_version": {"const": REPORT_SCHEMA}, **entry["properties"]}
        entry["required"] = ["schema_version", *entry["required"]]
    watched = definitions[Watched.__name__]
    watched["properties"]["kind"] = {"const": "watched"}
    watched["required"].append("kind")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:tilefit:report:{REPORT_SCHEMA}",
        "title": f"Report of tilefit, version {REPORT_SCHEMA}",
        "description": "What a step costs on one GPU or several, or what was found in a run that was "
        "watched. Times are in seconds, sizes in bytes. Fields may be added within a version.",
        "anyOf": documents,
        "$defs": dict(sorted(definitions.items())),
    }


def text() -> str:
    """The schema as its file holds it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False)


def _describe(kind: Any, definitions: dict[str, Any], name: str = "") -> dict[str, Any]:
    """The schema of a type, in a field of a name; dataclasses are defined once and referred to."""
    if isinstance(kind, type) and is_dataclass(kind):
        _define(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if kind in _SCALARS:
        has_least = kind in (int, float) and not is_signed(name)
        return {"type": _SCALARS[kind], **({"minimum": 0} if has_least else {})}
    options = get_args(kind)
    if get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _describe(options[1], definitions, name)}
    if get_origin(kind) is tuple and options[-1] is Ellipsis:
        return {"type": "array", "items": _describe(options[0], definitions, name)}
    if get_origin(kind) is tuple:
        items = [_describe(option, definitions, name) for option in options]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    present = [_describe(option, definitions, name) for option in options if option is not NoneType]
    return {"anyOf": [*present, {"type": "null"}]}


def _define(kind: type, definitions: dict[str, Any]) -> None:
    if kind.__name__ in definitions:
        return
    document = inspect.getdoc(kind) or ""
    entry: dict[str, Any] = {"type": "object", "description": _plain(document.partition("\n\n")[0])}
    definitions[kind.__name__] = entry
    said = {name: _plain(what) for names, what in _ATTRIBUTE.findall(document) for name in names.split(", ")}
    entry["properties"] = {
        name: _describe(each, definitions, name)
        | ({"enum": list(WORDS[kind, name])} if (kind, name) in WORDS else {})
        | ({"description": said[name]} if name in said else {})
        for name, each in types_of(kind).items()
    }
    entry["required"] = required(kind)


def _plain(docstring: str) -> str:
    return " ".join(_ROLE.sub(r"\1", docstring).replace("``", "`").split())


if __name__ == "__main__":
    print(text())
