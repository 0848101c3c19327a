"""Checks NVIDIA's driver, torch's CUDA build, and copies to each GPU and back.

All that touches a driver happens in child processes: a broken GPU kills or hangs them. The memory
to copy from and to is made here and opened there, as a server makes it and a rank opens it.
Peer-to-peer access between GPUs is not needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from flexcache.doctor.child import run_child
from flexcache.doctor.findings import Finding, error, in_gb, ok, warning
from flexcache.doctor.gpu_records import (
    DIRECTIONS,
    DriverFound,
    GpuTried,
    TrialRequest,
    WayTried,
    cuda_name,
)
from flexcache.doctor.gpu_table import describe_gpus
from flexcache.doctor.subject import Subject
from flexcache.errors import ConfigError
from flexcache.storage.host_pool import HostSegment

_BATCH_COPY_VERSION = 12_080
_BLOCK_BYTES = 2 << 20
_NUM_BLOCKS = 128
_STEP_LIMIT_S = 60.0
_MUCH_MEMORY = 64 << 20
"""More than this is a context, not another process's fluctuation."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The host's GPUs, as the driver and torch report them.

    Attributes:
        has_device_files: Whether the kernel driver's device files exist.
        driver: What the driver library reports.
        torch_cuda: CUDA version that torch was built for; None: CPU only.
    """

    has_device_files: bool
    driver: DriverFound
    torch_cuda: str | None


def has_gpu(subject: Subject) -> bool:
    return (subject.root / "dev/nvidiactl").exists()


def check_gpu(subject: Subject) -> Iterator[Finding]:
    import torch

    if torch.version.hip is not None:
        yield warning(
            f"torch is for ROCm {torch.version.hip}: AMD GPUs are not examined, and copies to them "
            "have never run on hardware",
            "a rank tests its copies when it attaches; please report what it logs",
        )
        return
    found = _ask_driver()
    if isinstance(found, str):
        yield error(f"the GPUs' driver failed: {found}", "restart the GPUs' driver, or the host")
        return
    yield from judge_gpus(Gpus(has_gpu(subject), found, torch.version.cuda))
    if not found.gpus or torch.version.cuda is None:
        return
    tried: list[GpuTried] = []
    hugepages = "transparent" if subject.config is None else subject.config.hugepages
    directories = _past_dram(subject)
    for index in range(len(found.gpus)):
        segment, problem = _pool_memory(hugepages)
        if problem:
            yield warning(f"GPUs are tried with transparent huge pages: {problem}", "see above")
            hugepages = "transparent"
        with segment:
            tried.append(_try_gpu(TrialRequest(index, segment.ref(), directories)))
        yield from judge_trial(index, tried[-1])
    afterwards = _ask_driver()
    if not isinstance(afterwards, str):
        yield from judge_memory(found, tried, afterwards)
        size = _NUM_BLOCKS * _BLOCK_BYTES >> 20
        kind = f"a shared segment of {size} MiB for each GPU, hugepages = {hugepages!r}"
        yield ok(
            "the GPUs in full, to paste into an issue:",
            describe_gpus(found, tried, afterwards, kind),
        )


def _ask_driver() -> DriverFound | str:
    """Return what the driver reports, or how the child process failed."""
    outcome = run_child("flexcache.doctor.nvidia", b"", _STEP_LIMIT_S)
    if outcome.answer is None:
        return outcome.problem
    return msgspec.json.decode(outcome.answer, type=DriverFound)


def _pool_memory(hugepages: str) -> tuple[HostSegment, str]:
    """Make memory like the pool's; also return why it is not quite like it, or ""."""
    try:
        return HostSegment.create(_BLOCK_BYTES, _NUM_BLOCKS, hugepages), ""
    except ConfigError as refusal:
        return HostSegment.create(_BLOCK_BYTES, _NUM_BLOCKS), str(refusal)


def _past_dram(subject: Subject) -> Sequence[str]:
    """Return the directories of the SSD tier, if it may be used past DRAM."""
    config = subject.config
    if config is None or config.ssd_past_dram == "never":
        return ()
    return [str(path) for path in subject.configured if path.is_dir()]


