"""From the text a user types to a model and its inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilefit.capture.targets import load
from tilefit.errors import TargetError, TilefitError, UsageError
from tilefit.options import TargetOptions

MODEL = """
import torch
from torch import nn

def model():
    return nn.Linear(8, 4)

def convolution():
    return nn.Conv2d(1, 4, 3)

def words():
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8))

def pair():
    return nn.Linear(8, 4), (torch.zeros(2, 8),)

def reads_values():
    sizes = [int(n) for n in torch.arange(1, 4)]
    return nn.Linear(sizes[1], sizes[2]), (torch.zeros(2, 2),)

class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self):
        return (self.weight @ self.weight).sum()

def triple():
    return 1, 2, 3

def number():
    return 3

def broken():
    raise ValueError("no such thing")

def missing():
    import no_such_package

def elsewhere():
    open("config.json")

ready = nn.Linear(8, 4)
text = "not a factory"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL, encoding="utf-8")
    (tmp_path / "empty.py").touch()
    return path


@pytest.fixture(autouse=True)
def _search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a file lets it import its neighbours; later tests must not find them."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def _load(target: str, **options: Any) -> Any:
    return load(target, TargetOptions(**options))


# ---- a user's file -----------------------------------------------------------------------------


def test_a_factory_s_model_and_inputs_are_made_without_data(file: Path) -> None:
    target = _load(f"{file}:pair")
    assert target.name == "net.py:pair"
    assert {t.device.type for t in (*target.model.parameters(), *target.inputs)} == {"meta"}


def test_a_factory_that_reads_values_is_built_for_real(file: Path) -> None:
    target = _load(f"{file}:reads_values")
    assert target.model.weight.shape == (3, 2)


def test_a_model_that_takes_nothing_needs_no_inputs(file: Path) -> None:
    assert _load(f"{file}:Alone").inputs == ()


def test_a_model_may_stand_in_the_file_ready(file: Path) -> None:
    assert isinstance(_load(f"{file}:ready", input=["float32[2,8]"]).model, nn.Linear)


def test_a_module_is_imported_by_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    file.rename(file.parent / "importable_net.py")
    assert _load("importable_net:pair").name == "importable_net:pair"


def test_a_folder_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match="only_a_folder is a folder"):
        _load("only_a_folder:build")


def test_a_file_may_be_called_like_a_module_that_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / f"{json.__name__}.py"
    path.write_text(MODEL, encoding="utf-8")
    assert isinstance(_load(f"{path}:pair").model, nn.Linear)
    assert sys.modules["json"] is json


def test_a_file_imports_its_neighbours(file: Path) -> None:
    (file.parent / "user.py").write_text("from net import pair\n", encoding="utf-8")
    assert isinstance(_load(f"{file.parent / 'user.py'}:pair").model, nn.Linear)


def test_inputs_are_synthesised_where_the_user_says_which(file: Path) -> None:
    (image,) = _load(f"{file}:convolution", image_size=32, batch=2).inputs
    assert image.shape == (2, 1, 32, 32)
    (tokens,) = _load(f"{file}:words", seq=16, batch=2).inputs
    assert (tokens.shape, tokens.dtype) == ((2, 16), torch.int64)
    assert _load(f"{file}:pair", input=["float32[7,8]"]).inputs[0].shape == (7, 8)


