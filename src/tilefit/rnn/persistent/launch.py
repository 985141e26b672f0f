"""Loads and launches the kernels, through the CUDA driver.

Every launch is cooperative: the driver refuses it where not all thread blocks can run at once, which the
exchange between them needs.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from tilefit.errors import TilefitError
from tilefit.rnn.persistent.build import binary
from tilefit.rnn.persistent.variant import LARGEST_CLUSTER, Capacity, Problem, Variant


class LaunchError(TilefitError):
    """The CUDA driver refused a kernel, or a kernel gave up waiting."""


#: The first compute capability with thread-block clusters.
CLUSTER_CAPABILITY = (9, 0)

#: Polls of one piece of the exchange before a thread gives up; a poll takes about half a microsecond.
SPIN_LIMIT = 1 << 23

#: Fields of the kernels' one parameter, a struct, in the order of its declaration: pointers up to ``error``,
#: then integers of 32 bits.
FIELDS = {
    "forward": "projected weights bias_n h0 c0 lengths resets out gates cells last_hidden last_cell error "
    "steps batch directions batch_groups spin_limit pause",
    "backward": "grad_out grad_last_h grad_last_c weights out gates cells h0 first_cell lengths resets "
    "grad_gates grad_h0 grad_c0 error steps batch directions batch_groups spin_limit pause",
}


@cache
def _layout(kernel: str) -> tuple[list[str], struct.Struct]:
    """The tensors in the kernel's parameter, and how it lies in memory, up to a multiple of 8 bytes."""
    tensors, _, counts = FIELDS[kernel].partition(" error ")
    names = tensors.split()
    return names, struct.Struct(f"{len(names) + 1}P{len(counts.split())}I0P")


def parameter(kernel: str, tensors: Mapping[str, torch.Tensor | None], error: int, *counts: int) -> bytes:
    """The kernel's parameter.

    Args:
        kernel: ``"forward"`` or ``"backward"``.
        tensors: Dense, by the names of the fields; what is missing, None or empty becomes a null pointer.
        error: Address of the integer where the kernel writes that it gave up.
        *counts: The fields after ``error``.
    """
    names, layout = _layout(kernel)
    given = map(tensors.get, names)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in given]
    return layout.pack(*pointers, error, *counts)


#: The tensor through which thread blocks exchange what they compute.
EXCHANGED = {"forward": "out", "backward": "grad_gates"}

#: What the driver takes: an array of one pointer to the parameter.
_Parameters = ctypes.c_char_p * 1


