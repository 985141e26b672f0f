"""Made-up data: images, texts, tokens, files. The same ones in every run."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import zipfile
from functools import cache, lru_cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Endings of files that are images.
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")
_TEXTS = (".txt", ".text", ".tokens", ".raw", ".md", ".en", ".de", ".fr")
#: How archives are written, by their ending.
_ARCHIVES: dict[str, Literal["w:", "w:gz", "w:bz2", "w:xz"]] = {
    ".tar": "w:",
    ".tgz": "w:gz",
    ".tbz2": "w:bz2",
    ".bz2": "w:bz2",
    ".xz": "w:xz",
}
#: Width and height of an image whose size nobody knows: about the mean of ImageNet.
PHOTO = (500, 375)
#: Different words of a text, and how many there are altogether; WikiText-2 has as many different ones.
VOCABULARY, WORDS = 33278, 200_000
#: Tokens of unknown vocabularies are below this: as many as bytes have values.
TOKEN_VALUES = 256
#: How many tokens a file of unknown length has.
TOKENS = 1 << 22
#: Different images; the rest repeats them.
_VARIETY = 8


@cache
def _images(mode: str, size: tuple[int, int]) -> list[Any]:
    import numpy as np
    from PIL import Image

    random_values = np.random.default_rng(0)
    channels = () if mode == "L" else (3,)
    # Smooth, as photos are: noise would make files too large and decoders too slow.
    small = (min(size[1], 16), min(size[0], 16), *channels)
    return [
        Image.fromarray(random_values.integers(0, 256, small, dtype=np.uint8)).resize(size)
        for _ in range(_VARIETY)
    ]


def image(index: int = 0, mode: str = "RGB", size: tuple[int, int] = PHOTO) -> Any:
    """A PIL image: ``RGB``, or ``L`` for shades of grey."""
    return _images(mode, size)[index % _VARIETY].copy()


@cache
def encoded(format: str, *, mask: bool = False) -> bytes:
    """An image as a file has it; ``mask``: in shades of grey, of the classes 0 and 1."""
    stream = io.BytesIO()
    made = image(0, "L").point(lambda value: value // 128) if mask else image()
    made.save(stream, format)
    return stream.getvalue()


def labels(count: int, classes: int) -> NDArray[Any]:
    """Random classes, int64[count]."""
    import numpy as np

    return np.random.default_rng(1).integers(0, classes, count)


def tokens(count: int, dtype: Any) -> NDArray[Any]:
    """Random tokens, or numbers from 0 to 1 of a floating-point type."""
    return _tokens(count, dtype).copy()


@lru_cache(maxsize=4)  # programs open a file again for each of their batches
def _tokens(count: int, dtype: Any) -> NDArray[Any]:
    import numpy as np

    kind, values = np.dtype(dtype), np.random.default_rng(2)
    if kind.kind in "iu":
        return values.integers(0, min(TOKEN_VALUES, np.iinfo(kind).max), count).astype(kind)
    return values.random(count).astype(kind)


@cache
def words() -> list[str]:
    """Made-up words of the 65 characters of Shakespeare's texts."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    rest = "ABCDEFGHIJKLMNOPQRSTUVWXYZ!$&',-.3:;?"
    values = random.Random(0)
    made = dict.fromkeys(rest)
    while len(made) < VOCABULARY:
        made["".join(values.choices(letters, k=values.randint(2, 8)))] = None
    return list(made)


def sentence(index: int = 0, length: int = 24) -> str:
    """Some words."""
    return " ".join(random.Random(index).choices(words(), k=length))


@cache
def text() -> str:
    """Lines of 20 words, each word of the vocabulary at least once."""
    values = random.Random(1)
    all_words = [*words(), *values.choices(words(), k=WORDS - VOCABULARY)]
    return "".join(" ".join(all_words[at : at + 20]) + "\n" for at in range(0, WORDS, 20))


def _papers() -> tuple[bytes, str]:
    import numpy as np

    features = np.random.default_rng(4).integers(0, 80, (2708, 1433)) == 0
    rows = (
        f"{at}\t" + "\t".join(map(str, row)) + f"\tclass{at % 7}"
        for at, row in enumerate(features.astype(int))
    )
    return "\n".join(rows).encode(), "2708 papers of 1433 random features, 7 classes"


def _citations() -> tuple[bytes, str]:
    import numpy as np

    pairs = np.random.default_rng(5).integers(0, 2708, (5429, 2))
    return "\n".join(f"{a}\t{b}" for a, b in pairs).encode(), "5429 random citations of 2708 papers"


#: Files whose layout nearly every program for graphs knows.
_CORA = {"cora.content": _papers, "cora.cites": _citations}


def content(name: str) -> tuple[bytes, str] | None:
    """What is in a file or behind an address of this name, and words for it; None where nobody can tell."""
    path = PurePath(name.partition("?")[0])
    suffix = path.suffix.lower()
    stream = io.BytesIO()
    if path.name in _CORA:
        return _CORA[path.name]()
    if suffix in IMAGES:
        return encoded("PNG" if suffix == ".png" else "JPEG"), "a random image of 500 x 375"
    if suffix in _TEXTS:
        return text().encode(), f"{WORDS:,} random words, {VOCABULARY:,} different ones"
    if packed := _ARCHIVES.get(".tgz" if path.name.endswith(".tar.gz") else suffix):
        with tarfile.open(fileobj=stream, mode=packed):
            pass
        return stream.getvalue(), "an empty archive"
    if suffix == ".zip":
        with zipfile.ZipFile(stream, "w"):
            pass
        return stream.getvalue(), "an empty archive"
    if suffix == ".gz" and (inner := content(path.stem)):
        return gzip.compress(inner[0]), inner[1]
    return None
