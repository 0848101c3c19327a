"""Runs a check in a child process, which may crash or hang: in a driver, for example."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

_BEGAN, _ANSWER = b"began ", b"answer "
_END_S = 5.0
"""Time that a killed process has to end; one that hangs in the kernel does not."""


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """Attributes:
    answer: The child's answer; None if it gave none.
    problem: How it failed, and in which step; "" if it ended well.
    """

    answer: bytes | None
    problem: str


class ChildReport:
    """The child's end: reports steps and the answer on standard output, which libraries that print
    can no longer reach."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def begin(self, step: str) -> None:
        """Report the step that begins; the time limit starts again."""
        self._file.write(_BEGAN + step.encode() + b"\n")

    def answer(self, answer: bytes) -> None:
        """Report the answer, which must be one line."""
        self._file.write(_ANSWER + answer + b"\n")


def run_child(module: str, argument: bytes, step_limit_s: float) -> ChildOutcome:
    """Run ``python -m module argument`` until it ends, or until a step takes too long."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        assert process.stdout is not None
        with process.stdout as output:
            step, answer, is_late = _follow(output.fileno(), step_limit_s)
        try:
            code = process.wait(0 if is_late else step_limit_s)
        except subprocess.TimeoutExpired:
            is_late, code = True, 0
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        problem = _describe(code, is_late, step_limit_s, errors)
        return ChildOutcome(answer, problem and f"{problem}, in this step: {step}")


def _follow(output: int, step_limit_s: float) -> tuple[str, bytes | None, bool]:
    """Read reports until the end; return the last step, the answer, and whether it is late."""
    step, answer, rest = "start", None, b""
    deadline = time.monotonic() + step_limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            read = os.read(output, 1 << 16)
            if not read:
                return step, answer, False
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                if line.startswith(_BEGAN):
                    step = line.removeprefix(_BEGAN).decode()
                    deadline = time.monotonic() + step_limit_s
                elif line.startswith(_ANSWER):
                    answer = line.removeprefix(_ANSWER)
    return step, answer, True


def _describe(code: int, is_late: bool, step_limit_s: float, errors: IO[bytes]) -> str:
    if is_late:
        return f"no answer within {step_limit_s:g} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code == 0:
        return ""
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().rsplit("\n", 1)[-1]
    return f"exit status {code} ({said})" if said else f"exit status {code}"
