"""Operations that are more, or something else, than a kernel on shapes.

Reads and copies, at which host and GPU meet; those whose result's size is in the values; those that have no
kernel on ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilefit.emulation.device import WHOLE, Device, Rule, nested, not_dense
from tilefit.emulation.tensor import META, CudaTensor
from tilefit.emulation.value import State, Value
from tilefit.emulation.values import is_tensor, mapped
from tilefit.ops.program import TO_GPU, TO_HOST

aten = torch.ops.aten

#: By name; see :class:`~tilefit.emulation.device.Device`.
RULES: dict[str, Rule] = {}


def _rule(names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


# ---- where host and GPU meet ---------------------------------------------------------------------


@_rule("_local_scalar_dense")
def _item(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    return device.read(args[0], "item").item()


@_rule("equal")
def _equal(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    device.watch.waited("equal")
    return torch.equal(*(device.told(each, "equal") for each in args))


@_rule("_is_all_true")
def _holds(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Of checks that end the program where something is not true: where nobody knows, it is."""
    made = device.launch(func, args, kwargs)
    value = made.value
    if value is None or value.state.assumed or value.state.lost:
        made.value = Value(torch.tensor(True), State(assumed=True))
    return made


@_rule("allclose")
def _allclose(device: Device, func: Any, args: Any, kwargs: Any) -> bool:
    """Where nothing is known of one of them, nothing is wrong."""
    known = [
        each.value.tensor() if isinstance(each, CudaTensor) and each.value else None for each in args[:2]
    ]
    device.watch.waited("allclose")
    if any(each is None for each in known):
        device.watch.assumed("allclose", args[0], "True")
        return True
    return bool(func(*known, *args[2:], **kwargs))


@_rule("_to_copy")
def _to_copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    source, target = args[0], kwargs.get("device")
    kind = source.device.type if target is None else torch.device(target).type
    non_blocking = bool(kwargs.get("non_blocking"))
    if isinstance(source, CudaTensor) and kind == "cpu":
        device.copied(TO_HOST, source, non_blocking)
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        return aten._to_copy(device.told(source, "to"), **rest)
    if isinstance(source, CudaTensor) and kind == "meta":  # a shape, of which nothing is copied
        return torch.empty_like(source.on_meta, dtype=kwargs.get("dtype"))
    if not isinstance(source, CudaTensor) and kind == "cuda":
        if source.is_nested:
            raise nested(source.layout)
        if source.layout != torch.strided:
            return device.sparse_to_gpu(source, kwargs.get("dtype") or source.dtype, non_blocking)
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        device.copied(TO_GPU, source, non_blocking)
        host = source.to(rest["dtype"]) if rest.get("dtype") else source
        return device.to_gpu(host, aten._to_copy(source, device=META, **rest))
    return NotImplemented


