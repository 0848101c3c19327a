"""The driver's interface as `copy_driver` calls it, compiled against NVIDIA's headers.

`scripts/test.sh` fetches the headers of the oldest and newest releases (no GPU needed) and names
their folders in CUDA_HEADERS.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_gpu import SOURCES

from flexcache.transfer.workers.copy_driver import _MemcpyAttributes

FOLDERS = [*os.environ.get("CUDA_HEADERS", "").split(os.pathsep), "/usr/local/cuda/include"]
CHECK = SOURCES / "abi" / "check.c"


def headers_in(folder: str) -> list[Path]:
    return sorted(path.parent for path in Path(folder).rglob("cuda.h")) if folder else []


HEADERS = sorted({headers for folder in FOLDERS for headers in headers_in(folder)})


def compile_check(headers: Path, source: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    command = [compiler, "-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", f"-I{headers}", source]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not HEADERS, reason="no CUDA headers here; see CUDA_HEADERS")
@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_the_headers_describe_what_is_called(headers: Path) -> None:
    done = compile_check(headers, CHECK)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not HEADERS, reason="no CUDA headers here; see CUDA_HEADERS")
@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("(CUmemcpyAttributes) == 24", "(CUmemcpyAttributes) == 32"),
        ("ACCESS_ORDER_ANY == 3", "ACCESS_ORDER_ANY == 2"),
        ("size_t, size_t *, CUstream);", "size_t, CUstream);"),
        ("(CUdeviceptr, CUdeviceptr, size_t, CUstream)", "(CUdeviceptr, size_t, CUstream)"),
    ],
)
def test_another_interface_is_refused(tmp_path: Path, ours: str, other: str) -> None:
    source = CHECK.read_text()
    assert source.count(ours) == 1
    changed = tmp_path / "check.c"
    changed.write_text(source.replace(ours, other))
    assert compile_check(HEADERS[0], changed).returncode != 0


def test_the_structure_has_the_size_in_the_headers() -> None:
    assert ctypes.sizeof(_MemcpyAttributes) == 24
    assert (_MemcpyAttributes.dst_location.offset, _MemcpyAttributes.flags.offset) == (12, 20)
