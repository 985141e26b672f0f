"""What ``torch.cuda``, ``torch.accelerator`` and others answer when asked about the emulated GPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tilefit.emulation.device import Watch
from tilefit.emulation.tensor import CUDA
from tilefit.gpus import Gpu

#: PyTorch, some of whose functions are replaced.
_torch: Any = torch

_NOTHING = """set_device empty_cache manual_seed manual_seed_all init ipc_collect set_rng_state
set_rng_state_all seed seed_all set_per_process_memory_fraction reset_accumulated_memory_stats
set_sync_debug_mode _lazy_init _check_capability _lazy_call check_error _sleep _record_memory_history
caching_allocator_delete""".split()
_ZERO = """current_device initial_seed utilization temperature power_draw memory_usage clock_rate
get_sync_debug_mode caching_allocator_alloc""".split()
#: Bytes that PyTorch's allocator asks the driver for at once (PyTorch, c10/cuda/CUDACachingAllocator.h).
_SEGMENT_BYTES = 2 << 20
#: What ``torch.accelerator`` calls otherwise, or has alone.
_OF_ACCELERATORS = {
    "current_device_index": 0,
    "current_device_idx": 0,
    "set_device_index": None,
    "set_device_idx": None,
    "empty_host_cache": None,
    "device_index": nullcontext(),
}


class _Accepts:
    """Something whose every function does nothing and says that all is well, as 0 does to CUDA."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


