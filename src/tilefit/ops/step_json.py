"""A step as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, fields, is_dataclass, replace
from functools import cache
from itertools import repeat
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tilefit.errors import TilefitError
from tilefit.ops.base import Op
from tilefit.ops.entries import Fallback, Site, StepOp, TensorRef
from tilefit.ops.memory import Memory
from tilefit.ops.timeline import Block, Timeline

#: Version of the form.
SCHEMA = 1

_Step = TypeVar("_Step")


def dump(step: Mapping[str, Any]) -> str:
    """The text of a step's fields: operations, sites and tensors are written once and referred to."""
    sites: dict[Site, int] = {}
    operations: dict[Op, int] = {}
    tensors: dict[TensorRef, int] = {}

    def number(table: dict[Any, int], key: Any) -> int:
        return table.setdefault(key, len(table))

    rows = [
        [
            number(operations, entry.op),
            entry.phase,
            number(sites, entry.site),
            entry.name,
            [number(tensors, ref) for ref in entry.inputs],
            [number(tensors, ref) for ref in entry.outputs],
            entry.recomputed,
            entry.replayed,
        ]
        for entry in step["ops"]
    ]
    places = [
        [site.module, site.source]
        if (call := site.fallback) is None
        else [site.module, site.source, call.number, number(operations, call.fused), call.reason]
        for site in sites
    ]
    changed = {
        "memory": _memory_data(step["memory"]),
        "parameters": {name: astuple(parameter) for name, parameter in step["parameters"].items()},
        "ranks": [each.to_json() for each in step["ranks"]],
        "prompt": step["prompt"] and step["prompt"].to_json(),
    }
    return json.dumps(
        {
            "schema": SCHEMA,
            "operations": [[op.kind, op.values] for op in operations],
            "sites": places,
            "tensors": [[ref.id, ref.shape, ref.dtype, ref.parameter, ref.offset] for ref in tensors],
            "rows": rows,
            **{name: changed.get(name, value) for name, value in step.items() if name != "ops"},
        },
        separators=(",", ":"),
        default=lambda value: dict(value) if isinstance(value, Mapping) else asdict(value),
    )


def load(kind: Callable[..., _Step], text: str) -> _Step:
    """The step whose text this is.

    Args:
        kind: The dataclass of steps.
        text: What :func:`dump` made of its fields.

    Raises:
        TilefitError: the text is not such a step, or of another version.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise TilefitError(f"a step of schema {data['schema']}, this version reads {SCHEMA}")
        operations = [Op.of(kind, values) for kind, values in data["operations"]]
        sites = [_site(operations, *values) for values in data["sites"]]
        tensors = [TensorRef(number, tuple(shape), *rest) for number, shape, *rest in data["tensors"]]
        ops = tuple(
            StepOp(
                operations[op],
                phase,
                sites[site],
                name,
                tuple(tensors[i] for i in inputs),
                tuple(tensors[i] for i in outputs),
                *how,
            )
            for op, phase, site, name, inputs, outputs, *how in data["rows"]
        )
        types = types_of(kind)
        told = ((name, value) for name, value in data.items() if name in types and value is not None)
        others = {name: _read(types[name], value) for name, value in told}
        return kind(ops=ops, **others)
    except (KeyError, TypeError, ValueError) as error:
        raise TilefitError(f"not a captured step: {error!r}") from error


def _site(operations: list[Op], module: str, source: str, *call: Any) -> Site:
    if not call:
        return Site(module, source)
    number, op, reason = call
    return Site(module, source, Fallback(number, operations[op], reason))


def _memory_data(memory: Memory) -> dict[str, Any]:
    blocks = [[number, *astuple(block)] for number, block in memory.timeline.blocks.items()]
    return {
        **asdict(replace(memory, timeline=Timeline())),
        "timeline": {"blocks": blocks, "events": memory.timeline.events},
    }


def _timeline(blocks: list[list[Any]], events: list[list[int]]) -> Timeline:
    return Timeline(
        {number: Block(*block) for number, *block in blocks}, tuple((number, op) for number, op in events)
    )


def _read(kind: Any, value: Any) -> Any:
    """A value as a field of this type holds it: of a dataclass the values of its fields, or those by name."""
    if kind is Timeline:
        return _timeline(**value)
    if hasattr(kind, "from_json"):  # the steps of other ranks
        return kind.from_json(value)
    if isinstance(kind, type) and is_dataclass(kind):
        named = value if isinstance(value, dict) else dict(zip(types_of(kind), value, strict=True))
        return kind(**{name: _read(types_of(kind)[name], each) for name, each in named.items()})
    options = get_args(kind)
    if value is None or not options:
        return value
    if get_origin(kind) is tuple:
        kinds = repeat(options[0]) if options[-1] is Ellipsis else options
        return tuple(_read(each, item) for each, item in zip(kinds, value, strict=False))
    if get_origin(kind) is Mapping:
        return {key: _read(options[1], each) for key, each in value.items()}
    return _read(options[0], value)  # of an optional one


@cache
def types_of(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by their names."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
