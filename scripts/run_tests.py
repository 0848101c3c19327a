"""Run the lanes of tests one after the other, all of them even if one fails. The checks run beside
the first, which leaves them a core.

    python scripts/run_tests.py [fast | all] [PYTEST ARGUMENT]...

Without arguments, tests marked `whole` are left out. A table of all lanes ends the output; the exit
status is 1 if a lane failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SGLANG_VENV = Path(os.environ.get("SGLANG_VENV", ROOT / ".venv-sglang"))
NEW_VLLM = os.environ.get("NEW_VLLM_PATH")
NOTHING_SELECTED = 5  # pytest's exit status
NOT_SET_UP = 77
OVERDUE = 124
LANE_S = 2700.0  # a lane that hangs is ended while CI has time for the others
IN_ALL = 4  # times as long: nothing waits for `all`
TO_END_S = 30.0
CLOSING_LINE = re.compile(r"^.* in \d[\d.]*s\b.*$", re.MULTILINE)

CHANGE = ("-m", "not whole")
"""Selects what runs at each change. The rest takes long and seldom finds anything new."""

CHECKS = {
    "lint": [str(BIN / "ruff"), "check", "."],
    "format": [str(BIN / "ruff"), "format", "--check", "."],
    "types": [str(BIN / "mypy")],
    "docs": [sys.executable, "scripts/make_docs.py", "--check"],
}


@dataclass(frozen=True)
class TestLane:
    """One pytest run.

    Some unit tests and most system tests wait for processes and deadlines, hence more workers than
    cores, though each worker imports all of its lane's modules. A vLLM engine
    computes on one core for about half of its life; vLLM has a run of its own since its CPU engine
    does not start in a process that has imported llvmlite. SGLang has an environment of its own,
    since it needs other releases than vLLM.

    Attributes:
        python: The interpreter, or the program that starts it. If there is none, the lane is
            skipped.
    """

    directories: tuple[str, ...]
    options: tuple[str, ...]
    python: tuple[str, ...] = (sys.executable,)


def vllm_lane(*options: str, **environment: str) -> TestLane:
    """Return the tests of vLLM's engine, started as `second_runner` in tests/support says."""
    changes = [f"{name}={value}" for name, value in environment.items()]
    python = (sys.executable,) if not changes else ("/usr/bin/env", *changes, sys.executable)
    return TestLane(("tests/vllm",), ("-n2", "--dist=loadfile", *options), python)


TESTS = {
    "unit": TestLane(("tests/unit",), ("-n3", "--dist=worksteal")),
    "system": TestLane(("tests/system", "tests/gpu"), ("-n4", "--dist=worksteal")),
    "vllm": vllm_lane(),  # the second model runner, asynchronous scheduling
    "sglang": TestLane(("tests/sglang",), (), (str(SGLANG_VENV / "bin" / "python"),)),
}
OTHER_ENGINES = {
    "vllm-v1": vllm_lane(VLLM_USE_V2_MODEL_RUNNER="0"),
    "vllm-sync": vllm_lane(ASYNC_SCHEDULING="0"),
    "vllm-v1a": vllm_lane(VLLM_USE_V2_MODEL_RUNNER="0", ASYNC_SCHEDULING="1"),
}
"""vLLM's engines that only `all` runs, with the tests marked `runners`."""
if NEW_VLLM is not None:  # `scripts/newer_vllm.py` has made it
    OTHER_ENGINES["vllm-033"] = vllm_lane("-m", "runners or newest", PYTHONPATH=NEW_VLLM)


@dataclass(frozen=True)
class Outcome:
    lane: str
    status: int
    seconds: float
    closing_line: str = ""

    @property
    def word(self) -> str:
        words = {0: "passed", NOTHING_SELECTED: "nothing selected", NOT_SET_UP: "not set up"}
        return words.get(self.status, f"failed ({self.status})")


def main(arguments: list[str]) -> int:
    checks = {}
    # SGLang's engines are all bound to the first core: the checks have the other.
    lanes = sorted(TESTS, key=lambda lane: lane != "sglang")
    match arguments:
        case ["fast", *others]:
            commands = commands_for([*CHANGE, "--hypothesis-profile=fast", *others], ["unit"])
        case ["all"]:
            checks, commands = CHECKS, commands_for([], [*lanes, *OTHER_ENGINES])
        case []:
            checks, commands = CHECKS, commands_for([*CHANGE, "--durations=20"], lanes)
        case _:
            commands = commands_for(arguments, TESTS)
    limit_s = LANE_S * (IN_ALL if arguments == ["all"] else 1)
    outcomes: list[Outcome] = []
    beside = [Run(lane, command, is_shown=False) for lane, command in checks.items()]
    try:
        for lane, command in commands.items():
            outcomes.append(run(lane, command, limit_s))
            while beside:
                outcomes.append(beside.pop(0).finish(limit_s))
        while beside:
            outcomes.append(beside.pop(0).finish(limit_s))
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 128 + signal.SIGINT
    finally:
        for each in beside:
            each.end()
        print_table(outcomes)
    statuses = {outcome.status for outcome in outcomes}
    if statuses <= {NOTHING_SELECTED, NOT_SET_UP}:
        return NOTHING_SELECTED
    return int(not statuses <= {0, NOTHING_SELECTED, NOT_SET_UP})


