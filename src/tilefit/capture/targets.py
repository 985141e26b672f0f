"""What can be checked: from the text a user types to a model and its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tilefit.capture import detection
from tilefit.capture.autocast import constructible
from tilefit.capture.failures import ON_CPU
from tilefit.capture.inputs import describe_inputs, make, parse_inputs
from tilefit.capture.packages import package_of
from tilefit.capture.sites import short_path, user_line
from tilefit.capture.torchvision_import import import_transformers, tolerated
from tilefit.errors import CaptureError, TargetError, TilefitError, UsageError

#: Sizes of synthesised inputs where the user gives none.
DEFAULT_TEXT_BATCH = 16
DEFAULT_IMAGE_BATCH = 64
DEFAULT_SEQUENCE = 1024
DEFAULT_IMAGE_SIZE = 224
#: Clips, their frames, and the pixels of those of a 3D ResNet, as in torchvision's own training.
DEFAULT_CLIP_BATCH = 8
FRAMES = 16
RESNET_CLIP_SIZE = 112
#: Of a spectrogram: ten seconds at a hundred frames each.
DEFAULT_FRAMES = 1000


@dataclass(frozen=True, slots=True)
class Target:
    """A model ready to be captured.

    Attributes:
        model: A module, or a callable that does a whole step.
        inputs: Its arguments: a mapping, a tuple, or None.
        name: What to call it.
        loss: Makes the loss of the output, where the model does not.
        notes: What was assumed.
        hint: What to do where the model refuses its inputs; empty where nothing is known.
        shorter: What to do where it has no positions for so many tokens; likewise.
    """

    model: nn.Module | Callable[..., Any]
    inputs: Any
    name: str
    loss: Callable[[Any], torch.Tensor] | None = None
    notes: tuple[str, ...] = ()
    hint: str = ""
    shorter: str = ""


@dataclass(frozen=True, slots=True)
class InputOptions:
    """What the user said about the inputs.

    Attributes:
        specs: ``--input`` texts; they win over everything else.
        batch, seq, image_size: For inputs that can be synthesised; None for a default.
        train: Labels are needed.
        device: ``meta``, or where values are needed the device that is to hold them.
        arguments: Sizes for the constructor, by name: arguments of a factory or of a library's model,
            attributes of a configuration. ``hidden`` and ``vocab`` stand for the usual names of these sizes.
        varied: The size that a sweep varies, which looks itself whether it has an effect.
    """

    specs: Sequence[str] = field(default=())
    batch: int | None = None
    seq: int | None = None
    image_size: int | None = None
    train: bool = True
    device: str = "meta"
    arguments: Mapping[str, int] = field(default_factory=dict)
    varied: str = ""

    def refuse_sizes(self, why: str, names: Sequence[str] = ("batch", "seq", "image_size")) -> None:
        """Refuse sizes that would have no effect.

        Raises:
            UsageError: one of ``names`` was given; says ``why`` it is of no use.
        """
        for name in names:
            if getattr(self, name) is not None and name != self.varied:
                raise UsageError(f"--{name.replace('_', '-')} has no effect: {why}", hint="Leave it out.")


def load(target: str, options: InputOptions) -> Target:
    """The model that ``target`` names.

    Args:
        target: ``file.py:factory``, ``package.module:factory``, ``hf:<model_type or config.json>``,
            ``torchvision:<name>`` or ``timm:<name>``.
        options: What to feed it.

    Raises:
        TargetError: it cannot be found, imported or built.
        UsageError: the text is not understood.
    """
    if options.specs:
        options.refuse_sizes("--input says what the inputs are")
    prefix, colon, rest = target.partition(":")
    if not colon or not rest:
        raise UsageError(
            f"cannot read the target {target!r}",
            hint="Write file.py:factory, package.module:factory, hf:<type or config.json>, "
            "torchvision:<name> or timm:<name>.",
        )
    loaders = {"hf": _transformers, "torchvision": _torchvision, "timm": _timm}
    with tolerated(), constructible():
        if prefix in loaders:
            return loaders[prefix](rest, options)
        path, _, factory = target.rpartition(":")
        # Code that reads the command line gets none; what is on tilefit's is not for it.
        with patch.object(sys, "argv", [path]):
            return _user_factory(path, factory, options)


# ---- the user's own code -----------------------------------------------------------------------


def _user_factory(path: str, factory_name: str, options: InputOptions) -> Target:
    module = _import_file(Path(path)) if path.endswith(".py") or os.sep in path else _import_module(path)
    factory = getattr(module, factory_name, None)
    if factory is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = get_close_matches(factory_name, names, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"It has: {_listed(names)}."
        own = Path(f"{path.replace('.', os.sep)}.py")
        if own.is_file() and not own.samefile(getattr(module, "__file__", None) or os.devnull):
            hint = f"{path} is a module that Python has, not your file: write {own}:{factory_name}."
        raise TargetError(f"{path} has no {factory_name!r}", hint=hint)
    arguments = _named(options.arguments, _parameters(factory), f"{path}:{factory_name}")
    if isinstance(factory, nn.Module):
        made: Any = factory
    elif callable(factory):
        made = _build(lambda: factory(**arguments), f"{path}:{factory_name}", options.device)
    else:
        raise TargetError(f"{factory_name!r} is a {type(factory).__name__}, not a callable", where=path)
    inputs: Any = None
    hint = ""
    if isinstance(made, tuple):
        if len(made) != 2:
            raise TargetError(
                f"{factory_name} returned {len(made)} values",
                where=path,
                hint="Return a model, (model, inputs), or a training-step callable.",
            )
        made, inputs = made
    if not isinstance(made, nn.Module) and not callable(made):
        raise TargetError(
            f"{factory_name} returned a {type(made).__name__}",
            where=path,
            hint="Return a model, (model, inputs), or a training-step callable.",
        )
    if options.specs:
        inputs = parse_inputs(options.specs, options.device)
    elif inputs is None and isinstance(made, nn.Module):
        inputs = _inputs_by_signature(made, options, path)
        hint = _others(inputs)
    else:
        options.refuse_sizes(f"{factory_name} makes the inputs itself")
    name = f"{Path(path).name if path.endswith('.py') else path}:{factory_name}"
    return Target(made, inputs, name, hint=hint)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = get_close_matches(path.name, [p.name for p in folder.glob("*.py")], 1)
        raise TargetError(
            f"there is no file {path}", hint=f"Did you mean {folder / near[0]}?" if near else ""
        )
    package, root = package_of(path)
    name = f"{package}.{path.stem}".removeprefix(".")
    while name in sys.modules:  # a file called like a module of a library must not take its place
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path[:0] = dict.fromkeys([str(path.parent.resolve()), str(root)])
    _guarded(lambda: spec.loader.exec_module(module), f"importing {path}")  # type: ignore[union-attr]
    return module


def _import_module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if importlib.util.find_spec(name) is None:
            raise TargetError(
                f"there is no module {name!r}",
                hint="Write file.py:factory for a file, or run where the package can be imported.",
            )
    except ModuleNotFoundError as error:
        raise TargetError(f"there is no module {error.name!r}") from error
    return _guarded(lambda: importlib.import_module(name), f"importing {name}")


def _guarded(action: Callable[[], Any], doing: str) -> Any:
    """Run the user's code; what it raises becomes one message with the line."""
    try:
        return action()
    except TilefitError:
        raise
    except (Exception, SystemExit) as error:
        raise _told(error, doing) from error


