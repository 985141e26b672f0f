"""The program's data loaders: which of them feed the step, and how fast they are on this machine."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from tilefit.capture.program.fake_data.sources import user_line_now
from tilefit.ops.program import Loader

#: Batches that are timed, after one that is not, and seconds that it may take.
_BATCHES, _BUDGET_S = 4, 1.5
#: A batch that took longer is the one of all further steps.
_PATIENCE_S = 2.0


@dataclass
class _Slow:
    """A batch that took long, and its seconds; 0 where it is made up, or came from a worker."""

    batch: Any
    seconds: float


class Loaders:
    """Notices the loaders of a program.

    Args:
        made_up: How often made-up data were handed out so far: batches with some are not timed.
        found: Gets a text where batches are repeated.
    """

    def __init__(self, made_up: Callable[[], int] = lambda: 0, found: list[str] | None = None) -> None:
        self._made_up = made_up
        #: A loader makes a batch in this process.
        self.drawing = False
        self._found = [] if found is None else found
        self._lines: weakref.WeakKeyDictionary[DataLoader[Any], str] = weakref.WeakKeyDictionary()
        self._fed: dict[int, tuple[DataLoader[Any], int]] = {}
        self._sizes: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
        #: The last iterator of each, and those that are to end.
        self._drawn: weakref.WeakKeyDictionary[DataLoader[Any], Any] = weakref.WeakKeyDictionary()
        self._slow: weakref.WeakKeyDictionary[DataLoader[Any], _Slow] = weakref.WeakKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[Loaders]:
        """Within the block loaders are noticed."""
        init, iterate = DataLoader.__init__, DataLoader.__iter__
        make, draw = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__

        @wraps(init)  # others read which arguments there are
        def made(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            self._lines[loader] = user_line_now()
            init(loader, *args, **kwargs)

        def iterated(iterator: Any, loader: DataLoader[Any]) -> None:
            iterator._tilefit_loader = loader
            self._drawn[loader] = weakref.ref(iterator)
            make(iterator, loader)

        def begun(loader: DataLoader[Any]) -> Any:
            iterator: Any = iterate(loader)  # that of the last epoch where workers persist
            iterator._tilefit_given, iterator._tilefit_ends = 0, False
            iterator._tilefit_begun_s = time.monotonic()
            return iterator

        def drawn(iterator: Any) -> Any:
            loader = iterator._tilefit_loader
            if iterator._tilefit_ends:
                raise StopIteration
            self._fed[id(loader)] = loader, self._fed.get(id(loader), (loader, 0))[1] + 1
            iterator._tilefit_given += 1
            if slow := self._slow.get(loader):
                endless = not isinstance(loader._index_sampler, Sized)
                if not endless and iterator._tilefit_given > len(loader):
                    raise StopIteration
                return self._again(iterator, slow.batch)
            before, start = self._made_up(), time.perf_counter()
            with patch.object(self, "drawing", True):
                batch = draw(iterator)
            seconds = time.perf_counter() - start
            first = next((each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)), None)
            self._sizes[loader] = len(first) if first is not None and first.dim() else 1
            if seconds > _PATIENCE_S and isinstance(loader.sampler, Sized):
                line = self._lines.get(loader, "")
                self._found.append(
                    f"batches of {line}: the first, which took {seconds:.1f} s, again and again"
                )
                # Workers took a part of it to start.
                timed = seconds if before == self._made_up() and not loader.num_workers else 0.0
                self._slow[loader] = _Slow(self._again(iterator, batch), timed)
            return batch

        with (
            patch.object(DataLoader, "__init__", made),
            patch.object(DataLoader, "__iter__", begun),
            patch.object(_BaseDataLoaderIter, "__init__", iterated),
            patch.object(_BaseDataLoaderIter, "__next__", drawn),
        ):
            yield self

    def _again(self, iterator: Any, batch: Any) -> Any:
        """A batch once more, in page-locked memory where the loader's are."""
        pin: Callable[[Any], Any] = pin_memory if iterator._pin_memory else lambda made: made
        with patch.object(self, "drawing", True):
            return pin(copy.deepcopy(batch))

    def end_epoch(self, since_s: float = 0.0) -> bool:
        """What is being drawn from now gives no further batch, if its loop began after ``since_s``; whether
        there is such. Streams go on: who reads one that never ends is not prepared for its end."""
        fed = [loader for loader, _ in self._fed.values() if isinstance(loader.sampler, Sized)]
        running = [each for loader in fed if (each := self._drawn[loader]()) is not None]
        running = [each for each in running if not each._tilefit_ends and each._tilefit_begun_s > since_s]
        for iterator in running:
            iterator._tilefit_ends = True
        return bool(running)

    def stepped(self) -> None:
        """An optimizer has stepped: what is drawn from now on feeds the next step."""
        self._fed.clear()

    def of_step(self) -> tuple[Loader, ...]:
        """The loaders that batches were drawn from since :meth:`stepped`, in order, timed in this process."""
        return tuple(self._described(*fed) for fed in self._fed.values())

    def _described(self, loader: DataLoader[Any], drawn: int) -> Loader:
        seconds, timed = self._timed(loader)
        return Loader(
            source=self._lines.get(loader, ""),
            batch=loader.batch_size
            or getattr(loader.batch_sampler, "batch_size", None)
            or self._sizes.get(loader, 1),
            workers=loader.num_workers,
            pinned=bool(loader.pin_memory),
            batch_s=seconds,
            timed=timed,
            drawn=drawn,
        )

    def _timed(self, loader: DataLoader[Any]) -> tuple[float, int]:
        """Seconds a batch takes one process, and how many were timed; zeros where they cannot be."""
        if (slow := self._slow.get(loader)) and not loader.num_workers:
            return slow.seconds, int(slow.seconds > 0)
        if loader._dataset_kind != _DatasetKind.Map:
            return 0.0, 0  # what a stream has given is gone
        make: Any = _DatasetKind.create_fetcher
        how = loader._auto_collation, loader.collate_fn, loader.drop_last
        fetcher = make(loader._dataset_kind, loader.dataset, *how)
        times: list[float] = []
        begun, before = time.perf_counter(), self._made_up()
        # Data sets may fail at any row: an epoch is then as good as over.
        with torch.random.fork_rng(devices=[]), suppress(Exception):
            for indices in loader._index_sampler:
                start = time.perf_counter()
                fetcher.fetch(indices)
                end = time.perf_counter()
                times.append(end - start)
                if len(times) > _BATCHES or end - begun > _BUDGET_S:
                    break
        if not times or self._made_up() != before:
            return 0.0, 0
        kept = sorted(times[1:] or times)
        return kept[len(kept) // 2], len(kept)