@pytest.mark.parametrize(
    ("target", "kind", "what", "hint"),
    [
        ("{file}:pare", TargetError, "has no 'pare'", "Did you mean 'pair'?"),
        ("{file}:zzzzzz", TargetError, "has no 'zzzzzz'", "It has: "),
        ("{folder}/empty.py:build", TargetError, "has no 'build'", "It has: no function."),
        ("{folder}", TargetError, "is a folder", "Name a file in it."),
        ("{folder}/nett.py:pair", TargetError, "there is no file", "net.py"),
        ("no_such_package.x:f", TargetError, "there is no module 'no_such_package'", ""),
        ("{file}:broken", TargetError, "raised ValueError: no such thing", ""),
        ("{file}:missing", TargetError, "No module named 'no_such_package'", "-m pip"),
        ("{file}:elsewhere", TargetError, "No such file or directory: 'config.json'", "that tilefit runs in"),
        ("{file}:triple", TargetError, "returned 3 values", "(model, inputs)"),
        ("{file}:number", TargetError, "returned a value of type int", "(model, inputs)"),
        ("{file}:text", TargetError, "is of type str, which cannot be called", ""),
        ("{file}:model", UsageError, "without inputs", "--input"),
        ("gpt2", UsageError, "cannot read the target", "file.py:factory"),
        ("", UsageError, "cannot read the target ''", "file.py:factory"),
        ("{file}", UsageError, "is a program", "net.py:build_model"),
        ("hf:", UsageError, "cannot read the target", "hf:"),
        ("hf:gpt22", TargetError, "no model type 'gpt22'", "gpt2"),
        ("hf:{folder}/config.json", TargetError, "no configuration file", ""),
        ("hf:t5-small", TargetError, "no model type 't5-small'", "the type, hf:t5,"),
        ("hf:meta-llama/Llama-3.1-8B", TargetError, "no model type 'meta-llama/L", "the type, hf:llama,"),
        ("hf:nobody/nothing", TargetError, "no model type 'nobody/nothing'", "such as gpt2"),
        ("torchvision:resnet51", TargetError, "no model 'resnet51'", "resnet50"),
        ("timm:convnext_tinyy", TargetError, "no model 'convnext_tinyy'", "convnext_tiny"),
        ("timm:maxvit_tiny", TargetError, "no model 'maxvit_tiny'", "maxvit_tiny_"),
        ("hf:vjepa2", UsageError, "input is called pixel_values_videos", '--input "pixel_values_videos: '),
    ],
)
def test_a_wrong_target_is_told(
    file: Path, target: str, kind: type[TilefitError], what: str, hint: str
) -> None:
    with pytest.raises(kind) as caught:
        _load(target.format(file=file, folder=file.parent))
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("target", "sizes", "why"),
    [
        ("{file}:pair", {"batch": 4}, "--batch has no effect: pair makes the inputs itself"),
        ("{file}:pair", {"image_size": 4}, "--image-size has no effect: pair makes"),
        ("{file}:model", {"batch": 4, "input": ["x: fp32[2,8]"]}, "--batch has no effect: --input says"),
        ("hf:gpt2", {"seq": 4, "input": ["input_ids: int64[2,8]"]}, "--seq has no effect: --input says"),
        ("torchvision:resnet18", {"seq": 4}, "--seq has no effect: images have no tokens"),
        (
            "{file}:convolution",
            {"seq": 4, "image_size": 8},
            "--seq has no effect: --image-size asks",
        ),
        ("{file}:convolution", {"seq": 4}, "--seq has no effect: the model has no nn.Embedding"),
        ("{file}:words", {"image_size": 4}, "--image-size has no effect: the model has an nn.Embedding"),
        ("hf:distilbert", {"image_size": 4}, "--image-size has no effect: the model takes no images"),
        ("hf:vit", {"seq": 4}, "--seq has no effect: the model takes no tokens"),
        (
            "torchvision:ssd300_vgg16",
            {"image_size": 64, "on_cpu": True},
            "--image-size has no effect: the model resizes its images itself, to 300 pixels",
        ),
    ],
)
def test_a_size_without_effect_is_refused(file: Path, target: str, sizes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load(target.format(file=file), TargetOptions(**sizes))


def test_a_size_that_a_sweep_varies_may_have_no_effect(file: Path) -> None:
    load(f"{file}:pair", TargetOptions(batch=4, varied="batch"))


def test_a_factory_that_raises_is_told_with_its_line(file: Path) -> None:
    with pytest.raises(TargetError) as caught:
        _load(f"{file}:broken")
    line = 1 + MODEL.splitlines().index('    raise ValueError("no such thing")')
    assert caught.value.where.endswith(f"net.py:{line}")


def test_a_factory_sees_no_command_line_and_may_leave(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilefit", "check", "--gpu", "h200"])
    file.write_text(
        f"import argparse\n{MODEL}\nparser = argparse.ArgumentParser()\nparser.add_argument('--width')\n"
        "def parsed():\n    parser.parse_args()\n    return nn.Linear(8, 4), (torch.zeros(2, 8),)\n"
        "def lacks():\n    parser.add_argument('--data', required=True)\n    parser.parse_args()\n"
    )
    assert isinstance(_load(f"{file}:parsed").model, nn.Linear)
    with pytest.raises(TargetError, match=r"lacks called sys\.exit\(2\)") as caught:
        _load(f"{file}:lacks")
    assert caught.value.where.endswith(f"net.py:{len(file.read_text().splitlines())}")
    assert "usage: net.py" in capsys.readouterr().err


def test_a_file_in_a_package_imports_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "a_package" / "models"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    (folder / "parts.py").write_text(MODEL, encoding="utf-8")
    (folder / "net.py").write_text("from ..models.parts import pair\n", encoding="utf-8")
    assert isinstance(_load(f"{folder / 'net.py'}:pair").model, nn.Linear)


def test_an_error_within_the_standard_library_is_told_with_the_users_line(file: Path) -> None:
    file.write_text("import json\ndef build():\n    json.loads('{x')\n")
    with pytest.raises(TargetError, match="JSONDecodeError") as caught:
        _load(f"{file}:build")
    assert caught.value.where.endswith("net.py:3")


def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("x = 1\ndef f(:\n", encoding="utf-8")
    with pytest.raises(TargetError, match="SyntaxError") as caught:
        _load(f"{path}:f")
    assert caught.value.where.endswith("wrong.py:2")
    path.write_text("import no_such_thing\n", encoding="utf-8")
    with pytest.raises(TargetError, match="no_such_thing") as caught:
        _load(f"{path}:f")
    assert caught.value.where.endswith("wrong.py:1")


# ---- libraries ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("not json", "not a JSON file"),
        ("[1]", "names no model_type"),
        ('{"hidden_size": 8}', "names no model_type"),
        ('{"model_type": "gptt2"}', "no model type 'gptt2'"),
    ],
)
def test_a_wrong_configuration_is_told(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TargetError) as caught:
        _load(f"hf:{path}")
    assert what in caught.value.what


