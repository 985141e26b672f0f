"""The small verbs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tilefit import gpus
from tilefit.cli.doctor import OPTIONAL
from tilefit.precision.rules import all_rules as precision_rules
from tilefit.rules import all_rules


def test_rules_lists_every_rule(tilefit) -> None:
    lines = tilefit("rules").out.splitlines()
    assert [line.split()[0] for line in lines] == [rule.code for rule in (*all_rules(), *precision_rules())]


def test_a_rule_s_page_is_its_documentation(tilefit) -> None:
    ran = tilefit("rule", "aln002")
    assert ran.code == 0
    assert ran.out.startswith("# ALN002: ")
    assert "50257" in ran.out


def test_gpu_lists_every_gpu(tilefit) -> None:
    out = tilefit("gpu").out
    assert all(f"\n{name} " in out for name in gpus.names())
    assert max(map(len, out.splitlines())) <= 80


def test_a_gpu_s_facts_come_with_their_sources(tilefit) -> None:
    out = tilefit("gpu", "h200").out
    assert "989 TFLOP/s" in out
    assert "141 GiB" in out
    assert "datasheet" in out
    assert "whitepaper" in out


def test_gemm_explains_a_misaligned_product(tilefit) -> None:
    out = tilefit("gemm", "16384", "50257", "768", "--gpu", "h200").out
    assert "gemm 16384x50257x768 TN bf16" in out
    assert "no sm90 kernel can do that" in " ".join(out.split())
    assert "n = 50304" in out


def test_gemm_has_nothing_to_say_against_a_good_product(tilefit) -> None:
    assert (
        "No larger size nearby takes less time."
        in tilefit("gemm", "8192", "8192", "8192", "--gpu", "h200").out
    )


@pytest.mark.parametrize("layout", ["TN", "NN", "NT", "TT"])
def test_gemm_takes_every_layout(tilefit, layout: str) -> None:
    out = tilefit("gemm", "512", "512", "512", "--layout", layout, "--batch", "8", "--gpu", "h200").out
    assert f"8 of 512x512x512 {layout}" in out


def test_doctor_says_what_is_there_and_what_more_would_give(tilefit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONAL, "no-such-package", "magic")
    out = tilefit("doctor").out
    assert "torch" in out
    assert "Python" in out
    assert "not installed; would give magic" in out


def test_doctor_names_the_gpus_and_how_to_check_for_them(tilefit, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA L4", "Unheard-of 9000"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda index: SimpleNamespace(name=names[index], total_memory=22 * 2**30),
    )
    out = tilefit("doctor").out
    assert "NVIDIA L4: --gpu l4" in out
    assert "Unheard-of 9000: its facts are not known" in out
