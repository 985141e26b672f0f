"""Data that are not there: what takes their place, and what is told where nothing does."""

from __future__ import annotations

import importlib
import mimetypes
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from tilefit.capture.program.fake_data import Sources, fake_data
from tilefit.capture.program.fake_data.pretrained import _type_in
from tilefit.capture.program.fake_data.sources import is_missing
from tilefit.capture.torchvision_import import tolerated
from tilefit.errors import TargetError

with tolerated():
    pytest.importorskip("torchvision")
    from torchvision import datasets, models, transforms


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    monkeypatch.chdir(tmp_path)
    with fake_data([]) as made:
        yield made


def _told(ask: Callable[[], object]) -> TargetError:
    """What is told without the option."""
    found: list[str] = []
    with fake_data(found, fake=False) as sources:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the library raises
            ask()
        error = sources.explained(caught.value)
    assert isinstance(error, TargetError)
    assert not found
    assert error.where.startswith(("tests/capture/program/test_fake_data.py:", f"{Path(__file__)}:"))
    return error


@pytest.mark.parametrize(
    ("make", "shape", "classes", "count"),
    [
        (lambda t: datasets.MNIST("no", download=True, transform=t), (1, 28, 28), 10, 60000),
        (lambda t: datasets.FashionMNIST("no", train=False, transform=t), (1, 28, 28), 10, 10000),
        (lambda t: datasets.CIFAR100("no", True, t), (3, 32, 32), 100, 50000),
        (lambda t: datasets.SVHN("no", split="test", transform=t), (3, 32, 32), 10, 26032),
        (lambda t: datasets.ImageFolder("no/train", transform=t), (3, 375, 500), 1000, 50000),
        (lambda t: datasets.Food101("no", split="test", transform=t), (3, 512, 512), 101, 25250),
    ],
)
def test_a_data_set_has_its_shapes_labels_and_length(
    sources: Sources, make: Callable[..., object], shape: tuple[int, ...], classes: int, count: int
) -> None:
    data = make(transforms.ToTensor())
    assert len(data) == count  # type: ignore[arg-type]
    images, labels = next(iter(DataLoader(data, batch_size=8, shuffle=True)))  # type: ignore[arg-type]
    assert images.shape == (8, *shape)
    assert 0 <= images.min() < images.max() <= 1
    assert labels.dtype == torch.int64
    assert int(labels.max()) < classes
    assert f"{count} random images" in sources.found[0]
    assert sources.used > 8


def test_the_images_of_timm_s_scripts(sources: Sources) -> None:
    create = pytest.importorskip("timm.data").create_dataset
    for name in ("", "torch/imagenet"):
        images = create(name, root="no", split="train", transform=transforms.ToTensor())
        image, label = images[3]
        assert image.shape == (3, 375, 500)
        assert 0 <= label < 1000
        assert len(images) > 1000
    assert any("no: 50000 random photos, 1000 classes" in text for text in sources.found)


def test_the_arrays_of_a_data_set_are_there(sources: Sources) -> None:
    digits = datasets.MNIST("no", train=False)
    assert digits.data.shape == (10000, 28, 28)
    assert digits.targets.bincount().min() > 0
    assert datasets.CIFAR10("no").data.shape == (50000, 32, 32, 3)
    assert len(datasets.CIFAR10("no").classes) == 10


def test_pictures_with_masks_and_boxes(sources: Sources) -> None:
    image, mask = datasets.VOCSegmentation("no")[3]
    assert image.size == mask.size
    assert np.asarray(mask).max() <= 20
    _, boxes = datasets.CocoDetection("no", "no.json")[0]
    assert {"bbox", "category_id"} <= boxes[0].keys()


def test_a_data_set_that_is_there_is_read(sources: Sources, tmp_path: Path) -> None:
    code = "from PIL import Image; Image.new('RGB', (7, 5)).save('a.png')"
    folder = tmp_path / "real" / "cats"
    subprocess.run(["mkdir", "-p", str(folder)], check=True)  # what this process writes lands elsewhere
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    data = datasets.ImageFolder(tmp_path / "real")
    assert (len(data), data[0][0].size, data.classes) == (1, (7, 5), ["cats"])
    assert datasets.FakeData(size=3)[0][0].size == (224, 224)
    assert not sources.found


