"""Healthy real loops: libraries' trainers, PyTorch's own recipes, real models. None may be accused."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from precision.loops.parts import BF16, FP16, autocast, lstm, scaler
from tilefit.capture.script import run_script
from tilefit.capture.torchvision_import import tolerated
from tilefit.precision import Watch
from tilefit.rules.finding import NOTE


@pytest.fixture(autouse=True, scope="module")
def _torchvision() -> None:
    """Loaded first, and without the operations its build may lack: the libraries below look for it."""
    with tolerated():
        pytest.importorskip("torchvision")


def needs(library: str) -> pytest.MarkDecorator:
    """Skips before a watch is begun, which would miss its steps."""
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed")


@pytest.fixture
def w() -> Iterator[Watch]:
    """A watch that looks closely at every step, and must end without an accusation."""
    torch.manual_seed(0)
    with Watch(every=1) as watching:
        yield watching
    assert watching.steps >= 4
    assert [alarm for alarm in watching.alarms if alarm.severity != NOTE] == []


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) * (index + 3)) % 64
        return {"input_ids": tokens, "labels": tokens}


def gpt2(**settings: Any) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, **settings
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def train_lm(model: nn.Module, dtype: torch.dtype, steps: int = 5) -> None:
    s = scaler(enabled=dtype == FP16)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        tokens = torch.randint(0, 64, (2, 16))
        optimizer.zero_grad(set_to_none=True)
        with autocast(dtype):
            loss = model(input_ids=tokens, labels=tokens).loss
        s.scale(loss).backward()
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        s.step(optimizer)
        s.update()


def train_images(model: nn.Module, dtype: torch.dtype, size: int, steps: int = 5, **kw: Any) -> None:
    s = scaler(enabled=dtype == FP16, **kw)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
    for _ in range(steps):
        images, labels = torch.randn(2, 3, size, size), torch.randint(0, 10, (2,))
        optimizer.zero_grad()
        with autocast(dtype):
            loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        s.scale(loss).backward()
        scale = s.get_scale()
        s.step(optimizer)
        s.update()
        if s.get_scale() >= scale:
            schedule.step()


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2(w: Watch, attention: str, dtype: torch.dtype) -> None:
    train_lm(gpt2(attn_implementation=attention), dtype)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_llama_with_rotary_positions_and_padding(w: Watch, dtype: torch.dtype) -> None:
    model = llama()
    s = scaler(enabled=dtype == FP16)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        tokens = torch.randint(0, 64, (2, 16))
        mask = torch.ones(2, 16, dtype=torch.int64)
        mask[0, :4] = 0
        optimizer.zero_grad()
        with autocast(dtype):
            loss = model(input_ids=tokens, labels=tokens, attention_mask=mask).loss
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


def test_gradient_checkpointing_of_a_library(w: Watch) -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.train()
    train_lm(model, FP16)


@pytest.mark.parametrize(
    ("name", "dtype", "size"), [("resnet18", FP16, 32), ("vit_tiny_patch16_224", BF16, 224)]
)
def test_image_models(w: Watch, name: str, dtype: torch.dtype, size: int) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=10)
    train_images(model, dtype, size, steps=4)


def test_normal_back_offs(w: Watch) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_resnet", num_classes=10)
    train_images(model, FP16, 32, steps=8, init_scale=2.0**26, growth_interval=2)


def test_an_lstm_with_clipping_and_truncated_backpropagation(w: Watch) -> None:
    model, head, s = nn.LSTM(8, 16), nn.Linear(16, 4), scaler()
    optimizer = Adam([*model.parameters(), *head.parameters()])
    state = None
    for _ in range(5):
        x, y = torch.randn(6, 2, 8), torch.randint(0, 4, (6, 2))
        optimizer.zero_grad()
        with autocast(FP16):
            out, state = lstm(model, x, state)
            loss = nn.functional.cross_entropy(head(out).flatten(0, 1), y.flatten())
        state = tuple(part.detach() for part in state)
        s.scale(loss).backward()
        s.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.25)
        s.step(optimizer)
        s.update()


def test_dcgan(w: Watch) -> None:
    generator = nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 5), nn.Tanh()
    )
    critic = nn.Sequential(nn.Conv2d(1, 8, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(200, 1))
    og, oc = Adam(generator.parameters(), betas=(0.5, 0.999)), Adam(critic.parameters(), betas=(0.5, 0.999))
    sg, sc = scaler(), scaler()
    bce = nn.BCEWithLogitsLoss()
    for _ in range(5):
        critic.zero_grad()
        with autocast(FP16):
            real = bce(critic(torch.randn(4, 1, 8, 8)), torch.ones(4, 1))
        sc.scale(real).backward()
        with autocast(FP16):
            fake = generator(torch.randn(4, 8, 1, 1))
            loss = bce(critic(fake.detach()), torch.zeros(4, 1))
        sc.scale(loss).backward()
        sc.step(oc)
        sc.update()
        generator.zero_grad()
        with autocast(FP16):
            loss = bce(critic(fake), torch.ones(4, 1))
        sg.scale(loss).backward()
        sg.step(og)
        sg.update()


def test_moving_average_of_weights_and_evaluation(w: Watch) -> None:
    model, s = gpt2(), scaler()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = AdamW(model.parameters())
    for _ in range(5):
        tokens = torch.randint(0, 64, (2, 16))
        model.train()
        optimizer.zero_grad()
        with autocast(FP16):
            loss = model(input_ids=tokens, labels=tokens).loss
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()
        average.update_parameters(model)
        average.eval()
        with torch.no_grad(), autocast(FP16):
            average(input_ids=tokens)


def test_a_compiled_model(w: Watch) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    compiled, s = torch.compile(model, backend="aot_eager"), scaler()
    optimizer = AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        with autocast(FP16):
            loss = nn.functional.cross_entropy(compiled(torch.randn(4, 8)), torch.randint(0, 4, (4,)))
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


def test_fused_optimizer_with_accumulation(w: Watch) -> None:
    model, s = gpt2(), scaler()
    optimizer = AdamW(model.parameters(), fused=True)
    for step in range(10):
        tokens = torch.randint(0, 64, (2, 16))
        with autocast(FP16):
            loss = model(input_ids=tokens, labels=tokens).loss / 2
        s.scale(loss).backward()
        if step % 2:
            s.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            s.step(optimizer)
            s.update()
            optimizer.zero_grad()


def test_knowledge_distillation_with_a_half_teacher(w: Watch) -> None:
    student, teacher = gpt2(), gpt2().half().eval().requires_grad_(False)
    s = scaler()
    optimizer = AdamW(student.parameters())
    for _ in range(5):
        tokens = torch.randint(0, 64, (2, 16))
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(input_ids=tokens).logits.float().log_softmax(-1)
        with autocast(FP16):
            out = student(input_ids=tokens).logits
            loss = nn.functional.kl_div(
                out.float().log_softmax(-1), target, log_target=True, reduction="batchmean"
            )
        s.scale(loss).backward()
        s.step(optimizer)
        s.update()


def test_reinforcement_learning_with_a_target_network(w: Watch) -> None:
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    target, s = copy.deepcopy(net), scaler()
    optimizer = Adam(net.parameters())
    for _ in range(6):
        state, reward = torch.randn(16, 4), torch.randn(16)
        with torch.no_grad(), autocast(FP16):
            goal = reward + 0.99 * target(torch.randn(16, 4)).float().max(1).values
        with autocast(FP16):
            value = net(state).float().gather(1, torch.randint(0, 2, (16, 1)))[:, 0]
        optimizer.zero_grad()
        s.scale(nn.functional.smooth_l1_loss(value, goal)).backward()
        s.unscale_(optimizer)
        nn.utils.clip_grad_value_(net.parameters(), 100)
        s.step(optimizer)
        s.update()
        with torch.no_grad():
            for old, new in zip(target.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.005)


def test_diffusion_with_timesteps_in_an_island(w: Watch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.time = nn.Linear(8, 8), nn.Linear(16, 8)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            with autocast(enabled=False):
                angles = t.float()[:, None] * torch.exp(-torch.arange(8) / 2.0)
            return self.inner(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))  # type: ignore[no-any-return]

    model = Model()
    optimizer = AdamW(model.parameters())
    for _ in range(5):
        x, noise, t = torch.randn(64, 8), torch.randn(64, 8), torch.randint(0, 1000, (64,))
        optimizer.zero_grad()
        with autocast(BF16):
            loss = nn.functional.mse_loss(model(x + noise, t).float(), noise)
        loss.backward()
        optimizer.step()


def test_full_bf16_with_a_large_rate_and_fp32_state(w: Watch) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.5)
    for _ in range(34):
        optimizer.zero_grad()
        out = model(torch.randn(8, 8, dtype=BF16)).float()
        nn.functional.cross_entropy(out, torch.randint(0, 4, (8,))).backward()
        optimizer.step()


def test_sparse_embeddings(w: Watch) -> None:
    model, head = nn.Embedding(32, 8, sparse=True), nn.Linear(8, 4)
    s = scaler()
    sparse, dense = torch.optim.SparseAdam(model.parameters()), Adam(head.parameters())
    for _ in range(5):
        sparse.zero_grad()
        dense.zero_grad()
        with autocast(FP16):
            loss = nn.functional.cross_entropy(
                head(model(torch.randint(0, 32, (8,)))), torch.randint(0, 4, (8,))
            )
        s.scale(loss).backward()
        s.step(sparse)
        s.step(dense)
        s.update()


# ---- libraries' own loops ------------------------------------------------------------------------


@needs("accelerate")
@pytest.mark.parametrize("settings", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_transformers_trainer(w: Watch, tmp_path: Path, settings: dict[str, Any]) -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    transformers.Trainer(model=gpt2(), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens()).train()


@pytest.mark.gpu
@needs("accelerate")
@pytest.mark.parametrize("settings", [{"bf16": True}, {"fp16": True}], ids=["bf16", "fp16"])
def test_transformers_trainer_on_a_gpu(w: Watch, tmp_path: Path, settings: dict[str, Any]) -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    transformers.Trainer(model=gpt2(), args=arguments, train_dataset=Tokens()).train()


@needs("accelerate")
def test_accelerate(w: Watch, tmp_path: Path) -> None:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = gpt2()
    optimizer = AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, 1e-3, total_steps=20)
    loader = DataLoader(Tokens(), batch_size=2)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state(str(tmp_path))


def _lightning() -> tuple[Any, Any]:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            out = self.inner(batch["input_ids"].float() / 64)
            return nn.functional.cross_entropy(out, batch["labels"][:, 1] % 4)

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.inner(batch["input_ids"].float() / 64)

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters())
            schedule = OneCycleLR(optimizer, 1e-3, total_steps=20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return lightning, Module()


@needs("pytorch_lightning")
@pytest.mark.parametrize("dtype", ["bf16-mixed", "16-mixed"])
def test_lightning(w: Watch, tmp_path: Path, dtype: str) -> None:
    lightning, module = _lightning()
    plugins = []
    if dtype == "16-mixed":
        from pytorch_lightning.plugins.precision import MixedPrecision

        plugins = [MixedPrecision("16-mixed", device="cpu", scaler=scaler())]
    lightning.Trainer(
        accelerator="cpu",
        precision=None if plugins else dtype,
        plugins=plugins,
        max_steps=6,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
    ).fit(module, DataLoader(Tokens(), batch_size=2), DataLoader(Tokens(), batch_size=2))


def test_a_script_ends_after_the_steps_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, sys\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(int(sys.argv[1])):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        f"    open({str(tmp_path / 'steps')!r}, 'a').write('.')\n"
    )
    watching = Watch(steps=3)
    assert run_script(script, ["10"], watching) is None
    assert watching.steps == 3
    assert watching.alarms == ()
