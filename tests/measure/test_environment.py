"""What a measurement is stored with names the GPU that it was made on."""

from types import SimpleNamespace

import pytest
import torch

from tilefit.errors import UsageError
from tilefit.measure import environment


@pytest.mark.parametrize(
    ("name", "memory_gib", "named"),
    [
        ("NVIDIA H200", 139.8, "NVIDIA H200"),
        ("NVIDIA GeForce RTX 4060 Ti", 8.0, "NVIDIA GeForce RTX 4060 Ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 16.0, "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("Unheard-of 9000", 3.0, "Unheard-of 9000"),
    ],
)
def test_a_gpu_is_named_as_no_other_is(
    monkeypatch: pytest.MonkeyPatch, name: str, memory_gib: float, named: str
) -> None:
    fake(monkeypatch, name, memory_gib)
    assert environment.current(torch.device("cuda", 0)).gpu == named


def test_a_gpu_that_its_name_does_not_tell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "Orin", 7.4)
    with pytest.raises(UsageError, match="not the NVIDIA Jetson AGX Orin"):
        environment.current(torch.device("cuda", 0))


def fake(monkeypatch: pytest.MonkeyPatch, name: str, memory_gib: float) -> None:
    properties = SimpleNamespace(name=name, total_memory=int(memory_gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(environment, "driver_version", lambda: "570")