def _told(error: Exception | SystemExit, doing: str) -> TargetError:
    if isinstance(error, SystemExit):
        return TargetError(
            f"{doing} called sys.exit({'' if error.code is None else repr(error.code)})",
            where=user_line(error),
            hint="A target runs without arguments of a command line, and returns its model.",
        )
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{short_path(error.filename)}:{error.lineno}"
    else:
        where = user_line(error)
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return TargetError(f"{doing} raised {type(error).__name__}: {text}", where=where, hint=_remedy(error))


def _remedy(error: Exception) -> str:
    """What to do where the user's code lacks something that is elsewhere."""
    if isinstance(error, ModuleNotFoundError):
        return f"Install it where tilefit runs ({sys.executable} -m pip install), or run where it is found."
    if isinstance(error, FileNotFoundError) and not os.path.isabs(error.filename or "/"):
        return f"Its path is relative to the folder that tilefit runs in: {os.getcwd()}"
    return ""


def _build(factory: Callable[[], Any], name: str, device: str) -> Any:
    """Call a factory without allocating its weights, if it can be built that way."""
    if device == "meta":
        try:
            with torch.device("meta"):
                return factory()
        except TilefitError:
            raise
        except (Exception, SystemExit) as error:
            # Some models compute sizes or initial values with tensors; they are built for real.
            if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
                raise _told(error, name) from error
    with torch.device("cpu"):
        return _guarded(factory, name)


