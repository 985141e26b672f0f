"""The streams of the emulated device: nothing runs on them, but in which order it would is told."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from typing import Any

import torch

from tilefit.emulation.device import Watch
from tilefit.emulation.tensor import CUDA
from tilefit.ops.program import AWAIT, RECORD, TO_STREAM

_events = count(1)


class Streams:
    """Which streams there are, and which is the one that operations go to.

    Args:
        watch: Told of what they are asked to do.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.numbers = count()
        self.current = self.default = Stream(self)

    def switch(self, stream: Stream) -> None:
        """Operations go to this stream from now on."""
        if stream is not self.current:
            self.current = stream
            self.watch.ordered(TO_STREAM, stream.stream_id, 0)


class Stream:
    """A stream."""

    device, device_index, device_type, priority = CUDA, 0, 1, 0

    def __init__(self, streams: Streams, *args: Any, **kwargs: Any) -> None:
        self._streams = streams
        self.stream_id = self.cuda_stream = next(streams.numbers)
        self._outer: list[Stream] = []

    def __enter__(self) -> Stream:
        self._outer.append(self._streams.current)
        self._streams.switch(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._streams.switch(self._outer.pop())

    def wait_stream(self, other: Stream) -> None:
        """Wait for all that the other was given so far."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Wait for what was before an event."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind all that it was given so far."""
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for what it was given."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Graphs are captured by what runs, not by streams."""
        return False


class Event:
    """A place between what a stream is given."""

    device, cuda_event, event_id = CUDA, 0, 0

    def __init__(self, streams: Streams, *args: Any, **kwargs: Any) -> None:
        self._streams = streams
        self.number = 0

    def record(self, stream: Stream | None = None) -> None:
        """Behind all that a stream was given so far."""
        self.number = next(_events)
        where = stream or self._streams.current
        self._streams.watch.ordered(RECORD, where.stream_id, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        """A stream waits for it; for one that was never recorded nobody does."""
        if self.number:
            where = stream or self._streams.current
            self._streams.watch.ordered(AWAIT, where.stream_id, self.number)

    def synchronize(self) -> None:
        """The host waits for it."""
        if self.number:
            self._streams.watch.waited("synchronize", self.number)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, which nobody knows."""
        return 1.0

    def query(self) -> bool:
        """Everything is done."""
        return True


def install(watch: Watch) -> Streams:
    """Make a program's streams those of the emulated device; not taken back."""
    streams = Streams(watch)

    def bound(kind: type) -> type:
        """The class, whose objects belong to ``streams``: programs make them, and ask what is one."""

        class _Kind(type):
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, kind)

            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return kind(streams, *args, **kwargs)

        return _Kind(kind.__name__, (), {})

    def entered(stream: Stream | None) -> Any:
        return nullcontext() if stream is None else stream

    module: Any = torch
    cuda = module.cuda
    cuda.synchronize = module.accelerator.synchronize = lambda *a, **k: watch.waited("synchronize")
    cuda.Stream = cuda.ExternalStream = module.Stream = bound(Stream)
    cuda.Event = module.Event = bound(Event)
    cuda.stream = cuda.StreamContext = entered
    cuda.current_stream = module.accelerator.current_stream = lambda *a, **k: streams.current
    cuda.default_stream = lambda *a, **k: streams.default
    cuda.set_stream = module.accelerator.set_stream = streams.switch
    cuda.device = cuda.device_of = lambda *a, **k: nullcontext()
    module.Tensor.record_stream = lambda *a, **k: None
    return streams
