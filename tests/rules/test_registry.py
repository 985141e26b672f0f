from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tilefit.errors import UsageError
from tilefit.rules import all_rules, get, select


def test_every_rule_has_a_code_a_title_and_a_page() -> None:
    rules = all_rules()
    assert [rule.code for rule in rules] == sorted({rule.code for rule in rules})
    for rule in rules:
        assert len(rule.code) == 6
        assert rule.code[:3].isupper()
        assert rule.title
        page = type(rule).__doc__ or ""
        for part in ("What it sees:", "Arithmetic:", "Example", "Source"):
            assert part in page, f"{rule.code} lacks {part!r}"


def test_the_families_of_this_package_are_there() -> None:
    codes = {rule.code for rule in all_rules()}
    assert {f"ALN00{i}" for i in range(1, 8)} <= codes
    assert {"QNT001", "QNT002", "QNT003", "LAY001", "LAY002", "LAY003", "BAT001", "BAT002"} <= codes


def test_get_takes_either_case_and_names_the_nearest_otherwise() -> None:
    assert get("aln002").code == "ALN002"
    with pytest.raises(UsageError, match="ALN022") as error:
        get("ALN022")
    assert "ALN002" in error.value.hint


def test_select_by_prefix_and_ignore() -> None:
    chosen = [rule.code for rule in select(["ALN", "BAT002"], ["ALN00", "QNT"])]
    assert chosen == ["BAT002"]
    assert select() == all_rules()


def test_a_lone_text_is_one_code() -> None:
    assert select("ALN") == select(["ALN"])
    assert select([], "ALN") == select([], ["ALN"])


def test_select_refuses_a_prefix_that_fits_nothing() -> None:
    with pytest.raises(UsageError):
        select(["XYZ"])
    with pytest.raises(UsageError):
        select([], [""])


def test_rules_import_without_torch() -> None:
    code = "import sys, tilefit.rules as r; r.all_rules(); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
