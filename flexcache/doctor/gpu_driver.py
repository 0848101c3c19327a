"""NVIDIA's driver, asked in a child process, which may crash or hang in it.

Run as a program it answers with a `DriverFound`. It creates no context on a GPU, and so takes none
of its memory.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from flexcache.storage.host_pool import SegmentRef

_BEGAN, _ANSWER = b"began ", b"answer "
_END_S = 5.0
"""Time that a killed process has to end; one that hangs in the kernel does not."""


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """Attributes:
    answer: The child's answer; None if it gave none.
    problem: How it failed, and in which step; "" if it ended well.
    """

    answer: bytes | None
    problem: str


class ChildReport:
    """The child's end: reports steps and the answer on standard output, which libraries that print
    can no longer reach."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def begin(self, step: str) -> None:
        """Report the step that begins; the time limit starts again."""
        self._file.write(_BEGAN + step.encode() + b"\n")

    def answer(self, answer: bytes) -> None:
        """Report the answer, which must be one line."""
        self._file.write(_ANSWER + answer + b"\n")


def run_child(module: str, argument: bytes, step_limit_s: float) -> ChildOutcome:
    """Run ``python -m module argument`` until it ends, or until a step takes too long."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert process.stdout is not None
        with process.stdout as output:
            step, answer, is_late = _follow(output.fileno(), step_limit_s)
        try:
            code = process.wait(0 if is_late else step_limit_s)
        except subprocess.TimeoutExpired:
            is_late, code = True, 0
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        problem = _describe(code, is_late, step_limit_s, errors)
        return ChildOutcome(answer, problem and f"{problem}, in this step: {step}")


def _follow(output: int, step_limit_s: float) -> tuple[str, bytes | None, bool]:
    """Read reports until the end; return the last step, the answer, and whether it is late."""
    step, answer, rest = "start", None, b""
    deadline = time.monotonic() + step_limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            read = os.read(output, 1 << 16)
            if not read:
                return step, answer, False
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                if line.startswith(_BEGAN):
                    step = line.removeprefix(_BEGAN).decode()
                    deadline = time.monotonic() + step_limit_s
                elif line.startswith(_ANSWER):
                    answer = line.removeprefix(_ANSWER)
    return step, answer, True


def _describe(code: int, is_late: bool, step_limit_s: float, errors: IO[bytes]) -> str:
    if is_late:
        return f"no answer within {step_limit_s:g} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code == 0:
        return ""
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().rsplit("\n", 1)[-1]
    return f"exit status {code} ({said})" if said else f"exit status {code}"


COPY_BYTES = (16 << 10, 64 << 10, 2 << 20)
"""Sizes of the copies that are timed: of a layer of a block, and of whole blocks."""

DIRECTIONS = ("H2D", "D2H")


class GpuFound(msgspec.Struct, frozen=True):
    """A GPU as CUDA numbers it.

    Attributes:
        bus_id: PCI address, "0000:3B:00.0".
        used_bytes: Memory used by all processes; None if it cannot be asked for.
    """

    name: str
    bus_id: str
    used_bytes: int | None


class DriverFound(msgspec.Struct, frozen=True):
    """The driver and its GPUs.

    Attributes:
        version: CUDA version that the driver library supports, 12080 for 12.8; None: no library.
        problem: Why the library cannot be loaded or reports no GPU.
    """

    version: int | None
    problem: str
    gpus: Sequence[GpuFound] = ()


class WayTried(msgspec.Struct, frozen=True):
    """A way of copying, between the GPU and memory of the pool's kind.

    Attributes:
        missing: Why it could not be tried; "" if it was.
        failures: What went wrong, by direction.
        rates: GB/s by direction, for each of `COPY_BYTES`; none for a way that failed.
    """

    way: str
    missing: str = ""
    failures: Mapping[str, str] = {}
    rates: Mapping[str, Sequence[float]] = {}

    @property
    def passed(self) -> bool:
        return not self.missing and not self.failures


class GpuTried(msgspec.Struct, frozen=True):
    """Outcome of trying a GPU.

    Attributes:
        refusal: Why a rank could not use it; "" if it could.
        used_bytes: Memory used on each GPU while the copies ran; empty if they did not.
        past_dram: Why there is no path past DRAM to each directory; "" if there is one.
    """

    ways: Sequence[WayTried] = ()
    is_pinned: bool = False
    refusal: str = ""
    used_bytes: Sequence[int | None] = ()
    past_dram: Mapping[str, str] = {}


class TrialRequest(msgspec.Struct, frozen=True):
    """What the child process shall try.

    Attributes:
        gpu: CUDA's number of the GPU.
        segment: Memory to copy from and to.
        directories: Of the SSD tier, where it may be used past DRAM.
    """

    gpu: int
    segment: SegmentRef
    directories: Sequence[str] = ()


def cuda_name(version: int) -> str:
    """Return "12.8" for 12080."""
    return f"{version // 1000}.{version % 1000 // 10}"


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
