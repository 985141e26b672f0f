"""Attention scores that are not computed unless somebody looks.

Attention written out by hand multiplies Q and K, scales, masks, takes the softmax, perhaps drops some, and
multiplies by V. Under :class:`Fusing` the first product is not computed: a :class:`Scores` stands for it,
remembers what is asked of it, and where the weights meet V all of that becomes one call of
``scaled_dot_product_attention``. Anything else that is done to the scores computes them after all, by the
very calls that were made, so that code that is no attention runs as it always did.
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import nullcontext, suppress
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from tilefit.fixes.changes.assumed import OF_MODULES
from tilefit.fixes.changes.calls import PLAIN, autocast_dtype, offered, packing, still
from tilefit.fixes.kinds.attention.constants import Constants

#: The fused kernels stop here (PyTorch, ATen/native/transformers/cuda/sdp_utils.cpp).
LARGEST_HEAD = 256
#: What is filled into masked scores must be as small as this to mean "never": the softmax makes zeros of it,
#: in any element type, unless the other scores are below -9000.
_NEVER = -1e4
#: Scores up to half of this vanish in a sum that is rounded to multiples of it.
_ABSORBED = 32.0


class Fusing(TorchFunctionMode):
    """Within the block, products of two activations are attention scores until shown otherwise.

    Args:
        module: What runs: masks may be made of its buffers, and weights kept in its attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self.constants = Constants(module.buffers())
        self.made: list[weakref.ref[Scores]] = []
        #: Memory of what kernels returned, and keep for their gradient.
        self.kept: set[int] = set()
        self.packing = packing()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head(*args, **kwargs)
        for arg in args:
            if type(arg) is Scores:
                return called(func, args, kwargs)
        if func in _PRODUCTS and self.packing == packing():
            # Else it is checkpointed by itself, and computed anew outside of the block.
            with suppress(_OtherError):
                return _begun(self, func, args, kwargs)
        name = getattr(func, "__name__", "")
        in_place = _is_in_place(name) or kwargs.get("out") is not None or kwargs.get("inplace") is True
        if in_place and self.made:
            self.compute_pending(args[0] if args and kwargs.get("out") is None else None)
        result = func(*args, **kwargs)
        self.constants.observe(func, name, args, kwargs, result, in_place)
        return result

    def plainly(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that is just made, with scores computed."""
        with torch._C.DisableTorchFunction():
            return func(*_computed(args), **_computed(kwargs))

    def finished(self, output: Any) -> Any:
        """What the module returns, with tensors in it, as in the attributes of its parts; others may write
        to it."""
        if any(made() is not None for made in self.made):
            output = _computed(output)
            for part, name, value in list(self._attributes()):
                if any(type(leaf) is Scores for leaf in tree_leaves(value)):
                    vars(part)[name] = _computed(value)
        return tree_map(self._own, output) if self.kept else output

    def _own(self, leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor or leaf.grad_fn is None or leaf.layout != torch.strided:
            return leaf
        return leaf.clone() if leaf.untyped_storage()._cdata in self.kept else leaf

    def is_kept(self) -> bool:
        """Whether an attribute of the module holds weights: others may ask for their gradient."""
        return any(type(value) is Scores for _, _, value in self._attributes())

    def _attributes(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for part in self._module.modules():
            for name, value in vars(part).items():
                if type(value) in _HOLDERS and name not in OF_MODULES:
                    yield part, name, value

    def compute_pending(self, written: Any = None) -> None:
        """Compute what has not been used yet and may be made of a tensor that is written to; all of it, where
        it is not known which."""
        memory = written.untyped_storage()._cdata if type(written) in PLAIN else None
        for scores in [made() for made in self.made]:
            if scores is not None and not scores.fused and (memory is None or scores.reads(memory)):
                scores.computed()


class Scores(torch.Tensor):
    """The scores [..., queries, keys] of attention, or its weights after the softmax.

    Attributes:
        fusing: Where it was made.
        query, key: [..., queries, width] and [..., keys, width]; the scores are their products.
        sizes, kind: Shape and element type of the tensor.
        operands, stamp: Query and key as they were first, with what tells that nobody has written to them.
        made_by: The call that makes the tensor: function and arguments.
        state: What such a call depends on besides: autograd and autocast.
        factor, bias: The scores are the products times this, plus this (broadcast) ...
        masks, fill: ... and ``fill`` where one of the masks, (bool tensor, what it is for scores that are
            left), says so.
        softmaxed, dropped: The softmax over the keys was taken, and then dropout with this probability.
        averaged: The mean over heads was taken, of which nothing more is made.
        shares: The tensor would share its memory with another.
        value: The tensor, once it was asked for.
        fused: The weights went into a fused kernel.
    """

    fusing: Fusing
    query: torch.Tensor
    key: torch.Tensor
    sizes: torch.Size
    kind: torch.dtype
    operands: tuple[torch.Tensor, torch.Tensor]
    stamp: Any
    made_by: tuple[Any, Any, Any]
    state: tuple[bool, torch.dtype | None]
    factor: float = 1.0
    bias: torch.Tensor | None = None
    masks: tuple[tuple[torch.Tensor, bool], ...] = ()
    fill: float = -math.inf
    softmaxed: bool = False
    dropped: float = 0.0
    averaged: bool = False
    shares: bool = False
    value: torch.Tensor | None = None
    fused: bool = False

    @staticmethod
    def of(**attributes: Any) -> Scores:
        """One with these attributes."""
        query, key = attributes["query"], attributes["key"]
        is_graded = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        made: Scores = torch.Tensor._make_wrapper_subclass(
            Scores,
            attributes["sizes"],
            dtype=attributes["kind"],
            device=query.device,
            requires_grad=is_graded,
        )
        vars(made).update(attributes)
        if is_graded:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse)  # type: ignore[no-untyped-call]
        made.fusing.made.append(weakref.ref(made))
        return made

    def computed(self) -> torch.Tensor:
        """The tensor itself."""
        if self.value is None:
            if self.fused and self.dropped:
                raise RuntimeError(
                    "these attention weights were used in a fused kernel, which does not tell what it "
                    "dropped; to read them, take the fix fuse-attention back (plan.undo())"
                )
            self.require_operands()
            func, args, kwargs = self.made_by
            grad, cast = self.state
            is_same = autocast_dtype(self.query) == cast
            again = nullcontext() if is_same else torch.autocast(self.query.device.type, cast, bool(cast))
            with torch.set_grad_enabled(grad), again:
                self.value = _computed(self.fusing.plainly(func, args, kwargs))
        return self.value

    def reads(self, memory: int) -> bool:
        """Whether the calls that make the tensor read what lies in a memory, or what cannot be known to."""
        leaves = [leaf for leaf in tree_leaves(self.made_by[1:]) if isinstance(leaf, torch.Tensor)]
        return any(
            leaf.reads(memory)
            if isinstance(leaf, Scores)
            else type(leaf) not in PLAIN or leaf.untyped_storage()._cdata == memory
            for leaf in leaves
        )

    def require_operands(self) -> None:
        """Refuse to multiply what was written to since by what no one sees who follows calls.

        Raises:
            RuntimeError: it was.
        """
        if _stamp(*self.operands) != self.stamp:
            raise RuntimeError(
                "what attention scores are made of was written to before they were used; take the fix "
                "fuse-attention back (plan.undo(), tilefit.strip)"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_computed(args), **_computed(kwargs or {}))


def _stamp(*tensors: torch.Tensor) -> Any:
    return [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors]


def _refuse(gradient: torch.Tensor) -> None:
    """What was done by those who do not ask a tensor what it is (a ``Function`` of one's own, say)."""
    raise RuntimeError(
        "attention scores got a gradient; take the fix fuse-attention back (plan.undo(), tilefit.strip)"
    )


def _refuse_second(gradients: Any) -> None:
    """What is to be differentiated once more, which no fused kernel can be."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused attention has no second derivatives; take the fix fuse-attention back "
            "(plan.undo(), tilefit.strip)"
        )


#: What may hold scores in an attribute of a module; and attributes that do not.
_HOLDERS = frozenset((Scores, list, tuple, dict))


def _computed(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.computed() if type(leaf) is Scores else leaf, tree)


def _state(tensor: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    return torch.is_grad_enabled(), autocast_dtype(tensor)


_IN_PLACE = frozenset(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor".split())
#: Sets ``.data``, or an element; or gives the memory to others, who may write there (a kernel of one's own).
_IN_PLACE |= {"__set__", "__setitem__", "numpy", "__array__", "__dlpack__", "data_ptr"}


def _is_in_place(name: str) -> bool:
    """Whether the call of this name writes into its first argument."""
    # An overload of an operator is called ``mul_.Tensor``.
    return name in _IN_PLACE or "_." in name or (name[-1:] == "_" and name[-2:] != "__")


# ---- what calls do to scores -------------------------------------------------------------------

#: What is known without the numbers.
_KNOWN = frozenset(
    getattr(getattr(torch.Tensor, name), "__get__", None)
    for name in "shape dtype device ndim requires_grad is_cuda is_meta layout".split()
) | {getattr(torch.Tensor, name) for name in "dim size numel is_floating_point __len__".split()}


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """A call of PyTorch with scores among its arguments."""
    step = _STEPS.get(func)
    scores: Scores | None = next((arg for arg in args if type(arg) is Scores), None)
    if scores is None:  # in a list, or named
        scores = next(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Scores)
    elif func in _KNOWN and scores.value is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if (
        step is None
        or scores.averaged
        or scores.value is not None
        or scores.state != _state(scores.query)
        or not any(scores is arg for arg in args)
        or not kwargs.keys() <= _KEYWORDS
    ):
        return scores.fusing.plainly(func, args, kwargs)
    in_place = func in _IN_PLACE_STEPS
    if in_place and (scores.shares or scores is not args[0]):
        scores.fusing.compute_pending()
        return scores.fusing.plainly(func, args, kwargs)
    if in_place:  # as it was until now
        args = (Scores.of(**vars(scores)), *args[1:])
    try:
        result = step(*args, **kwargs)
    except _OtherError:
        return scores.fusing.plainly(func, args, kwargs)
    if not isinstance(result, dict):
        return result
    changed = {**vars(scores), "made_by": (func, args, kwargs), "shares": False, **result}
    if in_place:
        vars(scores).update(changed, kind=scores.kind)
        return scores
    return Scores.of(**changed)


#: Names of arguments that the functions below know.
_KEYWORDS = frozenset("alpha mask value dim dtype _stacklevel p training inplace".split())


class _OtherError(Exception):
    """What is done is not what a fused kernel does."""


def _need(condition: Any) -> None:
    """Leave a call that is something else to be made as it is."""
    if not condition:
        raise _OtherError


def _number(scores: Scores, value: Any) -> float:
    """A number, or a tensor of one element that is known to be one."""
    if isinstance(value, torch.Tensor):
        value = scores.fusing.constants.number(value)
    _need(isinstance(value, int | float) and not isinstance(value, bool))
    return float(value)


def _mul(a: Any, b: Any) -> Any:
    scores, other = (a, b) if isinstance(a, Scores) else (b, a)
    return _scaled(scores, _number(scores, other))


def _div(scores: Any, other: Any) -> Any:
    _need(isinstance(scores, Scores))
    number = _number(scores, other)
    _need(number)
    return _scaled(scores, 1 / number)


def _scaled(scores: Scores, factor: float) -> Any:
    _need(not scores.softmaxed)
    _need(not scores.masks or (factor > 0 and scores.fill * factor <= _NEVER))
    bias = None if scores.bias is None else scores.bias * factor
    fill = scores.fill * factor if scores.masks else scores.fill
    return {"factor": scores.factor * factor, "bias": bias, "fill": fill}


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    scores, bias = (a, b) if isinstance(a, Scores) else (b, a)
    _need(alpha == 1 and not scores.softmaxed and _fits(bias, scores) and bias.is_floating_point())
    # Else a row that is masked throughout would become the bias's softmax.
    _need(not scores.masks or scores.fill == -math.inf)
    bias = _narrow(bias)
    dtype = torch.promote_types(scores.kind, bias.dtype)
    return {"bias": bias if scores.bias is None else scores.bias + bias, "kind": dtype}


def _fits(tensor: Any, scores: Scores) -> bool:
    """Whether a tensor can be broadcast to the scores."""
    if not isinstance(tensor, torch.Tensor) or not 0 < tensor.dim() <= len(scores.sizes):
        return False
    sizes = zip(reversed(tensor.shape), reversed(scores.sizes), strict=False)
    return all(size in (1, own) for size, own in sizes)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the copies that ``expand`` pretends there are."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _where(a: Any, b: Any, c: Any) -> Any:
    if isinstance(a, Scores):  # scores.where(mask, other)
        return _masked(a, b, c, keep=True)
    return _masked(b, a, c, keep=True) if isinstance(b, Scores) else _masked(c, a, b)


def _masked(scores: Any, mask: Any, value: Any, *, keep: bool = False) -> Any:
    _need(isinstance(scores, Scores) and not scores.softmaxed and _fits(mask, scores))
    fill = _number(scores, value)
    # What no number of the type is: an error, or minus infinity.
    _need(fill <= _NEVER and (fill == -math.inf or fill >= torch.finfo(scores.kind).min))
    _need(mask.dtype == torch.bool and (not scores.masks or scores.fill == fill))
    return {"masks": (*scores.masks, (_narrow(mask), keep)), "fill": fill}


def _softmax(scores: Any, dim: Any = None, *rest: Any, dtype: Any = None, _stacklevel: int = 3) -> Any:
    _need(isinstance(scores, Scores) and not scores.softmaxed and dim in (-1, len(scores.sizes) - 1))
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), dtype)
    if dtype is None:
        dtype = torch.float32 if scores.state[1] else scores.kind
    return {"softmaxed": True, "kind": dtype}


def _dropout(scores: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return {}
    _need(not inplace and scores.softmaxed and not scores.dropped and p < 1)
    return {"dropped": p}


def _to(scores: Any, target: Any = None, *rest: Any, dtype: Any = None) -> Any:
    if not isinstance(scores, Scores):  # a tensor that is to be like the scores
        _need(target is not None)
        return scores.to(target.device, target.dtype)
    target = getattr(target, "dtype", target) if target is not None else dtype
    _need(not rest and isinstance(target, torch.dtype) and target.is_floating_point)
    return {"kind": target}


def _view(scores: Any, *sizes: Any) -> Any:
    """Other sizes before the last two."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    _need(len(sizes) > 1 and all(isinstance(size, int) for size in sizes))
    if -1 in sizes:
        others = -math.prod(sizes)
        sizes = tuple(math.prod(scores.sizes) // others if size == -1 and others else size for size in sizes)
    _need(sizes[-2:] == scores.sizes[-2:] and math.prod(sizes) == math.prod(scores.sizes))
    lead, old = sizes[:-2], scores.sizes[:-2]
    scores.shares = True
    return {
        "sizes": torch.Size(sizes),
        "query": _with_lead(scores.query, old, lead),
        "key": _with_lead(scores.key, old, lead),
        "bias": None if scores.bias is None else _with_lead(scores.bias, old, lead),
        "masks": tuple((_with_lead(mask, old, lead), keep) for mask, keep in scores.masks),
        "shares": True,
    }


def _with_lead(tensor: torch.Tensor, old: Any, new: Any) -> torch.Tensor:
    """A tensor whose sizes before the last two broadcast to ``old``, so that they broadcast to ``new``."""
    if all(size == 1 for size in tensor.shape[:-2]):
        return tensor.reshape(tensor.shape[-2:]) if tensor.dim() > 2 else tensor
    return tensor.expand(*old, *tensor.shape[-2:]).reshape(*new, *tensor.shape[-2:])


def _mean(scores: Any, dim: Any = None) -> Any:
    """Over heads, as ``nn.MultiheadAttention`` returns it."""
    _need(dim == 1 and len(scores.sizes) == 4)
    return {"sizes": scores.sizes[:1] + scores.sizes[2:], "averaged": True}


def _expand_as(tensor: Any, scores: Any) -> Any:
    _need(not isinstance(tensor, Scores))
    return tensor.expand(scores.sizes)


def _matmul(scores: Any, value: Any) -> Any:
    _need(isinstance(scores, Scores) and isinstance(value, torch.Tensor) and value.dim() == len(scores.sizes))
    return _attended(scores, value)


def _einsum(equation: Any, *operands: Any) -> Any:
    (a, b), (first, second, out) = operands, _letters(equation, operands)
    if not isinstance(a, Scores):
        a, b, first, second = b, a, second, first
    _need(isinstance(a, Scores) and isinstance(b, torch.Tensor))
    width = "".join(set(second) - set(first))
    made = first[:-1] + width
    _need(len(width) == 1 and sorted(out) == sorted(made))
    return _arranged(_attended(a, _arranged(b, second, first[:-2] + first[-1] + width)), made, out)


def _functions(names: str) -> Iterator[Any]:
    """What PyTorch offers under these names: functions, methods, and methods that work in place."""
    forms = [form for name in names.split() for form in (name, f"{name}_", f"__{name}__", f"__i{name}__")]
    found = offered(forms)
    _followed.update(found)
    yield from found.values()


#: The functions by where they are found.
_followed: dict[tuple[Any, str], Any] = {}


#: What becomes of scores, by the function that is called.
_STEPS: dict[Any, Callable[..., Any]] = {
    func: step
    for names, step in (
        ("mul multiply rmul", _mul),
        ("div divide true_divide truediv", _div),
        ("add radd", _add),
        ("masked_fill", _masked),
        ("where", _where),
        ("softmax", _softmax),
        ("dropout", _dropout),
        ("to type type_as", _to),
        ("float", partial(_to, target=torch.float32)),
        ("double", partial(_to, target=torch.float64)),
        ("half", partial(_to, target=torch.float16)),
        ("bfloat16", partial(_to, target=torch.bfloat16)),
        ("view reshape", _view),
        ("contiguous", lambda scores: {}),
        ("expand_as", _expand_as),
        ("mean", _mean),
        ("matmul bmm", _matmul),
        ("einsum", _einsum),
    )
    for func in _functions(names)
}


_IN_PLACE_STEPS = frozenset(func for func in _STEPS if _is_in_place(func.__name__))


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's own function, which hands itself over as a whole where somebody follows calls, with its calls
    followed."""
    func = F.multi_head_attention_forward
    within = {**vars(F), "has_torch_function": lambda tensors: False}
    return types.FunctionType(func.__code__, within, argdefs=func.__defaults__)(*args, **kwargs)


# ---- from the first product to the fused kernel ------------------------------------------------

_PRODUCTS = frozenset(f for f in _functions("matmul bmm einsum baddbmm") if not _is_in_place(f.__name__))
_WITH_SUM = frozenset(_functions("baddbmm"))

#: Whether nobody has put others in place of these functions: one that calls the original is called twice by
#: what follows calls, for PyTorch then names it by where it is found.
are_torchs = still(_followed)


def _begun(mode: Fusing, func: Any, args: Any, kwargs: Any) -> Scores:
    """The scores that a product may be."""
    more: dict[str, Any] = {}
    if func in _WITH_SUM and len(args) == 3 and kwargs.keys() <= {"beta", "alpha"}:
        more = _with_sum(*args, **kwargs)
        query, key = args[1:]
    elif func is torch.einsum:
        query, key = _by_letters(*args, **kwargs)
    else:
        _need(len(args) == 2 and not kwargs)
        query, key = args
    _need(_is_operand(query) and _is_operand(key) and query.dim() == key.dim())
    if func is not torch.einsum:
        key = key.transpose(-2, -1)
    _need(query.shape[-1] == key.shape[-1] <= LARGEST_HEAD)
    state = _state(query)
    _need(query.dtype == key.dtype or state[1] is not None)
    pairs = list(zip(query.shape[:-2], key.shape[:-2], strict=True))
    _need(all(a == b or 1 in (a, b) for a, b in pairs))  # else the product will say so
    lead = (a if b == 1 else b for a, b in pairs)
    sizes = torch.Size((*lead, query.shape[-2], key.shape[-2]))
    kind = state[1] or query.dtype
    begun = Scores.of(
        fusing=mode,
        query=query,
        key=key,
        sizes=sizes,
        kind=kind,
        operands=(query, key),
        stamp=_stamp(query, key),
        made_by=(func, args, kwargs),
        state=state,
        **more,
    )
    _need(begun.bias is None or _fits(begun.bias, begun))
    return begun


def _with_sum(bias: Any, query: Any, key: Any, *, beta: Any = 1, alpha: Any = 1) -> dict[str, Any]:
    """What ``baddbmm`` makes of the product: ``beta * bias + alpha * product``."""
    _need(isinstance(beta, int | float) and isinstance(alpha, int | float))
    if beta == 0:  # whatever memory ``bias`` has is not read
        return {"factor": float(alpha)}
    _need(isinstance(bias, torch.Tensor) and bias.dtype == query.dtype)
    return {"factor": float(alpha), "bias": _narrow(bias) * beta}


def _is_operand(tensor: Any) -> bool:
    """An activation with a batch; neither a parameter nor a tensor of another kind."""
    return type(tensor) is torch.Tensor and tensor.dim() > 2 and tensor.is_floating_point()


def _letters(equation: Any, operands: Any) -> list[str]:
    """The letters of the two operands of an einsum, and of its result; with "..." as capitals."""
    _need(isinstance(equation, str) and len(operands) == 2 and "->" in equation)
    inputs, out = equation.replace(" ", "").split("->")
    parts = [*inputs.split(","), out]
    if "..." in equation:
        more = operands[0].dim() + 3 - len(parts[0]) if parts[0].startswith("...") else 0
        dots = "ABCDEFGH"[: max(0, more)]
        parts = [part.replace("...", dots) for part in parts]
    _need(len(parts) == 3 and all(len(set(part)) == len(part) and part.isalpha() for part in parts))
    _need(all(len(part) == operand.dim() for part, operand in zip(parts, operands, strict=False)))
    return parts


def _by_letters(equation: Any, *operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key [..., rows, width] of a product over one letter whose result ends in their rows."""
    _need(all(map(_is_operand, operands)))  # what is traced has no sizes to look at
    (a, b), (first, second, out) = operands, _letters(equation, operands)
    _need(len(out) > 1)
    if out[-2] not in first:
        a, b, first, second = b, a, second, first
    width = "".join(set(first) & set(second) - set(out))
    _need(len(width) == 1)
    return _arranged(a, first, out[:-1] + width), _arranged(b, second, out[:-2] + out[-1] + width)


def _arranged(tensor: torch.Tensor, letters: str, wanted: str) -> torch.Tensor:
    """A tensor whose dimensions have letters, with these in another order."""
    _need(sorted(letters) == sorted(wanted))
    return tensor.permute([letters.index(letter) for letter in wanted])


def _attended(scores: Scores, value: torch.Tensor) -> torch.Tensor:
    """The weights times the values, [..., queries, width], in one call."""
    query, key = scores.query, scores.key
    cast, lead = scores.state[1] is not None, scores.sizes[:-2]
    _need(scores.softmaxed and _is_operand(value) and value.shape[:-1] == (*lead, key.shape[-2]))
    _need(cast or query.dtype == value.dtype == scores.kind)
    _need(not scores.fusing.is_kept())
    scores.require_operands()
    causal = _is_causal(scores)
    mask = None if causal else scores.bias
    nowhere = None
    if not causal and (scores.masks or mask is not None):
        query, mask, nowhere = _masking(scores, query)
        if nowhere is not None and value.requires_grad:
            value = _Undefined.apply(value, nowhere)  # type: ignore[no-untyped-call]
    if mask is not None:
        mask = _mask_of_four(mask if mask.dtype == torch.bool or cast else mask.to(query.dtype), lead)
    query, key, value = (_of_four(tensor, lead) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=scores.dropped,
        is_causal=causal,
        scale=scores.factor,
    )
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(_refuse_second)
        scores.fusing.kept.add(out.untyped_storage()._cdata)
    scores.fused = True
    out = out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])
    return out if nowhere is None else torch.where(nowhere, math.nan, out)


class _Undefined(Function):
    """The values; where a query has no key left and its weights are no numbers, neither is their gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, nowhere: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(nowhere)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (nowhere,) = ctx.saved_tensors
        return gradient.masked_fill(nowhere.any(-2, keepdim=True), math.nan), None


def _masking(scores: Scores, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Query and mask for the kernel, which makes zeros of a row without a key that is left; and which rows of
    its result are no numbers.

    Such a row's weights are equal, as those of a query of zeros, or not a number where ``fill`` is minus
    infinity. No kernel computes the gradients of a row whose scores are lost beside a mask that was added,
    and are differentiated all the same.
    """
    mask, nowhere = scores.bias, None
    if scores.masks:
        each = [mask if keep else mask.logical_not() for mask, keep in scores.masks]
        kept = reduce(torch.logical_and, each)
        empty = kept.any(-1, keepdim=True).logical_not()
        kept = kept | empty
        if scores.fill == -math.inf:
            nowhere = empty
        else:
            query = torch.where(empty, 0.0, query)
        if mask is None:
            return query, kept, nowhere
        mask = torch.where(kept, mask.masked_fill(empty, 0), -math.inf)
    assert mask is not None
    # To differentiate a row, kernels keep the logarithm of its sum, which is lost beside a large number: in
    # each row the largest is zero. Where it was so large that the scores were lost beside it, they still are.
    top = mask.detach().amax(-1, keepdim=True)
    lost = top <= -_ABSORBED / torch.finfo(scores.kind).eps
    _need(not _is_looked_at(scores) or not _is_any(lost, scores))
    # Of minus infinity no number, in both passes.
    return query * torch.where(lost, top - top, 1.0).to(query.dtype), mask - top, nowhere


def _is_looked_at(scores: Scores) -> bool:
    """Whether the host may wait for a mask: in training, for one that is no parameter's function."""
    bias = scores.bias
    if bias is None or bias.requires_grad or not scores.requires_grad or type(bias) is not torch.Tensor:
        return False
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    is_capturing = begun and torch.cuda.is_current_stream_capturing()
    return not (bias.is_meta or is_capturing)


#: Of tensors that masks are views of: what was found in which view of which version.
_looked_at: MutableMapping[torch.Tensor, dict[Any, bool]] = WeakTensorKeyDictionary()


def _is_any(lost: torch.Tensor, scores: Scores) -> bool:
    """Whether there is a row that is lost: looked up where the layers of a model share a mask."""
    bias = scores.bias
    assert bias is not None
    if scores.masks or bias.is_inference():
        return bool(lost.any())
    base = bias if bias._base is None else bias._base
    key = bias.storage_offset(), bias.shape, bias.stride(), bias._version, scores.kind
    known = _looked_at.setdefault(base, {})
    if key not in known:
        known[key] = bool(lost.any())
    return known[key]


def _is_causal(scores: Scores) -> bool:
    known = scores.fusing.constants.is_causal
    if scores.bias is None and len(scores.masks) == 1:
        return known(*scores.masks[0], _NEVER)
    return scores.bias is not None and not scores.masks and known(scores.bias, True, _NEVER)


def _of_four(tensor: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """[batch, heads, rows, width], heads being the last of the leading sizes."""
    if tensor.dim() != 4 or tensor.shape[:-2] != lead:
        tensor = tensor.expand(*lead, *tensor.shape[-2:])
        tensor = tensor.reshape(math.prod(lead[:-1]), lead[-1], *tensor.shape[-2:])
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _mask_of_four(mask: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """The same for what need only be broadcast."""
    mask = mask.reshape((1,) * (len(lead) + 2 - mask.dim()) + tuple(mask.shape))
    batch = mask.shape[: len(lead) - 1]
    if any(size != 1 for size in batch):
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
