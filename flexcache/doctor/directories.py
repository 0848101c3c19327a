"""Checks the SSD tier's directories: their file systems and free space."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from flexcache.doctor.findings import Finding, error, in_gb, ok, warning
from flexcache.doctor.subject import Subject
from flexcache.storage.machine import mount_of
from flexcache.storage.pool_directory import DATA_FILE

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
