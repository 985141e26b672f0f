"""Which captures a grid takes, what becomes of impossible points, and that nothing is done twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tilefit.cost import estimate_step, fuse
from tilefit.cost.priced import priced
from tilefit.errors import CaptureError, UsageError
from tilefit.measure.store import Store
from tilefit.ops import Step
from tilefit.options import TargetOptions
from tilefit.sweep.axes import read_axes
from tilefit.sweep.kept import Kept
from tilefit.sweep.point import Point
from tilefit.sweep.run import Grid, Predictions

from .conftest import Fake, mlp


def grid(*over: str, gpu: tuple[str, ...] = ("h200",), **options: object) -> Grid:
    return Grid(
        "model",
        TargetOptions(**options),  # type: ignore[arg-type]
        tuple(read_axes(over)),
        tuple(map(priced, gpu)),
    )


def points(fake: Fake, of: Grid, kept: Kept | None = None) -> list[Point]:
    return list(Predictions(of, 1.0, kept, fake))


def test_every_point_is_what_its_own_capture_would_be(fake: Fake) -> None:
    found = points(fake, grid("batch=1..512", "hidden=64,128", "amp=bf16,off", gpu=("h200", "l4")))
    assert len(found) == 10 * 2 * 2 * 2
    assert fake.asked < 40
    for point in found:
        options = TargetOptions(
            batch=int(point.at["batch"]),
            amp="bf16" if point.at["amp"] == "bf16" else "",
            arguments={"hidden": int(point.at["hidden"])},
        )
        step = mlp(options)
        assert point.at["gpu"] == point.gpu
        assert point.time_s == pytest.approx(estimate_step(step, point.gpu).time_s, rel=1e-9)
        assert (point.samples, point.items, point.flop) == (step.batch, step.batch, step.tensor_flop)
        assert point.memory_bytes == step.memory.peak_bytes


def test_the_planned_captures_share_their_children(fake: Fake) -> None:
    points(fake, grid("batch=1..512", "hidden=64,128,256,512"))
    assert len(fake.starts) <= 2


def test_gpus_splits_and_the_compiler_share_their_captures(fake: Fake) -> None:
    found = points(
        fake, grid("batch=2..64:2", "compile=on,off", "data_parallel=1,2", gpu=("h200", "a100-sxm-80gb"))
    )
    assert len(found) == 32 * 2 * 2 * 2
    assert fake.asked == 4
    one = {p.at["compile"]: p for p in found if (p.at["batch"], p.gpu, p.gpus) == (64, "h200", 1)}
    step = mlp(TargetOptions(batch=64))
    assert one["off"].time_s == estimate_step(step, "h200").time_s
    compiled = fuse(replace(step, settings=replace(step.settings, compiled=True)))
    assert one["on"].time_s == estimate_step(compiled, "h200").time_s != one["off"].time_s


def test_impossible_points_are_points_too(fake: Fake) -> None:
    found = points(fake, grid("batch=4,8", "hidden=64,100"))
    assert [(p.at["hidden"], p.error) for p in found] == [
        (64, ""),
        (64, ""),
        (100, "100 features do not divide into 8 heads"),
        (100, "100 features do not divide into 8 heads"),
    ]


def test_a_split_that_does_not_divide_the_batch_is_an_impossible_point(fake: Fake) -> None:
    found = points(fake, grid("batch=2,3", "data_parallel=2"))
    assert [bool(point.error) for point in found] == [False, True]
    assert "a batch of 3 does not split" in found[1].error


def test_a_capture_that_ends_its_process_takes_no_other_with_it() -> None:
    def step_of(options: TargetOptions) -> Step:
        if options.arguments["hidden"] == 128:
            raise CaptureError("the process was ended by SIGKILL")
        return mlp(options)

    fake = Fake(step_of)
    found = points(fake, grid("hidden=64,128,256"))
    assert [point.error for point in found] == ["", "the process was ended by SIGKILL", ""]
    assert len(fake.starts) == 2


def test_what_the_memory_does_not_hold_is_told_and_priced(fake: Fake) -> None:
    by_batch = {p.samples: p for p in points(fake, grid("batch=64..256:64"))}
    assert {batch: point.fits for batch, point in by_batch.items()} == {
        64: True,
        128: True,
        192: False,
        256: False,
    }
    assert by_batch[256].time_s > 0


def test_tokens_are_counted_where_the_sequence_varies(fake: Fake) -> None:
    found = points(fake, grid("seq=128,256", batch=4))
    assert [point.items for point in found] == [512, 1024]


def test_a_size_that_the_target_does_not_depend_on_is_refused() -> None:
    fixed = mlp(TargetOptions())
    found = points(Fake(lambda options: fixed), grid("seq=128,256"))
    assert all("does not depend on seq" in point.error for point in found)


# --- the store -------------------------------------------------------------------------------------


def test_an_interrupted_sweep_goes_on_where_it_stopped(fake: Fake, tmp_path: Path) -> None:
    of = grid("batch=1..64", "hidden=64,128,256")
    with Store(tmp_path / "store.db") as store:
        begun = iter(Predictions(of, 1.0, Kept(store, "model"), fake))
        first = [next(begun) for _ in range(7)]
        begun.close()  # type: ignore[attr-defined]
        before = fake.asked
        kept = Kept(store, "model")
        found = points(fake, of, kept)
        assert kept.found == 7
        assert found[:7] == first
        again = Kept(store, "model")
        asked = fake.asked
        assert sorted(points(fake, of, again), key=str) == sorted(found, key=str)
        assert (again.found, fake.asked) == (21, asked)
        assert asked - before < 20


def test_the_users_interrupt_keeps_what_is_there(tmp_path: Path) -> None:
    def step_of(options: TargetOptions) -> Step:
        if options.arguments["hidden"] == 256:
            raise KeyboardInterrupt
        return mlp(options)

    found: list[Point] = []
    with Store(tmp_path / "store.db") as store:
        predictions = Predictions(
            grid("batch=4,8", "hidden=64,128,256"), 1.0, Kept(store, "m"), Fake(step_of)
        )
        with pytest.raises(KeyboardInterrupt):
            found.extend(iter(predictions))
        kept = Kept(store, "m")
        again = iter(Predictions(grid("batch=4,8", "hidden=64,128,256"), 1.0, kept, Fake(step_of)))
        first = [next(again) for _ in range(4)]
    assert kept.found == 4
    assert [point.at["hidden"] for point in first] == [64, 64, 128, 128]


def test_other_options_gpus_targets_and_texts_are_other_points(fake: Fake, tmp_path: Path) -> None:
    def found(of: Grid, target: str = "model", **more: bool) -> int:
        kept = Kept(store, target, **more)
        points(fake, of, kept)
        return kept.found

    file = tmp_path / "model.py"
    file.write_text("one")
    with Store(tmp_path / "store.db") as store:
        assert found(grid("batch=4,8")) == 0
        assert found(grid("batch=4,8")) == 2
        assert found(grid("batch=4,8"), fresh=True) == 0
        assert found(grid("batch=4,8", amp="bf16")) == 0
        assert found(grid("batch=4,8", gpu=("l4",))) == 0
        assert found(grid("batch=4,8"), "other") == 0
        assert found(grid("batch=4,8"), f"{file}:build") == 0
        assert found(grid("batch=4,8"), f"{file}:build") == 2
        file.write_text("two")
        assert found(grid("batch=4,8"), f"{file}:build") == 0


def test_a_point_is_made_anew_where_a_file_that_the_target_imports_has_changed(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts").mkdir()
    for name, text in {
        "model.py": "import torch\nfrom parts import layers\n",
        "parts/__init__.py": "",
        "parts/layers.py": "from parts.sizes import WIDTH\n",
        "parts/sizes.py": "WIDTH = 64\n",
        "parts/other.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    with Store(tmp_path / "store.db") as store:

        def found(target: str) -> int:
            kept = Kept(store, target)
            points(fake, grid("batch=4,8"), kept)
            return kept.found

        for target in (f"{tmp_path}/model.py:build", "model:build"):
            assert [found(target), found(target)] == [0, 2]
            for changed in ("model.py", "parts/__init__.py", "parts/layers.py", "parts/sizes.py"):
                (tmp_path / changed).write_text((tmp_path / changed).read_text() + "#\n")
                assert [found(target), found(target)] == [0, 2], changed
        (tmp_path / "parts/other.py").write_text("#")
        assert found("model:build") == 2


def test_errors_are_not_kept(fake: Fake, tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        points(fake, grid("hidden=100"), Kept(store, "model"))
        again = Kept(store, "model")
        points(fake, grid("hidden=100"), again)
        assert again.found == 0


def test_usage_errors_are_the_users(fake: Fake) -> None:
    def step_of(options: TargetOptions) -> Step:
        raise UsageError("no such option")

    with pytest.raises(UsageError):
        points(Fake(step_of), grid("batch=4,8"))
