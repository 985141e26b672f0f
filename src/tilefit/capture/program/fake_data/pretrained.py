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
from tilefit.units import count

#: No tokenizer of the hub has fewer: bytes take 256.
_FEWEST_TOKENS = 200
#: Letters of a token: words of English take about 1.3 tokens.
_LETTERS = 6
#: How a dialogue is one text.
_CHAT = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}"
#: What follows the first digit of a number of parameters in a name: 7b, 1.5b, 360m, 1b7.
_SIZE = r"\d*(?:[._]\d+)?[bm]\d?(?![a-z0-9])"
#: Names are rounded, and may leave embeddings out: a choice.
_SAME_SIZE = 1.6


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
            lambda model, *a, **k: f"a checkpoint of {type(model).__name__}",
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
        sizes: dict[str, Any] = next(
            (sizes for part, sizes in KNOWN["checkpoints"].items() if part in name.lower()), {}
        )
        kind = (
            getattr(cls, "model_type", "")
            or sizes.get("model_type")
            or _type_in(name, [*CONFIG_MAPPING.keys()])
        )
        if not kind:
            self._sources.note(f"the configuration of {name}", PUT_IT_THERE)
            raise OSError(f"{name} names no type of model")
        self._sources.state(
            f"the configuration of {name}",
            f"that of {kind} in transformers" + "".join(f", {key} {size}" for key, size in sizes.items()),
        )
        values = {"model_type": kind, "architectures": _architectures(kind), **sizes}
        where = KNOWN["from_pretrained"]["where"].split()
        return values, {key: value for key, value in kwargs.items() if key not in where}

    def model(self, cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """With weights that nobody has set."""
        import torch

        if config is None:
            config, _ = cls.config_class.from_pretrained(name, return_unused_kwargs=True, **kwargs)
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        options = {key: kwargs[key] for key in ("attn_implementation",) if key in kwargs}
        if isinstance(dtype, str) and dtype != "auto":
            dtype = getattr(torch, dtype)
        if isinstance(dtype, torch.dtype):
            options["dtype"] = dtype
        spread = kwargs.get("device_map") not in (None, "cpu")
        with torch.device("cuda" if spread else "cpu"), _without_initialization():
            model = cls._from_config(config, **options)
        if hasattr(model, "tie_weights"):  # which is left out with the initialization
            model.tie_weights()
        model.config.name_or_path = str(name)
        self._sources.state(f"{cls.__name__} {name}", "random weights" + _other_size(str(name), model))
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
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=limit, chat_template=_CHAT, **special
        )

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


def _architectures(kind: str) -> list[str] | None:
    """The class that checkpoints of a type are stored from, by the first kind of task that has one."""
    tables = import_module("transformers.models.auto.modeling_auto")
    for task in (
        "FOR_SEQ_TO_SEQ_CAUSAL_LM_",
        "FOR_SPEECH_SEQ_2_SEQ_",
        "FOR_MASKED_LM_",
        "FOR_CAUSAL_LM_",
        "",
    ):
        if found := getattr(tables, f"MODEL_{task}MAPPING_NAMES", {}).get(kind):
            return [found if isinstance(found, str) else found[0]]
    return None


def _is_empty(tokenizer: Any, cls: Any, name: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a tokenizer was made without its files: it then knows little but special tokens."""
    return not os.path.isdir(str(name)) and len(tokenizer) < _FEWEST_TOKENS


def _type_in(name: str, types: list[str]) -> str:
    """The type of model that the name of a checkpoint has in it, the first and of these the longest; or none.

    The 2 of ``gemma-2b`` is its size, that of ``gemma-2-9b`` a part of its type.
    """
    _, slash, own = name.lower().rpartition("/")
    for text, begins in ((own, ""), (name.lower(), "(?<![a-z])"))[: 2 if slash else 1]:
        found = []
        for kind in types:
            spelt = "[^a-z0-9]*".join(re.sub(r"[^a-z0-9]", "", kind))
            ends = rf"(?!\d|{_SIZE})" if kind[-1].isdigit() else ""
            if match := re.search(begins + spelt + ends, text):
                found.append((match.start(), -len(kind), kind))
        if found:
            return min(found)[2]
    return ""


def _other_size(name: str, model: Any) -> str:
    """A remark, where a name tells of another number of parameters than a model has."""
    said = re.search(rf"(?<![\d.a-z])\d{_SIZE}", name.lower())
    if said is None:
        return ""
    unit = 1e9 if "b" in said[0] else 1e6
    number = float(re.sub("[_bm]", ".", said[0]).removesuffix("."))
    parameters = sum(each.numel() for each in model.parameters())
    if not 1 / _SAME_SIZE < number * unit / parameters < _SAME_SIZE:
        return f" of {count(parameters)} parameters, not {said[0].upper()}: put its config.json there"
    return ""


def _without_initialization() -> Any:
    for module in ("initialization", "modeling_utils"):
        with suppress(ImportError, AttributeError):
            return import_module(f"transformers.{module}").no_init_weights()
    return nullcontext()