class _MemPool:
    """A pool of memory, which no allocation comes from."""

    id = (0, 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def snapshot(self) -> list[Any]:
        return []

    def use_count(self) -> int:
        return 1


def install(gpu: Gpu, watch: Watch) -> None:
    """Let PyTorch answer as ``gpu`` would; it is not taken back. ``watch`` knows how full it is."""
    cuda = _torch.cuda
    memory = _of_memory(int(gpu.memory_bytes), watch)
    answers = {name: _saying(answer) for name, answer in _answers(gpu).items()} | memory
    for name, answer in answers.items():
        for module in (cuda, cuda.memory, cuda.random, cuda.profiler):
            if module is cuda or hasattr(module, name):
                setattr(module, name, answer)
    answers |= {name: _saying(answer) for name, answer in _OF_ACCELERATORS.items()}
    for module in (_torch.accelerator, getattr(_torch.accelerator, "memory", None)):
        for name, answer in (answers | {"get_memory_info": memory["mem_get_info"]}).items():
            if hasattr(module, name):
                setattr(module, name, answer)
    cuda.cudart = cuda.profiler.cudart = _Accepts
    _Accepts.cudaMemGetInfo = staticmethod(memory["mem_get_info"])  # type: ignore[attr-defined]
    cuda.nvtx._nvtx = _Accepts()
    _torch.backends.cuda.cufft_plan_cache = SimpleNamespace(size=0, max_size=4096, clear=lambda: None)
    _torch._dynamo.reset = _torch.compiler.cudagraph_mark_step_begin = lambda: None
    for name in ("preferred_blas_library", "preferred_linalg_library"):
        setattr(_torch.backends.cuda, name, _saying(None))
    cuda.MemPool = cuda.memory.MemPool = _MemPool
    cuda.use_mem_pool = cuda.memory.use_mem_pool = lambda *a, **k: nullcontext()
    cuda._utils._get_device_index = cuda.memory._get_device_index = _device_index
    _torch._utils._get_all_device_indices = lambda: [0]
    _torch._C._cuda_getDevice = lambda: 0
    _torch.version.cuda = _torch.version.cuda or "12.8"  # libraries built for another refuse to load
    cudnn = _torch.backends.cudnn
    cudnn.is_available = lambda: True
    cudnn.is_acceptable = lambda tensor: True
    cudnn.version = lambda: 91002
    _torch.backends.cuda.is_built = lambda: True
    _torch._use_cudnn_rnn_flatten_weight = lambda: False  # cuDNN would lay the weights out in memory
    _torch._C._scatter = lambda tensor, *_: (tensor.to(CUDA),)  # nn.DataParallel over one GPU
    _torch.distributed.is_nccl_available = lambda: True
    _profilers()


def _saying(answer: Any) -> Callable[..., Any]:
    return lambda *a, **k: answer


def _of_memory(size: int, watch: Watch) -> dict[str, Callable[..., Any]]:
    """What is asked of memory, of so many bytes; PyTorch's other functions of it ask ``memory_stats``.

    Its allocator keeps what it was given: the most that tensors ever took, in whole segments.
    """

    def stats(*args: Any, **kwargs: Any) -> Counter[str]:
        now, most, ever = watch.memory()
        kept = -(-ever // _SEGMENT_BYTES) * _SEGMENT_BYTES
        counted = {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": most}
        counted |= dict.fromkeys(("reserved_bytes.all.current", "reserved_bytes.all.peak"), kept)
        return Counter({"num_ooms": 0, "num_alloc_retries": 0, **counted})  # any other is 0

    def info(*args: Any, **kwargs: Any) -> tuple[int, int]:
        return max(0, size - stats()["reserved_bytes.all.current"]), size

    return {
        "memory_stats": stats,
        "mem_get_info": info,
        "device_memory_used": lambda *a, **k: size - info()[0],
        "reset_peak_memory_stats": lambda *a, **k: watch.forget_most(),
    }


def _answers(gpu: Gpu) -> dict[str, Any]:
    major, minor = gpu.compute_capability
    state = torch.zeros(16, dtype=torch.uint8)  # of random numbers: seed and offset
    return {
        **dict.fromkeys(_NOTHING, None),
        **dict.fromkeys(_ZERO, 0),
        "is_available": True,
        "is_initialized": True,
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_name": gpu.title,
        "get_device_capability": (major, minor),
        "get_device_properties": _properties(gpu),
        "is_bf16_supported": (major, minor) >= (8, 0),
        "is_tf32_supported": (major, minor) >= (8, 0),
        "get_arch_list": [f"sm_{major}{minor}"],
        "memory_stats_as_nested_dict": {},
        "memory_snapshot": [],
        "_snapshot": {"segments": [], "device_traces": []},
        "list_gpu_processes": "",
        "can_device_access_peer": False,
        "get_rng_state": state,
        "get_rng_state_all": [state],
    }


def _device_index(device: Any, *args: Any, **kwargs: Any) -> int:
    if device is None or isinstance(device, int):
        return max(0, device or 0)
    return torch.device(device).index or 0


def _properties(gpu: Gpu) -> SimpleNamespace:
    major, minor = gpu.compute_capability
    shared = gpu.shared_memory_bytes_per_sm
    return SimpleNamespace(
        name=gpu.title,
        total_memory=int(gpu.memory_bytes),
        major=major,
        minor=minor,
        multi_processor_count=gpu.sms,
        is_integrated=0,
        is_multi_gpu_board=0,
        clock_rate=int(gpu.boost_clock_hz / 1e3),
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=shared - 1024,  # one KiB of each block is the system's
        shared_memory_per_multiprocessor=shared,
        L2_cache_size=getattr(gpu, "l2_bytes", 0),
        gcnArchName="",
        uuid="emulated",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _profilers() -> None:
    """Profilers record the host alone: there is no CUDA to record events of."""
    profiler = _torch.autograd.profiler
    begin = profiler.profile.__init__

    def of_the_host(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs |= {name: None for name in ("use_cuda", "use_device") if name in kwargs}
        begin(self, *args, **kwargs)

    def written(self: Any, path: str, *args: Any) -> None:
        """Of no events; the profiler's own writing would not see where the program's files go."""
        Path(path).write_text('{"traceEvents": []}')

    profiler.profile.__init__ = of_the_host
    profiler.profile.export_chrome_trace = written
    profiler.emit_nvtx = lambda *a, **k: nullcontext()
