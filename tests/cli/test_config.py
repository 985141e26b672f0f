"""``[tool.tilefit]``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilefit.cli.config import Config, load
from tilefit.errors import UsageError


def _write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def test_everything_that_can_be_set(tmp_path: Path) -> None:
    folder = _write(
        tmp_path,
        """
        [tool.tilefit]
        gpu = "h200"
        select = ["ALN", "QNT"]
        ignore = ["ALN003"]
        min-gain = 0.02

        [tool.tilefit.per-module-ignores]
        "transformer.h.*" = ["ALN001"]
        "head" = "QNT"
        """,
    )
    assert load(folder) == Config(
        gpu=("h200",),
        select=("ALN", "QNT"),
        ignore=("ALN003",),
        min_gain=0.02,
        per_module_ignores={"transformer.h.*": ("ALN001",), "head": ("QNT",)},
    )


def test_the_nearest_file_upwards_counts(tmp_path: Path) -> None:
    _write(tmp_path, '[tool.tilefit]\ngpu = "far"')
    _write(tmp_path / "a", '[tool.tilefit]\ngpu = "near"')
    inner = tmp_path / "a" / "b" / "c"
    inner.mkdir(parents=True)
    assert load(inner).gpu == ("near",)


def test_a_file_without_our_table_is_an_empty_configuration(tmp_path: Path) -> None:
    assert load(_write(tmp_path, "[tool.other]\nx = 1")) == Config()


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("[tool.tilefit]\nmin_gain = 0.1", "unknown key 'min_gain'", "Did you mean min-gain?"),
        ("[tool.tilefit]\nzzz = 1", "unknown key 'zzz'", "The keys are gpu,"),
        ("[tool.tilefit]\nselect = 3", "select must be a string or a list of strings", ""),
        ("[tool.tilefit]\nselect = [3]", "select must be a string or a list of strings", ""),
        ("[tool.tilefit]\nmin-gain = 20", "min-gain must be a share of the step between 0 and 1", ""),
        ("[tool.tilefit]\nmin-gain = true", "min-gain must be a share", ""),
        ("[tool.tilefit]\nper-module-ignores = 1", "per-module-ignores must be a table", ""),
        ("[tool.tilefit.per-module-ignores]\nx = 1", "per-module-ignores.'x' must be", ""),
        ("tool.tilefit = 1", "tool.tilefit must be a table", ""),
        ("[tool", "cannot be read", ""),
    ],
)
def test_what_is_not_understood_is_an_error_that_names_the_file(
    tmp_path: Path, text: str, what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as error:
        load(_write(tmp_path, text))
    assert what in error.value.what
    assert hint in error.value.hint
    assert "pyproject.toml" in error.value.where
