"""One process of a distributed program, alone: collectives move nothing, and are told."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import cycle
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._C._distributed_c10d import _resolve_process_group

from tilefit.emulation.device import Device
from tilefit.emulation.mail import Mail, ranks_of_machine
from tilefit.emulation.streams import Event, Stream, Streams
from tilefit.emulation.tensor import CudaTensor
from tilefit.emulation.value import Value
from tilefit.emulation.values import is_small, leaves
from tilefit.errors import CaptureError
from tilefit.ops import Site
from tilefit.ops.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SEND
from tilefit.ops.operations import by_name
from tilefit.ops.program import Exchange

#: What torchrun tells a process; answered to whoever asks by name, and not there for whoever looks first.
_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
_VARIABLES |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
#: What is priced as another: what goes from one to all, or from all to one, sends each byte on once, as an
#: all-gather does.
_FUNCTIONS = {"receive": SEND, **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), ALL_GATHER)}
_BETWEEN_TWO = (SEND, "receive")
#: What goes to one other rank is activations, or their gradients.
_OF_SAMPLES = (*_BETWEEN_TWO, ALL_TO_ALL)
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard."
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """What a collective gives, for whoever's stream waits for it."""

    def __init__(self, value: Any, event: Event, side: Stream) -> None:
        super().__init__()
        self.set_result(value)
        self._event, self._side = event, side

    def then(self, callback: Callable[[Any], Any]) -> _Future:
        """Callbacks run on a stream of their own."""
        with self._side as stream:
            stream.wait_event(self._event)
            out = callback(self)
            return _Future(out, stream.record_event(), self._side)

    def wait(self) -> Any:
        """The stream waits, not the host."""
        self._event.wait()
        return super().value()


