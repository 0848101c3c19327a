"""`scripts/run_tests.py`: what arguments select, and what is reported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

PATH = Path(__file__).resolve().parents[2] / "scripts" / "run_tests.py"
_spec = importlib.util.spec_from_file_location("run_tests", PATH)
assert _spec is not None
assert _spec.loader is not None
run_tests = importlib.util.module_from_spec(_spec)
sys.modules["run_tests"] = run_tests  # dataclasses look there
_spec.loader.exec_module(run_tests)


ENGINES = {"vllm": "tests/vllm", "sglang": "tests/sglang"}


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        (
            ["-k", "tests"],
            {"unit": "tests/unit", "system": "tests/gpu"} | ENGINES,
        ),
        (["-x", "tests/unit/test_tier.py"], {"unit": "tests/unit/test_tier.py"}),
        (["tests/unit/test_tier.py::test_x"], {"unit": "tests/unit/test_tier.py::test_x"}),
        (
            ["./tests/gpu", "tests/vllm"],
            {"system": "./tests/gpu", "vllm": "tests/vllm"},
        ),
        (
            ["tests"],
            {"unit": "tests/unit", "system": "tests/gpu"} | ENGINES,
        ),
        (["tests/conftest.py"], {}),
    ],
)
def test_paths_select_exactly_what_they_name(
    arguments: list[str], selected: dict[str, str]
) -> None:
    commands = run_tests.commands_for(arguments, run_tests.TESTS)
    assert {lane: command[-1] for lane, command in commands.items()} == selected


def exits_with(status: int) -> list[str]:
    return [sys.executable, "-c", f"raise SystemExit({status})"]


@pytest.mark.parametrize(
    ("statuses", "status"), [([0, 0], 0), ([0, 5], 0), ([5, 5], 5), ([2, 0], 1), ([5, 1], 1)]
)
def test_every_lane_runs_and_any_that_fails_counts(
    statuses: list[int],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lanes = {f"lane{number}": exits_with(each) for number, each in enumerate(statuses)}
    monkeypatch.setattr(run_tests, "CHECKS", lanes)
    monkeypatch.setattr(run_tests, "TESTS", {})
    assert run_tests.main([]) == status
    words = {0: "passed", 5: "nothing selected"}
    table = capfd.readouterr().out.splitlines()[-len(lanes) :]
    for row, lane, each in zip(table, lanes, statuses, strict=True):
        assert row.startswith(f"{lane:10}{words.get(each, f'failed ({each})')}")


def test_a_lane_that_is_not_set_up_is_named_and_does_not_fail_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lanes = {"here": exits_with(0), "absent": ["/nowhere/bin/python", "-m", "pytest"]}
    monkeypatch.setattr(run_tests, "CHECKS", {})
    monkeypatch.setattr(run_tests, "commands_for", lambda *_: lanes)
    assert run_tests.main([]) == 0
    out = capfd.readouterr().out
    assert "skipped: there is no /nowhere/bin/python" in out
    assert out.splitlines()[-1].startswith(f"{'absent':10}not set up")


def test_checks_run_beside_the_first_lane_and_are_shown_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "checked"
    check = f"import pathlib; pathlib.Path({str(file)!r}).touch(); print('a check')"
    wait = f"import pathlib\nwhile not pathlib.Path({str(file)!r}).exists(): pass\nprint('a test')"
    monkeypatch.setattr(run_tests, "CHECKS", {"lint": [sys.executable, "-c", check]})
    lanes = {"unit": [sys.executable, "-c", wait], "vllm": exits_with(0)}
    monkeypatch.setattr(run_tests, "commands_for", lambda *_: lanes)
    monkeypatch.setattr(run_tests, "LANE_S", 60.0)
    assert run_tests.main([]) == 0
    printed = capfd.readouterr().out
    at = [printed.index(f"\n{line}") for line in ("a test", "=== lint", "a check", "=== vllm")]
    assert at == sorted(at)


def test_pytests_closing_line_is_printed_last(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    closing = "======= 3 passed, 1 skipped in 12.34s ======="
    code = f"print({closing!r}); print('a late line of a process')"
    monkeypatch.setattr(run_tests, "CHECKS", {"unit": [sys.executable, "-c", code]})
    monkeypatch.setattr(run_tests, "commands_for", lambda *_: {})
    assert run_tests.main([]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == closing


def ended_outputs() -> bool:
    """Whether no lane's pipe is held any more, so that no process of a lane is left."""
    outputs = [each for each in threading.enumerate() if isinstance(each, run_tests.Output)]
    for output in outputs:
        output.join(60.0)
    return not any(output.is_alive() for output in outputs)


@pytest.mark.parametrize("has_own_session", [False, True])
def test_a_process_that_a_test_has_left_running_does_not_hold_up_the_lane(
    has_own_session: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is killed unless it is in a session of its own."""
    code = (
        "import subprocess; left = subprocess.Popen("
        f"['sleep', '600'], start_new_session={has_own_session}); print(left.pid, 'failed in 2s')"
    )
    monkeypatch.setattr(run_tests, "TO_END_S", 2.0)
    outcome = run_tests.run("unit", [sys.executable, "-c", code])
    assert outcome.word == "passed"
    left, *words = outcome.closing_line.split()
    assert words == ["failed", "in", "2s"]
    if has_own_session:
        os.kill(int(left), signal.SIGKILL)
    assert ended_outputs()


@pytest.fixture
def stubborn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Path:
    """A lane that, like its child, ignores interrupts; the file is there once both do."""
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, subprocess; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "child = subprocess.Popen(['sleep', '600']); "
        f"pathlib.Path({str(ready)!r}).touch(); child.wait()"
    )
    monkeypatch.setattr(run_tests, "TO_END_S", 2.0)
    monkeypatch.setattr(run_tests, "CHECKS", {"unit": [sys.executable, "-c", code]})
    monkeypatch.setattr(run_tests, "commands_for", lambda *_: {})
    return ready


@pytest.mark.parametrize("num_interrupts", [1, 2])
def test_an_interrupt_ends_the_lane_and_all_that_it_has_started(
    num_interrupts: int, stubborn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, interrupts = subprocess.Popen.wait, iter(range(num_interrupts))

    def be_interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if next(interrupts, None) is None:
            return wait(process, timeout)
        while not stubborn.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                wait(process, 0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", be_interrupted)
    assert run_tests.main([]) == 128 + signal.SIGINT
    assert ended_outputs()


def test_a_lane_that_hangs_is_ended_and_counts_as_failed(
    stubborn: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_tests, "LANE_S", 2.0)
    assert run_tests.main([]) == 1
    out = capfd.readouterr().out
    assert "ended: unit was not done within 2 s" in out
    assert out.splitlines()[-1].startswith(f"{'unit':10}failed (124)")
    assert ended_outputs()


def test_a_lane_ends_if_its_output_cannot_be_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(
        sys, "stdout", SimpleNamespace(buffer=None, write=len, flush=list, isatty=bool)
    )
    endless = "while True: print('x' * 4096)"
    # 1 where it notices at a print, 120 where Python does at its end.
    word = run_tests.run("unit", [sys.executable, "-c", endless]).word
    assert word in ("failed (1)", "failed (120)")
