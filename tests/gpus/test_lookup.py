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
        ("4070", "rtx-4070"),
        ("rtx 4070 ti super", "rtx-4070-ti-super"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090-d"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "rtx-4070-laptop"),
        ("NVIDIA RTX 4000 Ada Generation", "rtx-4000-ada"),
        ("NVIDIA RTX A2000 12GB", "rtx-a2000-12gb"),
        ("NVIDIA RTX PRO 5000 Blackwell", "rtx-pro-5000"),
        ("NVIDIA TITAN V", "titan-v"),
        ("NVIDIA GB10", "gb10"),
        ("orin nano", "jetson-orin-nano-8gb"),
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
@pytest.mark.parametrize("name", ["L2", "H200 PCIe", "RTX 4090 Ti", "RTX 6000", "V100S-PCIE-32GB", "gpu", ""])
def test_an_unknown_name_is_an_error_and_never_a_neighbour(name: str) -> None:
    with pytest.raises(UsageError, match="unknown GPU") as caught:
        gpus.get(name)
    assert caught.value.hint.endswith("All that are known: tilefit gpu.")


def test_the_error_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean h100-sxm( or [a-z0-9-]+){0,2}\?"):
        gpus.get("h100-smx")
    with pytest.raises(UsageError, match=r"Did you mean rtx-4070-ti-super"):
        gpus.get("RTX 4070 TI SUPERR")


# Drivers name a laptop's GPU and a card by the same number.
@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3070 Ti Laptop GPU",
        "NVIDIA GeForce RTX 2080 with Max-Q Design",
        "NVIDIA RTX A5000 Laptop GPU",
        "rtx 2080 mobile",
    ],
)
def test_a_laptop_gpu_is_never_taken_for_the_card(name: str) -> None:
    with pytest.raises(UsageError, match="unknown GPU") as caught:
        gpus.get(name)
    assert caught.value.hint.startswith("A laptop's GPU has fewer SMs")
    assert "Did you mean" not in caught.value.hint


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GRID A100-10C",
        "NVIDIA A10-24Q",
        "NVIDIA A16-4A",
    ],
)
def test_a_part_of_a_gpu_is_never_taken_for_the_whole(name: str) -> None:
    with pytest.raises(UsageError, match="unknown GPU") as caught:
        gpus.get(name)
    assert caught.value.hint.startswith("A part of a GPU (MIG, vGPU) has fewer SMs")
    assert "Did you mean" not in caught.value.hint


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("rtx-3080", ["rtx-3080-12gb"]),
        ("3080", ["rtx-3080-12gb"]),
        ("rtx-3080-12gb", []),
        ("RTX 3080 10GB", []),
        ("rtx-3090", []),
        ("4060 ti", ["rtx-4060-ti-16gb"]),
        ("NVIDIA H 100", ["h100-nvl", "h100-pcie", "h100-sxm-96gb"]),
        ("Tesla V100", ["v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm2-32gb"]),
        ("A10", []),
    ],
)
def test_variants_are_what_else_a_name_may_mean(name: str, others: list[str]) -> None:
    assert [gpu.name for gpu in gpus.variants(name)] == others


@pytest.mark.parametrize(
    ("name", "memory_gib", "found"),
    [
        ("NVIDIA GeForce RTX 3080", 9.8, "rtx-3080"),
        ("NVIDIA GeForce RTX 3080", 12.0, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.99, "rtx-4060-ti-16gb"),
        ("NVIDIA A10", 22.5, "a10"),  # error correction takes a sixteenth
        ("Orin", 29.9, "jetson-agx-orin-32gb"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16.0, "rtx-3080-laptop-16gb"),
    ],
)
def test_a_device_is_told_from_others_of_its_name_by_its_memory(
    name: str, memory_gib: float, found: str
) -> None:
    assert gpus.of_device(name, int(memory_gib * 2**30)).name == found


def test_a_device_with_other_memory_than_its_name_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'Orin', with 15.3 GiB: not the NVIDIA Jetson AGX Orin") as caught:
        gpus.of_device("Orin", int(15.3 * 2**30))
    assert caught.value.hint.endswith("jetson-orin-nx-16gb.")


