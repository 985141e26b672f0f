"""What ``torch.cuda`` and its neighbours answer where there is the emulated GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import context, popen_fork
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch._dynamo  # keeps the functions of torch.cuda that it finds: not ours
import torch.amp.grad_scaler
import torch.utils.data

from tilefit.emulation import answers, guard, streams
from tilefit.emulation.device import Device
from tilefit.emulation.mail import Mail
from tilefit.emulation.rules import register_shapes
from tilefit.emulation.tensor import CUDA, CudaTensor
from tilefit.errors import CaptureError
from tilefit.gpus import Gpu
from tilefit.ops.program import TO_HOST

#: PyTorch, some of whose functions are replaced.
_torch: Any = torch


class _Generator(torch.Generator):
    """A generator of the GPU's is one of the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls)


def install(device: Device, gpu: Gpu, mail: Mail | None = None) -> None:
    """Make this process take ``gpu`` for present, with ``device`` at work; it is not taken back.

    ``mail``: by which other ranks of its program answer.

    Raises:
        CaptureError: this build of PyTorch cannot be lent one.
    """
    guard.lend()
    torch.autograd.set_multithreading_enabled(False).__enter__()  # else hooks lose the user's line
    _torch._C._set_only_lift_cpu_tensors(True)
    register_shapes()
    answers.install(gpu, device.watch)
    _types()
    _functions(device)
    _graphs(device)
    at_work = streams.install(device.watch)
    _torch.Generator = _Generator
    _torch.cuda.default_generators = (_Generator(),)
    _modules_move_in_place()
    threads_see(device)
    _processes_see()
    _files(device)
    _loaders()
    _optimizers()
    if torch.distributed.is_available():
        from tilefit.emulation import distributed

        distributed.install(device, at_work, mail)


class _TensorType(type):
    """A type of tensors as old code has them: called, it makes one."""

    dtype: torch.dtype

    def __call__(cls, *given: Any) -> torch.Tensor:
        if given and not isinstance(given[0], int | torch.Size):
            return torch.as_tensor(given[0], dtype=cls.dtype, device=CUDA)
        return torch.empty(*given or (0,), dtype=cls.dtype, device=CUDA)

    def __instancecheck__(cls, instance: Any) -> bool:
        is_ours = isinstance(instance, torch.Tensor) and instance.device.type == "cuda"
        return is_ours and instance.dtype == cls.dtype


