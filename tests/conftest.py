"""What all tests share: how many examples hypothesis tries, where Mooncake finds libibverbs, and
that processes can be interrupted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

with contextlib.suppress(ImportError):  # the tests that need a GPU do without
    from hypothesis import HealthCheck, settings

    _PROFILE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("full", max_examples=100, **_PROFILE)
    settings.register_profile("fast", max_examples=20, **_PROFILE)  # scripts/test.sh fast
    settings.load_profile("full")


def _use_verbs(directory: Path) -> None:
    """Do for this process and its children what `scripts/venv.sh` does for the tests it starts.

    A process that runs already ignores LD_LIBRARY_PATH, so it loads the libraries by their paths:
    repeatedly, as they need each other.
    """
    found = os.environ.get("LD_LIBRARY_PATH", "")
    if not directory.is_dir() or str(directory) in found.split(os.pathsep):
        return
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(directory), found]))
    waiting = sorted(directory.glob("lib*.so.*"))
    while waiting:
        failed = []
        for library in waiting:
            try:
                ctypes.CDLL(str(library))
            except OSError:
                failed.append(library)
        if len(failed) == len(waiting):
            return
        waiting = failed


_use_verbs(Path(sys.prefix) / "verbs")

# A shell starts background jobs with SIGINT ignored; the tests' processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