def test_a_mistake_in_the_program_stays_one(sources: Sources) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        datasets.MNIST("no", trian=True)


def test_tokens_in_a_file(sources: Sources) -> None:
    tokens = np.memmap("data/train.bin", dtype=np.uint16, mode="r")
    assert tokens.dtype == np.uint16
    assert tokens.max() < 256
    assert len(torch.from_numpy(tokens[5:1029].astype(np.int64))) == 1024
    assert np.load("shard.npy").ndim == 1
    assert np.memmap("images.bin", dtype="uint8", mode="r", shape=(100, 3, 8, 8)).shape == (100, 3, 8, 8)
    assert "data/train.bin: 4,194,304 random values of uint16 below 256" in sources.found


def test_text_and_images_in_files(sources: Sources) -> None:
    text = Path("input.txt").read_text()
    assert len(set(text)) == 65
    assert os.path.exists("input.txt")
    assert Image.open("pictures/cat.jpg").size == (500, 375)
    names = os.listdir("photos")
    assert Image.open(os.path.join("photos", names[0])).mode == "RGB"
    assert sorted(Path(name).stem for name in names) == sorted(mask.stem for mask in Path("masks").iterdir())
    assert set(np.unique(Image.open(next(Path("masks").glob("*.png"))))) == {0, 1}
    assert {re.fullmatch(r"(.*)_\d+\.jpg", name)[1] for name in names} == set("01234567")
    assert not os.path.exists("best.pt")


def test_what_logs_for_tensorboard_leaves_its_folder_and_traces_nothing(sources: Sources) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("runs/first")
    writer.add_graph(nn.Linear(2, 2), "not a tensor")
    Path("runs/first/log.txt").write_text("kept")
    assert os.path.isdir(writer.log_dir)


def test_metrics_that_are_not_installed_do_nothing_and_what_makes_data_is_missed(sources: Sources) -> None:
    if PathFinder.find_spec("sklearn") is not None:
        pytest.skip("it is installed")
    metrics = importlib.import_module("sklearn.metrics")
    assert metrics.roc_auc_score([0], [1]) is not None
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("sklearn.datasets")
    assert "sklearn" in str(sources.explained(raised.value))


