"""The driver's interface as `copy_driver` calls it, compiled against NVIDIA's headers.

`scripts/test.sh` fetches the headers of the oldest and newest releases (no GPU needed) and names
their folders in CUDA_HEADERS.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from fake_gpu import SOURCES
from nvidia_headers import compile_check, headers_named

from flexcache.transfer.cuda_driver import _MemcpyAttributes

pytestmark = pytest.mark.whole


CHECK = SOURCES / "abi" / "check.c"
HEADERS = headers_named("CUDA_HEADERS", "cuda.h")


@pytest.mark.skipif(not HEADERS, reason="no CUDA headers here; see CUDA_HEADERS")
@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_the_headers_describe_what_is_called(headers: Path) -> None:
    done = compile_check(CHECK, headers)
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
    assert compile_check(changed, HEADERS[0]).returncode != 0


def test_the_structure_has_the_size_in_the_headers() -> None:
    assert ctypes.sizeof(_MemcpyAttributes) == 24
    assert (_MemcpyAttributes.dst_location.offset, _MemcpyAttributes.flags.offset) == (12, 20)
