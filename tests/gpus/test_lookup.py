"""A GPU is found by the names people and drivers use, and never by a name of another."""
# ruff: noqa: N801, N802, N818 -- the fake has the names of the library it stands for

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tilefit import gpus
from tilefit.errors import UsageError
from tilefit.gpus import lookup


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("h100", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("a100", "a100-sxm-80gb"),
        ("a100 sxm 80gb", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("v100", "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("Tesla P100-PCIE-16GB", "p100-pcie-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("rtx_2080_ti", "rtx-2080-ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm-80gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("NVIDIA GeForce RTX 2080 SUPER", "rtx-2080-super"),
        ("NVIDIA GeForce RTX 3080", "rtx-3080"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_names_and_aliases(name: str, found: str) -> None:
    assert gpus.get(name).name == found


def test_every_gpu_is_found_by_its_name_and_its_title() -> None:
    for name in gpus.names():
        gpu = gpus.get(name)
        assert gpu.name == name
        assert gpus.get(gpu.title) is gpu


# Products that exist, are not known, and must not be taken for their neighbours.
@pytest.mark.parametrize(
    "name", ["L40", "A10G", "H200 PCIe", "RTX 4090 D", "RTX 6000", "V100S-PCIE-32GB", "gpu", ""]
)
def test_an_unknown_name_is_an_error_and_never_a_neighbour(name: str) -> None:
    with pytest.raises(UsageError, match="unknown GPU") as caught:
        gpus.get(name)
    assert all(known in caught.value.hint for known in gpus.names())


def test_the_error_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean h100-sxm\?"):
        gpus.get("h100-smx")


class FakeNvml(SimpleNamespace):
    """As much of NVML as is used, for a machine with these devices."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    def __init__(self, *devices: str, init_error: type[Exception] | None = None) -> None:
        super().__init__(devices=devices, init_error=init_error, users=0)

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.init_error
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.devices):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.devices[handle]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def install(machine: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    machine.setitem(sys.modules, "pynvml", nvml)


def test_local_is_the_first_gpu(machine: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml("NVIDIA H200", "NVIDIA L4")
    install(machine, nvml)
    assert gpus.local() is gpus.get("h200")
    assert nvml.users == 0


@pytest.mark.parametrize(
    ("visible", "found"), [("1", "l4"), ("1,0", "l4"), ("GPU-1", "l4"), ("", None), ("-1", None)]
)
def test_local_honours_cuda_visible_devices(
    machine: pytest.MonkeyPatch, visible: str, found: str | None
) -> None:
    install(machine, FakeNvml("NVIDIA H200", "NVIDIA L4"))
    machine.setenv("CUDA_VISIBLE_DEVICES", visible)
    local = gpus.local()
    assert (local.name if local else None) == found


@pytest.mark.parametrize(
    "nvml",
    [
        None,
        FakeNvml(),
        FakeNvml(init_error=FakeNvml.NVMLError_LibraryNotFound),
        FakeNvml(init_error=FakeNvml.NVMLError_DriverNotLoaded),
    ],
    ids=["no binding", "no device", "no library", "no driver"],
)
def test_local_is_none_without_a_gpu(machine: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    install(machine, nvml)
    assert gpus.local() is None


def test_local_says_when_the_device_is_unknown(machine: pytest.MonkeyPatch) -> None:
    install(machine, FakeNvml("NVIDIA GTX 9999"))
    with pytest.raises(UsageError, match="unknown GPU 'NVIDIA GTX 9999'"):
        gpus.local()


def test_local_says_when_the_visible_device_is_not_there(machine: pytest.MonkeyPatch) -> None:
    install(machine, FakeNvml("NVIDIA H200"))
    machine.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UsageError, match=r"GPU '7'.*Invalid Argument"):
        gpus.local()


def test_two_gpus_of_one_name_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (lookup.DATA / "h200.toml").read_text()
    (tmp_path / "one.toml").write_text(text)
    (tmp_path / "two.toml").write_text(text)
    monkeypatch.setattr(lookup, "DATA", tmp_path)
    lookup._by_key.cache_clear()
    try:
        with pytest.raises(UsageError, match="names two GPUs"):
            gpus.get("one")
    finally:
        lookup._by_key.cache_clear()


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; import tilefit.gpus as gpus; gpus.get('h100'); gpus.local();"
        "print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
