"""Traces are read event by event, however the blocks fall, and damage is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilefit.errors import TilefitError
from tilefit.profiling import chrome
from tilefit.profiling.chrome import read_events

EVENTS = [
    {"ph": "X", "name": f'k{i} "quoted\\" }},{{ é', "ts": i * 1.5, "args": {"x": [1, -2.5e3]}}
    for i in range(50)
]

_numbers = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def written(path: Path, document: Any, indent: int | None = None) -> Path:
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=False))
    return path


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_blocks_may_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None
) -> None:
    monkeypatch.setattr(chrome, "_BLOCK", block)
    document = {"schemaVersion": 12, "name": "a}]", "traceEvents": EVENTS, "baseTimeNanoseconds": 1234}
    header: dict[str, Any] = {}
    path = written(tmp_path / "t.json", document, indent)
    assert list(read_events(path, header.__setitem__)) == EVENTS
    assert header == {"schemaVersion": 12, "name": "a}]", "baseTimeNanoseconds": 1234}


@given(
    events=st.lists(st.dictionaries(st.text(max_size=4), _values, max_size=4), max_size=8),
    block=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Any, block: int
) -> None:
    monkeypatch.setattr(chrome, "_BLOCK", block)
    assert list(read_events(written(tmp_path / "t.json", {"traceEvents": events}))) == events


def test_a_bare_list_may_lack_its_end(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(EVENTS)[:-1] + ",\n")
    assert list(read_events(path)) == EVENTS


def test_compressed_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert list(read_events(path)) == EVENTS


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps({"traceEvents": EVENTS})[:-300].encode(), "ends in the middle"),
        (json.dumps({"traceEvents": EVENTS})[:-3].encode(), "ends in the middle"),
        (json.dumps({"traceEvents": EVENTS})[:-1].encode(), "cut off"),
        (gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())[:-20], "cut off or damaged"),
        (b'{"traceEvents": [ {"ph": oops} ]}', "not JSON"),
        (b"hello", "not a trace"),
        (b"", "not a trace"),
        (b'{"rows": []}', "not a trace"),
        (b"[1, 2]", "not a trace"),
    ],
)
def test_damage_is_told(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TilefitError, match=says) as caught:
        list(read_events(path))
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TilefitError, match="No such file"):
        list(read_events(tmp_path / "none.json"))
