"""Records every ATen operation of a step as the operation the hardware sees."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilefit.capture.aten import Call, describe, function_of, is_free, makes_new_tensors, writes_first_alone
from tilefit.capture.dtypes import DTYPES
from tilefit.capture.layouts import is_channels_last
from tilefit.capture.sites import SiteTracker
from tilefit.capture.trees import tensors
from tilefit.ops import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    FORWARD,
    OPTIMIZER,
    Gemm,
    HostEvent,
    Op,
    Site,
    StepOp,
    Streaming,
    TensorRef,
)
from tilefit.ops.peaks import Moment, fullest
from tilefit.ops.program import TO_GPU
from tilefit.ops.timeline import BUFFERS, INPUTS, OPTIMIZER_STATE, PARAMETERS, Timeline, owned

_UNKNOWN = object()
_COMPUTED = "*"
#: A result that a call does not make, such as the gradient of a bias that is not there.
_NOTHING = ((), (), None)


def _layout(value: Any, floats: bool = True) -> Any:
    """What a meta kernel can know of its arguments, as a key; ``floats``: their values, too."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())
    if isinstance(value, (list, tuple)):
        return tuple([_layout(each, floats) for each in value])
    # 1, 1.0 and True are equal, but not to type promotion.
    return (type(value), value if floats or type(value) is not float else None)


def _result_layout(value: Any) -> Any:
    if value is None:
        return _NOTHING
    if isinstance(value, torch.Tensor) and value.device.type == "meta" and value.storage_offset() == 0:
        return (tuple(value.shape), value.stride(), value.dtype)
    return None