def _types() -> None:
    """``torch.cuda.FloatTensor`` and its like, and what takes them."""
    names = {"Float": torch.float32, "Long": torch.int64, "Half": torch.float16, "Int": torch.int32}
    names |= {"Double": torch.float64, "Byte": torch.uint8, "Bool": torch.bool, "BFloat16": torch.bfloat16}
    kinds: dict[Any, _TensorType] = {}
    for name, dtype in names.items():
        kind = _TensorType(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
        kinds[kind] = kinds[f"torch.cuda.{name}Tensor"] = kind
        setattr(_torch.cuda, f"{name}Tensor", kind)
    as_type, set_default = _torch.Tensor.type, _torch.set_default_tensor_type
    plain = _torch._C.TensorBase.__new__

    def typed(tensor: torch.Tensor, dtype: Any = None, *rest: Any, **kwargs: Any) -> Any:
        kind = kinds.get(dtype)
        if kind is None:
            return as_type(tensor, dtype, *rest, **kwargs)
        return tensor.to(CUDA, kind.dtype, *rest, **kwargs)

    def default(kind: Any) -> None:
        """The type of what is made, by ``torch.Tensor(…)`` too, which knows of no default device."""
        _torch.Tensor.__new__ = plain
        if kind not in kinds:
            torch.set_default_device(None)
            set_default(kind)
            return
        torch.set_default_dtype(kinds[kind].dtype)
        torch.set_default_device(CUDA)

        def made(cls: type, *given: Any, **kwargs: Any) -> Any:
            if cls is not torch.Tensor or kwargs:
                return plain(cls, *given, **kwargs)
            return kinds[kind](*given)

        _torch.Tensor.__new__ = made

    _torch.Tensor.type, _torch.set_default_tensor_type = typed, default


def _functions(device: Device) -> None:
    """Functions that are not an operation each.

    CTC takes its lengths on the host: those of the GPU are waited for. Whether cuDNN's will do it asks of
    targets on the host, and again once the lengths are numbers.
    """
    ctc = _torch.ctc_loss

    def ctc_loss(scores: torch.Tensor, targets: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
        lengths = rest[:2]
        if isinstance(scores, CudaTensor) and all(isinstance(each, torch.Tensor) for each in lengths):
            rest = (*(each.tolist() for each in lengths), *rest[2:])
            targets = targets.to(CUDA)
            device.copied(TO_HOST, targets, non_blocking=False)
        return ctc(scores, targets, *rest, **kwargs)  # type: ignore[no-any-return]

    def cond(which: Any, if_true: Any, if_false: Any, operands: Any = ()) -> Any:
        """Not compiled, it reads which as any ``if`` does."""
        return if_true(*operands) if which else if_false(*operands)

    truncated = _torch.nn.init._no_grad_trunc_normal_

    def trunc_normal(tensor: torch.Tensor, mean: float, std: float, *rest: Any, **kwargs: Any) -> Any:
        """Drawn until all are within the bounds, which of values that nobody knows is never said."""
        if tensor.device.type == "cuda":
            with torch.no_grad():
                return tensor.normal_(mean, std)
        return truncated(tensor, mean, std, *rest, **kwargs)

    _torch.ctc_loss, _torch.cond = ctc_loss, cond
    _torch.nn.init._no_grad_trunc_normal_ = trunc_normal


def _graphs(device: Device) -> None:
    """What runs while a graph is captured runs again with each replay."""

    class CUDAGraph:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.captured: Any = None

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self.captured = device.watch.captured()
            self.captured.__enter__()

        def capture_end(self) -> None:
            self.captured.__exit__(None, None, None)

        def replay(self) -> None:
            device.watch.replayed(self.captured)

        def pool(self) -> tuple[int, int]:
            return (0, 0)

        reset = capture_end

    @contextmanager
    def graph(captured: CUDAGraph, *args: Any, **kwargs: Any) -> Iterator[None]:
        captured.capture_begin()
        try:
            yield
        finally:
            captured.capture_end()

    cuda = _torch.cuda
    cuda.CUDAGraph, cuda.graph = CUDAGraph, graph
    cuda.graph_pool_handle = lambda: (0, 0)
    cuda.make_graphed_callables = lambda callables, *args, **kwargs: device.watch.graphed(callables)
    cuda.is_current_stream_capturing = lambda: False


def _modules_move_in_place() -> None:
    """``.to("cuda")`` keeps Parameter objects, as on CUDA, where an optimizer may hold them already.

    A parameter without a size remembers where it is to be made.
    """
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Who holds a parameter weakly holds the same object as before: that is what swapping is for.
    _torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])
    module, lazy = _torch.nn.Module, _torch.nn.parameter.UninitializedTensorMixin
    apply, materialize, load = module._apply, lazy.materialize, module._load_from_state_dict

    def loaded(self: Any, *args: Any, **kwargs: Any) -> None:
        """Values that are loaded are copied into the parameters."""
        with patch.object(torch.__future__, "_swap_module_params_on_conversion", False):
            load(self, *args, **kwargs)

    def moved(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, torch.jit.ScriptModule) and function(torch.empty(0)).is_cuda:
            refuse_script()
        stores = self._parameters, self._buffers
        held = [{name: each for name, each in store.items() if isinstance(each, lazy)} for store in stores]
        for store, waiting in zip(stores, held, strict=True):
            for name, tensor in waiting.items():
                tensor._made_on = function(torch.empty(0)).device
                store[name] = None
        # What hooks made of parameters, as weight_norm's do, would hold them; it is made again.
        vars(self).update({name: made.detach() for name, made in vars(self).items() if _has_history(made)})
        out = apply(self, function, *args, **kwargs)
        for store, waiting in zip(stores, held, strict=True):
            store.update(waiting)
        return out

    def made(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        where = torch.device(device or getattr(self, "_made_on", "cpu"))
        materialize(self, shape, "cpu", dtype)
        if where.type == "cuda":
            kind = type(self) if isinstance(self, torch.nn.Parameter) else None
            there = self.detach().to(where)
            _torch.utils.swap_tensors(self, torch.nn.Parameter(there) if kind else there)

    module._apply, lazy.materialize, module._load_from_state_dict = moved, made, loaded

    data = _torch._C.TensorBase.data

    def take(tensor: torch.Tensor, other: torch.Tensor) -> None:
        """``parameter.data = parameter.data.to("cuda")``: it is a tensor of the GPU's from then on."""
        if isinstance(tensor, CudaTensor) or not isinstance(other, CudaTensor):
            data.__set__(tensor, other)
            return
        kind = isinstance(tensor, torch.nn.Parameter)
        there = torch.nn.Parameter(other.detach(), tensor.requires_grad) if kind else other.detach()
        _torch.utils.swap_tensors(tensor, there)

    _torch.Tensor.data = property(data.__get__, take)


def refuse_script() -> NoReturn:
    """Refuse a model whose Python is not known."""
    raise CaptureError(
        "the model that runs on the GPU is TorchScript, of which the operations are not known",
        hint="Run the Python model that it was made of, and move that to the GPU before torch.jit makes "
        "TorchScript of it.",
    )


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _processes_see() -> None:
    """Processes that a program spawns have the GPU, too, and what the program gives them: they are forked."""
    for kind in (context.SpawnProcess, context.ForkServerProcess):
        kind._Popen = staticmethod(popen_fork.Popen)  # type: ignore[method-assign, assignment]


def threads_see(mode: AbstractContextManager[object]) -> None:
    """Modes belong to one thread; the threads of a program's have this one, too."""
    thread: Any = threading.Thread
    begin = thread._bootstrap_inner  # classes of the program's have a ``run`` of their own

    def under_mode(self: threading.Thread) -> None:
        _torch._C._set_only_lift_cpu_tensors(True)  # of this thread alone, as well
        with mode:
            begin(self)

    thread._bootstrap_inner = under_mode


def _files(device: Device) -> None:
    """What is loaded for the GPU goes there from the CPU, what is saved to the CPU, each memory once.

    It is kept as it is, and loaded from there; the user's files are left alone.
    """
    load = torch.load
    kept: dict[str | bytes, Any] = {}

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        held = obj.state_dict() if isinstance(obj, torch.nn.Module) else obj
        on_gpu = (leaf for leaf in torch.utils._pytree.tree_leaves(held) if isinstance(leaf, CudaTensor))
        for each in {leaf.on_meta.untyped_storage()._cdata: leaf for leaf in on_gpu}.values():
            device.copied(TO_HOST, each, False)
        if isinstance(f, str | os.PathLike):
            kept[os.path.abspath(os.fspath(f))] = obj
        else:
            token = b"emulated%08d" % len(kept)
            kept[token] = obj
            f.write(token)

    def saved(f: Any) -> Any:
        """What was saved there, or None."""
        if isinstance(f, str | os.PathLike):
            return kept.get(os.path.abspath(os.fspath(f)))
        token = f.read(16)
        if token not in kept:
            f.seek(-len(token), os.SEEK_CUR)
        return kept.get(token)

    def loaded(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        plain = isinstance(map_location, str | torch.device)
        on_host = "cpu" if map_location is None or plain else map_location
        out = saved(f)
        out = load(f, map_location=on_host, **kwargs) if out is None else out
        if not plain:
            return out
        return torch.utils._pytree.tree_map(
            lambda leaf: leaf.to(map_location) if isinstance(leaf, torch.Tensor) else leaf, out
        )

    _torch.load, _torch.save = loaded, save


def _loaders() -> None:
    """Batches are made in this process: what does it, and how fast, is not the step's."""
    loader = _torch.utils.data.DataLoader
    single = _torch.utils.data.dataloader._SingleProcessDataLoaderIter

    def iterator(self: Any) -> Any:
        with patch.multiple(self, num_workers=0, timeout=0):
            return single(self)

    loader._get_iterator = iterator


def _optimizers() -> None:
    """Lists of the GPU's tensors take the multi-tensor path."""
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers._foreach_supported_types.append(CudaTensor)
