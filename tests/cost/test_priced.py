"""Which calibration estimates rest on: a named file, the user's own, the one that ships."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from small_calibration import CONSTANTS, made
from tilefit import gpus
from tilefit.cost import estimate, estimate_step
from tilefit.cost.analytic import analytic
from tilefit.cost.calibration import Calibration, read, write
from tilefit.cost.estimate import ESTIMATED
from tilefit.cost.explain import explain
from tilefit.cost.priced import PricedGpu, keep, left_out, priced, resolve, shipped, user_path, with_libraries
from tilefit.errors import TilefitError, UsageError
from tilefit.ops import FORWARD, Attention, Conv2d, Gemm, Site, Step, StepOp, Streaming

A100, H200 = gpus.get("a100"), gpus.get("h200")
PRODUCT = Gemm(4096, 4096, 4096)


@pytest.fixture(autouse=True)
def _data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shared.npz"
    write(made(A100), path)
    return path


def test_a_named_file_is_used_by_the_gpu_that_it_was_given_to(file: Path) -> None:
    before = estimate(PRODUCT, A100)
    device = priced(A100, file)
    own = estimate(PRODUCT, device)
    assert device.calibration_title == "calibrated on 2026-01-02"
    assert own.time_s == pytest.approx(3 * analytic(PRODUCT, A100, CONSTANTS).time_s, rel=1e-2)
    assert own.provenance == ESTIMATED
    assert own.low_s < own.time_s < own.high_s
    assert estimate(PRODUCT, A100) == before
    assert priced(device) is device


def test_what_the_networks_do_not_cover_has_the_fitted_constants(file: Path) -> None:
    other = replace(PRODUCT, dtype="fp16")
    device = priced("a100", file)
    assert estimate(other, device) == analytic(other, A100, CONSTANTS)
    assert explain(other, device).estimate == analytic(other, A100, CONSTANTS)
    assert estimate(other, A100) != analytic(other, A100, CONSTANTS)


def test_of_several_gpus_each_has_its_own(file: Path) -> None:
    a100, h200 = resolve(["a100", H200, "A100"], file)
    assert a100.calibration_title == "calibrated on 2026-01-02"
    assert h200 == priced("h200")
    for nothing in (None, []):
        (of_the_file,) = resolve(nothing, file)
        assert (of_the_file.name, of_the_file.calibration_title) == (a100.name, a100.calibration_title)


def test_a_gpu_is_equal_to_one_that_is_priced_alike(file: Path) -> None:
    assert priced("h200") == priced(replace(H200, sources={}))
    assert len({priced("h200"), priced("NVIDIA H200"), priced(H200)}) == 1
    assert priced(A100) != priced(A100, file)
    assert priced(replace(H200, sms=100)) != priced(H200)
    assert isinstance(priced(H200), PricedGpu)


def test_a_calibration_of_another_gpu_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="calibration is of the GPU a100-sxm-80gb, not of h200"):
        resolve("h200", file)
    with pytest.raises(UsageError, match="calibration is of the GPU"):
        priced(H200, file)
    with pytest.raises(UsageError, match="named by a text, not by int 7"):
        resolve([7])  # type: ignore[list-item]


def test_the_user_s_own_is_found_by_itself() -> None:
    before = estimate(PRODUCT, A100)
    write(made(A100), user_path(A100.name))
    assert estimate(PRODUCT, A100).time_s > 2 * before.time_s
    write(made(A100, factor=6.0), user_path(A100.name))  # calibrated again
    assert estimate(PRODUCT, A100).time_s > 4 * before.time_s


def test_launches_take_what_they_take_on_that_host(file: Path) -> None:
    step = Step((StepOp(Gemm(16, 16, 16, "fp16"), FORWARD, Site("net", "model.py:1")),) * 50)
    before = estimate_step(step, A100)
    assert estimate_step(step, priced(A100, file)).host_time_s == pytest.approx(2 * before.host_time_s)


@pytest.mark.parametrize(("shipped_error", "own_wins"), [(0.2, True), (0.05, False)])
def test_of_the_shipped_and_the_own_the_better_is_used(shipped_error: float, own_wins: bool) -> None:
    before = estimate(PRODUCT, H200)
    attention = Attention(8, 16, 1024, 64)
    same = estimate(attention, H200)
    errors = {"datasheet": 0.2, "calibrated": 0.1, "shipped": shipped_error}
    write(made(H200, errors=errors), user_path("h200"))
    assert (estimate(PRODUCT, H200).time_s > 2 * before.time_s) == own_wins
    assert estimate(attention, H200).time_s == same.time_s  # a kind that the own does not know
    assert ("gemm calibrated on 2026-01-02; " in priced(H200).calibration_title) == own_wins
    assert "tilefit's authors" in priced(H200).calibration_title


def test_a_named_file_is_used_even_where_the_shipped_one_is_better(tmp_path: Path) -> None:
    before = estimate(PRODUCT, H200)
    write(made(H200, errors={"calibrated": 0.1, "shipped": 0.05}), tmp_path / "mine.npz")
    assert estimate(PRODUCT, priced(H200, tmp_path / "mine.npz")).time_s > 2 * before.time_s


# --- files that are no good --------------------------------------------------------------------------


@pytest.fixture
def own() -> Path:
    path = user_path(A100.name)
    write(made(A100), path)
    return path


def refused() -> str:
    with pytest.raises(TilefitError) as error:
        estimate(PRODUCT, A100)
    return str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_cut_calibration_is_reported_once_and_set_aside(own: Path, share: float) -> None:
    damaged = own.read_bytes()[: int(share * own.stat().st_size)]
    own.write_bytes(damaged)
    message = refused()
    assert str(own) in message
    assert "tilefit calibrate" in message
    assert estimate(PRODUCT, A100).provenance == "estimated"  # as if nothing was there
    (aside,) = own.parent.iterdir()
    assert aside.name in message
    assert aside.read_bytes() == damaged


def test_a_calibration_of_another_version_is_reported_and_set_aside(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilefit.cost.calibration.fingerprint", lambda *of: -1)
    assert "another version of tilefit" in refused()
    assert not own.exists()


def test_a_calibration_with_constants_of_another_version_is_set_aside(own: Path) -> None:
    with np.load(own) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    about = json.loads(str(kept["about"]))
    about["constants"]["split_clocks"] = about["constants"].pop("split_s")
    np.savez(own, **kept | {"about": np.array(json.dumps(about))})
    assert "another version of tilefit" in refused()
    assert not own.exists()


def test_a_calibration_of_another_gpu_is_not_used(own: Path) -> None:
    write(made(H200), own)
    assert "GPU h200" in refused()


def test_a_calibration_that_cannot_be_read_stays(own: Path) -> None:
    own.unlink()
    own.mkdir()
    assert "cannot be read" in refused()
    assert own.is_dir()


def test_a_named_file_that_is_damaged_stays_where_it_is(file: Path) -> None:
    file.write_bytes(b"PK not really")
    with pytest.raises(TilefitError, match="cannot be read"):
        resolve(A100, file)
    assert file.read_bytes() == b"PK not really"


def test_whatever_byte_is_wrong_nothing_but_a_clear_error_comes_out(file: Path) -> None:
    whole, random = file.read_bytes(), Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(random.choice([1, 8])):
            damaged[random.randrange(len(whole))] = random.randrange(256)
        file.write_bytes(damaged)
        with suppress(TilefitError):  # any other exception fails
            read(file)


def test_an_about_that_makes_no_sense_is_damage(file: Path) -> None:
    with np.load(file) as arrays:
        rest = {key: arrays[key] for key in arrays.files if key != "about"}
        about = json.loads(str(arrays["about"]))
    for wrong in ([], {}, {"gpu": "h200"}, about | {"constants": {"speed": 1}}, about | {"networks": [1]}):
        np.savez(file, about=np.array(json.dumps(wrong)), **rest)
        with pytest.raises(TilefitError, match="cannot be read"):
            read(file)


def test_before_writing_only_what_is_damaged_is_moved(tmp_path: Path, file: Path) -> None:
    assert keep(tmp_path / "none.npz") is None
    assert keep(file) is None
    assert file.exists()
    file.write_bytes(b"precious")
    aside = keep(file)
    assert aside is not None
    assert aside.read_bytes() == b"precious"
    assert not file.exists()


def test_a_calibration_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(TilefitError, match="cannot be written"):
        write(made(A100), tmp_path / "folder.npz")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("folder")] == ["folder.npz"]


def test_what_ships_is_what_is_used_without_any_other() -> None:
    assert priced(H200).calibration is shipped("h200") is not None


def test_a_gpu_nobody_measured_takes_what_another_took() -> None:
    h100, a100 = left_out(gpus.get("h100")), priced(A100)
    assert h100.donor == a100.donor == left_out(H200)
    assert h100.calibration_title.startswith("the NVIDIA H200")
    stream = Streaming("pointwise", 1 << 30, 1 << 31, 1 << 31, function="gelu", dtype="bf16")
    assert [estimate(PRODUCT, gpu).provenance for gpu in (h100, a100)] == ["transferred", "estimated"]
    assert [estimate(stream, gpu).provenance for gpu in (h100, a100)] == ["transferred", "transferred"]
    # What the memory limits takes as much longer as the memory is slower.
    slower = H200.memory_bandwidth_bytes_per_s / h100.memory_bandwidth_bytes_per_s
    ratio = estimate(stream, h100).time_s / estimate(stream, H200).time_s
    assert 1.1 < ratio < 1.02 * slower


def test_a_calibration_that_ships_on_top_of_a_donors(tmp_path: Path) -> None:
    h100 = priced("h100")
    assert h100.donor is None
    assert h100.before == left_out(h100)
    assert h100.calibration_title == "measured by tilefit's authors, 2026-11-26"
    assert h100.common_spread == 0.0
    assert h100.launch_scale == 1.0
    stream, heads = (
        Streaming("pointwise", 1 << 28, 1 << 29, 1 << 29, function="mul"),
        Attention(8, 16, 1024, 64),
    )
    assert estimate(heads, h100) == estimate(heads, left_out(h100))  # of which it says nothing itself
    told = [estimate(op, h100).provenance for op in (stream, PRODUCT, heads)]
    assert told == ["estimated", "estimated", "transferred"]
    for op in (stream, PRODUCT):
        assert 0.7 < estimate(op, h100).time_s / estimate(op, left_out(h100)).time_s < 1.4
    assert priced("h100-pcie").donor == left_out(H200)
    slow = replace(gpus.get("h100"), memory_bandwidth_bytes_per_s=1e12)  # its facts count at every stage
    stream = Streaming("pointwise", 1 << 30, 1 << 31, 1 << 31, function="gelu", dtype="bf16")
    assert estimate(stream, slow).time_s > 2.5 * estimate(stream, h100).time_s

    # What was measured of this machine comes on top: nothing is corrected twice.
    quick = tmp_path / "quick.npz"
    about = {"gpu": h100.name, "networks": {}, "date": "2026-11-23", "launch_scale": 2.0}
    write(Calibration({}, about | {"quick": {"memory": 1.0, "clock": 1.0}}), quick)
    own = priced("h100", quick)
    assert own.donor == h100
    for op in (PRODUCT, heads):
        assert own.covers(op)
        assert estimate(op, own).time_s == pytest.approx(estimate(op, h100).time_s, rel=1e-6)


def test_what_ships_for_the_donor_corrects_it_and_others_rest_on_it_alone(tmp_path: Path) -> None:
    h200, donor = priced(H200), left_out(H200)
    assert h200.donor is donor.donor is None
    assert h200.before == donor == priced("h100").before.donor
    assert h200.calibration_title == "measured by tilefit's authors, 2026-11-27"
    heads, layer = Attention(8, 16, 1024, 64), Gemm(513, 1021, 777, "bf16")
    assert estimate(heads, h200) == estimate(heads, donor)  # of which it says nothing itself
    corrected, before = (estimate(layer, each) for each in (h200, donor))
    assert corrected.provenance == before.provenance == ESTIMATED
    assert (corrected.kernel_family, corrected.tile) == (before.kernel_family, before.tile)
    assert 0.7 < corrected.time_s / before.time_s < 1.4
    assert corrected.time_s != before.time_s

    # A quick calibration of a GPU that has none corrects what is carried over from the donor.
    quick = tmp_path / "quick.npz"
    about = {"gpu": A100.name, "networks": {}, "date": "2026-11-23", "launch_scale": 1.0}
    write(Calibration({}, about | {"quick": {"memory": 1.0, "clock": 1.0}}), quick)
    own = priced(A100, quick)
    assert own.donor == donor
    stream = Streaming("pointwise", 1 << 30, 1 << 31, 1 << 31, function="gelu", dtype="bf16")
    assert estimate(stream, own).time_s == pytest.approx(estimate(stream, A100).time_s, rel=1e-6)


def test_old_libraries_run_misaligned_sizes_without_tensor_cores() -> None:
    v100 = priced("v100")
    old = with_libraries(v100, "cublas=10.2,cudnn=7.6.2")
    odd, even = Gemm(4096, 4095, 4096, "fp16"), Gemm(4096, 4096, 4096, "fp16")
    assert estimate(even, old) == estimate(even, v100)
    assert estimate(odd, old).kernel_family == "simt"
    assert estimate(odd, old).time_s > 2 * estimate(odd, v100).time_s
    layer = Conv2d(64, 63, 64, 28, 3, padding=1, dtype="fp16", channels_last=True)
    assert estimate(layer, old).kernel_family == "simt"
    assert estimate(layer, old).time_s > 2 * estimate(layer, v100).time_s
    assert estimate(replace(layer, in_channels=64), old) == estimate(replace(layer, in_channels=64), v100)
    assert with_libraries(v100, "cublas=11.0,cudnn=7.6.3") is v100


def test_before_cudnn_8_5_wide_groups_in_nhwc_run_one_by_one() -> None:
    gpu = priced("rtx-3090")
    old = with_libraries(gpu, "cudnn=8.3.2")
    layer = Conv2d(64, 240, 240, 28, 3, padding=1, groups=2, dtype="fp16", channels_last=True)
    gradient = replace(layer, direction="backward-weight")
    assert 2 < estimate(layer, old).time_s / estimate(layer, gpu).time_s < 3
    assert estimate(gradient, old).time_s > 4 * estimate(gradient, gpu).time_s
    for other in (replace(layer, channels_last=False), replace(layer, groups=1), replace(layer, groups=40)):
        assert estimate(other, old) == estimate(other, gpu)
    assert with_libraries(gpu, "cudnn=8.9") is gpu


@pytest.mark.parametrize("wrong", ["cublas", "cublas=ten", "nccl=2.1", "cublas="])
def test_versions_that_make_no_sense_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="no version of cublas or cudnn"):
        with_libraries(priced("v100"), wrong)


@pytest.mark.parametrize(
    ("gpu", "versions", "first"),
    [
        (A100, "cublas=10.2", "11"),
        ("v100", "cublas=8.0", "9"),
        ("h100", "cudnn=8.3", "8.6"),
        ("rtx-5090", "cublas=12.6", "12.8"),
        ("h200", "cublas=11.7", "11.11"),
        ("b200", "cudnn=9.6", "9.7"),
    ],
)
def test_libraries_older_than_the_gpu_are_refused(gpu: str, versions: str, first: str) -> None:
    name = versions.partition("=")[0]
    with pytest.raises(UsageError, match=f"{name} .* does not run on the NVIDIA") as error:
        with_libraries(priced(gpu), versions)
    assert error.value.hint == f"The first that does is {first}."
    assert with_libraries(priced(gpu), f"{name}={first}").name == priced(gpu).name


@pytest.mark.parametrize(
    ("gpu", "versions"),
    [("t4", "cublas=9.2,cudnn=7.2.1"), ("rtx-3090", "cublas=11.0"), ("rtx-4090", "cudnn=8.5")],
)
def test_code_for_a_compute_capability_runs_on_its_later_minor_ones(gpu: str, versions: str) -> None:
    assert with_libraries(priced(gpu), versions).name == priced(gpu).name


def test_any_library_runs_on_the_oldest_gpus() -> None:
    assert with_libraries(priced("p100"), "cublas=9.0,cudnn=7.0").lacks
