"""A broken file is refused with its name and the field."""

from pathlib import Path

import pytest

from tilefit.errors import TilefitError
from tilefit.gpus import load as load_module
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
        ('"hopper"', '"hoper"', "multiprocessor must be one of pascal, .*, not 'hoper'"),
        ('multiprocessor = "hopper"\n', "", "h200.toml: lacks multiprocessor"),
        ('aliases = ["', 'aliases = [1, "', "aliases must be a list of texts"),
        ("sms = 132", "sms = 132\ncolour = 3", "unknown field colour"),
        ("tf32 = ", "fp31 = ", r"\[datasheet\] \[peak_flop_per_s\]: unknown field fp31"),
        ("fp32 = 67.0e12, ", "", r"\[peak_flop_per_s\]: lacks fp32"),
        ("\nsource = ", "\n# source = ", "lacks source"),
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[9, 0]", "[9]", r"\[hopper\]: compute_capability must be \[major, minor\]"),
        ("fp64 = 256", "fp31 = 256", r"\[hopper\] \[flop_per_clock_per_sm\]: lacks fp64"),
        ('architecture = "hopper"\n', "", r"\[hopper\]: lacks architecture"),
    ],
)
def test_broken_multiprocessors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    good = load_module._MULTIPROCESSORS.read_text()
    assert good.count(old) >= 1
    path = tmp_path / "multiprocessors.toml"
    path.write_text(good.replace(old, new, 1))
    monkeypatch.setattr(load_module, "_MULTIPROCESSORS", path)
    load_module._multiprocessors.cache_clear()
    try:
        with pytest.raises(TilefitError, match=message):
            load(DATA / "h200.toml")
    finally:
        load_module._multiprocessors.cache_clear()


def test_a_field_is_from_the_gpus_source_unless_another_is_named() -> None:
    gpu, _ = load(DATA / "rtx-5070.toml")
    assert gpu.sources["sms"] == "TechPowerUp GPU database (GeForce RTX 5070)"
    assert gpu.sources["datasheet"].startswith("NVIDIA GeForce RTX 50 Series specifications")
    assert "RTX Blackwell GPU architecture whitepaper" in gpu.sources["flop_per_clock_per_sm"]


def test_a_gpu_may_have_rates_of_its_own() -> None:
    l40, l40s = (load(DATA / f"{name}.toml")[0] for name in ("l40", "l40s"))
    assert l40.flop_per_clock_per_sm["fp32"] == l40s.flop_per_clock_per_sm["fp32"]
    assert 2 * l40.flop_per_clock_per_sm["bf16"] == l40s.flop_per_clock_per_sm["bf16"]
    assert l40.sources["flop_per_clock_per_sm"].startswith("NVIDIA L40 datasheet")