def _try_gpu(request: TrialRequest) -> GpuTried:
    outcome = run_child("flexcache.doctor.gpu_trial", msgspec.json.encode(request), _STEP_LIMIT_S)
    if outcome.answer is None:
        return GpuTried(refusal=outcome.problem)
    tried = msgspec.json.decode(outcome.answer, type=GpuTried)
    if outcome.problem:  # it answered, and failed when it ended
        return msgspec.structs.replace(tried, refusal=outcome.problem)
    return tried


def judge_gpus(gpus: Gpus) -> Iterator[Finding]:
    found, num_gpus = gpus.driver, len(gpus.driver.gpus)
    if found.version is None and not gpus.has_device_files:
        yield ok("no NVIDIA GPU: KV tensors are in CPU memory")
        return
    if found.version is None:
        yield error(
            f"the GPU's driver cannot be used: {found.problem}",
            "give the container the driver: docker run --gpus all (NVIDIA container toolkit)",
        )
        return
    driver = f"CUDA {cuda_name(found.version)}"
    if not num_gpus:
        yield warning(
            f"the driver ({driver}) reports no GPU: {found.problem or 'there is none'}",
            "see nvidia-smi; docker run --gpus all; check CUDA_VISIBLE_DEVICES",
        )
        return
    if gpus.torch_cuda is None:
        yield error(
            f"{num_gpus} GPUs, but torch was built for the CPU",
            "install torch for CUDA (vLLM's GPU wheels include it)",
        )
    if found.version < _BATCH_COPY_VERSION:
        yield warning(
            f"{num_gpus} GPUs; their driver ({driver}) takes copies one by one",
            "update the driver to CUDA 12.8 (570) or later: it takes all copies of an op at once",
        )
    else:
        yield ok(f"{num_gpus} GPUs; their driver ({driver}) takes copies in batches")


def judge_trial(index: int, tried: GpuTried) -> Iterator[Finding]:
    """Yield the outcome of trying a GPU, and of each way of copying."""
    if tried.refusal:
        yield error(
            f"GPU {index} cannot be used: {tried.refusal}",
            "if its memory is full, stop what uses it; otherwise update the driver, and report "
            "this with the driver's version and the GPU's name",
        )
    elif not tried.is_pinned:
        yield warning(
            f"GPU {index}: the driver does not pin host memory, so copies are slow",
            "check the container's memory limit, the IOMMU settings and, on WSL, how much memory "
            "Windows allows to be pinned",
        )
    for way in tried.ways:
        text = f"GPU {index}, {way.way}"
        if way.passed:
            yield ok(f"{text}: {_describe_rates(way)}")
        elif way.missing:
            yield warning(
                f"{text} not available: {way.missing}",
                "not needed, but some copies are faster with it",
            )
        else:
            failures = ", ".join(f"{kind} {why}" for kind, why in way.failures.items())
            yield warning(
                f"{text}: {failures}; it is not used",
                "update the driver and torch, and report this with their versions and the GPU's "
                "name",
            )
    for directory, problem in tried.past_dram.items():
        how = f"goes through DRAM: {problem}" if problem else "can go past DRAM"
        yield ok(f"GPU {index}, SSD at {directory}: {how}")


def _describe_rates(way: WayTried) -> str:
    if not way.rates:  # only the self-test ran
        return "the self-test passed"
    best = ", ".join(f"{kind} {max(way.rates[kind]):.3g} GB/s" for kind in DIRECTIONS)
    return f"all bytes right; {best}"


def judge_memory(
    before: DriverFound, tried: Sequence[GpuTried], after: DriverFound
) -> Iterator[Finding]:
    """Yield where GPU memory was used that should not be."""
    for trial, other in itertools.permutations(range(len(before.gpus)), 2):
        used = tried[trial].used_bytes
        grown = _growth(before, other, used[other] if used else None)
        if grown > _MUCH_MEMORY:
            yield warning(
                f"while GPU {trial} was tried, {in_gb(grown)} more of GPU {other} was used",
                "if no other process took it, report this: a rank must use its own GPU only",
            )
    for index, gpu in enumerate(after.gpus[: len(before.gpus)]):
        grown = _growth(before, index, gpu.used_bytes)
        if grown > _MUCH_MEMORY:
            yield warning(
                f"{in_gb(grown)} more of GPU {index} is used afterwards",
                "if no other process took it, report this",
            )


def _growth(before: DriverFound, index: int, used: int | None) -> int:
    """Return by how many bytes a GPU's used memory grew; 0 if unknown."""
    first = before.gpus[index].used_bytes
    return 0 if first is None or used is None else used - first