class Kernel:
    """One compiled variant on one device."""

    def __init__(self, problem: Problem, variant: Variant, device: int, *, jitter: bool = False) -> None:
        driver = _driver()
        self.name = "backward" if problem.backward else "forward"
        self.problem, self.variant, self.device = problem, variant, device
        code = binary(
            self.name, variant.constants(problem, jitter=jitter), torch.cuda.get_device_capability(device)
        )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's primary context current
            self._module = _call(driver.cuModuleLoadData, code)  # kept: unloading it would free the function
            self._function = _call(driver.cuModuleGetFunction, self._module, self.name.encode())
            shared = variant.shared_bytes(problem)
            _set(self._function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
            if variant.cluster > 8:
                _set(self._function, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        self._configs: dict[int, Any] = {}
        self._handle = int(self._function)
        word = failure(device)
        self._error = word.data_ptr()
        self._failed = ctypes.c_int.from_address(self._error)

    def registers(self) -> tuple[int, int]:
        """Registers and bytes of local memory (spills) of one thread."""
        get = _driver().cuFuncGetAttribute
        registers, spilled = map(_attribute, ("NUM_REGS", "LOCAL_SIZE_BYTES"))
        return _call(get, registers, self._function), _call(get, spilled, self._function)

    def launch(self, tensors: Mapping[str, torch.Tensor | None], steps: int) -> None:
        """Queues one launch on the current stream.

        Args:
            tensors: Dense, by the names of the kernel's parameters; what is missing, None or empty is null.
                What blocks exchange through is filled first: nothing is there yet, see ``common.cuh``.
            steps: T

        Raises:
            LaunchError: An earlier launch on this device gave up, or the driver refuses this one.
        """
        failed = self._failed
        if failed.value:
            failed.value = 0
            raise LaunchError(
                "a persistent recurrent kernel waited in vain for its other thread blocks and gave up: the "
                "results of that call are not valid",
                hint="Set TILEFIT_RNN=cudnn to go on without these kernels, and report this.",
            )
        batch, directions, variant = self.problem.batch, self.problem.directions, self.variant
        counts = steps, batch, directions, variant.batch_groups, SPIN_LIMIT, variant.pause
        packed = parameter(self.name, tensors, self._error, *counts)
        parameters = _Parameters(packed)
        exchanged = tensors[EXCHANGED[self.name]]
        assert exchanged is not None
        if torch._C._cuda_getDevice() == self.device:
            status = self._queue(parameters, exchanged)
        else:
            with torch.cuda.device(self.device):
                status = self._queue(parameters, exchanged)
        if status:
            blocks = self.variant.grid(self.problem)
            raise LaunchError(
                f"the CUDA driver refused the {self.name} kernel ({_driver().CUresult(status).name})",
                where=f"{self.problem}",
                hint=f"Its {blocks} thread blocks must run at once, one on each multiprocessor: is the GPU "
                "shared with other programs? Set TILEFIT_RNN=cudnn to go on without these kernels.",
            )

    def _queue(self, parameters: ctypes.Array[ctypes.c_char_p], exchanged: torch.Tensor) -> int:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        config = self._configs.get(stream)
        if config is None:  # one for each stream: threads may launch at the same time
            problem, variant = self.problem, self.variant
            config = _config(
                variant.grid(problem),
                variant.warps * 32,
                variant.shared_bytes(problem),
                variant.cluster,
                cooperative=True,
                stream=stream,
            )
            self._configs[stream] = config
        # The driver is called directly: its Python binding copies the whole configuration at every call.
        library = _library()
        status: int = library.cuMemsetD8Async(exchanged.data_ptr(), 0xFF, exchanged.nbytes, stream)
        return status or library.cuLaunchKernelEx(config.getPtr(), self._handle, parameters, None)


@cache
def capacity(device: int) -> Capacity:
    """How many thread blocks and clusters the device can run at once, one block on each multiprocessor."""
    properties = torch.cuda.get_device_properties(device)
    multiprocessors: int = properties.multi_processor_count
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    capability = torch.cuda.get_device_capability(device)
    if capability < CLUSTER_CAPABILITY:
        return Capacity(multiprocessors, (), shared)
    driver = _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()
        module = _call(driver.cuModuleLoadData, binary("nothing", {}, capability))
        function = _call(driver.cuModuleGetFunction, module, b"nothing")
        _set(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
        _set(function, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        clusters = []
        for size in range(2, LARGEST_CLUSTER + 1):
            config = _config(size, 32, shared, size, cooperative=False)
            clusters.append(int(_call(driver.cuOccupancyMaxActiveClusters, function, config)))
        _call(driver.cuModuleUnload, module)
    return Capacity(multiprocessors, tuple(clusters), shared)


def _config(
    blocks: int, threads: int, shared_bytes: int, cluster: int, *, cooperative: bool, stream: int = 0
) -> Any:
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    attributes = []

    def attribute(name: str) -> Any:
        made = driver.CUlaunchAttribute()
        made.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        attributes.append(made)
        return made.value

    if cooperative:
        attribute("COOPERATIVE").cooperative = 1
    if cluster > 1:
        size = attribute("CLUSTER_DIMENSION").clusterDim
        size.x, size.y, size.z = cluster, 1, 1
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


@cache
def failure(device: int) -> torch.Tensor:
    """Where a kernel writes that it gave up: one integer in host memory that the device can write."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    library.cuMemsetD8Async.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    return library


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise LaunchError(
            f"the persistent kernels need the package cuda-bindings: {error}",
            hint="Install it: pip install cuda-bindings",
        ) from error
    return driver


def _attribute(name: str) -> Any:
    return getattr(_driver().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")


def _set(function: Any, attribute: str, value: int) -> None:
    _call(_driver().cuFuncSetAttribute, function, _attribute(attribute), value)


def _call(function: Any, *arguments: Any) -> Any:
    status, *values = function(*arguments)
    if int(status):
        raise LaunchError(f"{function.__name__} failed: {status.name}")
    return values[0] if values else None