def test_a_model_of_the_hub_that_is_kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--somebody--tiny"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 24, "n_head": 2}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert _load("hf:somebody/tiny", batch=2, seq=8).model.config.n_embd == 24


def _hf(folder: Path, model_type: str, values: dict[str, Any], **options: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **values}), encoding="utf-8")
    return _load(f"hf:{folder}", **options)


def test_a_configuration_gives_the_head_it_names(tmp_path: Path) -> None:
    target = _hf(
        tmp_path, "bert", {"num_hidden_layers": 1, "architectures": ["BertForSequenceClassification"]}
    )
    assert type(target.model).__name__ == "BertForSequenceClassification"
    assert target.inputs["labels"].shape == (target.inputs["input_ids"].shape[0],)
    other = _hf(tmp_path, "bert", {"num_hidden_layers": 1}, batch=2, seq=8)
    assert type(other.model).__name__ == "BertForMaskedLM"
    assert other.inputs["labels"].shape == (2, 8)


@pytest.mark.parametrize(
    ("model_type", "architecture", "names"),
    [
        ("blip", "BlipForConditionalGeneration", ["pixel_values", "input_ids", "labels"]),
        ("clip", "CLIPModel", ["pixel_values", "input_ids", "return_loss"]),
        ("llava", "LlavaForConditionalGeneration", ["input_ids", "labels"]),
        ("segformer", "SegformerForSemanticSegmentation", ["pixel_values", "labels"]),
        ("gpt2", "GPT2LMHeadModel", ["input_ids", "labels"]),
        ("whisper", "WhisperForConditionalGeneration", ["input_features", "labels"]),
        ("bert", "BertForPreTraining", ["input_ids"]),
    ],
)
def test_a_head_that_is_named_gets_its_inputs(
    tmp_path: Path, model_type: str, architecture: str, names: list[str]
) -> None:
    target = _hf(tmp_path, model_type, {"architectures": [architecture]}, batch=2)
    assert type(target.model).__name__ == architecture
    assert [*target.inputs] == names


def test_inputs_are_what_the_model_takes(tmp_path: Path) -> None:
    one = {"num_hidden_layers": 1}
    text = _hf(tmp_path, "gpt2", {"n_layer": 1}, batch=2, seq=8, train=False)
    assert {name: tuple(t.shape) for name, t in text.inputs.items()} == {"input_ids": (2, 8)}
    image = _hf(tmp_path, "vit", one, batch=2, image_size=224)
    assert image.inputs["pixel_values"].shape == (2, 3, 224, 224)
    sound = _hf(tmp_path, "wav2vec2", one, batch=2, seq=4000)
    assert sound.inputs["input_values"].shape == (2, 4000)
    assert "SpecAugment" in sound.notes[0]
    speech = _hf(tmp_path, "whisper", {"encoder_layers": 1, "decoder_layers": 1}, batch=2, seq=8)
    assert speech.inputs["input_features"].shape == (2, 80, 3000)
    assert speech.inputs["labels"].shape == (2, 8)
    seen = _load("hf:llava", batch=2, seq=8)
    assert {name: tuple(t.shape) for name, t in seen.inputs.items()} == {
        "input_ids": (2, 8),
        "labels": (2, 8),
    }
    both = _hf(tmp_path, "t5", {"num_layers": 1}, batch=2, seq=8, train=False)
    assert both.inputs["decoder_input_ids"].shape == (2, 8)


