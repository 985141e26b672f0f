"""``tilefit.check`` of a Hugging Face Trainer and of a LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tilefit
from tilefit.capture.torchvision_import import tolerated
from tilefit.report import Report
from tilefit.report.program import Around

_FEATURES, _CLASSES, _BATCH = 64, 10, 16


def trained(*arguments: Any, **keywords: Any) -> Around:
    found = tilefit.check(*arguments, gpu="h200", **keywords)
    assert isinstance(found, Report)
    assert found.program is not None
    return found.program


def test_a_trainer_is_checked_with_its_optimizer_precision_and_accumulation(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    with tolerated():
        import transformers

        trainer_of, arguments_of = transformers.Trainer, transformers.TrainingArguments

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(_FEATURES, _CLASSES)

        def forward(self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            if not mask.all():  # known on the emulated GPU, and on shapes not
                x = torch.zeros_like(x)
            return {"loss": nn.functional.cross_entropy(self.head(x), labels)}

    rows = [
        {"x": torch.randn(_FEATURES), "mask": torch.ones(4, dtype=torch.long), "labels": torch.tensor(1)}
    ] * (2 * _BATCH)
    arguments = arguments_of(
        output_dir=str(tmp_path),
        per_device_train_batch_size=_BATCH,
        gradient_accumulation_steps=2,
        optim="adamw_torch",
        use_cpu=True,
        report_to="none",
    )
    arguments.bf16 = True
    model = Masked()
    trainer = trainer_of(model, arguments, train_dataset=rows)
    before = torch.get_rng_state()
    assert trained(trainer).step == f"2 micro-batches of {_BATCH}, AdamW, bf16 autocast"
    assert next(model.parameters()).device.type == "cpu"  # the user's model is as it was
    assert torch.equal(before, torch.get_rng_state())


def test_a_lightning_module_is_checked_by_its_training_step() -> None:
    with tolerated():
        lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")

    class Classifier(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(_FEATURES, _CLASSES)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Data(lightning.LightningDataModule):  # type: ignore[misc,name-defined]
        def train_dataloader(self) -> Any:
            rows = TensorDataset(torch.randn(64, _FEATURES), torch.zeros(64, dtype=torch.long))
            return DataLoader(rows, batch_size=_BATCH)

    found = trained(Classifier(), datamodule=Data(), amp="bf16")
    assert found.step == f"a batch of {_BATCH}, SGD, bf16 autocast"
    with pytest.raises(tilefit.TilefitError, match="no data of its own"):
        tilefit.check(Classifier(), gpu="h200")
    with pytest.raises(tilefit.TilefitError, match="no LightningModule"):
        tilefit.check(nn.Linear(2, 2), datamodule=Data(), gpu="h200")
