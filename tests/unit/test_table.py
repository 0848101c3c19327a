"""The table of targets: what its rows say of the reports that benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path

from bounded_steps import Outcome, Step
from table import describe, report_of, rows_of, steps_for
from table_rows import (
    ALONE,
    SAME_RUN,
    Row,
    rows_of_cases,
    rows_of_decisions,
    rows_of_hit_rates,
)

from flexcache.bench.report import write_json
from flexcache.bench.results import Result
from flexcache.bench.suite import CaseReport, Report, Settings
from flexcache.bench.suite import Outcome as CaseOutcome


def report_with(directory: Path, *results: Result) -> Path:
    """Write what a benchmark with these results would."""
    case = CaseReport("index", "a case", CaseOutcome.DONE, results)
    machine = {"directory": {"path": "."}}
    path = report_of(directory, "control")
    write_json(Report(Settings(directory=directory), machine, "now", cases=[case]), path)
    return path


def test_each_result_with_a_target_is_a_row(tmp_path: Path) -> None:
    path = report_with(
        tmp_path,
        Result("allocate", "us", [24.0], 8.0, "a heap", limit=15.0, parameter="leaves", at=50_000),
        Result("copy", "GB/s", [9.5], 10.0, "memcpy", reach=0.9),
        Result("memory", "bytes", [151.0], limit=160.0),
        Result("told only", "us", [1.0], 1.0, "a heap"),
    )
    assert list(rows_of_cases(json.loads(path.read_text()))) == [
        Row("index: allocate, 50,000 leaves", "24 us", "a heap: 8 us", 3.0, "<= 15 us", False,
            SAME_RUN),
        Row("index: copy", "9.5 GB/s", "memcpy: 10 GB/s", 0.95, ">= 0.9x", True, SAME_RUN),
        Row("index: memory", "151 bytes", "", None, "<= 160 bytes", True, ALONE),
    ]  # fmt: skip


def test_hit_rates_become_shares_of_the_way_to_the_optimum() -> None:
    rates = {
        "lru": {"1000": 0.1, "2000": 0.5}, "default": {"1000": 0.2, "2000": 0.5},
        "optimum": {"1000": 0.5, "2000": 0.5},
    }  # fmt: skip
    near, no_way, *more = rows_of_hit_rates(rates, "t", {"1000": 0.3, "2000": 0.1, "5000": 0.1})
    assert (near.found, near.reached) == ("25%", False)
    assert (no_way.found, no_way.reached) == ("100%", True)
    assert more == []


def test_decisions_without_a_bound_are_left_out() -> None:
    targets = [
        {"name": "TTFT", "value": 0.7, "bound": 0.75}, {"name": "p99", "value": 2, "bound": None},
        {"name": "agents", "value": 0.53, "bound": 0.5},
    ]  # fmt: skip
    rows = list(rows_of_decisions({"targets": targets}))
    assert [(row.what, row.reached) for row in rows] == [
        ("router: TTFT", True), ("router: agents", False)
    ]  # fmt: skip


def test_a_benchmark_that_left_nothing_is_told_and_has_no_rows(tmp_path: Path) -> None:
    step = Step("control", ("false",), 1.0, reads="cases")
    failed = Outcome(step, "failed (1)", 1.0, tmp_path / "control.txt", tmp_path / "control.err")
    assert rows_of(failed) == []
    report_with(tmp_path, Result("copy", "GB/s", [9.5], 10.0, "memcpy", reach=0.9))
    rows = rows_of(failed)
    lines = list(describe([failed], rows))
    assert "1 of 1 targets are reached" in "\n".join(lines)
    assert lines[-1].startswith("* control: failed (1)")


def test_every_benchmark_is_a_file_and_has_a_name_of_its_own(tmp_path: Path) -> None:
    steps = steps_for(tmp_path, tmp_path, tmp_path)
    assert len({step.title for step in steps}) == len(steps)
    for step in steps:
        assert step.command[1] == "-m" or Path(step.command[1]).is_file()