def test_a_library_beside_the_program_learns_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers asks which of its optional parts it can offer, where it is installed editable."""
    if PathFinder.find_spec("sklearn") is not None:
        pytest.skip("it is installed")
    (tmp_path / "vendored.py").write_text(
        "import importlib.metadata, importlib.util\n"
        "def installed():\n"
        "    packages = importlib.metadata.packages_distributions()\n"
        "    return importlib.util.find_spec('sklearn'), 'sklearn' in packages, 'torch' in packages\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found: list[str] = []
    with fake_data(found):
        assert importlib.import_module("vendored").installed() == (None, False, True)
    assert not found


def test_what_pythons_own_library_does_without_on_this_system_is_not_missed(sources: Sources) -> None:
    importlib.reload(mimetypes)  # which looks for winreg
    assert sources.explained(SystemExit("give me data")) is None


def test_a_file_of_the_users_called_datasets_is_theirs(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["sh", "-c", "echo 'mine = 7' > datasets.py"], cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.modules.pop("datasets", None)
    assert importlib.import_module("datasets").mine == 7
    del sys.modules["datasets"]
    if before is not None:
        sys.modules["datasets"] = before


def test_an_assertion_that_a_file_is_there_holds(sources: Sources) -> None:
    assert os.path.exists("corpus/train.txt")
    assert Path("corpus/train.txt").read_text().count("\n") == 10000
    assert os.path.exists("checkpoint.txt") or True  # asserted as well, and not needed


def test_who_is_prepared_for_a_missing_file_gets_none(sources: Sources) -> None:
    try:
        Path("vocabulary.txt").read_text()
    except FileNotFoundError:
        return
    pytest.fail("made up")


def test_what_is_written_is_read_again_and_never_lands_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("real")
    with fake_data([]):
        with open(path, "a") as file:
            file.write(" and more")
        assert path.read_text() == "real and more"
        (tmp_path / "runs" / "1").mkdir(parents=True)
        with open(os.fsencode(tmp_path / "runs" / "1" / "events"), "wb") as file:  # as TensorBoard does
            file.write(b"loss")
        assert (tmp_path / "runs" / "1" / "events").read_bytes() == b"loss"
        assert sorted(os.listdir(tmp_path)) == ["log.txt", "runs"]
        assert shutil.disk_usage(tmp_path / "runs" / "1").free > 0  # datasets asks of its cache as well
        path.unlink()
        assert not path.exists()
    assert path.read_text() == "real"
    assert os.listdir(tmp_path) == ["log.txt"]


def test_pretrained_weights_are_random(sources: Sources) -> None:
    assert isinstance(models.resnet18(weights="DEFAULT"), nn.Module)
    net = nn.Linear(2, 2)
    net.load_state_dict(torch.load("best.pt")["model"])
    assert sources.found == [
        f"{name}: a checkpoint that leaves weights as they are"
        for name in ("https://download.pytorch.org/models/resnet18-f37072fd.pth", "best.pt")
    ]


def test_nothing_is_downloaded(sources: Sources) -> None:
    with pytest.raises(OSError, match="tilefit downloads nothing"):
        socket.create_connection(("93.184.216.34", 80), timeout=2)
    assert len(urllib.request.urlopen("https://host.invalid/pub/text.txt").read()) > 100_000
    urllib.request.urlretrieve("https://host.invalid/images.tgz", "images.tgz")
    with tarfile.open("images.tgz") as archive:
        assert not archive.getnames()
    with pytest.raises(OSError, match=r"also not from https://host\.invalid/weights\.bin"):
        urllib.request.urlopen("https://host.invalid/weights.bin")


@pytest.mark.parametrize(
    ("ask", "what", "hint"),
    [
        (
            lambda: datasets.MNIST("no", download=True),
            "torchvision.datasets.MNIST is not there",
            "--fake-data",
        ),
        (lambda: np.memmap("train.bin", np.uint16, "r"), "train.bin is not there", "--fake-data"),
        (lambda: Path("words.txt").read_text(), "words.txt is not there", "--fake-data"),
        (lambda: Path("table.parquet").read_bytes(), "table.parquet is not there", "cannot make it up"),
        (
            lambda: __import__("wandb_is_none_such"),
            "the library wandb_is_none_such is not there",
            "Install it",
        ),
        (lambda: __import__("comet_ml"), "the library comet_ml", "what does as good as nothing"),
        (
            lambda: urllib.request.urlopen("https://host.invalid/a.txt"),
            "https://host.invalid/a.txt",
            "--fake-data",
        ),
        (lambda: models.resnet18(weights="DEFAULT"), "resnet18", "--fake-data"),
    ],
)
def test_without_the_option_one_message_names_the_source(
    ask: Callable[[], object], what: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    error = _told(ask)
    assert what in error.what
    assert hint in error.hint


def test_rows_of_a_data_set_are_mapped_filtered_and_loaded(sources: Sources) -> None:
    try:
        from datasets import load_dataset
    except ImportError:  # caught, it is not answered
        load_dataset = importlib.import_module("datasets").load_dataset
    raw = load_dataset("glue", "mrpc")
    assert {*raw} == {"train", "validation", "test"}
    assert raw["train"].features["label"].num_classes == 2
    rows = raw["train"].select(range(64))
    longer = rows.map(lambda row: {"ids": [1, 2, len(row["sentence1"])]}, remove_columns=["sentence1", "idx"])
    batch = next(iter(DataLoader(longer.remove_columns("sentence2").with_format("torch"), batch_size=8)))
    assert {*longer.column_names} == {"sentence2", "label", "ids"}
    assert batch["label"].shape == (8,)
    assert len(rows.filter(lambda row: row["label"] == 1)) < 64
    parts = load_dataset("someone/pictures", split="train").train_test_split(0.1)
    assert {name: len(part) for name, part in parts.items()} == {"train": 3600, "test": 400}
    assert "columns by what the program reads" in sources.found[-1]


def test_pretrained_language_models(sources: Sources) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained("google-bert/bert-base-uncased")
    assert len(tokenizer) == 30522
    encoded = tokenizer(["A few words.", "Words"], padding=True, return_tensors="pt")
    assert encoded["input_ids"].shape == encoded["attention_mask"].shape
    assert int(encoded["attention_mask"][1].sum()) == 3
    assert int(encoded["input_ids"].max()) < 30522
    turns = [{"role": "user", "content": "A few words."}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "user: A few words.\n"
    config = transformers.AutoConfig.from_pretrained("openai-community/gpt2-medium")
    assert (config.model_type, config.n_embd, config.n_layer) == ("gpt2", 1024, 24)
    assert config.architectures == ["GPT2LMHeadModel"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        "prajjwal1/bert-tiny-v2", num_labels=5, num_hidden_layers=1, hidden_size=16, num_attention_heads=2
    )
    assert model.classifier.out_features == 5
    assert model.config.hidden_size == 16
    with pytest.raises(OSError, match="names no type of model"):
        transformers.AutoConfig.from_pretrained("someone/secret-sauce")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("google/gemma-2b", "gemma"),
        ("google/gemma-2-9b", "gemma2"),
        ("Qwen/Qwen2.5-0.5B", "qwen2"),
        ("someone/qwen-2.5b", "qwen"),
        ("xlm-roberta-base", "xlm-roberta"),
        ("someone/detr-resnet-50", "detr"),  # DETR on a ResNet
        ("nvidia/mit-b0", ""),  # not "dia"
        ("bert/large", "bert"),
    ],
)
def test_types_of_models_in_names_of_checkpoints(name: str, kind: str) -> None:
    """Numbers in them are versions or sizes."""
    types = ["gemma", "gemma2", "qwen", "qwen2", "bert", "roberta", "xlm-roberta", "detr", "resnet", "dia"]
    assert _type_in(name, types) == kind


def test_a_model_of_another_size_than_its_name_tells_is_remarked(sources: Sources) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 1, "word_embed_proj_dim": 64}
    for name in ("someone/opt-1b3", "someone/opt-3m", "someone/opt-model"):
        transformers.OPTForCausalLM.from_pretrained(name, num_attention_heads=2, **small)
    told = [each for each in sources.found if "random weights" in each]
    assert [("config.json" in each) for each in told] == [True, False, False], told
    assert "not 1B3" in told[0]
    tied = transformers.AutoModelForCausalLM.from_pretrained("gpt2", n_layer=1)
    assert tied.config.name_or_path == "gpt2"  # of which trainers make the tokenizer
    assert tied.lm_head.weight is tied.transformer.wte.weight


def test_a_tokenizer_without_its_files_is_missing() -> None:
    """A llama's, say: transformers raises a ValueError."""
    assert is_missing(ValueError("Couldn't instantiate the backend tokenizer from one of: ..."))
    assert not is_missing(ValueError("num_heads must divide hidden_size"))


def test_dialogues_and_preferences_have_their_columns(sources: Sources) -> None:
    from datasets import load_dataset

    turns = load_dataset("someone/capybara", split="train")[0]["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    pair = load_dataset("someone/ultrafeedback_binarized", split="train")[0]
    assert {*pair} == {"prompt", "chosen", "rejected"}


def test_side_libraries_do_nothing() -> None:
    pytest.importorskip("tilefit")
    if "matplotlib" in sys.modules:
        pytest.skip("it is installed")
    found: list[str] = []
    with fake_data(found):
        import matplotlib.pyplot as plt
        import wandb
        from torch.utils.tensorboard import SummaryWriter

        _, axes = plt.subplots(1, 2)
        axes[0].plot([1, 2])
        wandb.init(project="x").log({"loss": 1.0})
        writer = SummaryWriter("runs")
        writer.add_scalar("loss", torch.tensor(1.0), 1)
        assert list(plt.figure()) == []
        assert plt.rcParams.colour + "a text" + plt.rcParams.reset == "a text"
    assert "the library matplotlib: does nothing" in found
    assert "matplotlib" not in sys.modules
