"""Runs the cases of all sections in turn. A failed case does not stop the others."""

from __future__ import annotations

import gc
import inspect
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from flexcache.bench.machine import describe_machine
from flexcache.bench.results import Case, Result, Unsupported
from flexcache.config.remote_url import check_remote_url
from flexcache.errors import ConfigError, MissingDependencyError

logger = logging.getLogger(__name__)

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


class Outcome(Enum):
    DONE = "done"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


@dataclass(frozen=True)
class CaseReport:
    """Outcome of a case; ``reason`` says why it is unsupported, or how it failed."""

    section: str
    title: str
    outcome: Outcome
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
        return any(case.outcome is Outcome.FAILED for case in self.cases)

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
    outcome, results, reason = Outcome.DONE, list[Result](), ""
    try:
        results.extend(case.run())
    except (Unsupported, MissingDependencyError) as error:
        outcome, reason = Outcome.UNSUPPORTED, str(error)
    except Exception as error:
        logger.debug("%s, %s", section, case.title, exc_info=True)
        outcome, reason = Outcome.FAILED, f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - started
    return CaseReport(section, case.title, outcome, results, reason, took_s)