class _Work(dist.Work):
    """A collective that was called; ``taken`` is called by who waits for it first."""

    def __init__(
        self, tensors: Any, event: Event | None, side: Stream, taken: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._taken = taken
        # It may be kept for longer than what it was called with.
        self._tensors = [weakref.ref(each) for each in leaves([tensors])]
        self._event, self._side = event, side

    def wait(self, *args: Any) -> bool:
        """The stream waits, not the host; what ran on the program's own stream is not waited for."""
        if self._taken is not None:
            self._taken()
            self._taken = None
        if self._event is not None:
            self._event.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def result(self) -> Any:
        return [each() for each in self._tensors]

    def get_future(self) -> _Future:
        event = self._event
        if event is None:
            with self._side as stream:
                event = stream.record_event()
        return _Future(self.result(), event, self._side)


class _Collectives:
    """Answers what is asked of other processes as if they had the same.

    Args:
        device: The device, whose watch is told.
        streams: Its streams.
        mail: By which other ranks answer that run as well; None where none does.
    """

    def __init__(self, device: Device, streams: Streams, mail: Mail | None) -> None:
        self.device, self.streams, self.mail = device, streams, mail
        #: All ranks hand something on: what this one gets is what it gives.
        self._shifts = False
        self._of_groups: dict[str, Stream] = {}
        self._side = Stream(streams)
        self._kept: list[_Work] = []
        #: Events behind what functional collectives made, by its memory.
        self._running: dict[int, Event] = {}

    def rules(self) -> dict[str, Any]:
        """Of the device, by the operation's name."""
        made: dict[str, Any] = {"wait_tensor": self._waited, "_wrap_tensor_autograd": _awaited_later}
        for operation, name in by_name("collectives").items():
            made[operation] = lambda _, *call, name=name: self._called(name, *call)
        return made

    def _called(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "_c10d_functional":
            return self._functional(name, func, args, kwargs)
        if func.namespace != "c10d":
            return NotImplemented
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        group = dist.ProcessGroup.unbox(given["process_group"])
        peer = given.get("dst", given.get("src")) if name in _BETWEEN_TWO else None
        event = self._told(name, args, group, peer, overlaps=given.get("async_op", True))
        self._answer(name, args)
        work = _Work(args[0], event, self._side, self._by_mail(name, args[0], group, peer))
        self._kept[:] = [*self._kept[-64:], work]  # C++ holds its own half alone
        return (args[0], work.boxed()) if len(func._schema.returns) == 2 else work.boxed()

    def _functional(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        group = given["group_name"]
        if isinstance(group, str):
            group = _resolve_process_group(group)  # type: ignore[arg-type]
        out = self.device.launch(func, args, kwargs)
        event = self._told(name, (out, *args), group, grows=True)
        for each in leaves(out):
            self._running[each.untyped_storage()._cdata] = event
        if name != ALL_REDUCE:
            self._answer(name, (out, args[0]))
        return out

    def _waited(self, _: Device, func: Any, args: Any, kwargs: Any) -> Any:
        event = self._running.pop(args[0].untyped_storage()._cdata, None)
        if event is not None:
            event.wait()
        return args[0]

    def _told(
        self,
        name: str,
        tensors: Any,
        group: Any,
        peer: int | None = None,
        *,
        overlaps: bool = True,
        grows: bool = False,
    ) -> Any:
        """Tell of a collective, which writes the first of ``tensors``; returns the event behind it where it
        has a stream of its own. ``peer``: the other one of two, by its number in the group."""
        sizes = [
            [t.numel() * t.element_size() for t in leaves([each]) if isinstance(t, CudaTensor)]
            for each in tensors
            if not isinstance(each, torch.Tensor) or isinstance(each, CudaTensor)
        ]
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) < 2 or not any(sizes):
            return Event(self.streams)
        local = ranks_of_machine(dist.get_world_size())
        function = _FUNCTIONS.get(name, name)
        called = str(group.group_name)
        if function == SEND:
            ranks, called = self._pair(name, ranks, peer, called)
        first = next(t for t in leaves(tensors) if isinstance(t, CudaTensor))
        exchange = Exchange(
            index=0,
            function=function,
            name=name,
            bytes=max(map(sum, sizes)),
            ranks=len(ranks),
            per_machine=min(local, max(Counter(r // local for r in ranks).values())),
            site=Site(),
            dtype=_DTYPES.get(first.dtype, str(first.dtype).removeprefix("torch.")),
            group=called,
            grows=grows or name in _OF_SAMPLES,
            copied=_by_fully_shard(),
        )
        written = [t for t in leaves([tensors[0]]) if isinstance(t, CudaTensor)]
        watch, current = self.device.watch, self.streams.current
        if not overlaps:
            watch.exchanged(exchange, current.stream_id, written)
            return None
        if exchange.group not in self._of_groups:
            self._of_groups[exchange.group] = Stream(self.streams)
        stream = self._of_groups[exchange.group]
        stream.wait_stream(current)
        watch.exchanged(exchange, stream.stream_id, written)
        return stream.record_event()

    def _by_mail(self, name: str, tensors: Any, group: Any, peer: int | None) -> Callable[[], None] | None:
        """Ask for the rank that a message is for or from, and tell it what a small one holds; what it has
        told is there when the message is waited for."""
        if self.mail is None or peer is None or self._shifts:
            return None
        rank = dist.get_global_rank(group, peer)
        self.mail.want(rank)
        small = [each for each in leaves([tensors]) if isinstance(each, CudaTensor) and is_small(each)]
        if name == SEND:
            for each in small:
                known = each.value.tensor() if each.value is not None else None
                self.mail.send(rank, None if known is None else known.flatten().tolist())
            return None
        return partial(_fill, self.mail, rank, [(each, self.mail.expect(rank)) for each in small])

    def batch(self, original: Callable[..., Any], messages: list[Any]) -> Any:
        """Several messages at once."""
        ways: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for each in messages:
            ways[each.op is dist.isend].append((each.tensor.nbytes, each.peer))
        sent, got = ways[True], ways[False]
        same = sorted(size for size, _ in sent) == sorted(size for size, _ in got)
        shifts = same and not {peer for _, peer in sent} & {peer for _, peer in got}
        with patch.object(self, "_shifts", shifts):
            return original(messages)

    def _pair(self, name: str, ranks: list[int], peer: int | None, group: str) -> tuple[list[int], str]:
        """Who sends to whom, and the name of what goes that way, which is the same for both."""
        own, other = dist.get_rank(), -1 if peer is None else ranks[_existing(peer, len(ranks))]
        way = (own, other) if name == SEND else (other, own)
        return list(way), f"{group} {way[0]}>{way[1]}"

    def _answer(self, name: str, tensors: Any) -> None:
        """Give what all would give who have the same; sums stay what they were."""
        written = [each for each in leaves([tensors[0]]) if isinstance(each, CudaTensor)]
        read = leaves([tensors[1]]) if len(tensors) > 1 else []
        read = [each for each in read if isinstance(each, CudaTensor) and each.numel()]
        if name == "receive" or (read and written):
            for out, source in zip(written, cycle(read or [None]), strict=False):
                _take(out, source)


def _by_fully_shard() -> bool:
    """Whether ``fully_shard`` is calling."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_FULLY_SHARD):
        frame = frame.f_back
    return frame is not None


def _existing(rank: int, count: int) -> int:
    """The number of a rank that there is.

    Raises:
        CaptureError: there is none.
    """
    if not 0 <= rank < count:
        raise CaptureError(
            f"the program exchanges a message with rank {rank}, and there are {count}: 0 to {count - 1}",
            hint="--ranks says how many there are.",
        )
    return rank


def _fill(mail: Mail, rank: int, expected: list[tuple[CudaTensor, str]]) -> None:
    """Put what a rank has sent into tensors."""
    for tensor, name in expected:
        known = mail.receive(rank, name)
        if known is not None and len(known) != tensor.numel():
            raise CaptureError(
                f"rank {dist.get_rank()} expects {tensor.numel()} values of rank {rank}, "
                f"which has sent {len(known)}",
                hint="On GPUs NCCL would hang here, or leave the rest as it was.",
            )
        known = None if known is None else torch.tensor(known, dtype=tensor.dtype).view(tensor.shape)
        tensor.value = None if known is None else Value(known)


def _take(out: CudaTensor, source: CudaTensor | None) -> None:
    """``out`` holds what ``source`` does, again and again, or a part of it; without one nobody knows what."""
    if out.value is not None:
        out.value.state.lost = True
    known = source.value.tensor() if source is not None and source.value is not None else None
    if known is None or not is_small(out):
        out.value = None
        return
    times = -(-out.numel() // known.numel())
    out.value = Value(known.flatten().repeat(times)[: out.numel()].view(out.shape))
    out.value.state.assumed = source is not None and source.value is not None and source.value.state.assumed


def _awaited_later(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """What a functional collective returns: its first reader waits."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


def install(device: Device, streams: Streams, mail: Mail | None) -> None:
    """Make distributed programs run as one process, of as many as the environment says; not taken back.

    Args:
        device: Whose watch is told of collectives.
        streams: The device's, on which they run.
        mail: By which other ranks answer.
    """
    begin, batch = dist.init_process_group, dist.batch_isend_irecv
    collectives = _Collectives(device, streams, mail)

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size, rank = kwargs.get("world_size", -1), kwargs.get("rank", -1)
        begin(
            "fake",
            store=FakeStore(),
            rank=rank if rank >= 0 else int(os.environ["RANK"]),
            world_size=size if size > 0 else int(os.environ["WORLD_SIZE"]),
        )

    def spawn(
        function: Callable[..., Any], args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any
    ) -> None:
        local = int(os.environ["LOCAL_RANK"])
        function(local if local < nprocs else 0, *args)

    module: Any = dist
    objects = _Objects(mail)
    for name in (
        *(f"{way}_object_list" for way in ("send", "recv", "broadcast", "scatter")),
        "all_gather_object",
    ):
        setattr(module, name, objects.in_place_of(getattr(module, name)))
    module.batch_isend_irecv = partial(collectives.batch, batch)
    for name in [name for name in sys.modules if name.startswith("torch.distributed")]:
        if getattr(sys.modules[name], "init_process_group", None) is begin:
            sys.modules[name].init_process_group = init_process_group  # type: ignore[attr-defined]
    module.monitored_barrier = lambda *args, **kwargs: None
    device.rules = {**device.rules, **collectives.rules()}
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn = spawn
    _answer_variables()


class _Objects:
    """Sends objects to other ranks, and gets theirs; methods are called as PyTorch's functions stand."""

    def __init__(self, mail: Mail | None) -> None:
        self._mail = mail

    def in_place_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What answers a function of PyTorch's: the method of its name, told the rank and the arguments."""
        signature, method = inspect.signature(function), getattr(self, function.__name__)

        def called(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            rank, of_group = (given.get(f"{of}src", given.get(f"{of}dst")) for of in ("", "group_"))
            return method(self._rank(rank, given["group"], of_group), given)

        return called

    @staticmethod
    def _rank(rank: int | None, group: Any, of_group: int | None) -> int:
        """A rank by its number, or by that in a group."""
        if of_group is None:
            return _existing(rank or 0, dist.get_world_size())
        group = dist.group.WORLD if group is None else group
        return dist.get_global_rank(group, _existing(of_group, dist.get_world_size(group)))

    def send_object_list(self, rank: int, given: dict[str, Any]) -> None:
        if self._mail is not None:
            self._mail.send(rank, list(given["object_list"]))

    def recv_object_list(self, rank: int, given: dict[str, Any]) -> int:
        if self._mail is None:
            raise CaptureError(
                "the program waits for an object of another process, and there is none",
                hint="Check it by its file, with --ranks N: then other ranks run, too.",
            )
        given["object_list"][:] = self._mail.receive(rank, self._mail.expect(rank))
        return rank

    def broadcast_object_list(self, rank: int, given: dict[str, Any]) -> None:
        whole: Any = dist.group.WORLD
        name, objects = str((given["group"] or whole).group_name), given["object_list"]
        if self._mail is not None and rank == dist.get_rank():
            self._mail.publish(name, list(objects))
        elif self._mail is not None:
            objects[:] = self._mail.receive(rank, self._mail.expect(rank, name))

    def scatter_object_list(self, rank: int, given: dict[str, Any]) -> None:
        got, sent = given["scatter_object_output_list"], given["scatter_object_input_list"] or []
        if rank != dist.get_rank():
            if self._mail is not None:
                got[0] = self._mail.receive(rank, self._mail.expect(rank))
            return
        for member, each in zip(dist.get_process_group_ranks(given["group"]), sent, strict=True):
            if member == rank:
                got[0] = each
            elif self._mail is not None:
                self._mail.send(member, each)

    def all_gather_object(self, rank: int, given: dict[str, Any]) -> None:
        given["object_list"][:] = [given["obj"]] * len(given["object_list"])


def _answer_variables() -> None:
    kind: Any = type(os.environ)
    original = kind.__getitem__

    def getitem(environ: Any, name: str) -> str:
        try:
            return str(original(environ, name))
        except KeyError:
            if name in _VARIABLES:
                return _VARIABLES[name]
            raise

    def contains(environ: Any, name: str) -> bool:
        return environ.encodekey(name) in environ._data

    def get(environ: Any, name: str, default: Any = None) -> Any:
        return environ[name] if name in environ else default  # noqa: SIM401 - this is get

    kind.__getitem__, kind.__contains__, kind.get = getitem, contains, get
