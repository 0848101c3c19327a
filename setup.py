"""The wheel beside another project's distribution `flexcache`, which pint needs.

Both have the import name `flexcache`, and pip removes a file with whichever package it lists it
for. So the wheel has no file in common with the other one but the empty `py.typed`, and either may
be installed, upgraded and removed in any order:

* `flexcache/__init__.py` is installed as `flexcache.py`. Python prefers a package of that name, so
  this is `flexcache` only where the other project is absent. Its `__init__.py` serves both
  otherwise: the modules here lie in the same folder as its own.
* What that lacks, `from flexcache import KVManager`, a hook at interpreter start adds
  (`flexcache/startup.py`).

Weighed against it:

* An `__init__.py` of ours that has the other's names too: lost when the other one comes last, and
  pint is left with none when this one goes.
* A second import name, `flexcache_kv`, with `flexcache` as its alias: the path that engines are
  given, `flexcache.integration.vllm`, would need a hook too, and each class would exist twice.
* A folder of our own, put before the others by a hook: nothing at all is found where `.pth` files
  are not read (`pip install --target`, `PYTHONPATH`).
* A module for each public name, so that no hook is needed: `flexcache.KVManager` stays unknown.
* An error only: two commands that a user has every right to give would exclude each other.
"""

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TOP_LEVEL = {"__init__": "flexcache.py", "startup": "flexcache_kv_startup.py"}
"""Modules of `flexcache/` that are installed beside it."""

# Whatever goes wrong, the interpreter starts, and prints nothing.
HOOK = 'import sys; exec("try: import flexcache_kv_startup\\nexcept Exception: pass")\n'


class BuildBesideAnother(build_py):
    def get_module_outfile(self, build_dir: str, package: list[str], module: str) -> str:
        if list(package) == ["flexcache"] and module in TOP_LEVEL:
            return os.path.join(build_dir, TOP_LEVEL[module])
        return super().get_module_outfile(build_dir, package, module)

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "flexcache_kv.pth").write_text(HOOK)
            # What a build before this class existed left in `build/` would get into the wheel.
            Path(self.build_lib, "flexcache", "__init__.py").unlink(missing_ok=True)


setup(cmdclass={"build_py": BuildBesideAnother})
