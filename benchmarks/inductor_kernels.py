"""List the kernels that Inductor schedules for CUDA, without a GPU, beside tilefit's model of them.

    pip install triton    # Inductor asks for it; nothing is compiled with it
    PYTHONPATH=src python benchmarks/inductor_kernels.py --record
    PYTHONPATH=src python benchmarks/inductor_kernels.py

Recording runs Dynamo, AOTAutograd and Inductor's lowering and scheduler on fake CUDA tensors, up to where
code would be generated, for the steps of ``whole_steps.py``. A small C++ library (g++ builds it) stands in
for the CUDA runtime that a CPU build of PyTorch lacks, Python for the rest: an H200's properties; which
attention PyTorch would choose; padding, which Inductor decides by timing, is taken to pay wherever it would
try it. Kernels are recorded by pass, Inductor's name and bytes. All this relies on internals of PyTorch: it
ran with 2.13.

Without ``--record`` the recorded steps are compared with ``tilefit.cost.fusion``: how many kernels the
compiler writes for the forward and the backward pass, and the bytes they move.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESULT = Path(__file__).parent / "results" / "inductor_kernels.json"
#: Kernels that move less are only counted.
SMALL_BYTES = 1_000_000

#: A device guard and hooks that say "there is one CUDA device" and do nothing. The registry looks the hooks
#: up by the name of their class, and PyTorch asks for them while it is imported.
RUNTIME = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using namespace c10;
const Device gpu(DeviceType::CUDA, 0);
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, gpu); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, gpu); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, gpu); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, gpu); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91501; }
  long versionRuntimeCuDNN() const override { return 91501; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""


def stand_in_runtime() -> None:
    """Load the stand-in for the CUDA runtime; before PyTorch is imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch_folder = Path(spec.submodule_search_locations[0])
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "runtime.cpp"), Path(folder, "runtime.so")
        source.write_text(RUNTIME)
        command = f"g++ -std=c++20 -shared -fPIC -I{torch_folder}/include {source} -o {built}"
        subprocess.run([*command.split(), f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"], check=True)
        ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(built))


if "--record" in sys.argv:
    stand_in_runtime()

import torch  # noqa: E402
from whole_steps import SETTING, Run, captured, runs  # noqa: E402

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150 * 2**30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 * 2**20,
    gcnArchName="",
    is_integrated=False,
    is_multi_gpu_board=False,
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
)


class ScheduledError(Exception):
    """Inductor has scheduled a graph; no code is needed."""


#: The graphs scheduled so far: whether of the backward pass, and the kernels.
GRAPHS: list[tuple[bool, list[dict[str, Any]]]] = []


def stand_in() -> None:
    """Make PyTorch believe that it has an H200."""
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        **dict.fromkeys(("get_device_properties", "_get_device_properties"), H200),
        "get_device_capability": (H200.major, H200.minor),
        "get_device_name": H200.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(("_lazy_init", "synchronize", "set_rng_state")),
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), 0),
    }
    internal: dict[str, Any] = {
        "_cuda_getCurrentRawStream": 0,
        "_cuda_getCurrentStream": (0, 0, 0),
        "_cuda_getDevice": 0,
        "_cuda_exchangeDevice": 0,
        "_cuda_maybeExchangeDevice": 0,
        "_cuda_setDevice": None,
        "_cuda_getDeviceCount": 1,
        "_ensureCUDADeviceGuardSet": None,
    }
    for module, values in ((torch.cuda, answers), (torch._C, internal)):
        for name, value in values.items():
            setattr(module, name, lambda *args, value=value, **kwargs: value)
    torch.version.cuda = "13.0"


