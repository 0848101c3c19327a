"""Start-up hook that adds FlexCache to the package `flexcache` of another project.

Installed as `flexcache_kv_startup.py` beside the packages, with a `.pth` file that imports it
(`setup.py` says why). Nothing else of FlexCache runs at start: names are looked up on first use.
"""

import os
import sys

# Neither `typing` nor `__future__` is imported: they take longer than all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_SITE = os.path.dirname(os.path.abspath(__file__))
_FACE = os.path.join(_SITE, "flexcache.py")


class Finder:
    """Finds the other project's package wherever Python would, and extends it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "flexcache":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin == _FACE:
            # Ours comes first. The other one may be in another folder: the user's, the system's.
            spec = PathFinder.find_spec(name, [each for each in sys.path if each != _SITE])
        if spec is None or spec.loader is None or not spec.submodule_search_locations:
            return None
        if not os.path.exists(os.path.join(spec.submodule_search_locations[0], "flexcache.py")):
            return None  # not the other project: a checkout of this one in PYTHONPATH
        if (modules := os.path.join(_SITE, "flexcache")) not in spec.submodule_search_locations:
            spec.submodule_search_locations.append(modules)
        run = spec.loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            run(module)
            module.__dict__.setdefault("__getattr__", _look_up)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _look_up(name: str) -> "Any":
    """Return one of FlexCache's public names, which the other project does not have."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("flexcache", _FACE)
    assert spec is not None and spec.loader is not None
    face = module_from_spec(spec)
    spec.loader.exec_module(face)
    return getattr(face, name)


sys.meta_path.insert(0, Finder)
