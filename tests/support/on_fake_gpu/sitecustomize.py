"""Gives fake GPUs to every Python process that has this directory on its PYTHONPATH; see
`fake_gpu_process`. They are installed with torch: processes that do without it start quickly.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class TorchFinder(MetaPathFinder):
    """Finds torch, and installs the fakes once it has been imported."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            import fake_gpu_process

            fake_gpu_process.install()

        vars(spec.loader)["exec_module"] = execute_and_install
        return spec


sys.meta_path.insert(0, TorchFinder())
