"""A padded head: loss, generation and checkpoints of a language model stay as they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilefit
from fixing import fixed
from tilefit.capture.torchvision_import import tolerated
from tilefit.fixes.changes.behaviour import behaves
from tilefit.fixes.kinds.padding.layers import Fitted

pytest.importorskip("transformers", reason="checks language models of transformers")
with tolerated():
    from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

TOKENS = torch.zeros(8, 512, dtype=torch.int64, device="meta")


def gpt2(vocabulary: int = 101) -> nn.Module:
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=512, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def padded(model: nn.Module, inputs: Any = None) -> nn.Module:
    plan = fixed(model, inputs or {"input_ids": TOKENS, "labels": TOKENS}, select=["pad-vocabulary"])
    assert any(behaves(module, Fitted) for module in plan.model.modules())
    return plan.model


def test_nothing_a_user_sees_has_changed() -> None:
    model = gpt2()
    changed = padded(model)
    assert changed.config.vocab_size == 101
    assert changed.lm_head.weight is changed.transformer.wte.weight
    assert changed.lm_head.weight.shape == (101, 32)
    assert changed(torch.zeros(1, 4, dtype=torch.int64)).logits.shape == (1, 4, 101)


def test_generation_gives_the_same_tokens() -> None:
    model = gpt2().eval()
    changed = padded(model).eval()
    prompt = torch.tensor([[5, 7, 11]])
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0}, {"num_beams": 3}):
        torch.manual_seed(1)
        a = model.generate(prompt, max_new_tokens=8, **options)
        torch.manual_seed(1)
        b = changed.generate(prompt, max_new_tokens=8, **options)
        assert torch.equal(a, b)


def test_a_checkpoint_opens_in_unmodified_code_and_back(tmp_path: Path) -> None:
    model = gpt2()
    changed = padded(model)
    with torch.no_grad():
        changed.transformer.wte.weight.mul_(2.0)
    changed.save_pretrained(tmp_path)
    opened = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert opened.config.vocab_size == 101
    ids = torch.tensor([[1, 2, 3]])
    # A product of 101 columns and one of 104 may add in another order on some CPUs.
    torch.testing.assert_close(opened.eval()(ids).logits, changed.eval()(ids).logits)
    assert torch.equal(opened.transformer.wte.weight, changed.state_dict()["transformer.wte.weight"])
    padded(opened).load_state_dict(changed.state_dict(), strict=True)


def test_a_hundred_steps_follow_the_original() -> None:
    """With dropout, weight decay and clipped gradients, in fp64."""
    model = gpt2()
    losses = {}
    for name, each in (("original", model), ("padded", padded(model))):
        torch.manual_seed(0)
        each = copy.deepcopy(each).double()
        each.loss_function = _loss_in_double
        optimizer = torch.optim.AdamW(each.parameters(), lr=3e-3, weight_decay=0.1)
        losses[name] = []
        for _ in range(100):
            ids = torch.randint(0, 101, (2, 12))
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    assert losses["original"][0] != losses["original"][-1]
    assert losses["padded"] == pytest.approx(losses["original"], rel=1e-9)


def test_in_bf16_the_difference_is_below_that_of_two_seeds() -> None:
    model = gpt2()
    changed = padded(model)

    def losses(each: nn.Module, seed: int) -> torch.Tensor:
        each = copy.deepcopy(each)
        optimizer = torch.optim.AdamW(each.parameters(), lr=3e-3)
        torch.manual_seed(seed)
        found = []
        for number in range(100):
            ids = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(number))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = each(input_ids=ids, labels=ids).loss  # dropout differs from seed to seed
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found)

    first, second, padded_first = losses(model, 1), losses(model, 2), losses(changed, 1)
    assert (padded_first - first).abs().mean() < 0.5 * (second - first).abs().mean()


def _loss_in_double(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """The model's own loss casts to fp32, whose rounding would hide what is compared."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_an_untied_head_with_a_bias() -> None:
    config = RobertaConfig(
        vocab_size=103, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=520, tie_word_embeddings=False,
    )  # fmt: skip
    model = RobertaForMaskedLM(config)
    changed = padded(model)
    ids = torch.randint(4, 103, (2, 9))
    assert changed.lm_head.decoder.bias.shape == (103,)
    assert tilefit.verify(model, changed, {"input_ids": ids, "labels": ids}).ok


class Own(nn.Module):
    """A model that reads its weights' shapes, takes its logits apart and changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(101, 32)
        self.head = nn.Linear(32, 101, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.table(ids))
        logits /= self.head.weight.shape[1] ** 0.5
        logits[..., 0] = float("-inf")
        assert logits.shape[-1] == self.head.out_features == len(self.table.weight)
        return F.cross_entropy(logits.view(-1, 101), ids.view(-1).clamp(min=1))


def test_custom_code_around_the_head() -> None:
    model = Own()
    assert tilefit.verify(model, padded(model, (TOKENS,)), (torch.randint(0, 101, (2, 9)),)).ok


class Flattening(Own):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.table(ids))
        return logits.view(ids.shape[0], -1).square().mean()


def test_logits_may_be_flattened() -> None:
    model = Flattening()
    assert tilefit.verify(model, padded(model, (TOKENS,)), (torch.randint(0, 101, (2, 9)),)).ok
