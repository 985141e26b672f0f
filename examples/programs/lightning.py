"""A ResNet on CIFAR-10 with Lightning: half precision, a schedule, logged losses.

tilefit check examples/programs/lightning.py --gpu h200 --fake-data
"""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


class Pictures(pl.LightningDataModule):
    def __init__(self, batch_size=128):
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self):
        datasets.CIFAR10("data", train=True, download=True)

    def setup(self, stage=None):
        augment = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.ToTensor()])
        self.train = datasets.CIFAR10("data", train=True, transform=augment)
        self.val = datasets.CIFAR10("data", train=False, transform=transforms.ToTensor())

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=4, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=4)


class Classifier(pl.LightningModule):
    def __init__(self, rate=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.model = models.resnet18(num_classes=10)

    def training_step(self, batch, index):
        images, labels = batch
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.rate, momentum=0.9, weight_decay=5e-4)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    trainer = pl.Trainer(
        max_epochs=30, accelerator="auto", devices=1, precision="bf16-mixed", gradient_clip_val=1.0
    )
    trainer.fit(Classifier(), datamodule=Pictures())
