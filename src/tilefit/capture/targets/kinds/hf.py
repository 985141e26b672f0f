"""``hf:<type or config.json>``: a model of transformers, by its configuration."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilefit.capture.inputs import parse_inputs
from tilefit.capture.targets.base import (
    Target,
    build,
    guarded,
    inputs_hint,
    library,
    named_sizes,
    unknown,
)
from tilefit.capture.targets.modalities import HEADS, TokenLimit, inputs_of
from tilefit.errors import TargetError
from tilefit.options import TargetOptions


def load(name: str, options: TargetOptions) -> Target:
    """A transformers model of a type, or of a configuration."""
    transformers = library("transformers")
    transformers.logging.set_verbosity_error()
    target = f"hf:{name}"
    config = _config(transformers, name, {})
    if options.arguments:
        known = {*vars(config), *getattr(config, "attribute_map", ())}
        config = _config(transformers, name, named_sizes(options.arguments, known, target))
    model_class, head = _model_class(transformers, config)
    notes = _without_values(config, options)
    if head != "AutoModel" and not getattr(config, "architectures", None):
        config.architectures = []  # where an Auto class has several models, it looks through them
    model = build(lambda: model_class(config), target, options.device)
    # It looks for padding in the input's values, only to warn.
    for part in model.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = _silent
    if options.input:
        return Target(model, parse_inputs(options.input, options.device), target)
    limit = TokenLimit.of(model, config)
    inputs = inputs_of(model, config, head, options, limit)
    shorter = limit.hint if 0 < limit.tokens < (options.seq or 0) else ""
    if shorter:
        notes.append(f"Longer than trained for: {limit}.")
    if "pixel_values" in inspect.signature(model.forward).parameters.keys() - inputs.keys():
        notes.append("The inputs are text alone: what the model does with images is left out.")
    hint = shorter or inputs_hint(inputs)
    return Target(model, inputs, target, notes=tuple(notes), hint=hint, shorter=shorter)


def repeated_layers(name: str, arguments: Mapping[str, int]) -> tuple[str, int]:
    """What a configuration calls the number of its layers, and how many there are; 0 where they differ.

    Raises:
        TargetError: there is no such model.
    """
    transformers = library("transformers")
    transformers.logging.set_verbosity_error()
    config = _config(transformers, name, {})
    known = {*vars(config), *getattr(config, "attribute_map", ())}
    sizes = named_sizes(arguments, known, f"hf:{name}")
    own = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    count = sizes.get(own, sizes.get("num_hidden_layers", getattr(config, own, 0)))
    kinds = {*(getattr(config, "layer_types", None) or ())}
    differ = len(kinds) > 1 or getattr(config, "is_encoder_decoder", False)
    differ = differ or any(getattr(config, each, None) for each in _UNLIKE)
    return own, 0 if differ or not isinstance(count, int) else count


#: Where a configuration makes some of its layers unlike the others.
_UNLIKE = ("first_k_dense_replace", "mlp_only_layers", "layers_block_type", "attn_layer_period")


def _without_values(config: Any, options: TargetOptions) -> list[str]:
    """Set what lets a model run where values are not known; notes of what that changes."""
    # Experts as one grouped product: the loop over experts depends on the data.
    if hasattr(config, "num_experts_per_tok"):
        config._experts_implementation = "grouped_mm"
    # Some sequence-to-sequence configurations leave it to the checkpoint, and shifting the labels needs it.
    encodes = getattr(config, "is_encoder_decoder", False)
    if encodes and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    if getattr(config, "languages", None) and getattr(config, "default_language", "") is None:
        config.default_language = config.languages[0]
    if getattr(config, "apply_spec_augment", False) and options.device == "meta":
        config.apply_spec_augment = False
        return ["SpecAugment is left out: which frames it masks depends on values."]
    return []


def _silent(*args: Any, **kwargs: Any) -> None:
    return None


def _config(transformers: Any, name: str, arguments: Mapping[str, int]) -> Any:
    """The configuration of a model type, in a file or a folder, or of a model of the hub that is here."""
    model_type: Any = name
    where = f"hf:{name}"
    values: Any = {}
    known = list(transformers.CONFIG_MAPPING.keys())
    if name not in known:
        path = _file(name, known)
        where = str(path)
        try:
            values = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise TargetError(f"not a JSON file ({error})", where=where) from error
        model_type = values.pop("model_type", None) if isinstance(values, dict) else None
        if model_type is None:
            raise TargetError("the configuration names no model_type", where=where)
    if model_type not in known:
        raise unknown("transformers has no model type", model_type, known, "")
    return guarded(lambda: transformers.AutoConfig.for_model(model_type, **{**values, **arguments}), where)


def _file(name: str, known: Sequence[str]) -> Path:
    """The configuration that a name that is no model type stands for.

    Raises:
        TargetError: there is none.
    """
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path
    if name.endswith(".json"):
        raise TargetError(f"there is no configuration file {path}")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        kept = try_to_load_from_cache(name, "config.json")
        if isinstance(kept, str):
            return Path(kept)
    # Nothing is downloaded, but what a name of the hub begins with says which type is meant.
    begun = name.rpartition("/")[2].lower().replace("-", "_")
    types = sorted((each for each in known if begun.startswith(each.replace("-", "_"))), key=len)
    hint = "Give a model type such as gpt2, or a config.json."
    if types:
        hint = f"Nothing is downloaded: give the type, hf:{types[-1]}, or the model's config.json."
    raise unknown("transformers has no model type", name, [] if types else known, hint)


def _model_class(transformers: Any, config: Any) -> tuple[Any, str]:
    """What makes a model of a configuration, and its head: the one that the configuration names, or else the
    most specific that there is."""
    heads = {
        name: auto
        for name in HEADS
        if (auto := getattr(transformers, name, None)) is not None and type(config) in auto._model_mapping
    }
    for architecture in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, architecture, None)
        if cls is not None:
            return cls, next(
                (name for name, auto in heads.items() if cls in _models(auto, config)), "AutoModel"
            )
    if not heads:
        raise TargetError(f"transformers has no model for {type(config).__name__}")
    name, auto = next(iter(heads.items()))
    return auto.from_config, name


def _models(auto: Any, config: Any) -> tuple[Any, ...]:
    """The classes of models that an Auto class has for a configuration."""
    classes = auto._model_mapping[type(config)]
    return classes if isinstance(classes, tuple) else (classes,)