#: What models call the sizes that have a short name.
_SIZES = {
    "hidden": ("hidden_size", "d_model", "n_embd", "embed_dim", "dim"),
    "vocab": ("vocab_size", "n_vocab", "num_tokens"),
}


#: Sizes of the inputs, which are no arguments of a constructor.
_INPUT_SIZES = ("batch", "seq", "image_size")


def _listed(names: Collection[str]) -> str:
    """The first of some names, in order."""
    return ", ".join(sorted(names)[:12]) + (", …" if len(names) > 12 else "")


def _parameters(factory: Any) -> list[str] | None:
    """Names of a factory's arguments; None where it takes any."""
    if isinstance(factory, nn.Module) or not callable(factory):
        return []  # there is nothing left to construct
    try:
        found = inspect.signature(factory).parameters
    except ValueError:
        return None  # a builtin that does not tell
    return None if any(p.kind is p.VAR_KEYWORD for p in found.values()) else list(found)


def _named(arguments: Mapping[str, int], known: Collection[str] | None, target: str) -> dict[str, int]:
    """The arguments under the names a target knows; where it takes any, under those given.

    Raises:
        TargetError: it knows no such argument.
    """
    named = {}
    for name, value in arguments.items():
        names = (name, *_SIZES.get(name, ()))
        match = name if known is None else next((each for each in names if each in known), "")
        if not match:
            public = [each for each in known or () if not each.startswith("_")]
            near = get_close_matches(name, [*public, *_INPUT_SIZES], 1)
            raise TargetError(
                f"{target} has no size {name!r} to set",
                hint=f"Did you mean {near[0]!r}?"
                if near
                else f"It needs an argument of this name: "
                f"def build({names[-1]}): …; it has: {_listed(public) or 'none'}.",
            )
        named[match] = value
    return named


def _inputs_by_signature(model: nn.Module, options: InputOptions, path: str) -> Any:
    """Inputs for a model that came without: images or tokens, if the user said which."""
    batch = options.batch
    reads_tokens = any(isinstance(m, nn.Embedding) for m in model.modules())
    if options.image_size is not None:
        options.refuse_sizes("--image-size asks for images, which have no tokens", ["seq"])
        if reads_tokens and not any(isinstance(m, nn.Conv2d) for m in model.modules()):
            why = "the model has an nn.Embedding and no nn.Conv2d: it takes tokens"
            options.refuse_sizes(why, ["image_size"])
        size = options.image_size
        channels = _first_channels(model)
        return (make((batch or DEFAULT_IMAGE_BATCH, channels, size, size), torch.float32, options.device),)
    if not reads_tokens:
        options.refuse_sizes("the model has no nn.Embedding, which would read tokens", ["seq"])
    elif options.seq is not None:
        return (make((batch or DEFAULT_TEXT_BATCH, options.seq), torch.int64, options.device),)
    raise UsageError(
        f"{path} returned a model without inputs",
        hint='Return (model, inputs), or give --input "x: float32[32,3,224,224]", --image-size or --seq.',
    )


