"""Other ways to run a product, and when a copy for them pays."""

from __future__ import annotations

from math import inf

import pytest

from tilefit import gpus
from tilefit.cost import estimate
from tilefit.cost.alternatives import Alternative, alternatives
from tilefit.ops import Gemm

H200 = gpus.get("h200")


def by_name(gemm: Gemm) -> dict[str, Alternative]:
    return {each.what: each for each in alternatives(gemm, H200)}


@pytest.mark.parametrize(
    ("layout", "a", "b"), [("TN", "TT", "NN"), ("NN", "NT", "TN"), ("NT", "NN", "TT"), ("TT", "TN", "NT")]
)
def test_each_operand_can_be_stored_the_other_way(layout: str, a: str, b: str) -> None:
    found = by_name(Gemm(64, 128, 256, layout=layout))
    assert found["A transposed"].gemm == Gemm(64, 128, 256, layout=a)
    assert found["B transposed"].gemm == Gemm(64, 128, 256, layout=b)
    assert [name for name, _ in found["A transposed"].copies] == ["A"]


def test_aligned_products_are_not_padded_and_fp8_has_one_layout() -> None:
    assert len(alternatives(Gemm(64, 128, 256), H200)) == 2
    assert alternatives(Gemm(64, 128, 256, "fp8"), H200) == ()


@pytest.mark.parametrize(
    ("gemm", "wide", "copied"),
    [
        (Gemm(16, 4095, 4096), Gemm(16, 4096, 4096), "B"),
        (Gemm(16, 4096, 4095), Gemm(16, 4096, 4096), "AB"),
        (Gemm(15, 4096, 4096, layout="NT"), Gemm(16, 4096, 4096, layout="NT"), "A"),
        (Gemm(16, 4095, 4094, "tf32"), Gemm(16, 4096, 4096, "tf32"), "AB"),
    ],
)
def test_padding_grows_what_is_contiguous_and_copies_what_grows(gemm: Gemm, wide: Gemm, copied: str) -> None:
    (padded,) = (each for each in alternatives(gemm, H200) if each.what.startswith("padded"))
    assert padded.gemm == wide
    assert "".join(name for name, _ in padded.copies) == copied
    assert padded.saving_s.value == estimate(gemm, H200).time_s - estimate(wide, H200).time_s


def test_a_padded_vocabulary_pays_at_once_and_surely() -> None:
    best = alternatives(Gemm(16384, 50257, 768), H200)[0]
    assert best.what == "padded to n = 50264"
    assert best.saving_s.low > 0
    assert best.uses.low < best.uses.value < best.uses.high < 1


def test_what_may_save_nothing_may_never_pay() -> None:
    transposed = by_name(Gemm(128, 4096, 4096))["B transposed"]
    assert transposed.saving_s.low < 0 < transposed.saving_s.high
    assert transposed.uses.high == inf
    assert transposed.uses.low == pytest.approx(
        sum(time.low_s for _, time in transposed.copies) / transposed.saving_s.high
    )


def test_the_interval_of_a_saving_holds_both_errors() -> None:
    gemm = Gemm(16, 4095, 4096)
    now, padded = estimate(gemm, H200), by_name(gemm)["padded to n = 4096"]
    assert padded.saving_s.value - padded.saving_s.low >= now.time_s - now.low_s
    assert padded.saving_s.high <= now.high_s - padded.estimate.low_s
