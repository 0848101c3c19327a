"""GPUs: NVIDIA's driver, torch's CUDA build, and copies to each GPU and back.

All that touches a driver happens in child processes: a broken GPU kills or hangs them. The memory
to copy from and to is made here and opened there, as a server makes it and a rank opens it.
Peer-to-peer access between GPUs is not needed.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexcache.doctor.gpu_driver import (
    COPY_BYTES,
    DIRECTIONS,
    DriverFound,
    GpuTried,
    TrialRequest,
    WayTried,
    cuda_name,
    run_child,
)
from flexcache.doctor.subject import Finding, Subject, error, in_gb, ok, warning
from flexcache.errors import ConfigError
from flexcache.ids import __version__
from flexcache.storage.host_pool import HostSegment
from flexcache.storage.machine import read_text

_BATCH_COPY_VERSION = 12_080
_BLOCK_BYTES = 2 << 20
_NUM_BLOCKS = 128
_STEP_LIMIT_S = 60.0
_MUCH_MEMORY = 64 << 20
"""More than this is a context, not another process's fluctuation."""


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
    yield from judge_gpus(found, has_gpu(subject), torch.version.cuda)
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
    outcome = run_child("flexcache.doctor.gpu_driver", b"", _STEP_LIMIT_S)
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


def judge_gpus(
    found: DriverFound, has_device_files: bool, torch_cuda: str | None
) -> Iterator[Finding]:
    """Yield what the driver's answer means.

    Args:
        has_device_files: Whether the kernel driver's device files exist.
        torch_cuda: CUDA version that torch was built for; None: CPU only.
    """
    num_gpus = len(found.gpus)
    if found.version is None and not has_device_files:
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
    if torch_cuda is None:
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


_WIDTH = 10_000  # of lines that are not to be wrapped
_DEVICES = Path("/sys/bus/pci/devices")


def describe_gpus(
    before: DriverFound, tried: Sequence[GpuTried], after: DriverFound, memory: str
) -> str:
    """Describe the software, the GPUs, each way of copying, and the memory used on each GPU.

    Args:
        before, after: What the driver reported before and after the trials.
        memory: Kind of the host memory.
    """
    driver = cuda_name(before.version or 0)
    software = (
        f"FlexCache {__version__}, torch {version('torch')}, driver CUDA {driver}, "
        f"Python {platform.python_version()}, Linux {platform.release()}"
    )
    pinned = {gpu.is_pinned for gpu in tried if not gpu.refusal}
    state = {True: "pinned", False: "not pinned"}
    host = f"{memory}, {' or '.join(state[each] for each in pinned) or 'not used'}"
    tables = (_gpus(before), _ways(tried), _used(before, tried, after))
    return "\n\n".join([software, f"Host memory: {host}", *map(_as_text, tables)])


def _gpus(found: DriverFound) -> Table:
    table = _table("GPU", "name", "PCI address", "link", "NUMA node")
    for index, gpu in enumerate(found.gpus):
        device = _DEVICES / gpu.bus_id.lower()
        speed, width = (read_text(device / f"current_link_{part}") for part in ("speed", "width"))
        link = f"{speed} x{width}" if speed else ""
        table.add_row(
            str(index), escape(gpu.name), gpu.bus_id, link, read_text(device / "numa_node")
        )
    return table


def _ways(tried: Sequence[GpuTried]) -> Table:
    sizes = [f"{_in_kib(size)}, GB/s" for size in COPY_BYTES]
    table = _table("GPU", "way", "direction", "bytes", *sizes)
    for index, gpu in enumerate(tried):
        if gpu.refusal:
            table.add_row(str(index), "as a rank", "", escape(gpu.refusal))
        for way in gpu.ways:
            for cells in _way_rows(way):
                table.add_row(str(index), *map(escape, cells))
        for directory, problem in gpu.past_dram.items():
            found = f"not available: {problem}" if problem else "right"
            table.add_row(str(index), f"past DRAM, {escape(directory)}", "", escape(found))
    return table


def _way_rows(way: WayTried) -> Iterator[tuple[str, ...]]:
    if way.missing:
        yield way.way, "", f"not available: {way.missing}"
        return
    for direction in DIRECTIONS:
        rates = [f"{rate:.3g}" for rate in way.rates.get(direction, ())]
        yield way.way, direction, way.failures.get(direction, "right"), *rates


def _used(before: DriverFound, tried: Sequence[GpuTried], after: DriverFound) -> Table:
    table = _table("memory used, MB", *(f"GPU {index}" for index in range(len(before.gpus))))
    first = [gpu.used_bytes for gpu in before.gpus]

    def grown(used: Sequence[int | None]) -> list[str]:
        return [
            "?" if a is None or b is None else f"{(b - a) / 1e6:+,.0f}"
            for a, b in zip(first, used, strict=False)
        ]

    table.add_row("before", *("?" if used is None else f"{used / 1e6:,.0f}" for used in first))
    for index, gpu in enumerate(tried):
        table.add_row(f"while GPU {index} copies", *grown(gpu.used_bytes))
    table.add_row("after", *grown([gpu.used_bytes for gpu in after.gpus]))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _as_text(table: Table) -> str:
    console = Console(file=StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip()


def _in_kib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
