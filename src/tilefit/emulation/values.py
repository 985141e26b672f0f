"""What is known of values that nobody has computed on the GPU.

Small tensors carry what they hold, as tensors on the CPU that the same operations run on: lengths, masks,
labels, positions, counters. Where an operation's result is a choice (an index, a mask, a count) that depends
on numbers which are not known, it is made for numbers drawn at random once somebody asks for it, and is from
then on an assumption, which whoever reads it is told of.
"""

from __future__ import annotations

import linecache
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import CodeType
from typing import Any

import torch

from tilefit.emulation.checks import asking
from tilefit.emulation.tensor import CudaTensor
from tilefit.emulation.value import UNWRITTEN, State, Value
from tilefit.ops.operations import NAMED

aten = torch.ops.aten
CPU = torch.device("cpu")

#: Elements up to which values are kept, and up to which they are multiplied as matrices or convolved: a
#: millisecond each, and less than 10, of a slow core.
MOST_KEPT = 1 << 20
_MOST_MULTIPLIED = 1 << 16
_PRODUCTS = frozenset("mm addmm bmm baddbmm convolution".split())
#: A chain of values that are not made yet ends here: making them calls itself.
_DEEPEST = 30
#: Comparisons in one place that are answered by no. A choice: more than a few steps of a large model have
#: parameters, whose gradients may each be asked for their norm.
_PATIENCE = 500
_WHILE = re.compile(r"\s*while (?!not\b)[^#]*[<>]")
#: Elements up to which numbers are drawn for a choice to depend on.
_MOST_DRAWN = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class _Unknown:
    """A tensor of which only the layout is known."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Schema:
    """What an operation does to memory, by its declaration."""

    writes: tuple[tuple[int, str], ...]
    aliases: bool
    is_random: bool

    @staticmethod
    @cache
    def of(func: Any) -> Schema:
        """The schema of an operation."""
        arguments = func._schema.arguments
        return Schema(
            tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write),
            any(r.alias_info is not None for r in func._schema.returns),
            torch.Tag.nondeterministic_seeded in func.tags,
        )

    def written(self, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
        """The tensors that a call writes into."""
        for index, name in self.writes:
            value = args[index] if index < len(args) else kwargs.get(name)
            yield from (t for t in (value if isinstance(value, list | tuple) else (value,)) if is_tensor(t))


def is_tensor(value: Any) -> bool:
    """Whether something is a tensor; the question is asked a million times."""
    return isinstance(value, torch.Tensor)


def is_choice(dtype: torch.dtype) -> bool:
    """Whether a type holds integers or booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether the values of such a tensor are kept."""
    return tensor.numel() <= MOST_KEPT


def of_host(tensor: torch.Tensor) -> Value | None:
    """The value of a tensor of the host's that is copied to the GPU."""
    if not is_small(tensor) or tensor.layout != torch.strided:
        return None
    return Value(tensor.detach().clone())


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """A tree of arguments with each leaf replaced."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(e, function) if type(e) in _NESTED else function(e) for e in tree])
    if kind is dict:
        return {name: mapped(each, function) for name, each in tree.items()}
    return kind([mapped(e, function) for e in tree]) if isinstance(tree, list | tuple) else function(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of arguments, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    elif not isinstance(tree, list | tuple):
        return [tree]
    found: list[Any] = []
    for each in tree:
        if type(each) in _NESTED or isinstance(each, tuple):
            found += leaves(each)
        else:
            found.append(each)
    return found


_NESTED = frozenset((list, tuple, dict))
#: Gradients are taken for finite: an optimizer that asks is told so.
_TAKEN_FOR_FINITE = "_amp_foreach_non_finite_check_and_unscale_"
_COMPARISONS = frozenset("lt le gt ge".split())


@dataclass
class Values:
    """Carries values through operations.

    Attributes:
        generator: What is drawn where nothing is known.
    """

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    _asked: Counter[tuple[CodeType, int]] = field(default_factory=Counter)
    _coin: Random = field(default_factory=lambda: Random(0))

    # ---- one operation ---------------------------------------------------------------------------

    def through(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> list[Value | None]:
        """What is known of an operation's results.

        Args:
            func, args, kwargs: The operation as it was called.
            inputs: The tensors among its arguments, in order.
            outs: Its results on ``meta``.

        Returns:
            One for each of ``outs``. Values of what it wrote into are changed, or lost.
        """
        name = func._overloadpacket.__name__
        schema = Schema.of(func)
        if schema.writes:
            return self._written(func, name, schema, (args, kwargs), inputs, outs)
        checked = (
            None if any(map(is_small, outs)) else self._checked(func, name, (args, kwargs), inputs, outs)
        )
        if checked is not None:
            return [checked]
        is_costly = name in _PRODUCTS and max(out.numel() for out in outs) > _MOST_MULTIPLIED
        if name in NAMED["known"]["empty"]:
            return [self._unwritten(each) for each in outs]
        if not outs or is_costly or not any(map(is_small, outs)):
            return [None] * len(outs)
        if schema.aliases and (memory := _memory(inputs)) is not None:
            views = self.run(func, (args, kwargs), iter([memory.unwritten])) or []
            return [Value(each, memory.state) for each in views] or [None] * len(outs)
        known = self._all_known(inputs)
        if all(isinstance(each, Value) and each.is_there for each in known):
            return self._computed(func, schema, (args, kwargs), inputs, known, outs)
        return self._deferred(func, name, schema, (args, kwargs), known, outs)

    def _all_known(self, inputs: list[torch.Tensor]) -> list[Value | _Unknown]:
        """What is known of each; the same tensor is the same, so that it equals itself."""
        found = {id(each): self._known(each) for each in inputs}
        return [found[id(each)] for each in inputs]

    def _checked(self, func: Any, name: str, call: Any, inputs: list[Any], outs: list[Any]) -> Value | None:
        """Of a mask that is too large to be kept: whether something is wrong, which nothing is taken to be.
        One element says so for all; so does what is made of such masks."""
        if len(outs) != 1 or outs[0].dtype != torch.bool:
            return None
        same = len(inputs) == 2 and inputs[0] is inputs[1]
        infinite = any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves(call))
        if name in ("isnan", "isinf") or (name == "ne" and same) or (name == "eq" and infinite):
            answer = torch.tensor(False)
        elif (name == "eq" and same) or (name == "ne" and infinite):
            answer = torch.tensor(True)
        elif name in NAMED["known"]["of_masks"]:
            known = [self._known(each) for each in inputs]
            masks = [each.tensor() if isinstance(each, Value) and each.is_there else None for each in known]
            if any(mask is None or any(mask.stride()) for mask in masks):
                return None
            results = self.run(
                func, call, iter([mask[(0,) * mask.dim()] for mask in masks if mask is not None])
            )
            if not results:
                return None
            answer = results[0]
        else:
            return None
        return Value(answer.expand(outs[0].shape), State(assumed=True))

    def _known(self, tensor: torch.Tensor) -> Value | _Unknown:
        if isinstance(tensor, CudaTensor):
            value = tensor.value
            return value if value is not None and not value.state.lost else _unknown(tensor)
        return Value(tensor) if is_small(tensor) else _unknown(tensor)

    def _computed(
        self, func: Any, schema: Schema, call: Any, inputs: list[Any], known: list[Any], outs: list[Any]
    ) -> list[Value | None]:
        """The results of values that are there."""
        if not all(map(is_small, outs)):
            return [None] * len(outs)
        results = self.run(func, call, iter([each.tensor() for each in known])) or []
        if len(results) != len(outs):
            return [None] * len(outs)
        assumed = any(each.state.assumed for each in known)
        # A view's memory is that of the first tensor it was given.
        shared = known[0].state if schema.aliases and known else None
        return [
            Value(r, shared or State(assumed)) if r.shape == o.shape and r.dtype == o.dtype else None
            for r, o in zip(results, outs, strict=True)
        ]

    def _deferred(
        self, func: Any, name: str, schema: Schema, call: Any, known: list[Any], outs: list[Any]
    ) -> list[Value | None]:
        """Choices that depend on what is not known, to be made once they are asked for."""
        numbers_unknown = any(isinstance(each, _Unknown) and not is_choice(each.dtype) for each in known)
        wanted = [is_small(o) and (is_choice(o.dtype) or not numbers_unknown) for o in outs]
        if not any(wanted):
            return [None] * len(outs)
        layouts = [(o.shape, o.dtype) for o in outs]
        call = mapped(call, lambda leaf: _SLOT if is_tensor(leaf) else leaf)
        made: list[list[torch.Tensor]] = []

        def make(index: int) -> torch.Tensor | None:
            if not made:
                made.append(self._drawn(func, name, call, known, layouts))
            return made[0][index]

        depth = 1 + max((each.depth for each in known if isinstance(each, Value)), default=0)

        def value(index: int) -> Value:
            deferred = Value(None, None, lambda: make(index), depth)
            if depth >= _DEEPEST:
                deferred.tensor()
            return deferred

        return [value(index) if each else None for index, each in enumerate(wanted)]

    def _drawn(
        self, func: Any, name: str, call: Any, known: list[Any], layouts: list[Any]
    ) -> list[torch.Tensor]:
        """The results of an operation with numbers drawn for those that are not known."""
        shape = layouts[0][0]
        if name in _COMPARISONS and not shape:
            return [torch.tensor(self._holds())]
        if name == "_to_copy" and isinstance(known[0], _Unknown) and layouts[0][1] != torch.bool:
            return [
                torch.ones(shape, dtype=dtype) for shape, dtype in layouts
            ]  # a length has one, and so has what is numbered
        sizes = [each.shape.numel() for each in known if isinstance(each, _Unknown)]
        results: list[torch.Tensor] | None = None
        if sum(sizes) <= _MOST_DRAWN:
            for draw in (torch.randn, torch.rand):  # probabilities must not be negative
                stands: dict[int, torch.Tensor] = {}
                tensors = [self._stand(each, draw, stands) for each in known]
                results = self.run(func, call, iter(tensors))
                if results:
                    break
        if results and [(r.shape, r.dtype) for r in results] == layouts:
            return results
        return [self._drawn_choice(name, call, known, *layout) for layout in layouts]

    def _holds(self) -> bool:
        """What a comparison is answered by: no, as nothing is too large, or the best so far.

        Where it is asked so often in one place that a loop may only end once it holds, as that of a solver
        that tries a smaller step: yes. A loop *while* it holds is gone through once: it holds every other
        time, and after so many times at random, for there may be two in that line.
        """
        frame = asking()
        place = frame.f_code, frame.f_lineno
        self._asked[place] += 1
        is_late = self._asked[place] > _PATIENCE
        if _WHILE.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
            return self._coin.random() < 0.5 if is_late else self._asked[place] % 2 == 1
        return is_late

    def _stand(
        self, known: Value | _Unknown, draw: Callable[..., torch.Tensor], stands: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """What an operand is taken for; the same for the same operand."""
        if id(known) not in stands:
            tensor = known.tensor() if isinstance(known, Value) else None
            if tensor is None:
                unknown = known if isinstance(known, _Unknown) else None
                shape, dtype = (unknown.shape, unknown.dtype) if unknown else (torch.Size(), torch.float32)
                tensor = self.stand_in(shape, dtype, draw)
            stands[id(known)] = tensor
        return stands[id(known)]

    def _drawn_choice(
        self, name: str, call: Any, known: list[Any], shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """Of an operation that is too large to be run: indices within range, nothing is not a number."""
        if name in ("isnan", "isinf", "isfinite") or dtype == torch.bool:
            sure = {"isnan": 0.0, "isinf": 0.0, "isfinite": 1.0}.get(name, 0.5)
            return torch.rand(shape, generator=self.generator) < sure
        first = next((each for each in known if isinstance(each, _Unknown)), None)
        if first is None or not is_choice(dtype):
            return torch.zeros(shape, dtype=dtype)
        dim = next((a for a in call[0][1:] if isinstance(a, int) and not isinstance(a, bool)), -1)
        if name == "topk":
            dim = call[0][2] if len(call[0]) > 2 else -1
        most = first.shape[dim] if len(shape) or len(first.shape) == 1 else first.shape.numel()
        return torch.randint(0, max(1, most), shape, generator=self.generator).to(dtype)

    # ---- operations that write -------------------------------------------------------------------

    def _written(
        self, func: Any, name: str, schema: Schema, call: Any, inputs: list[Any], outs: list[Any]
    ) -> list[Value | None]:
        written = list(schema.written(*call))
        if name in NAMED["known"]["overwrites"]:
            self._make_room(written[0])
        for memory in filter(None, (_memory([each]) for each in written)):
            memory.state.lost = False
        known = self._all_known(inputs)
        values = [each for each in known if isinstance(each, Value)]
        tensors = [each.tensor() for each in values]
        is_done = (
            len(values) == len(inputs)
            and all(each is not None for each in tensors)
            and self.run(func, call, iter(tensors)) is not None
        )
        assumed = any(each.state.assumed for each in values)
        for each in written:
            if isinstance(each, CudaTensor) and each.value is not None:
                each.value.state.assumed |= assumed
                if not (is_done or name == _TAKEN_FOR_FINITE):
                    each.value.state.lost = True
        return [None] * len(outs)

    def _make_room(self, tensor: torch.Tensor) -> None:
        """A small tensor that is all overwritten need not be known before."""
        if not isinstance(tensor, CudaTensor) or not is_small(tensor):
            return
        whole = tensor.on_meta.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if whole and (tensor.value is None or tensor.value.state.lost):
            tensor.value = Value(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))

    def _unwritten(self, tensor: torch.Tensor) -> Value | None:
        """Memory for choices, which are written part by part at times, as by a permutation."""
        if not is_small(tensor) or not is_choice(tensor.dtype):
            return None
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
        return Value(memory, State(lost=UNWRITTEN))

    # ---- running on the CPU ----------------------------------------------------------------------

    def run(self, func: Any, call: Any, tensors: Iterator[Any]) -> list[torch.Tensor] | None:
        """The tensors that an operation returns on the CPU; None where the CPU does not have it.

        Args:
            func: The operation.
            call: Its arguments and keywords.
            tensors: What to take for each tensor, or slot of one, in order.
        """

        def real(leaf: Any) -> Any:
            if is_tensor(leaf) or leaf is _SLOT:
                return next(tensors)
            if isinstance(leaf, torch.Generator):
                return self.generator
            return CPU if isinstance(leaf, torch.device) else leaf

        args, kwargs = mapped(call, real)
        kwargs.pop("pin_memory", None)
        with self._own_numbers() if Schema.of(func).is_random else nullcontext():
            try:
                out = func(*args, **kwargs)
            except Exception:  # noqa: BLE001 - whatever a kernel refuses on the CPU, its result is not known
                return None
        return [leaf for leaf in leaves(out) if is_tensor(leaf)]

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """The GPU draws from a generator of its own; the CPU's goes on as if nothing had been drawn."""
        kept = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(kept)

    def stand_in(
        self, shape: torch.Size, dtype: torch.dtype, draw: Callable[..., torch.Tensor] = torch.randn
    ) -> torch.Tensor:
        """What a tensor is taken for of which nothing is known: numbers drawn, masks half full, zeros."""
        if dtype == torch.bool:
            return torch.rand(shape, generator=self.generator) < 0.5
        if is_choice(dtype) or math.prod(shape) > _MOST_DRAWN:
            return torch.zeros((), dtype=dtype).expand(shape)
        return draw(shape, generator=self.generator).to(dtype)


#: Stands for a tensor in the arguments that are kept.
_SLOT = object()


def _memory(tensors: list[Any]) -> Value | None:
    """The value of a single tensor that nobody has written to."""
    value = tensors[0].value if len(tensors) == 1 and isinstance(tensors[0], CudaTensor) else None
    return value if value is not None and value.unwritten is not None else None


def _unknown(tensor: torch.Tensor) -> _Unknown:
    return _Unknown(tensor.shape, tensor.dtype)
