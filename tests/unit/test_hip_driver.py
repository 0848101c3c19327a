"""HIP's functions, on the fake driver under HIP's names. Copies over it: `test_copy_cuda`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu, fake_hip_gpu

from flexcache.doctor.gpu import check_gpu
from flexcache.doctor.subject import Level, Subject
from flexcache.errors import MissingDependencyError
from flexcache.transfer import hip_driver
from flexcache.transfer.cuda_driver import CudaDriver
from flexcache.transfer.hip_driver import HipDriver, load_driver


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_hip_gpu(monkeypatch) as gpu:
        yield gpu


def test_torch_decides_whose_driver_is_loaded(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(load_driver(), HipDriver)
    monkeypatch.setattr(torch.version, "hip", None)
    assert type(load_driver()) is CudaDriver


def test_an_error_has_hips_name_and_is_not_left_for_torch_to_find(gpu: FakeGpu) -> None:
    driver = HipDriver.load()
    driver.bind(0)
    with pytest.raises(RuntimeError, match=r"hipHostUnregister failed: hipError\w+ \(713\)"):
        driver.unregister(4096)
    assert gpu.loaded.hipPeekAtLastError() == 0


@pytest.mark.parametrize(("version", "has_batches"), [(12_080, True), (12_060, False)])
def test_batches_are_those_of_rocm_7_1(gpu: FakeGpu, version: int, has_batches: bool) -> None:
    gpu.set_version(version)
    assert HipDriver.load().has_batch_copy is has_batches


def test_a_refused_batch_is_named(gpu: FakeGpu) -> None:
    driver = HipDriver.load()
    driver.bind(driver.open_context(1))
    stream = driver.make_stream(is_urgent=True)
    gpu.refuse("cuMemcpyBatchAsync")
    one = np.ones(1, np.int64)
    with pytest.raises(RuntimeError, match="hipMemcpyBatchAsync of 1 copies failed"):
        driver.copy_batch(one, one, one, 1, stream)
    driver.destroy_stream(stream)


def test_a_device_is_known_by_its_address_on_the_bus(gpu: FakeGpu) -> None:
    assert HipDriver.load().pci_address(1) == "0000:3C:00.0"


def test_without_rocm_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.setattr(hip_driver, "_LIBRARY", "libamdhip64-that-is-not-here.so")
    with pytest.raises(MissingDependencyError, match="libamdhip64-that-is-not-here"):
        load_driver()


def test_the_library_is_the_one_that_is_loaded_already(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hip_driver._loaded_library() is None
    monkeypatch.setattr(hip_driver, "_LIBRARY", "libc.so.6")  # which every process has
    loaded = hip_driver._loaded_library()
    assert loaded is not None
    assert loaded.startswith("/")
    assert loaded.endswith("libc.so.6")


def test_the_doctor_says_that_amds_gpus_are_not_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    [finding] = check_gpu(Subject())
    assert finding.level is Level.WARNING
    assert "ROCm 7.1.0: AMD GPUs are not examined" in finding.text
