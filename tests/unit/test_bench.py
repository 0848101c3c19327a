"""How `flexcache bench` handles samples, cases and sections, without measuring anything."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flexcache.bench.report import (
    bars_of,
    check_plot_file,
    draw,
    figure,
    growth,
    show_report,
    target,
    write_json,
)
from flexcache.bench.suite import (
    SECTIONS,
    Case,
    CaseOutcome,
    Report,
    Result,
    Settings,
    Unsupported,
    choose_sections,
    describe_directory,
    describe_machine,
    run_case,
    run_suite,
    sample,
    sample_beside,
)
from flexcache.errors import ConfigError, MissingDependencyError


def a_section(monkeypatch: pytest.MonkeyPatch, name: str, cases: object) -> None:
    """Replace the cases of a section."""
    module = ModuleType(f"flexcache.bench.{name}")
    module.cases = cases  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def settings_for(sections: Sequence[str], **settings: Any) -> Settings:
    return Settings(choose_sections(sections, SECTIONS), **settings)


def a_case(title: str, *results: Result, error: BaseException | None = None) -> Case:
    def run() -> Iterable[Result]:
        yield from results
        if error is not None:
            raise error

    return Case(title, run)


def shown(report: Report) -> str:
    text = io.StringIO()
    show_report(report, Console(file=text, width=200))
    return text.getvalue()


FAST = Result("copy", "GB/s", [8.0, 10.0, 9.0], bound=10.0, bound_name="memcpy", reach=0.9)
SLOW = Result("match", "us", [40.0, 50.0, 45.0], bound=10.0, bound_name="xxh3", limit=30)


# -- figures -------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(1, 100))
def test_the_tail_bounds_its_share_of_samples(samples: list[float], percent: float) -> None:
    slow, fast = Result("a", "us", samples), Result("a", "GB/s", samples)
    num_wanted = percent / 100 * len(samples)
    assert sum(value <= slow.tail(percent) for value in samples) >= num_wanted
    assert sum(value >= fast.tail(percent) for value in samples) >= num_wanted
    assert (slow.tail(100), fast.tail(100)) == (max(samples), min(samples))


def test_a_target_is_reached_only_if_both_the_ratio_and_the_limit_are() -> None:
    assert FAST.is_reached is True
    assert SLOW.is_reached is False
    both = Result("a", "us", [20.0], bound=10.0, reach=1.5, limit=30)
    assert both.is_reached is False
    assert target(both) == "<= 1.5x, <= 30 us"
    assert Result("a", "us", [20.0], bound=10.0).is_reached is None


def test_growth_is_reported_per_tenfold_parameter() -> None:
    def point(at: float, value: float) -> Result:
        return Result("a", "us", [value], parameter="tokens", at=at)

    assert growth([point(10, 1), point(1000, 100)]) == pytest.approx(10)
    assert growth([point(100, 7), point(10, 7)]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1, "1"),
        (9.999, "10"),
        (45.67, "45.7"),
        (1e5 / 3, "33,333"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_the_bound_is_measured_in_turns_with_the_call() -> None:
    order: list[str] = []
    times, bound = sample_beside(
        lambda: order.append("call"), lambda: order.append("bound"),
        lambda _: order.append("undo"), rounds=3, warm_up=1,
    )  # fmt: skip
    assert order == ["call", "undo", "bound"] * 4
    assert len(times) == 3
    assert bound >= 0


def test_undo_gets_what_the_call_made() -> None:
    undone: list[int] = []
    numbers = iter(range(100))
    assert len(sample(lambda: next(numbers), undone.append, rounds=4, warm_up=2)) == 4
    assert undone == list(range(6))


# -- cases and sections --------------------------------------------------------------------------


def test_a_case_that_raises_is_failed_and_keeps_what_it_had_measured() -> None:
    report = run_case("dram", a_case("copies", FAST, error=AssertionError("wrong bytes")))
    assert (report.outcome, report.results) == (CaseOutcome.FAILED, [FAST])
    assert report.reason == "AssertionError: wrong bytes"


@pytest.mark.parametrize("error", [Unsupported("no GPU"), MissingDependencyError("no obstore")])
def test_missing_requirements_are_told_apart_from_failures(error: Exception) -> None:
    report = run_case("gpu", a_case("copies", error=error))
    assert (report.outcome, report.reason) == (CaseOutcome.UNSUPPORTED, str(error))


def test_the_other_cases_and_sections_go_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_cases(thorough: bool) -> list[Case]:
        raise Unsupported("no GPU")

    def broken_cases(thorough: bool) -> list[Case]:
        raise RuntimeError("broken")

    a_section(monkeypatch, "gpu", no_cases)
    a_section(monkeypatch, "ssd", broken_cases)
    a_section(
        monkeypatch, "dram",
        lambda thorough: [a_case("first", error=ValueError("no")), a_case("second", FAST)],
    )  # fmt: skip
    report = run_suite(settings_for(("gpu", "ssd", "dram")))
    assert [(case.section, case.title, case.outcome) for case in report.cases] == [
        ("gpu", "all of it", CaseOutcome.UNSUPPORTED),
        ("ssd", "all of it", CaseOutcome.FAILED),
        ("dram", "first", CaseOutcome.FAILED),
        ("dram", "second", CaseOutcome.DONE),
    ]
    assert report.has_failed
    text = shown(report)
    for words in ("unsupported gpu, all of it: no GPU", "FAILED dram, first: ValueError: no",
                  "targets reached: 1 of 1", "cases failed: 2, unsupported: 1"):  # fmt: skip
        assert words in text


def test_a_section_is_given_the_settings_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def cases(thorough: bool, directory: Path, seed: int = 1) -> list[Case]:
        assert not list(directory.iterdir())
        (directory / "left behind").write_bytes(b"x")
        seen.update(thorough=thorough, seed=seed, directory=directory)
        return [a_case("one")]

    a_section(monkeypatch, "ssd", cases)
    run_suite(settings_for(("ssd",), thorough=True, seed=7))
    assert (seen["thorough"], seen["seed"]) == (True, 7)
    assert not seen["directory"].exists()  # type: ignore[attr-defined]


def test_an_interrupt_keeps_what_was_measured_and_removes_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cases(thorough: bool, directory: Path) -> list[Case]:
        (directory / "blocks").write_bytes(b"x")
        return [a_case("first", FAST), a_case("second", error=KeyboardInterrupt())]

    a_section(monkeypatch, "ssd", cases)
    report = run_suite(settings_for(("ssd",), directory=tmp_path))
    assert report.was_interrupted
    assert report.results == [FAST]
    assert not list(tmp_path.iterdir())
    assert "interrupted" in shown(report)


def test_only_chooses_by_title(monkeypatch: pytest.MonkeyPatch) -> None:
    a_section(monkeypatch, "dram", lambda thorough: [a_case("2 MiB"), a_case("64 KiB")])
    report = run_suite(settings_for(("dram",), only="64"))
    assert [case.title for case in report.cases] == ["64 KiB"]
    with pytest.raises(ConfigError, match="no case of dram has 'disk' in it"):
        run_suite(settings_for(("dram",), only="disk"))


def test_unknown_sections_and_directories_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'drma'.*dram"):
        settings_for(("drma",))
    with pytest.raises(ConfigError, match="nowhere"):
        Settings(directory=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"'ftp://a'.*file://"):
        Settings(remote_url="ftp://a")


def test_a_directory_that_cannot_be_written_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="directory /proc/self: cannot be written"):
        run_suite(settings_for(("dram",), directory=Path("/proc/self")))


def test_without_names_all_sections_run() -> None:
    assert dict(choose_sections((), SECTIONS)) == SECTIONS
    assert list(choose_sections(("ssd", "dram"), SECTIONS)) == ["ssd", "dram"]


def test_a_section_that_is_named_twice_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dram", "ssd"):
        a_section(monkeypatch, name, lambda thorough: [a_case("one")])
    report = run_suite(settings_for(("ssd", "dram", "ssd")))
    assert [case.section for case in report.cases] == ["ssd", "dram"]


# -- reports -------------------------------------------------------------------------------------


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Report:
    points = [
        Result("match", "us", [v], parameter="tokens", at=n) for v, n in ((5.0, 10), (6, 100))
    ]
    a_section(monkeypatch, "dram", lambda thorough: [a_case("all", FAST, SLOW, *points)])
    return run_suite(settings_for(("dram",)))


def test_json_has_every_sample_the_machine_and_the_settings(report: Report, tmp_path: Path) -> None:
    write_json(report, tmp_path / "bench.json")
    content = json.loads((tmp_path / "bench.json").read_text())
    (case,) = content["cases"]
    assert case["results"][0]["samples"] == list(FAST.samples)
    assert case["results"][0]["ratio"] == FAST.ratio
    assert content["settings"]["seed"] == 0
    assert content["machine"]["packages"]["numpy"]


def test_the_table_shows_ratios_targets_and_growth(report: Report) -> None:
    text = shown(report)
    for words in ("copy", "0.9x", ">= 0.9x", "yes", "4.5x", "<= 30 us", "no", "as tokens grow",
                  "1.20x", "targets reached: 1 of 2"):  # fmt: skip
        assert words in text


def test_odd_figures_and_paths_do_not_prevent_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = [Result("a", "us", [v], parameter="[/x]", at=n) for v, n in ((0.0, 1), (2.0, 10))]
    odd += [Result("b", "us", [1.0], parameter="hits", at=n) for n in (0, 10, 10)]
    directory = tmp_path / "[" / "b]"
    directory.mkdir(parents=True)
    a_section(monkeypatch, "dram", lambda thorough: [a_case("all", *odd, FAST)])
    text = shown(run_suite(settings_for(("dram",), directory=directory)))
    assert "[/b]" in text
    assert "memcpy" in text


def test_figures_with_the_same_title_are_labelled_by_their_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [a_case("2 MiB", FAST), a_case("64 KiB", FAST, SLOW)]
    a_section(monkeypatch, "dram", lambda thorough: cases)
    text = shown(run_suite(settings_for(("dram",))))
    for words in ("2 MiB: copy", "64 KiB: copy", " match "):
        assert words in text


def test_figures_with_a_target_are_drawn_as_speeds_so_that_more_is_always_better(
    report: Report,
) -> None:
    ((section, (copy, match)),) = bars_of(report)
    assert section == "dram"
    assert (copy.speed, copy.target, copy.is_reached) == (0.9, 0.9, True)
    assert match.speed == pytest.approx(10 / 45)
    assert match.target == pytest.approx(10 / 30)
    assert match.is_reached is False


@pytest.mark.parametrize("name", ["bench.png", "bench.svg"])
def test_a_plot_is_drawn(report: Report, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    check_plot_file(tmp_path / name)
    draw(report, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


def test_a_plot_of_no_figures_is_empty(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Report(Settings(), {}, ""), tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").stat().st_size > 1000


def test_a_plot_of_another_format_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png"):
        check_plot_file(tmp_path / "bench.jpeg2000")


# -- the machine ---------------------------------------------------------------------------------


def test_the_machine_is_described_in_plain_values(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine == json.loads(json.dumps(machine))
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 1e8


def test_a_directory_is_on_the_innermost_mount() -> None:
    assert describe_directory(Path("/proc/self"))["file_system"] == "proc"
    shared_memory = Path("/dev/shm")
    if shared_memory.is_mount():
        assert describe_directory(shared_memory)["file_system"] == "tmpfs"