def _first_channels(model: nn.Module) -> int:
    conv = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    return conv.in_channels if conv is not None else 3


# ---- libraries ---------------------------------------------------------------------------------


def _need(module: str, extra: str) -> Any:
    try:
        return import_transformers() if module == "transformers" else importlib.import_module(module)
    except ImportError as error:
        raise TargetError(
            f"{module} cannot be imported ({error})", hint=f"Install it: pip install 'tilefit[{extra}]'."
        ) from error


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Names like one that is not known: those that begin with it, else those spelled alike."""
    return [each for each in known if each.startswith(name)][:3] or get_close_matches(name, known, 3)


def _torchvision(name: str, options: InputOptions) -> Target:
    models = _need("torchvision", "vision").models
    if name not in models.list_models():
        near = _near(name, models.list_models())
        raise TargetError(
            f"torchvision has no model {name!r}",
            hint=f"Did you mean {' or '.join(near)}?" if near else "See torchvision.models.list_models().",
        )
    weights = dict.fromkeys(
        {"weights", "weights_backbone"} & {*inspect.signature(models.get_model_builder(name)).parameters}
    )
    detects = name in models.list_models(models.detection)
    if detects and options.device == "meta":
        raise CaptureError(
            "what a detection model computes depends on the boxes that it finds, and only shapes are known",
            where=f"torchvision:{name}",
            hint=ON_CPU,
        )
    model = _build(lambda: models.get_model(name, **weights, **options.arguments), name, options.device)
    if detects:
        return _detection_target(f"torchvision:{name}", model, options)
    default = 299 if name.startswith("inception") else DEFAULT_IMAGE_SIZE
    frames = FRAMES if name in models.list_models(models.video) else 0
    if isinstance(model, models.video.VideoResNet):
        default = RESNET_CLIP_SIZE
    return _image_target(f"torchvision:{name}", model, 3, options.image_size or default, options, frames)


def _detection_target(name: str, model: nn.Module, options: InputOptions) -> Target:
    if options.specs:
        raise UsageError(
            "--input has no lists, and a detection model takes a list of images",
            hint="Leave it out, or return (model, ([image, …],)) from a factory: file.py:factory.",
        )
    size = detection.image_size(model)
    options.refuse_sizes(f"the model resizes its images itself, to {size} pixels", ["image_size"])
    options.refuse_sizes("images have no tokens", ["seq"])
    batch = options.batch or detection.DEFAULT_BATCH
    inputs = detection.torchvision_inputs(model, batch, options.train, options.device)
    boxes = "The weights are random: a trained model finds another number of boxes."
    return Target(model, inputs, name, notes=(boxes,))


def _timm(name: str, options: InputOptions) -> Target:
    timm = _need("timm", "vision")
    if not timm.is_model(name):
        near = _near(name, timm.list_models())
        raise TargetError(
            f"timm has no model {name!r}",
            hint=f"Did you mean {' or '.join(near)}?" if near else "See timm.list_models().",
        )
    model = _build(lambda: timm.create_model(name, **options.arguments), name, options.device)
    channels, height = getattr(model, "default_cfg", {}).get("input_size", (3, DEFAULT_IMAGE_SIZE))[:2]
    return _image_target(f"timm:{name}", model, channels, options.image_size or height, options)


def _image_target(
    name: str, model: nn.Module, channels: int, size: int, options: InputOptions, frames: int = 0
) -> Target:
    """Images, or clips of so many frames."""
    if options.specs:
        return Target(model, parse_inputs(options.specs, options.device), name, _image_loss)
    options.refuse_sizes("images have no tokens", ["seq"])
    batch = options.batch or (DEFAULT_CLIP_BATCH if frames else DEFAULT_IMAGE_BATCH)
    shape = (batch, channels, *([frames] if frames else []), size, size)
    inputs = (make(shape, torch.float32, options.device),)
    return Target(model, inputs, name, _image_loss, hint=_others(inputs))


def _image_loss(output: Any) -> torch.Tensor:
    """Cross-entropy of every output with a class dimension (segmentation and auxiliary heads too)."""
    values = list(output.values()) if isinstance(output, Mapping) else output
    outputs = (
        [values] if isinstance(values, torch.Tensor) else [v for v in values if isinstance(v, torch.Tensor)]
    )
    losses = []
    for scores in outputs:
        labels = torch.zeros((scores.shape[0], *scores.shape[2:]), dtype=torch.int64, device=scores.device)
        losses.append(nn.functional.cross_entropy(scores, labels))
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


# Which head a configuration is checked with, most specific first.
_HEADS = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForZeroShotObjectDetection",
    "AutoModelForImageClassification",
    "AutoModelForVideoClassification",
    "AutoModelForAudioClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForSemanticSegmentation",
    "AutoModelForObjectDetection",
    "AutoModelForDepthEstimation",
    "AutoModel",
)
#: What a model may call its main input: tokens, images, a spectrogram, a waveform.
_INPUTS = ("input_ids", "inputs", "pixel_values", "input_features", "input_values")
#: Heads that are trained on tokens, and those that compare images with texts.
_WRITING = _HEADS[:5]
_COMPARING = ("AutoModelForZeroShotImageClassification", "AutoModelForZeroShotObjectDetection")


def _transformers(name: str, options: InputOptions) -> Target:
    transformers = _need("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    config = _config(transformers, name, {})
    if options.arguments:
        known = {*vars(config), *getattr(config, "attribute_map", ())}
        config = _config(transformers, name, _named(options.arguments, known, f"hf:{name}"))
    head, mapping = _head(transformers, config)
    # Experts as one grouped product: the loop over experts depends on the data.
    if hasattr(config, "num_experts_per_tok"):
        config._experts_implementation = "grouped_mm"
    # Some sequence-to-sequence configurations leave it to the checkpoint, and shifting the labels needs it.
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    notes = []
    if getattr(config, "apply_spec_augment", False) and options.device == "meta":
        config.apply_spec_augment = False
        notes.append("SpecAugment is left out: which frames it masks depends on values.")
    model = _build(lambda: head.from_config(config), f"hf:{name}", options.device)
    # It looks for padding in the input's values, only to warn.
    for part in model.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = _silent
    if options.specs:
        return Target(model, parse_inputs(options.specs, options.device), f"hf:{name}")
    inputs = _transformers_inputs(model, config, mapping, options)
    limit = _Limit.of(model, config)
    shorter = limit.hint if 0 < limit.tokens < (options.seq or 0) else ""
    if shorter:
        notes.append(f"Longer than trained for: {limit}.")
    if "pixel_values" in inspect.signature(model.forward).parameters.keys() - inputs.keys():
        notes.append("The inputs are text alone: what the model does with images is left out.")
    hint = shorter or _others(inputs)
    return Target(model, inputs, f"hf:{name}", notes=tuple(notes), hint=hint, shorter=shorter)


def _others(inputs: Mapping[str, Any] | tuple[Any, ...]) -> str:
    """What to do where a model does not take the inputs that were made for it."""
    return (
        f"The inputs were made for it here: {'; '.join(describe_inputs(inputs))}. Where it wants others, "
        'give each of them: --input "name: type[sizes]"; or return (model, inputs) from a factory: '
        "file.py:factory."
    )


def _silent(*args: Any, **kwargs: Any) -> None:
    return None


def _config(transformers: Any, name: str, arguments: Mapping[str, int]) -> Any:
    if name.endswith(".json") or os.sep in name:
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise TargetError(f"there is no configuration file {path}")
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise TargetError(f"not a JSON file ({error})", where=str(path)) from error
        model_type = values.pop("model_type", None) if isinstance(values, dict) else None
        if model_type is None:
            raise TargetError("the configuration names no model_type", where=str(path))
        return _guarded(
            lambda: transformers.AutoConfig.for_model(
                _known_type(transformers, model_type), **{**values, **arguments}
            ),
            str(path),
        )
    return _guarded(
        lambda: transformers.AutoConfig.for_model(_known_type(transformers, name), **arguments), f"hf:{name}"
    )


def _known_type(transformers: Any, model_type: str) -> str:
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        near = _near(model_type, known)
        raise TargetError(
            f"transformers has no model type {model_type!r}",
            hint=f"Did you mean {' or '.join(near)}?"
            if near
            else "Give a model type such as gpt2, or a config.json.",
        )
    return model_type


def _head(transformers: Any, config: Any) -> tuple[Any, str]:
    for architecture in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, architecture, None)
        if cls is not None:
            return _FromClass(cls), _kind_of(transformers, config, cls)
    for name, auto in _heads_of(transformers, config):
        return auto, name
    raise TargetError(f"transformers has no model for {type(config).__name__}")


class _FromClass:
    """A model class with the ``from_config`` of the Auto classes."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def from_config(self, config: Any) -> Any:
        return self._cls(config)


