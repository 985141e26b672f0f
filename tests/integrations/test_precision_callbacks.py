"""Callbacks for other libraries' trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tilefit.capture.torchvision_import import tolerated
from tilefit.precision import Watch


@pytest.fixture(autouse=True, scope="module")
def _torchvision() -> None:
    """Loaded first, and without the operations its build may lack: the libraries below look for it."""
    with tolerated():
        pytest.importorskip("torchvision")


class Pairs(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), index / 24), "labels": torch.tensor([0.0, 1.0])}


class Half(nn.Module):
    """Computes its loss in bf16, which is what there is to find."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.inner(x) - labels.bfloat16()) ** 2).mean()}


def test_the_trainer_of_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    import transformers

    from tilefit.integrations.transformers import PrecisionCallback

    callback = PrecisionCallback(every=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=True,
        max_steps=4,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    transformers.Trainer(Half(), arguments, train_dataset=Pairs(), callbacks=[callback]).train()
    assert callback.report is not None
    assert [alarm.code for alarm in callback.report.findings] == ["AMP011"]
    assert Path(__file__).name in callback.report.findings[0].source
    assert "AMP011" in capfd.readouterr().err
    with Watch():
        pass  # the callback's watch has ended


def _module(loss: Any) -> Any:
    lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Half()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
            return loss(self.model(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return lightning, Module()


def _fit(tmp_path: Path, loss: Any) -> Any:
    lightning, module = _module(loss)
    from tilefit.integrations.lightning import PrecisionCallback

    callback = PrecisionCallback(every=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=4,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
    )
    return callback, lambda: trainer.fit(module, DataLoader(Pairs(), batch_size=2))


def test_the_trainer_of_lightning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callback, fit = _fit(tmp_path, lambda loss: loss)
    fit()
    assert [alarm.code for alarm in callback.report.findings] == ["AMP011"]
    assert "AMP011" in capfd.readouterr().err


def test_a_fit_that_raises_leaves_no_watch_behind(tmp_path: Path) -> None:
    def fail(loss: Tensor) -> Tensor:
        raise ZeroDivisionError

    _, fit = _fit(tmp_path, fail)
    with pytest.raises(ZeroDivisionError):
        fit()
    with Watch():
        pass
