"""Attention scores that are not computed unless somebody looks.

Attention written out by hand multiplies Q and K, scales, masks, takes the softmax, perhaps drops some, and
multiplies by V. Under :class:`Fusing` the first product is not computed: a :class:`Scores` stands for it,
remembers what is asked of it, and where the weights meet V all of that becomes one call of
``scaled_dot_product_attention``. Anything else that is done to the scores computes them after all, by the
very calls that were made, so that code that is no attention runs as it always did.
"""

from __future__ import annotations

import math
import re
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial, reduce
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdRef

from tilefit.fixes.changes.assumed import OF_MODULES
from tilefit.fixes.changes.calls import PLAIN, autocast_dtype, offered, packing, still
from tilefit.fixes.kinds.attention.constants import Constants, found_out, may_be_read

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
        self._packing = packing()
        self.constants = Constants(module.buffers())
        self.made: list[weakref.ref[Scores]] = []
        #: What kernels returned, and keep for their gradient.
        self.outputs: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head(*args, **kwargs)
        if Scores in map(type, args):
            return called(func, args, kwargs)
        if func in _PRODUCTS and self._packing == packing():
            # Else it is checkpointed by itself, and computed anew outside of the block.
            with suppress(_OtherError):
                return _begun(self, func, args, kwargs)
        in_place = self.write(func, args, kwargs)
        result = func(*args, **kwargs)
        self.constants.observe(func, args, kwargs, result, in_place)
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
        return tree_map(self._own, output) if self.outputs else output

    def _own(self, leaf: Any) -> Any:
        is_plain = type(leaf) is torch.Tensor
        return leaf.clone() if is_plain and any(o is leaf or o is leaf._base for o in self.outputs) else leaf

    def is_kept(self) -> bool:
        """Whether an attribute of the module holds weights: others may ask for their gradient."""
        return any(type(value) is Scores for _, _, value in self._attributes())

    def _attributes(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for part in self._module.modules():
            for name, value in vars(part).items():
                if type(value) in _HOLDERS and name not in OF_MODULES:
                    yield part, name, value

    def write(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call writes to its first argument. Before it does, what has not been used yet and may be
        made of that is computed; all of it, where it is not known what is written to."""
        has_out = kwargs.get("out") is not None
        if not (_is_in_place(getattr(func, "__name__", "")) or has_out or kwargs.get("inplace") is True):
            return False
        written = None if has_out else next(iter(args), None)
        is_known = type(written) in PLAIN or (type(written) is Scores and not written.shares)
        for scores in [made() for made in self.made]:
            if scores is not None and not scores.fused and (not is_known or scores.reads(written)):
                scores.computed()
        return True


class Scores(torch.Tensor):
    """The scores [..., queries, keys] of attention, or its weights after the softmax.

    Attributes:
        fusing: Where it was made.
        query, key: [..., queries, width] and [..., keys, width]; the scores are their products.
        sizes, kind: Shape and element type of the tensor.
        stamps: Query and key as they were first, with what tells that nobody has written to them.
        made_by: The call that makes the tensor: function and arguments.
        state: What such a call depends on besides: autograd and autocast.
        factor, bias: The scores are the products times this, plus this (broadcast) ...
        masks, fill: ... and ``fill`` where one of the masks, (bool tensor, what it is for scores that are
            left), says so.
        softmaxed, dropped: The softmax over the keys was taken, and then dropout with this probability.
        averaged: The mean over heads was taken, of which nothing more is made.
        shares: The tensor may be, or share its memory with, what it was made of; or it is computed.
        value: The tensor, once it was asked for.
        fused: The weights went into a fused kernel.
    """

    fusing: Fusing
    query: torch.Tensor
    key: torch.Tensor
    sizes: torch.Size
    kind: torch.dtype
    stamps: Any
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
        query, sizes, kind = attributes["query"], attributes["sizes"], attributes["kind"]
        graded = torch.is_grad_enabled() and (query.requires_grad or attributes["key"].requires_grad)
        make = torch.Tensor._make_wrapper_subclass
        made: Scores = make(Scores, sizes, dtype=kind, device=query.device, requires_grad=graded)
        vars(made).update(attributes)
        if graded:
            with torch._C.DisableTorchFunctionSubclass():
                # Of those who do not ask a tensor what it is (a ``Function`` of one's own, say).
                made.register_hook(lambda gradient: _refuse("attention scores got a gradient"))  # type: ignore[no-untyped-call]
        made.fusing.made.append(weakref.ref(made))
        return made

    def computed(self) -> torch.Tensor:
        """The tensor itself."""
        if self.value is None:
            if self.fused and self.dropped:
                _refuse("attention weights went into a fused kernel, which does not tell what it dropped")
            grad, cast = self.state
            is_same = autocast_dtype(self.query) == cast
            again = nullcontext() if is_same else torch.autocast(self.query.device.type, cast, bool(cast))
            with torch._C.DisableTorchFunction(), torch.set_grad_enabled(grad), again:
                self.require_operands()
                self.value = self.fusing.plainly(*self.made_by)
            self.shares = True
        return self.value

    def reads(self, written: Any) -> bool:
        """Whether the calls that make the tensor read another, or what may lie in its memory."""
        leaves = () if self is written else tree_leaves(self.made_by[1:])
        return any(
            leaf is written or (leaf.reads(written) if type(leaf) is Scores else _may_share(leaf, written))
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        )

    def require_operands(self) -> None:
        """Refuse to multiply what was written to since by what no one sees who follows calls.

        Raises:
            RuntimeError: it was.
        """
        if any(_stamp(tensor) != stamp for tensor, stamp in self.stamps):
            _refuse("what attention scores are made of was written to before they were used")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_computed(args), **_computed(kwargs or {}))


def _may_share(tensor: Any, other: Any) -> bool:
    """Whether tensors may lie in the same memory. Scores that are not computed lie in none."""
    if type(other) is Scores:
        return False
    return type(tensor) not in PLAIN or tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(f"{what}; take the fix fuse-attention back (plan.undo(), tilefit.strip)")


def _refuse_second(gradients: Any) -> None:
    """What is to be differentiated once more, which no fused kernel can be."""
    if torch.is_grad_enabled():
        _refuse("fused attention has no second derivatives")


#: What may hold scores in an attribute of a module; and attributes that do not.
_HOLDERS = frozenset((Scores, list, tuple, dict))


def _computed(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.computed() if type(leaf) is Scores else leaf, tree)


def _state(tensor: torch.Tensor) -> tuple[bool, torch.dtype | None]:
    return torch.is_grad_enabled(), autocast_dtype(tensor)


_IN_PLACE = frozenset(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor".split())
#: Sets ``.data``, or an element; or gives the memory to others, who may write there (a kernel of one's own).
_IN_PLACE |= {"__set__", "__setitem__", "numpy", "__array__", "__dlpack__", "data_ptr"}


@cache
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
    """A call of PyTorch with scores among its arguments; perhaps in a list, or named."""
    direct = Scores in map(type, args)
    scores = next(leaf for leaf in (args if direct else tree_leaves((args, kwargs))) if type(leaf) is Scores)
    if func in _KNOWN and scores.value is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    in_place = scores.fusing.write(func, args, kwargs)
    with suppress(_OtherError):
        _need(func in _STEPS and direct and scores.value is None and not scores.averaged)
        _need(scores.state == _state(scores.query) and kwargs.keys() <= _KEYWORDS)
        _need(scores is args[0] or not in_place)
        result = _STEPS[func](*args, **kwargs)
        if not isinstance(result, dict):
            return result
        if not in_place:
            return Scores.of(**{**vars(scores), "shares": False, **result, "made_by": (func, args, kwargs)})
        args = Scores.of(**vars(scores)), *args[1:]  # as it was until now
        vars(scores).update(result, kind=scores.kind, made_by=(func, args, kwargs))
        return scores
    return scores.fusing.plainly(func, args, kwargs)


#: Names of arguments that the functions below know.
_KEYWORDS = frozenset("alpha mask value dim dtype _stacklevel p training inplace".split())


class _OtherError(Exception):
    """What is done is not what a fused kernel does."""


def _need(condition: Any) -> None:
    """Leave a call that is something else to be made as it is."""
    if not condition:
        raise _OtherError


def _scaled(a: Any, b: Any, power: int = 1) -> Any:
    scores, other = (a, b) if isinstance(a, Scores) else (b, a)
    number = _number(scores, other)
    _need(not scores.softmaxed and (power > 0 or (scores is a and number)))
    factor = number**power
    _need(not scores.masks or (factor > 0 and scores.fill * factor <= _NEVER))
    bias = None if scores.bias is None else scores.bias * factor
    fill = scores.fill * factor if scores.masks else scores.fill
    return {"factor": scores.factor * factor, "bias": bias, "fill": fill}


def _number(scores: Scores, value: Any) -> float:
    """A number, or a tensor of one element that is known to be one."""
    if isinstance(value, torch.Tensor):
        value = scores.fusing.constants.number(value)
    _need(isinstance(value, int | float) and not isinstance(value, bool))
    return float(value)


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
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


def _where(a: Any, b: Any, c: Any) -> Any:
    if isinstance(a, Scores):  # scores.where(mask, other)
        a, b = b, a
    return _masked(b, a, c, keep=True) if isinstance(b, Scores) else _masked(c, a, b)


def _masked(scores: Any, mask: Any, value: Any, *, keep: bool = False) -> Any:
    _need(isinstance(scores, Scores) and not scores.softmaxed and _fits(mask, scores))
    fill = _number(scores, value)
    # What no number of the type is: an error, or minus infinity.
    _need(fill <= _NEVER and (fill == -math.inf or fill >= torch.finfo(scores.kind).min))
    _need(mask.dtype == torch.bool and (not scores.masks or scores.fill == fill))
    return {"masks": (*scores.masks, (_narrow(mask), keep)), "fill": fill}


def _softmax(scores: Scores, dim: Any = None, *rest: Any, dtype: Any = None, _stacklevel: int = 3) -> Any:
    _need(not scores.softmaxed and dim in (-1, len(scores.sizes) - 1))
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), dtype)
    return {"softmaxed": True, "kind": dtype or (torch.float32 if scores.state[1] else scores.kind)}


def _dropout(scores: Scores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return {"shares": True}
    _need(not inplace and scores.softmaxed and not scores.dropped and p < 1)
    return {"dropped": p}


def _to(scores: Any, target: Any = None, *rest: Any, dtype: Any = None) -> Any:
    if not isinstance(scores, Scores):  # a tensor that is to be like the scores
        return scores.to(target.device, target.dtype)
    target = dtype if target is None else getattr(target, "dtype", target)
    _need(not rest and isinstance(target, torch.dtype) and target.is_floating_point)
    return {"kind": target, "shares": target == scores.kind}


def _view(scores: Scores, *sizes: Any) -> Any:
    """Other sizes before the last two."""
    sizes = tuple(sizes[0]) if isinstance(sizes[0], tuple | list) else sizes
    _need(len(sizes) > 1 and all(isinstance(size, int) for size in sizes))
    sizes = torch.empty(scores.sizes, device="meta").view(sizes).shape
    _need(sizes[-2:] == scores.sizes[-2:])
    folded = partial(_folded, old=scores.sizes[:-2], new=sizes[:-2])
    return {
        "sizes": sizes,
        "query": folded(scores.query),
        "key": folded(scores.key),
        "bias": None if scores.bias is None else folded(scores.bias),
        "masks": tuple((folded(mask), keep) for mask, keep in scores.masks),
        "shares": True,
    }


def _folded(tensor: torch.Tensor, old: torch.Size, new: torch.Size) -> torch.Tensor:
    """A tensor whose sizes before the last two broadcast to ``old``, so that they broadcast to ``new``."""
    if old == new or tensor.dim() <= 2:
        return tensor
    if tensor.shape[:-2].numel() == 1:
        return tensor.reshape(tensor.shape[-2:])
    return tensor.expand(*old, *tensor.shape[-2:]).reshape(*new, *tensor.shape[-2:])


def _mean(scores: Scores, dim: Any = None) -> Any:
    """Over heads, as ``nn.MultiheadAttention`` returns it."""
    _need(dim == 1 and len(scores.sizes) == 4)
    return {"sizes": scores.sizes[:1] + scores.sizes[2:], "averaged": True}


def _expand_as(tensor: Any, scores: Any) -> Any:
    _need(not isinstance(tensor, Scores))
    return tensor.expand(scores.sizes)


def _einsum(equation: Any, *operands: Any) -> Any:
    (first, second, out), (scores, value) = _letters(equation, *operands), operands
    _need(isinstance(scores, Scores))
    width = "".join(set(second) - set(first))
    value = _arranged(value, second, first[:-2] + first[-1] + width)
    return _arranged(_attended(scores, value), first[:-1] + width, out)


def _functions(names: str) -> Iterator[Any]:
    """What PyTorch offers under these names: functions, methods, and methods that work in place."""
    forms = [form for name in names.split() for form in (name, f"{name}_", f"__{name}__", f"__i{name}__")]
    found = offered(forms)
    _found.update(found)
    yield from found.values()


#: The functions by where they are found.
_found: dict[tuple[Any, str], Any] = {}


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's own function, which hands itself over as a whole where somebody follows calls, with its calls
    followed."""
    func = F.multi_head_attention_forward
    within = {**vars(F), "has_torch_function": lambda tensors: False}
    return types.FunctionType(func.__code__, within, argdefs=func.__defaults__)(*args, **kwargs)


# ---- from the first product to the fused kernel ------------------------------------------------


def _begun(mode: Fusing, func: Any, args: Any, kwargs: Any) -> Scores:
    """The scores that a product may be."""
    query, key, change = _PRODUCTS[func](*args, **kwargs)
    state = _state(query)
    _need(query.dim() == key.dim() and query.shape[-1] == key.shape[-1] <= LARGEST_HEAD)
    _need(query.dtype == key.dtype or state[1] is not None)
    lead = torch._C._infer_size(query.shape[:-2], key.shape[:-2])
    begun = Scores.of(
        fusing=mode,
        query=query,
        key=key,
        sizes=torch.Size((*lead, query.shape[-2], key.shape[-2])),
        kind=state[1] or query.dtype,
        stamps=[(tensor, _stamp(tensor)) for tensor in (query, key)],
        made_by=(func, args, kwargs),
        state=state,
        **change,
    )
    _need(begun.bias is None or _fits(begun.bias, begun))
    return begun


#: Query and key [..., rows, width] of a product, and what else it makes of the scores.
_Product = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def _product(*args: Any, **kwargs: Any) -> _Product:
    _need(len(args) == 2 and not kwargs and all(map(_is_operand, args)))
    return args[0], args[1].transpose(-2, -1), {}


def _is_operand(tensor: Any) -> bool:
    """An activation with a batch; neither a parameter nor a tensor of another kind."""
    return type(tensor) is torch.Tensor and tensor.dim() > 2 and tensor.is_floating_point()


def _with_sum(bias: Any, *args: Any, beta: Any = 1, alpha: Any = 1, **kwargs: Any) -> _Product:
    """``beta * bias + alpha * product``; without beta, whatever memory ``bias`` has is not read."""
    query, key, _ = _product(*args, **kwargs)
    _need(isinstance(beta, int | float) and isinstance(alpha, int | float))
    _need(beta == 0 or (isinstance(bias, torch.Tensor) and bias.dtype == query.dtype))
    return query, key, {"factor": float(alpha), "bias": _narrow(bias) * beta if beta else None}


def _by_letters(*args: Any, **kwargs: Any) -> _Product:
    """Of a product over one letter whose result ends in their rows."""
    _need(not kwargs and all(map(_is_operand, args[1:])))  # what is traced has no sizes to look at
    (a, b), (first, second, out) = args[1:], _letters(*args)
    _need(len(out) > 1)
    if out[-2] not in first:
        a, b, first, second = b, a, second, first
    width = "".join(set(first) & set(second) - set(out))
    query = _arranged(a, first, out[:-1] + width)
    return query, _arranged(b, second, out[:-2] + out[-1] + width), {}


def _letters(equation: Any, *operands: torch.Tensor) -> list[str]:
    """The letters of the two operands of an einsum, and of its result; with "..." as capitals."""
    _need(isinstance(equation, str) and len(operands) == 2)
    parts = re.split(",|->", equation.replace(" ", ""))
    dots = "ABCDEFGH"[: operands[0].dim() + 3 - len(parts[0])]
    parts = [part.replace("...", dots) for part in parts]
    _need(len(parts) == 3 and all(len(set(part)) == len(part) and part.isalpha() for part in parts))
    _need(all(len(part) == operand.dim() for part, operand in zip(parts, operands, strict=False)))
    return parts


def _arranged(tensor: torch.Tensor, letters: str, wanted: str) -> torch.Tensor:
    """A tensor whose dimensions have letters, with these in another order."""
    _need(sorted(letters) == sorted(wanted))
    return tensor.permute([letters.index(letter) for letter in wanted])


def _attended(scores: Any, value: Any) -> torch.Tensor:
    """The weights times the values, [..., queries, width], in one call."""
    _need(isinstance(scores, Scores) and scores.softmaxed and _is_operand(value))
    query, key, lead = scores.query, scores.key, scores.sizes[:-2]
    cast = scores.state[1] is not None
    _need(value.shape[:-1] == (*lead, key.shape[-2]) and not scores.fusing.is_kept())
    _need(cast or query.dtype == value.dtype == scores.kind)
    scores.require_operands()
    masks = scores.masks if scores.bias is None else (*scores.masks, (scores.bias, True))
    causal = len(masks) == 1 and scores.fusing.constants.is_causal(*masks[0], _NEVER)
    mask = nowhere = None
    if masks and not causal:
        query, mask, nowhere = _masking(scores)
    if nowhere is not None:
        value = _undefined(value, nowhere)
    four = torch.Size((lead[:-1].numel(), lead[-1]))
    if mask is not None:
        mask = _folded(mask if mask.dtype == torch.bool or cast else mask.to(query.dtype), lead, four)
        mask = mask[(None,) * (4 - mask.dim())]
    query, key, value = (_whole(tensor, lead, four) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=scores.dropped, is_causal=causal, scale=scores.factor
    )
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(_refuse_second)
        scores.fusing.outputs.append(out)
    scores.fused = True
    out = out.reshape(*lead, *out.shape[-2:])
    return out if nowhere is None else out.masked_fill(nowhere, math.nan)


def _whole(tensor: torch.Tensor, lead: torch.Size, four: torch.Size) -> torch.Tensor:
    """[batch, heads, rows, width], as the kernels take it."""
    tensor = _folded(tensor.expand(*lead, -1, -1), lead, four)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _undefined(value: torch.Tensor, nowhere: torch.Tensor) -> torch.Tensor:
    """The values; where a query has no key left and its weights are no numbers, neither is their gradient."""
    value = value.view_as(value)
    if value.requires_grad:
        nothing = nowhere.any(-2, keepdim=True)
        value.register_hook(lambda gradient: gradient.masked_fill(nothing, math.nan))  # type: ignore[no-untyped-call]
    return value


def _masking(scores: Scores) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Query and mask for the kernel, and which rows of its result are no numbers.

    The weights of a row without a key that is left are equal, as those of a query of zeros, or not a number
    where ``fill`` is minus infinity. No kernel computes the gradients of a row whose scores are lost beside a
    mask that was added, and are differentiated all the same.
    """
    query, mask, nowhere = scores.query, scores.bias, None
    if scores.masks:
        each = (mask if keep else ~mask for mask, keep in scores.masks)
        kept = torch.atleast_2d(reduce(torch.logical_and, each))  # type: ignore[no-untyped-call]
        empty = ~kept.any(-1, keepdim=True)
        kept, query = kept | empty, torch.where(empty, 0.0, query)
        nowhere = empty if scores.fill == -math.inf else None
        if mask is None:
            return query, kept, nowhere
        mask = torch.where(kept, mask.masked_fill(empty, 0), -math.inf)
    assert mask is not None
    # To differentiate a row, kernels keep the logarithm of its sum, which is lost beside a large number: in
    # each row the largest is zero. Where it was so large that the scores were lost beside it, they still are.
    top = mask.detach().amax(-1, keepdim=True)
    lost = top <= -_ABSORBED / torch.finfo(scores.kind).eps
    _need(not _is_any(lost, scores))
    # Of minus infinity no number, in both passes.
    return query * torch.where(lost, top - top, 1.0).to(query.dtype), mask - top, nowhere


def _is_any(lost: torch.Tensor, scores: Scores) -> bool:
    """Whether there is a row that is lost, if that matters: in training, for a mask that may be read. It is
    looked up where the layers of a model share a mask."""
    bias = scores.bias
    assert bias is not None
    if not scores.requires_grad or not may_be_read(bias):
        return False
    if scores.masks or bias.is_inference():
        return bool(lost.any())
    base = bias if bias._base is None else bias._base
    place = bias.storage_offset(), bias.shape, bias.stride()
    return found_out((WeakIdRef(base), bias._version, *place, scores.kind), lost.any)


# ---- which functions -----------------------------------------------------------------------------

#: What becomes of scores, by the names of what is called.
_BY_NAME: dict[str, Callable[..., Any]] = {
    "mul multiply rmul": _scaled,
    "div divide true_divide truediv": partial(_scaled, power=-1),
    "add radd": _add,
    "masked_fill": _masked,
    "where": _where,
    "softmax": _softmax,
    "dropout": _dropout,
    "to type type_as": _to,
    **{name: partial(_to, target=getattr(torch, name)) for name in "float double half bfloat16".split()},
    "view reshape": _view,
    "contiguous": lambda scores: {"shares": True},
    "expand_as": _expand_as,
    "mean": _mean,
    "matmul bmm": _attended,
    "einsum": _einsum,
}
_STEPS = {func: step for names, step in _BY_NAME.items() for func in _functions(names)}
#: What may be a product of query and key.
_PRODUCTS: dict[Any, Callable[..., _Product]] = {
    func: product
    for names, product in (("matmul bmm", _product), ("baddbmm", _with_sum), ("einsum", _by_letters))
    for func in _functions(names)
    if not _is_in_place(func.__name__)
}
#: Whether nobody has put others in place of these functions: one that calls the original is called twice by
#: what follows calls, for PyTorch then names it by where it is found.
are_torchs = still(_found)
