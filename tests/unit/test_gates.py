"""Structure and language of the repository: sizes, imports, phrases.

The tables below list what does not pass yet. An entry that is no longer needed fails the test, so
they only shrink.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import (
    MAX_CLASS_LINES,
    MAX_FUNCTION_LINES,
    MAX_METHODS,
    MAX_MODULE_LINES,
    Import,
    Module,
    When,
    banned_phrases,
    circles,
    imports_of,
    layer_of,
    load_modules,
    oversized,
)
from measures import (
    comments_per_100_lines,
    complex_functions,
    lines_and_files,
    long_parameter_lists,
    message_types,
    metrics,
    settings,
    shared_class_names,
    single_importers,
)
from paths import ROOT

LAYERS = (
    (
        "breaker",
        "counters",
        "errors",
        "ids",
        "logs",
        "terminal",
        "processes",
        "startup",
        "stats",
    ),
    ("config",),
    ("storage",),
    ("transfer",),
    ("cache",),
    ("tasks",),
    ("protocol",),
    ("events", "tracing", "metrics", "ui"),
    ("server",),
    ("client",),
    ("manager",),
    ("replay",),
    ("router",),
    ("status", "doctor", "bench", "integration"),
    ("cli",),
)
"""The parts of the package, lowest first. A module imports from its own layer and lower ones."""

STILL_TOO_LARGE = {
    "flexcache/cache/tier.py::Tier": "one data structure, not clearer in pieces",
    "tests/support/task_builders.py::World": "to be split",
}

CEILINGS = {
    "lines of the package": 80_840,
    "files of the package": 267,
    "lines of the router": 17_180,
    "modules under 120 lines with one importer": 2,
    "class names that several classes have": 2,
    "functions with too many parameters": 5,
    "functions more complex than 12": 34,
    "types of messages": 68,
    "settings of the cache": 55,
    "settings of the router": 33,
    "metrics": 124,
}
"""What the package has at most. A ceiling falls with the code. It rises only for a feature that
needs it, with a line in CHANGELOG.md that names the feature."""

MIN_COMMENTS_PER_100_LINES = 5.4
"""In cache, tasks, transfer and server: why a line is as it is, beside the line."""

STILL_UPWARD: dict[str, str] = {}

TEXT_FILES = (".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", "Dockerfile")

STILL_ODD_LANGUAGE = {"scripts/demo_text.txt"}
"""Files that have banned phrases: a story, whose words the answers of the demo depend on."""


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return load_modules(ROOT, "flexcache")


def test_modules_classes_and_functions_have_a_readable_size(package: list[Module]) -> None:
    modules = [*package, *load_modules(ROOT, "benchmarks"), *load_modules(ROOT, "scripts")]
    found = {place: size for module in modules for place, size in oversized(module)}
    for module in load_modules(ROOT, "tests"):
        found.update(oversized(module, is_test=True))
    unexpected = {place: found[place] for place in found.keys() - STILL_TOO_LARGE.keys()}
    assert not unexpected
    assert not STILL_TOO_LARGE.keys() - found.keys(), "these entries are no longer needed"


def test_the_package_stays_below_its_ceilings(package: list[Module]) -> None:
    lines, files = lines_and_files(ROOT, "flexcache")
    of_cache, of_router = settings(ROOT)
    found = {
        "lines of the package": lines,
        "files of the package": files,
        "lines of the router": lines_and_files(ROOT, "flexcache/router")[0],
        "modules under 120 lines with one importer": len(single_importers(package, 120)),
        "class names that several classes have": len(shared_class_names(package)),
        "functions with too many parameters": len(long_parameter_lists(package)),
        "functions more complex than 12": len(complex_functions(package, 12)),
        "types of messages": len(message_types(package)),
        "settings of the cache": of_cache,
        "settings of the router": of_router,
        "metrics": metrics(ROOT),
    }
    assert found.keys() == CEILINGS.keys()
    too_high = {name: count for name, count in found.items() if count > CEILINGS[name]}
    assert not too_high, "`python scripts/measure_code.py` shows the measures"


def test_comments_tell_why(package: list[Module]) -> None:
    found = comments_per_100_lines(package, "cache", "tasks", "transfer", "server")
    assert found >= MIN_COMMENTS_PER_100_LINES


def test_no_modules_import_each_other(package: list[Module]) -> None:
    known = {module.name for module in package}
    arrows = {
        module.name: {each.target for each in imports_of(module, known) if is_at_once(each)}
        for module in package
    }
    assert circles(arrows) == []


def is_at_once(each: Import) -> bool:
    return each.when is When.AT_ONCE


def test_no_import_leads_to_a_higher_layer(package: list[Module]) -> None:
    found = set(upward_imports(package))
    assert not found - STILL_UPWARD.keys()
    assert not STILL_UPWARD.keys() - found, "these entries are no longer needed"


def upward_imports(package: list[Module]) -> Iterator[str]:
    """Yield the imports that run up, also those in functions and for type checkers."""
    known = {module.name for module in package}
    for module in package:
        if module.name == "flexcache":  # the package face imports the public names
            continue
        for target in {each.target for each in imports_of(module, known)}:
            is_upward = target == "flexcache" or layer_of(target, LAYERS) > layer_of(
                module.name, LAYERS
            )
            if is_upward:
                yield f"{module.name} -> {target}"


def test_tests_and_benchmarks_import_no_scripts() -> None:
    scripts = {module.name for module in load_modules(ROOT, "scripts")}
    names = {name.removeprefix("scripts.") for name in scripts}
    for module in [*load_modules(ROOT, "tests"), *load_modules(ROOT, "benchmarks")]:
        assert not {each.target for each in imports_of(module, names | scripts)}, module.place


def test_the_language_is_plain() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not in a git checkout")
    places = [place for place in listing.stdout.split("\0") if place.endswith(TEXT_FILES)]
    assert len(places) > 100
    found = {
        place: phrases
        for place in places
        if (ROOT / place).exists() and (phrases := banned_phrases((ROOT / place).read_text()))
    }
    unexpected = {place: found[place] for place in found.keys() - STILL_ODD_LANGUAGE}
    assert not unexpected
    assert not STILL_ODD_LANGUAGE - found.keys(), "these entries are no longer needed"


# -- the checks themselves -------------------------------------------------------------------------


def module_of(source: str, name: str = "pkg.a.one", place: str = "pkg/a/one.py") -> Module:
    return Module(name, place, source)


def lines(count: int, indent: int = 0) -> str:
    return (" " * indent + "x = 1\n") * count


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (lines(MAX_MODULE_LINES), {}),
        (lines(MAX_MODULE_LINES + 1), {"pkg/a/one.py": "901 lines"}),
        ("def f():\n" + lines(MAX_FUNCTION_LINES - 1, 4), {}),
        ("def f():\n" + lines(MAX_FUNCTION_LINES, 4), {"pkg/a/one.py::f": "81 lines"}),
        ("class A:\n" + lines(MAX_CLASS_LINES - 1, 4), {}),
        ("class A:\n" + lines(MAX_CLASS_LINES, 4), {"pkg/a/one.py::A": "601 lines, 0 methods"}),
        (
            "class A:\n" + "    def f(self): ...\n" * (MAX_METHODS + 1),
            {"pkg/a/one.py::A": "47 lines, 46 methods"},
        ),
        (
            "if True:\n    class A:\n        async def f(self):\n" + lines(MAX_FUNCTION_LINES, 12),
            {"pkg/a/one.py::A.f": "81 lines"},
        ),
    ],
)
def test_what_is_too_large_is_found(source: str, found: dict[str, str]) -> None:
    assert dict(oversized(module_of(source))) == found


def test_a_test_module_may_have_any_length_and_its_classes_may_not() -> None:
    source = "class A:\n" + lines(MAX_MODULE_LINES, 4)
    assert [place for place, _ in oversized(module_of(source), is_test=True)] == ["pkg/a/one.py::A"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pkg.b", {Import("pkg.b", When.AT_ONCE)}),
        ("import numpy", set()),
        ("from pkg import b", {Import("pkg.b", When.AT_ONCE)}),
        ("from pkg.b import name", {Import("pkg.b", When.AT_ONCE)}),
        ("from pkg.b import two as other", {Import("pkg.b.two", When.AT_ONCE)}),
        ("from . import two", {Import("pkg.a.two", When.AT_ONCE)}),
        ("from .two import name", {Import("pkg.a.two", When.AT_ONCE)}),
        ("from ..b import name", {Import("pkg.b", When.AT_ONCE)}),
        ("def f():\n    import pkg.b", {Import("pkg.b", When.LATER)}),
        ("class A:\n    import pkg.b", {Import("pkg.b", When.AT_ONCE)}),
        ("try:\n    import pkg.b\nexcept ImportError: ...", {Import("pkg.b", When.AT_ONCE)}),
        (
            "if TYPE_CHECKING:\n    import pkg.b\nelse:\n    import pkg.a.two",
            {Import("pkg.b", When.TYPING), Import("pkg.a.two", When.AT_ONCE)},
        ),
        (
            "if typing.TYPE_CHECKING:\n    from pkg.b import name",
            {Import("pkg.b", When.TYPING)},
        ),
    ],
)
def test_imports_are_found_with_the_time_they_happen(source: str, found: set[Import]) -> None:
    known = {"pkg", "pkg.a", "pkg.a.one", "pkg.a.two", "pkg.b", "pkg.b.two"}
    assert imports_of(module_of(source), known) == found


def test_relative_imports_of_a_package_start_from_itself() -> None:
    package = module_of("from .two import name", "pkg.a", "pkg/a/__init__.py")
    assert imports_of(package, {"pkg.a.two"}) == {Import("pkg.a.two", When.AT_ONCE)}


@pytest.mark.parametrize(
    ("arrows", "found"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "bc", "b": "d", "c": "d", "d": ""}, []),
        ({"a": "b", "b": "a"}, [["a", "b"]]),
        ({"a": "a"}, [["a"]]),
        (
            {"x": "a", "a": "b", "b": "c", "c": "a", "d": "ex", "e": "d"},
            [["a", "b", "c"], ["d", "e"]],
        ),
    ],
)
def test_circles_are_found(arrows: dict[str, str], found: list[list[str]]) -> None:
    assert circles(arrows) == found


def test_a_part_that_is_in_no_layer_is_named() -> None:
    assert layer_of("pkg.b.two", [["a"], ["b", "c"]]) == 1
    with pytest.raises(KeyError, match=r"pkg\.d"):
        layer_of("pkg.d", [["a"], ["b", "c"]])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a caller, a peer, anewt, nobodyx", 0),
        ("for no" + "body, some" + "body and who" + "ever; made a" + "new", 4),
        ("No" + "body waits", 1),
        ("it is" + " told,\nand she is\n told", 2),
        ('"""' + "Of a task" + '"""', 1),
        ('"""Often"""  # Of course', 0),
        ('the user "no' + 'body" and `no' + "body`", 0),
        ('raise ValueError("no' + 'body is there")', 1),
    ],
)
def test_banned_phrases_are_found(text: str, count: int) -> None:
    assert len(banned_phrases(text)) == count


def test_modules_are_read_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "a").mkdir(parents=True)
    for place in ("pkg/__init__.py", "pkg/a/__init__.py", "pkg/a/one.py"):
        (tmp_path / place).write_text("x = 1\n")
    names = {module.name: module.place for module in load_modules(tmp_path, "pkg")}
    assert names == {
        "pkg": "pkg/__init__.py",
        "pkg.a": "pkg/a/__init__.py",
        "pkg.a.one": "pkg/a/one.py",
    }
