"""Print the measures of a checkout: sizes, paths of requests, settings, metrics, words.

    python scripts/measure_code.py [CHECKOUT] [--json]

To compare two states of the code, measure a checkout of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.append(str(HERE / "tests" / "support"))

from gates import load_modules  # noqa: E402
from measures import (  # noqa: E402
    built_once,
    comments_per_100_lines,
    complex_functions,
    lines_and_files,
    long_parameter_lists,
    message_types,
    metrics,
    settings,
    share_of_bodies,
    shared_class_names,
    single_importers,
    words_of_docs,
)


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    places = [each for each in arguments if each != "--json"]
    root = Path(places[0]).resolve() if places else HERE
    rows = {**sizes_of(root), **shape_of(root), **paths_of(root), **pages_of(root)}
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")


def sizes_of(root: Path) -> dict[str, str]:
    """Return lines and files of the package, of each folder of it, and of the tests."""
    folders = sorted(path.parent.name for path in (root / "flexcache").glob("*/*.py"))
    named = {f"flexcache/{each}": f"flexcache/{each}" for each in dict.fromkeys(folders)}
    rows = {}
    for name, place in {"flexcache": "flexcache", **named, "tests": "tests"}.items():
        lines, files = lines_and_files(root, place)
        rows[name] = f"{lines:,} lines, {files} files, {lines // max(files, 1)} a file"
    return rows


def shape_of(root: Path) -> dict[str, str]:
    package = load_modules(root, "flexcache")
    once, classes = built_once(package)
    comments = comments_per_100_lines(package, "cache", "tasks", "transfer", "server")
    return {
        "modules under 120 lines with one importer": f"{len(single_importers(package, 120))}",
        "classes with a constructor, built in one place": f"{once} of {classes}",
        "class names that several classes have": f"{len(shared_class_names(package))}",
        "functions with too many parameters": f"{len(long_parameter_lists(package))}",
        "functions more complex than 12": f"{len(complex_functions(package, 12))}",
        "share of lines in bodies of functions": f"{share_of_bodies(package):.0%}",
        "comments per 100 lines of cache, tasks, transfer, server": f"{comments:.1f}",
        "types of messages between processes": f"{len(message_types(package))}",
    }


def paths_of(root: Path) -> dict[str, str]:
    """Return the files and calls of a get, a put and a routed request, run in that checkout."""
    search = os.pathsep.join(str(each) for each in (root, root / "tests" / "support"))
    rows = {}
    for what in ("get", "put", "routed"):
        output = subprocess.run(
            [sys.executable, str(HERE / "tests" / "support" / "traced_paths.py"), what],
            env={**os.environ, "PYTHONPATH": search},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        calls = json.loads(output.splitlines()[-1])
        rows[f"path of a {what}"] = f"{len(calls)} files, {sum(calls.values())} calls"
    return rows


def pages_of(root: Path) -> dict[str, str]:
    of_cache, of_router = settings(root)
    return {
        "settings of the cache, of the router": f"{of_cache}, {of_router}",
        "metrics": f"{metrics(root)}",
        "words of docs/": f"{words_of_docs(root):,}",
        "words of README.md": f"{len((root / 'README.md').read_text().split()):,}",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
