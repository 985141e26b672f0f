"""A broken file is refused with its name, the GPU and the field."""

from pathlib import Path

import pytest

from tilefit.errors import TilefitError
from tilefit.gpus import Gpu
from tilefit.gpus.load import DATA, load

GOOD = (DATA / "volta.toml").read_text()
FIRST = r"volta.toml \[titan-v\]"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sms = 80\n", "", f"{FIRST}: lacks sms"),
        ("sms = 80", "sms = 80.0", f"{FIRST}: sms must be a positive integer, not 80.0"),
        ("sms = 80", "sms = true", "sms must be a positive integer, not True"),
        ("sms = 80", "sms = -1", "sms must be a positive integer, not -1"),
        ("boost_clock_hz = 1.455e9", "boost_clock_hz = 0.0", "boost_clock_hz must be a positive number"),
        ('aliases = ["', 'aliases = [1, "', "aliases must be a list of texts"),
        ("sms = 80", "sms = 80\ncolour = 3", f"{FIRST}: unknown field colour"),
        ("{ fp32 = 14.9e12 }", "{ fp31 = 1.0 }", rf"{FIRST} \[datasheet\] \[peak_flop_per_s\]: lacks fp32"),
        ("\nsource = ", "\n# source = ", f"{FIRST}: lacks source"),
        ("\nsource = ", '\nsources.colour = "a guess"\nsource = ', r"\[sources\]: unknown field colour"),
        ("[gpus.titan-v]", "[gpus.titan-v", "volta.toml: not TOML"),
        # What the GPUs of a file share.
        ("[7, 0]", "[7]", r"volta.toml: compute_capability must be \[major, minor\]"),
        ("fp64 = 64", "fp31 = 64", r"volta.toml \[flop_per_clock_per_sm\]: lacks fp64"),
        ("fp64 = 64", "fp64 = 64, fp31 = 1", r"\[flop_per_clock_per_sm\]: unknown field fp31"),
        ('architecture = "volta"', "", "volta.toml: lacks architecture"),
        ("[sources]\n", '[sources]\ncolour = "a guess"\n', r"\[sources\]: unknown field colour"),
        ('architecture = "volta"', 'architecture = "volta"\ncolour = 3', r"\[sources\]: lacks colour"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert GOOD.count(old) >= 1
    path = tmp_path / "volta.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(TilefitError, match=message):
        load(path)


def loaded(kind: str, name: str) -> Gpu:
    (found,) = (gpu for gpu, _ in load(DATA / f"{kind}.toml") if gpu.name == name)
    return found


def test_a_field_is_from_the_gpus_source_unless_another_is_named() -> None:
    gpu = loaded("blackwell-geforce", "rtx-5070")
    assert gpu.sources["sms"] == "TechPowerUp GPU database (GeForce RTX 5070)"
    assert gpu.sources["datasheet"].startswith("NVIDIA GeForce RTX 50 Series specifications")
    assert "RTX Blackwell GPU architecture whitepaper" in gpu.sources["flop_per_clock_per_sm"]


def test_a_gpu_may_have_rates_of_its_own() -> None:
    l40, l40s = loaded("ada", "l40"), loaded("ada", "l40s")
    assert l40.flop_per_clock_per_sm["fp32"] == l40s.flop_per_clock_per_sm["fp32"]
    assert 2 * l40.flop_per_clock_per_sm["bf16"] == l40s.flop_per_clock_per_sm["bf16"]
    assert l40.sources["flop_per_clock_per_sm"].startswith("NVIDIA L40 datasheet")
