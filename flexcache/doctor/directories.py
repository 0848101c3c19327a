"""Directories of the SSD tier: file systems, free space, and the pools in them.

Directories are examined as pools, since a prompt's slots are striped over all directories of a
pool. A pool is read only while it is not in use; nothing is changed unless requested.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from flexcache.cache.restore import are_tails, link, reaches_start, whole_tails
from flexcache.doctor.subject import Finding, Level, Subject, error, in_gb, ok, warning
from flexcache.errors import MissingDependencyError
from flexcache.storage.compression import Codec
from flexcache.storage.machine import mount_of
from flexcache.storage.pieces import checksum
from flexcache.storage.pool_directory import (
    DATA_FILE,
    INDEX_FILE,
    OLD_DATA_FILE,
    DirectoryInUseError,
    PoolDirectory,
    PoolHeader,
    PoolMismatchError,
    files_in,
    missing_data_file,
    supports_direct_io,
)
from flexcache.storage.slot_index import (
    HEADER_BYTES,
    RECORD_BYTES,
    Records,
    SlotIds,
    SlotIndex,
    locate_slot,
)
from flexcache.storage.slot_io import FULL, SlotPacker, filled_bytes

T = TypeVar("T")

_IN_MEMORY = ("tmpfs", "ramfs")
_CONTAINER_LAYERS = ("overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "virtiofs", "lustre")
_VOLUME = "mount a volume on NVMe: docker run -v /nvme0/kv:/kv; Kubernetes: a local volume"


def check_file_systems(subject: Subject) -> Iterator[Finding]:
    for path in [*subject.directories, *_missing(subject)]:
        if path in subject.named_directories and not os.access(path, os.F_OK):
            continue  # reported when the directory is opened
        mount = mount_of(_nearest(path))
        if mount is not None:
            yield judge_file_system(path, mount.file_system, mount.device)


def judge_file_system(path: Path, kind: str, device: str) -> Finding:
    if kind in _CONTAINER_LAYERS:
        return warning(
            f"{path} is on {kind}, a container layer: slow, and deleted with the container", _VOLUME
        )
    if kind in _IN_MEMORY:
        return warning(
            f"{path} is on {kind}, in memory: lost on restart, and blocks are in DRAM twice",
            "choose a directory on a disk; for more DRAM raise cpu_cache_gb",
        )
    if kind in _NETWORK:
        return warning(
            f"{path} is on {kind}, a network file system: locks and latency differ from a disk's",
            "choose a directory on a local disk; for a share set remote_url = file:///DIR",
        )
    return ok(f"{path} is on {kind} ({device})")


def check_space(subject: Subject) -> Iterator[Finding]:
    """Check that the files can grow to the configured size; those on one device share its space."""
    size, paths = subject.ssd_bytes, subject.configured
    if size is None:
        return
    by_device: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        by_device[_nearest(path).stat().st_dev].append(path)
    for group in by_device.values():
        found = os.statvfs(_nearest(group[0]))
        free = found.f_bavail * found.f_frsize
        wanted = size * len(group) // len(paths) - sum(map(_allocated_bytes, group))
        name = ", ".join(map(str, group))
        if wanted > free:
            yield error(
                f"{name}: {in_gb(free)} free, the SSD tier grows by {in_gb(wanted)}",
                "lower ssd_cache_gb, or free some space",
            )
        else:
            yield ok(f"{name}: {in_gb(free)} free, the SSD tier fits")


def check_missing_directories(subject: Subject) -> Iterator[Finding]:
    for path in _missing(subject):
        yield ok(f"{path} does not exist yet: created at the first start")


def _missing(subject: Subject) -> list[Path]:
    if subject.named_directories:
        return []
    return [path for path in subject.configured if not path.exists()]


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest accessible ancestor."""
    path = path.absolute()
    while not os.access(path, os.F_OK):
        path = path.parent
    return path


def _allocated_bytes(directory: Path) -> int:
    try:
        return (directory / DATA_FILE).stat().st_blocks * 512
    except OSError:
        return 0


Progress = Callable[[Sequence[int]], Iterable[int]]
"""Iterates over a sequence and shows progress."""
Told = Generator[Finding, None, T]
"""Yields findings, and returns an answer."""