def prepare_inductor() -> None:
    """Stop Inductor after scheduling, and answer what it would ask a GPU."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config, graph, utils
    from torch._inductor.fx_passes import fuse_attention, joint_graph, pad_mm
    from torch._subclasses import FakeTensorMode, fake_impls
    from torch.utils._python_dispatch import TorchDispatchMode

    config.force_disable_caches = True
    config.compile_threads = 1
    functorch_config.enable_autograd_cache = False
    FakeTensorMode.avoid_device_init = property(lambda mode: True)

    def scheduled(lowering: Any) -> Any:
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        kernels = [kernel(node) for node in lowering.scheduler.nodes]
        GRAPHS.append((lowering.is_backward, [each for each in kernels if each]))
        raise ScheduledError

    graph.GraphLowering.compile_to_module = scheduled
    utils.get_device_tflops = lambda dtype: 989 if dtype.itemsize == 2 else 67
    utils.get_gpu_dram_gbps = lambda: 4800

    def should_pad(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        m, k, n = *mat1.shape[-2:], mat2.shape[-1]
        return mat1.dtype.itemsize == 2 and pad_mm.is_mm_compute_bound(m, k, n, mat1.dtype)

    pad_mm._should_pad = should_pad
    # Patterns are traced on tensors that exist; the device does not matter to them.
    patterns = fuse_attention._get_sfdp_patterns
    fuse_attention._get_sfdp_patterns = lambda device=None: patterns(torch.device("cpu"))

    class OnCpu(TorchDispatchMode):
        """Constants of one element are computed on the CPU."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {k: "cpu" if k == "device" and v is not None else v for k, v in (kwargs or {}).items()}
            return func(*("cpu" if isinstance(a, torch.device) else a for a in args), **kwargs)

    deduce = joint_graph.UniformValueConstantFolder._deduce_value

    def deduced(folder: Any, node: Any) -> Any:
        with OnCpu():
            return deduce(folder, node)

    joint_graph.UniformValueConstantFolder._deduce_value = deduced

    # Between graphs, a model that drops layers at random keeps them all.
    known = fake_impls.op_implementations_dict
    scalar = known[torch.ops.aten._local_scalar_dense.default]

    def value(mode: Any, func: Any, tensor: Any) -> Any:
        if mode.shape_env is None:
            return False if tensor.dtype == torch.bool else 1
        return scalar(mode, func, tensor)

    known[torch.ops.aten._local_scalar_dense.default] = value


def kernel(node: Any) -> dict[str, Any] | None:
    """A scheduled kernel: what it is called, whether a library's, and the bytes that cross its borders."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.utils import get_fused_kernel_name
    from torch._inductor.virtualized import V

    if isinstance(node, NopKernelSchedulerNode):
        return None
    if isinstance(node, ExternKernelSchedulerNode):
        name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        return None if name == "MultiOutput" else {"library": name}

    hint = V.graph.sizevars.optimization_hint  # of dynamic shapes, the sizes of the first call

    def moved(**which: bool) -> int:
        own = node.get_buffer_names() if which["include_reads"] else ()
        return sum(
            min(size, hint(V.graph.get_numel(buffer)) * V.graph.get_dtype(buffer).itemsize)
            for buffer, size in node.get_read_write_buffer_accesses(**which).items()
            if buffer not in own
        )

    return {
        "name": get_fused_kernel_name(list(node.get_nodes()), "original_aten"),
        "read_bytes": moved(include_reads=True, include_writes=False),
        "write_bytes": moved(include_reads=False, include_writes=True),
        "elements": math.prod(map(hint, node.group[1])),  # before a reduction
    }


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What PyTorch's dispatcher chooses on an H200 (``sdp_utils.cpp``), which a CPU build cannot ask."""
    aten = torch.ops.aten
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.full_like(zero, float("-inf")))
    contiguous = all(t.stride(-1) == 1 for t in (query, key, value, attn_mask) if t is not None)
    half = query.dtype in (torch.float16, torch.bfloat16)
    learnt = attn_mask is not None and attn_mask.requires_grad
    if query.dim() != 4 or not contiguous or query.shape[-1] % 8:
        plain = aten._scaled_dot_product_attention_math
        return plain(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if half and not learnt and query.shape[-1] <= 256:
        cudnn = aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, mask, True, dropout_p, is_causal, False, scale=scale)[0]
    if mask is not None:
        columns = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, -columns % 8))[..., :columns]
        mask = mask.expand(*query.shape[:3], columns)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]


