"""Everything to know about a machine's GPUs, in under 8 minutes: `scripts/bench_gpu.sh` starts it.

    python benchmarks/gpu_hour.py DIRECTORY [STEP]...

Without steps all are run. Each step has a time limit, and none stops the others; a test that hangs
ends its own step. Ends with one block of text to paste into an issue. DIRECTORY/report.md has it
from the first step on, so that it is not lost with the machine; at the end DIRECTORY/report.tar.gz
has it with the output of each step. Exit status 1 if a step failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bounded_steps import Outcome, Step, run_steps
from rich.console import Console

from flexcache.bench.report import figure
from flexcache.ids import __version__

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 440.0
_MOST_LINES = 30
_TEST_S = 40  # a test: the first one waits for torch, and for kernels that are compiled
_PYTEST = (
    "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "-m", "gpu",
    "-o", f"faulthandler_timeout={_TEST_S}",
)  # fmt: skip
_ARCHIVED = (".md", ".txt", ".json")


_OPS = (sys.executable, str(ROOT / "benchmarks" / "run.py"), "gpu_ops")


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *arguments)


def bench(title: str, directory: Path, limit_s: float, command: Sequence[str] = ()) -> Step:
    """Make the step that measures the cases whose titles contain ``title``.

    Args:
        command: Has these cases; `flexcache bench gpu` by default.
    """
    file = str(directory / f"{title.replace(' ', '-')}.json")
    options = ("--only", title, "--json", file, "--dir", str(directory))
    command = (*(command or python("flexcache.cli", "bench", "gpu")), *options)
    return Step(title, command, limit_s, reads="bench")


def steps_for(directory: Path) -> list[Step]:
    """Return the steps, the most important first. Tests of a file are a step, since one that hangs
    or crashes takes the others of its process with it."""
    query = "index,name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
    tests = sorted(file.name for file in (ROOT / "tests/gpu").glob("test_*.py"))
    return [
        *(Step(name, python(*_PYTEST, f"tests/gpu/{name}"), 90, reads="tests") for name in tests),
        Step("nvidia-smi", ("nvidia-smi", f"--query-gpu={query}", "--format=csv"), 15),
        Step("topology", ("nvidia-smi", "topo", "-m"), 15),
        Step("doctor", python("flexcache.cli", "doctor", "--json"), 120, reads="doctor"),
        bench("layouts", directory, 60, _OPS),
        bench("programs of the kernel", directory, 60, _OPS),
        bench("driver without batches", directory, 45, _OPS),
        bench("load by layer behind others", directory, 45, _OPS),
        bench("SSD past DRAM", directory, 60),
        bench("blocks of", directory, 90),
        bench("both directions at once", directory, 30),
        bench("small ops", directory, 30, _OPS),
        bench("beside the model's work", directory, 60, _OPS),
        bench("pinning", directory, 30),
    ]


def main(directory: Path, titles: Sequence[str]) -> int:
    console = Console(stderr=True)
    steps = [step for step in steps_for(directory) if not titles or step.title in titles]
    began = time.monotonic()
    outcomes: list[Outcome] = []
    report = ""
    try:
        for outcome in run_steps(steps, directory, TOTAL_S, console):
            outcomes.append(outcome)
            report = "\n".join(describe(outcomes, time.monotonic() - began))
            (directory / "report.md").write_text(report + "\n")
    except KeyboardInterrupt:
        console.print("interrupted; this is what there is so far")
    pack(directory)
    print(f"\n----- paste from here -----\n{report}\n----- to here -----")
    return int(not all(outcome.passed for outcome in outcomes))


def pack(directory: Path) -> None:
    """Put the report and the steps' output into one file, without the file of I/O past DRAM."""
    with tarfile.open(directory / "report.tar.gz", "w:gz") as archive:
        for file in sorted(directory.iterdir()):
            if file.suffix in _ARCHIVED:
                archive.add(file, file.name)


def describe(outcomes: Sequence[Outcome], took_s: float) -> Iterator[str]:
    """Yield the lines of the block: each step's outcome, then what each has found."""
    now = datetime.now(timezone.utc).isoformat(timespec="minutes")
    yield f"FlexCache {__version__} ({_commit()}) on GPUs, {now}, {took_s:.0f} s"
    yield ""
    yield from _rows(["step", "result", "s"])
    for outcome in outcomes:
        yield from _rows([outcome.step.title, outcome.result, f"{outcome.took_s:.0f}"], False)
    for outcome in outcomes:
        yield f"\n### {outcome.step.title}"
        yield from _found(outcome)


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown commit"
    return done.stdout.strip() or "unknown commit"


def _found(outcome: Outcome) -> Iterator[str]:
    """Yield what a step has found; if it left nothing that can be read, the end of its output."""
    readers = {"doctor": _doctor, "tests": _tests, "bench": _bench, "all": _all}
    try:
        lines = list(readers[outcome.step.reads](outcome))
    except (OSError, ValueError, KeyError):
        lines = []
    yield from lines
    if (not outcome.passed and outcome.step.reads != "tests") or not lines:
        yield from _end_of(outcome.errors) or _end_of(outcome.output)


def _all(outcome: Outcome) -> Iterable[str]:
    return ["```", *_end_of(outcome.output), "```"]


def _doctor(outcome: Outcome) -> Iterator[str]:
    """Yield what is not as it should be, and the tables."""
    findings = json.loads(outcome.output.read_text())["findings"]
    for found in findings:
        if found["level"] != "ok" or found["check"] in ("kernel", "huge_pages", "python"):
            yield f"* {found['level']}: {found['text']}"
    for found in findings:
        if found["details"]:
            yield f"\n{found['details']}"


def _tests(outcome: Outcome) -> Iterator[str]:
    """Yield pytest's summary, and the assertions that failed."""
    lines = outcome.output.read_text().splitlines()
    wanted = ("FAILED ", "ERROR ", "SKIPPED ", "E  ")
    kept = [line[:300] for line in lines if line.startswith(wanted)]
    yield "```"
    yield from kept[-_MOST_LINES:]
    yield from lines[-1:]
    yield "```"


def _bench(outcome: Outcome) -> Iterator[str]:
    report = outcome.output.with_suffix(".json")
    cases: list[dict[str, Any]] = json.loads(report.read_text())["cases"]
    for case in cases:
        if case["reason"]:
            yield f"* {case['title']}: {case['outcome']}, {case['reason']}"
    results = [result for case in cases for result in case["results"]]
    if not results:
        return
    yield from _rows(["figure", "at", "p50", "worst", "unit", "bound", "ratio"])
    for result in results:
        at = "" if result["at"] is None else f"{figure(result['at'])} {result['parameter']}"
        numbers = [result[name] for name in ("p50", "worst", "bound", "ratio")]
        p50, worst, bound, ratio = ("" if n is None else figure(n) for n in numbers)
        yield from _rows([result["name"], at, p50, worst, result["unit"], bound, ratio], False)


def _rows(cells: Sequence[str], is_heading: bool = True) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    if is_heading:
        yield "|" + "---|" * len(cells)


def _end_of(file: Path) -> Sequence[str]:
    if not file.exists():
        return []
    lines = file.read_text(errors="replace").rstrip().splitlines()
    return [line[:300] for line in lines[-_MOST_LINES:]]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
