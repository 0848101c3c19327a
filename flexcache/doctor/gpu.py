"""NVIDIA's driver and what torch makes of it. GPUs need not reach each other (P2P)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from flexcache.doctor.findings import Finding, error, ok, warning
from flexcache.doctor.subject import Subject

_BATCH_COPY_VERSION = 12_080
_DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Gpus:
    """What was found.

    Attributes:
        has_device_files: Whether the kernel's side is there.
        cuda_version: That the driver's library serves, as 12080 for 12.8; None: no library.
        problem: Why the library gives no device.
        num_devices: That it gives.
        torch_cuda: The CUDA version that torch was built for; None: for the CPU only.
    """

    has_device_files: bool
    cuda_version: int | None
    problem: str
    num_devices: int
    torch_cuda: str | None


def has_gpu(subject: Subject) -> bool:
    return (subject.root / "dev/nvidiactl").exists()


def check_gpu(subject: Subject) -> Iterator[Finding]:
    import torch

    version, problem, num_devices = _ask_driver()
    yield from judge_gpus(Gpus(has_gpu(subject), version, problem, num_devices, torch.version.cuda))


def _ask_driver() -> tuple[int | None, str, int]:
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError as failure:
        return None, str(failure), 0
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    return version.value, f"CUDA error {code}" if code else "", count.value


def judge_gpus(gpus: Gpus) -> Iterator[Finding]:
    if gpus.cuda_version is None and not gpus.has_device_files:
        yield ok("no NVIDIA GPU: KV tensors are in the CPU's memory")
        return
    if gpus.cuda_version is None:
        yield error(
            f"the GPU's driver cannot be used: {gpus.problem}",
            "give the container the driver: docker run --gpus all (NVIDIA container toolkit)",
        )
        return
    driver = f"CUDA {gpus.cuda_version // 1000}.{gpus.cuda_version % 1000 // 10}"
    if not gpus.num_devices:
        yield warning(
            f"the driver ({driver}) gives no GPU: {gpus.problem or 'there is none'}",
            "nvidia-smi says more; docker run --gpus all; look at CUDA_VISIBLE_DEVICES",
        )
        return
    if gpus.torch_cuda is None:
        yield error(
            f"{gpus.num_devices} GPUs, but torch was built for the CPU",
            "install torch for CUDA (vLLM's GPU wheels bring it)",
        )
    if gpus.cuda_version < _BATCH_COPY_VERSION:
        yield warning(
            f"{gpus.num_devices} GPUs; their driver ({driver}) takes copies one by one",
            "update the driver to CUDA 12.8 (570) or later: it takes all copies of an op at once",
        )
    else:
        yield ok(f"{gpus.num_devices} GPUs; their driver ({driver}) takes copies in batches")
