"""Data sets of torchvision, and of timm's scripts, that are not there."""

from __future__ import annotations

import functools
import inspect
import io
from types import ModuleType
from typing import Any, NamedTuple

from tilefit.capture.program.fake_data import made
from tilefit.capture.program.fake_data.sources import Sources
from tilefit.capture.program.known import KNOWN
from tilefit.capture.program.late import Change


class _Facts(NamedTuple):
    """What is known of a data set.

    Attributes:
        train, test: Images.
        classes: How many there are; 0 where the target is something else.
        size: Width and height.
        mode: Of PIL.
        layout: How its attribute ``data`` holds the images: ``hw`` or ``hwc`` or ``chw``; with ``tensor``
            as one; empty where each image is a file.
        target: ``class``, ``mask``, ``boxes``, ``captions``, ``attributes``.
    """

    train: int
    test: int
    classes: int
    size: tuple[int, int] = made.PHOTO
    mode: str = "RGB"
    layout: str = ""
    target: str = "class"


_UNKNOWN = _Facts(10000, 2000, 100)
_KNOWN = {
    name: _Facts(**{**facts, "size": tuple(facts.get("size", made.PHOTO))})
    for name, facts in KNOWN["images"].items()
}
_STATE = "_tilefit_facts"


def changes(sources: Sources) -> dict[str, Change]:
    """Answers torchvision and timm."""
    return {
        "torchvision.datasets": lambda module: _datasets(sources, module),
        "timm.data.dataset": lambda module: _readers(sources, module),
    }


def _readers(sources: Sources, module: ModuleType) -> None:
    """timm has one for folders, archives and the libraries of data sets; it asserts that a folder exists."""

    def label(name: str, root: Any = None, *args: Any, **kwargs: Any) -> str:
        return f"timm's images in {name or root}"

    def stand_in(*args: Any, **kwargs: Any) -> _Reader:
        sources.state(label(*args, **kwargs), "50000 random photos, 1000 classes")
        return _Reader(sources)

    sources.answer(module, "create_reader", label, stand_in, beside=AssertionError)


class _Reader:
    """As timm's readers are: pairs of a file and a class."""

    def __init__(self, sources: Sources) -> None:
        self._sources, self._labels = sources, made.labels(50000, 1000)
        self.class_to_idx = {f"class{index}": index for index in range(1000)}

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        self._sources.used += 1
        file = io.BytesIO()
        made.image(index).save(file, "JPEG")
        file.seek(0)
        return file, int(self._labels[index])

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """What the image would be called."""
        return f"{index}.jpg"


def _datasets(sources: Sources, module: ModuleType) -> None:
    public = [getattr(module, name) for name in module.__all__]
    kinds = [kind for kind in public if isinstance(kind, type) and issubclass(kind, module.VisionDataset)]
    own = {each for kind in kinds for each in kind.__mro__}
    for kind in own - {module.VisionDataset, module.FakeData}:
        if not kind.__module__.startswith(module.__name__):
            continue
        for method, change in (("__getitem__", _item), ("__len__", _length)):
            if method in vars(kind):
                sources.replace(kind, method, change(vars(kind)[method], sources))
        if "__init__" in vars(kind):
            _answer_making(kind, sources)