@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        ("torchvision:r3d_18", [(8, 3, 16, 112, 112)]),
        ("torchvision:s3d", [(8, 3, 16, 224, 224)]),
        ("hf:timesformer", [(8, 8, 3, 224, 224)]),
        ("hf:audio-spectrogram-transformer", [(16, 1024, 128)]),
        ("hf:dac", [(16, 1, 80000)]),
        ("hf:depth_anything", [(64, 3, 224, 224)]),
        ("hf:speech_to_text", [(16, 6000, 80), (16, 1024)]),
        ("hf:blip", [(64, 3, 384, 384), (64, 512)]),
        (
            "hf:git",
            [(64, 3, 224, 224), (64, 1024)],
        ),  # its text model sees the image's features before the words
        ("hf:vilt", [(64, 3, 384, 384), (64, 40)]),
        ("hf:smolvlm_vision", [(64, 3, 224, 224)]),  # says that it takes tokens, and does not
    ],
)
def test_clips_spectrograms_and_described_images(target: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = _load(target, train=False).inputs
    tensors = inputs.values() if isinstance(inputs, dict) else inputs
    assert [tuple(t.shape) for t in tensors] == shapes


def test_images_that_tokens_stand_for_are_left_out_and_that_is_said() -> None:
    note = "The inputs are text alone: what the model does with images is left out."
    for target, notes in (("hf:llava", (note,)), ("hf:git", ()), ("hf:gpt2", ())):
        assert _load(target, batch=2, seq=8).notes == notes


def test_positions_never_exceed_what_the_model_has(tmp_path: Path) -> None:
    roberta = _hf(tmp_path, "roberta", {"num_hidden_layers": 1, "max_position_embeddings": 66})
    assert roberta.inputs["input_ids"].shape[1] == 64


def test_images_come_in_the_size_a_model_was_made_for() -> None:
    assert _load("torchvision:resnet18", batch=2).inputs[0].shape == (2, 3, 224, 224)
    assert _load("timm:resnet18", batch=2, image_size=64).inputs[0].shape == (2, 3, 64, 64)
    assert _load("torchvision:resnet18", input=["float32[5,3,32,32]"]).inputs[0].shape == (5, 3, 32, 32)


SIZED = """
from torch import nn

def words(vocab_size=100, *, d_model=8):
    return nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size))

def anything(**sizes):
    return nn.Linear(sizes["inner"], 4)

ready = nn.Linear(8, 4)
"""


@pytest.mark.parametrize(
    ("factory", "arguments", "shapes"),
    [
        ("words", {"vocab_size": 50, "d_model": 16}, [(50, 16), (50, 16)]),
        ("words", {"vocab": 50, "hidden": 16}, [(50, 16), (50, 16)]),
        ("anything", {"inner": 3}, [(4, 3)]),
    ],
)
def test_sizes_reach_the_constructor(
    tmp_path: Path, factory: str, arguments: dict[str, int], shapes: list[tuple[int, int]]
) -> None:
    (tmp_path / "sized.py").write_text(SIZED, encoding="utf-8")
    options = TargetOptions(input=["int64[2,4]"], arguments=arguments)
    target = load(f"{tmp_path}/sized.py:{factory}", options)
    assert isinstance(target.model, nn.Module)
    assert [tuple(p.shape) for p in target.model.parameters() if p.dim() > 1] == shapes


@pytest.mark.parametrize(
    ("factory", "arguments", "hint"),
    [
        ("words", {"vocab_sise": 50}, "Did you mean 'vocab_size'"),
        ("words", {"layers": 50}, "def build(layers)"),
        ("ready", {"vocab": 50}, "it has: none"),
    ],
)
def test_a_size_nobody_takes_is_refused(
    tmp_path: Path, factory: str, arguments: dict[str, int], hint: str
) -> None:
    (tmp_path / "sized.py").write_text(SIZED, encoding="utf-8")
    with pytest.raises(TargetError, match="has no size") as refused:
        load(f"{tmp_path}/sized.py:{factory}", TargetOptions(input=["int64[2,4]"], arguments=arguments))
    assert hint in refused.value.hint


def test_sizes_are_attributes_of_a_configuration() -> None:
    pytest.importorskip("transformers")
    options = TargetOptions(batch=1, seq=8, arguments={"hidden": 96, "vocab": 120, "n_layer": 1})
    model: Any = load("hf:gpt2", options).model
    assert (model.config.n_embd, model.config.vocab_size, len(model.transformer.h)) == (96, 120, 1)
    with pytest.raises(TargetError, match="'width'") as refused:
        load("hf:gpt2", TargetOptions(arguments={"width": 96}))
    assert "_name_or_path" not in refused.value.hint
    assert refused.value.hint.endswith(", ….")
    with pytest.raises(TargetError) as misspelled:
        load("hf:gpt2", TargetOptions(arguments={"bacth": 96}))
    assert misspelled.value.hint == "Did you mean 'batch'?"


def test_models_of_transformers_load_without_torchvision_and_those_of_timm_with_it() -> None:
    program = """
import sys
from tilefit.capture.torchvision_import import import_transformers
transformers = import_transformers()
from transformers.models.gpt2 import modeling_gpt2
print("torchvision" in sys.modules, transformers.utils.is_timm_available())
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", str(find_spec("timm") is not None)]