@_rule("_nested_tensor_from_tensor_list")
def _nested(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    parts, to = args[0], args[3] if len(args) > 3 else None
    if isinstance(parts[0], CudaTensor) or (to is not None and to.type == "cuda"):
        raise nested(torch.strided)
    return func(*args, **kwargs)


@_rule("_padded_dense_to_jagged_forward")
def _gradient_of_padded(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    raise nested(torch.jagged)


@_rule("copy_")
def _copy(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    if not isinstance(target, CudaTensor):
        device.copied(TO_HOST, source, non_blocking)
        return target.copy_(device.told(source, "copy_"))
    if not isinstance(source, CudaTensor):
        device.copied(TO_GPU, source, non_blocking)
        device.values.through(func, args, kwargs, [target, source], [])
        return target
    return NotImplemented


@_rule("pin_memory _pin_memory")
def _pin_memory(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], CudaTensor):
        raise RuntimeError(f"cannot pin '{args[0].dtype}' only dense CPU tensors can be pinned")  # noqa: TRY004
    return device.pinned(args[0] if device.is_pinned(args[0]) else args[0].clone())


@_rule("is_pinned")
def _is_pinned(device: Device, func: Any, args: Any, kwargs: Any) -> bool:
    return device.is_pinned(args[0])


# ---- results whose size is in the values -----------------------------------------------------------


@_rule("nonzero")
def _nonzero(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    rows = device.read(args[0], "nonzero").nonzero()
    device.watch.launch(aten.nonzero_static.default, (args[0].on_meta,), {"size": len(rows)})
    return _of_host(rows, args[0])


@_rule("masked_select")
def _masked_select(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    x, mask = args
    if not isinstance(x, CudaTensor):
        return NotImplemented
    wide_x, wide_mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    return wide_x.reshape(-1)[wide_mask.reshape(-1)]  # in one dimension as well where there is none


@_rule("nms")
def _nms(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Boxes by their scores, each compared with each, and those that are kept, for which the host waits
    (torchvision, csrc/ops/cuda/nms_kernel.cu). The kernel that compares is priced as one that writes a byte a
    pair: a choice, it writes a bit and computes more."""
    boxes, scores, _ = args
    if not isinstance(boxes, CudaTensor):
        return NotImplemented
    order = scores.sort(descending=True)[1]
    overlaps = boxes[order, 0].unsqueeze(1) > boxes[order, 2]
    return order[overlaps[0]]  # a share of them


@_rule("_unique2 unique_dim unique_consecutive")
def _counted(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    name = func._overloadpacket.__name__
    on_host = mapped((args, kwargs), lambda x: device.read(x, name) if isinstance(x, CudaTensor) else x)
    out = func(*on_host[0], **on_host[1])
    device.watch.launch(aten.sort.default, (args[0].on_meta.flatten(),), {})
    return mapped(out, lambda x: _of_host(x, args[0]) if is_tensor(x) else x)


@_rule("bincount")
def _bincount(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA reads the least, which must not be negative, and the most, for which it makes room; then it counts
    (PyTorch, ATen/native/cuda/SummaryOps.cu)."""
    numbers = args[0].on_meta
    if numbers.numel():
        for look in (aten.min.default, aten.max.default):
            device.watch.launch(look, (numbers,), {})
            device.watch.waited("bincount")
    on_host = mapped((args, kwargs), lambda x: device.told(x, "bincount") if is_tensor(x) else x)
    out = func(*on_host[0], **on_host[1])
    zeros = device.watch.launch(aten.zeros.default, (out.shape,), {"dtype": out.dtype, "device": META})
    counted = torch.ones((), dtype=out.dtype, device=META).expand(numbers.shape)
    device.watch.launch(aten.scatter_add_.default, (zeros, 0, numbers.long(), counted), {})
    return _of_host(out, args[0])


@_rule("histc")
def _histc(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Without bounds CUDA reads the least and the most (measured on an H100, PyTorch 2.11)."""
    given = dict(zip(("bins", "min", "max"), args[1:], strict=False)) | kwargs
    if isinstance(args[0], CudaTensor) and given.get("min", 0) == given.get("max", 0):
        for _ in range(2):
            device.watch.waited("histc")
    return NotImplemented


#: How often these wait: measured on an H100 (PyTorch 2.11, ``torch.cuda.set_sync_debug_mode``).
_FACTORIZATIONS = {"_linalg_svd": 2, "_linalg_eigh": 1, "linalg_eig": 3, "linalg_lstsq": 1, "linalg_pinv": 2}


@_rule(" ".join(_FACTORIZATIONS))
def _factorized(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    for _ in range(_FACTORIZATIONS[func._overloadpacket.__name__] * isinstance(args[0], CudaTensor)):
        device.watch.waited("linalg")
    return NotImplemented


@_rule("_linalg_check_errors")
def _checked_solution(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Solvers and factorizations read whether they have succeeded (PyTorch,
    ATen/native/BatchLinearAlgebra.cpp)."""
    if isinstance(args[0], CudaTensor):
        device.watch.launch(aten.any.default, (args[0].on_meta,), {})
        device.watch.waited("linalg")
    return None


@_rule("repeat_interleave")
def _repeat_interleave(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    if func._overloadname != "Tensor":
        return NotImplemented
    size = kwargs.get("output_size")
    if size is not None:
        return NotImplemented
    device.watch.waited("repeat_interleave")  # twice in all, as measured on an H100 (PyTorch 2.11)
    return _of_host(torch.repeat_interleave(device.read(args[0], "repeat_interleave")), args[0])


def _of_host(result: torch.Tensor, source: CudaTensor) -> CudaTensor:
    """A result that was made of read values, on the GPU; as sure as what it was made of."""
    value = Value(result)
    value.state.assumed = source.value is not None and source.value.state.assumed
    return CudaTensor(result.to(META), value)


@_rule("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put")
def _index(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """A mask among the indices is first made into numbers of rows; indices may come from the host."""
    x, indices, *rest = args
    if not isinstance(x, CudaTensor):
        return NotImplemented
    mask = _filled(*args)
    if mask is not None:
        fill = aten.masked_fill_ if func._schema.name.endswith("_") else aten.masked_fill
        return fill.Scalar(x, mask, rest[0].item())
    numbers: list[Any] = []
    for index in indices:
        if is_tensor(index) and index.dtype in (torch.bool, torch.uint8):
            numbers += (index if index.dim() else index.unsqueeze(0)).nonzero().unbind(1)
        else:
            numbers.append(index)
    for index in numbers:
        if is_tensor(index) and not isinstance(index, CudaTensor):
            device.copied(TO_GPU, index, False)
    return device.launch(func, (x, numbers, *rest), kwargs, from_host=True)


def _filled(
    x: torch.Tensor,
    indices: list[Any],
    values: torch.Tensor | None = None,
    accumulate: bool = False,
    *unsafe: bool,
) -> torch.Tensor | None:
    """The mask of ``x[mask] = 3``, of one number of the host's: CUDA fills without asking where it holds.

    As PyTorch does (ATen/native/TensorAdvancedIndexing.cpp, ``canDispatchToMaskedFill``).
    """
    masks = [index for index in indices if is_tensor(index)]
    if accumulate or values is None or values.numel() != 1 or isinstance(values, CudaTensor):
        return None
    if len(masks) != 1 or masks[0].dtype not in (torch.bool, torch.uint8):
        return None
    behind = x.dim() - len(indices) + 1 - masks[0].dim()
    return masks[0][(..., *(None,) * behind)] if isinstance(masks[0], CudaTensor) else None


# ---- sparse matrices -------------------------------------------------------------------------------


@_rule("_sparse_coo_tensor_with_dims_and_tensors")
def _made_of_parts(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """A matrix, and gradients of a table of embeddings: what is made of numbers and of values, or of rows, is
    no more than they are."""
    dims, _, shape, numbers, values = args
    if dims > 2 or len(shape) < 2 or not isinstance(values, CudaTensor):
        return NotImplemented
    if dims == 1:
        return CudaTensor.of_rows(torch.Size(shape), numbers, values)
    if values.requires_grad and torch.is_grad_enabled():
        raise not_dense("the gradient of a sparse matrix's values")
    made = CudaTensor.of_entries(
        torch.Size(shape), values.dtype, len(values), compressed=False, coalesced=False
    )
    made.parts = numbers, values
    return made


@_rule("_to_sparse _to_sparse_csr")
def _to_sparse(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """What is not zero is found, for which the host waits, and taken out (PyTorch, ATen/native/
    TensorConversions.cpp)."""
    dense = args[0]
    numbers = dense.nonzero()
    taken = dense[tuple(numbers.unbind(1))]
    compressed = func._overloadpacket.__name__.endswith("csr") or kwargs.get("layout") == torch.sparse_csr
    return CudaTensor.of_entries(dense.shape, dense.dtype, len(taken), compressed=compressed)


@_rule("_embedding_bag_backward")
def _bag_backward(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Sparse: each row that was looked up gets the gradient of its bag.

    As PyTorch does (ATen/native/EmbeddingBag.cpp).
    """
    grad, numbers, _, bags, sizes, _, count, _, mode, sparse, weights, *_ = args
    if not sparse:
        return NotImplemented
    rows = grad.index_select(0, bags)
    if mode == 1:  # the mean
        rows *= sizes.to(rows.dtype).reciprocal().unsqueeze(1).index_select(0, bags)
    if weights is not None:
        rows *= weights.unsqueeze(1)
    return CudaTensor.of_rows(torch.Size((count, *grad.shape[1:])), numbers.unsqueeze(0), rows)


@_rule("add add_ mul mul_ div div_ clone zero_")
def _of_rows(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows are added to a table one by one, to other rows by being put behind them."""
    first, *rest = args
    name = func._overloadpacket.__name__
    added = rest[0].rows if name.startswith("add") and isinstance(rest[0], CudaTensor) else None
    own = first.rows if isinstance(first, CudaTensor) else None
    if own is None and added is not None and first.entries is None:
        table = first if name == "add_" else first.clone()
        return table.index_add_(0, added[0][0], added[1], **kwargs)
    if own is None or (
        added is None
        and (name.startswith("add") or any(isinstance(each, CudaTensor) and each.rows for each in rest))
    ):
        return NotImplemented
    if added is None:
        own = own[0], func(own[1], *rest, **kwargs)
    else:
        others = added[1] * kwargs["alpha"] if "alpha" in kwargs else added[1]
        own = torch.cat((own[0], added[0]), 1), torch.cat((own[1], others))
    if not name.endswith("_"):
        return CudaTensor.of_rows(first.shape, *own)
    first.take_rows(*own)
    return first


@_rule("t transpose detach alias")
def _view_of_sparse(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    if args[0].entries is None:
        return NotImplemented
    if args[0].rows is not None:
        turned = func._overloadpacket.__name__ in ("t", "transpose")
        return NotImplemented if turned else CudaTensor.of_rows(args[0].shape, *args[0].rows)
    made = CudaTensor(func(args[0].on_meta, *args[1:], **kwargs))
    made.entries, made.compressed, made.coalesced = args[0].entries, args[0].compressed, args[0].coalesced
    made.parts = args[0].parts
    made.turned = args[0].turned ^ (func._overloadpacket.__name__ in ("t", "transpose"))
    return made


@_rule("mm")
def _sparse_product(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    first, second = args
    if isinstance(first, CudaTensor) and first.entries is not None:
        return _multiplied(device, first, second)
    if isinstance(second, CudaTensor) and second.entries is not None:
        turned = device.launch(aten.t.default, (first,), {})
        made = _multiplied(device, _view_of_sparse(device, aten.t.default, (second,), {}), turned)
        return device.launch(aten.t.default, (made,), {})
    return NotImplemented


@_rule("_sparse_addmm")
def _sparse_sum(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Of ``torch.sparse.mm``, which adds to nothing."""
    return NotImplemented if kwargs.get("beta", 1) else _sparse_product(device, func, args[1:], {})


def _multiplied(device: Device, matrix: CudaTensor, dense: torch.Tensor) -> Any:
    """A sparse matrix times a dense one; one whose elements are in no order, as those of a transposed one, is
    coalesced for it (PyTorch, ATen/native/sparse/cuda/SparseCUDABlas.cpp)."""
    if not matrix.is_coalesced():
        matrix = _coalesce(device, None, (matrix,), {})
    values = CudaTensor(torch.empty(matrix.entries or 0, dtype=dense.dtype, device=META))
    call = (dense, values, matrix.shape[0], matrix.compressed)
    return device.launch(torch.ops.tilefit.sparse_product.default, call, {})


#: How often the host waits for the numbers of elements while they are sorted and summed (an H100).
_COALESCE_WAITS = 5


@_rule("coalesce")
def _coalesce(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Sorted by what sorts their numbers, and summed where they are the same."""
    matrix = args[0]
    made = CudaTensor(matrix.on_meta)
    made.entries = matrix.entries
    values = CudaTensor(torch.empty(matrix.entries or 0, dtype=matrix.dtype, device=META))
    device.launch(torch.ops.tilefit.coalesced_values.default, (values,), {})
    for _ in range(_COALESCE_WAITS):
        device.watch.waited("coalesce")
    return made


# ---- what is Python on CUDA ------------------------------------------------------------------------


@_rule("all_gather_copy_in split_with_sizes_copy chunk_cat")
def _of_fully_shard(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The copies around the collectives of ``fully_shard``."""
    if func.namespace != "fsdp":
        return NotImplemented
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

    name = func._overloadpacket.__name__
    with device:
        return getattr(own, "all_gather_copy_in_cuda" if name == "all_gather_copy_in" else name)(
            *args, **kwargs
        )


# ---- no kernel on meta -----------------------------------------------------------------------------


@_rule("_fused_sdp_choice")
def _sdp_choice(device: Device, func: Any, args: Any, kwargs: Any) -> int:
    return 0  # its parts: whoever wants a fused one replaces the call


@_rule("_use_cudnn_ctc_loss _use_miopen_ctc_loss")
def _no(device: Device, func: Any, args: Any, kwargs: Any) -> bool:
    return False


@_rule("empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full")
def _like(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Of a tensor that is elsewhere, or nowhere, they take the shape."""
    return device.launch(func, args, kwargs, from_host=True)


@_rule("_ctc_loss _ctc_loss_backward")
def _ctc(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Both passes move to the GPU what the host knows: both lengths, and where each target begins."""
    lengths = [each for each in args if isinstance(each, (list, tuple))]
    for table in (*lengths, *lengths[1:]):
        device.copied(TO_GPU, torch.tensor(table), non_blocking=False)
    return device.launch(func, args, kwargs, from_host=True)


def _ctc_shapes(scores: torch.Tensor, targets: torch.Tensor, *lengths: Any, **_: Any) -> Any:
    """[time, batch, classes] and padded or concatenated targets: losses, and the lattice of each sample."""
    steps, batch = scores.shape[:2] if scores.dim() == 3 else (scores.shape[0], 1)
    longest = targets.shape[-1] if targets.dim() == 2 or batch == 1 else targets.shape[0] // batch
    return scores.new_empty(batch), scores.new_empty(batch, steps, 2 * longest + 1)


def _ctc_backward_shapes(grad: torch.Tensor, scores: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(scores)


def _channels(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two values of each channel, in fp32 where the input is shorter."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[1], dtype=wide), x.new_empty(x.shape[1], dtype=wide)


def _reduced_channels(
    grad: torch.Tensor, x: torch.Tensor, mean: Any, inverse: Any, weight: Any, *_: Any
) -> Any:
    """Two sums of each channel, and the gradients of weight and bias."""
    return *_channels(x), torch.empty_like(mean if weight is None else weight), torch.empty_like(mean)


#: What ``SyncBatchNorm`` calls.
_NORMS = {
    "batch_norm_stats": _channels,
    "batch_norm_gather_stats_with_counts": _channels,
    "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
    "batch_norm_backward_reduce": _reduced_channels,
    "batch_norm_backward_elemt": lambda grad, *_: torch.empty_like(grad),
}


def register_shapes() -> None:
    """Give operations a kernel on ``meta`` that have none in PyTorch; what CUDA runs whole stays whole."""
    sparse: Any = torch.library.Library("tilefit", "FRAGMENT")  # type: ignore[no-untyped-call]
    sparse.define("sparse_product(Tensor dense, Tensor values, int rows, bool compressed) -> Tensor")
    sparse.impl(
        "sparse_product", lambda dense, _values, rows, _: dense.new_empty(rows, dense.shape[1]), "Meta"
    )
    sparse.define("coalesce(Tensor matrix) -> Tensor")
    sparse.define("coalesced_values(Tensor values) -> Tensor")
    sparse.impl("coalesced_values", torch.empty_like, "Meta")
    library: Any = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    for overload in ("", ".Tensor"):
        library.impl(f"_ctc_loss{overload}", _ctc_shapes)
        library.impl(f"_ctc_loss_backward{overload}", _ctc_backward_shapes)
    for name in _AS_ON_CPU:
        packet, _, overload = name.partition(".")
        library.impl(name, partial(_as_on_cpu, getattr(getattr(aten, packet), overload or "default")))
    for name, shapes in _NORMS.items():
        library.impl(name, shapes)
    # Without kernels of CUDA's, PyTorch would take these apart before anyone is asked.
    own: Any = torch.library.Library("aten", "IMPL", "AutogradCUDA")  # type: ignore[no-untyped-call]
    for name in WHOLE:
        own.impl(name, torch.library.fallthrough_kernel)
    _kept.extend((sparse, library, own))


_kept: list[torch.library.Library] = []
#: What has kernels for CPU and CUDA, and PyTorch knows no shapes of.
_AS_ON_CPU = """multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward
geqrf linalg_lstsq histogram.bin_ct histogram.bins_tensor""".split()


def _as_on_cpu(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The shapes that the kernel of the CPU makes of zeros."""
    zeros = mapped((args, kwargs), lambda x: torch.zeros_like(x, device="cpu") if is_tensor(x) else x)
    return mapped(func(*zeros[0], **zeros[1]), lambda x: x.to(META) if is_tensor(x) else x)


@_rule("_pack_padded_sequence")
def _pack(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """The lengths are the host's, and are needed."""
    x, lengths, batch_first = args
    rows = lengths.tolist()
    data = x.on_meta.transpose(0, 1) if not batch_first else x.on_meta
    counts = torch.tensor([sum(n > step for n in rows) for step in range(max(rows, default=0))])
    packed = data.new_empty((sum(rows), *data.shape[2:]))
    device.watch.launch(aten.copy_.default, (packed, packed.clone()), {})
    return CudaTensor(packed), counts
