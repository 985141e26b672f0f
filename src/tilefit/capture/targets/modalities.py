"""Inputs of a model of transformers: what each input holds, by its name, and what a head is trained on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilefit.capture import detection
from tilefit.capture.inputs import (
    DEFAULT_CLIP_BATCH,
    DEFAULT_IMAGE_BATCH,
    DEFAULT_IMAGE_SIZE,
    DEFAULT_TEXT_BATCH,
    make,
)
from tilefit.errors import TargetError, UsageError
from tilefit.options import TargetOptions

_DEFAULT_SEQUENCE = 1024
#: Of a spectrogram: ten seconds at a hundred frames each.
_DEFAULT_FRAMES = 1000
#: Of a waveform: five seconds at the 16 kHz of speech models.
_DEFAULT_SAMPLES = 5 * 16000


@dataclass(frozen=True, slots=True)
class TokenLimit:
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
    def of(cls, model: nn.Module, config: Any) -> TokenLimit:
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


@dataclass(frozen=True)
class _Sample:
    """What the inputs of a model depend on.

    Attributes:
        config: The model's configuration.
        head: The Auto class it has the head of.
        main: What it calls its main input.
        arguments: Names of all its inputs.
        options: What the user said.
        seq: Tokens.
    """

    config: Any
    head: str
    main: str
    arguments: Collection[str]
    options: TargetOptions
    seq: int

    @property
    def described(self) -> bool:
        """It takes images, each with a text."""
        paired = HEADS[self.head] is _pairs or self.head == "AutoModelForImageTextToText"
        return paired and self.main == "pixel_values" and "input_ids" in self.arguments

    @property
    def sees(self) -> bool:
        """It takes images."""
        # Where tokens stand for images, which ones do depends on values.
        beside = "pixel_values" in self.arguments and not any("image_token" in n for n in vars(self.config))
        return (
            HEADS[self.head] is _pairs
            or self.main == "pixel_values"
            or (beside and self.head != "AutoModelForImageTextToText")
        )

    @property
    def writes(self) -> bool:
        """It is trained on tokens."""
        return self.options.train and HEADS[self.head] is _tokens and "labels" in self.arguments

    @property
    def decodes(self) -> bool:
        """It is not trained, and takes the tokens it has written so far."""
        encodes = getattr(self.config, "is_encoder_decoder", False)
        return not self.options.train and encodes and "decoder_input_ids" in self.arguments

    @property
    def clip(self) -> tuple[int, ...]:
        """Frames of a clip; nothing for an image."""
        video = self.head == "AutoModelForVideoClassification" and hasattr(self.config, "num_frames")
        return (self.config.num_frames,) if video else ()

    @property
    def batch(self) -> int:
        images = DEFAULT_CLIP_BATCH if self.clip else DEFAULT_IMAGE_BATCH
        return self.options.batch or (images if self.sees else DEFAULT_TEXT_BATCH)

    def tensor(self, sizes: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A batch of samples of these sizes."""
        return make((self.batch, *sizes), dtype, self.options.device)


# ---- sizes of a sample ---------------------------------------------------------------------------


def _text(sample: _Sample) -> tuple[int, ...]:
    return (sample.seq,)


def _image(sample: _Sample) -> tuple[int, ...]:
    """Frames of a clip, channels, height and width, as the configuration is for."""
    config = sample.config
    own = getattr(config, "image_size", None) or getattr(
        getattr(config, "vision_config", None), "image_size", None
    )
    size = sample.options.image_size or own or DEFAULT_IMAGE_SIZE
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return (*sample.clip, getattr(config, "num_channels", 3), *sides)


def _spectrogram(sample: _Sample) -> tuple[int, ...]:
    """Bins and frames of the spectrograms a configuration is for, in the order the model takes them."""
    config = sample.config
    for name in ("input_feat_per_channel", "feature_projection_input_dim"):
        if bins := getattr(config, name, 0):
            return getattr(config, "max_source_positions", _DEFAULT_FRAMES), bins
    return getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)


def _sound(sample: _Sample) -> tuple[int, ...]:
    """Samples of a waveform; channels before them for a codec, which may have several; or frames and bins."""
    config = sample.config
    bins = getattr(config, "num_mel_bins", None)  # of a spectrogram; a waveform has none
    length = sample.options.seq or (config.max_length if bins else _DEFAULT_SAMPLES)
    if hasattr(config, "codebook_size"):
        return getattr(config, "audio_channels", 1), length
    return (length, bins) if bins else (length,)


