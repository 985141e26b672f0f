"""What a check says of real models: the finding that matters is there, and healthy models are left alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tilefit.capture.child import capture_target
from tilefit.options import TargetOptions
from tilefit.report import Report
from tilefit.session import assess

pytest.importorskip("transformers", reason="checks models of transformers")


def report(target: str, **options: Any) -> Report:
    result = assess(capture_target(target, TargetOptions(amp="bf16", **options)), "h200")
    assert isinstance(result, Report)
    return result


def configured(folder: Path, **config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return f"hf:{path}"


@pytest.mark.parametrize(
    ("model_type", "config", "sizes", "vocabulary"),
    [
        ("gpt2", {"vocab_size": 50257}, {"batch": 16, "seq": 1024}, 50257),
        ("roberta", {"vocab_size": 50265}, {"batch": 32}, 50265),
        ("bert", {"vocab_size": 30522}, {"batch": 32}, 30522),
        ("whisper", {"vocab_size": 51865}, {"batch": 32}, 51865),
    ],
)
def test_a_misaligned_vocabulary_is_among_the_first_findings(
    tmp_path: Path, model_type: str, config: dict[str, int], sizes: dict[str, int], vocabulary: int
) -> None:
    findings = report(configured(tmp_path, model_type=model_type, **config), **sizes).findings
    codes = [f.code for f in findings]
    assert "ALN002" in codes[:3]
    finding = findings[codes.index("ALN002")]
    assert str(vocabulary) in finding.message
    named = re.search(r"vocabulary to (\d+)", finding.fix)
    assert named
    padded = int(named[1])
    assert padded % 8 == 0
    assert vocabulary < padded < 1.01 * vocabulary
    assert finding.gain_fraction > 0.04


def test_a_llama_with_odd_sizes_hears_of_its_features_first_and_of_its_vocabulary(tmp_path: Path) -> None:
    target = configured(
        tmp_path,
        model_type="llama",
        hidden_size=2048,
        intermediate_size=5461,
        num_hidden_layers=4,
        num_attention_heads=16,
        vocab_size=32001,
        max_position_embeddings=2048,
    )
    findings = report(target, batch=8, seq=1024).findings
    codes = [f.code for f in findings]
    assert "ALN001" in codes[:2]
    features = findings[codes.index("ALN001")]
    assert "5461" in features.message
    assert features.sites > 1
    assert "ALN002" in codes
    assert "32001" in findings[codes.index("ALN002")].message


def test_gpt2_with_a_padded_vocabulary_has_no_alignment_finding(tmp_path: Path) -> None:
    target = configured(tmp_path, model_type="gpt2", vocab_size=50304)
    codes = [f.code for f in report(target, batch=16, seq=1024).findings]
    assert not [code for code in codes if code.startswith("ALN")]


def test_resnet50_in_channels_last_has_neither_alignment_nor_layout_findings() -> None:
    codes = [f.code for f in report("torchvision:resnet50", batch=128, channels_last=True).findings]
    assert not [code for code in codes if code.startswith(("ALN", "LAY"))]


def test_resnet50_in_nchw_is_told_to_use_channels_last() -> None:
    # Compiling the model, which changes the layout too, comes first.
    found = [f for f in report("torchvision:resnet50", batch=128).findings[:3] if f.code == "LAY001"]
    assert found
    assert "channels_last" in found[0].fix
    assert found[0].gain_fraction > 0.1
