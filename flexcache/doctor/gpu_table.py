"""The GPUs, their copies and their memory as Markdown tables, to paste into an issue."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexcache.doctor.gpu_records import (
    COPY_BYTES,
    DIRECTIONS,
    DriverFound,
    GpuTried,
    WayTried,
    cuda_name,
)
from flexcache.ids import __version__

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
        speed, width = (_read(device / f"current_link_{part}") for part in ("speed", "width"))
        link = f"{speed} x{width}" if speed else ""
        table.add_row(str(index), escape(gpu.name), gpu.bus_id, link, _read(device / "numa_node"))
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


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