@dataclass(frozen=True)
class PoolDoctor:
    """Examines directories, and repairs or empties them.

    Args:
        verify: Read every recorded slot and compare its checksum.
        repair: Erase records that are torn or whose slot is wrong.
        clear: Empty the files instead of examining them.
    """

    verify: bool = False
    repair: bool = False
    clear: bool = False
    progress: Progress = iter

    def examine(self, paths: Sequence[Path]) -> Iterator[Finding]:
        with contextlib.ExitStack() as opened:
            pools: dict[bytes, list[tuple[PoolHeader, PoolDirectory]]] = {}
            for path in {path.resolve(): path for path in paths}.values():
                directory = yield from self._open(path)
                if directory is None:
                    continue
                opened.callback(directory.close)
                header = yield from _errors_told(str(path), self._read_header(directory))
                if header is not None:
                    pools.setdefault(header.pool_id, []).append((header, directory))
            for parts in pools.values():
                name = ", ".join(str(directory.path) for _, directory in parts)
                yield from _errors_told(name, self._examine_pool(name, parts))

    def _open(self, path: Path) -> Told[PoolDirectory | None]:
        try:
            direct = supports_direct_io(path)
        except OSError as failure:
            yield error(f"{path}: {failure.strerror}", "name a writable directory")
            return None
        if direct:
            yield ok(f"{path}: O_DIRECT works")
        else:
            yield warning(
                f"{path}: no O_DIRECT, I/O goes through the page cache",
                "put the directory on a local disk with a file system that supports it (ext4, XFS)",
            )
        if not (yield from self._has_cache(path)):
            return None
        try:
            return PoolDirectory(path)
        except DirectoryInUseError:
            level = Level.ERROR if self.verify or self.repair or self.clear else Level.OK
            remedy = "stop that process to examine the contents"
            yield Finding(level, f"{path}: in use by a FlexCache process", remedy)
        except OSError as failure:
            yield error(f"{path}: {failure.strerror}")
        return None

    def _has_cache(self, path: Path) -> Told[bool]:
        if (path / OLD_DATA_FILE).exists():
            yield ok(f"{path}: the next start removes {OLD_DATA_FILE} of FlexCache 0.1")
        files = files_in(path)
        if INDEX_FILE not in files and not (files and self.clear):
            yield ok(f"{path}: no cache in it")
            return False
        if DATA_FILE not in files and not self.clear:
            yield error(str(missing_data_file(path)))
            return False
        return True

    def _read_header(self, directory: PoolDirectory) -> Told[PoolHeader | None]:
        """Return the header of the directory's pool; None if there is nothing left to examine."""
        try:
            header = directory.header()
        except PoolMismatchError as mismatch:
            if not self.clear or not mismatch.is_ours:
                yield error(str(mismatch))
                return None
            header = None
        if self.clear:
            directory.clear()
            yield ok(f"{directory.path}: emptied")
            return None
        if header is None:
            yield ok(f"{directory.path}: no cache in it yet")
        return header

    def _examine_pool(
        self, name: str, parts: Sequence[tuple[PoolHeader, PoolDirectory]]
    ) -> Told[None]:
        header = parts[0][0]
        at_hand = {part.position: directory for part, directory in parts}
        places = range(header.num_directories)
        index_fds = [at_hand[i].index_fd if i in at_hand else -1 for i in places]
        sizes = [os.fstat(directory.index_fd).st_size - HEADER_BYTES for _, directory in parts]
        num_slots = header.num_directories * max(0, max(sizes) // RECORD_BYTES)
        era = max(part.era for part, _ in parts)
        index = SlotIndex(index_fds, replace(header, era=era).record_id)
        contents = index.load(num_slots)
        records = contents.records
        yield ok(
            f"{name}: format {header.format}, {len(parts)} of {header.num_directories} "
            f"directories, {num_slots:,} slots of {header.slot_bytes:,} bytes, "
            f"{len(records):,} recorded{_packed(records)}",
        )
        if header.identity is not None:
            yield ok(f"{name}: KV of {header.identity.text}")
        if len(parts) < header.num_directories:
            text = "cannot tell which blocks can be found without the pool's other directories"
            yield warning(f"{name}: {text}", "name all directories of the pool")
        else:
            yield _look_at_chains(name, records)
        bad = {"records are torn": contents.torn}
        if self.verify:
            wrong = self._verify(header, at_hand, records)
            bad["slots do not match their records"] = wrong
            if not len(wrong):
                yield ok(f"{name}: all recorded slots match their checksums")
        fds = [directory.index_fd for directory in at_hand.values()]
        for what, slots in bad.items():
            text = f"{name}: {len(slots):,} {what}"
            erased = self._erase(text, index, slots, fds)
            yield from _errors_told(f"{text} and could not be erased", erased)

    def _erase(
        self, text: str, index: SlotIndex, slots: SlotIds, index_fds: Sequence[int]
    ) -> Told[None]:
        if not len(slots):
            return
        if not self.repair:
            options = "--verify --repair" if self.verify else "--repair"
            yield error(text, f"{options} erases their records")
            return
        index.erase(slots)
        for fd in index_fds:
            os.fsync(fd)
        yield ok(f"{text}: erased")

    def _verify(
        self, header: PoolHeader, at_hand: Mapping[int, PoolDirectory], records: Records
    ) -> SlotIds:
        """Return the recorded slots whose checksum differs, or that cannot be read."""
        for directory in at_hand.values():
            directory.set_direct()  # read the device, not the kernel's page cache
        places = range(header.num_directories)
        data_fds = [at_hand[i].data_fd if i in at_hand else -1 for i in places]
        reader = _SlotReader(data_fds, header.slot_bytes)
        positions = self.progress(range(len(records)))
        wrong: SlotIds = records["slot"][[i for i in positions if not reader.is_right(records[i])]]
        return wrong


def _errors_told(where: str, findings: Told[T]) -> Told[T | None]:
    try:
        return (yield from findings)
    except OSError as failure:
        yield error(f"{where}: {failure.strerror or failure}")
    except MissingDependencyError as failure:
        yield error(f"{where}: {failure}")
    return None


def _look_at_chains(name: str, records: Records) -> Finding:
    is_tail = are_tails(records)
    blocks, tails = records[~is_tail], whole_tails(records[is_tail])
    in_tails = sum(len(tail.units) for tail in tails)
    found = int(reaches_start(link(blocks)).sum()) + in_tails
    share = f", {in_tails:,} of them in tails" if in_tails else ""
    return ok(
        f"{name}: {found:,} blocks can be found{share}, {len(records) - found:,} cannot "
        "(an earlier block of the prompt is lost, or they are duplicates)"
    )


class _SlotReader:
    """Reads slots and compares them with their records."""

    def __init__(self, fds: Sequence[int], slot_bytes: int) -> None:
        self._fds, self._slot_bytes = fds, slot_bytes
        self._room = memoryview(mmap.mmap(-1, slot_bytes))  # on a page's boundary
        self._block = memoryview(bytearray(slot_bytes))
        self._packers: dict[Codec, SlotPacker] = {}

    def is_right(self, record: Any) -> bool:
        """Whether the slot can be read, and its block has the recorded checksum.

        Raises:
            MissingDependencyError: It is packed, and the codec's library is not installed.
        """
        fd, offset = locate_slot(int(record["slot"]), self._fds, self._slot_bytes)
        filled = int(record["filled"])
        block = self._room[: filled_bytes(filled, self._slot_bytes) if filled else None]
        try:
            if os.preadv(fd, [block], offset) != len(block):
                return False
            if filled:
                self._packer(Codec(record["codec"])).unpack(block, [self._block])
                block = self._block
        except (OSError, ValueError):
            return False
        return checksum([block]) == int(record["checksum"])

    def _packer(self, codec: Codec) -> SlotPacker:
        if codec not in self._packers:
            self._packers[codec] = SlotPacker(codec, self._slot_bytes)
        return self._packers[codec]


def _packed(records: Records) -> str:
    """Describe how many blocks are packed, and how small."""
    filled = records["filled"][records["filled"] > 0]
    if not len(filled):
        return ""
    return f", {len(filled):,} of them packed into {filled.mean() / FULL:.0%} of their size"
