"""The file system that a directory is on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system. ``number`` is the ``major:minor`` of its block device."""

    number: str
    mounted_on: str
    file_system: str
    device: str


def mount_of(directory: Path, table: Path = MOUNT_TABLE) -> Mount | None:
    """Return the file system that a directory is on; None if the system does not report it."""
    directory = directory.resolve()
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    return max(
        (mount for mount in map(_parse, reversed(lines)) if _holds(mount, directory)),
        key=lambda mount: len(mount.mounted_on),  # of two at one place the later hides the earlier
        default=None,
    )


def _holds(mount: Mount, directory: Path) -> bool:
    return directory.is_relative_to(mount.mounted_on)


def _parse(line: str) -> Mount:
    head, _, tail = line.partition(" - ")
    fields, (kind, source, *_) = head.split(), tail.split()
    return Mount(fields[2], fields[4], kind, source)
