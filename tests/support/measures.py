"""Counts of the package: lines, files, parameters, class names, settings, metrics, words.

Each function measures one checkout; `scripts/measure_code.py` prints them all, and
`tests/unit/test_gates.py` holds their ceilings.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from gates import Module, definitions, imports_of, load_modules

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_and_files(root: Path, *directories: str) -> tuple[int, int]:
    """Return the lines and the number of Python files below directories of a checkout."""
    modules = [module for each in directories for module in load_modules(root, each)]
    return sum(module.source.count("\n") for module in modules), len(modules)


def words_of_docs(root: Path) -> int:
    return sum(len(page.read_text().split()) for page in root.glob("docs/**/*.md"))


def single_importers(package: list[Module], fewer_than: int) -> set[str]:
    """Return the modules of fewer lines that one other module of their own folder imports, and
    no other module at all."""
    known = {module.name for module in package}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in package:
        for each in imports_of(module, known):
            importers[each.target].add(module.name)
    return {
        module.name
        for module in package
        if not module.place.endswith("__init__.py")
        and module.source.count("\n") < fewer_than
        and len(users := importers[module.name] - {module.name}) == 1
        and users.pop().rpartition(".")[0] == module.name.rpartition(".")[0]
    }


def shared_class_names(package: list[Module]) -> dict[str, list[str]]:
    """Return the names that several public classes have, with their places."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in package:
        for path, node in definitions(module.tree):
            if isinstance(node, ast.ClassDef) and path == node.name and not path.startswith("_"):
                places[node.name].append(module.place)
    return {name: found for name, found in places.items() if len(found) > 1}


def long_parameter_lists(package: list[Module]) -> dict[str, int]:
    """Return the functions and constructors with more parameters than allowed: 6, constructors 7,
    public names of `flexcache` itself 10. `self` does not count."""
    public = _public_names(package)
    found = {}
    for module in package:
        for path, node in definitions(module.tree):
            if isinstance(node, ast.ClassDef) or node.name == "_":
                continue
            count = _num_parameters(node, is_method="." in path)
            limit = 7 if node.name == "__init__" else 6
            if path.split(".")[0] in public or _is_command(node):
                limit = 10
            if count > limit and not _is_command(node):
                found[f"{module.place}::{path}"] = count
    return found


def _public_names(package: list[Module]) -> set[str]:
    face = next(module for module in package if module.name == "flexcache")
    return {
        element.value
        for node in ast.walk(face.tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for element in ast.walk(node.value)
        if isinstance(element, ast.Constant)
    }


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> int:
    arguments = node.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    return count - (is_method and not static)


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a command line's, whose options are parameters."""
    arguments = (*node.args.args, *node.args.kwonlyargs)
    annotations = [each.annotation for each in arguments if each.annotation is not None]
    return any("typer." in ast.unparse(each) for each in annotations)


def complex_functions(package: list[Module], more_than: int) -> dict[str, int]:
    """Return the functions with more branches than allowed (McCabe's measure)."""
    found = {}
    for module in package:
        for path, node in definitions(module.tree):
            if not isinstance(node, ast.ClassDef):
                measure = 1 + sum(_branches(child) for child in ast.walk(node))
                if measure > more_than:
                    found[f"{module.place}::{path}"] = measure
    return found


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return len(node.ifs) + 1
    if isinstance(node, ast.match_case):
        return not (isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None)
    branching = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)
    return isinstance(node, branching)


def comments_per_100_lines(package: list[Module], *folders: str) -> float:
    """Return comments per 100 lines of code, neither blank nor of a docstring."""
    comments = code = 0
    for module in package:
        if module.name.split(".")[1:2] and module.name.split(".")[1] in folders:
            counted = _comments_and_code(module)
            comments, code = comments + counted[0], code + counted[1]
    return 100 * comments / max(code, 1)


def _comments_and_code(module: Module) -> tuple[int, int]:
    comments = 0
    lines: set[int] = set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            comments += not token.string.startswith(("# --", "# type:", "# noqa", "# fmt:"))
        elif token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return comments, len(lines - set(_docstring_lines(module.tree)))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            if isinstance(node.value.value, str):
                yield from range(node.lineno, node.end_lineno + 1)


def share_of_bodies(package: list[Module]) -> float:
    """Return the share of all lines that are bodies of functions, without their docstrings."""
    bodies = total = 0
    for module in package:
        total += module.source.count("\n")
        lines: set[int] = set()
        for _, node in definitions(module.tree):
            if isinstance(node, FUNCTIONS):
                body = node.body[ast.get_docstring(node) is not None :]
                for child in body:
                    assert child.end_lineno is not None
                    lines.update(range(child.lineno, child.end_lineno + 1))
        bodies += len(lines)
    return bodies / total


def built_once(package: list[Module]) -> tuple[int, int]:
    """Return how many classes with an ``__init__`` of their own one place builds, and of how
    many."""
    names = {
        node.name
        for module in package
        for _, node in definitions(module.tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(each, FUNCTIONS) and each.name == "__init__" for each in node.body)
    }
    calls: Counter[str] = Counter()
    for module in package:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                calls[ast.unparse(node.func).rpartition(".")[2]] += 1
    return sum(calls[name] == 1 for name in names), len(names)


def message_types(package: list[Module]) -> list[str]:
    """Return the classes of messages between processes: tagged structs, and their subclasses."""
    folders = ("protocol", "transfer", "router")
    bases: dict[str, list[str]] = {}
    tagged = set()
    for module in package:
        if module.name.split(".")[1:2] and module.name.split(".")[1] in folders:
            for _, node in definitions(module.tree):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = [ast.unparse(each) for each in node.bases]
                    if any(each.arg in ("tag", "tag_field") for each in node.keywords):
                        tagged.add(node.name)
    return sorted(name for name in bases if tagged & set(_ancestors(name, bases)))


def _ancestors(name: str, bases: dict[str, list[str]]) -> Iterator[str]:
    yield name
    for base in bases.get(name, ()):
        yield from _ancestors(base, bases)


def settings(root: Path) -> tuple[int, int]:
    """Return the rows of settings in the generated page: of the cache, and of the router."""
    text = _page(root, "configuration.md")
    names = set(re.findall(r"^\| `\w+` \| `(FLEXCACHE_\w+)`", text, re.MULTILINE))
    of_router = sum(name.startswith("FLEXCACHE_ROUTER_") for name in names)
    return len(names) - of_router, of_router


def metrics(root: Path) -> int:
    """Return the names of metrics in the generated page."""
    text = _page(root, "metrics.md")
    return len(set(re.findall(r"^\| `(flexcache_\w+)", text, re.MULTILINE)))


def _page(root: Path, name: str) -> str:
    (page,) = root.glob(f"docs/**/{name}")
    return page.read_text()
