"""Checks that the remote store answers, and that blocks on SSD can be compressed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from flexcache.config.remote_url import RemoteUrl, check_remote_url
from flexcache.doctor.findings import Finding, error, ok, warning
from flexcache.doctor.subject import Subject
from flexcache.errors import MissingDependencyError
from flexcache.storage.compression import Codec, open_compressor
from flexcache.storage.remote import check_packages

_STORE_TIMEOUT_S = 3.0
_PROCESS_TIMEOUT_S = 20.0
_MOONCAKE_IS_OPEN = (
    "; anyone who reaches Mooncake's ports can read and replace what is in the store "
    "(docs/remote.md says how to fence them)"
)
_LOOK_UP = """
import sys, time
from flexcache.storage.remote import open_remote_store
limit = float(sys.argv[2])
store = open_remote_store(sys.argv[1], timeout_s=limit)
found = store.count_present(["flexcache-doctor"], time.monotonic() + limit)
sys.exit(found.error)
"""


def check_ssd_compression(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None or config.ssd_compression == "none":
        return
    try:
        open_compressor(Codec.of(config.ssd_compression))
    except MissingDependencyError as missing:
        what, _, remedy = str(missing).partition("; ")
        yield error(f"ssd_compression = {config.ssd_compression}: {what}", remedy)
    else:
        yield ok(f"blocks on SSD can be compressed with {config.ssd_compression}")


def check_remote_store(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None or config.remote_url is None:
        return
    url = check_remote_url(config.remote_url)
    try:
        check_packages(config.remote_url, config.remote_compression)
    except MissingDependencyError as missing:
        what, _, remedy = str(missing).partition(": ")
        yield error(f"remote_url {url.name}: {what}", remedy)
        return
    if url.scheme == "mooncake":
        problem = _master_problem(url)
    elif url.scheme == "file":
        problem = _share_problem(Path(url.location))
    else:
        problem = _object_store_problem(config.remote_url)
    if problem is None:
        exposed = "" if url.scheme != "mooncake" else _MOONCAKE_IS_OPEN
        yield ok(f"{url.name}: answers{exposed}")
    else:
        yield warning(
            f"{url.name}: {problem}",
            "check its address, the credentials in the environment and the network; until it "
            "answers, every lookup in the tier is a miss",
        )


def _master_problem(url: RemoteUrl) -> str | None:
    """Check only that the master accepts connections: a whole client would join the cluster."""
    host, _, port = url.location.rstrip("/").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _STORE_TIMEOUT_S).close()
    except OSError as failure:
        return f"the master does not accept connections ({failure.strerror or failure})"
    return None


def _share_problem(directory: Path) -> str | None:
    """Check a shared directory without creating it: the share may not be mounted."""
    if not directory.is_dir():
        return "no such directory"
    return None if os.access(directory, os.W_OK | os.X_OK) else "must be writable"


def _object_store_problem(url: str) -> str | None:
    """Look up an object in a separate process, since a store's client may hang."""
    command = [sys.executable, "-c", _LOOK_UP, url, str(_STORE_TIMEOUT_S)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROCESS_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROCESS_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    return done.stderr.strip().rsplit("\n", 1)[-1] or f"the client exited with {done.returncode}"
