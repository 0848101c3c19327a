"""Checks of the code's structure, over syntax trees: sizes, imports, phrases.

Each check returns what it found; `tests/unit/test_gates.py` says what is allowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path

MAX_CLASS_LINES = 600
MAX_METHODS = 45
MAX_MODULE_LINES = 900
MAX_FUNCTION_LINES = 80

_PHRASES = re.compile(
    r'\b(?:nobod[y]|somebod[y]|whoeve[r]|ane[w]|is\s+tol[d])\b|"""O[f] ', re.IGNORECASE
)
_USER_NAME = re.compile(r"""(["'`])nobod[y]\1""")


class When(Enum):
    """When an import happens."""

    AT_ONCE = "with the module"
    LATER = "in a function"
    TYPING = "for type checkers only"


@dataclass(frozen=True)
class Import:
    target: str
    when: When


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        name: Dotted name; that of a package for its ``__init__.py``.
        place: Path in the repository.
    """

    name: str
    place: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        is_package = self.place.endswith("__init__.py")
        return self.name if is_package else self.name.rpartition(".")[0]


@cache
def load_modules(root: Path, directory: str) -> list[Module]:
    """Read all modules below a directory of the repository, once."""
    modules = []
    for path in sorted((root / directory).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, str(path.relative_to(root)), path.read_text()))
    return modules


# -- sizes ----------------------------------------------------------------------------------------


def oversized(module: Module, *, is_test: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the place and the size of everything that is too large.

    Args:
        is_test: The module itself may have any length.
    """
    lines = module.source.count("\n")
    if lines > MAX_MODULE_LINES and not is_test:
        yield module.place, f"{lines} lines"
    for path, node in definitions(module.tree):
        place = f"{module.place}::{path}"
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        if not isinstance(node, ast.ClassDef):
            if lines > MAX_FUNCTION_LINES:
                yield place, f"{lines} lines"
            continue
        methods = sum(isinstance(child, _FUNCTIONS) for child in node.body)
        if lines > MAX_CLASS_LINES or methods > MAX_METHODS:
            yield place, f"{lines} lines, {methods} methods"


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node that may contain definitions or imports."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        children = getattr(tree, field, ())
        if isinstance(children, list):  # the body of a lambda or a conditional is an expression
            yield from children


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Definition]]:
    for node in _statements(tree):
        if isinstance(node, _Definition):
            path = f"{prefix}{node.name}"
            yield path, node
            yield from definitions(node, f"{path}.")
        else:
            yield from definitions(node, prefix)


# -- imports --------------------------------------------------------------------------------------


def imports_of(module: Module, known: Iterable[str]) -> set[Import]:
    """Return the imports of known modules. A name imported from a package may be a module."""
    return set(_imports(module.tree, module.package, set(known), When.AT_ONCE))


def _imports(tree: ast.AST, package: str, known: set[str], when: When) -> Iterator[Import]:
    for node in _statements(tree):
        inner = when
        if isinstance(node, _FUNCTIONS):
            inner = When.LATER if when is When.AT_ONCE else when
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from _imports(ast.Module([child], []), package, known, When.TYPING)
            for child in node.orelse:
                yield from _imports(ast.Module([child], []), package, known, when)
            continue
        for target in _targets(node, package, known):
            yield Import(target, when)
        yield from _imports(node, package, known, inner)


def _targets(node: ast.AST, package: str, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")[: len(package.split(".")) + 1 - node.level]
        base = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
        names = [
            f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
            for alias in node.names
        ]
    else:
        return
    yield from (name for name in names if name in known)


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str, graph: Mapping[str, Iterable[str]], into: list[str]) -> None:
        stack = [(name, iter(sorted(graph.get(name, ()))))]
        seen.add(name)
        while stack:
            _, rest = stack[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                into.append(stack.pop()[0])
            else:
                seen.add(following)
                stack.append((following, iter(sorted(graph.get(following, ())))))

    for name in sorted(arrows):
        if name not in seen:
            visit(name, arrows, order)
    reverse: dict[str, set[str]] = {}
    for name, targets in arrows.items():
        for target in targets:
            reverse.setdefault(target, set()).add(name)
    seen.clear()
    groups = []
    for name in reversed(order):
        if name not in seen:
            group: list[str] = []
            visit(name, reverse, group)
            if len(group) > 1 or name in arrows.get(name, ()):
                groups.append(sorted(group))
    return sorted(groups)


def layer_of(name: str, layers: Sequence[Sequence[str]]) -> int:
    """Return the layer of a module by the part of its name behind the package's.

    Raises:
        KeyError: It is in none.
    """
    part = name.split(".")[1]
    for number, parts in enumerate(layers):
        if part in parts:
            return number
    raise KeyError(name)


# -- phrases --------------------------------------------------------------------------------------


def banned_phrases(text: str) -> list[str]:
    """Return the banned phrases of a text. The quoted user name is not one."""
    return _PHRASES.findall(_USER_NAME.sub("", text))
