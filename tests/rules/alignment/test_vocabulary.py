"""ALN002: the vocabularies of real tokenizers, found once, with a sound padded size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import StepBuilder, gpt2, llama
from tilefit.cost import estimate_step
from tilefit.gpus import Gpu
from tilefit.ops import Streaming
from tilefit.rules import get, run
from tilefit.rules.base import Context


@pytest.mark.parametrize(
    ("vocabulary", "padded"),
    [(50257, 50304), (50265, 50304), (30522, 30528), (51865, 51904)],
)
def test_a_tied_vocabulary_is_the_one_alignment_finding(vocabulary: int, padded: int, h200: Gpu) -> None:
    found = run(gpt2(vocabulary), h200)
    # Compiling the model saves as much or more, and pads by itself.
    assert "ALN002" in [f.code for f in found[:2]]
    first, *others = [f for f in found if f.code != "NTC001"]
    assert first.code == "ALN002"
    assert first.module == "lm_head"
    assert f"vocab_size={padded}" in first.fix
    assert f"of {vocabulary} " in first.message
    assert first.severity == "warning"
    assert not [f for f in others if f.code.startswith("ALN")]


def test_an_untied_vocabulary(h200: Gpu) -> None:
    (finding,) = run(llama(vocabulary=32001), h200, select=["ALN"])
    assert finding.code == "ALN002"
    assert "vocab_size=32064" in finding.fix


def test_a_head_without_a_table_is_found_by_its_loss(h200: Gpu) -> None:
    b = StepBuilder()
    b.head("classes", 16384, 768, 21841)
    (finding,) = run(b.step(), h200, select=["ALN"])
    assert finding.code == "ALN002"


def test_features_that_are_padded_too_are_named_with_the_vocabulary(h200: Gpu) -> None:
    b = StepBuilder()
    b.head("classes", 16384, 766, 21841)
    (finding,) = run(b.step(), h200, select=["ALN"])
    assert finding.message.startswith("a vocabulary of 21841 and 766 features are no multiple of 8")
    assert "pays together with 766 -> 768" in finding.fix


def test_a_layer_that_reads_a_vocabulary_in_another_type_is_padded_with_it(h200: Gpu) -> None:
    b, wide = StepBuilder(), StepBuilder(dtype="tf32")
    b.linear("reads", 16384, 21841, 768)
    wide.head("scores", 16384, 768, 21841)
    step = replace(b.step(), ops=(*b.step().ops, *wide.step().ops))
    (finding,) = run(step, h200, select=["ALN"])
    assert (finding.code, finding.module) == ("ALN002", "scores")
    assert any(line.startswith("forward TN 16384x768x21841 bf16") for line in finding.arithmetic)


@pytest.mark.parametrize("vocabulary", [50304, 50264, 32008])
def test_a_multiple_of_sixteen_bytes_is_left_alone(vocabulary: int, h200: Gpu, a100: Gpu) -> None:
    for gpu in (h200, a100):
        assert run(gpt2(vocabulary), gpu, select=["ALN"]) == []


def test_the_arithmetic_names_operand_family_and_cost(h200: Gpu) -> None:
    (finding,) = run(gpt2(50257), h200, select=["ALN002"])
    text = "\n".join(finding.arithmetic)
    assert "forward TN 16384x50257x768 bf16: C (n = 50257) not a multiple of 8; sm75" in text
    assert "backward-data NN 16384x768x50257 bf16: A (k = 50257)" in text
    assert "backward-weight NT 50257x768x16384 bf16: A (m = 50257)" in text
    assert "-> sm90" in text
    assert "padding adds <0.1 % to their FLOP" in text
    assert "transformer.wte.weight, lm_head.weight: 47 more rows" in text


def test_the_logits_and_the_loss_grow_with_the_vocabulary(h200: Gpu) -> None:
    step = gpt2(50257)
    context = Context(step, h200, estimate_step(step, h200))
    (proposal,) = get("ALN002").check(context)
    assert proposal.change is not None
    grown = {
        entry.name: entry.op.moved_bytes / step.ops[index].op.moved_bytes
        for index, (entry,) in proposal.change.replace.items()
        if isinstance(entry.op, Streaming)
    }
    for name in ("aten._to_copy", "aten._log_softmax", "aten._log_softmax_backward_data"):
        assert grown[name] == pytest.approx(50304 / 50257)
    # Only the table's rows grow, not the other parameters.
    assert 1 < grown["aten._fused_adamw_"] < 50304 / 50257


def test_the_gain_is_near_the_measured_one(h200: Gpu) -> None:
    """Measured on an H200: 30.7 ms with 50257, 5.6 ms with 50304, three passes over 16384 tokens."""
    (finding,) = run(gpt2(50257), h200, select=["ALN002"])
    assert finding.gain_s == pytest.approx(25.1e-3, rel=0.15)