@dataclass(frozen=True, slots=True)
class _Input:
    """What an input holds.

    Attributes:
        sizes: Of one sample.
        dtype: Of its elements.
        taken: Whether a model takes it.
        option: The size that the user can give of it; empty where its sizes are the model's.
    """

    sizes: Callable[[_Sample], tuple[int, ...]]
    dtype: torch.dtype
    taken: Callable[[_Sample], bool]
    option: str = ""


#: By name, in the order they are given in.
_INPUTS = {
    "pixel_values": _Input(_image, torch.float32, lambda s: s.sees, "image_size"),
    "input_features": _Input(_spectrogram, torch.float32, lambda s: s.main == "input_features"),
    "input_values": _Input(_sound, torch.float32, lambda s: s.main == "input_values", "seq"),
    "input_ids": _Input(_text, torch.int64, lambda s: s.main == "input_ids" or s.described, "seq"),
    "inputs": _Input(_text, torch.int64, lambda s: s.main == "inputs", "seq"),
    "decoder_input_ids": _Input(_text, torch.int64, lambda s: s.decodes, "seq"),
}
_MAIN = _INPUTS.keys() - {"decoder_input_ids"}


# ---- what a head is trained on -------------------------------------------------------------------


def _tokens(sample: _Sample, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"labels": sample.tensor(_text(sample))} if sample.writes else {}


def _pixels(sample: _Sample, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"labels": sample.tensor(inputs[sample.main].shape[-2:])}


def _objects(sample: _Sample, inputs: dict[str, Any]) -> dict[str, Any]:
    device = sample.options.device
    # Which box is to be which object depends on values.
    return {} if device == "meta" else {"labels": detection.transformers_labels(sample.batch, device)}


def _pairs(sample: _Sample, inputs: dict[str, Any]) -> dict[str, Any]:
    """Which text belongs to which image."""
    return {"return_loss": True} if "return_loss" in sample.arguments else {}


def _class(sample: _Sample, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"labels": sample.tensor(())}


#: Which head a configuration is checked with, most specific first, and what it takes to be trained.
HEADS: dict[str, Callable[[_Sample, dict[str, Any]], dict[str, Any]] | None] = {
    "AutoModelForSpeechSeq2Seq": _tokens,
    "AutoModelForSeq2SeqLM": _tokens,
    "AutoModelForMaskedLM": _tokens,
    "AutoModelForCausalLM": _tokens,
    "AutoModelForImageTextToText": _tokens,
    "AutoModelForZeroShotImageClassification": _pairs,
    "AutoModelForZeroShotObjectDetection": _pairs,
    "AutoModelForImageClassification": _class,
    "AutoModelForVideoClassification": _class,
    "AutoModelForAudioClassification": _class,
    "AutoModelForSequenceClassification": _class,
    "AutoModelForSemanticSegmentation": _pixels,
    "AutoModelForObjectDetection": _objects,
    "AutoModelForDepthEstimation": None,
    "AutoModel": None,
}


def inputs_of(
    model: Any, config: Any, head: str, options: TargetOptions, limit: TokenLimit
) -> dict[str, Any]:
    """Inputs by the model's own main input name, and labels for its head.

    Raises:
        TargetError: more tokens were asked for than the model has positions for.
        UsageError: the main input is not known here, or a size was given that none of them has.
    """
    seq = options.seq or min(_DEFAULT_SEQUENCE, limit.tokens or _DEFAULT_SEQUENCE)
    if limit.starts_behind_padding and seq > limit.tokens:
        raise TargetError(f"{seq} tokens are too long: {limit}", hint=limit.hint)
    arguments = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main not in arguments and "pixel_values" in arguments:
        main = "pixel_values"  # a part of a larger model, which does not say so
    if main not in _MAIN:
        raise UsageError(
            f"the model's input is called {main}, and what it holds is not known here",
            hint=f'Say it: --input "{main}: float32[…]", and the labels in the same way, or --infer.',
        )
    sample = _Sample(config, head, main, arguments, options, seq)
    taken = {name: known for name, known in _INPUTS.items() if known.taken(sample)}
    sized = {known.option for known in taken.values()} | ({"seq"} if sample.writes else set())
    for option, what in (("image_size", "images"), ("seq", "tokens")):
        if option not in sized:
            options.refuse_sizes(f"the model takes no {what}", [option])
    inputs: dict[str, Any] = {
        name: sample.tensor(known.sizes(sample), known.dtype) for name, known in taken.items()
    }
    wanted = HEADS[head] if options.train else None
    return inputs | wanted(sample, inputs) if wanted else inputs