def _answer_making(kind: type, sources: Sources) -> None:
    """Make data sets of a class from what is there, without downloads, or from nothing."""
    original: Any = vars(kind)["__init__"]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if "download" in given.arguments:
            given.arguments["download"] = False
        original(*given.args, **given.kwargs)

    def name(self: Any, *args: Any, **kwargs: Any) -> str:
        known = (each for each in type(self).__mro__ if each.__name__ in _KNOWN)
        own = (each for each in type(self).__mro__ if each.__module__.startswith("torchvision."))
        return next(known, next(own)).__name__

    def fill(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        _fill(self, name(self), {**given.arguments, **given.arguments.get("kwargs", {})}, sources)

    sources.replace(kind, "__init__", init)
    sources.answer(kind, "__init__", lambda *a, **k: f"torchvision.datasets.{name(*a, **k)}", fill)


def _fill(self: Any, name: str, given: dict[str, Any], sources: Sources) -> None:
    """Make a data set that could not be made."""
    from torchvision.datasets import VisionDataset

    handed = {key: given.get(key) for key in ("transform", "target_transform", "transforms")}
    VisionDataset.__init__(self, given.get("root") or given.get("img_folder"), **handed)
    facts = _KNOWN.get(name, _UNKNOWN)
    split = next((given[key] for key in ("train", "split", "image_set", "mode") if key in given), True)
    tests = split is False or (isinstance(split, str) and split.startswith(("test", "val")))
    count = facts.test if tests else facts.train
    # Of a class with names for its classes they are kept.
    classes = getattr(self, "classes", None) or [f"class{index}" for index in range(facts.classes)]
    targets = made.labels(count, max(facts.classes, 2))
    vars(self).update(
        {
            _STATE: (facts, count),
            "train": split is True or split == "train",
            "split": split,
            "_labels": targets,
        }
    )
    attributes = {
        "classes": classes,
        "class_to_idx": {each: index for index, each in enumerate(classes)},
        "targets": targets.tolist(),
        "labels": targets,
        "samples": [("image.jpg", each) for each in targets.tolist()] if not facts.layout else None,
    }
    if facts.layout:
        attributes |= _arrays(facts, count, targets)
    for key, value in attributes.items():
        if value is not None and not isinstance(getattr(type(self), key, None), property):
            setattr(self, key, value)
    what = f"{count} random images of {facts.size[0]} x {facts.size[1]}"
    kinds = f", {facts.classes} classes" if facts.classes else ""
    sources.state(f"torchvision.datasets.{name}", what + kinds)


def _arrays(facts: _Facts, count: int, targets: Any) -> dict[str, Any]:
    import numpy as np
    import torch

    width, height = facts.size
    shape = {"hw": (height, width), "hwc": (height, width, 3), "chw": (3, height, width)}[
        facts.layout.split()[0]
    ]
    values = np.frombuffer(np.random.default_rng(3).bytes(count * int(np.prod(shape))), np.uint8)
    data = values.reshape(count, *shape).copy()
    if facts.layout.endswith("tensor"):
        return {"data": torch.from_numpy(data), "targets": torch.from_numpy(targets)}
    return {"data": data}


def _item(original: Any, sources: Sources) -> Any:
    @functools.wraps(original)
    def getitem(self: Any, index: int) -> Any:
        facts, count = vars(self).get(_STATE, (None, 0))
        if facts is None:
            return original(self, index)
        sources.used += 1
        if facts.layout:
            return original(self, index)
        if index >= count:
            raise IndexError(index)
        image, target = made.image(index, facts.mode, facts.size), _target(self, facts, index)
        if self.transforms is not None:
            image, target = self.transforms(image, target)
        return image, target

    return getitem


def _length(original: Any, sources: Sources) -> Any:
    @functools.wraps(original)
    def length(self: Any) -> int:
        facts, count = vars(self).get(_STATE, (None, 0))
        return int(original(self) if facts is None else count)

    return length


def _target(self: Any, facts: _Facts, index: int) -> Any:
    import torch

    label = int(self._labels[index])
    if facts.target == "mask":
        return made.image(index, "L", facts.size).point(lambda value: value * facts.classes // 256)
    if facts.target == "boxes":
        width, height = facts.size
        box = [width * 0.1, height * 0.1, width * 0.5, height * 0.5]
        fields = {"bbox": box, "category_id": label + 1, "area": box[2] * box[3], "iscrowd": 0}
        return [{**fields, "id": each, "image_id": index, "segmentation": []} for each in range(7)]
    if facts.target == "captions":
        return [made.sentence(index * 5 + each, 10) for each in range(5)]
    if facts.target == "attributes":
        return torch.from_numpy(made.labels(40, 2))
    return label
