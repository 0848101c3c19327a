"""The contract of block I/O, for each implementation, over files that really fail."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import until
from disk_io import IO_KINDS, io_engine

from flexcache.errors import ConfigError
from flexcache.storage.block_io import BlockIO, Direction, Request, open_block_io

PAGE = 4096


@pytest.fixture(params=IO_KINDS)
def io(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockIO]:
    engine = io_engine(request.param, monkeypatch)
    opened = open_block_io(engine, 8)
    assert opened.name == engine
    yield opened
    opened.close()
    opened.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def results(io: BlockIO, *requests: Request) -> list[int]:
    io.submit(requests)
    found: dict[int, int] = {}
    while len(found) < len(requests):
        assert select.select([io.fileno()], [], [], 30)[0]
        found.update((completion.token, completion.result) for completion in io.reap())
    assert io.reap() == []
    return [found[request.token] for request in requests]


def request(
    token: int,
    direction: Direction,
    fd: int,
    offset: int = 0,
    pages: list[memoryview] | None = None,
) -> Request:
    return Request(token, direction, fd, offset, pages or [memoryview(bytearray(PAGE))])


def test_scattered_pieces_are_written_in_sequence_and_read_back(io: BlockIO, fd: int) -> None:
    written = [memoryview(bytearray(os.urandom(PAGE))) for _ in range(3)]
    read = [memoryview(bytearray(PAGE)) for _ in range(3)]
    assert results(io, request(0, Direction.WRITE, fd, PAGE, written)) == [3 * PAGE]
    assert results(io, request(1, Direction.READ, fd, PAGE, read)) == [3 * PAGE]
    assert read == written


def test_a_read_across_the_end_is_short(io: BlockIO, fd: int) -> None:
    os.ftruncate(fd, PAGE + 100)
    assert results(io, request(1, Direction.READ, fd, PAGE)) == [100]


def test_each_io_that_fails_is_an_errno_and_the_others_of_its_batch_go_on(
    io: BlockIO, fd: int
) -> None:
    unreadable = os.open("/proc/self/mem", os.O_RDONLY)  # nothing is mapped at its beginning
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        assert results(
            io,
            request(1, Direction.WRITE, fd),
            request(2, Direction.READ, unreadable),
            request(3, Direction.READ, -1),
            request(4, Direction.WRITE, full),
            request(5, Direction.READ, unreadable),
            request(6, Direction.WRITE, fd, PAGE),
        ) == [PAGE, -errno.EIO, -errno.EBADF, -errno.ENOSPC, -errno.EIO, PAGE]
        assert results(io, request(7, Direction.READ, fd)) == [PAGE]
    finally:
        os.close(unreadable)
        os.close(full)


def test_closing_waits_for_what_fails_too(io: BlockIO, fd: int) -> None:
    io.submit([request(1, Direction.READ, -1), request(2, Direction.WRITE, fd)])
    io.close()
    assert os.fstat(fd).st_size == PAGE


def test_a_binding_for_another_cpu_kills_the_probe_and_not_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "liburing.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root]))
    opened = open_block_io("auto", 4)
    opened.close()
    assert opened.name == "threads"
    assert "dies by SIGILL" in caplog.text
    with pytest.raises(ConfigError, match="dies by SIGILL"):
        open_block_io("io_uring", 4)


def test_one_process_at_a_time_imports_the_binding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = """
import os, time
from pathlib import Path
here = Path(__file__).parent
(here / f"importing-{os.getpid()}").touch()
while not (here / "go").exists():
    time.sleep(0.01)
Ring = Cqe = Iovec = None
"""
    (tmp_path / "liburing.py").write_text(binding)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root]))
    script = "from flexcache.storage.block_io import _Binding; _Binding()"
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]

    def num_importing() -> int:
        return len(list(tmp_path.glob("importing-*")))

    try:
        until(lambda: is_anyone_waiting(processes) or num_importing() == 2)
        until(num_importing)
        assert num_importing() == 1
    finally:
        (tmp_path / "go").touch()
    assert [process.wait(60) for process in processes] == [0, 0]


def is_anyone_waiting(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Return whether a process waits for a lock that another one has."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    waiting = {int(fields[5]) for fields in locks if fields[1] == "->"}
    return any(process.pid in waiting for process in processes)


def test_nothing_imports_the_binding_before_it_was_probed() -> None:
    importers = [
        path.name
        for path in (Path(__file__).parents[2] / "flexcache").rglob("*.py")
        if "import liburing" in path.read_text() or "from liburing" in path.read_text()
    ]
    assert importers == ["block_io.py"]
    script = """
import sys
import flexcache.doctor.machine, flexcache.manager, flexcache.server.server
import flexcache.transfer.disk_worker
assert "liburing" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
