"""Where host and GPU meet while a program runs, and what it was told that nobody knows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from tilefit.capture.aten import is_free
from tilefit.capture.dtypes import DTYPES
from tilefit.capture.program.recording import ProgramCalls, ProgramRecorder, Recorded
from tilefit.capture.recorder import PRODUCTS
from tilefit.emulation.tensor import CudaTensor
from tilefit.emulation.values import is_tensor, leaves
from tilefit.ops.program import (
    EARLIER,
    EXCHANGE,
    RECORD,
    TO_STREAM,
    VALIDATE_ARGS,
    WAIT,
    Assumption,
    Exchange,
    Ordered,
)

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__)


class Meetings:
    """Launches what the device is told to, and notes events and assumptions.

    Args:
        recorder: Runs and records operations on shapes.
        calls: Knows which call of the program's is being made.
    """

    def __init__(self, recorder: ProgramRecorder, calls: ProgramCalls) -> None:
        self.recorder = recorder
        self.calls = calls
        self.events = recorder.meetings
        self.exchanges: list[Exchange] = []
        self.order: list[Ordered] = []
        #: Numbers of the memory that collectives wrote.
        self.received: set[int] = set()
        self._stream = 0
        #: Elements that the host's own operations made, by function, beside what loaders do.
        self.host_work: Counter[str] = Counter()
        self.is_loading: Callable[[], bool] = lambda: False
        #: The CUDA graph that is being captured.
        self.capturing: Captured | None = None
        #: Told of a CUDA graph whose capture begins, that it has ended, and of one that is about to run.
        self.on_capture: Callable[[Captured], None] = lambda graph: None
        self.on_captured: Callable[[], None] = lambda: None
        self.replaying: Callable[[Captured], None] = lambda graph: None
        self._assumptions: dict[tuple[str, str, str], list[Any]] = {}

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Each place once, with the first answer that it was given."""
        return tuple(
            Assumption(name, what, value, source, count)
            for (name, what, source), (value, count) in self._assumptions.items()
        )

    def restart(self) -> None:
        """The step begins here."""
        self.events.clear()
        self.exchanges.clear()
        self.received.clear()
        self.order[:] = [Ordered(0, TO_STREAM, self._stream)] if self._stream else []
        self.recorder.host_products.clear()
        self.host_work.clear()

    @property
    def is_aside(self) -> bool:
        """Whether operations go to another stream than the first."""
        return self._stream != 0

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on shapes, recorded."""
        out = self.recorder.launch(func, args, kwargs)
        for leaf in leaves(out):
            if is_tensor(leaf) and leaf.device.type == "meta":
                self.recorder.identify(leaf)
        return out

    def ran_on_host(self, func: Any, out: Any) -> None:
        """An operation on tensors of the host's."""
        if self.recorder.muted:
            return
        name = func._overloadpacket.__name__
        if name in PRODUCTS:
            self.recorder.host_products[self.recorder.sites.source_line()] = None
        if not (self.is_loading() or is_free(func)):
            self.host_work[name.rstrip("_")] += sum(each.numel() for each in leaves(out) if is_tensor(each))

    def waited(self, name: str, event: int = 0) -> None:
        """The host waits; ``item`` may be what ``float(loss)`` or ``if loss > 3`` asked."""
        if event and not any(o.kind == RECORD and o.number == event for o in self._latest()):
            name = EARLIER
        name = self.calls.asking.strip("_") or name if name == "item" else name
        name = VALIDATE_ARGS if self.recorder.sites.is_called_by(_DISTRIBUTIONS) else name
        self.recorder.met(WAIT, name, event=event, after=len(self.order))

    def _latest(self) -> Iterator[Ordered]:
        """What streams were asked for since the last operation."""
        return takewhile(lambda each: each.index == len(self.recorder.ops), reversed(self.order))

    def copied(self, kind: str, tensor: torch.Tensor, pinned: bool, non_blocking: bool) -> None:
        """Something is copied."""
        how = {"pinned": pinned, "non_blocking": non_blocking, "after": len(self.order)}
        self.recorder.met(kind, "to", bytes=tensor.numel() * tensor.element_size(), **how)

    def took(self, tensor: torch.Tensor) -> None:
        """Memory is taken by what came from the host."""
        self.recorder.identify(tensor)

    def memory(self) -> tuple[int, int, int]:
        """Bytes that tensors take now, at most since :meth:`forget_most`, and at most ever."""
        return self.recorder.live_bytes, self.recorder.most_bytes, self.recorder.ever_bytes

    def forget_most(self) -> None:
        """What tensors take at most is looked for from now on."""
        self.recorder.most_bytes = self.recorder.live_bytes

    def assumed(self, name: str, tensor: torch.Tensor, value: str) -> None:
        """A value was made up."""
        what = f"{DTYPES.get(tensor.dtype, str(tensor.dtype))}[{','.join(map(str, tensor.shape))}]"
        key = name, what, self.recorder.sites.source_line()
        self._assumptions.setdefault(key, [value, 0])[1] += 1

    def ordered(self, kind: str, stream: int, number: int) -> None:
        """A stream is asked for something."""
        if kind == TO_STREAM:
            self._stream = stream
        if not self.recorder.muted:
            self.order.append(Ordered(len(self.recorder.ops), kind, stream, number))

    def exchanged(self, exchange: Exchange, stream: int, written: list[CudaTensor]) -> None:
        """A collective is called."""
        self.received.update(map(self.recorder.identify, written))
        if not self.recorder.muted:
            site, phase = self.recorder.place()
            self.ordered(EXCHANGE, stream, len(self.exchanges))
            self.exchanges.append(replace(exchange, index=len(self.recorder.ops), site=site, phase=phase))

    def captured(self) -> Captured:
        """A CUDA graph is captured."""
        return Captured(self)

    def graphed(self, callables: Any) -> Any:
        """Models or functions, of which each call is a replay from now on, with its backward pass."""
        if isinstance(callables, tuple):
            return tuple(map(self.graphed, callables))
        if not isinstance(callables, torch.nn.Module):
            return self.recorder.replayed(callables)
        callables.forward = self.recorder.replayed(callables.forward)
        return callables

    def replayed(self, captured: Captured) -> None:
        """A CUDA graph runs."""
        self.replaying(captured)
        if not self.recorder.muted:
            self.recorder.replay(captured)


class Captured(Recorded):
    """What a CUDA graph runs, recorded within the block and not counted there.

    Attributes:
        optimizers: Those whose steps are among them.
        calls: Of models.
        autocast: The element type of its autocast, if it has one.
    """

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        self.optimizers: list[torch.optim.Optimizer] = []
        self.calls: list[Any] = []
        self.autocast: torch.dtype | None = None

    def __enter__(self) -> Captured:
        autocast = self._meetings.calls.autocast
        self._kept = len(self._meetings.events), autocast.seen
        autocast.restart()
        self._recording = self._meetings.recorder.recording(self)
        self._recording.__enter__()
        self._meetings.capturing = self
        self._meetings.on_capture(self)
        return self

    def __exit__(self, *error: object) -> None:
        autocast = self._meetings.calls.autocast
        self._recording.__exit__(None, None, None)
        self.autocast = autocast.seen
        events, autocast.seen = self._kept
        del self._meetings.events[events:]
        self._meetings.capturing = None
        self._meetings.on_captured()
