"""Processes of the soak: started, killed, stopped, brought back, and looked at."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TOKEN = "soak"
READY_S = 900.0  # on a busy machine SGLang takes minutes
END_S = 30.0


@dataclass(frozen=True)
class Use:
    """What the processes of a part use together.

    Attributes:
        memory_bytes: Their own memory; what they share with others is left out.
    """

    memory_bytes: int
    num_files: int


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    with contextlib.suppress(OSError), urllib.request.urlopen(asked(url), timeout=5):
        return True
    return False


def samples(url: str, name: str) -> list[Sample]:
    """Return a metric of the server at ``url``.

    Raises:
        OSError: It does not answer.
    """
    with urllib.request.urlopen(asked(f"{url}/metrics"), timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    return [each for family in families if family.name == name for each in family.samples]


def asked(url: str) -> urllib.request.Request:
    """Return a request with the token that cache servers on hosts want."""
    return urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})


class Part:
    """A server with the processes that it starts, in a session of their own.

    Args:
        url: Answers once the part is ready; "" for a part that is ready when it runs.
        log: File that the output is appended to.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], url: str, log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.url = url
        self.num_starts = 0
        self._command = [str(word) for word in command]
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_wanted = False

    def start(self) -> None:
        with self._lock, self._log.open("ab") as log:
            self._is_wanted = True
            self.num_starts += 1
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until it answers, or raise what its log ends with."""
        give_up = time.monotonic() + READY_S
        while not answers(self.url):
            if not self.is_running or time.monotonic() > give_up:
                text = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.name} does not come up:\n{text}")
            time.sleep(0.2)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_died(self) -> bool:
        """Whether it ended and was not asked to."""
        with self._lock:
            return self._is_wanted and not self.is_running

    @property
    def pids(self) -> list[int]:
        """The processes of its session."""
        if self._process is None:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) == self._process.pid:
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """Kill it and what it has started, at once."""
        with self._lock:
            self._is_wanted = False
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self._process is not None:
                self._process.wait()

    def kill_child(self, module: str) -> bool:
        """Kill the process of its that runs a module; returns whether there was one."""
        for pid in self.pids:
            with contextlib.suppress(OSError):
                if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def stop(self) -> None:
        """Let it answer nothing, by SIGSTOP, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Ask it to end, and kill what does not."""
        with self._lock:
            self._is_wanted = False
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)
        self.kill()

    def use(self) -> Use:
        memory, files = 0, 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                files += len(os.listdir(f"/proc/{pid}/fd"))
                lines = [x for x in status.splitlines() if x.startswith("RssAnon")]
                memory += sum(int(line.split()[1]) * 1024 for line in lines)  # none once it ended
        return Use(memory, files)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
