"""Checks NVIDIA's driver, torch's CUDA build, and copies to each GPU and back.

Peer-to-peer access between GPUs is not needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexcache.doctor.findings import Finding, error, ok, warning
from flexcache.doctor.subject import Subject
from flexcache.errors import FlexCacheError
from flexcache.storage.host_pool import HostSegment

if TYPE_CHECKING:  # imports torch
    from flexcache.transfer.workers.copy_check import Verdict

_BATCH_COPY_VERSION = 12_080
_DRIVER = "libcuda.so.1"
_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpus:
    """The host's GPUs, as the driver and torch report them.

    Attributes:
        has_device_files: Whether the kernel driver's device files exist.
        cuda_version: Version that the driver library supports, 12080 for 12.8; None: no library.
        problem: Why the library reports no device.
        num_devices: Number of devices that the library reports.
        torch_cuda: CUDA version that torch was built for; None: CPU only.
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
    if num_devices and torch.version.cuda is not None:
        for index in range(num_devices):
            yield from _check_copies(index)


def _ask_driver() -> tuple[int | None, str, int]:
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError as failure:
        return None, str(failure), 0
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    return version.value, f"CUDA error {code}" if code else "", count.value


def _check_copies(index: int) -> Iterator[Finding]:
    """Attach a small private segment the way a rank attaches its share of the pool."""
    import torch

    from flexcache.transfer.workers.copy_cuda import CudaCopier

    with HostSegment.create(_SEGMENT_BYTES, 1) as segment:
        segment.map()
        try:
            copier = CudaCopier(torch.device("cuda", index))
            copier.attach(segment)
        except (FlexCacheError, RuntimeError) as failure:
            yield error(
                f"GPU {index} cannot be used: {failure}",
                "if its memory is full, stop what uses it; otherwise update the driver, and report "
                "this with the driver's version and the GPU's name",
            )
            return
        verdicts, is_pinned = copier.verdicts, copier.is_pinned
        copier.close()
    yield from judge_copies(index, verdicts, is_pinned)


def judge_copies(index: int, verdicts: Sequence[Verdict], is_pinned: bool) -> Iterator[Finding]:
    """Yield the outcome of each copy method; at least one of them passed."""
    if not is_pinned:
        yield warning(
            f"GPU {index}: the driver does not pin host memory, so copies are slow",
            "check the container's memory limit, the IOMMU settings and, on WSL, how much memory "
            "Windows allows to be pinned",
        )
    for verdict in verdicts:
        text = f"GPU {index}, {verdict}"
        if verdict.passed:
            yield ok(text)
        elif verdict.missing:
            yield warning(text, "not needed, but some copies are faster with it")
        else:
            yield warning(
                f"{text}; it is not used",
                "update the driver and torch, and report this with their versions and the GPU's "
                "name",
            )


def judge_gpus(gpus: Gpus) -> Iterator[Finding]:
    if gpus.cuda_version is None and not gpus.has_device_files:
        yield ok("no NVIDIA GPU: KV tensors are in CPU memory")
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
            f"the driver ({driver}) reports no GPU: {gpus.problem or 'there is none'}",
            "see nvidia-smi; docker run --gpus all; check CUDA_VISIBLE_DEVICES",
        )
        return
    if gpus.torch_cuda is None:
        yield error(
            f"{gpus.num_devices} GPUs, but torch was built for the CPU",
            "install torch for CUDA (vLLM's GPU wheels include it)",
        )
    if gpus.cuda_version < _BATCH_COPY_VERSION:
        yield warning(
            f"{gpus.num_devices} GPUs; their driver ({driver}) takes copies one by one",
            "update the driver to CUDA 12.8 (570) or later: it takes all copies of an op at once",
        )
    else:
        yield ok(f"{gpus.num_devices} GPUs; their driver ({driver}) takes copies in batches")
