"""A step as JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, replace
from typing import Any, cast

from tilefit.errors import TilefitError
from tilefit.ops.attention import Attention
from tilefit.ops.base import Op
from tilefit.ops.entries import Fallback, Parameter, Settings, Shard, Site, StepOp, TensorRef
from tilefit.ops.memory import Memory
from tilefit.ops.program import Assumption, Exchange, Habit, HostEvent, Loader, Ordered, Program
from tilefit.ops.timeline import Block, Timeline

#: Version of the form.
SCHEMA = 1


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
        "settings": asdict(step["settings"]),
        "parameters": {
            name: [p.shape, p.dtype, p.aliases, p.trainable] for name, p in step["parameters"].items()
        },
        "modules": dict(step["modules"]),
        "made": dict(step["made"]),
        "shards": [asdict(shard) for shard in step["shards"]],
        "program": asdict(step["program"]) if step["program"] is not None else None,
    }
    return json.dumps(
        {
            "schema": SCHEMA,
            "operations": [[op.kind, op.values] for op in operations],
            "sites": places,
            "tensors": [[ref.id, ref.shape, ref.dtype, ref.parameter] for ref in tensors],
            "rows": rows,
            **{name: changed.get(name, value) for name, value in step.items() if name != "ops"},
        },
        separators=(",", ":"),
    )


def load(text: str) -> dict[str, Any]:
    """The fields of the step whose text this is.

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
        return {
            "ops": tuple(
                StepOp(
                    operations[op],
                    phase,
                    sites[site],
                    name,
                    tuple(tensors[i] for i in inputs),
                    tuple(tensors[i] for i in outputs),
                    recomputed,
                )
                for op, phase, site, name, inputs, outputs, recomputed in data["rows"]
            ),
            "memory": _memory(**data["memory"]),
            "settings": Settings(**data["settings"]),
            "inputs": tuple(data["inputs"]),
            "batch": data["batch"],
            "parameters": {
                name: Parameter(tuple(shape), dtype, tuple(aliases), trainable)
                for name, (shape, dtype, aliases, trainable) in data["parameters"].items()
            },
            "modules": data["modules"],
            "model": data["model"],
            "notes": tuple(data["notes"]),
            "made": data.get("made", {}),
            "libraries": tuple(data.get("libraries", ())),
            "shards": tuple(Shard(**shard) for shard in data.get("shards", ())),
            "program": _program(**data["program"]) if data.get("program") else None,
        }
    except (KeyError, TypeError, ValueError) as error:
        raise TilefitError(f"not a captured step: {error!r}") from error


def _site(operations: list[Op], module: str, source: str, *call: Any) -> Site:
    if not call:
        return Site(module, source)
    number, op, reason = call
    return Site(module, source, Fallback(number, cast("Attention", operations[op]), reason))


def _memory_data(memory: Memory) -> dict[str, Any]:
    blocks = [[number, *astuple(block)] for number, block in memory.timeline.blocks.items()]
    return {
        **asdict(replace(memory, timeline=Timeline())),
        "timeline": {"blocks": blocks, "events": memory.timeline.events},
    }


def _memory(
    moments: Iterable[Iterable[int]] = (), timeline: Mapping[str, Any] | None = None, **held: int
) -> Memory:
    timeline = timeline or {"blocks": (), "events": ()}
    return Memory(
        **held,
        moments=tuple((stays, grows) for stays, grows in moments),
        timeline=Timeline(
            {number: Block(*block) for number, *block in timeline["blocks"]},
            tuple((number, op) for number, op in timeline["events"]),
        ),
    )


def _program(
    command: str,
    step: str,
    steps: int,
    fake: list[str],
    model: str = "",
    ranks: int = 1,
    per_machine: int = 1,
    network: str = "",
    **parts: list[Any],
) -> Program:
    def at(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "site": Site(**values["site"])}

    return Program(
        command,
        step,
        steps,
        events=tuple(HostEvent(**at(each)) for each in parts["events"]),
        assumptions=tuple(Assumption(**each) for each in parts["assumptions"]),
        loaders=tuple(Loader(**each) for each in parts["loaders"]),
        habits=tuple(Habit(**at(each)) for each in parts["habits"]),
        fake=tuple(fake),
        optimizers=tuple(parts.get("optimizers", ())),
        exchanges=tuple(Exchange(**at(each)) for each in parts.get("exchanges", ())),
        order=tuple(Ordered(**each) for each in parts.get("order", ())),
        model=model,
        ranks=ranks,
        per_machine=per_machine,
        network=network,
        host_work=tuple((name, elements) for name, elements in parts.get("host_work", ())),
    )
