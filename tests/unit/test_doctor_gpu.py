"""The doctor's verdicts on GPUs, and child processes that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from flexcache.doctor.gpu import describe_gpus, judge_gpus, judge_memory, judge_trial
from flexcache.doctor.gpu_driver import (
    ChildOutcome,
    DriverFound,
    GpuFound,
    GpuTried,
    WayTried,
    run_child,
)
from flexcache.doctor.subject import Finding, Level

OK, WARNING, ERROR = Level.OK, Level.WARNING, Level.ERROR
MB = 1_000_000
NO_LIBRARY = DriverFound(None, "no file")


def levels(findings: Iterable[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def driver(
    *used_mb: int | None, version: int = 13_000, problem: str = "", name: str = "H100"
) -> DriverFound:
    gpus = [
        GpuFound(name, f"FFFF:{index:02X}:00.0", None if used is None else used * MB)
        for index, used in enumerate(used_mb)
    ]
    return DriverFound(version, problem, gpus)


def tried(*used_mb: int | None) -> GpuTried:
    rates = {"H2D": (1.0, 2.0, 50.25), "D2H": (3.0, 4.0, 5.0)}
    used = [None if used is None else used * MB for used in used_mb]
    return GpuTried([WayTried("batched copy", rates=rates)], True, used_bytes=used)


@pytest.mark.parametrize(
    ("found", "has_files", "torch_cuda", "expected", "text"),
    [
        (NO_LIBRARY, False, None, [OK], "no NVIDIA GPU"),
        (NO_LIBRARY, True, "12.8", [ERROR], "cannot be used: no file"),
        (driver(version=12_080, problem="CUDA error 100"), True, "12.8", [WARNING],
         "reports no GPU: CUDA error"),
        (driver(0, 0, version=12_080), True, "12.8", [OK],
         "2 GPUs; their driver (CUDA 12.8)"),
        (driver(0, version=12_040), True, "12.8", [WARNING], "one by one"),
        (driver(0), True, None, [ERROR, OK], "torch was built for the CPU"),
    ],
)  # fmt: skip
def test_gpus(
    found: DriverFound, has_files: bool, torch_cuda: str | None, expected: list[Level], text: str
) -> None:
    findings = list(judge_gpus(found, has_files, torch_cuda))
    assert levels(findings) == expected
    assert text in findings[0].text


@pytest.mark.parametrize(
    ("outcome", "expected", "text"),
    [
        (tried(), [OK], "GPU 3, batched copy: all bytes right; H2D 50.2 GB/s, D2H 5 GB/s"),
        (GpuTried([WayTried("kernel", "no Triton")], True), [WARNING], "not available: no Triton"),
        (GpuTried([WayTried("kernel", failures={"D2H": "9 bytes differ"})], True), [WARNING],
         "GPU 3, kernel: D2H 9 bytes differ; it is not used"),
        (GpuTried(is_pinned=True, past_dram={"/kv": ""}), [OK], "SSD at /kv: can go past DRAM"),
        (GpuTried(is_pinned=True, past_dram={"/kv": "no cuFile"}), [OK],
         "GPU 3, SSD at /kv: goes through DRAM: no cuFile"),
        (GpuTried(), [WARNING], "does not pin host memory"),
        (GpuTried(refusal="killed by SIGSEGV"), [ERROR], "GPU 3 cannot be used: killed"),
    ],
)  # fmt: skip
def test_trials(outcome: GpuTried, expected: list[Level], text: str) -> None:
    found = list(judge_trial(3, outcome))
    assert levels(found) == expected
    assert text in found[0].text


@pytest.mark.parametrize(
    ("before", "trials", "after", "texts"),
    [
        (driver(500, 500), [tried(1000, 510), tried(500, 1000)], driver(510, 500), []),
        (driver(500, 500), [tried(1000, 500), tried(800, 1000)], driver(500, 500),
         ["while GPU 1 was tried, 0.3 GB more of GPU 0 was used"]),
        (driver(500, 500), [tried(1000, 500), tried(500, 900)], driver(500, 800),
         ["0.3 GB more of GPU 1 is used afterwards"]),
        (driver(None, None), [tried(None, None), GpuTried(refusal="x")], driver(None, 900), []),
    ],
)  # fmt: skip
def test_memory_that_should_not_be_used_is_named(
    before: DriverFound, trials: list[GpuTried], after: DriverFound, texts: list[str]
) -> None:
    assert [finding.text for finding in judge_memory(before, trials, after)] == texts


def test_the_tables_have_all_that_was_found() -> None:
    refused = GpuTried([WayTried("kernel", "no [Triton]")], refusal="x" * 300)
    text = describe_gpus(
        driver(500, None, name="H100 [SXM]"), [tried(1000, None), refused], driver(500, None), "4K"
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")]
    for row in (
        ["0", "H100 [SXM]", "FFFF:00:00.0", "", ""],
        ["0", "batched copy", "H2D", "right", "1", "2", "50.2"],
        ["1", "as a rank", "", "x" * 300, "", "", ""],
        ["1", "kernel", "", "not available: no [Triton]", "", "", ""],
        ["before", "500", "?"],
        ["while GPU 0 copies", "+500", "?"],
        ["while GPU 1 copies", "", ""],
        ["after", "+0", "?"],
    ):
        assert row in rows
    assert "driver CUDA 13.0" in text
    assert "Host memory: 4K, pinned" in text


Run = Callable[[str], ChildOutcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a child process with a body, after it has reported a step."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def run(body: str) -> ChildOutcome:
        begin = "import os, sys\nfrom flexcache.doctor.gpu_driver import ChildReport\n"
        begin += "report = ChildReport()\nreport.begin('try it')\n"
        (tmp_path / "a_child.py").write_text(begin + body)
        return run_child("a_child", b"the argument", 10)

    return run


@pytest.mark.parametrize(
    ("body", "answer", "problem"),
    [
        ("report.answer(sys.argv[1].encode())\nprint('answer of a library')", b"the argument", ""),
        ("report.answer(b'1')\nos.abort()", b"1", "killed by SIGABRT, in this step: try it"),
        ("raise ValueError('no way')", None,
         "exit status 1 (ValueError: no way), in this step: try it"),
        ("os._exit(3)", None, "exit status 3, in this step: try it"),
    ],
)  # fmt: skip
def test_a_child_that_fails_says_how_and_in_which_step(
    run: Run, body: str, answer: bytes | None, problem: str
) -> None:
    assert run(body) == ChildOutcome(answer, problem)


@pytest.mark.whole
def test_a_child_that_hangs_is_killed(run: Run, tmp_path: Path) -> None:
    outcome = run(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
                  "import signal\nsignal.pause()")  # fmt: skip
    assert outcome.answer is None
    assert outcome.problem == "no answer within 10 s, in this step: try it"
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
