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
    usual = Path("/usr/local/cuda/include").rglob(header)
    return sorted({path.parent for path in (*files_named(variable, header), *usual)})


def files_named(variable: str, name: str) -> list[Path]:
    """Return the files of this name below the folders that an environment variable names."""
    folders = filter(None, os.environ.get(variable, "").split(os.pathsep))
    return sorted(path for folder in folders for path in Path(folder).rglob(name))


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