def empty_cache(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """``DynamicLayer.lazy_initialization`` of transformers, without the constant that it moves to the GPU."""
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys = torch.empty((0,), dtype=keys.dtype, device=keys.device)
    layer.values = torch.empty((0,), dtype=keys.dtype, device=keys.device)
    layer.is_initialized = True


def recorded(run: Run) -> dict[str, Any]:
    """The kernels of one step."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses import FakeTensorMode
    from torch.utils._pytree import tree_map

    def inner(module: Any, inputs: Any, **options: Any) -> Any:
        try:
            compile_fx_inner(module, inputs, **options)
        except Exception as error:
            if "ScheduledError" not in repr(error):
                raise
        return make_boxed_func(module.forward)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda")

    loaded = run.load("cpu")
    if run.target.startswith("hf:"):
        from transformers import cache_utils

        cache_utils.DynamicLayer.lazy_initialization = empty_cache
    model, inputs = loaded.model.train(), loaded.inputs
    if run.channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = tree_map(lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t, inputs)
    GRAPHS.clear()
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        made: dict[int, torch.nn.Parameter] = {}
        for module in model.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = torch.nn.Parameter(fake(tensor), tensor.requires_grad)
                    module._parameters[name] = made[id(tensor)]
            for name, tensor in module._buffers.items():
                module._buffers[name] = fake(tensor)
        inputs = tree_map(fake, inputs)
        compiled = torch.compile(model, backend=lambda graph, arguments: compile_fx(graph, arguments, inner))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = compiled(**inputs) if isinstance(inputs, dict) else compiled(*inputs)
            loss = loaded.loss(output) if loaded.loss else getattr(output, "loss", output)
            loss = loss.mean() if loss.dim() else loss
        loss.backward()
    counted: collections.Counter[tuple[Any, ...]] = collections.Counter()
    library: collections.Counter[tuple[str, str]] = collections.Counter()
    for backward, kernels in GRAPHS:
        phase = "backward" if backward else "forward"
        for each in kernels:
            if "library" in each:
                library[phase, each["library"]] += 1
            elif each["read_bytes"] + each["write_bytes"] < SMALL_BYTES:
                counted[phase, "small", 0, 0, 0] += 1
            else:
                counted[phase, *each.values()] += 1
    return {
        "graphs": len(GRAPHS),
        "generated": [[*key, count] for key, count in counted.most_common()],
        "library": [[*key, count] for key, count in library.most_common()],
    }


def record(only: list[str], out: Path) -> None:
    stand_in()
    prepare_inductor()
    overridden = torch.library.Library("aten", "IMPL")
    overridden.impl("scaled_dot_product_attention", attention, "CompositeImplicitAutograd")
    result = json.loads(out.read_text()) if out.exists() else {}
    rows = {row["model"]: row for row in result.get("rows", ())}
    for run in runs(False, True)[: -len(SETTING)]:
        name = run.label
        if not any(each in name for each in only) or (name in rows and only == [""]):
            continue
        start = time.perf_counter()
        try:
            rows[name] = {"model": name, **run.sizes, **recorded(run)}
        except Exception as error:  # noqa: BLE001 - what a stand-in cannot answer
            print(f"{name}: {error!r:.300}", flush=True)
            continue
        print(f"{name}: {rows[name]['graphs']} graphs in {time.perf_counter() - start:.0f} s", flush=True)
        result = {"torch": torch.__version__, "as": H200.name, "rows": list(rows.values())}
        out.write_text(json.dumps(result, separators=(",", ":")).replace('{"model"', '\n{"model"') + "\n")


def compare(only: list[str], recorded_rows: Path) -> None:
    """Print number and bytes of the compiler's own kernels, as Inductor schedules and tilefit models them."""
    from tilefit.cost.fusion import fuse
    from tilefit.cost.streaming import GENERATED
    from tilefit.ops import Streaming

    by_name = {run.label: run for run in runs(False, True)}
    for row in json.loads(recorded_rows.read_text())["rows"]:
        if not any(each in row["model"] for each in only):
            continue
        step = fuse(captured(by_name[row["model"]]))
        for phase in ("forward", "backward"):
            kernels = sum(count for p, *_, count in row["generated"] if p == phase)
            moved = sum((r + w) * count for p, _, r, w, _, count in row["generated"] if p == phase)
            ours = [
                entry.op
                for entry in step.ops
                if isinstance(entry.op, Streaming)
                and entry.phase.startswith(phase)
                and (entry.op.function == GENERATED or entry.name == "pad")
            ]
            predicted = sum(op.moved_bytes for op in ours)
            print(
                f"{row['model']:44} {phase:8} kernels {sum(op.kernels for op in ours):5} of {kernels:5}  "
                f"GB {predicted / 1e9:6.2f} of {moved / 1e9:6.2f} ({predicted / moved - 1:+.0%})"
                + ("" if row["graphs"] <= 4 else f"  {row['graphs']} graphs")
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], help="steps whose name contains one of these")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.record:
        record(options.only, options.out)
    else:
        compare(options.only, options.out)


if __name__ == "__main__":
    main()
