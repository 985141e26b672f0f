"""Data sets of Hugging Face's ``datasets`` that are not there, and the library where it is not installed."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from tilefit.capture.packages import is_installed
from tilefit.capture.program.fake_data import made
from tilefit.capture.program.fake_data.sources import Sources
from tilefit.capture.program.known import KNOWN
from tilefit.capture.program.late import Change

#: Rows of a data set, by split. Tokenizing them takes real time, so they are few.
_ROWS = {"train": 4000, "validation": 500, "test": 500, "unsupervised": 500}

#: What is said in a row of a dialogue: words, by who says them.
_DIALOGUE = {"user": 24, "assistant": 120}


def changes(sources: Sources) -> dict[str, Change]:
    """Answers ``datasets`` where it is installed."""

    def change(module: ModuleType) -> None:
        if not is_installed(getattr(module, "__file__", "")):  # a file of the user's that is called so
            return

        def made_rows(path: str, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
            return _load(sources, path, name, split, module.Dataset.from_dict, module.DatasetDict)

        for function in ("load_dataset", "load_from_disk"):
            sources.answer(module, function, lambda path, *a, **k: f"the data set {path}", made_rows)

    return {"datasets": change}


def datasets_of(sources: Sources) -> ModuleType:
    """A stand-in for the library, where it is not installed."""
    module = ModuleType("datasets")

    def read() -> None:
        sources.used += 1

    kind = type("Dataset", (Rows,), {"read": staticmethod(read)})

    def load_dataset(path: str, name: Any = None, *args: Any, split: Any = None, **kwargs: Any) -> Any:
        return _load(sources, path, name, split, kind, RowsDict)

    module.load_dataset = module.load_from_disk = load_dataset  # type: ignore[attr-defined]
    module.Dataset, module.DatasetDict = kind, RowsDict  # type: ignore[attr-defined]
    module.__version__ = "4.0.0"  # type: ignore[attr-defined]  # where they have these methods
    return module


def _load(
    sources: Sources,
    path: str,
    name: Any,
    split: Any,
    rows: Callable[[dict[str, list[Any]]], Any],
    splits: Callable[[dict[str, Any]], Any],
) -> Any:
    full = f"{path}/{name}" if name else str(path)
    columns_of = KNOWN["columns"]
    known = next((each for each in reversed(columns_of) if each in full.lower()), "")
    columns = (columns_of[known].split() if known else _columns_in_use()) or ["text", "label"]
    classes = next((count for each, count in KNOWN["classes"].items() if each in full.lower()), 2)
    parts = [str(each) for each in ([split] if split else _ROWS)]
    wanted = {part: _ROWS.get(re.split(r"[\[+]", part)[0], _ROWS["train"]) for part in parts}
    tables = {
        part: rows({column: _column(column, count, classes) for column in columns})
        for part, count in wanted.items()
        if split or part != "unsupervised"
    }
    sources.state(
        f"datasets.load_dataset {full}",
        f"random rows ({', '.join(f'{count} {part}' for part, count in wanted.items() if part in tables)}) "
        f"with {', '.join(columns)}" + ("" if known else ", columns by what the program reads"),
    )
    return next(iter(tables.values())) if split else splits(tables)


def _columns_in_use() -> list[str]:
    """What the user's code takes out of mappings, by names that columns have."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    found: dict[str, None] = {}
    for file in sorted(each for each in files if each.endswith(".py") and not is_installed(each)):
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            match node:
                case ast.Subscript(slice=ast.Constant(value=str(name))) if _kind(name):
                    found[name] = None
    return [*found]


def _kind(column: str) -> str:
    """What a column of this name holds; empty where the name does not tell."""
    name = column.lower().rstrip("0123456789")
    return next((kind for kind, names in KNOWN["kinds"].items() if name in names.split()), "")


def _column(name: str, count: int, classes: int) -> list[Any]:
    kind = _kind(name)
    if kind == "label":
        labels: list[Any] = made.labels(count, classes).tolist()
        return labels
    makers: Mapping[str, Callable[[int], Any]] = {
        "number": lambda index: index,
        "image": lambda index: made.image(index, size=(32, 32) if classes in (10, 100) else made.PHOTO),
        "words": lambda index: made.sentence(index).split(),
        "tags": lambda index: made.labels(24, classes).tolist(),
        "answers": lambda index: {"text": [made.sentence(index, 120).split()[3]], "answer_start": [20]},
        "messages": lambda index: [
            {"role": role, "content": made.sentence(index, words)} for role, words in _DIALOGUE.items()
        ],
        "audio": lambda index: {"array": made.tokens(160_000, "float32"), "sampling_rate": 16000},
        "text": lambda index: made.sentence(index, 120 if name in ("text", "context", "article") else 24),
    }
    return [makers[kind or "text"](index) for index in range(count)]


