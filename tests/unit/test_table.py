"""The table of targets: what its rows say of the reports that benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report_figures as read
from bounded_steps import Outcome
from report_figures import Figure
from table import Benchmark, benchmarks, describe
from table_goals import GOALS
from table_rows import ALONE, NO_FIGURE, SAME_RUN, Findings, Goal, Row, rows_for

from flexcache.bench.report import write_json
from flexcache.bench.suite import CaseOutcome, CaseReport, Report, Result, Settings

MACHINE = {"directory": {"path": "."}}


def report_of(path: Path, *cases: CaseReport) -> Any:
    """Write what a benchmark with these cases would, and read it."""
    write_json(Report(Settings(directory=path.parent), MACHINE, "now", cases=list(cases)), path)
    return json.loads(path.read_text())


def case_of(*results: Result, reason: str = "") -> CaseReport:
    outcome = CaseOutcome.FAILED if reason else CaseOutcome.DONE
    return CaseReport("index", "a case", outcome, results, reason)


def row_of(goal: Goal, *figures: Figure) -> Row:
    """The row of a goal that each run found another figure for."""
    found = Findings([{str(goal.figure): figure} for figure in figures])
    [row] = rows_for([goal], {goal.step: found})
    return row


def test_results_are_found_by_name_and_parameter(tmp_path: Path) -> None:
    results = (
        Result("allocate", "us", [20.0, 24.0, 90.0], 8.0, "a heap", parameter="leaves", at=50_000),
        Result("memory", "bytes", [151.0]),
    )
    report = report_of(tmp_path / "r.json", case_of(*results), case_of(reason="no disk\nat all"))
    assert read.of_cases(report) == {
        "allocate, 50,000 leaves": Figure(24.0, "us", 8.0, "a heap"),
        "memory": Figure(151.0, "bytes"),
    }
    assert read.failures_in_cases(report) == "no disk"


def test_a_target_is_a_limit_or_a_share_of_the_bound() -> None:
    limit, reach = Goal("allocate", "s", "a", limit=15), Goal("copy", "s", "c", reach=0.9)
    assert row_of(limit, Figure(24.0, "us", 8.0, "a heap")) == Row(
        "allocate", "24 us", "a heap: 8 us", 3.0, "<= 15 us", False, SAME_RUN
    )
    assert row_of(reach, Figure(9.5, "GB/s", 10.0, "memcpy")) == Row(
        "copy", "9.5 GB/s", "memcpy: 10 GB/s", 0.95, ">= 0.90x", True, SAME_RUN
    )
    assert row_of(limit, Figure(15.0, "us")) == Row(
        "allocate", "15 us", "", None, "<= 15 us", True, ALONE
    )
    assert row_of(reach, Figure(9.5, "GB/s")).reached is None  # no bound was measured


def test_of_several_runs_the_median_counts() -> None:
    runs = [Figure(1.0, "GB/s", 2.0, "fio"), Figure(3.0, "GB/s", 2.0, "fio"),
            Figure(2.0, "GB/s", 1.0, "fio")]  # fmt: skip
    row = row_of(Goal("SSD", "s", "read", reach=0.95), *runs)
    assert (row.found, row.beside) == ("2 GB/s (median of 3 runs)", "fio: 2 GB/s")
    assert (row.ratio, row.reached) == (1.5, True)


def test_a_peer_in_the_same_report_is_beside_it() -> None:
    goal = Goal("overhead", "s", "ours", limit=0.98, peer="theirs", quoted="others 0.5")
    report = {"ours": Figure(0.97, ""), "theirs": Figure(0.91, "")}
    [row] = rows_for([goal], {"s": Findings([report])})
    assert (row.beside, row.source) == ("theirs: 0.91; others 0.5 (quoted)", SAME_RUN)
    assert row.reached is False


def test_limits_of_the_report_itself_are_rows() -> None:
    targets = [
        {"name": "TTFT", "value": 0.7, "bound": 0.75}, {"name": "p99", "value": 2, "bound": None},
        {"name": "agents", "value": 0.53, "bound": 0.5},
    ]  # fmt: skip
    found = {"d": Findings([read.of_decisions({"targets": targets})])}
    rows = list(rows_for([Goal("router", "d", None)], found))
    assert [(row.what, row.target, row.reached) for row in rows] == [
        ("router: TTFT", "<= 0.75", True), ("router: agents", "<= 0.5", False)
    ]  # fmt: skip


def test_hit_rates_become_shares_of_the_way_to_the_optimum() -> None:
    rates = {
        "lru": {"1000": 0.1, "2000": 0.5}, "default": {"1000": 0.2, "2000": 0.499},
        "optimum": {"1000": 0.5, "2000": 0.5},
    }  # fmt: skip
    figures = read.of_hit_rates(rates)
    assert figures["1000 blocks"] == Figure(25.0, "%", beside="LRU 10.00%, optimum 50.00%")
    assert figures["2000 blocks"].value == 100.0
    assert figures["least lead"].value == -0.1
    assert row_of(Goal("lead", "s", "least lead", limit=-0.05), figures["least lead"]).reached is (
        False
    )


def test_the_router_s_index_stands_beside_dynamo_s() -> None:
    times = {"lookups": {"512": {}, "8,192 known": {"decide": {"p50": 20.0, "p99": 34.0}}}}
    report = {
        "by_workers": {
            "8": {},
            "1000": {
                "FlexCache": {**times, "apply": {"stored": 1.1, "stored, from bytes": 0.7}},
                "RadixTree": {**times, "apply": {"stored, from bytes": 0.6}},
            },
        },
        "memory": {"FlexCache": [{"num_bytes": 10, "num_blocks": 1},
                                 {"num_bytes": 320, "num_blocks": 2}]},
    }  # fmt: skip
    figures = read.of_router_index(report)
    assert figures["decide, p99"] == Figure(34.0, "us", 34.0, "Dynamo's tree")
    assert figures["events"] == Figure(
        1.1, "million blocks/s", beside="decoded; from bytes: FlexCache 0.7, RadixTree 0.6"
    )
    assert figures["memory"] == Figure(160.0, "bytes")


def test_of_long_chats_the_median_and_the_longest_stall_count() -> None:
    rows = [
        {"name": "transformers, whole", "wall_ms": [9.0], "stall_ms": [9.0]},
        {"name": "decision, all known", "wall_ms": [3.0, 1.0, 2.0], "stall_ms": [1.0, 4.0]},
    ]
    assert read.of_tokens(rows) == {
        "decision, all known": Figure(2.0, "ms"), "decision, all known, stall": Figure(4.0, "ms")
    }  # fmt: skip


def findings_after(path: Path, benchmark: Benchmark, result: str) -> Findings:
    """What is found if every run of a benchmark ends like this."""
    outcomes = {
        step.title: Outcome(step, result, 1.0, path / "o.txt", path / "e.txt")
        for step in benchmark.steps(path)
    }
    return benchmark.findings(outcomes, path)


def test_a_benchmark_that_left_nothing_has_a_row_with_the_reason(tmp_path: Path) -> None:
    benchmark = Benchmark("index", "run.py", (), 1.0, runs=2)
    goals = [Goal("copy", "index", "copy", reach=0.9), Goal("router", "index", None)]

    def rows(result: str) -> list[Row]:
        return list(rows_for(goals, {"index": findings_after(tmp_path, benchmark, result)}))

    assert {row.found for row in rows("killed after 60 s")} == {f"{NO_FIGURE}: killed after 60 s"}
    (tmp_path / "index 1.json").write_text("{")
    assert rows("passed")[0].found.startswith(f"{NO_FIGURE}: unreadable report")
    report_of(tmp_path / "index 1.json", case_of(Result("copy", "GB/s", [9.5], 10.0, "memcpy")))
    assert rows("failed (1)")[0].reached is True
    report_of(tmp_path / "index 1.json", case_of(reason="no disk"))
    text = "\n".join(describe(rows("killed after 60 s"), []))
    assert "| copy | no figure: no disk; killed after 60 s |" in text
    assert "0 of 0 targets are reached, 2 are open" in text


def test_figures_of_an_earlier_run_have_a_column(tmp_path: Path) -> None:
    benchmark = Benchmark("index", "run.py", (), 1.0)
    goals = [Goal("copy", "index", "copy", reach=0.9), Goal("new", "index", "new", limit=1)]

    def rows(found: Findings) -> list[Row]:
        return list(rows_for(goals, {"index": found}))

    assert benchmark.findings_before(tmp_path) == Findings([])
    report_of(tmp_path / "index.json", case_of(Result("copy", "GB/s", [5.0], 10.0, "memcpy")))
    for unreadable in ("", "{}", '{"cases": [{"name": "x"}]}'):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "index.json").write_text(unreadable)
        assert benchmark.findings_before(tmp_path / "other") == Findings([])
    before = {row.what: row for row in rows(benchmark.findings_before(tmp_path))}
    now = Findings([{"copy": Figure(9.0, "GB/s", 10.0, "memcpy"), "new": Figure(1.0, "s")}])
    heading, _, copy, new, *_ = describe(rows(now), [], before)
    assert heading.startswith("| what | before | found |")
    assert copy.startswith("| copy | 5 GB/s, 0.50x | 9 GB/s | memcpy: 10 GB/s | 0.90x |")
    assert new.startswith("| new |  | 1 s |")


def test_a_benchmark_that_did_not_run_says_what_it_needs(tmp_path: Path) -> None:
    assert Benchmark("a", "run.py", (), 1.0, needs="venvs").findings({}, tmp_path) == Findings(
        [], "needs --venvs"
    )
    assert Benchmark("a", "run.py", (), 1.0).findings({}, tmp_path).reason == "not chosen"


def test_every_benchmark_is_a_file_with_a_name_of_its_own_and_has_goals(tmp_path: Path) -> None:
    everything = benchmarks(tmp_path, tmp_path, tmp_path)
    titles = [step.title for each in everything for step in each.steps(tmp_path)]
    assert len(set(titles)) == len(titles)
    assert {goal.step for goal in GOALS} == {each.title for each in everything}
    for each in everything:
        for step in each.steps(tmp_path):
            assert step.command[1] == "-m" or Path(step.command[1]).is_file()
