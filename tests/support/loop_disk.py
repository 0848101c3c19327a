"""An ext4 file system on a loop device, whose end can be cut off while it is mounted."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE_BYTES = 4096
_FIBMAP = 1


@dataclass(frozen=True)
class LoopDisk:
    image: Path
    device: str
    path: Path

    def cut_at(self, file: Path, offset: int) -> None:
        """Cut the device off at a page of a file: I/O from there on ends with EIO."""
        with file.open("rb") as opened:
            number = struct.pack("i", offset // PAGE_BYTES)
            (page,) = struct.unpack("i", fcntl.ioctl(opened.fileno(), _FIBMAP, number))
        os.truncate(self.image, page * PAGE_BYTES)
        subprocess.run(["losetup", "--set-capacity", self.device], check=True)


@contextmanager
def loop_disk(directory: Path, size: int) -> Iterator[LoopDisk]:
    """Mount the file system; skip the test if that is not possible."""
    image, path = directory / "image", directory / "disk"
    image.touch()
    os.truncate(image, size)
    path.mkdir()
    layout = ("-b", str(PAGE_BYTES), "-N", "16", "-m", "0", "-O", "^has_journal")
    _run("mkfs.ext4", "-q", *layout, image)
    device = _run("losetup", "--find", "--show", image).strip()
    try:
        _run("mount", device, path)
        try:
            yield LoopDisk(image, device, path)
        finally:
            unmount(path)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def unmount(path: Path) -> None:
    """Unmount, even if a failed test still uses it."""
    if subprocess.run(["umount", path], capture_output=True).returncode:
        subprocess.run(["umount", "--lazy", path], check=True)


def _run(*command: str | Path) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr.strip()}")
    return ran.stdout
