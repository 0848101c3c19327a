"""Questions to NVIDIA's libraries that create no context on a GPU, and so take none of its memory.

Run as a program it answers with a `DriverFound`: the libraries may hang if a GPU is broken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from flexcache.doctor.child import ChildReport
from flexcache.doctor.gpu_records import DriverFound, GpuFound

_DRIVER = "libcuda.so.1"
_MANAGEMENT = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def ask_driver() -> DriverFound:
    """Ask for the driver's version and its GPUs. Makes the driver ready for use."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as failure:
        return DriverFound(None, str(failure))
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return DriverFound(version.value, f"CUDA error {code}")
    with _management() as management:
        bus_ids = [_bus_id(driver, index) for index in range(count.value)]
        gpus = [_find_gpu(management, bus_id) for bus_id in bus_ids]
    return DriverFound(version.value, "", gpus)


def _bus_id(driver: Any, index: int) -> str:
    device, text = ctypes.c_int(), ctypes.create_string_buffer(_TEXT_BYTES)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetPCIBusId(text, _TEXT_BYTES, device)
    return text.value.decode()


@contextmanager
def _management() -> Iterator[Any]:
    """Open the management library; yields None if it is missing or refuses."""
    try:
        library = ctypes.CDLL(_MANAGEMENT)
    except OSError:
        yield None
        return
    if library.nvmlInit_v2():
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _find_gpu(management: Any, bus_id: str) -> GpuFound:
    device, memory = ctypes.c_void_p(), _Memory()
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    if management is None or management.nvmlDeviceGetHandleByPciBusId_v2(
        bus_id.encode(), ctypes.byref(device)
    ):
        return GpuFound("", bus_id, None)
    management.nvmlDeviceGetName(device, name, _TEXT_BYTES)
    refused = management.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return GpuFound(name.value.decode(), bus_id, None if refused else memory.used)


if __name__ == "__main__":
    report = ChildReport()
    report.begin("ask the driver for its GPUs")
    report.answer(msgspec.json.encode(ask_driver()))
