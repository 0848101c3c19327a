"""NVIDIA's headers, and programs that are compiled against them and never run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def headers_named(variable: str, header: str) -> list[Path]:
    """Return the folders with a header, below those that an environment variable names, and in
    the usual place."""
    named = [*os.environ.get(variable, "").split(os.pathsep), "/usr/local/cuda/include"]
    folders = (path.parent for folder in named if folder for path in Path(folder).rglob(header))
    return sorted(set(folders))


def compile_check(source: Path, *headers: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    options = [
        "-std=gnu11",
        "-fsyntax-only",
        "-Wall",
        "-Werror",
        *(f"-I{each}" for each in headers),
    ]
    command = [compiler, *options, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
