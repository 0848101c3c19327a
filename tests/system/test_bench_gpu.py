"""`scripts/bench_gpu.sh` on fake GPUs, as far as these go: its steps, its limits and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import gpu_hour
import pytest
from bounded_steps import Outcome, Step, run_steps
from fake_gpu_process import environment
from paths import ROOT
from rich.console import Console

from flexcache.storage.pool_directory import supports_direct_io

pytestmark = pytest.mark.whole


# What takes minutes on a fake GPU is smaller: the doctor's memory, what is pinned, and all ops. Of
# several sizes one is measured.
# A process that hangs shows where.
SMALL = """
import faulthandler, sys, torch
faulthandler.dump_traceback_later(540, exit=True)
from flexcache.storage.host_pool import HostSegment

create = HostSegment.create

def create_small(block_bytes, num_blocks, *options):
    return create(block_bytes, 4 if num_blocks in (128, 2048) else num_blocks, *options)

def is_available():
    if bench := sys.modules.get("flexcache.bench.gpu"):
        bench.OP_BYTES = 4 << 20
        bench.BLOCK_BYTES = bench.BLOCK_BYTES[-1:]
    if ops := sys.modules.get("bench_gpu_ops"):
        ops.OP_BYTES = 4 << 20
        ops.RUN_BYTES = ops.RUN_BYTES[:1]
        ops.PAGE_BYTES = ops.PAGE_BYTES[:1]
    return True

HostSegment.create = create_small
torch.cuda.is_available = is_available
"""


def variables_for(directory: Path) -> dict[str, str]:
    return {
        **os.environ, **environment(directory, 2, SMALL), "PYTHON": sys.executable,
        "PYTEST_ADDOPTS": "-k another_gpu_makes_no_context",
    }  # fmt: skip


def run(command: Sequence[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=variables, timeout=600, capture_output=True, text=True, check=False
    )


def test_the_script_reports_what_each_step_has_found(tmp_path: Path) -> None:
    """A few steps, and of the tests one. The fake cannot multiply matrices: that step fails."""
    out = tmp_path / "out"
    steps = ["test_copies.py", "doctor", "layouts", "beside the model's work"]
    command = ["bash", "scripts/bench_gpu.sh", str(out), *steps]
    done = run(command, variables_for(tmp_path))
    assert done.returncode == 1, done.stderr
    report = (out / "report.md").read_text()
    assert report in done.stdout
    with tarfile.open(out / "report.tar.gz") as archive:
        packed = set(archive.getnames())
    assert {"report.md", "test_copies.txt", "doctor.txt", "layouts.json"} <= packed
    rows = [line.split("|")[1:3] for line in report.split("###")[0].splitlines() if "|" in line]
    assert {title.strip(): result.strip() for title, result in rows[2:]} == {
        "test_copies.py": "passed",
        "doctor": "passed", "layouts": "passed", "beside the model's work": "failed (1)",
    }, report  # fmt: skip
    for text in (
        "FlexCache 0.",
        "| 1   | kernel        | D2H       | right |",  # the doctor's
        "1 passed",
        "| H2D, layers apart (LBNHC) | 16 KiB per page |",
        "beside the model's work: failed, AssertionError: Torch not compiled with CUDA enabled",
    ):
        assert text in report, report


def cases_of(command: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    directory.mkdir()
    file = directory / "gpu.json"
    options = ["--json", str(file), "--dir", str(directory)]
    done = run([sys.executable, *command, *options], variables_for(directory))
    assert file.exists(), done.stderr
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return cases


def test_all_cases_run_but_the_one_that_multiplies_matrices(tmp_path: Path) -> None:
    cases = cases_of(["-m", "flexcache.cli", "bench", "gpu"], tmp_path / "users")
    cases += cases_of([str(ROOT / "benchmarks" / "run.py"), "gpu_ops"], tmp_path / "developers")
    wrong = [case for case in cases if case["outcome"] != "done"]
    unsupported = [] if supports_direct_io(tmp_path) else ["SSD past DRAM"]
    assert [case["title"] for case in wrong] == [*unsupported, "beside the model's work"], wrong
    figures = {(result["name"], result["at"]) for case in cases for result in case["results"]}
    for figure in (
        ("H2D by the kernel, 12 programs", 8),
        ("D2H by single copies of 64 KiB, beside a busy thread", None),
        ("load by layer of 4 blocks behind one of 4", None),
        ("load by layer of 4 MiB until its first layer, blocks outermost (BLNHC, BLHNC)", 16),
    ):
        assert figure in figures
    assert unsupported or ("SSD and GPU past DRAM, read", None) in figures


def test_tests_come_first_and_each_step_finds_what_those_before_it_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = [step.title for step in gpu_hour.steps_for(tmp_path)]
    assert [title.startswith("test_") for title in titles[:4]] == [True] * 4
    assert not {"tests", "kernel"} & set(titles)
    show = ["cat", str(tmp_path / "report.md")]
    steps = [Step("the first", ["false"], 60), Step("the second", show, 60)]
    monkeypatch.setattr(gpu_hour, "steps_for", lambda _: steps)
    assert gpu_hour.main(tmp_path, []) == 1
    assert "| the first | failed (1) |" in (tmp_path / "the-second.txt").read_text()
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        [report] = [member for member in archive if member.name == "report.md"]
        packed = archive.extractfile(report)
        assert packed is not None
        assert b"| the second | passed |" in packed.read()


def outcomes_of(steps: Sequence[Step], directory: Path, total_s: float = 60) -> list[Outcome]:
    console = Console(file=StringIO())
    return list(run_steps(steps, directory, total_s, console))


@pytest.mark.parametrize(
    ("command", "result"),
    [
        (["sh", "-c", "echo yes"], "passed"),
        (["sh", "-c", "echo yes; exit 3"], "failed (3)"),
        (["sh", "-c", "echo yes; kill -SEGV $$"], "died of SIGSEGV"),
        (["no-such-program"], "not started: No such file or directory"),
    ],
)
def test_a_step_that_fails_says_how_and_does_not_stop_the_next(
    tmp_path: Path, command: list[str], result: str
) -> None:
    first, second = outcomes_of(
        [Step("the first", command, 60), Step("the second", ["true"], 60)], tmp_path
    )
    assert (first.result, second.result) == (result, "passed")
    assert first.output.read_text() == ("yes\n" if "sh" in command else "")


def test_a_step_that_hangs_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    hanging = ["sh", "-c", f"sleep 1000 & echo $!; cat {fifo} & cat {fifo}"]
    [outcome] = outcomes_of([Step("hanging", hanging, 2)], tmp_path)
    assert outcome.result == "killed after 2 s"
    child = Path("/proc", outcome.output.read_text().strip(), "cmdline")
    deadline = time.monotonic() + 60
    while child.exists() and child.read_bytes():  # until init has reaped it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_steps_that_no_time_is_left_for_are_named(tmp_path: Path) -> None:
    steps = [Step("hanging", ["sleep", "1000"], 60), Step("late", ["true"], 60)]
    hanging, late = outcomes_of(steps, tmp_path, total_s=3)
    assert hanging.result in {"killed after 2 s", "killed after 3 s"}  # it began a little later
    assert late.result == "left out: no time"
