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
from tilefit.capture.program.late import Change

#: No library asks the network, nor waits for its answer. They read it when they are imported.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}
#: Sizes of checkpoints that are not those of their type's configuration, by a part of their name.
_LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip
_SIZES: dict[str, dict[str, int]] = {
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "roberta-large": {**_LARGE, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    "bert-large": _LARGE,
    "bert-base-cased": {"vocab_size": 28996},
    "roberta-base": {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    "t5-base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5-large": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
}
_SPECIAL = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
    "mask_token": "[MASK]", "bos_token": "<s>", "eos_token": "</s>",
}  # fmt: skip
#: No tokenizer of the hub has fewer: bytes take 256.
_FEWEST_TOKENS = 200
#: Arguments of ``from_pretrained`` that say where to look.
_OF_HUB = frozenset(
    "cache_dir force_download proxies token local_files_only revision trust_remote_code subfolder gguf_file "
    "code_revision use_auth_token _from_pipeline _from_auto _commit_hash".split()
)
#: Letters of a token: words of English take about 1.3 tokens.
_LETTERS = 6


def changes(sources: Sources) -> dict[str, Change]:
    """Answers transformers and timm."""
    os.environ.update(OFFLINE)
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
        sizes = next((sizes for part, sizes in _SIZES.items() if part in name.lower()), {})
        self._sources.state(
            f"the configuration of {name}",
            f"that of {kind} in transformers" + "".join(f", {key} {size}" for key, size in sizes.items()),
        )
        values = {"model_type": kind, **sizes}
        return values, {key: value for key, value in kwargs.items() if key not in _OF_HUB}

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
        pieces = [*_SPECIAL.values(), *(f"piece{index}" for index in range(size - len(_SPECIAL)))]
        tokenizer = Tokenizer(
            models.WordLevel({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\s*\w{{1,{_LETTERS}}}|[^\w\s]"), "isolated")
        encoder_like = "gpt" not in str(name) and "llama" not in str(name).lower()
        if encoder_like:
            special = [(each, pieces.index(each)) for each in ("[CLS]", "[SEP]")]
            tokenizer.post_processor = processors.BertProcessing(special[1], special[0])
        self._sources.state(f"the tokenizer of {name}", f"{size} random tokens, {_LETTERS} letters each")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=limit, **_SPECIAL)

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