class FakeNvml(SimpleNamespace):
    """As much of NVML as is used, for a machine with these devices."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_FunctionNotFound(NVMLError):
        pass

    def __init__(
        self,
        *devices: str,
        init_error: type[Exception] | None = None,
        memory_bytes: int | None = 0,
        mig: bool | type[Exception] = False,
    ) -> None:
        super().__init__(devices=devices, init_error=init_error, users=0, memory_bytes=memory_bytes, mig=mig)

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
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}1e0-84f5"

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> int:
        return int(address.split(":")[1])

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.devices[handle]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if not isinstance(self.mig, bool):
            raise self.mig
        return [self.mig, 0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if self.memory_bytes is None:
            raise self.NVMLError_NotSupported
        known = {lookup._key(each): gpus.get(each).memory_bytes for each in gpus.names()}
        return SimpleNamespace(total=self.memory_bytes or known.get(lookup._key(self.devices[handle]), 2**34))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return monkeypatch


def install(machine: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    machine.setitem(sys.modules, "pynvml", nvml)


def test_local_is_the_first_gpu(machine: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml("NVIDIA H200", "NVIDIA L4")
    install(machine, nvml)
    assert gpus.local() is gpus.get("h200")
    assert nvml.users == 0


def test_local_is_told_by_its_memory(machine: pytest.MonkeyPatch) -> None:
    install(machine, FakeNvml("NVIDIA GeForce RTX 5060 Ti", memory_bytes=16_311 * 2**20))
    assert gpus.local() is gpus.get("rtx-5060-ti-16gb")


def test_a_gpu_that_shares_the_hosts_memory_has_as_much(machine: pytest.MonkeyPatch) -> None:
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 30 * 2**18}
    machine.setattr("os.sysconf", pages.__getitem__)
    install(machine, FakeNvml("Orin (nvgpu)", memory_bytes=None))
    assert gpus.local() is gpus.get("jetson-agx-orin-32gb")


@pytest.mark.parametrize(
    ("visible", "found"), [("1", "l4"), ("1,0", "l4"), ("GPU-11e", "l4"), ("", None), ("-1", None)]
)
def test_local_honours_cuda_visible_devices(
    machine: pytest.MonkeyPatch, visible: str, found: str | None
) -> None:
    install(machine, FakeNvml("NVIDIA H200", "NVIDIA L4"))
    machine.setenv("CUDA_VISIBLE_DEVICES", visible)
    local = gpus.local()
    assert (local.name if local else None) == found


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_where_gpus_differ_cuda_says_which_is_first(machine: pytest.MonkeyPatch, order: str | None) -> None:
    install(machine, FakeNvml("NVIDIA L4", "NVIDIA H200"))
    if order:
        machine.setenv("CUDA_DEVICE_ORDER", order)
    else:
        machine.delenv("CUDA_DEVICE_ORDER")
    machine.setattr(lookup, "_FIRST_OF_CUDA", "print('0000:01:00.0')")
    assert gpus.local() is gpus.get("h200")
    # Of one kind it does not matter, and CUDA is not asked.
    machine.setattr(lookup, "_FIRST_OF_CUDA", "raise SystemExit(3)")
    with pytest.raises(UsageError, match="GPUs of several kinds"):
        gpus.local()
    install(machine, FakeNvml("NVIDIA L4", "NVIDIA L4"))
    assert gpus.local() is gpus.get("l4")


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


def test_local_refuses_a_gpu_that_mig_divides(machine: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml("NVIDIA H100 80GB HBM3", mig=True)
    install(machine, nvml)
    with pytest.raises(UsageError, match=r"MIG divides GPU '0', NVIDIA H100 80GB HBM3"):
        gpus.local()
    assert nvml.users == 0


@pytest.mark.parametrize("error", [FakeNvml.NVMLError_NotSupported, FakeNvml.NVMLError_FunctionNotFound])
def test_local_takes_a_gpu_without_mig(machine: pytest.MonkeyPatch, error: type[Exception]) -> None:
    install(machine, FakeNvml("NVIDIA L4", mig=error))
    assert gpus.local() is gpus.get("l4")


def test_local_says_when_the_visible_device_is_not_there(machine: pytest.MonkeyPatch) -> None:
    install(machine, FakeNvml("NVIDIA H200"))
    machine.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UsageError, match=r"GPU '7'.*Invalid Argument"):
        gpus.local()


def test_two_gpus_of_one_name_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (lookup.DATA / "pascal.toml").read_text()
    (tmp_path / "one.toml").write_text(text)
    (tmp_path / "two.toml").write_text(text.replace("[gpus.p100-", "[gpus.other-p100-"))
    monkeypatch.setattr(lookup, "DATA", tmp_path)
    caches = (lookup._all, lookup._by_key)
    for cached in caches:
        cached.cache_clear()
    try:
        with pytest.raises(UsageError, match="names two GPUs"):
            gpus.get("p100")
    finally:
        for cached in caches:
            cached.cache_clear()


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; import tilefit.gpus as gpus; gpus.get('h100'); gpus.local();"
        "print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
