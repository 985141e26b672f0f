"""A broken file is refused with its name and the field."""

from pathlib import Path

import pytest

from tilefit.errors import TilefitError
from tilefit.gpus.load import DATA, load

GOOD = (DATA / "h200.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sms = 132\n", "", "h200.toml: lacks sms"),
        ("sms = 132", "sms = 132.0", "sms must be a positive integer, not 132.0"),
        ("sms = 132", "sms = true", "sms must be a positive integer, not True"),
        ("sms = 132", "sms = -1", "sms must be a positive integer, not -1"),
        ("boost_clock_hz = 1.83e9", "boost_clock_hz = 0.0", "boost_clock_hz must be a positive number"),
        ("[9, 0]", "[9]", r"compute_capability must be \[major, minor\]"),
        ('aliases = ["', 'aliases = [1, "', "aliases must be a list of texts"),
        ("sms = 132", "sms = 132\ncolour = 3", r"\[sources\]: lacks colour"),
        ("tf32 = 2048", "fp31 = 2048", r"\[flop_per_clock_per_sm\]: unknown field fp31"),
        ("fp64 = 256\n", "", r"\[flop_per_clock_per_sm\]: lacks fp64"),
        ("[sources]\n", '[sources]\ncolour = "a guess"\n', r"\[sources\]: unknown field colour"),
        ("[datasheet]", "[datasheet", "h200.toml: not TOML"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert GOOD.count(old) >= 1
    path = tmp_path / "h200.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(TilefitError, match=message):
        load(path)