def commands_for(arguments: Sequence[str], lanes: Iterable[str]) -> dict[str, list[str]]:
    """Give every lane the arguments and, of the paths among them, those below its directories.

    If there are paths, lanes without one do not run.
    """
    before = ["", *arguments]
    paths = [
        argument
        for previous, argument in zip(before, arguments, strict=False)
        if previous not in ("-k", "-m") and is_test_path(argument)
    ]
    others = [argument for argument in arguments if argument not in paths]
    commands = {}
    for name in lanes:
        lane = (TESTS | OTHER_ENGINES)[name]
        directories = lane.directories
        selected = selected_in(directories, paths) if paths else directories
        if selected:
            options = (*lane.options, *others, *selected)
            commands[name] = [*lane.python, "-m", "pytest", *options]
    return commands


def is_test_path(argument: str) -> bool:
    path = ROOT / argument.partition("::")[0]
    return path.exists() and path.resolve().is_relative_to(ROOT / "tests")


def selected_in(directories: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the paths below the directories, and the directories below a path."""
    selected = []
    for argument in paths:
        path = (ROOT / argument.partition("::")[0]).resolve()
        for directory in directories:
            if path.is_relative_to(ROOT / directory):
                selected.append(argument)
            elif (ROOT / directory).is_relative_to(path):
                selected.append(directory)
    return selected


def run(lane: str, command: Sequence[str], limit_s: float = LANE_S) -> Outcome:
    if not Path(command[0]).exists():
        print(f"\n=== {lane}\nskipped: there is no {command[0]}; `bash scripts/test.sh` sets it up")
        return Outcome(lane, NOT_SET_UP, 0.0)
    return Run(lane, command).finish(limit_s)


class Run:
    """A lane that runs, in a session of its own, so that an interrupt reaches it once and ends it.

    Args:
        is_shown: Whether its output is printed as it comes, or by `finish`.
    """

    def __init__(self, lane: str, command: Sequence[str], is_shown: bool = True) -> None:
        self._lane = lane
        self._head = f"\n=== {lane}: {shlex.join(command)}"
        self._is_shown = is_shown
        if is_shown:
            print(self._head, flush=True)
        self._started = time.monotonic()
        colors = {"PY_COLORS": "1"} if sys.stdout.isatty() else {}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **colors},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = Output(self._process.stdout, is_shown)
        self._output.start()

    def finish(self, limit_s: float) -> Outcome:
        """Wait until it has ended; it is ended itself if it takes too long."""
        process, output = self._process, self._output
        try:
            status = process.wait(limit_s)
            output.join(TO_END_S)
        except KeyboardInterrupt:
            self.end()
            raise
        except subprocess.TimeoutExpired:
            print(f"\nended: {self._lane} was not done within {limit_s:.0f} s", flush=True)
            self.end()
            status = OVERDUE
        if output.is_alive():  # a process that a test has left running holds the pipe
            self._send(signal.SIGKILL)
            output.join(TO_END_S)
        if not self._is_shown:
            print(f"{self._head}\n{output.text}", flush=True)
        is_pytest = self._lane in TESTS or self._lane in OTHER_ENGINES
        closing_lines = CLOSING_LINE.findall(output.text[-4096:]) if is_pytest else []
        seconds = output.last_s - self._started
        return Outcome(self._lane, status, seconds, closing_lines[-1] if closing_lines else "")

    def end(self) -> None:
        """Interrupt all that the lane has started; kill what does not end, at a second interrupt at
        once."""
        for number in (signal.SIGINT, signal.SIGKILL):
            self._send(number)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(TO_END_S)
                self._output.join(TO_END_S)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Output(threading.Thread):
    """Keeps what a lane prints, and passes it on if it is to be shown.

    A lane may leave a process that never closes the pipe, so that only a thread may wait for it.

    Attributes:
        last_s: When something was printed or the pipe was closed for the last time.
    """

    def __init__(self, pipe: IO[bytes], is_shown: bool) -> None:
        super().__init__(daemon=True)
        self._pipe, self._is_shown, self._content = pipe, is_shown, bytearray()
        self.last_s = time.monotonic()

    @property
    def text(self) -> str:
        return self._content.decode(errors="replace")

    def run(self) -> None:
        with self._pipe:  # closed if standard output fails, or the lane would wait for a reader
            while chunk := os.read(self._pipe.fileno(), 1 << 16):
                self._content += chunk
                self.last_s = time.monotonic()
                if self._is_shown:
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.flush()
        self.last_s = time.monotonic()


def print_table(outcomes: Sequence[Outcome]) -> None:
    """End with pytest's own closing lines."""
    print(f"\n{'lane':10}{'outcome':20}{'seconds':>7}")
    for outcome in outcomes:
        print(f"{outcome.lane:10}{outcome.word:20}{outcome.seconds:7.0f}")
    for outcome in outcomes:
        if outcome.closing_line:
            print(outcome.closing_line)
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
