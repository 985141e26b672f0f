"""Pretrained models, tokenizers and processors of transformers and timm that are not there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from tilefit.capture.program.fake_data.sources import PUT_IT_THERE, Sources
from tilefit.capture.program.known import KNOWN
from tilefit.capture.program.late import Change

#: No tokenizer of the hub has fewer: bytes take 256.
_FEWEST_TOKENS = 200
#: Letters of a token: words of English take about 1.3 tokens.
_LETTERS = 6


def changes(sources: Sources) -> dict[str, Change]:
    """Answers transformers and timm."""
    os.environ.update(KNOWN["offline"])
    stand_ins = _Transformers(sources)

    def pretrained(owner: str, stand_in: Callable[..., Any], **options: Any) -> Change:
        """What a class has or makes of a name is answered."""
        return lambda module: sources.answer(
            getattr(module, owner), "from_pretrained", _named, stand_in, **options
        )

    return {
        # Where it was imported before; else it is tried again and again for half a minute.
        "huggingface_hub.constants": lambda module: sources.replace(module, "HF_HUB_OFFLINE", True),
        "transformers.configuration_utils": stand_ins.configurations,
        "transformers.modeling_utils": pretrained("PreTrainedModel", stand_ins.model),
        "transformers.generation.configuration_utils": pretrained(
            "GenerationConfig", lambda cls, *a, **k: cls()
        ),
        "transformers.models.auto.tokenization_auto": pretrained(
            "AutoTokenizer", stand_ins.tokenizer, lacks=_is_empty
        ),
        "transformers.tokenization_utils_base": pretrained(
            "PreTrainedTokenizerBase", stand_ins.tokenizer, lacks=_is_empty
        ),
        "transformers.models.auto.image_processing_auto": pretrained(
            "AutoImageProcessor", stand_ins.image_processor
        ),
        "transformers.image_processing_base": pretrained("ImageProcessingMixin", stand_ins.processor),
        "transformers.feature_extraction_utils": pretrained("FeatureExtractionMixin", stand_ins.processor),
        "timm.models._builder": lambda module: sources.answer(
            module,
            "load_pretrained",
            lambda model, *a, **k: f"weights of {type(model).__name__}",
            lambda model, *a, **k: sources.state(f"timm {type(model).__name__}", "random weights"),
        ),
    }


def _named(cls: Any, name: Any = "", *args: Any, **kwargs: Any) -> str:
    return f"{cls.__name__}.from_pretrained({str(name)!r})"


class _Transformers:
    """What takes the place of pretrained things."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def configurations(self, module: ModuleType) -> None:
        """Of a type that a name tells."""
        self._sources.answer(
            module.PreTrainedConfig if hasattr(module, "PreTrainedConfig") else module.PretrainedConfig,
            "get_config_dict",
            _named,
            self._configuration,
        )

    def _configuration(self, cls: Any, name: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        from transformers import CONFIG_MAPPING

        name = str(name)

        kind = getattr(cls, "model_type", "") or _type_in(name, [*CONFIG_MAPPING.keys()])
        if not kind:
            self._sources.note(f"the configuration of {name}", PUT_IT_THERE)
            raise OSError(f"{name} names no type of model")
        sizes: dict[str, int] = next(
            (sizes for part, sizes in KNOWN["checkpoints"].items() if part in name.lower()), {}
        )
        self._sources.state(
            f"the configuration of {name}",
            f"that of {kind} in transformers" + "".join(f", {key} {size}" for key, size in sizes.items()),
        )
        values = {"model_type": kind, **sizes}
        where = KNOWN["from_pretrained"]["where"].split()
        return values, {key: value for key, value in kwargs.items() if key not in where}

    def model(self, cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """With weights that nobody has set."""
        import torch

        if config is None:
            sizes = {
                key: value for key, value in kwargs.items() if key in ("num_labels", "id2label", "label2id")
            }
            config = cls.config_class.from_pretrained(name, **sizes)
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        options = {key: kwargs[key] for key in ("attn_implementation",) if key in kwargs}
        if isinstance(dtype, str) and dtype != "auto":
            dtype = getattr(torch, dtype)
        if isinstance(dtype, torch.dtype):
            options["dtype"] = dtype
        spread = kwargs.get("device_map") not in (None, "cpu")
        with torch.device("cuda" if spread else "cpu"), _without_initialization():
            model = cls._from_config(config, **options)
        self._sources.state(f"{cls.__name__} {name}", "random weights")
        return model.eval()

    def tokenizer(self, cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        """That splits words into pieces, most of which it does not know."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
        from transformers import AutoConfig, PreTrainedTokenizerFast

        try:
            config = AutoConfig.from_pretrained(str(name)).get_text_config()
            size, limit = config.vocab_size, getattr(config, "max_position_embeddings", 512)
        except (OSError, ValueError, KeyError, AttributeError):
            size, limit = 32000, 512
        special = KNOWN["tokens"]
        pieces = [*special.values(), *(f"piece{index}" for index in range(size - len(special)))]
        tokenizer = Tokenizer(
            models.WordLevel({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\s*\w{{1,{_LETTERS}}}|[^\w\s]"), "isolated")
        encoder_like = "gpt" not in str(name) and "llama" not in str(name).lower()
        if encoder_like:
            begin, end = ((each, pieces.index(each)) for each in ("[CLS]", "[SEP]"))
            tokenizer.post_processor = processors.BertProcessing(end, begin)
        self._sources.state(f"the tokenizer of {name}", f"{size} random tokens, {_LETTERS} letters each")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=limit, **special)

    def image_processor(self, cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        """With the settings of its type."""
        from transformers import AutoConfig
        from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

        config = AutoConfig.from_pretrained(str(name))
        kinds = IMAGE_PROCESSOR_MAPPING[type(config)]
        found = kinds.values() if isinstance(kinds, dict) else kinds if isinstance(kinds, tuple) else [kinds]
        kind = next(each for each in found if each is not None)
        self._sources.state(f"the image processor of {name}", f"{kind.__name__} as it is made")
        return kind()

    def processor(self, cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        """With the settings of its class."""
        self._sources.state(f"{cls.__name__} {name}", "as it is made")
        return cls()


def _is_empty(tokenizer: Any, cls: Any, name: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a tokenizer was made without its files: it then knows little but special tokens."""
    return not os.path.isdir(str(name)) and len(tokenizer) < _FEWEST_TOKENS


def _type_in(name: str, types: list[str]) -> str:
    """The type of model that the name of a checkpoint begins with or has in it, the longest; or none."""
    own = re.sub(r"[^a-z0-9]", "", name.lower().rpartition("/")[2])
    whole = re.sub(r"[^a-z0-9]", "", name.lower())
    flat = sorted(((re.sub(r"[^a-z0-9]", "", each), each) for each in types), key=lambda pair: -len(pair[0]))
    return next((kind for text in (own, whole) for short, kind in flat if short in text), "")


def _without_initialization() -> Any:
    for module in ("initialization", "modeling_utils"):
        with suppress(ImportError, AttributeError):
            return import_module(f"transformers.{module}").no_init_weights()
    return nullcontext()