class Rows:
    """The part of ``datasets.Dataset`` that training programs use, over columns in memory."""

    #: Called when rows are read.
    read: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, columns: Mapping[str, Sequence[Any]], format: str | None = None) -> None:
        self._columns = dict(columns)
        self._format = format
        self.features = {name: _Feature(values) for name, values in self._columns.items()}

    @classmethod
    def from_dict(cls, columns: Mapping[str, Sequence[Any]], **kwargs: Any) -> Rows:
        """Of its columns."""
        return cls(columns)

    def _of(self, columns: Mapping[str, Sequence[Any]]) -> Rows:
        return type(self)(columns, self._format)

    @property
    def column_names(self) -> list[str]:
        """In order."""
        return [*self._columns]

    @property
    def num_rows(self) -> int:
        """How many."""
        return len(self)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        self.read()
        if isinstance(key, str):
            return self._shown(self._columns[key])
        if isinstance(key, int | slice):
            return {name: self._shown(values[key]) for name, values in self._columns.items()}
        return {name: self._shown([values[each] for each in key]) for name, values in self._columns.items()}

    def __getitems__(self, keys: Sequence[int]) -> list[Any]:
        return [self[key] for key in keys]

    def _shown(self, value: Any) -> Any:
        import torch

        is_number = isinstance(value, int | float | list)
        return torch.tensor(value) if self._format == "torch" and is_number else value

    def map(
        self, function: Callable[..., Any] | None = None, batched: bool = False, batch_size: int = 1000,
        remove_columns: Any = (), with_indices: bool = False, fn_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Rows:  # fmt: skip
        """The rows with what a function makes of them."""
        assert function is not None
        extra = dict(fn_kwargs or {})
        results: dict[str, list[Any]] = {}
        step = batch_size if batched else 1
        for start in range(0, len(self), step):
            rows: Any = self[start : start + step] if batched else self[start]
            index: Any = [*range(start, min(start + step, len(self)))] if batched else start
            for name, values in dict(function(rows, *([index] if with_indices else []), **extra)).items():
                results.setdefault(name, []).extend(values if batched else [values])
        return self._of({**self.remove_columns(remove_columns or ())._columns, **results})

    def filter(self, function: Callable[..., bool], **kwargs: Any) -> Rows:
        """The rows of which a function is true."""
        return self.select([index for index in range(len(self)) if function(self[index])])

    def select(self, indices: Any) -> Rows:
        """Some rows."""
        chosen = [*indices]
        return self._of({name: [v[index] for index in chosen] for name, v in self._columns.items()})

    def shuffle(self, *args: Any, **kwargs: Any) -> Rows:
        """The rows; they are random."""
        return self

    def take(self, count: int) -> Rows:
        """The first rows."""
        return self.select(range(min(count, len(self))))

    def train_test_split(self, test_size: float = 0.25, **kwargs: Any) -> RowsDict:
        """In two."""
        tests = int(test_size if test_size > 1 else len(self) * test_size)
        parts = {"train": range(len(self) - tests), "test": range(len(self) - tests, len(self))}
        return RowsDict({name: self.select(part) for name, part in parts.items()})

    def remove_columns(self, names: Any) -> Rows:
        """Without some columns."""
        removed = [names] if isinstance(names, str) else names
        return self.select_columns([name for name in self._columns if name not in removed])

    def rename_column(self, old: str, new: str) -> Rows:
        """With another name for one."""
        return self._of({new if name == old else name: v for name, v in self._columns.items()})

    def select_columns(self, names: Any) -> Rows:
        """With these columns alone."""
        kept = [names] if isinstance(names, str) else names
        return self._of({name: self._columns[name] for name in kept})

    def with_format(self, type: str | None = None, columns: Any = None, **kwargs: Any) -> Rows:
        """With tensors for numbers, where it says ``torch``."""
        return self.__class__({name: self._columns[name] for name in columns or self._columns}, type)

    def set_format(self, type: str | None = None, columns: Any = None, **kwargs: Any) -> None:
        """Likewise, of itself."""
        vars(self).update(vars(self.with_format(type, columns)))


class _Feature:
    """What a column is like."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    @property
    def num_classes(self) -> int:
        """Of labels."""
        return int(max(self._values)) + 1

    @property
    def names(self) -> list[str]:
        """Of labels."""
        return [f"class{index}" for index in range(self.num_classes)]


class RowsDict(dict[str, Rows]):
    """Splits, to each of which what is done to them is done."""

    def __getattr__(self, name: str) -> Any:
        if name == "column_names":
            return {split: rows.column_names for split, rows in self.items()}
        getattr(Rows, name)  # or it fails

        def each(*args: Any, **kwargs: Any) -> Any:
            results = {split: getattr(rows, name)(*args, **kwargs) for split, rows in self.items()}
            return RowsDict({split: rows for split, rows in results.items() if rows is not None})

        return each
