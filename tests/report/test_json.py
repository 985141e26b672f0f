"""A report as JSON: what is written opens again, and is what the published schema says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import tilefit.report
from tilefit.errors import UsageError
from tilefit.ops import FORWARD
from tilefit.report import FORMATS, Comparison, Document, Report, Watched, load, loads, render
from tilefit.report.report import (
    REPORT_SCHEMA,
    BatchPoint,
    Combination,
    HostWait,
    MeasuredOp,
    MeasuredStep,
    MemoryMoment,
    OpRow,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import report_schema as schema

DATA = Path(__file__).parent / "data"
PUBLISHED = Path(tilefit.report.__file__).parent / "report.schema.json"


@pytest.fixture
def full(report: Report) -> Report:
    """A report with something in every field that may be empty."""
    times = {each.name: 0.5 for each in fields(MeasuredStep) if each.name.endswith("_s")}
    op = MeasuredOp(1e-3, ("sm90_gemm",), True, False, 1e12, 1e9, 0.5)
    measured = MeasuredStep(
        source="a run",
        steps=3,
        overhead=-0.01,  # noise: the steps under the profiler were the faster ones
        kernels=9,
        waits=(HostWait("cudaStreamSynchronize", "item", "", "train.py:3", 1, 1e-3),),
        **times,
    )
    memory = replace(report.step.memory, timeline=(MemoryMoment(0, {"activations": 9}),))
    return replace(
        report,
        step=replace(report.step, memory=memory),
        batch_curve=(BatchPoint(1, 1e-3, 0.9e-3, 1.1e-3, 1000),),
        environment={"torch": "2.13"},
        safe_gain_s=1e-3,
        combinations=(Combination((0, 1), 30e-3),),
        tokens=1024,
        ops=(replace(report.ops[0], tile=(128, 256), waves=1.5, reason="full", measured=op), *report.ops[1:]),
        measured=measured,
        profile="measured somewhere",
    )


@pytest.fixture
def validator() -> Draft202012Validator:
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(published)
    return Draft202012Validator(published)


# ---- what is written opens again ---------------------------------------------------------------


def test_every_document_opens_as_it_was(
    full: Report, healthy: Report, hostile: Report, comparison: Comparison, watched: Watched
) -> None:
    for document in (full, healthy, hostile, comparison, watched):
        assert loads(document.to_json()) == document


def test_it_carries_all_that_a_renderer_needs(full: Report, comparison: Comparison, watched: Watched) -> None:
    for document in (full, comparison, watched):
        again = loads(render(document, "json"))
        for name in FORMATS:
            assert render(again, name, show_all=True, ops=True) == render(
                document, name, show_all=True, ops=True
            )


@pytest.mark.parametrize(
    ("name", "kind"), [("report", Report), ("comparison", Comparison), ("watched", Watched)]
)
def test_what_the_first_version_wrote_still_opens(name: str, kind: type[Document]) -> None:
    document = load(DATA / f"first-{name}.json")
    assert isinstance(document, kind)
    for format in FORMATS:
        assert render(document, format, show_all=True)
    assert loads(document.to_json()) == document


def test_what_the_first_version_wrote_is_read_right(report: Report) -> None:
    old = load(DATA / "first-report.json")
    assert isinstance(old, Report)
    assert old.findings == report.findings
    assert [(op.module, op.phase, op.time_s) for op in old.ops] == [
        (op.module, op.phase, op.time_s) for op in report.ops
    ]
    # The same numbers as today, and defaults for what was not written then.
    assert (old.step.time_s, old.device.sms, old.batch_curve, old.safe_gain_s) == (40e-3, 0, (), None)
    # What the safe findings save together was not priced: the best of them.
    assert old.waste == pytest.approx(0.2)


def test_fields_of_a_later_version_are_left_out_with_a_note(report: Report) -> None:
    data = report.to_dict()
    data["colour"] = "red"
    data["step"]["carbon_kg"] = 1.0
    data["findings"][0]["owner"] = {"name": "x"}
    notes: list[str] = []
    assert loads(json.dumps(data), where="run.json", note=notes.append) == report
    assert len(notes) == 1
    assert notes[0].startswith("run.json: ")
    assert notes[0].endswith("carbon_kg, colour, owner")
    with pytest.warns(UserWarning, match="carbon_kg"):
        loads(json.dumps(data))


def test_a_version_too_new_is_an_error_that_says_so(report: Report) -> None:
    data = {**report.to_dict(), "schema_version": REPORT_SCHEMA + 1}
    with pytest.raises(UsageError, match=f"version {REPORT_SCHEMA + 1} of the format") as error:
        loads(json.dumps(data))
    assert "Upgrade" in error.value.hint


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for name in path[:-1]:
            data = data[name]
        del data[path[-1]]

    return change


def _put(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for name in path[:-1]:
            data = data[name]
        data[path[-1]] = value

    return change


#: What is done to a report, and what is said about it.
BROKEN = {
    "a field is missing": (_without("step", "time_s"), "it lacks step.time_s"),
    "text for a number": (_put("long", "step", "time_s"), "step.time_s is not a number"),
    "a number for text": (_put(1, "findings", 0, "code"), r"findings\[0\].code is not text"),
    "a fraction": (_put(1.5, "batch"), "batch is not a whole number"),
    "truth for a number": (_put(True, "batch"), "batch is not a whole number"),
    "a number for truth": (_put(1, "settings", "training"), "settings.training is not true or false"),
    "no list": (_put({}, "findings"), "findings is not a list"),
    "no object": (_put([], "step"), "step is not an object"),
    "no table": (_put(None, "step", "kinds_s"), "step.kinds_s is not an object"),
    "too short": (_put([1, 2], "ops", 0, "product"), r"ops\[0\].product is not a list of 4"),
    "less than nothing": (_put(-1.0, "step", "time_s"), "step.time_s is not a finite number from 0 on"),
    "null": (_put(None, "model"), "model is not text"),
    "an unknown word": (
        _put("grave", "findings", 0, "severity"),
        "severity is not one of error, warning, note",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_report_is_an_error_that_says_why(
    report: Report, validator: Draft202012Validator, case: str
) -> None:
    change, message = BROKEN[case]
    data = json.loads(report.to_json())
    change(data)
    with pytest.raises(UsageError, match=message):
        loads(json.dumps(data))
    # The schema refuses it too.
    assert not validator.is_valid(data)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400"])
def test_a_number_that_is_none_is_no_number(report: Report, value: str) -> None:
    text = json.dumps(json.loads(report.to_json()) | {"batch": 1})
    with pytest.raises(UsageError, match="is not a finite number"):
        loads(re.sub(r'"gain_s": [^,}]+', f'"gain_s": {value}', text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no schema_version"),
        ("{}", "has no schema_version"),
        ('{"schema_version": "1"}', "has no schema_version"),
        ('{"schema_version": 1, "reports": []}', "its reports"),
        ('{"schema_version": 1, "plan": null}', "it lacks model, inputs"),
    ],
)
def test_other_files_are_told_apart(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        loads(text, where="x.json")
    assert error.value.where == "x.json"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "nope.json")
    binary = tmp_path / "store.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        load(binary)


# ---- the published schema ----------------------------------------------------------------------


def test_the_published_schema_is_that_of_the_dataclasses() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == schema.text() + "\n", (
        "a field has changed: python benchmarks/report_schema.py > src/tilefit/report/report.schema.json"
    )


def test_every_field_is_in_the_schema(
    full: Report, of_stages: Report, comparison: Comparison, watched: Watched
) -> None:
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))["$defs"]

    def walk(value: Any) -> set[str]:
        if isinstance(value, tuple):
            return set().union(*map(walk, value))
        if not is_dataclass(value):
            return set()
        names = [each.name for each in fields(value)]
        assert set(names) <= published[type(value).__name__]["properties"].keys()
        return {type(value).__name__}.union(*(walk(getattr(value, name)) for name in names))

    shown = walk(full) | walk(of_stages) | walk(comparison) | walk(watched)
    assert shown == published.keys()


def test_every_field_that_was_added_may_be_absent() -> None:
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))["$defs"]
    report, watched = (
        json.loads((DATA / f"first-{name}.json").read_text(encoding="utf-8"))
        for name in ("report", "watched")
    )
    first = {
        "Report": report,
        "StepSummary": report["step"],
        "Device": report["device"],
        "Finding": report["findings"][0],
        "OpRow": report["ops"][0],
        "Watched": watched,
        "Alarm": watched["findings"][0],
    }
    for name, written in first.items():
        assert set(published[name]["required"]) <= written.keys()


def test_what_is_written_is_valid(
    validator: Draft202012Validator,
    full: Report,
    healthy: Report,
    hostile: Report,
    comparison: Comparison,
    watched: Watched,
) -> None:
    for document in (full, healthy, hostile, comparison, watched):
        validator.validate(json.loads(document.to_json()))


@pytest.mark.parametrize("name", ["report", "comparison", "watched"])
def test_what_the_first_version_wrote_is_valid(validator: Draft202012Validator, name: str) -> None:
    validator.validate(json.loads((DATA / f"first-{name}.json").read_text(encoding="utf-8")))


def test_the_schema_explains_itself() -> None:
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert published["$id"] == f"urn:tilefit:report:{REPORT_SCHEMA}"
    step = published["$defs"]["StepSummary"]["properties"]
    told = {"type": "number", "minimum": 0, "description": "Time in which the GPU works."}
    assert step["gpu_time_s"] == told
    assert step["largest_batch"]["anyOf"] == [{"type": "integer", "minimum": 0}, {"type": "null"}]
    assert published["$defs"]["Finding"]["properties"]["gain_low_s"]["type"] == "number"
    assert "minimum" not in published["$defs"]["Finding"]["properties"]["gain_low_s"]
    assert all(entry["description"] for entry in published["$defs"].values())


def test_operations_have_their_phase(report: Report) -> None:
    (first, *_) = loads(report.to_json()).reports[0].ops
    assert isinstance(first, OpRow)
    assert (first.phase, first.product) == (FORWARD, (16384, 3072, 768, 1))