#: What PyTorch's own meta kernels make of arguments of some layout. Captures share it: most are of one model,
#: again and again with one more change.
_RESULTS: dict[Any, Any] = {}
#: So many at most, some 100 MB. A choice.
_MOST_RESULTS = 100_000
#: Operations that hardly any step does on the host.
PRODUCTS = frozenset("mm addmm bmm baddbmm convolution convolution_backward".split())
#: Calls whose indices may be the host's.
_INDEXED = frozenset("index index_put index_put_ _index_put_impl_".split())


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that turns what PyTorch executes into :class:`~tilefit.ops.StepOp`.

    Args:
        sites: Tells where an operation comes from.
        device: The device whose work counts (``meta``, or ``cpu`` where real data is needed).
        tf32_matmul, tf32_conv: fp32 products run in TF32.
    """

    def __init__(self, sites: SiteTracker, device: str, *, tf32_matmul: bool, tf32_conv: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites = sites
        self.device = device
        self.tf32_matmul = tf32_matmul
        self.tf32_conv = tf32_conv
        self.ops: list[StepOp] = []
        self.live_bytes = 0
        # What was made (and freed: negative) in order: the number of the memory, bytes, the operation then.
        self._allocations: list[tuple[int, int, int]] = []
        self._owners: dict[int, str] = {}
        self._saved: set[int] = set()
        self.muted = False
        #: The phase that :meth:`phase` set; empty where autograd's state decides.
        self.current_phase = ""
        self._kept: set[int] = set()
        self._ids: dict[int, int] = {}
        self._next_id = 0
        self._finalizers: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        #: Names of parameters whose memory has been given back, by its key.
        self._emptied: dict[int, str] = {}
        self._parameter_of: dict[int, str] = {}
        #: Numbers of the memory of what is computed of parameters and buffers alone, as a weight of its norm.
        self._computed: set[int] = set()
        self._on_host: set[int] = set()
        self._results: dict[Any, Any] = {}
        #: Numbers of the memory of what the step returns.
        self.returned: set[int] = set()
        #: Where host and GPU meet.
        self.meetings: list[HostEvent] = []
        #: Lines of products on another device, which are not recorded.
        self.host_products: dict[str, None] = {}
        # By the number of the autograd node of each product: None if no parameter is multiplied, else the
        # parameter that is its input rather than its weight (a learned query), mostly the empty name.
        self._input_of: dict[int, str | None] = {}

    # ---- what is alive -----------------------------------------------------------------------

    def memory_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Where a tensor lies."""
        return tensor.untyped_storage()

    def identify(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory; new memory is counted until it is freed."""
        storage = self.memory_of(tensor)
        key = storage._cdata
        number = self._ids.get(key)
        if number is None:
            number = self._next_id
            self._next_id += 1
            self._ids[key] = number
            size = storage.nbytes()
            self.live_bytes += size
            self._allocations.append((number, size, len(self.ops)))
            if self.current_phase == OPTIMIZER:
                self._kept.add(number)  # as large as the parameters, whatever the batch
            self._finalizers[number] = weakref.finalize(storage, self._freed, key, number, size)
            self._finalizers[number].atexit = False
            if key in self._emptied:
                self._parameter_of[number] = self._emptied.pop(key)
                self._owners[number] = PARAMETERS
                self._kept.add(number)
        return number

    def _freed(self, key: int, number: int, size: int) -> None:
        self.live_bytes -= size
        self._allocations.append((number, -size, len(self.ops)))
        if self._ids.get(key) == number:
            del self._ids[key]
        self._finalizers.pop(number, None)
        self._emptied.pop(key, None)
        self._parameter_of.pop(number, None)
        self._on_host.discard(number)

    def name_parameter(self, tensor: torch.Tensor, name: str) -> int:
        """:meth:`keep` a parameter; operations that read it, a view or a cast copy of it say which it is."""
        self._parameter_of[self.identify(tensor)] = name
        return self.keep([tensor], PARAMETERS)

    def keep(self, tensors: Iterable[torch.Tensor], owner: str) -> int:
        """Take these for what a model holds: their memory does not grow with the batch. Returns the bytes of
        those that were taken for inputs, or not seen."""
        added = 0
        for tensor in tensors:
            number = self.identify(tensor)
            if self._owners.get(number, INPUTS) == INPUTS:
                added += self.memory_of(tensor).nbytes()
            self._kept.add(number)
            self._owners[number] = owner
        return added

    def own(self, tensors: Iterable[torch.Tensor], owner: str) -> None:
        """Note whose the memory is of those tensors that were seen."""
        self._owners.update(dict.fromkeys(set(map(self.number_of, tensors)) - {-1}, owner))

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's memory; -1 where it was not seen."""
        return self._ids.get(self.memory_of(tensor)._cdata, -1)

    def keep_saved(self) -> None:
        """Take what is alive now for what a backward pass reads."""
        self._saved.update(self._ids.values())

    def keep_from_start(self, tensors: Iterable[torch.Tensor]) -> None:
        """:meth:`keep` an optimizer's state, as if it had been there before everything else."""
        count = len(self._allocations)
        self.keep(tensors, OPTIMIZER_STATE)
        made = [(number, size, 0) for number, size, _ in self._allocations[count:]]
        self._allocations[:] = [*made, *self._allocations[:count]]

    def restart(self) -> None:
        """Forget what was recorded: the step begins here, and what is alive was there before it."""
        self.ops.clear()
        alive: Counter[int] = Counter()
        for number, size, _ in self._allocations:
            alive[number] += size
        self._allocations[:] = [(number, size, 0) for number, size in alive.items() if size]
        self._kept.update(number for number, *_ in self._allocations)
        self._owners = {number: self._owners.get(number, INPUTS) for number, *_ in self._allocations}
        self._saved.clear()

    def let_grow(self, batch: int) -> None:
        """Of what was there when the step began, and is no model's, what has so many samples grows with them:
        the inputs of a call, a KV cache."""
        seen = (ref for entry in self.ops for ref in entry.inputs)
        self._grows({ref.id for ref in seen if ref.shape[:1] == (batch,)})

    def let_inputs_grow(self, inputs: Iterable[torch.Tensor]) -> None:
        """A call's inputs grow with the batch though they were there before the step; not so what they are a
        part of, as of a data set on the GPU."""
        whole = (t for t in inputs if self.memory_of(t).nbytes() == t.numel() * t.element_size())
        self._grows(set(map(self.number_of, whole)))

    def _grows(self, numbers: set[int]) -> None:
        self._kept -= {number for number in numbers if self._owners.get(number) == INPUTS}

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once."""
        return max(accumulate(size for _, size, _ in self._allocations), default=0)

    def timeline(self, stay: Collection[int]) -> Timeline:
        """What was alive when, and whose it was; ``stay`` as of :meth:`moments`."""
        sizes = {number: size for number, size, _ in self._allocations if size > 0}
        freed = {number for number, size, _ in self._allocations if size < 0}
        return Timeline(
            owned(self.ops, sizes, freed, self._owners, self._saved, {*stay, *self._kept}),
            tuple((number, op) for number, _, op in self._allocations if number in sizes),
        )

    def moments(self, stay: Collection[int]) -> tuple[Moment, ...]:
        """The moments that are the fullest on some batch.

        Args:
            stay: Numbers of the memory that does not grow with the batch, beside what is kept.
        """

        def after_each() -> Iterator[Moment]:
            stays = grows = 0
            for number, size, _ in self._allocations:
                if number in stay or number in self._kept:
                    stays += size
                else:
                    grows += size
                yield stays, grows

        return fullest(after_each())

    def keep_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take what is done to these tensors for the host's work, though here they are on the same device."""
        self._on_host.update(self.identify(t) for t in tensors if t.device.type == self.device)

    def reference(self, tensor: torch.Tensor) -> TensorRef:
        """How the step names a tensor."""
        number = self.identify(tensor)
        dtype = DTYPES.get(tensor.dtype, "fp32")
        name = self._parameter_of.get(number, "")
        return TensorRef(number, tuple(tensor.shape), dtype, name, int(tensor.storage_offset()))

    # ---- recording ---------------------------------------------------------------------------

    def phase(self, phase: str) -> AbstractContextManager[object]:
        """Within the block, operations belong to ``phase`` whatever autograd is doing."""
        return patch.object(self, "current_phase", phase)

    def silent(self) -> AbstractContextManager[object]:
        """Within the block nothing is recorded."""
        return patch.object(self, "muted", True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block memory that is given back again does not count: what it stands for takes none."""
        count = len(self._allocations)
        try:
            yield
        finally:
            gone = self._gone_since(count)
            self._allocations[count:] = [each for each in self._allocations[count:] if each[0] not in gone]

    def _gone_since(self, count: int) -> set[int]:
        """Numbers of the memory that came and went behind so many allocations."""
        since = self._allocations[count:]
        return {number for number, size, _ in since if size > 0} & {
            number for number, size, _ in since if size < 0
        }

    def record(
        self,
        op: Op,
        name: str,
        inputs: Iterable[torch.Tensor],
        outputs: Iterable[torch.Tensor],
        phase: str = "",
    ) -> None:
        """Add one operation at the current site; ``phase`` overrides what autograd's state implies."""
        if self.muted:
            return
        if isinstance(op, Streaming):
            op = replace(op, function=op.function or function_of(name))
        node, recomputed = self._autograd_state()
        if node is None:
            site = self.sites.forward_site()
            implied = FORWARD
        else:
            site = self.sites.backward_site(node)
            implied = BACKWARD_DATA
        entry = StepOp(
            op,
            self.current_phase or phase or implied,
            site,
            name,
            tuple(self.reference(t) for t in inputs),
            tuple(self.reference(t) for t in outputs),
            recomputed,
        )
        if isinstance(op, Gemm) and (node is None or torch.is_grad_enabled()):
            left, right = (ref.parameter or self._weight_of(ref.id) for ref in entry.inputs[:2])
            # Only the first product after a node was made is that node's own.
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            self._input_of.setdefault(number, left if right else "" if left else None)
        self.ops.append(entry)

    def place(self) -> tuple[Site, str]:
        """Where the program is, and in which phase."""
        node, _ = self._autograd_state()
        site = self.sites.here() if node is None else self.sites.backward_site(node)
        return site, self.current_phase or (FORWARD if node is None else BACKWARD_DATA)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Memory is about to have another size, such as none: it is freed, and what it will be is new."""
        number = self._ids.get(storage._cdata)
        if number is None:
            return
        name = self._parameter_of.get(number, "")
        self._finalizers[number]()
        if name:
            self._emptied[storage._cdata] = name

    def _autograd_state(self) -> tuple[Any, bool]:
        """The autograd node that runs backward, None in a forward pass; and whether it is a repeated one.

        A forward pass within the backward pass is checkpointing at work.
        """
        node = torch._C._current_autograd_node()
        if node is not None and self.sites.is_repeated_forward():
            return None, True
        return node, False

    def met(self, kind: str, name: str, **fields: Any) -> None:
        """Host and GPU meet here: the host waits, or copies; ``fields`` of the event say what else of it."""
        if not self.muted:
            fields["within"] = self.sites.within
            self.meetings.append(HostEvent(len(self.ops), kind, name, self.sites.forward_site(), **fields))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Neither meta kernels written in Python nor the recording itself are the model's own calls.
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            for tensor in self._from_host(func, args, kwargs):
                self.met(TO_GPU, "to", bytes=tensor.nbytes)
            return self._dispatched(func, args, kwargs)

    def _from_host(self, func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
        """What a call copies to the GPU: tensors of the host's that are made the GPU's, and indices."""
        if self.device == "cpu":
            return  # where all tensors look like the host's
        name = func._overloadpacket.__name__
        if name == "_to_copy" and torch.device(kwargs.get("device") or "cpu").type == self.device:
            copied: Sequence[Any] = args[:1]
        elif name == "copy_" and args[0].device.type == self.device:
            copied = args[1:2]
        elif name in _INDEXED and args[0].device.type == self.device:
            copied = args[1]
        else:
            return
        for tensor in copied:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel():
                yield tensor

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._run(func, args, kwargs)
        if self.muted:
            return out
        if is_free(func):
            if self._autograd_state()[0] is None:
                self.sites.forward_site()  # its gradient (a slice's, an expand's) costs time
            return out
        call = Call(func, args, kwargs, out)
        if call.packet in ("convolution", "convolution_backward"):
            out = self._in_channels_last(call)
            call = Call(func, args, kwargs, out)
        seen = (*call.inputs, *call.outputs)
        is_empty = call.outputs and not any(t.numel() for t in call.outputs)  # such as of an idle expert
        if is_empty or not any(t.device.type == self.device and t.numel() for t in seen):
            if call.packet in PRODUCTS and not is_empty:
                self.host_products[self.sites.source_line()] = None
            return out  # the host's work, or none
        if self._on_host and call.inputs and self.identify(call.inputs[0]) in self._on_host:
            return out
        for op, phase, inputs, outputs in describe(call, self):
            self.record(op, call.name, inputs, outputs, phase)
        is_made = call.inputs and not call.packet.endswith("_like") and self._autograd_state()[0] is None
        if is_made and all(self._is_held(self.identify(t)) for t in call.inputs):
            self._computed.update(map(self.identify, call.outputs))
        if call.packet in ("_to_copy", "copy_", "constant_pad_nd"):
            # ``copy_`` writes its first argument, such as the beginning of a padded weight.
            source = self.identify(call.args[call.packet == "copy_"])
            if self._parameter_of.get(source):
                self._parameter_of.setdefault(self.identify(call.outputs[0]), self._parameter_of[source])
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result; on ``meta`` the same call on the same layouts is worked out only once."""
        writes, makes = writes_first_alone(func), makes_new_tensors(func)
        is_real = writes and any(t.device.type != "meta" for t in tensors(args[:1]))
        if self.device != "meta" or is_free(func) or not (writes or makes) or is_real:
            return func(*args, **kwargs)
        # An optimizer's numbers are others in each step, and change no layout.
        floats = not func._overloadpacket.__name__.startswith("_foreach_")
        key = (func, torch.get_default_dtype(), _layout(args, floats), _layout(tuple(kwargs.items()), floats))
        results = _RESULTS if func.namespace == "aten" else self._results
        try:
            known = results.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if known is None or known is _UNKNOWN:
            before = _layout(args[:1]) if writes else ()
            out = func(*args, **kwargs)
            several = type(out) if isinstance(out, tuple | list) else None
            layouts = [] if writes else [_result_layout(t) for t in (out if several else (out,))]
            if len(results) >= _MOST_RESULTS:
                results.clear()
            is_known = all(layouts) and (not writes or _layout(args[:1]) == before)
            results[key] = (several, layouts) if is_known else _UNKNOWN
            return out
        if writes:
            return args[0] if func._schema.returns else None
        several, layouts = known
        made = [
            dtype and torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            for shape, stride, dtype in layouts
        ]
        return several(made) if several else made[0]

    def _in_channels_last(self, call: Call) -> Any:
        """A convolution's results as cuDNN lays them out: NHWC if an operand is (meta kernels forget)."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        operands = [t for t in call.inputs if t.dim() in formats]
        if not any(is_channels_last(t) for t in operands):
            return call.out

        def convert(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() not in formats:
                return tensor
            return tensor.contiguous(memory_format=formats[tensor.dim()])

        with self.silent():
            return tuple(map(convert, call.out)) if isinstance(call.out, tuple) else convert(call.out)

    def _is_held(self, number: int) -> bool:
        return number in self._computed or self._owners.get(number) in (PARAMETERS, BUFFERS)

    def _weight_of(self, number: int) -> str:
        """The parameter that memory is of; of what is computed of several a name that none has."""
        return self._parameter_of.get(number) or _COMPUTED * (number in self._computed)

    def gradient_phase(self, operands: Iterable[torch.Tensor]) -> str:
        """Whether a product in the backward pass is a data or a weight gradient; empty outside of it.

        Only the data gradient multiplies by a parameter, or by what is computed of some. The gradients of a
        product of two activations (attention written by hand) are both data gradients.
        """
        node, _ = self._autograd_state()
        if node is None:
            return ""
        not_a_weight = self._input_of.get(node._sequence_nr())
        if not_a_weight is None:
            return BACKWARD_DATA
        reads = {self._weight_of(self.identify(t)) for t in operands}
        return BACKWARD_DATA if reads - {"", not_a_weight} else BACKWARD_WEIGHT