def _heads_of(transformers: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """The heads that a configuration has models with, and the Auto class of each."""
    for name in _HEADS:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            yield name, auto


def _kind_of(transformers: Any, config: Any, cls: Any) -> str:
    """The head of a model class; of one with none of those known here, a plain model's."""
    for name, auto in _heads_of(transformers, config):
        found = auto._model_mapping[type(config)]
        if cls in (found if isinstance(found, tuple) else (found,)):
            return name
    return "AutoModel"


def _transformers_inputs(model: Any, config: Any, head: str, options: InputOptions) -> dict[str, Any]:
    """Inputs by the model's own main input name, and labels for its head."""
    limit = _Limit.of(model, config)
    seq = options.seq or min(DEFAULT_SEQUENCE, limit.tokens or DEFAULT_SEQUENCE)
    if limit.starts_behind_padding and seq > limit.tokens:
        raise TargetError(f"{seq} tokens are too long: {limit}", hint=limit.hint)
    arguments = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main not in arguments and "pixel_values" in arguments:
        main = "pixel_values"  # a part of a larger model, which does not say so
    if main not in _INPUTS:
        raise UsageError(
            f"the model's input is called {main}, and what it holds is not known here",
            hint=f'Say it: --input "{main}: float32[…]", and the labels in the same way, or --infer.',
        )
    compares = head in _COMPARING  # images with texts
    # Where tokens stand for images, which ones do depends on values.
    beside = "pixel_values" in arguments and not any("image_token" in name for name in vars(config))
    describes = (
        (compares or head == "AutoModelForImageTextToText")
        and main == "pixel_values"
        and "input_ids" in arguments
    )
    sees = compares or main == "pixel_values" or (beside and head != "AutoModelForImageTextToText")
    writes = options.train and head in _WRITING and "labels" in arguments
    decodes = (
        not options.train
        and getattr(config, "is_encoder_decoder", False)
        and "decoder_input_ids" in arguments
    )
    if not sees:
        options.refuse_sizes("the model takes no images", ["image_size"])
    if main in ("pixel_values", "input_features") and not (describes or writes or decodes):
        options.refuse_sizes("the model takes no tokens", ["seq"])
    video = head == "AutoModelForVideoClassification" and hasattr(config, "num_frames")
    clip = [config.num_frames] if video else []
    images = DEFAULT_CLIP_BATCH if clip else DEFAULT_IMAGE_BATCH
    batch = options.batch or (images if sees else DEFAULT_TEXT_BATCH)
    inputs: dict[str, Any] = {}
    if sees:
        channels = getattr(config, "num_channels", 3)
        shape = (batch, *clip, channels, *_sides(config, options.image_size))
        inputs["pixel_values"] = make(shape, torch.float32, options.device)
    if main == "input_features":
        inputs[main] = make((batch, *_spectrogram(config)), torch.float32, options.device)
    elif main == "input_values":
        bins = getattr(config, "num_mel_bins", None)  # of a spectrogram; a waveform has none
        length = options.seq or (config.max_length if bins else 16000 * 5)
        sizes = (batch, length, bins) if bins else (batch, length)
        if hasattr(config, "codebook_size"):  # a codec of sound, which may have several channels
            sizes = (batch, getattr(config, "audio_channels", 1), length)
        inputs[main] = make(sizes, torch.float32, options.device)
    elif main != "pixel_values" or describes:
        inputs["input_ids" if describes else main] = make((batch, seq), torch.int64, options.device)
    if writes:
        inputs["labels"] = make((batch, seq), torch.int64, options.device)
    elif decodes:
        inputs["decoder_input_ids"] = make((batch, seq), torch.int64, options.device)
    elif options.train and head == "AutoModelForSemanticSegmentation":
        inputs["labels"] = make((batch, *inputs[main].shape[-2:]), torch.int64, options.device)
    elif options.train and head == "AutoModelForObjectDetection":
        if options.device != "meta":  # which box is to be which object depends on values
            inputs["labels"] = detection.transformers_labels(batch, options.device)
    elif options.train and compares:
        if "return_loss" in arguments:
            inputs["return_loss"] = True
    elif options.train and head.endswith("Classification"):
        inputs["labels"] = make((batch,), torch.int64, options.device)
    return inputs


@dataclass(frozen=True, slots=True)
class _Limit:
    """The most tokens that a transformers model is for.

    Attributes:
        tokens: How many; 0 where the configuration does not say.
        name: What the configuration calls it.
        starts_behind_padding: Positions are counted from the tokens' values, behind the row of padding.
    """

    tokens: int = 0
    name: str = ""
    starts_behind_padding: bool = False

    @classmethod
    def of(cls, model: nn.Module, config: Any) -> _Limit:
        """The limit of a model by its configuration and its table of positions."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        for name in ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx"):
            rows = getattr(text, name, None)
            if isinstance(rows, int) and rows > 2:
                tables = (m for path, m in model.named_modules() if "position" in path)
                own = (m for m in tables if isinstance(m, nn.Embedding) and m.num_embeddings == rows)
                first = next((m.padding_idx + 1 for m in own if m.padding_idx is not None), 0)
                return cls(rows - first, name, first > 0)
        return cls()

    def __str__(self) -> str:
        return f"the configuration is for at most {self.tokens} tokens ({self.name})"

    @property
    def hint(self) -> str:
        """What to do with more."""
        return (
            f"Take --seq {self.tokens} or less ({self.name} of the configuration), or set it in a "
            "config.json and check that: hf:config.json."
        )


def _spectrogram(config: Any) -> tuple[int, int]:
    """Bins and frames of the spectrograms a configuration is for, in the order the model takes them."""
    for name in ("input_feat_per_channel", "feature_projection_input_dim"):
        if bins := getattr(config, name, 0):
            return getattr(config, "max_source_positions", DEFAULT_FRAMES), bins
    return getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)


def _sides(config: Any, asked: int | None) -> tuple[int, ...]:
    """Height and width of the images a configuration is for."""
    own = getattr(config, "image_size", None) or getattr(
        getattr(config, "vision_config", None), "image_size", None
    )
    size = asked or own or DEFAULT_IMAGE_SIZE
    return (size, size) if isinstance(size, int) else tuple(size)
